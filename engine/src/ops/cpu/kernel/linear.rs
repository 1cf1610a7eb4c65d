//! A product shared out over the threads by outputs.

use super::{Format, Isa, Product, Target, WeightRows};
use crate::ops::cpu::pool::Pool;

/// Weight bytes below which a task costs more to hand over than it brings.
const MIN_TASK_BYTES: usize = 32 << 10;
/// Tasks a thread gets on average, so that one that is slow or late leaves some to the others.
const TASKS_PER_THREAD: usize = 4;
/// Outputs of a task are a multiple of this: whole tiles of 8 and of 6, and whole cache lines of the result.
const OUTPUT_UNIT: usize = 48;

/// Rows of `x`, each as long as a weight row, times the transpose of the weights.
pub(in super::super) fn multiply(pool: &mut Pool, isa: Isa, x: &[f32], w: WeightRows<'_>, format: Format) -> Vec<f32> {
    let n_inputs = w.row_bytes / format.bytes();
    let n_outputs = w.bytes.len() / w.row_bytes;
    let packed = isa.pack(x, n_inputs, format);
    let mut y = vec![0.0; packed.n_rows * n_outputs];
    let target = Target::new(&mut y, n_outputs);
    let per_task = outputs_per_task(w, n_outputs, pool.n_threads());
    pool.run(n_outputs.div_ceil(per_task), &|task| {
        let outputs = task * per_task..n_outputs.min((task + 1) * per_task);
        isa.run(format, Product { x: &packed, w, outputs, y: &target });
    });
    y
}

fn outputs_per_task(w: WeightRows<'_>, n_outputs: usize, n_threads: usize) -> usize {
    let even = n_outputs.div_ceil(n_threads * TASKS_PER_THREAD);
    let least = MIN_TASK_BYTES.div_ceil(w.row_bytes);
    even.max(least).next_multiple_of(OUTPUT_UNIT)
}
