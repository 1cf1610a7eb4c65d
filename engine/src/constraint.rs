//! What may follow, decided token by token: the seam for structured output. Owns the definition of a grammar as the
//! engine sees it; never what grammars look like.
//!
//! ```text
//! grammar threads                             [ accept tokens of k, fill masks ]
//! engine thread    launch k+1 │ wait for k, resolve k │ publish k │ collect masks, constrain k+1 │ launch k+2 ...
//! device           [ ------ forward of k+1, its free rows drawn ------ ]         [ masked rows ][ forward of k+2
//! ```
//! The forward pass of a step runs before the masks of its draws are known, so a constrained sequence is computed in
//! every step like any other, and a step without constrained sequences does nothing of this. Where the host computes, a
//! step is launched when the one before it is over: its masks are filled while it is computed. A mask that comes too late
//! puts its own draw off and nobody else's (`matchers`).

use std::{fmt::Debug, sync::Arc};

use crate::request::TokenId;

/// Words of a mask over `vocab_size` tokens.
pub fn mask_words(vocab_size: usize) -> usize {
    stoker_fit::gpu::mask_words(vocab_size)
}

/// Whether a mask allows a token. Nothing is allowed beyond its end.
pub fn allows(mask: &[u32], token: TokenId) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A language of completions, compiled. Requests share it; each of them gets a matcher of its own.
pub trait Grammar: Debug + Send + Sync {
    /// At the beginning of a completion. Called on a grammar thread while the request stands in line: compile elsewhere.
    ///
    /// Where the grammar leaves one text, its masks leave the tokens that the model's tokenizer makes of it: what a model has
    /// learnt to read, and known before it is computed.
    fn matcher(&self) -> Box<dyn Matcher>;

    /// The same for whoever narrows masks further: every way to spell a text is allowed, so that one without a forbidden
    /// token may be left.
    fn any_spelling(&self) -> Box<dyn Matcher> {
        self.matcher()
    }
}

/// One completion's way through its grammar. Goes from grammar thread to grammar thread, survives preemption, is dropped
/// when the request ends. An error ends the request as [`Unfollowed`](crate::FinishReason::Unfollowed) with that text, a panic as
/// an error of ours; neither ends anybody else's.
///
/// Calls come in pairs: `allow`, then `accept` of the token that was drawn under that mask. The last `accept` may be
/// missing: a request may end at any time, and the token that ends it is not told.
pub trait Matcher: Debug + Send {
    /// Marks the tokens that may come next. Bit `t % 32` of word `t / 32` is token `t`, set means allowed: the layout of
    /// llguidance and toktrie. The words come zeroed, [`mask_words`] of the model's vocabulary, which may be larger than the tokenizer's;
    /// bits beyond the vocabulary are not looked at. Where the completion may end, the model's end tokens are among
    /// the allowed ones; where nothing else may follow, they alone. A mask that allows nothing ends the request with an
    /// error. Runs while the step is computed: what takes longer delays its own request and no other.
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
