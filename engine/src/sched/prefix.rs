//! The scheduler's use of the prefix cache: a sequence takes the blocks that already hold the beginning of its tokens, when it starts and
//! before each piece of its prompt, and names those that it fills. Preempted sequences find their own blocks again this way.
//!
//! A planned block counts as computed, also for others in the same step: every layer writes the keys and values of the
//! whole step before its attention reads any of them. (What sequences had before, attention on a GPU reads meanwhile: `exec/cuda/batch.rs`.)
//!
//! Where decodes are replayed (`SchedLimits::replays_decodes`), only blocks of prompts are found and named: those with generated
//! tokens hold what the kernels for decoding gave, and somebody's prompt would be computed by others.

use super::SchedLimits;
use crate::{
    kv::{BLOCK_TOKENS, BlockId, BlockPool},
    sequence::Sequence,
};

/// The blocks that hold the beginning of a sequence's tokens.
pub(super) fn find(sequence: &mut Sequence, pool: &BlockPool, limits: &SchedLimits) -> Vec<BlockId> {
    find_from(0, sequence, pool, limits)
}

fn find_from(first: usize, sequence: &mut Sequence, pool: &BlockPool, limits: &SchedLimits) -> Vec<BlockId> {
    let n_wanted = shared_end(sequence, limits) / BLOCK_TOKENS;
    if first >= n_wanted {
        return Vec::new();
    }
    extend_names(sequence);
    sequence.names[first..n_wanted].iter().map_while(|name| pool.find(*name)).collect()
}

/// Tokens of a sequence, from the first, that it may have from others. Never all: the last one is computed, because the next is sampled
/// from what that computation gives. None where rows of the prompt are read, which only who computes them has.
pub(super) fn shared_end(sequence: &Sequence, limits: &SchedLimits) -> usize {
    if !limits.prefix_caching || sequence.awaits_rows() {
        return 0;
    }
    shared_tokens(sequence, sequence.tokens.len() - 1, limits)
}

/// Gives a sequence without blocks the ones that were found for it.
pub(super) fn attach(sequence: &mut Sequence, found: &[BlockId], pool: &mut BlockPool) {
    sequence.table.share(found, pool);
    sequence.computed = sequence.table.capacity_tokens();
    sequence.n_named = found.len();
    sequence.n_found = sequence.computed;
    mark_blocks(sequence, 0, pool);
}

/// Takes what others have computed meanwhile of what it would compute next, in the place of blocks of its own.
pub(super) fn catch_up(sequence: &mut Sequence, pool: &mut BlockPool, limits: &SchedLimits) {
    let first = sequence.computed / BLOCK_TOKENS;
    let found = find_from(first, sequence, pool, limits);
    if found.is_empty() {
        return;
    }
    for (idx, block) in (first..).zip(&found) {
        sequence.table.exchange(idx, *block, pool);
    }
    let n_named = first + found.len();
    sequence.n_found += n_named * BLOCK_TOKENS - sequence.computed;
    (sequence.computed, sequence.n_named) = (n_named * BLOCK_TOKENS, n_named);
    mark_blocks(sequence, first, pool);
}

/// Names the blocks that are full, computed and known in every token.
pub(super) fn name_full_blocks(sequence: &mut Sequence, pool: &mut BlockPool, limits: &SchedLimits) {
    let n_full = shared_tokens(sequence, sequence.computed.min(sequence.tokens.len()), limits) / BLOCK_TOKENS;
    if n_full <= sequence.n_named {
        return;
    }
    extend_names(sequence);
    let n_before = sequence.n_named;
    for idx in n_before..n_full {
        pool.name(sequence.table.blocks()[idx], sequence.names[idx]);
    }
    sequence.n_named = n_full;
    mark_blocks(sequence, n_before, pool);
}

/// Ties marks of the prompt to the named blocks in which they end, behind the first `n_before`. A beginning shorter than a block is in
/// nobody's cache.
fn mark_blocks(sequence: &Sequence, n_before: usize, pool: &mut BlockPool) {
    let marks = &sequence.request.prefix_marks;
    let begin = marks.partition_point(|mark| mark.n_blocks() <= n_before);
    for mark in marks[begin..].iter().take_while(|mark| mark.n_blocks() <= sequence.n_named) {
        pool.mark(sequence.names[mark.n_blocks() - 1], mark.name);
    }
}

/// Of the first `n_tokens`, those whose blocks are shared.
pub(super) fn shared_tokens(sequence: &Sequence, n_tokens: usize, limits: &SchedLimits) -> usize {
    if limits.replays_decodes { n_tokens.min(sequence.request.prompt.len()) } else { n_tokens }
}

/// Takes the names of all its blocks away, because what they hold may be damaged.
pub(super) fn forget_blocks(sequence: &Sequence, pool: &mut BlockPool) {
    sequence.names.iter().for_each(|name| pool.forget(*name));
}

fn extend_names(sequence: &mut Sequence) {
    let Sequence { tokens, names, root, .. } = sequence;
    let mut parent = names.last().copied().unwrap_or(*root);
    for block in tokens.chunks_exact(BLOCK_TOKENS).skip(names.len()) {
        parent = parent.then(block);
        names.push(parent);
    }
}
