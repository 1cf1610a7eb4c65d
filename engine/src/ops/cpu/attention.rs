//! Causal attention over the paged cache. One task a (row, head): scores over the keys its window shows up to the row's
//! position, one softmax, one weighted sum, always in the order of the keys, so chunking and batching change nothing.

use std::ops::Range;

use super::{
    CpuCache, CpuTensor,
    activation::softcap,
    cache::{CachedLayer, KvNumber, KvPair},
    fold,
    pool::{Pool, RowRuns},
};
use crate::{
    exec::BatchInputs,
    kv::{BLOCK_TOKENS, KvLayout, blocks_for},
    ops::{AttentionSpec, HeadShape},
};

/// Tasks handed out together: below this the hand-over costs more than the work.
const MIN_TASKS: usize = 4;

pub(super) fn attend(
    pool: &mut Pool,
    cache: &CpuCache,
    layer: usize,
    queries: &CpuTensor,
    spec: AttentionSpec,
    batch: &BatchInputs,
) -> CpuTensor {
    match cache.layer(layer) {
        CachedLayer::F32(cached) => attend_to(pool, cached, cache.layout(), queries, spec, batch),
        CachedLayer::Bf16(cached) => attend_to(pool, cached, cache.layout(), queries, spec, batch),
    }
}

fn attend_to<T: KvNumber>(
    pool: &mut Pool,
    cached: KvPair<&[T]>,
    layout: KvLayout,
    queries: &CpuTensor,
    spec: AttentionSpec,
    batch: &BatchInputs,
) -> CpuTensor {
    let HeadShape { n_heads, n_kv_heads, head_dim } = spec.heads;
    let group = n_heads / n_kv_heads;
    let mut out = CpuTensor::zeros(queries.n_rows(), n_heads * head_dim);
    pool.for_rows(&mut out.values, RowRuns { width: head_dim, per_task: MIN_TASKS }, |first, run| {
        let mut scores = Vec::new();
        for (idx, out) in run.chunks_exact_mut(head_dim).enumerate() {
            let task = first + idx;
            let (row, head) = (task / n_heads, task % n_heads);
            let n_keys = batch.positions[row] as usize + 1;
            let task = RowHead {
                spec,
                cached,
                layout,
                blocks: &batch.block_tables[batch.sequence_of_row[row] as usize],
                kv_head: head / group,
                query: &queries.row(row)[head * head_dim..][..head_dim],
                seen: n_keys.saturating_sub(spec.window.unwrap_or(n_keys))..n_keys,
            };
            task.attend(&mut scores, out);
        }
    });
    out
}

/// One task: attention of one head of one row to the tokens of its sequence that it sees.
struct RowHead<'a, T> {
    spec: AttentionSpec,
    cached: KvPair<&'a [T]>,
    layout: KvLayout,
    blocks: &'a [u32],
    kv_head: usize,
    query: &'a [f32],
    seen: Range<usize>,
}

impl<T: KvNumber> RowHead<'_, T> {
    fn attend(&self, scores: &mut Vec<f32>, out: &mut [f32]) {
        scores.clear();
        for block in self.blocks_seen() {
            let keys = self.run(self.cached.keys, block).chunks_exact(self.query.len());
            scores.extend(keys.map(|key| dot(self.query, key) * self.spec.scale));
        }
        if let Some(cap) = self.spec.softcap {
            softcap(scores, cap);
        }
        softmax(scores);
        let mut weights = scores.iter();
        for block in self.blocks_seen() {
            let values = self.run(self.cached.values, block).chunks_exact(self.query.len());
            for (value, weight) in values.zip(&mut weights) {
                add_scaled(out, value, *weight);
            }
        }
    }

    fn blocks_seen(&self) -> Range<usize> {
        self.seen.start / BLOCK_TOKENS..blocks_for(self.seen.end)
    }

    /// The tokens of this head that are seen in the `idx`-th block of the sequence.
    fn run<'a>(&self, cached: &'a [T], idx: usize) -> &'a [T] {
        let first = self.seen.start.max(idx * BLOCK_TOKENS);
        let end = self.seen.end.min((idx + 1) * BLOCK_TOKENS);
        let slot = self.blocks[idx] as usize * BLOCK_TOKENS + first % BLOCK_TOKENS;
        let start = self.layout.offset(slot, self.kv_head);
        &cached[start..][..(end - first) * self.layout.head_dim]
    }
}

/// Sums in 16 lanes, always the same ones: fast, and independent of everything but the two rows.
pub(super) fn dot<T: KvNumber>(x: &[f32], y: &[T]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0.0f32; LANES];
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y.widened();
        }
    }
    let mut sum = fold(lanes);
    for (x, y) in x_rest.iter().zip(y_rest) {
        sum += x * y.widened();
    }
    sum
}

fn add_scaled<T: KvNumber>(out: &mut [f32], value: &[T], weight: f32) {
    for (out, value) in out.iter_mut().zip(value) {
        *out += weight * value.widened();
    }
}

fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for score in scores.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    for score in scores.iter_mut() {
        *score /= sum;
    }
}
