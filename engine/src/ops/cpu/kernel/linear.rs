//! Products of the same rows with some matrices, shared out over the threads by outputs: one piece of work for all of
//! them, because joining threads costs as much as a small matrix.

use std::{
    array,
    ops::{Range, RangeInclusive},
};

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
/// Outputs of a task are a multiple of this: whole cache lines of the result, and whole tiles of 8 and of 6, of 8 for few rows, or whole
/// panels.
const OUTPUT_UNIT: usize = 48;
const FEW_ROWS_UNIT: usize = 16;
const FEW_ROWS: usize = 4;
const WIDENED_UNIT: usize = 16;
#[cfg(target_arch = "x86_64")]
const TILE_UNIT: usize = 32;
/// Share of the threads' time for which tasks that take the same time keep them busy, of which a division is good enough.
const GOOD_SHARE: f64 = 0.94;
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

    /// Outputs that a task has a multiple of.
    fn unit(self, isa: Isa, n_rows: usize) -> usize {
        match self {
            Self::Rows(_, format) => match isa.tiles(format) {
                Tiles::InPlace if n_rows < FEW_ROWS => FEW_ROWS_UNIT,
                Tiles::InPlace => OUTPUT_UNIT,
                Tiles::Panel => WIDENED_UNIT,
                #[cfg(target_arch = "x86_64")]
                Tiles::Unit => TILE_UNIT,
            },
            Self::Panels(_) => PANEL_OUTPUTS,
        }
    }

    /// Rows that a task has a multiple of, unless it has all.
    fn row_unit(self, isa: Isa) -> usize {
        match self {
            Self::Rows(_, format) => isa.tiles(format).packed_rows(),
            Self::Panels(_) => 1,
        }
    }

    /// Tasks that a thread gets on average.
    fn tasks_per_thread(self, isa: Isa, n_rows: usize) -> usize {
        match self {
            _ if n_rows < MANY_ROWS => TASKS_PER_THREAD,
            Self::Rows(_, format) if isa.tiles(format) != Tiles::InPlace => TASKS_OF_MANY_ROWS,
            Self::Panels(_) if isa.widens_blocks() => TASKS_OF_MANY_ROWS,
            Self::Rows(..) | Self::Panels(_) => TASKS_PER_THREAD,
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

/// Some rows times some outputs of one of the matrices.
struct Task {
    matrix: usize,
    rows: Range<usize>,
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
        let Task { matrix, rows, outputs } = &tasks[idx];
        let (weights, rows, outputs) = (matrices[*matrix], rows.clone(), outputs.clone());
        let y = &targets[*matrix];
        let packed = packed.iter().find(|packed| weights.reads(packed)).expect("packed for every matrix");
        match (weights, packed) {
            (Weights::Rows(w, format), Packed::Lent(x, _)) => isa.run(format, Product { x: *x, rows, w, outputs, y }),
            (Weights::Rows(w, format), Packed::Rows(x, _)) => {
                isa.run(format, Product { x: x.rows(), rows, w, outputs, y });
            }
            (Weights::Panels(w), Packed::Blocks(x)) => PanelProduct { x, rows, w, outputs, y }.run(isa),
            _ => unreachable!("a matrix reads rows packed for it"),
        }
    });
    results
}

fn tasks(isa: Isa, n_rows: usize, matrices: &[Weights<'_>], n_threads: usize) -> Vec<Task> {
    let units: Vec<usize> =
        matrices.iter().map(|matrix| matrix.n_outputs().div_ceil(matrix.unit(isa, n_rows))).collect();
    // Matrices that are multiplied at once are mostly alike.
    let first = matrices[0];
    let unit_bytes = first.unit(isa, n_rows) * first.row_bytes();
    let least = MIN_TASK_BYTES.div_ceil(unit_bytes);
    let most = units.iter().sum::<usize>().div_ceil(n_threads * first.tasks_per_thread(isa, n_rows)).max(least);
    let Division { n_parts, units_per_task } = Division::of(&units, n_rows, least..=most, n_threads);
    let mut tasks = Vec::new();
    for (idx, matrix) in matrices.iter().enumerate() {
        let (n_outputs, per_task) = (matrix.n_outputs(), units_per_task * matrix.unit(isa, n_rows));
        let rows_per_task = n_rows.div_ceil(n_parts).max(1).next_multiple_of(matrix.row_unit(isa));
        for first in (0..n_outputs).step_by(per_task) {
            let outputs = first..n_outputs.min(first + per_task);
            tasks.extend((0..n_rows).step_by(rows_per_task).map(|row| {
                let (rows, outputs) = (row..n_rows.min(row + rows_per_task), outputs.clone());
                Task { matrix: idx, rows, outputs }
            }));
        }
    }
    tasks
}

/// How work is cut into tasks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Division {
    /// Parts of the rows. Weights are read once for each.
    n_parts: usize,
    /// Units of outputs.
    units_per_task: usize,
}

impl Division {
    /// The fewest parts of rows, and then the largest tasks of so many units, that keep threads busy; or else those that keep them
    /// busiest. Many threads share a matrix of few units badly: 19 over 16 of them take as long as 32 would.
    fn of(units: &[usize], n_rows: usize, per_task: RangeInclusive<usize>, n_threads: usize) -> Self {
        let mut best = (Self { n_parts: 1, units_per_task: *per_task.end() }, 0.0);
        let parts = 1..=(n_rows / MANY_ROWS).clamp(1, n_threads);
        let all = parts
            .flat_map(|n_parts| per_task.clone().rev().map(move |units_per_task| Self { n_parts, units_per_task }));
        for division in all {
            let share = division.busy_share(units, n_threads);
            if share >= GOOD_SHARE {
                return division;
            }
            if share > best.1 {
                best = (division, share);
            }
        }
        best.0
    }

    /// Share of the threads' time in which they work, if each unit takes the same time.
    fn busy_share(self, units: &[usize], n_threads: usize) -> f64 {
        let n_tasks: usize = units.iter().map(|units| units.div_ceil(self.units_per_task) * self.n_parts).sum();
        let work = units.iter().sum::<usize>() * self.n_parts;
        work as f64 / (n_tasks.div_ceil(n_threads) * n_threads * self.units_per_task) as f64
    }
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
    // An even number of rows, so that a run of them ends where a line does, whatever the instruction set, and whole groups.
    let group = isa.tiles(format).packed_rows().max(2);
    let rows_at_once = (MIN_PACKED_BYTES / packed.stride).next_multiple_of(group).max(group);
    let lines_at_once = rows_at_once * packed.stride / size_of::<Line>();
    pool.for_rows(&mut packed.lines, RowRuns { width: lines_at_once, per_task: 1 }, |run, lines| {
        let rows = &x[run * rows_at_once * width..];
        isa.pack(&rows[..rows.len().min(rows_at_once * width)], width, format, lines);
    });
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn division(units: &[usize], n_rows: usize, most: usize, n_threads: usize) -> (usize, usize) {
        let Division { n_parts, units_per_task } = Division::of(units, n_rows, 1..=most, n_threads);
        (n_parts, units_per_task)
    }

    #[test]
    fn tasks_are_as_large_as_they_may_be_where_they_share_out_evenly() {
        assert_eq!(division(&[56], 512, 7, 2), (1, 7));
        assert_eq!(division(&[19], 512, 1, 2), (1, 1));
        assert_eq!(division(&[152, 152], 1, 4, 4), (1, 4));
        assert_eq!(division(&[1], 1, 1, 1), (1, 1));
        // Tasks that are worth handing over are not made smaller than that.
        assert_eq!(Division::of(&[19], 1, 3..=3, 16), Division { n_parts: 1, units_per_task: 3 });
    }

    #[test]
    fn rows_are_parted_where_outputs_are_too_few_for_the_threads() {
        // 19 units take two turns of 16 threads, 38 take three, 57 four, and 76 five.
        assert_eq!(division(&[19], 512, 1, 16), (4, 1));
        assert_eq!(division(&[19, 3, 3], 512, 1, 16), (5, 1));
    }

    #[test]
    fn few_rows_are_never_parted() {
        for n_rows in [0, 1, 8, 127] {
            assert_eq!(Division::of(&[19], n_rows, 1..=1, 16).n_parts, 1);
        }
        assert_eq!(division(&[152], 8, 10, 16), (1, 10));
    }
}
