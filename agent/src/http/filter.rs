//! Tokens that a client allows, and words that it bans: the fields, and what they are to the engine.

use std::sync::Arc;

use stoker_engine::{TokenId, Tokenizer, constraint::Constraint, token_filter::TokenFilter};

use crate::http::{error::ApiError, fields::Fields, params};

/// Words one request may ban, and the longest of them.
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD_CHARS: usize = 256;

/// What a client allows and bans.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Filter {
    /// The only tokens that may come; none: all of them.
    allowed: Vec<TokenId>,
    /// Texts that may not come.
    bad_words: Vec<String>,
}

impl Filter {
    /// Takes the fields.
    pub(crate) fn take(fields: &mut Fields, vocab_size: u32) -> Result<Self, ApiError> {
        let is_sent = fields.has("allowed_token_ids");
        let allowed = params::tokens(fields, "allowed_token_ids", vocab_size, None)?;
        if is_sent && allowed.is_empty() {
            let message = "`allowed_token_ids` is empty, so that no token could come: send some, or remove it";
            return Err(ApiError::empty_array("allowed_token_ids", message));
        }
        let bad_words: Vec<String> = fields.take("bad_words")?.unwrap_or_default();
        if bad_words.len() > MAX_BAD_WORDS {
            let message = format!("`bad_words` has {} words, at most {MAX_BAD_WORDS} are supported", bad_words.len());
            return Err(ApiError::invalid("bad_words", message));
        }
        let is_word = |word: &String| !word.trim().is_empty() && word.chars().count() <= MAX_BAD_WORD_CHARS;
        if !bad_words.iter().all(is_word) {
            let message = format!("`bad_words` must be words of 1 to {MAX_BAD_WORD_CHARS} characters");
            return Err(ApiError::invalid("bad_words", message));
        }
        Ok(Self { allowed, bad_words })
    }

    /// The constraint that keeps to it, and to `inner`.
    pub(crate) fn around(
        &self,
        inner: Option<Constraint>,
        tokenizer: &Tokenizer,
    ) -> Result<Option<Constraint>, ApiError> {
        if self.allowed.is_empty() && self.bad_words.is_empty() {
            return Ok(inner);
        }
        let banned = self.bad_words.iter().map(|word| spellings(word, tokenizer)).collect::<Result<Vec<_>, _>>()?;
        let filter = TokenFilter::new(&self.allowed, banned.concat(), inner);
        Ok(Some(Constraint(Arc::new(filter))))
    }
}

/// A word is other tokens at the beginning of a text than behind a space.
fn spellings(word: &str, tokenizer: &Tokenizer) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let word = word.trim_start();
    let encode = |text: &str| {
        let tokens = tokenizer.encode(text, false);
        tokens.map_err(|error| ApiError::invalid("bad_words", format!("`bad_words`: {error}")))
    };
    let mut spellings = vec![encode(word)?, encode(&format!(" {word}"))?];
    spellings.dedup();
    spellings.retain(|tokens| !tokens.is_empty());
    Ok(spellings)
}
