//! What of a mask is known by the state of the lexer: inside of a lexeme the grammar around it is not asked, so which tokens stay in
//! the lexeme is learnt once, and asked of the grammar is only what leaves it.
//!
//! ```text
//! mask    tokens that stay in the lexeme │ tokens that leave it     │ all others
//!         [ by the lexer's state, kept  ] [ tried with the grammar ] [ never tried ]
//! ```
//! Worth it where many tokens may come: in texts of a regular expression, in names, in free text up to a mark. For JSON strings
//! llguidance knows its own tokens, and between lexemes there is little to try. Changes no mask, only what it costs.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use llguidance::{
    derivre::StateID,
    earley::{BiasComputer, ParserRecognizer},
};
use toktrie::{SimpleVob, TokTrie};

use super::{
    tree::Exit,
    words::{Depths, Part, Paths, Words},
};

/// The slice of llguidance's that stands for text in JSON strings, see `SlicedBiasComputer::json_slices`.
const TEXT_SLICE: usize = 1;
/// What llguidance itself spends on the question whether a slice applies.
const TEXT_BUDGET: u64 = 1000;
/// Nodes of the vocabulary's tree that llguidance tries for a mask, from which on the next one of the same state is learnt.
const WORTH_NODES: usize = 1000;
/// What is kept for one lexer at most: some 150 different masks of a vocabulary of 131,072 tokens. A regular expression whose states
/// are hundreds has half a dozen.
const MAX_KEPT_BYTES: usize = 4 << 20;

/// The masks of one lexer's states.
pub(super) struct LexemeMasks {
    words: Arc<Words>,
    /// `false`: they are llguidance's.
    learns: bool,
    learnt: Mutex<Learnt>,
    n_bytes: AtomicUsize,
}

#[derive(Default)]
struct Learnt {
    paths: Paths,
    by_state: HashMap<StateID, Arc<LexemeMask>>,
    /// The same, each once.
    distinct: HashSet<Arc<LexemeMask>>,
    /// States whose masks are worth it when they come again.
    worth: HashSet<StateID>,
}

#[derive(Debug, Eq, Hash, PartialEq)]
struct LexemeMask {
    inside: SimpleVob,
    leaving: Vec<(Part, Vec<Exit>)>,
}

/// Where a mask comes from.
enum Source {
    Known(Arc<LexemeMask>),
    /// From the lexer alone, since words of these lengths stay in the lexeme, or all tokens have to be tried.
    Lexer(Option<Depths>),
    /// From llguidance. `has_slices`: it knows which tokens may come.
    Llguidance {
        has_slices: bool,
    },
}

impl LexemeMasks {
    pub(super) fn learning(words: &Arc<Words>) -> Self {
        Self { learns: true, ..Self::by_llguidance(words) }
    }

    /// Computed by llguidance alone. Looking at states ahead costs steps of the lexer, of which a mask has so many: whom that takes what
    /// llguidance would have needed goes on with these.
    pub(super) fn by_llguidance(words: &Arc<Words>) -> Self {
        Self { words: Arc::clone(words), learns: false, learnt: Mutex::default(), n_bytes: AtomicUsize::new(0) }
    }

    /// Bytes of what is kept.
    pub(super) fn n_bytes(&self) -> usize {
        self.n_bytes.load(Ordering::Relaxed)
    }

    fn source(&self, rec: &mut ParserRecognizer<'_>, state: StateID) -> Source {
        let mut learnt = self.learnt();
        if let Some(known) = learnt.by_state.get(&state) {
            return Source::Known(Arc::clone(known));
        }
        if state.is_dead() {
            return Source::Llguidance { has_slices: false };
        }
        // Where a lexeme ends as soon as it can, llguidance tries the whole vocabulary each time.
        let is_lazy = !rec.lexer_mut().subsume_possible(state);
        if !is_lazy && is_text(rec, state) {
            return Source::Llguidance { has_slices: true };
        }
        match learnt.paths.depths(rec, state, &self.words) {
            Some(depths) if !depths.has_words() => match is_lazy || learnt.worth.contains(&state) {
                true => Source::Lexer(None),
                false => Source::Llguidance { has_slices: false },
            },
            depths => Source::Lexer(depths),
        }
    }

    fn learn(&self, rec: &mut ParserRecognizer<'_>, state: StateID, depths: Option<Depths>) -> Arc<LexemeMask> {
        let (mut inside, parts) = self.words.at_once(depths);
        let exits = |part: Part| (part, self.words.tree(part).within(rec, state, &mut inside));
        let mut leaving: Vec<_> = parts.into_iter().map(exits).collect();
        leaving.retain(|(_, exits)| !exits.is_empty());
        self.keep(state, LexemeMask { inside, leaving })
    }

    fn keep(&self, state: StateID, mask: LexemeMask) -> Arc<LexemeMask> {
        let mut learnt = self.learnt();
        let mask = learnt.distinct.get(&mask).map_or_else(|| Arc::new(mask), Arc::clone);
        if Arc::strong_count(&mask) == 1 {
            let n_bytes = mask.n_bytes();
            if self.n_bytes() + n_bytes > MAX_KEPT_BYTES {
                learnt.by_state.clear();
                learnt.distinct.clear();
                self.n_bytes.store(0, Ordering::Relaxed);
            }
            self.n_bytes.fetch_add(n_bytes, Ordering::Relaxed);
            learnt.distinct.insert(Arc::clone(&mask));
        }
        learnt.by_state.insert(state, Arc::clone(&mask));
        mask
    }

    fn mask(&self, known: &LexemeMask, rec: &mut ParserRecognizer<'_>) -> SimpleVob {
        let mut allowed = known.inside.clone();
        for (part, exits) in &known.leaving {
            self.words.tree(*part).beyond(exits, rec, &mut allowed);
        }
        allowed
    }

    fn without_slices(&self, rec: &mut ParserRecognizer<'_>, state: StateID) -> SimpleVob {
        let before = rec.stats_mut().trie_nodes_walked;
        let mask = self.words.general().compute_bias(rec, &[]);
        if rec.stats_mut().trie_nodes_walked - before > WORTH_NODES {
            self.learnt().worth.insert(state);
        }
        mask
    }

    fn learnt(&self) -> MutexGuard<'_, Learnt> {
        // Every critical section leaves what is true.
        self.learnt.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BiasComputer for LexemeMasks {
    fn compute_bias(&self, rec: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        if !self.learns || !start.is_empty() || !is_by_state(rec) {
            return self.words.general().compute_bias(rec, start);
        }
        let state = rec.lexer_state();
        match self.source(rec, state) {
            Source::Known(known) => self.mask(&known, rec),
            Source::Lexer(depths) => {
                let learnt = self.learn(rec, state, depths);
                self.mask(&learnt, rec)
            }
            Source::Llguidance { has_slices: true } => self.words.general().compute_bias(rec, start),
            Source::Llguidance { has_slices: false } => self.without_slices(rec, state),
        }
    }

    fn trie(&self) -> &TokTrie {
        self.words.general().trie()
    }
}

impl LexemeMask {
    fn n_bytes(&self) -> usize {
        let exits = self.leaving.iter().flat_map(|(_, exits)| exits);
        size_of_val(self.inside.as_slice()) + exits.map(Exit::n_bytes).sum::<usize>()
    }
}

/// Whether the lexer's state and the grammar's are all that a mask depends on. Where lexemes end by what is behind them, or after so many
/// tokens, llguidance's masks depend on the order, too, in which it tries the vocabulary; and it takes nothing back.
fn is_by_state(rec: &ParserRecognizer<'_>) -> bool {
    rec.lexer().lexer_spec().can_rollback()
}

/// Whether llguidance's slices apply, which leave less to try.
fn is_text(rec: &mut ParserRecognizer<'_>, state: StateID) -> bool {
    rec.lexer_mut().check_subsume(state, TEXT_SLICE, TEXT_BUDGET, None).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{grammar::GrammarCompiler, text::Tokenizer};

    #[test]
    fn each_mask_is_kept_once_and_all_within_a_bound() {
        let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::bytes()), &[256]).unwrap();
        let masks = LexemeMasks::learning(&compiler.words);
        let mask = |token| {
            let mut inside = SimpleVob::alloc(131_072);
            inside.allow_token(token);
            LexemeMask { inside, leaving: Vec::new() }
        };
        let n_bytes = mask(0).n_bytes();
        for state in 0..1000 {
            masks.keep(StateID::new(state), mask(7));
        }
        assert_eq!(masks.n_bytes(), n_bytes, "they are all the same");
        for state in 0..1000 {
            assert_eq!(*masks.keep(StateID::new(state), mask(state)), mask(state));
            assert!(masks.n_bytes() <= MAX_KEPT_BYTES);
            let learnt = masks.learnt();
            assert_eq!(learnt.distinct.iter().map(|mask| mask.n_bytes()).sum::<usize>(), masks.n_bytes());
            assert_eq!(*learnt.by_state[&StateID::new(state)], mask(state));
        }
    }
}
