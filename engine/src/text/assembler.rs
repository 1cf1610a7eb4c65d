//! Turns one request's tokens into text: bytes, whole characters, stop strings, log-probability texts.

use std::sync::Arc;

use super::{Detokenizer, StopMatcher, StopScan, Tokenizer};
use crate::{
    request::{PositionLogprobs, StopParams, TokenId, TokenLogprob},
    sched::RawLogprobs,
};

/// The text side of one request.
#[derive(Debug)]
pub(crate) struct TextAssembler {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// Tokens that end the text and are no part of it.
    silent_ends: Vec<TokenId>,
    shown_specials: Arc<[TokenId]>,
    min_tokens: u32,
    n_tokens: u32,
}

impl TextAssembler {
    pub(crate) fn new(stop: &StopParams) -> Self {
        Self {
            detokenizer: Detokenizer::default(),
            stop: StopMatcher::new(stop.stop.clone(), stop.include_stop),
            silent_ends: if stop.include_stop { Vec::new() } else { stop.stop_token_ids.clone() },
            shown_specials: Arc::clone(&stop.shown_specials),
            min_tokens: stop.min_tokens,
            n_tokens: 0,
        }
    }

    /// Adds a token. Special tokens have no text of their own, but those that somebody reads.
    pub(crate) fn push(&mut self, token: TokenId, tokenizer: &Tokenizer) -> StopScan {
        self.n_tokens += 1;
        let is_silent_end = self.n_tokens >= self.min_tokens && self.silent_ends.contains(&token);
        let is_silent = tokenizer.is_special(token) && !self.shown_specials.contains(&token);
        let is_hidden = is_silent_end || is_silent;
        let bytes = if is_hidden { Vec::new() } else { tokenizer.token_bytes(token) };
        let text = self.detokenizer.push(&bytes);
        if self.n_tokens < self.min_tokens {
            return StopScan { text: self.stop.pass(&text), matched: None };
        }
        self.stop.push(&text)
    }

    /// Ends the text: whatever was held back is part of it.
    pub(crate) fn finish(&mut self) -> String {
        let rest = self.detokenizer.finish();
        self.stop.pass(&rest)
    }
}

/// Adds texts to log-probabilities.
pub(crate) fn spell_logprobs(token: TokenId, raw: RawLogprobs, tokenizer: &Tokenizer) -> PositionLogprobs {
    let spell = |token, logprob| {
        let bytes = tokenizer.token_bytes(token);
        TokenLogprob { token, text: String::from_utf8_lossy(&bytes).into_owned(), bytes, logprob }
    };
    PositionLogprobs {
        chosen: spell(token, raw.chosen),
        top: raw.top.into_iter().map(|(token, logprob)| spell(token, logprob)).collect(),
    }
}
