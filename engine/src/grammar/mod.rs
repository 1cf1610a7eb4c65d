//! Grammars: JSON schemas, regular expressions and Lark, compiled over the model's vocabulary by llguidance into what
//! `constraint` asks of a grammar. Compiling takes from microseconds to seconds and belongs on a thread of its own; what
//! is compiled is shared by all requests that ask for the same.

mod cache;
mod lexeme_masks;
mod matcher;
mod memory;
mod notation;
mod refusal;
mod spec;
#[cfg(test)]
mod tests;
mod tree;
mod vocabulary;
mod way;
mod words;

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use llguidance::{ParserFactory, TokenParser, earley::SlicedBiasComputer};

use crate::{constraint::Constraint, request::TokenId, text::Tokenizer};
use cache::Cache;
use lexeme_masks::LexemeMasks;
use matcher::Compiled;
use memory::{MAX_BYTES, Memory};
use refusal::{excerpt, mistake_in_regex};
use words::Words;

pub use notation::{lark_from_ebnf, quoted};
pub use spec::{GrammarSpec, MAX_CHOICES, MAX_GRAMMAR_BYTES, MAX_LARK_BYTES};

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
    words: Arc<Words>,
    memory: Arc<Memory>,
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

/// Stack of the thread that compiles. llguidance goes down a chain of rules or references by recursion, and what is sent may be one
/// chain: some 3 KB of stack for each 5 bytes of a grammar. Only what is used of it becomes memory.
const STACK_BYTES: usize = 256 << 20;

/// Alternatives that may be open at one place of a text. llguidance's own limit is 2,000, and a grammar beyond it compiles and ends the answer
/// at its next token: a rule with as many literals as `MAX_LARK_BYTES` has room for stays below this one. What a mask may cost is bounded beside it.
const MAX_ITEMS_IN_ROW: usize = 32 * 1024;

/// States that a lexer may come to: 1 to 2 KB each. llguidance's own limit is 250,000; a completion may get a lexer to itself.
const MAX_LEXER_STATES: usize = 100_000;

impl GrammarCompiler {
    /// A compiler over a model's vocabulary; `eos` are the tokens that may end a completion. Takes a fraction of a second
    /// for a large vocabulary.
    pub fn new(tokenizer: &Arc<Tokenizer>, eos: &[TokenId]) -> Result<Self, GrammarError> {
        let env = vocabulary::environment(tokenizer, eos).map_err(GrammarError::Vocabulary)?;
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, toktrie::InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| GrammarError::Vocabulary(format!("{error:#}")))?;
        factory.quiet();
        factory.limits_mut().max_items_in_row = MAX_ITEMS_IN_ROW;
        factory.limits_mut().max_lexer_states = MAX_LEXER_STATES;
        let words = Arc::new(Words::new(factory.slicer()));
        Ok(Self { factory, words, memory: Memory::new(MAX_BYTES), cache: Mutex::default() })
    }

    /// A grammar, ready for requests. Blocks while it compiles.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<(Constraint, Source), GrammarError> {
        spec.check_size()?;
        let key = spec.key();
        if let Some(found) = self.cache().get(&key) {
            return Ok((found, Source::Cached));
        }
        self.make_room();
        let constraint = Constraint(Arc::new(with_stack(|| self.compiled(spec, key.len()))?));
        self.cache().insert(key, constraint.clone());
        Ok((constraint, Source::Compiled))
    }

    /// Bytes that all grammars hold, about: those of requests, and those kept for the next.
    pub fn held_bytes(&self) -> usize {
        self.memory.held()
    }

    fn compiled(&self, spec: &GrammarSpec, text_bytes: usize) -> Result<Compiled, GrammarError> {
        let parser = self.parser(spec)?;
        let (words, memory) = (Arc::clone(&self.words), Arc::clone(&self.memory));
        Compiled::new(parser, words, memory, text_bytes).map_err(GrammarError::Refused)
    }

    /// What nobody uses, and may be large by what requests made of it, goes first.
    fn make_room(&self) {
        while self.memory.is_tight() {
            // Dropped behind the lock.
            let Some(unused) = self.cache().take_unused() else { return };
            drop(unused);
        }
    }

    fn parser(&self, spec: &GrammarSpec) -> Result<TokenParser, GrammarError> {
        let parser = self.factory.create_parser(spec.grammar()?);
        let mistake = || if let GrammarSpec::Regex(regex) = spec { mistake_in_regex(regex) } else { None };
        let refused = |reason: &str| GrammarError::Refused(mistake().unwrap_or_else(|| excerpt(reason)));
        let mut parser = parser.map_err(|error| refused(&error.to_string()))?;
        parser.bias_computer = Arc::new(LexemeMasks::learning(&self.words));
        Ok(parser)
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

fn with_stack<T: Send>(work: impl FnOnce() -> Result<T, GrammarError> + Send) -> Result<T, GrammarError> {
    let no_thread = |error: io::Error| GrammarError::Refused(format!("there is no thread to compile it: {error}"));
    thread::scope(|scope| {
        let compiling = thread::Builder::new().name("compile".into()).stack_size(STACK_BYTES);
        let compiling = compiling.spawn_scoped(scope, work).map_err(no_thread)?;
        compiling.join().unwrap_or_else(|_| Err(GrammarError::Refused("compiling it failed".into())))
    })
}
