//! A compiled grammar and one completion's way through it.

use std::sync::{Mutex, PoisonError};

use llguidance::TokenParser;

use super::vocabulary;
use crate::{
    constraint::{Grammar, Matcher},
    request::TokenId,
};

/// What llguidance says where no token can begin.
const NO_TOKEN: &str = "NoExtensionBias";

/// A grammar at the beginning of a completion. Ways through it share what is learnt about its lexemes.
pub(super) struct Compiled {
    start: Mutex<llguidance::Matcher>,
    /// The same where every spelling of a text is allowed.
    any_spelling: Mutex<llguidance::Matcher>,
}

impl Compiled {
    /// Computes the first mask, which the first request would wait for otherwise.
    pub(super) fn new(parser: TokenParser) -> Result<Self, String> {
        let mut spelt_anyhow = parser.clone();
        spelt_anyhow.token_env = vocabulary::any_spelling(&parser.token_env);
        let [mut start, any_spelling] = [parser, spelt_anyhow].map(|parser| llguidance::Matcher::new(Ok(parser)));
        match start.compute_mask_or_eos() {
            Ok(first) if !first.is_zero() => {}
            Err(error) if !error.to_string().contains(NO_TOKEN) => return Err(format!("{error:#}")),
            _ => return Err("nothing matches it".into()),
        }
        Ok(Self { start: Mutex::new(start), any_spelling: Mutex::new(any_spelling) })
    }
}

fn walk_from(start: &Mutex<llguidance::Matcher>) -> Box<dyn Matcher> {
    let start = start.lock().unwrap_or_else(PoisonError::into_inner);
    Box::new(Walk { inner: start.clone() })
}

impl Grammar for Compiled {
    fn matcher(&self) -> Box<dyn Matcher> {
        walk_from(&self.start)
    }

    fn any_spelling(&self) -> Box<dyn Matcher> {
        walk_from(&self.any_spelling)
    }
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Compiled").finish_non_exhaustive()
    }
}

/// One completion.
struct Walk {
    inner: llguidance::Matcher,
}

impl Matcher for Walk {
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String> {
        let allowed = self.inner.compute_mask_or_eos().map_err(|error| format!("{error:#}"))?;
        // The model's vocabulary may be larger than the tokenizer's: no text, not allowed.
        let n_words = mask.len().min(allowed.as_slice().len());
        mask[..n_words].copy_from_slice(&allowed.as_slice()[..n_words]);
        Ok(())
    }

    fn accept(&mut self, token: TokenId) -> Result<(), String> {
        // Behind the end, with `ignore_eos`, only end tokens come.
        if self.inner.is_stopped() && !self.inner.is_error() {
            return Ok(());
        }
        self.inner.consume_token(token).map_err(|error| format!("{error:#}"))
    }
}

impl std::fmt::Debug for Walk {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Walk").finish_non_exhaustive()
    }
}
