//! Masks inside of words: a name in an e-mail address, a part of a path, an identifier. llguidance knows in advance which tokens
//! may come inside of a JSON string. Everywhere else it tries the vocabulary token by token, of which a fifth is words: here it is
//! known which of these a lexeme takes. Changes no mask, only what it costs.
//!
//! ```text
//! tokens    a-z, to 5 │ a-z, to 16 │ A-Za-z …  │ A-Za-z0-9_- … │ all others
//!           [ added at once, if words of that length go on    ] [ tried     ]
//! ```
//! How far any word may go on is read off the lexeme's automaton: as far as no byte of the class leaves it. Inside of a lexeme the
//! grammar around it is not asked, so a word that never leaves it is allowed.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use llguidance::{
    derivre::StateID,
    earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer},
};
use toktrie::{SimpleVob, TokTrie};

use crate::request::TokenId;

/// Lengths in bytes up to which the words of a class are added together. Nearly all words are within the last; of a
/// repetition that ends sooner the first still applies.
const LENGTHS: [usize; 2] = [5, 16];
const LONGEST: usize = LENGTHS[1];
/// The slice of llguidance's that stands for text in JSON strings, see `SlicedBiasComputer::json_slices`.
const TEXT_SLICE: usize = 1;
/// What llguidance itself spends on the question whether a slice applies.
const TEXT_BUDGET: u64 = 1000;
/// States of a lexeme that are looked at for the first time in one mask, at most: 63 bytes each, so that what cannot be used
/// costs no more than what it would save.
const MAX_NEW_STATES: usize = 64;
/// States that are remembered for one grammar, at most: 10 MB.
const MAX_KNOWN_STATES: usize = 100_000;

/// The words of a vocabulary, shared by all grammars over it. As large as seven copies of it.
pub(super) struct Words {
    general: Arc<SlicedBiasComputer>,
    /// Each class has the bytes of the one before it, and its words are those that the one before it has not.
    classes: [Class; 3],
    others: TokTrie,
}

struct Class {
    bytes: Vec<u8>,
    /// Its words up to each length.
    up_to: [SimpleVob; LENGTHS.len()],
    /// All its words, then those that are longer than each length but the last.
    beyond: [TokTrie; LENGTHS.len()],
}

impl Words {
    pub(super) fn new(general: Arc<SlicedBiasComputer>) -> Self {
        let trie = general.trie();
        let mut left = trie.alloc_token_set();
        left.set_all(true);
        let lower = b'a'..=b'z';
        let letters = (b'A'..=b'Z').chain(lower.clone());
        let names = letters.clone().chain(b'0'..=b'9').chain(*b"_-");
        let classes: [Vec<u8>; 3] = [lower.collect(), letters.collect(), names.collect()];
        let classes = classes.map(|bytes| Class::take(trie, &mut left, bytes));
        let others = trie.filter(&left);
        Self { general, classes, others }
    }

    fn add(&self, depths: [usize; 3], rec: &mut ParserRecognizer<'_>) -> SimpleVob {
        let mut allowed = self.general.trie().alloc_token_set();
        for (class, depth) in self.classes.iter().zip(depths) {
            let n_lengths = LENGTHS.iter().filter(|length| **length <= depth).count();
            if n_lengths > 0 {
                allowed.or(&class.up_to[n_lengths - 1]);
            }
            if let Some(beyond) = class.beyond.get(n_lengths) {
                beyond.add_bias(rec, &mut allowed, &[]);
            }
        }
        self.others.add_bias(rec, &mut allowed, &[]);
        allowed
    }
}

impl Class {
    /// Takes its words out of what is left.
    fn take(trie: &TokTrie, left: &mut SimpleVob, bytes: Vec<u8>) -> Self {
        let is_word = |word: &[u8]| !word.is_empty() && word.iter().all(|byte| bytes.contains(byte));
        let up_to = LENGTHS.map(|length| {
            let mut words = trie.alloc_token_set();
            let of_class = |token: &TokenId| {
                left.is_allowed(*token) && trie.token_len(*token) <= length && is_word(trie.token(*token))
            };
            (0..trie.vocab_size() as TokenId).filter(of_class).for_each(|token| words.allow_token(token));
            words
        });
        let [short, all] = &up_to;
        left.sub(all);
        let mut long = all.clone();
        long.sub(short);
        let beyond = [trie.filter(all), trie.filter(&long)];
        Self { bytes, up_to, beyond }
    }
}

/// The words of one grammar's lexemes.
pub(super) struct WordMasks {
    words: Arc<Words>,
    paths: Mutex<Paths>,
}

impl WordMasks {
    pub(super) fn new(words: Arc<Words>) -> Self {
        Self { words, paths: Mutex::default() }
    }
}

impl BiasComputer for WordMasks {
    fn compute_bias(&self, rec: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let Words { general, classes, .. } = &*self.words;
        let state = rec.lexer_state();
        if !start.is_empty() || !rec.lexer_mut().subsume_possible(state) || is_text(rec, state) {
            return general.compute_bias(rec, start);
        }
        // Nothing panics while this lock is held.
        let depths = self.paths.lock().unwrap_or_else(PoisonError::into_inner).depths(rec, state, classes);
        match depths[0] < LENGTHS[0] {
            true => general.compute_bias(rec, start),
            false => self.words.add(depths, rec),
        }
    }

    fn trie(&self) -> &TokTrie {
        self.words.general.trie()
    }
}

/// Whether llguidance's slices apply, which leave less to try.
fn is_text(rec: &mut ParserRecognizer<'_>, state: StateID) -> bool {
    rec.lexer_mut().check_subsume(state, TEXT_SLICE, TEXT_BUDGET, None).unwrap_or(false)
}

/// How far words may go on from each state of a grammar's lexemes. States are the lexer's own: all matchers that share it share them.
#[derive(Default)]
struct Paths {
    known: HashMap<(StateID, usize), Known>,
    /// States that may still be looked at for this mask.
    n_new_left: usize,
}

#[derive(Clone)]
struct Known {
    /// Where the bytes of a class lead; `None`: one of them leaves the lexeme.
    next: Option<Arc<[StateID]>>,
    /// Words of so many bytes never leave it.
    depth: usize,
    /// What was asked for: a smaller depth is all there is.
    asked: usize,
}

impl Paths {
    /// How long the words of each class may be.
    fn depths(&mut self, rec: &mut ParserRecognizer<'_>, state: StateID, classes: &[Class; 3]) -> [usize; 3] {
        if self.known.len() > MAX_KNOWN_STATES {
            self.known.clear();
        }
        self.n_new_left = MAX_NEW_STATES;
        let mut depths = [0; 3];
        for (idx, class) in classes.iter().enumerate().rev() {
            let is_within_longer = depths.get(idx + 1).is_some_and(|depth| *depth == LONGEST);
            depths[idx] = match is_within_longer {
                true => LONGEST,
                false => self.depth(rec, (state, idx), &class.bytes, LONGEST).unwrap_or(0),
            };
        }
        depths
    }

    /// `None`: too much would have to be looked at.
    fn depth(
        &mut self,
        rec: &mut ParserRecognizer<'_>,
        from: (StateID, usize),
        bytes: &[u8],
        asked: usize,
    ) -> Option<usize> {
        if asked == 0 {
            return Some(0);
        }
        let next = match self.known.get(&from) {
            Some(known) if known.depth < known.asked || asked <= known.asked => return Some(known.depth.min(asked)),
            Some(known) => known.next.clone(),
            None => {
                self.n_new_left = self.n_new_left.checked_sub(1)?;
                next_states(rec, from.0, bytes)
            }
        };
        let mut depth = if next.is_some() { asked } else { 0 };
        for state in next.iter().flat_map(|next| next.iter()) {
            depth = depth.min(1 + self.depth(rec, (*state, from.1), bytes, depth - 1)?);
        }
        self.known.insert(from, Known { next, depth, asked });
        Some(depth)
    }
}

fn next_states(rec: &mut ParserRecognizer<'_>, from: StateID, bytes: &[u8]) -> Option<Arc<[StateID]>> {
    let mut next = Vec::new();
    for byte in bytes {
        let state = rec.lexer_mut().transition_start_state(from, Some(*byte), &None);
        if state.is_dead() || state.has_lowest_match() {
            return None;
        }
        if !next.contains(&state) {
            next.push(state);
        }
    }
    Some(next.into())
}
