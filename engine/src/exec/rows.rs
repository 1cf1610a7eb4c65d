//! What rows of a prompt hold beside the next token: log-probabilities of tokens that were given rather than drawn, or the model's
//! outputs. Decides nothing about requests.

use crate::{
    request::{RejectReason, Request, TokenId},
    sample::{rank_of, raw_logprobs},
    sched::RawLogprobs,
};

/// What an executor gives beside tokens. What it does not give is refused when it is asked for.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Abilities {
    /// Log-probabilities of a prompt's own tokens, and its embedding: [`Executor::read`](super::Executor::read) works.
    pub reads_prompts: bool,
    /// Log-probabilities of the tokens that [`Request::logprob_tokens`] names.
    pub names_logprobs: bool,
}

impl Abilities {
    /// All that there is.
    pub const ALL: Self = Self { reads_prompts: true, names_logprobs: true };

    /// Refuses a request for what is not there.
    pub(crate) fn check(&self, request: &Request) -> Result<(), RejectReason> {
        if request.pooling.is_some() && !self.reads_prompts {
            return Err(RejectReason::NotOnThisDevice { asked: "embeddings", field: "input" });
        }
        if request.prompt_logprobs.is_some() && !self.reads_prompts {
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
pub struct RowsSpec {
    /// Which of the step's chunks.
    pub chunk_idx: usize,
    /// The first of the chunk's rows.
    pub first_row: usize,
    /// What of them.
    pub wanted: RowsWanted,
}

/// What is wanted of rows.
#[derive(Clone, Debug, PartialEq)]
pub enum RowsWanted {
    /// How likely tokens were.
    Scores {
        /// What stands behind each row in the prompt.
        tokens: Vec<TokenId>,
        /// Likeliest tokens wanted beside.
        k: u8,
    },
    /// What the model's last norm gives.
    Outputs {
        /// How many rows.
        n_rows: usize,
    },
}

/// What rows hold.
#[derive(Clone, Debug, PartialEq)]
pub enum RowsRead {
    /// One entry a row.
    Scores(Vec<Score>),
    /// `[n_rows, width]`, row after row.
    Outputs {
        /// All of them.
        values: Vec<f32>,
        /// The model's hidden size.
        width: usize,
    },
    /// The same added up, by a device whose outputs have so few bits that no order of adding them matters.
    Sum {
        /// One for each column.
        sums: Vec<f64>,
        /// How many rows.
        n_rows: usize,
    },
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
