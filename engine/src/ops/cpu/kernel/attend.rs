//! Causal attention of some rows of one sequence through one key/value head, over the paged cache.
//!
//! ```text
//! queries of a task: rows x (query heads that share the key/value head)
//! scores  = queries * keys^T      block by block, by the tiles of `product` or with 16 tokens in lanes
//! weights = softmax(scores)       row by row, zero where a row does not see
//! out     = weights * values      64 columns at a time, tokens in order
//! ```
//! A key or value is loaded once for up to four queries, or six where 16 tokens lie in lanes. Every sum runs in the order of the tokens from the first block
//! that any row sees; a block more adds zeros, so a row's result does not depend on the rows it is computed with.

use std::{cell::RefCell, ops::Range};

use super::{
    Kernel, Line, PackedRows,
    lanes::{Lanes, Wide},
    product::{Target, WeightRows, split_evenly},
    vector,
};
use crate::{
    kv::{BLOCK_TOKENS, KvLayout},
    model::{AttentionSpec, HeadShape},
    ops::cpu::activation::softcap,
};

/// One layer's cache as bytes.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct CachedBytes<'a> {
    pub(in super::super) keys: &'a [u8],
    pub(in super::super) values: &'a [u8],
    pub(in super::super) layout: KvLayout,
}

/// Rows of one sequence and the head they look through.
#[derive(Clone, Debug)]
pub(in super::super) struct AttentionTask<'a> {
    /// Rows of the batch.
    pub(in super::super) rows: Range<usize>,
    /// Position of the first of them; the others follow.
    pub(in super::super) position: usize,
    /// KV blocks of the sequence.
    pub(in super::super) blocks: &'a [u32],
    pub(in super::super) kv_head: usize,
}

/// An attention task and what it works on.
pub(super) struct Attend<'a> {
    pub(super) task: &'a AttentionTask<'a>,
    pub(super) cached: CachedBytes<'a>,
    pub(super) spec: AttentionSpec,
    /// All rows, all query heads.
    pub(super) queries: &'a [f32],
    /// As the queries. Tasks that run at the same time have different rows or heads.
    pub(super) out: &'a Target<'a>,
}

thread_local! {
    /// Kept from task to task: a fresh one would be paged in each time.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default)]
struct Scratch {
    queries: Vec<f32>,
    packed: PackedRows,
    scores: Vec<f32>,
    /// A block of keys turned around.
    turned: Vec<Line>,
}

impl AttentionTask<'_> {
    /// Tokens that the row `idx` of the task sees.
    fn seen(&self, idx: usize, window: Option<usize>) -> Range<usize> {
        let end = self.position + idx + 1;
        end.saturating_sub(window.unwrap_or(end))..end
    }

    /// Tokens that any row sees, from the beginning of a block.
    fn seen_by_any(&self, window: Option<usize>) -> Range<usize> {
        let first = self.seen(0, window).start / BLOCK_TOKENS * BLOCK_TOKENS;
        first..self.position + self.rows.len()
    }
}

impl Kernel for Attend<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // Taken out rather than borrowed in a closure, which need not be compiled for the instruction set.
        let mut scratch = SCRATCH.take();
        self.gather::<L>(&mut scratch);
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            self.score::<L>(&mut scratch);
            self.softmax(&mut scratch.scores);
            self.sum_values::<L::Wide>(&scratch.scores);
        }
        SCRATCH.set(scratch);
    }
}

impl Attend<'_> {
    fn head_dim(&self) -> usize {
        self.spec.heads.head_dim
    }

    /// Query heads that share the key/value head.
    fn group(&self) -> usize {
        self.spec.heads.n_heads / self.spec.heads.n_kv_heads
    }

    /// Where the task's `idx`-th query is in a row of all heads, and its row.
    fn place(&self, idx: usize) -> (usize, usize) {
        let (row, head) = (idx / self.group(), idx % self.group());
        (self.task.rows.start + row, (self.task.kv_head * self.group() + head) * self.head_dim())
    }

    fn n_queries(&self) -> usize {
        self.task.rows.len() * self.group()
    }

    /// Scores of a query: its tokens in whole blocks.
    fn score_stride(&self) -> usize {
        self.task.seen_by_any(self.spec.window).len().next_multiple_of(BLOCK_TOKENS)
    }

    #[inline(always)]
    fn gather<L: Lanes>(&self, scratch: &mut Scratch) {
        let HeadShape { n_heads, head_dim, .. } = self.spec.heads;
        scratch.queries.clear();
        for idx in 0..self.n_queries() {
            let (row, column) = self.place(idx);
            scratch.queries.extend_from_slice(&self.queries[row * n_heads * head_dim + column..][..head_dim]);
        }
        scratch.packed.reserve::<L>(self.n_queries(), head_dim);
        super::pack::<L>(&scratch.queries, head_dim, &mut scratch.packed.lines);
        scratch.scores.resize(self.n_queries() * self.score_stride(), 0.0);
    }

    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn score<L: Lanes>(&self, scratch: &mut Scratch) {
        let stride = self.score_stride();
        let first_block = self.task.seen_by_any(self.spec.window).start / BLOCK_TOKENS;
        let target = Target::new(&mut scratch.scores, stride);
        for idx in 0..stride / BLOCK_TOKENS {
            let w = self.block(self.cached.keys, first_block + idx);
            // SAFETY: `w` has the 16 rows of a block, as long as a query, and every query has a place for 16 scores a
            // block.
            unsafe { L::scores(scratch.packed.rows(), w, &target.from(idx * BLOCK_TOKENS), &mut scratch.turned) };
        }
    }

    /// The 16 tokens of this head in the `idx`-th block of the sequence.
    #[inline(always)]
    fn block<'a>(&self, cached: &'a [u8], idx: usize) -> WeightRows<'a> {
        let layout = self.cached.layout;
        let row_bytes = layout.head_dim * layout.dtype.bytes();
        let first = layout.offset(self.task.blocks[idx] as usize * BLOCK_TOKENS, self.task.kv_head);
        WeightRows { bytes: &cached[first * layout.dtype.bytes()..][..BLOCK_TOKENS * row_bytes], row_bytes }
    }

    /// Scores to weights that sum to one over what each row sees and are zero elsewhere.
    #[inline(always)]
    fn softmax(&self, scores: &mut [f32]) {
        let first = self.task.seen_by_any(self.spec.window).start;
        for (idx, scores) in scores.chunks_exact_mut(self.score_stride()).enumerate() {
            let seen = self.task.seen(idx / self.group(), self.spec.window);
            let seen = seen.start - first..seen.end - first;
            for score in &mut scores[seen.clone()] {
                *score *= self.spec.scale;
            }
            if let Some(cap) = self.spec.softcap {
                softcap(&mut scores[seen.clone()], cap);
            }
            scores[..seen.start].fill(f32::NEG_INFINITY);
            scores[seen.end..].fill(f32::NEG_INFINITY);
            vector::exp_below_max(scores);
            scores[..seen.start].fill(0.0);
            scores[seen.end..].fill(0.0);
            let share = 1.0 / vector::sum(scores);
            for score in scores {
                *score *= share;
            }
        }
    }

    /// # Safety
    /// The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn sum_values<V: Wide>(&self, weights: &[f32]) {
        // Even tiles: one of a query or two would wait for its sums.
        let at_once = split_evenly(self.n_queries(), V::ROWS);
        for query in (0..self.n_queries()).step_by(at_once) {
            // SAFETY: the caller vouches for the instruction set; there are as many queries as the sizes say.
            unsafe {
                match at_once.min(self.n_queries() - query) {
                    1 => self.sum_for::<V, 1>(weights, query),
                    2 => self.sum_for::<V, 2>(weights, query),
                    3 => self.sum_for::<V, 3>(weights, query),
                    4 => self.sum_for::<V, 4>(weights, query),
                    5 => self.sum_for::<V, 5>(weights, query),
                    _ => self.sum_for::<V, 6>(weights, query),
                }
            }
        }
    }

    /// # Safety
    /// `Q` queries exist from `query` on. The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn sum_for<V: Wide, const Q: usize>(&self, weights: &[f32], query: usize) {
        let mut column = 0;
        // SAFETY: columns are below `head_dim`.
        unsafe {
            while column + V::COLUMNS * V::STEP <= self.head_dim() {
                match V::COLUMNS {
                    4 => self.sum_columns::<V, Q, 4>(weights, query, column),
                    _ => self.sum_columns::<V, Q, 2>(weights, query, column),
                }
                column += V::COLUMNS * V::STEP;
            }
            while column + V::STEP <= self.head_dim() {
                self.sum_columns::<V, Q, 1>(weights, query, column);
                column += V::STEP;
            }
            while column < self.head_dim() {
                self.sum_column::<V>(weights, query..query + Q, column);
                column += 1;
            }
        }
    }

    /// `C` registers of columns for `Q` queries, over all tokens in order.
    ///
    /// # Safety
    /// `Q` queries exist from `query` on and `C * STEP` columns from `column` on. The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn sum_columns<V: Wide, const Q: usize, const C: usize>(
        &self,
        weights: &[f32],
        query: usize,
        column: usize,
    ) {
        let stride = self.score_stride();
        let tokens = self.task.seen_by_any(self.spec.window);
        let weights = &weights[query * stride..][..Q * stride];
        // SAFETY: `block` hands out 16 rows of `head_dim` values each; tokens are in `tokens`, whose weights are there.
        unsafe {
            let mut acc = [[V::zero(); C]; Q];
            for first in tokens.clone().step_by(BLOCK_TOKENS) {
                let values = self.block(self.cached.values, first / BLOCK_TOKENS);
                for token in 0..BLOCK_TOKENS.min(tokens.end - first) {
                    let at = values.bytes.as_ptr().add(token * values.row_bytes + column / V::STEP * V::W_BYTES);
                    let mut loaded = [V::w(at); C];
                    for (c, value) in loaded.iter_mut().enumerate().skip(1) {
                        *value = V::w(at.add(c * V::W_BYTES));
                    }
                    for (q, sums) in acc.iter_mut().enumerate() {
                        let weight = V::splat(*weights.get_unchecked(q * stride + first - tokens.start + token));
                        for c in 0..C {
                            sums[c] = V::add(sums[c], weight, loaded[c]);
                        }
                    }
                }
            }
            for (q, sums) in acc.into_iter().enumerate() {
                let (row, head) = self.place(query + q);
                let out = self.out.at(row, head + column, C * V::STEP);
                for (c, sum) in sums.into_iter().enumerate() {
                    V::write(sum, out.add(c * V::STEP));
                }
            }
        }
    }

    /// One column of a head whose width is no multiple of a register.
    ///
    /// # Safety
    /// The queries and the column exist.
    #[inline(always)]
    unsafe fn sum_column<V: Wide>(&self, weights: &[f32], queries: Range<usize>, column: usize) {
        let (stride, tokens) = (self.score_stride(), self.task.seen_by_any(self.spec.window));
        for query in queries {
            let mut sum = 0.0;
            for (idx, token) in tokens.clone().enumerate() {
                let values = self.block(self.cached.values, token / BLOCK_TOKENS);
                let row = &values.bytes[token % BLOCK_TOKENS * values.row_bytes..];
                sum += weights[query * stride + idx] * V::widen(row, column);
            }
            let (row, head) = self.place(query);
            // SAFETY: `at` gives a place for one number.
            unsafe { self.out.at(row, head + column, 1).write(sum) };
        }
    }
}
