//! What may follow, decided token by token: the seam for structured output. Owns the definition of a grammar as the
//! engine sees it, and the matchers of open requests; never what grammars look like.
//!
//! ```text
//! host    launch k+1 │ wait for k │ accept its tokens, fill masks │ constrain k+1 │ launch k+2 ...
//! device  [ ------ forward of k+1, its free rows drawn ------ ]    [ masked rows ][ forward of k+2
//! ```
//! The forward pass of a step runs before the masks of its draws are known, so a constrained sequence is computed in
//! every step like any other, and a step without constrained sequences does nothing of this.

use std::{collections::HashMap, fmt::Debug, sync::Arc};

use crate::{
    request::{RequestId, TokenId},
    sched::{SampledToken, SchedLimits},
    sequence::Sequence,
};

/// Words of a mask over `vocab_size` tokens.
pub fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Whether a mask allows a token. Nothing is allowed beyond its end.
pub fn allows(mask: &[u32], token: TokenId) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A language of completions, compiled. Requests share it; each of them gets a matcher of its own.
pub trait Grammar: Debug + Send + Sync {
    /// At the beginning of a completion. Called on the engine's thread before the first token: compile elsewhere.
    fn matcher(&self) -> Box<dyn Matcher>;
}

/// One completion's way through its grammar. Lives on the engine's thread, survives preemption, is dropped when the
/// request ends. An error ends the request with that text as its reason, and nobody else's.
///
/// Calls come in pairs: `allow`, then `accept` of the token that was drawn under that mask. The last `accept` may be
/// missing: a request may end at any time, and the token that ends it is not told.
pub trait Matcher: Debug + Send {
    /// Marks the tokens that may come next. Bit `t % 32` of word `t / 32` is token `t`, set means allowed: the layout of
    /// llguidance and toktrie. The words come zeroed, [`mask_words`] of the model's vocabulary, which may be larger than the tokenizer's;
    /// bits beyond the vocabulary are not looked at. Where the completion may end, the model's end tokens are among
    /// the allowed ones; where nothing else may follow, they alone. A mask that allows nothing ends the request with an
    /// error. Runs while the device computes: up to a step's time, for all constrained requests together, costs nothing.
    fn allow(&mut self, mask: &mut [u32]) -> Result<(), String>;

    /// Takes in the token that was drawn.
    fn accept(&mut self, token: TokenId) -> Result<(), String>;
}

/// A grammar as a part of [`SamplingParams`](crate::SamplingParams). Two are equal if they are the same one.
#[derive(Clone, Debug)]
pub struct Constraint(pub Arc<dyn Grammar>);

impl PartialEq for Constraint {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The masks of one step: one for each entry that samples under a constraint, in the order of the plan.
#[derive(Clone, Copy, Debug)]
pub struct Masks<'a> {
    /// One mask behind the other.
    pub words: &'a [u32],
    /// Words of one.
    pub n_words_each: usize,
}

impl<'a> Masks<'a> {
    /// Each of them.
    pub fn iter(self) -> impl ExactSizeIterator<Item = &'a [u32]> {
        self.words.chunks_exact(self.n_words_each)
    }
}

/// One of a step's draws that waits for its mask.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Awaited {
    pub(crate) id: RequestId,
    /// End tokens are banned, because the completion is shorter than its minimum.
    is_below_minimum: bool,
}

impl Awaited {
    /// Of a sequence whose next token is sampled at `position`, if it is constrained.
    pub(crate) fn of(sequence: &Sequence, position: usize) -> Option<Self> {
        sequence.request.sampling.constraint.as_ref()?;
        Some(Self { id: sequence.id, is_below_minimum: sequence.is_below_minimum(position) })
    }
}

/// A request that its constraint ends.
#[derive(Debug, PartialEq)]
pub(crate) struct Violation {
    pub(crate) id: RequestId,
    pub(crate) reason: String,
}

/// The matchers of open requests, and the memory of masks.
#[derive(Debug)]
pub(crate) struct Matchers {
    open: HashMap<RequestId, Box<dyn Matcher>>,
    words: Vec<u32>,
    n_words_each: usize,
}

impl Matchers {
    pub(crate) fn new(vocab_size: usize) -> Self {
        Self { open: HashMap::new(), words: Vec::new(), n_words_each: mask_words(vocab_size) }
    }

    /// Before the first step of a request.
    pub(crate) fn open(&mut self, id: RequestId, constraint: &Constraint) {
        self.open.insert(id, constraint.0.matcher());
    }

    /// After the last one. Most requests have no matcher.
    pub(crate) fn close(&mut self, id: RequestId) {
        if !self.open.is_empty() {
            self.open.remove(&id);
        }
    }

    /// Takes in what a step drew for requests that go on.
    pub(crate) fn accept(&mut self, tokens: &[SampledToken]) -> Vec<Violation> {
        if self.open.is_empty() {
            return Vec::new();
        }
        let accepted = tokens.iter().filter_map(|SampledToken { id, token, .. }| {
            let refused = self.open.get_mut(id)?.accept(*token).err()?;
            Some(Violation { id: *id, reason: format!("the grammar does not take token {token}: {refused}") })
        });
        accepted.collect()
    }

    /// The masks of a step, and who must end because nothing is left to draw. The draw of a request that has ended
    /// meanwhile goes nowhere: it may be anything.
    pub(crate) fn masks(&mut self, awaited: &[Awaited], limits: &SchedLimits) -> (Masks<'_>, Vec<Violation>) {
        let Self { open, words, n_words_each } = self;
        words.clear();
        words.resize(awaited.len() * *n_words_each, 0);
        let mut violations = Vec::new();
        for (mask, awaited) in words.chunks_exact_mut(*n_words_each).zip(awaited) {
            let outcome = open.get_mut(&awaited.id).map(|matcher| allowed(matcher.as_mut(), mask, awaited, limits));
            if let Some(Err(reason)) = &outcome {
                violations.push(Violation { id: awaited.id, reason: reason.clone() });
            }
            if outcome.is_none_or(|outcome| outcome.is_err()) {
                mask.fill(u32::MAX);
            }
        }
        (Masks { words, n_words_each: *n_words_each }, violations)
    }
}

fn allowed(matcher: &mut dyn Matcher, mask: &mut [u32], awaited: &Awaited, limits: &SchedLimits) -> Result<(), String> {
    matcher.allow(mask).map_err(|reason| format!("the grammar failed: {reason}"))?;
    if mask.iter().all(|word| *word == 0) {
        return Err("the grammar allows no token here".into());
    }
    if awaited.is_below_minimum {
        for end in &limits.eos {
            if let Some(word) = mask.get_mut(*end as usize / 32) {
                *word &= !(1 << (end % 32));
            }
        }
        if mask.iter().all(|word| *word == 0) {
            return Err("the grammar allows only the end here, but min_tokens asks for more: lower min_tokens".into());
        }
    }
    Ok(())
}
