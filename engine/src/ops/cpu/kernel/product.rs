//! `y = x * w^T` for rows packed by the same lanes.
//!
//! Tiles of rows x outputs stay in registers while all inputs pass by:
//!
//! ```text
//!              outputs: C weight rows, as they lie in the file
//! rows: R x    [ acc acc acc ... ]     a step reads R + C registers and makes R * C
//! ```
//! Four rows take 6 outputs at once, which leaves registers for what is read, two and three take 8. Weights are read from
//! memory once for as many rows as the cache holds.
//!
//! Such a tile reads as many short streams as it has outputs, too many and too short for the CPU's own prefetcher. So it
//! asks for the weights of the next one, in the order of their addresses. One row waits for memory alone: it takes its
//! outputs one after the other, which is one long stream, and asks for what comes a little later; a thread then reads as
//! fast as plain copying would (docs/benchmarks/NOTES-cpu.md).
//!
//! Where registers hold fewer sums ([`Tiles::Panel`]), several rows meet weights that were widened into a panel, run by run:
//!
//! ```text
//! rows whose run the second-level cache holds  >  run of inputs  >  4 outputs, widened once  >  tiles of 3 rows
//! ```

use std::{marker::PhantomData, mem::MaybeUninit, ops::Range};

use super::{
    Kernel, Line, PackedRows,
    lanes::{CacheLevel, Lanes, Strided, Tiles},
};

/// Packed rows that stay in the second-level cache while weights pass by, in bytes: half of it.
const CACHED_BYTES: usize = 512 << 10;
/// Weights of a tile that fit the first-level cache beside those of the tile before it, in bytes.
const NEAR_BYTES: usize = 32 << 10;
/// How far ahead one row asks for weights, in bytes.
const AHEAD_BYTES: usize = 4 << 10;
/// Shorter weight rows are those of models that caches hold: there one row waits for its sums, of which a tile has more in
/// flight, and not for memory.
const LONG_ROW_BYTES: usize = 1 << 10;
/// Longest step of a weight row, in bytes.
const MAX_STEP_BYTES: usize = 128;
/// Outputs of a panel, and rows of a tile that meets it.
const PANEL_OUTPUTS: usize = 4;
const PANEL_ROWS: usize = 3;
/// Runs of packed rows that stay in the second-level cache while panels pass by, in bytes: 66 rows, about half of the 512 KB of
/// chips that have panels.
const CACHED_RUN_BYTES: usize = 264 << 10;
/// Bytes of a panel: runs of 1,024 inputs in f32.
const PANEL_BYTES: usize = PANEL_OUTPUTS * 1024 * size_of::<f32>();

/// Weight rows, one after the other.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct WeightRows<'a> {
    pub(in super::super) bytes: &'a [u8],
    pub(in super::super) row_bytes: usize,
}

/// Results, lent to tasks that each write their own outputs: row `r` of output `o` is at `r * stride + o`.
#[derive(Debug)]
pub(super) struct Target<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: products that share a target write different outputs; `Product` asks that of its makers.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    pub(super) fn new(y: &'a mut [f32], n_outputs: usize) -> Self {
        Self { start: y.as_mut_ptr(), len: y.len(), stride: n_outputs, lent: PhantomData }
    }

    /// The same rows from the output `first` on.
    #[inline(always)]
    pub(super) fn from(&self, first: usize) -> Self {
        assert!(first <= self.len, "the part begins inside");
        Self { start: self.start.wrapping_add(first), len: self.len - first, ..*self }
    }

    /// Where `n` neighbouring results of a row begin.
    #[inline(always)]
    pub(super) fn at(&self, row: usize, output: usize, n: usize) -> *mut f32 {
        let start = row * self.stride + output;
        assert!(output + n <= self.stride && start + n <= self.len, "every result has its place");
        self.start.wrapping_add(start)
    }
}

/// Products of all rows with the weight rows `outputs`. Products that run at the same time on one target have different
/// outputs.
#[derive(Debug)]
pub(super) struct Product<'a> {
    pub(super) x: &'a PackedRows,
    pub(super) w: WeightRows<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) y: &'a Target<'a>,
}

impl Kernel for Product<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { x, w, outputs, y } = self;
        assert!(w.row_bytes * outputs.end <= w.bytes.len(), "every output has its weights");
        assert_eq!(x.stride, w.row_bytes.div_ceil(L::W_BYTES) * L::X_BYTES, "rows are as long as weight rows");
        assert!(outputs.end <= y.stride && x.n_rows * y.stride <= y.len, "every product has its place");
        let rows_at_once = match L::TILES {
            Tiles::InPlace => (CACHED_BYTES / x.stride).max(8) / 4 * 4,
            Tiles::Panel => {
                even_parts(x.n_rows, CACHED_RUN_BYTES / (L::RUN * size_of::<f32>()) / PANEL_ROWS * PANEL_ROWS)
            }
        };
        for first in (0..x.n_rows).step_by(rows_at_once) {
            let rows = first..x.n_rows.min(first + rows_at_once);
            // SAFETY: rows, outputs and places of results exist by the assertions.
            unsafe {
                match L::TILES {
                    Tiles::InPlace => block::<L>(x, rows, w, outputs.clone(), y),
                    Tiles::Panel => widened::<L>(x, rows, w, outputs.clone(), y),
                }
            };
        }
    }
}

/// Rows of each part of `n_rows`, whole tiles of panels, so that no part is much smaller than the others.
fn even_parts(n_rows: usize, most: usize) -> usize {
    let n_parts = n_rows.div_ceil(most).max(1);
    n_rows.div_ceil(n_parts).max(1).next_multiple_of(PANEL_ROWS)
}

/// All outputs for rows that fit the cache.
///
/// # Safety
/// As [`tile`], for all rows and outputs.
#[inline(always)]
unsafe fn block<L: Lanes>(
    x: &PackedRows,
    rows: Range<usize>,
    w: WeightRows<'_>,
    outputs: Range<usize>,
    y: &Target<'_>,
) {
    let mut output = outputs.start;
    // SAFETY: each column of tiles lies inside `outputs`.
    unsafe {
        if rows.len() < 4 {
            while output + 8 <= outputs.end {
                columns::<L, 8>(x, rows.clone(), w, output, y);
                output += 8;
            }
        }
        while output + 6 <= outputs.end {
            columns::<L, 6>(x, rows.clone(), w, output, y);
            output += 6;
        }
        while output < outputs.end {
            columns::<L, 1>(x, rows.clone(), w, output, y);
            output += 1;
        }
    }
}

/// `C` outputs for all rows.
///
/// # Safety
/// As [`tile`], for all rows.
#[inline(always)]
pub(super) unsafe fn columns<L: Lanes, const C: usize>(
    x: &PackedRows,
    rows: Range<usize>,
    w: WeightRows<'_>,
    output: usize,
    y: &Target<'_>,
) {
    let mut row = rows.start;
    // SAFETY: each tile lies inside `rows`.
    unsafe {
        while row + 4 <= rows.end {
            tile::<L, 4, C>(x, row, w, output, y);
            row += 4;
        }
        match rows.end - row {
            3 => tile::<L, 3, C>(x, row, w, output, y),
            2 => tile::<L, 2, C>(x, row, w, output, y),
            1 if w.row_bytes >= LONG_ROW_BYTES => single::<L, C>(x, row, w, output, y),
            1 => tile::<L, 1, C>(x, row, w, output, y),
            _ => {}
        }
    }
}

/// `R` rows from `row` times `C` outputs from `output`.
///
/// # Safety
/// The rows are in `x`, the outputs in `w`, and `y` may be written for them. The CPU has the set of `L`.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const C: usize>(
    x: &PackedRows,
    row: usize,
    w: WeightRows<'_>,
    output: usize,
    y: &Target<'_>,
) {
    let (n_steps, rest) = (w.row_bytes / L::W_BYTES, w.row_bytes % L::W_BYTES);
    // SAFETY: a packed row has `n_steps` whole steps and one more if there is a rest; a weight row has `n_steps` whole
    // steps, and its rest is read from a copy that zeros follow.
    unsafe {
        let mut acc = [[L::zero(); R]; C];
        let x_at = x.bytes().as_ptr().add(row * x.stride);
        let w_at = w.bytes.as_ptr().add(output * w.row_bytes);
        let next = w_at.wrapping_add(C * w.row_bytes);
        let level = if C * w.row_bytes < NEAR_BYTES { CacheLevel::First } else { CacheLevel::Second };
        for step in 0..n_steps {
            let xs = x_step::<L, R>(x_at.add(step * L::X_BYTES), x.stride);
            for (c, sums) in acc.iter_mut().enumerate() {
                let at = w_at.add(c * w.row_bytes + step * L::W_BYTES);
                L::prefetch(next.wrapping_add((step * C + c) * L::W_BYTES), level);
                add_step::<L, R>(sums, xs, L::w(at));
            }
        }
        if rest > 0 {
            let xs = x_step::<L, R>(x_at.add(n_steps * L::X_BYTES), x.stride);
            for (c, sums) in acc.iter_mut().enumerate() {
                let last = w_rest::<L>(w_at.add(c * w.row_bytes + n_steps * L::W_BYTES), rest);
                add_step::<L, R>(sums, xs, last);
            }
        }
        store::<L, R, C>(acc, y.start.add(row * y.stride + output), y.stride);
    }
}

/// One row times `C` outputs from `output`: the sums of [`tile`], output after output.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn single<L: Lanes, const C: usize>(
    x: &PackedRows,
    row: usize,
    w: WeightRows<'_>,
    output: usize,
    y: &Target<'_>,
) {
    let (n_steps, rest) = (w.row_bytes / L::W_BYTES, w.row_bytes % L::W_BYTES);
    // SAFETY: as in `tile`.
    unsafe {
        let mut acc = [[L::zero()]; C];
        let x_at = x.bytes().as_ptr().add(row * x.stride);
        for (c, [sum]) in acc.iter_mut().enumerate() {
            let w_at = w.bytes.as_ptr().add((output + c) * w.row_bytes);
            for step in 0..n_steps {
                let at = w_at.add(step * L::W_BYTES);
                L::prefetch(at.wrapping_add(AHEAD_BYTES), CacheLevel::Second);
                *sum = L::add(*sum, L::x(x_at.add(step * L::X_BYTES)), L::w(at));
            }
            if rest > 0 {
                let last = w_rest::<L>(w_at.add(n_steps * L::W_BYTES), rest);
                *sum = L::add(*sum, L::x(x_at.add(n_steps * L::X_BYTES)), last);
            }
        }
        store::<L, 1, C>(acc, y.start.add(row * y.stride + output), y.stride);
    }
}

/// All outputs for some rows, by panels; one row alone meets weights as they lie.
///
/// # Safety
/// As [`tile`], for all rows and outputs.
#[inline(always)]
unsafe fn widened<L: Lanes>(
    x: &PackedRows,
    rows: Range<usize>,
    w: WeightRows<'_>,
    outputs: Range<usize>,
    y: &Target<'_>,
) {
    if rows.len() == 1 {
        // A loop and no closure, which need not be compiled for the instruction set.
        for output in outputs {
            // SAFETY: as the caller vouches.
            unsafe { alone::<L>(x, rows.start, w, output, y) };
        }
        return;
    }
    let mut panel = Panel(MaybeUninit::uninit());
    for run in runs::<L>(w) {
        for output in outputs.clone().step_by(PANEL_OUTPUTS) {
            let outputs = output..outputs.end.min(output + PANEL_OUTPUTS);
            // SAFETY: as the caller vouches.
            unsafe {
                let mut ahead = Ahead::new::<L>(w, outputs.end, run.clone(), rows.len().div_ceil(PANEL_ROWS));
                let w = panel.fill::<L>(w, outputs.clone(), run.clone());
                let mut row = rows.start;
                while row + PANEL_ROWS <= rows.end {
                    ahead.ask::<L>();
                    panel_tile::<L, PANEL_ROWS>(x, row, w, outputs.clone(), run.clone(), y);
                    row += PANEL_ROWS;
                }
                ahead.ask::<L>();
                match rows.end - row {
                    2 => panel_tile::<L, 2>(x, row, w, outputs, run.clone(), y),
                    1 => panel_tile::<L, 1>(x, row, w, outputs, run.clone(), y),
                    _ => {}
                }
            }
        }
    }
}

/// Steps of a weight row, the last of which may have a rest only, in runs.
#[inline(always)]
fn runs<L: Lanes>(w: WeightRows<'_>) -> impl Iterator<Item = Range<usize>> {
    let (n_steps, per_run) = (w.row_bytes.div_ceil(L::W_BYTES), L::RUN / L::STEP);
    (0..n_steps).step_by(per_run).map(move |first| first..n_steps.min(first + per_run))
}

/// A run of some outputs' weights as packed rows.
struct Panel(MaybeUninit<[Line; PANEL_BYTES / size_of::<Line>()]>);

impl Panel {
    /// Widens the steps `run` of `outputs`; what the panel has room for beyond them is zero.
    ///
    /// # Safety
    /// `w` has the outputs and steps. The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn fill<L: Lanes>(&mut self, w: WeightRows<'_>, outputs: Range<usize>, run: Range<usize>) -> Strided {
        assert!(PANEL_OUTPUTS * run.len() * L::X_BYTES <= PANEL_BYTES, "a run fits the panel");
        let (n_steps, rest) = (w.row_bytes / L::W_BYTES, w.row_bytes % L::W_BYTES);
        let (start, stride) = (self.0.as_mut_ptr().cast::<u8>(), run.len() * L::X_BYTES);
        // SAFETY: whole steps and the rest are inside the weight row, and the panel has a place for each by the assertion.
        unsafe {
            for c in 0..PANEL_OUTPUTS {
                let mut at = start.add(c * stride);
                if c >= outputs.len() {
                    at.write_bytes(0, stride);
                    continue;
                }
                let row = w.bytes.as_ptr().add((outputs.start + c) * w.row_bytes);
                for step in run.start..run.end.min(n_steps) {
                    L::put(L::w(row.add(step * L::W_BYTES)), at);
                    at = at.add(L::X_BYTES);
                }
                if run.end > n_steps {
                    L::put(w_rest::<L>(row.add(n_steps * L::W_BYTES), rest), at);
                }
            }
        }
        Strided { at: start, stride }
    }
}

/// The weights of the next panel, of which each tile asks for a share before it meets this one: memory takes no more requests
/// at once than it has places for.
struct Ahead {
    /// Where the run of the first of the outputs begins; it need not exist.
    at: *const u8,
    row_bytes: usize,
    /// Lines of an output, of a tile's share, and asked for by now of all outputs.
    n_lines: usize,
    per_tile: usize,
    asked: usize,
}

impl Ahead {
    #[inline(always)]
    fn new<L: Lanes>(w: WeightRows<'_>, output: usize, run: Range<usize>, n_tiles: usize) -> Self {
        let at = w.bytes.as_ptr().wrapping_add(output * w.row_bytes + run.start * L::W_BYTES);
        let n_lines = (run.len() * L::W_BYTES).div_ceil(size_of::<Line>());
        Self { at, row_bytes: w.row_bytes, n_lines, per_tile: (PANEL_OUTPUTS * n_lines).div_ceil(n_tiles), asked: 0 }
    }

    /// Asks for a share.
    ///
    /// # Safety
    /// The CPU has the set of `L`.
    #[inline(always)]
    unsafe fn ask<L: Lanes>(&mut self) {
        let end = (self.asked + self.per_tile).min(PANEL_OUTPUTS * self.n_lines);
        while self.asked < end {
            let (output, line) = (self.asked / self.n_lines, self.asked % self.n_lines);
            let row = self.at.wrapping_add(output * self.row_bytes);
            let last = (line + end - self.asked).min(self.n_lines);
            for line in line..last {
                // SAFETY: the caller vouches for the instruction set.
                unsafe { L::prefetch(row.wrapping_add(line * size_of::<Line>()), CacheLevel::Second) };
            }
            self.asked += last - line;
        }
    }
}

/// What a run adds to `R` rows from `row` and the outputs of a panel.
///
/// # Safety
/// As [`tile`]; `w` is the panel of `outputs` and `run`.
#[inline(always)]
unsafe fn panel_tile<L: Lanes, const R: usize>(
    x: &PackedRows,
    row: usize,
    w: Strided,
    outputs: Range<usize>,
    run: Range<usize>,
    y: &Target<'_>,
) {
    // SAFETY: a packed row has all steps of a weight row, and `y` a place for each output of the rows.
    unsafe {
        let x = Strided { at: x.bytes().as_ptr().add(row * x.stride + run.start * L::X_BYTES), stride: x.stride };
        let sums = L::sums::<R, PANEL_OUTPUTS>(x, w, run.len());
        for (r, sums) in sums.into_iter().enumerate() {
            let place = y.start.add((row + r) * y.stride + outputs.start);
            let sums = L::fold4(sums);
            // All four at once where there are four: one by one they take as long as the fold.
            match (outputs.len() == PANEL_OUTPUTS, run.start == 0) {
                (true, true) => place.cast::<[f32; PANEL_OUTPUTS]>().write(sums),
                (true, false) => {
                    let mut totals = place.cast::<[f32; PANEL_OUTPUTS]>().read();
                    totals.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
                    place.cast::<[f32; PANEL_OUTPUTS]>().write(totals);
                }
                (false, is_first) => {
                    for (c, sum) in sums.into_iter().enumerate().take(outputs.len()) {
                        let place = place.add(c);
                        place.write(if is_first { sum } else { place.read() + sum });
                    }
                }
            }
        }
    }
}

/// One row times one output as it lies, run by run: the sums of [`panel_tile`].
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn alone<L: Lanes>(x: &PackedRows, row: usize, w: WeightRows<'_>, output: usize, y: &Target<'_>) {
    let (n_steps, rest) = (w.row_bytes / L::W_BYTES, w.row_bytes % L::W_BYTES);
    let mut runs = runs::<L>(w).peekable();
    let mut total = None;
    // SAFETY: as in `tile`.
    unsafe {
        let x_at = x.bytes().as_ptr().add(row * x.stride);
        let w_at = w.bytes.as_ptr().add(output * w.row_bytes);
        while runs.peek().is_some() {
            // Sums are folded four at a time.
            let mut sums = [L::zero(); 4];
            let mut n_sums = 0;
            for (sum, run) in sums.iter_mut().zip(&mut runs) {
                for step in run.start..run.end.min(n_steps) {
                    let at = w_at.add(step * L::W_BYTES);
                    L::prefetch(at.wrapping_add(AHEAD_BYTES), CacheLevel::Second);
                    *sum = L::add(*sum, L::x(x_at.add(step * L::X_BYTES)), L::w(at));
                }
                if run.end > n_steps {
                    let last = w_rest::<L>(w_at.add(n_steps * L::W_BYTES), rest);
                    *sum = L::add(*sum, L::x(x_at.add(n_steps * L::X_BYTES)), last);
                }
                n_sums += 1;
            }
            for sum in &L::fold4(sums)[..n_sums] {
                total = Some(total.map_or(*sum, |total: f32| total + sum));
            }
        }
        y.start.add(row * y.stride + output).write(total.expect("a weight row is not empty"));
    }
}

/// The last `rest` bytes of a weight row, zeros behind them.
///
/// # Safety
/// `at` may be read for `rest` bytes, fewer than a step. The CPU has the set of `L`.
#[inline(always)]
pub(super) unsafe fn w_rest<L: Lanes>(at: *const u8, rest: usize) -> L::X {
    let mut padded = [0u8; MAX_STEP_BYTES];
    // SAFETY: as the caller vouches, and no step is longer than `padded`.
    unsafe {
        at.copy_to_nonoverlapping(padded.as_mut_ptr(), rest);
        L::w(padded.as_ptr())
    }
}

/// One step of `R` rows.
///
/// # Safety
/// Each row may be read for a step.
#[inline(always)]
unsafe fn x_step<L: Lanes, const R: usize>(x: *const u8, stride: usize) -> [L::X; R] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut xs = [L::x(x); R];
        for (r, step) in xs.iter_mut().enumerate().skip(1) {
            *step = L::x(x.add(r * stride));
        }
        xs
    }
}

/// Adds one step of one output to the sums of `R` rows.
///
/// # Safety
/// The CPU has the set of `L`.
#[inline(always)]
unsafe fn add_step<L: Lanes, const R: usize>(sums: &mut [L::Acc; R], xs: [L::X; R], w: L::X) {
    for r in 0..R {
        // SAFETY: as the caller vouches.
        sums[r] = unsafe { L::add(sums[r], xs[r], w) };
    }
}

/// Folds the sums, four at a time, and writes them.
///
/// # Safety
/// `y` may be written for `R` rows, `stride` apart, of `C` numbers. The CPU has the set of `L`.
#[inline(always)]
unsafe fn store<L: Lanes, const R: usize, const C: usize>(acc: [[L::Acc; R]; C], y: *mut f32, stride: usize) {
    for first in (0..R * C).step_by(4) {
        // The last four may be fewer: then one of them is folded again and not written.
        let sum = |i: usize| {
            let i = (first + i).min(R * C - 1);
            acc[i / R][i % R]
        };
        // SAFETY: as the caller vouches.
        let folded = unsafe { L::fold4([sum(0), sum(1), sum(2), sum(3)]) };
        for (i, value) in folded.into_iter().enumerate().take(R * C - first) {
            let (c, r) = ((first + i) / R, (first + i) % R);
            // SAFETY: `r < R` and `c < C`.
            unsafe { y.add(r * stride + c).write(value) };
        }
    }
}
