//! Products of rows and weights where 16 registers hold the sums: weights are widened into panels that several rows meet.
//!
//! ```text
//! rows of which the second-level cache holds a panel's inputs  >  some inputs  >  4 outputs, widened once  >  tiles of 3 rows
//! ```
//! 3 rows x 4 outputs take 12 registers for sums, 3 for rows and 1 for weights, and 7 loads feed 12 FMAs: the peak of the FMA units, with
//! panel and rows in the first-level cache.
//!
//! A row of weights comes apart into runs of the same length, which depends on that of the row alone. Every other step of a run is one
//! chain of additions in each lane, and the steps between are another: each is folded at its end, and added to what those
//! before gave. A tile goes through one chain after the other, as there are no registers for both at once. Few rows meet weights as
//! they lie ([`super::direct`]). The sums are the same.

use std::{mem::MaybeUninit, ops::Range};

use super::{
    Line, Rows, WeightRows, direct,
    eights::{EIGHT_BYTES, Eight, Eights, LANES, WideEight},
    lanes::CacheLevel,
    product::{Product, Target, split_evenly, w_rest},
    second_level::rows_bytes,
};

/// Outputs of a panel, and rows of a tile that meets it.
const OUTPUTS: usize = 4;
const ROWS: usize = 3;
/// Steps of the longest run: 1,024 inputs. A chain of half as many ends too often for what its end costs, folding and a branch that nobody
/// foresaw.
const MAX_RUN: usize = 128;
/// Steps of a panel where all rows stay there, whole runs: 1,024 inputs, 16 KB of the first-level cache, with 12 KB of rows.
const MAX_STEPS: usize = 128;

/// How a row of weights comes apart.
#[derive(Clone, Copy)]
pub(super) struct Runs {
    /// Steps of a row, the last of which may have a rest only.
    pub(super) n_steps: usize,
    /// Steps of every run but the last, which may be shorter.
    pub(super) per_run: usize,
}

impl Runs {
    fn of(n_steps: usize) -> Self {
        Self { n_steps, per_run: split_evenly(n_steps, MAX_RUN).next_multiple_of(2) }
    }

    /// Steps of whole runs, as many as fit.
    fn within(self, n_steps: usize) -> usize {
        n_steps / self.per_run * self.per_run
    }
}

/// Weights of some outputs, and how long a step of them is.
#[derive(Clone, Copy)]
pub(super) struct Steps<'a> {
    pub(super) w: WeightRows<'a>,
    /// Whole steps of a row, and bytes of the rest.
    pub(super) n_whole: usize,
    pub(super) rest: usize,
}

impl<'a> Steps<'a> {
    #[inline(always)]
    fn of<T: WideEight>(w: WeightRows<'a>) -> Self {
        Self { w, n_whole: w.row_bytes / (LANES * T::BYTES), rest: w.row_bytes % (LANES * T::BYTES) }
    }

    /// Where a step of an output lies; it need not exist.
    #[inline(always)]
    pub(super) fn at<T: WideEight>(self, output: usize, step: usize) -> *const u8 {
        self.w.bytes.as_ptr().wrapping_add(output * self.w.row_bytes + step * LANES * T::BYTES)
    }

    /// A step of an output, zeros behind its rest.
    ///
    /// # Safety
    /// There is such a step. The CPU has the set of `V`.
    #[inline(always)]
    pub(super) unsafe fn load<V: Eight, T: WideEight>(self, output: usize, step: usize) -> V {
        let at = self.at::<T>(output, step);
        // SAFETY: whole steps and the rest are inside the row.
        unsafe { if step < self.n_whole { T::load(at) } else { w_rest::<Eights<V, T>>(at, self.rest) } }
    }
}

/// All rows times all outputs.
///
/// # Safety
/// Rows are as long as weight rows, every output has its weights, and every product its place. The CPU has the set of `V`.
#[inline(always)]
pub(super) unsafe fn product<V: Eight, T: WideEight>(product: &Product<'_>) {
    let (x, w) = (product.x, Steps::of::<T>(product.w));
    let runs = Runs::of(x.stride / EIGHT_BYTES);
    // SAFETY: as the caller vouches.
    unsafe {
        if direct::takes::<T>(product.rows.len(), w) {
            direct::product::<V, T>(product, w, runs);
        } else if product.rows.len() * x.stride <= rows_bytes() {
            rows_that_fit::<V, T>(product, w, runs);
        } else {
            many_rows::<V, T>(product, w, runs);
        }
    }
}

/// Rows that all stay in the second-level cache: weights pass by in the order in which they lie.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn rows_that_fit<V: Eight, T: WideEight>(product: &Product<'_>, w: Steps<'_>, runs: Runs) {
    let Product { x, rows, outputs, y, .. } = product;
    let per_panel = runs.within(MAX_STEPS);
    let padded = runs.n_steps.next_multiple_of(per_panel);
    for output in outputs.clone().step_by(OUTPUTS) {
        for first in (0..runs.n_steps).step_by(per_panel) {
            let part = Part::of(outputs, output, runs, first..first + per_panel);
            // Few rows have done with a panel before memory answers: two ahead.
            let after = first + 2 * per_panel;
            let next = (output + after / padded * OUTPUTS, after % padded);
            // SAFETY: as the caller vouches.
            unsafe { meet::<V, T, true>(*x, rows.clone(), w, &part, next, y) };
        }
    }
}

/// Rows of which a part stays in the second-level cache, run by run.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn many_rows<V: Eight, T: WideEight>(product: &Product<'_>, w: Steps<'_>, runs: Runs) {
    let Product { x, rows, outputs, y, .. } = product;
    let most_rows = rows_bytes() / (runs.per_run * EIGHT_BYTES) / ROWS * ROWS;
    let rows_at_once = split_evenly(rows.len(), most_rows).next_multiple_of(ROWS);
    for row in rows.clone().step_by(rows_at_once) {
        let rows = row..rows.end.min(row + rows_at_once);
        for first in (0..runs.n_steps).step_by(runs.per_run) {
            for output in outputs.clone().step_by(OUTPUTS) {
                let part = Part::of(outputs, output, runs, first..first + runs.per_run);
                let next = (output + OUTPUTS, first);
                // SAFETY: as the caller vouches.
                unsafe { meet::<V, T, false>(*x, rows.clone(), w, &part, next, y) };
            }
        }
    }
}

/// What a panel has: some steps of some outputs, whole runs of them.
struct Part {
    outputs: Range<usize>,
    steps: Range<usize>,
    per_run: usize,
}

impl Part {
    /// The panel of `outputs` that begins at `output`, for those of the steps that there are.
    fn of(outputs: &Range<usize>, output: usize, runs: Runs, steps: Range<usize>) -> Self {
        let outputs = output..outputs.end.min(output + OUTPUTS);
        Self { outputs, steps: steps.start..steps.end.min(runs.n_steps), per_run: runs.per_run }
    }
}

/// What a panel adds to some rows, while weights are asked for from the output and step `next` on. `ALL`: these are all rows, and they stay in
/// the second-level cache.
///
/// # Safety
/// As [`product`], for these rows, outputs and steps.
#[inline(always)]
unsafe fn meet<V: Eight, T: WideEight, const ALL: bool>(
    x: Rows<'_>,
    rows: Range<usize>,
    w: Steps<'_>,
    part: &Part,
    next: (usize, usize),
    y: &Target<'_>,
) {
    let mut room = Panel(MaybeUninit::uninit());
    let n_tiles = rows.len().div_ceil(ROWS) * part.steps.len().div_ceil(part.per_run);
    let (output, step) = next;
    let next = Next { output, step, n_outputs: OUTPUTS, n_steps: part.steps.len() };
    let mut ahead = Ahead::new::<T>(w, &next, n_tiles);
    let level = if ALL { CacheLevel::First } else { CacheLevel::Second };
    // Weights in f32 are what a panel would have. Where rows are many, it is better to have them near each other.
    let is_panel = ALL && T::BYTES == size_of::<f32>() && w.rest == 0 && part.outputs.len() == OUTPUTS;
    // SAFETY: as the caller vouches.
    unsafe {
        let panel = if is_panel {
            Strided { at: w.at::<T>(part.outputs.start, part.steps.start), stride: w.w.row_bytes }
        } else {
            room.fill::<V, T>(w, part)
        };
        for first in part.steps.clone().step_by(part.per_run) {
            let w = panel.from(first - part.steps.start);
            let run = first..part.steps.end.min(first + part.per_run);
            let mut row = rows.start;
            while row + ROWS <= rows.end {
                ahead.ask::<V>(level);
                tile::<V, ROWS>(x, row, w, &part.outputs, &run, y);
                row += ROWS;
            }
            ahead.ask::<V>(level);
            match rows.end - row {
                2 => tile::<V, 2>(x, row, w, &part.outputs, &run, y),
                1 => tile::<V, 1>(x, row, w, &part.outputs, &run, y),
                _ => {}
            }
        }
    }
}

/// Rows, one `stride` bytes behind the other.
#[derive(Clone, Copy)]
pub(super) struct Strided {
    pub(super) at: *const u8,
    pub(super) stride: usize,
}

impl Strided {
    /// The same rows from a step on.
    #[inline(always)]
    pub(super) fn from(self, step: usize) -> Self {
        Self { at: self.at.wrapping_add(step * EIGHT_BYTES), ..self }
    }
}

/// Some steps of some outputs' weights in f32, one output behind the other.
struct Panel(MaybeUninit<[Line; OUTPUTS * MAX_STEPS * EIGHT_BYTES / size_of::<Line>()]>);

impl Panel {
    /// Widens a part; outputs that it has room for beyond it are zero.
    ///
    /// # Safety
    /// `w` has the outputs and steps. The CPU has the set of `V`.
    #[inline(always)]
    unsafe fn fill<V: Eight, T: WideEight>(&mut self, w: Steps<'_>, part: &Part) -> Strided {
        let Part { outputs, steps, .. } = part;
        assert!(steps.len() <= MAX_STEPS, "a part fits the panel");
        let (start, stride) = (self.0.as_mut_ptr().cast::<u8>(), steps.len() * EIGHT_BYTES);
        // SAFETY: the panel has a place for each step by the assertion.
        unsafe {
            for c in 0..OUTPUTS {
                let at = start.add(c * stride);
                if c >= outputs.len() {
                    at.write_bytes(0, stride);
                    continue;
                }
                let (output, n_whole) = (outputs.start + c, w.n_whole.min(steps.end) - steps.start);
                let from = w.at::<T>(output, steps.start);
                for step in 0..n_whole {
                    T::load::<V>(from.add(step * LANES * T::BYTES)).write(at.add(step * EIGHT_BYTES));
                }
                if n_whole < steps.len() {
                    w.load::<V, T>(output, w.n_whole).write(at.add(n_whole * EIGHT_BYTES));
                }
            }
        }
        Strided { at: start, stride }
    }
}

/// The weights of the next panel or block of outputs, of which each tile asks for a share before it meets this one: memory takes no more
/// requests at once than it has places for. A share is as many lines of as many outputs each time: branches that depend on where it
/// ends would be foreseen too seldom.
pub(super) struct Ahead {
    /// Where the next share begins; it need not exist.
    at: *const u8,
    /// From an output's end to the next one's beginning.
    gap_bytes: usize,
    /// Lines of an output, and those that shares had of the one they are at.
    n_lines: usize,
    line: usize,
    /// Outputs that are left, and those of a share, if it has whole ones.
    n_outputs: usize,
    outputs_per_tile: usize,
    /// Lines of each.
    lines_per_tile: usize,
}

/// Weights that are met next: some steps of some outputs. They need not exist.
pub(super) struct Next {
    pub(super) output: usize,
    pub(super) step: usize,
    pub(super) n_outputs: usize,
    pub(super) n_steps: usize,
}

impl Ahead {
    #[inline(always)]
    pub(super) fn new<T: WideEight>(w: Steps<'_>, next: &Next, n_tiles: usize) -> Self {
        let Next { output, step, n_outputs, n_steps } = *next;
        let lines = (n_steps * LANES * T::BYTES).div_ceil(size_of::<Line>());
        let lines_per_tile = lines.div_ceil((n_tiles / n_outputs).max(1));
        // What the last share of an output asks for beyond it is its next lines.
        let n_lines = lines.next_multiple_of(lines_per_tile);
        Self {
            at: w.at::<T>(output, step),
            gap_bytes: w.w.row_bytes.wrapping_sub(n_lines * size_of::<Line>()),
            n_lines,
            line: 0,
            n_outputs,
            outputs_per_tile: n_outputs.div_ceil(n_tiles),
            lines_per_tile,
        }
    }

    /// Asks for a share.
    ///
    /// # Safety
    /// The CPU has the set of `V`.
    #[inline(always)]
    pub(super) unsafe fn ask<V: Eight>(&mut self, level: CacheLevel) {
        for _ in 0..self.outputs_per_tile.min(self.n_outputs) {
            for _ in 0..self.lines_per_tile {
                // SAFETY: the caller vouches for the instruction set.
                unsafe { V::prefetch(self.at, level) };
                self.at = self.at.wrapping_add(size_of::<Line>());
            }
            self.line += self.lines_per_tile;
            if self.line == self.n_lines {
                self.line = 0;
                self.n_outputs -= 1;
                self.at = self.at.wrapping_add(self.gap_bytes);
            }
        }
    }
}

/// What a run adds to `R` rows from `row` and some outputs.
///
/// # Safety
/// As [`product`], for these rows and outputs; `w` has the run of them.
#[inline(always)]
unsafe fn tile<V: Eight, const R: usize>(
    x: Rows<'_>,
    row: usize,
    w: Strided,
    outputs: &Range<usize>,
    run: &Range<usize>,
    y: &Target<'_>,
) {
    // SAFETY: a row of `x` has all steps of a weight row, and `y` a place for each output of the rows.
    unsafe {
        let x = Strided { at: x.bytes.as_ptr().add(row * x.stride), stride: x.stride }.from(run.start);
        let place = y.start.add(row * y.stride + outputs.start);
        // What the first chain gave is not kept in registers, of which the second needs all.
        let sums = chain::<V, R>(x, w, run.len().div_ceil(2));
        add_to(place, y.stride, sums, outputs.len(), run.start == 0);
        let sums = chain::<V, R>(x.from(1), w.from(1), run.len() / 2);
        add_to(place, y.stride, sums, outputs.len(), false);
    }
}

/// Adds the sums of `n` outputs to the results of `R` rows; the first ones are those results.
///
/// # Safety
/// `y` may be written for `R` rows, `stride` apart, of `n` numbers.
#[inline(always)]
unsafe fn add_to<const R: usize>(y: *mut f32, stride: usize, sums: [[f32; OUTPUTS]; R], n: usize, is_first: bool) {
    for (r, sums) in sums.into_iter().enumerate() {
        // SAFETY: as the caller vouches.
        unsafe {
            let place = y.add(r * stride);
            // All four at once where there are four: one by one they take as long as the fold.
            match (n == OUTPUTS, is_first) {
                (true, true) => place.cast::<[f32; OUTPUTS]>().write(sums),
                (true, false) => {
                    let mut totals = place.cast::<[f32; OUTPUTS]>().read();
                    totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
                    place.cast::<[f32; OUTPUTS]>().write(totals);
                }
                (false, is_first) => {
                    for (c, sum) in sums.into_iter().enumerate().take(n) {
                        let place = place.add(c);
                        place.write(if is_first { sum } else { place.read() + sum });
                    }
                }
            }
        }
    }
}

/// The sums of every other step of `R` rows with a panel.
///
/// # Safety
/// Rows and panel have `n_steps` of them. The CPU has the set of `V`.
#[inline(always)]
unsafe fn chain<V: Eight, const R: usize>(x: Strided, w: Strided, n_steps: usize) -> [[f32; OUTPUTS]; R] {
    // No closures: they need not be compiled for the instruction set.
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[V::splat(0.0); R]; OUTPUTS];
        for step in 0..n_steps {
            let at = 2 * step * EIGHT_BYTES;
            let mut xs = [V::read(x.at.add(at)); R];
            for (r, x_step) in xs.iter_mut().enumerate().skip(1) {
                *x_step = V::read(x.at.add(r * x.stride + at));
            }
            for (c, sums) in acc.iter_mut().enumerate() {
                let w = V::read(w.at.add(c * w.stride + at));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = sum.add_product(x, w);
                }
            }
        }
        let mut folded = [[0.0; OUTPUTS]; R];
        for (r, folded) in folded.iter_mut().enumerate() {
            *folded = V::fold4([acc[0][r], acc[1][r], acc[2][r], acc[3][r]]);
        }
        folded
    }
}
