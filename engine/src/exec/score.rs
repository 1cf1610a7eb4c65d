//! Log-probabilities of tokens that were given rather than drawn: which rows of a step are wanted, and what they hold.
//! Decides nothing about requests.

use crate::{
    request::{RejectReason, Request, TokenId},
    sample::{rank_of, raw_logprobs},
    sched::RawLogprobs,
};

/// What an executor gives beside tokens. What it does not give is refused when it is asked for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Abilities {
    /// Log-probabilities of a prompt's own tokens: [`Executor::score`](super::Executor::score) works.
    pub scores_prompts: bool,
    /// Log-probabilities of the tokens that [`Request::logprob_tokens`] names.
    pub names_logprobs: bool,
}

impl Abilities {
    /// All that there is.
    pub const ALL: Self = Self { scores_prompts: true, names_logprobs: true };

    /// Refuses a request for what is not there.
    pub(crate) fn check(&self, request: &Request) -> Result<(), RejectReason> {
        if request.prompt_logprobs.is_some() && !self.scores_prompts {
            let (asked, field) = ("log-probabilities of prompts", "prompt_logprobs");
            return Err(RejectReason::NotOnThisDevice { asked, field });
        }
        if !request.logprob_tokens.is_empty() && !self.names_logprobs {
            let (asked, field) = ("log-probabilities of tokens by name", "logprob_token_ids");
            return Err(RejectReason::NotOnThisDevice { asked, field });
        }
        Ok(())
    }
}

/// Consecutive rows of one chunk that are wanted.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreSpec {
    /// Which of the step's chunks.
    pub chunk_idx: usize,
    /// The first of the chunk's rows.
    pub first_row: usize,
    /// What stands behind each of them in the prompt.
    pub tokens: Vec<TokenId>,
    /// Likeliest tokens wanted beside.
    pub k: u8,
}

/// What a row says of the token behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The token.
    pub token: TokenId,
    /// Tokens that are likelier, and one.
    pub rank: u32,
    /// Its own and the likeliest ones'.
    pub logprobs: RawLogprobs,
}

impl Score {
    /// Of a token after these logits.
    pub(super) fn new(logits: &[f32], token: TokenId, k: u8) -> Self {
        Self { token, rank: rank_of(logits, token), logprobs: raw_logprobs(logits, token, usize::from(k), &[]) }
    }
}
