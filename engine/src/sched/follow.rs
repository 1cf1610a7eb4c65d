//! Who computes what several sequences begin with, while it is not there yet: the first of them, and the others follow. So a prompt
//! of `n` completions, or one that many send at once, is computed once, in however many steps.
//!
//! Blocks that are full are shared (`prefix`). The block behind them, in which the prompt ends, becomes each one's own: it is copied from who
//! has it, and what is left to compute is the one token that the next is drawn behind.
//!
//! ```text
//! first      [ block 0 ][ block 1 ][ ... t | generated     the prompt ends with t
//! follows      shared     shared   [ copy ] t              t is computed again, for its logits
//! ```
//! A copy is of what was there before the step: all copies of a step are made before anything is computed. It is taken from who had
//! all its tokens but the newest by then: blocks of others may be copied into in the same step, or exchanged for ones that are computed in
//! it. Where the executor copies nothing, the tokens of that block are computed again.

use super::{SchedLimits, prefix};
use crate::{
    kv::{BLOCK_TOKENS, BlockCopy, BlockId},
    sequence::Sequence,
};

/// What a sequence does about the rest of its prompt in the step that is planned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Turn {
    /// It computes on.
    Computes,
    /// It waits: one before it computes the same.
    Follows,
    /// It computes behind what it has by this copy.
    Copies {
        /// The copy.
        copy: BlockCopy,
        /// Tokens that it has then.
        n_tokens: usize,
    },
}

/// The turn of `running[idx]`, which has all blocks that can be found, when those before it are planned.
pub(super) fn turn(running: &[Sequence], idx: usize, limits: &SchedLimits) -> Turn {
    let sequence = &running[idx];
    let end = prefix::shared_end(sequence, limits);
    if sequence.computed >= end {
        return Turn::Computes;
    }
    let next_block = sequence.computed / BLOCK_TOKENS;
    if follows(sequence, next_block, &running[..idx], limits) {
        return Turn::Follows;
    }
    let is_at_end = next_block == end / BLOCK_TOKENS;
    if is_at_end && limits.copies_blocks { turn_at_end(running, idx, end, limits) } else { Turn::Computes }
}

/// Whether the next block that a sequence may share is one that somebody before it is about to compute.
pub(super) fn follows(sequence: &Sequence, next_block: usize, before: &[Sequence], limits: &SchedLimits) -> bool {
    let next_end = (next_block + 1) * BLOCK_TOKENS;
    let computes = |other: &Sequence| {
        is_amid_prompt(other)
            && other.names.get(next_block) == Some(&sequence.names[next_block])
            && prefix::shared_tokens(other, other.tokens.len(), limits) >= next_end
    };
    next_end <= prefix::shared_end(sequence, limits) && before.iter().any(computes)
}

/// The same where only the block is left in which what it may share ends.
fn turn_at_end(running: &[Sequence], idx: usize, end: usize, limits: &SchedLimits) -> Turn {
    let sequence = &running[idx];
    let block = end / BLOCK_TOKENS;
    let has_it = |other: usize| other != idx && begins_alike(&running[other], sequence, end, limits);
    let is_there = |other: &Sequence| other.n_settled >= end.max(other.tokens.len() - 1);
    let source = (0..running.len()).find(|other| has_it(*other) && is_there(&running[*other]));
    if let Some(other) = source {
        let block_of = |sequence: &Sequence| -> BlockId { sequence.table.blocks()[block] };
        let copy = BlockCopy { from: block_of(&running[other]), to: block_of(sequence) };
        return Turn::Copies { copy, n_tokens: end };
    }
    // It is there soon where a prompt ends in that block, or has just ended.
    let is_there_soon = |other: &Sequence| match is_amid_prompt(other) {
        true => (other.tokens.len() - 1) / BLOCK_TOKENS == block,
        false => other.computed >= end,
    };
    if (0..idx).any(|other| has_it(other) && is_there_soon(&running[other])) { Turn::Follows } else { Turn::Computes }
}

/// Whether two sequences that stay have the same first `end` tokens, and those of the first may be the second's.
fn begins_alike(other: &Sequence, sequence: &Sequence, end: usize, limits: &SchedLimits) -> bool {
    let n_full = end / BLOCK_TOKENS;
    let rest = n_full * BLOCK_TOKENS..end;
    let parent = |sequence: &Sequence| match n_full.checked_sub(1) {
        None => Some(sequence.root),
        Some(last) => sequence.names.get(last).copied(),
    };
    other.leaving.is_none()
        && prefix::shared_tokens(other, other.tokens.len(), limits) >= end
        && parent(other) == parent(sequence)
        && other.tokens[rest.clone()] == sequence.tokens[rest]
}

/// Whether a sequence stays, and has more to compute than its newest token.
pub(super) fn is_amid_prompt(sequence: &Sequence) -> bool {
    sequence.leaving.is_none() && !sequence.is_decoding()
}
