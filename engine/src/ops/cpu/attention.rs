//! Causal attention over the paged cache: cuts a batch into tasks, one a key/value head and some rows of a sequence.

use super::kernel::AttentionTask;
use crate::{model::HeadShape, ops::BatchInputs};

/// Scores of a task, in numbers: they stay in the second-level cache beside the keys.
const MAX_SCORES: usize = 32 << 10;
/// Rows of a task at most, so that a short prompt is shared out too.
const MAX_ROWS: usize = 16;

/// Tasks of a batch; together they cover every row and head once.
pub(super) fn tasks<'a>(heads: HeadShape, batch: &'a BatchInputs) -> Vec<AttentionTask<'a>> {
    let group = heads.n_heads / heads.n_kv_heads;
    let mut tasks = Vec::new();
    for (sequence, rows) in batch.cu_seqlens.windows(2).enumerate() {
        let (first, end) = (rows[0] as usize, rows[1] as usize);
        let n_keys = batch.positions[end - 1] as usize + 1;
        let per_task = (MAX_SCORES / n_keys / group).clamp(1, MAX_ROWS);
        for first in (first..end).step_by(per_task) {
            tasks.extend((0..heads.n_kv_heads).map(|kv_head| AttentionTask {
                rows: first..end.min(first + per_task),
                position: batch.positions[first] as usize,
                blocks: &batch.block_tables[sequence],
                kv_head,
            }));
        }
    }
    tasks
}
