//! Words: a name in an e-mail address, a part of a path, an identifier. llguidance knows in advance which tokens may come inside of
//! a JSON string. Everywhere else it tries the vocabulary token by token, of which a fifth is words: here it is known which of
//! these a lexeme takes. Computes no mask itself (`lexeme_masks`).
//!
//! ```text
//! tokens    a-z, to 5 │ a-z, to 16 │ A-Za-z …  │ A-Za-z0-9_- … │ all others
//!           [ added at once, if words of that length go on    ] [ tried     ]
//! ```
//! How far any word may go on is read off the lexeme's automaton: as far as no byte of the class leaves it.

use std::sync::Arc;

use llguidance::{
    derivre::StateID,
    earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer},
};
use toktrie::{SimpleVob, TokTrie};

use super::tree::{Tree, stays};
use crate::request::TokenId;

/// Lengths in bytes up to which the words of a class are added together. Nearly all words are within the last; of a
/// repetition that ends sooner the first still applies.
const LENGTHS: [usize; 2] = [5, 16];
const LONGEST: usize = LENGTHS[1];
/// States of a lexeme that are looked at for the first time in one mask, at most: 63 bytes each, so that what cannot be used
/// costs no more than what it would save.
const MAX_NEW_STATES: usize = 128;

/// The words of a vocabulary, shared by all grammars over it: 7 MB for 131,072 tokens.
pub(super) struct Words {
    general: Arc<SlicedBiasComputer>,
    /// Each class has the bytes of the one before it, and its words are those that the one before it has not.
    classes: [Class; N_CLASSES],
    others: Tree,
    all: Tree,
}

const N_CLASSES: usize = 3;

struct Class {
    bytes: Vec<u8>,
    /// Its words up to each length.
    up_to: [SimpleVob; LENGTHS.len()],
    /// All its words, then those that are longer than each length but the last.
    beyond: [Tree; LENGTHS.len()],
}

/// How long the words of each class may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depths([usize; N_CLASSES]);

/// A part of the vocabulary.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Part {
    All,
    /// Those that are no words.
    Others,
    /// The words of a class that are longer than so many lengths.
    Beyond {
        class: usize,
        n_lengths: usize,
    },
}

impl Depths {
    /// Whether words of any class are added at once.
    pub(super) fn has_words(&self) -> bool {
        self.0[0] >= LENGTHS[0]
    }
}

impl Words {
    pub(super) fn new(general: Arc<SlicedBiasComputer>) -> Self {
        let trie = general.trie();
        let mut left = trie.alloc_token_set();
        left.set_all(true);
        let lower = b'a'..=b'z';
        let letters = (b'A'..=b'Z').chain(lower.clone());
        let names = letters.clone().chain(b'0'..=b'9').chain(*b"_-");
        let classes: [Vec<u8>; N_CLASSES] = [lower.collect(), letters.collect(), names.collect()];
        let classes = classes.map(|bytes| Class::take(trie, &mut left, bytes));
        let (others, all) = (Tree::of(&trie.filter(&left)), Tree::of(trie));
        Self { general, classes, others, all }
    }

    /// llguidance's own way of computing masks.
    pub(super) fn general(&self) -> &SlicedBiasComputer {
        &self.general
    }

    pub(super) fn tree(&self, part: Part) -> &Tree {
        match part {
            Part::All => &self.all,
            Part::Others => &self.others,
            Part::Beyond { class, n_lengths } => &self.classes[class].beyond[n_lengths],
        }
    }

    /// The tokens that need not be tried where words may be so long, and the parts that do.
    pub(super) fn at_once(&self, depths: Option<Depths>) -> (SimpleVob, Vec<Part>) {
        let mut words = self.general.trie().alloc_token_set();
        let Some(Depths(depths)) = depths else { return (words, vec![Part::All]) };
        let mut parts = vec![Part::Others];
        for (idx, (class, depth)) in self.classes.iter().zip(depths).enumerate() {
            let n_lengths = LENGTHS.iter().filter(|length| **length <= depth).count();
            if n_lengths > 0 {
                words.or(&class.up_to[n_lengths - 1]);
            }
            if n_lengths < class.beyond.len() {
                parts.push(Part::Beyond { class: idx, n_lengths });
            }
        }
        (words, parts)
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
        let beyond = [all, &long].map(|words| Tree::of(&trie.filter(words)));
        Self { bytes, up_to, beyond }
    }
}

/// How far words may go on from each state of a grammar's lexemes. States are the lexer's own: all matchers that share it share them.
#[derive(Default)]
pub(super) struct Paths {
    /// By state, which the lexer numbers from the first on, and class.
    known: Vec<[Option<Known>; N_CLASSES]>,
    /// States that may still be looked at for this mask.
    n_new_left: usize,
}

#[derive(Clone)]
struct Known {
    /// Where the bytes of a class lead; `None`: one of them leaves the lexeme.
    next: Option<Arc<[StateID]>>,
    /// Words of so many bytes never leave it.
    depth: u8,
    /// What was asked for: a smaller depth is all there is.
    asked: u8,
}

impl Paths {
    /// How long words may be from a state on. `None`: too much would have to be looked at.
    pub(super) fn depths(&mut self, rec: &mut ParserRecognizer<'_>, state: StateID, words: &Words) -> Option<Depths> {
        self.n_new_left = MAX_NEW_STATES;
        let mut depths = [0; N_CLASSES];
        for (idx, class) in words.classes.iter().enumerate().rev() {
            let is_within_longer = depths.get(idx + 1).is_some_and(|depth| *depth == LONGEST);
            depths[idx] = match is_within_longer {
                true => LONGEST,
                false => self.depth(rec, (state, idx), &class.bytes, LONGEST as u8)?.into(),
            };
        }
        Some(Depths(depths))
    }

    fn depth(&mut self, rec: &mut ParserRecognizer<'_>, from: (StateID, usize), bytes: &[u8], asked: u8) -> Option<u8> {
        if asked == 0 {
            return Some(0);
        }
        let next = match self.known(from) {
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
        self.insert(from, Known { next, depth, asked });
        Some(depth)
    }

    fn known(&self, (state, class): (StateID, usize)) -> Option<&Known> {
        self.known.get(state.as_usize())?[class].as_ref()
    }

    fn insert(&mut self, (state, class): (StateID, usize), known: Known) {
        let idx = state.as_usize();
        if self.known.len() <= idx {
            self.known.resize(idx + 1, [const { None }; N_CLASSES]);
        }
        self.known[idx][class] = Some(known);
    }
}

fn next_states(rec: &mut ParserRecognizer<'_>, from: StateID, bytes: &[u8]) -> Option<Arc<[StateID]>> {
    let mut next = Vec::new();
    for byte in bytes {
        let state = rec.lexer_mut().transition_start_state(from, Some(*byte), &None);
        if !stays(state) {
            return None;
        }
        if !next.contains(&state) {
            next.push(state);
        }
    }
    Some(next.into())
}
