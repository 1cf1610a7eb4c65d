//! Products of the same rows with some matrices, shared out over the threads by outputs: one piece of work for all of
//! them, because joining threads costs as much as a small matrix.

use std::{array, ops::Range};

use super::{Format, Isa, Line, PackedRows, Product, Target, WeightRows};
use crate::ops::cpu::pool::{Pool, RowRuns};

/// Weight bytes below which a task costs more to hand over than it brings.
const MIN_TASK_BYTES: usize = 32 << 10;
/// Tasks a thread gets on average, so that one that is slow or late leaves some to the others.
const TASKS_PER_THREAD: usize = 4;
/// Outputs of a task are a multiple of this: whole tiles of 8 and of 6, and whole cache lines of the result.
const OUTPUT_UNIT: usize = 48;
/// Packed bytes of a task: below it, rows are packed where they are used.
const MIN_PACKED_BYTES: usize = 64 << 10;

/// A weight matrix.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Weights<'a> {
    pub(in super::super) rows: WeightRows<'a>,
    pub(in super::super) format: Format,
}

impl Weights<'_> {
    fn n_inputs(self) -> usize {
        self.rows.row_bytes / self.format.bytes()
    }

    fn n_outputs(self) -> usize {
        self.rows.bytes.len() / self.rows.row_bytes
    }
}

/// Some outputs of one of the matrices.
struct Task {
    matrix: usize,
    outputs: Range<usize>,
}

/// Rows of `x`, each as long as a weight row, times the transpose of each matrix.
pub(in super::super) fn multiply<const N: usize>(
    pool: &mut Pool,
    isa: Isa,
    x: &[f32],
    matrices: [Weights<'_>; N],
) -> [Vec<f32>; N] {
    let n_rows = x.len() / matrices[0].n_inputs();
    let packed = pack_for(pool, isa, x, &matrices);
    let mut results = matrices.map(|matrix| vec![0.0; n_rows * matrix.n_outputs()]);
    let mut places = results.iter_mut().zip(matrices).map(|(y, matrix)| Target::new(y, matrix.n_outputs()));
    let targets: [Target<'_>; N] = array::from_fn(|_| places.next().expect("a result for each matrix"));
    let tasks = tasks(&matrices, pool.n_threads());
    pool.run(tasks.len(), &|idx| {
        let Task { matrix, outputs } = &tasks[idx];
        let Weights { rows: w, format } = matrices[*matrix];
        let x = &packed.iter().find(|(packed, _)| *packed == format).expect("packed for every format").1;
        isa.run(format, Product { x, w, outputs: outputs.clone(), y: &targets[*matrix] });
    });
    results
}

fn tasks(matrices: &[Weights<'_>], n_threads: usize) -> Vec<Task> {
    let n_outputs: usize = matrices.iter().map(|matrix| matrix.n_outputs()).sum();
    let even = n_outputs.div_ceil(n_threads * TASKS_PER_THREAD);
    let mut tasks = Vec::new();
    for (idx, matrix) in matrices.iter().enumerate() {
        let least = MIN_TASK_BYTES.div_ceil(matrix.rows.row_bytes);
        let per_task = even.max(least).next_multiple_of(OUTPUT_UNIT);
        let n_outputs = matrix.n_outputs();
        let firsts = (0..n_outputs).step_by(per_task);
        tasks.extend(firsts.map(|first| Task { matrix: idx, outputs: first..n_outputs.min(first + per_task) }));
    }
    tasks
}

/// The rows as each format of the matrices reads them: mostly one.
fn pack_for(pool: &mut Pool, isa: Isa, x: &[f32], matrices: &[Weights<'_>]) -> Vec<(Format, PackedRows)> {
    let mut packed: Vec<(Format, PackedRows)> = Vec::with_capacity(1);
    for matrix in matrices {
        assert_eq!(matrix.n_inputs(), matrices[0].n_inputs(), "all matrices take the same rows");
        if packed.iter().all(|(format, _)| *format != matrix.format) {
            packed.push((matrix.format, pack(pool, isa, x, *matrix)));
        }
    }
    packed
}

fn pack(pool: &mut Pool, isa: Isa, x: &[f32], matrix: Weights<'_>) -> PackedRows {
    let (width, format) = (matrix.n_inputs(), matrix.format);
    let mut packed = isa.unpacked(x.len() / width, width, format);
    // An even number of rows, so that a run of them ends where a line does, whatever the instruction set.
    let rows_at_once = (MIN_PACKED_BYTES / packed.stride).next_multiple_of(2).max(2);
    let lines_at_once = rows_at_once * packed.stride / size_of::<Line>();
    pool.for_rows(&mut packed.lines, RowRuns { width: lines_at_once, per_task: 1 }, |run, lines| {
        let rows = &x[run * rows_at_once * width..];
        isa.pack(&rows[..rows.len().min(rows_at_once * width)], width, format, lines);
    });
    packed
}
