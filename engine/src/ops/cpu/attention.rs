//! Causal attention over the paged cache. One task a (row, head): scores over all keys up to the row's position, one
//! softmax, one weighted sum, always in the order of the keys, so chunking and batching change nothing.

use rayon::prelude::*;

use super::{CpuCache, CpuTensor, dot};
use crate::{exec::BatchInputs, kv::BLOCK_TOKENS, ops::HeadShape};

/// Tasks handed out together: below this the hand-over costs more than the work.
const MIN_TASKS: usize = 4;

/// What one task reads.
struct HeadView<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    cache: &'a CpuCache,
    blocks: &'a [u32],
    kv_head: usize,
}

pub(super) fn attend(
    cache: &CpuCache,
    layer: usize,
    queries: &CpuTensor,
    heads: HeadShape,
    batch: &BatchInputs,
) -> CpuTensor {
    let HeadShape { n_heads, n_kv_heads, head_dim } = heads;
    let group = n_heads / n_kv_heads;
    let mut out = CpuTensor::zeros(queries.n_rows(), n_heads * head_dim);
    let tasks = out.values.par_chunks_mut(head_dim).enumerate().with_min_len(MIN_TASKS);
    tasks.for_each_init(Vec::new, |scores, (task, out)| {
        let (row, head) = (task / n_heads, task % n_heads);
        let view = HeadView {
            keys: &cache.keys[layer],
            values: &cache.values[layer],
            cache,
            blocks: &batch.block_tables[batch.sequence_of_row[row] as usize],
            kv_head: head / group,
        };
        let query = &queries.row(row)[head * head_dim..][..head_dim];
        view.attend(query, batch.positions[row] as usize + 1, scores, out);
    });
    out
}

impl HeadView<'_> {
    /// Attends to the first `n_keys` tokens.
    fn attend(&self, query: &[f32], n_keys: usize, scores: &mut Vec<f32>, out: &mut [f32]) {
        scores.clear();
        let scale = 1.0 / (query.len() as f32).sqrt();
        for run in self.runs(self.keys, n_keys) {
            scores.extend(run.chunks_exact(query.len()).map(|key| dot(query, key) * scale));
        }
        softmax(scores);
        let mut weights = scores.iter();
        for run in self.runs(self.values, n_keys) {
            for (value, weight) in run.chunks_exact(query.len()).zip(&mut weights) {
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight * value;
                }
            }
        }
    }

    /// The first `n_tokens` tokens of this head, block by block.
    fn runs<'a>(&'a self, cached: &'a [f32], n_tokens: usize) -> impl Iterator<Item = &'a [f32]> {
        let layout = self.cache.layout;
        self.blocks.iter().enumerate().map_while(move |(idx, block)| {
            let left = n_tokens.checked_sub(idx * BLOCK_TOKENS).filter(|left| *left > 0)?;
            let start = layout.offset(*block as usize * BLOCK_TOKENS, self.kv_head);
            Some(&cached[start..][..left.min(BLOCK_TOKENS) * layout.head_dim])
        })
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
