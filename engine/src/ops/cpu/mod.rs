//! The CPU: its threads, and every operation of a forward pass as one method. What a GPU computes must agree with it.
//!
//! Every row of every result is computed with the same operations in the same order however many rows there are, so
//! a sequence's numbers do not depend on who shares its step, on chunking or on preemption (style rule 25).

mod activation;
mod attention;
mod buffer;
mod cache;
mod kernel;
mod weights;

pub use buffer::Buffer;
pub use cache::CpuCache;
pub use kernel::{Isa, NoSuchIsa};
pub use weights::{CpuMatrix, CpuVector};

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use super::BatchInputs;
use crate::{
    model::{Activation, AttentionSpec, RopeTable, StoredMatrix, WeightFormat},
    pool::{Pool, RowRuns},
};

/// Work below this many numbers is not worth handing to another thread.
const MIN_VALUES_PER_TASK: usize = 16 * 1024;

/// Tasks of a thread while the peak is measured, of which one that wakes late leaves some to others, and steps of each sum in one.
const PEAK_TASKS: usize = 64;
const PEAK_STEPS: usize = 1 << 16;

/// The threads that compute, and the instructions they compute with.
#[derive(Debug)]
pub struct CpuOps {
    pool: Pool,
    isa: Isa,
}

impl CpuOps {
    /// Computes on `n_threads` threads, the caller's among them, with those instructions. Every set keeps what is promised
    /// of one, though not with the same bits.
    pub fn new(n_threads: usize, isa: Isa) -> std::io::Result<Self> {
        Ok(Self { pool: Pool::new(n_threads)?, isa })
    }

    /// What it computes with.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads it computes on.
    pub(crate) fn n_threads(&self) -> usize {
        self.pool.n_threads()
    }

    /// The threads, for work of others between two forward passes.
    pub(crate) fn pool(&mut self) -> &mut Pool {
        &mut self.pool
    }

    /// `change(idx, row)` for every row, shared out if there is much to do.
    fn each_row(&mut self, x: &mut CpuTensor, change: impl Fn(usize, &mut [f32]) + Sync) {
        let width = x.width;
        let rows = RowRuns { width, per_task: (MIN_VALUES_PER_TASK / width).max(1) };
        self.pool.for_rows(&mut x.values, rows, |first, run| {
            run.chunks_exact_mut(width).enumerate().for_each(|(idx, row)| change(first + idx, row));
        });
    }
}

/// Rows of f32.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuTensor {
    /// Numbers of one row.
    pub width: usize,
    /// All rows, one after the other.
    pub values: Buffer<f32>,
}

impl CpuTensor {
    /// Rows to be written before they are read.
    fn unwritten(n_rows: usize, width: usize) -> Self {
        Self { width, values: Buffer::unwritten(n_rows * width) }
    }

    fn n_rows(&self) -> usize {
        self.values.len() / self.width
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..][..self.width]
    }
}

impl CpuOps {
    /// Floating-point operations a second of all threads together, as many as the instructions do that multiply by weights of
    /// this format, with everything in registers: what no product can exceed. Takes some milliseconds. `None` of blocks,
    /// which are multiplied as integers.
    pub fn peak_flop_s(&mut self, format: WeightFormat) -> Option<f64> {
        let (format, isa, n_tasks) = (weights::plain(format)?, self.isa, PEAK_TASKS * self.n_threads());
        let n_operations = AtomicU64::new(0);
        let begun = Instant::now();
        self.pool.run(n_tasks, &|_| {
            n_operations.fetch_add(isa.multiply_add(format, PEAK_STEPS), Ordering::Relaxed);
        });
        Some(n_operations.into_inner() as f64 / begun.elapsed().as_secs_f64())
    }

    /// Takes a weight matrix over from its file; a quantised one may become numbers of the format `plain`.
    pub(crate) fn matrix(&mut self, weight: &StoredMatrix, plain: WeightFormat) -> CpuMatrix {
        CpuMatrix::new(&mut self.pool, weight, plain)
    }

    /// Rows of `table`, one a token of the batch.
    pub fn embed(&mut self, table: &CpuMatrix, batch: &BatchInputs) -> CpuTensor {
        let mut out = CpuTensor::unwritten(batch.token_ids.len(), table.n_inputs());
        self.each_row(&mut out, |row, out| table.read_row(batch.token_ids[row] as usize, out));
        out
    }

    /// `x / sqrt(mean(x^2) + eps) * weight` over every run of a row that is as long as `weight`: the row itself, or
    /// each of its heads.
    pub fn rms_norm(&mut self, x: &CpuTensor, weight: &CpuVector, eps: f32) -> CpuTensor {
        let mut out = CpuTensor::unwritten(x.n_rows(), x.width);
        let (isa, weight) = (self.isa, weight.values());
        self.each_row(&mut out, |row, out| {
            let runs = x.row(row).chunks_exact(weight.len());
            out.chunks_exact_mut(weight.len()).zip(runs).for_each(|(out, x)| isa.norm(out, x, weight, eps));
        });
        out
    }

    /// `x * weight^T + bias` for each part: all of them at once, since they read the same rows.
    pub fn linear<const N: usize>(
        &mut self,
        x: &CpuTensor,
        parts: [(&CpuMatrix, Option<&CpuVector>); N],
    ) -> [CpuTensor; N] {
        assert!(parts.iter().all(|(w, _)| w.n_inputs() == x.width), "a row has one number for each input");
        let results = kernel::multiply(&mut self.pool, self.isa, &x.values, parts.map(|(weight, _)| weight.weights()));
        let mut parts = parts.into_iter();
        results.map(|values| {
            let (weight, bias) = parts.next().expect("a result for each part");
            let mut out = CpuTensor { width: weight.n_outputs(), values };
            if let Some(bias) = bias {
                self.each_row(&mut out, |_, row| add_to(row, bias.values()));
            }
            out
        })
    }

    /// Turns every head of every row by the angles of its position; numbers beyond the pairs stay.
    pub fn rope(&mut self, x: &mut CpuTensor, rope: &RopeTable, batch: &BatchInputs) {
        let n_pairs = rope.n_pairs;
        self.each_row(x, |row_idx, row| {
            let position = batch.positions[row_idx] as usize;
            let angles = position * n_pairs..(position + 1) * n_pairs;
            let (cos, sin) = (&rope.cos[angles.clone()], &rope.sin[angles]);
            for head in row.chunks_exact_mut(rope.head_dim) {
                rotate(&mut head[..2 * n_pairs], cos, sin);
            }
        });
    }

    /// Writes one layer's keys and values of the batch into their slots.
    pub fn store_kv(
        &mut self,
        cache: &mut CpuCache,
        layer: usize,
        keys: &CpuTensor,
        values: &CpuTensor,
        batch: &BatchInputs,
    ) {
        for (row, slot) in batch.slot_mapping.iter().enumerate() {
            cache.store(layer, *slot as usize, keys.row(row), values.row(row));
        }
    }

    /// Causal attention of the batch's queries over one layer's cache, read through the block tables.
    pub fn attention(
        &mut self,
        cache: &CpuCache,
        layer: usize,
        queries: &CpuTensor,
        spec: AttentionSpec,
        batch: &BatchInputs,
    ) -> CpuTensor {
        let mut out = CpuTensor::unwritten(queries.n_rows(), queries.width);
        let tasks = attention::tasks(spec.heads, batch);
        self.isa.attend(&mut self.pool, &tasks, cache.layer(layer), spec, &queries.values, &mut out.values);
        out
    }

    /// `activation(gate) * up`.
    pub fn activate_mul(&mut self, mut gate: CpuTensor, up: &CpuTensor, activation: Activation) -> CpuTensor {
        let isa = self.isa;
        self.each_row(&mut gate, |row, gate| match activation {
            Activation::Silu => isa.silu_mul(gate, up.row(row)),
            Activation::GeluTanh => activation::gelu_tanh_mul(gate, up.row(row)),
        });
        gate
    }

    /// `x += y`.
    pub fn add(&mut self, x: &mut CpuTensor, y: &CpuTensor) {
        self.each_row(x, |row, x| add_to(x, y.row(row)));
    }

    /// `x *= factor`.
    pub fn scale(&mut self, x: &mut CpuTensor, factor: f32) {
        self.each_row(x, |_, row| row.iter_mut().for_each(|x| *x *= factor));
    }

    /// `x = cap * tanh(x / cap)`.
    pub fn softcap(&mut self, x: &mut CpuTensor, cap: f32) {
        self.each_row(x, |_, row| activation::softcap(row, cap));
    }

    /// Some of the rows: those whose next token is sampled go through the output matrix, and few others.
    pub fn rows(&self, x: &CpuTensor, rows: &[u32]) -> CpuTensor {
        let mut some = CpuTensor::unwritten(rows.len(), x.width);
        for (row, some) in rows.iter().zip(some.values.chunks_exact_mut(x.width)) {
            some.copy_from_slice(x.row(*row as usize));
        }
        some
    }
}

fn add_to(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// The halves of a head hold the two coordinates of its pairs.
fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turning_a_pair_keeps_its_length() {
        let mut head = [3.0, 0.0, 4.0, 1.0];
        rotate(&mut head, &[0.6, 1.0], &[0.8, 0.0]);
        assert!((head[0].hypot(head[2]) - 5.0).abs() < 1e-6);
        assert_eq!((head[1], head[3]), (0.0, 1.0));
    }
}
