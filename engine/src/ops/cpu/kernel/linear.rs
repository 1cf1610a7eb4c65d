//! Products of the same rows with some matrices, shared out over the threads by outputs: one piece of work for all of
//! them, because joining threads costs as much as a small matrix.

use std::{array, ops::Range};

use super::{
    Buffer, Format, Isa, Line, PackedRows, Panels, Product, Rows, Target, WeightRows,
    blocks::{BlockRows, PANEL_OUTPUTS, PanelProduct},
    lanes::Tiles,
};
use crate::pool::{Pool, RowRuns};

/// Weight bytes below which a task costs more to hand over than it brings.
const MIN_TASK_BYTES: usize = 32 << 10;
/// Tasks a thread gets on average: one that is slow or late leaves some to the others, and all end together. Neighbouring
/// tasks are as good as one (see the pool), so only the claim of each is a cost.
const TASKS_PER_THREAD: usize = 16;
/// The same where so many rows meet panels that each task has them all from memory again.
const TASKS_OF_MANY_ROWS: usize = 4;
const MANY_ROWS: usize = 64;
/// Outputs of a task are a multiple of this: whole tiles of 8 and of 6, or whole panels, and whole cache lines of the result.
const OUTPUT_UNIT: usize = 48;
const WIDENED_UNIT: usize = 16;
/// Packed bytes of a task: below it, rows are packed where they are used.
const MIN_PACKED_BYTES: usize = 64 << 10;

/// A weight matrix.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Weights<'a> {
    /// Plain numbers.
    Rows(WeightRows<'a>, Format),
    /// Blocks.
    Panels(&'a Panels),
}

/// Rows as some matrices read them.
enum Packed<'a> {
    /// As they are.
    Lent(Rows<'a>, Format),
    Rows(PackedRows, Format),
    Blocks(BlockRows),
}

impl Weights<'_> {
    fn n_inputs(self) -> usize {
        match self {
            Self::Rows(rows, format) => rows.row_bytes / format.bytes(),
            Self::Panels(panels) => panels.n_inputs(),
        }
    }

    fn n_outputs(self) -> usize {
        match self {
            Self::Rows(rows, _) => rows.bytes.len() / rows.row_bytes,
            Self::Panels(panels) => panels.n_outputs(),
        }
    }

    /// Bytes of an output.
    fn row_bytes(self) -> usize {
        match self {
            Self::Rows(rows, _) => rows.row_bytes,
            Self::Panels(panels) => panels.row_bytes(),
        }
    }

    /// Outputs that a task has a multiple of, and tasks that a thread gets on average.
    fn division(self, isa: Isa, n_rows: usize) -> (usize, usize) {
        match self {
            Self::Rows(_, format) => match isa.tiles(format) {
                Tiles::InPlace => (OUTPUT_UNIT, TASKS_PER_THREAD),
                Tiles::Panel if n_rows < MANY_ROWS => (WIDENED_UNIT, TASKS_PER_THREAD),
                Tiles::Panel => (WIDENED_UNIT, TASKS_OF_MANY_ROWS),
            },
            Self::Panels(_) if n_rows < MANY_ROWS => (PANEL_OUTPUTS, TASKS_PER_THREAD),
            Self::Panels(_) => (PANEL_OUTPUTS, TASKS_OF_MANY_ROWS),
        }
    }

    /// Whether it reads rows packed like that.
    fn reads(self, packed: &Packed<'_>) -> bool {
        match (self, packed) {
            (Self::Rows(_, format), Packed::Rows(_, packed) | Packed::Lent(_, packed)) => format == *packed,
            (Self::Panels(_), Packed::Blocks(_)) => true,
            (Self::Rows(..), Packed::Blocks(_)) | (Self::Panels(_), Packed::Rows(..) | Packed::Lent(..)) => false,
        }
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
) -> [Buffer<f32>; N] {
    let n_rows = x.len() / matrices[0].n_inputs();
    let packed = pack_for(pool, isa, x, &matrices);
    let mut results = matrices.map(|matrix| Buffer::unwritten(n_rows * matrix.n_outputs()));
    let mut places = results.iter_mut().zip(matrices).map(|(y, matrix)| Target::new(y, matrix.n_outputs()));
    let targets: [Target<'_>; N] = array::from_fn(|_| places.next().expect("a result for each matrix"));
    let tasks = tasks(isa, n_rows, &matrices, pool.n_threads());
    pool.run(tasks.len(), &|idx| {
        let Task { matrix, outputs } = &tasks[idx];
        let (weights, outputs, y) = (matrices[*matrix], outputs.clone(), &targets[*matrix]);
        let packed = packed.iter().find(|packed| weights.reads(packed)).expect("packed for every matrix");
        match (weights, packed) {
            (Weights::Rows(w, format), Packed::Lent(x, _)) => isa.run(format, Product { x: *x, w, outputs, y }),
            (Weights::Rows(w, format), Packed::Rows(x, _)) => isa.run(format, Product { x: x.rows(), w, outputs, y }),
            (Weights::Panels(w), Packed::Blocks(x)) => PanelProduct { x, w, outputs, y }.run(isa),
            _ => unreachable!("a matrix reads rows packed for it"),
        }
    });
    results
}

fn tasks(isa: Isa, n_rows: usize, matrices: &[Weights<'_>], n_threads: usize) -> Vec<Task> {
    let n_outputs: usize = matrices.iter().map(|matrix| matrix.n_outputs()).sum();
    let mut tasks = Vec::new();
    for (idx, matrix) in matrices.iter().enumerate() {
        let (unit, per_thread) = matrix.division(isa, n_rows);
        let least = MIN_TASK_BYTES.div_ceil(matrix.row_bytes());
        let per_task = n_outputs.div_ceil(n_threads * per_thread).max(least).next_multiple_of(unit);
        let n_outputs = matrix.n_outputs();
        let firsts = (0..n_outputs).step_by(per_task);
        tasks.extend(firsts.map(|first| Task { matrix: idx, outputs: first..n_outputs.min(first + per_task) }));
    }
    tasks
}

/// The rows as each of the matrices reads them: mostly alike.
fn pack_for<'a>(pool: &mut Pool, isa: Isa, x: &'a [f32], matrices: &[Weights<'_>]) -> Vec<Packed<'a>> {
    let mut packed: Vec<Packed<'_>> = Vec::with_capacity(1);
    for matrix in matrices {
        assert_eq!(matrix.n_inputs(), matrices[0].n_inputs(), "all matrices take the same rows");
        if !packed.iter().any(|packed| matrix.reads(packed)) {
            let width = matrix.n_inputs();
            packed.push(match matrix {
                Weights::Rows(_, format) => match isa.as_they_lie(x, width, *format) {
                    Some(rows) => Packed::Lent(rows, *format),
                    None => Packed::Rows(pack(pool, isa, x, width, *format), *format),
                },
                Weights::Panels(_) => Packed::Blocks(BlockRows::new(pool, isa, x, width)),
            });
        }
    }
    packed
}

fn pack(pool: &mut Pool, isa: Isa, x: &[f32], width: usize, format: Format) -> PackedRows {
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
