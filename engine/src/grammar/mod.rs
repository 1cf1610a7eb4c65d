//! Grammars: JSON schemas, regular expressions and Lark, compiled over the model's vocabulary by llguidance into what
//! `constraint` asks of a grammar. Compiling takes from microseconds to seconds and belongs on a thread of its own; what
//! is compiled is shared by all requests that ask for the same.

mod cache;
mod matcher;
mod notation;
mod spec;
#[cfg(test)]
mod tests;
mod vocabulary;

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::{ParserFactory, earley::SlicedBiasComputer};

use crate::{constraint::Constraint, request::TokenId, text::Tokenizer};
use cache::Cache;
use matcher::Compiled;

pub use notation::{lark_from_ebnf, quoted};
pub use spec::{GrammarSpec, MAX_CHOICES, MAX_GRAMMAR_BYTES};

/// Why there is no grammar.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GrammarError {
    /// It is larger than what is compiled at all.
    #[error("it has {found} {unit}, the limit is {limit}: send a smaller one")]
    TooLarge {
        /// What was counted.
        unit: &'static str,
        /// How many.
        found: usize,
        /// How many there may be.
        limit: usize,
    },
    /// It cannot be compiled, or nothing matches it.
    #[error("{0}")]
    Refused(String),
    /// The model's tokenizer cannot be used for grammars.
    #[error("this model's tokenizer takes no grammar: {0}")]
    Vocabulary(String),
}

/// Compiles grammars for one model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    cache: Mutex<Cache>,
}

/// Where a grammar came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Source {
    /// It was compiled now.
    Compiled,
    /// An earlier request asked for the same.
    Cached,
}

/// Longest reason of a refusal in characters: llguidance repeats the grammar.
const REASON_CHARS: usize = 600;

impl GrammarCompiler {
    /// A compiler over a model's vocabulary; `eos` are the tokens that may end a completion. Takes a fraction of a second
    /// for a large vocabulary.
    pub fn new(tokenizer: &Arc<Tokenizer>, eos: &[TokenId]) -> Result<Self, GrammarError> {
        let env = vocabulary::environment(tokenizer, eos).map_err(GrammarError::Vocabulary)?;
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, toktrie::InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| GrammarError::Vocabulary(format!("{error:#}")))?;
        factory.quiet();
        Ok(Self { factory, cache: Mutex::default() })
    }

    /// A grammar, ready for requests. Blocks while it compiles.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<(Constraint, Source), GrammarError> {
        spec.check_size()?;
        let key = spec.key();
        if let Some(found) = self.cache().get(&key) {
            return Ok((found, Source::Cached));
        }
        let constraint = Constraint(Arc::new(self.compiled(spec)?));
        self.cache().insert(key, constraint.clone());
        Ok((constraint, Source::Compiled))
    }

    fn compiled(&self, spec: &GrammarSpec) -> Result<Compiled, GrammarError> {
        let parser = self.factory.create_parser(spec.grammar()?).map_err(|error| error.to_string());
        parser.and_then(Compiled::new).map_err(|reason| GrammarError::Refused(excerpt(&reason)))
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        // Every critical section leaves a valid cache.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

/// The reason without what llguidance says about its own state.
fn excerpt(reason: &str) -> String {
    let reason = reason.split("\n<state>").next().unwrap_or(reason).trim();
    match reason.char_indices().nth(REASON_CHARS) {
        Some((end, _)) => format!("{} …", &reason[..end]),
        None => reason.to_owned(),
    }
}
