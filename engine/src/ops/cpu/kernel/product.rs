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
//! Where registers hold fewer sums, several rows meet weights in panels ([`super::panel`]).

use std::{marker::PhantomData, ops::Range};

use super::{
    Kernel, Rows,
    lanes::{CacheLevel, Lanes},
};

/// Packed rows that stay in the second-level cache while weights pass by, in bytes: half of it.
const CACHED_BYTES: usize = 512 << 10;
/// Weights of a tile that fit the first-level cache beside those of the tile before it, in bytes.
const NEAR_BYTES: usize = 32 << 10;
/// How far ahead one row asks for weights, in bytes.
pub(super) const AHEAD_BYTES: usize = 4 << 10;
/// Shorter weight rows are those of models that caches hold: there one row waits for its sums, of which a tile has more in
/// flight, and not for memory.
const LONG_ROW_BYTES: usize = 1 << 10;
/// Longest step of a weight row, in bytes.
const MAX_STEP_BYTES: usize = 128;

/// Weight rows, one after the other.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct WeightRows<'a> {
    pub(in super::super) bytes: &'a [u8],
    pub(in super::super) row_bytes: usize,
}

/// Results, lent to tasks that each write their own outputs: row `r` of output `o` is at `r * stride + o`.
#[derive(Debug)]
pub(super) struct Target<'a> {
    pub(super) start: *mut f32,
    len: usize,
    pub(super) stride: usize,
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

/// Products of some rows with the weight rows `outputs`. Products that run at the same time on one target have different
/// rows or outputs.
#[derive(Debug)]
pub(super) struct Product<'a> {
    pub(super) x: Rows<'a>,
    pub(super) rows: Range<usize>,
    pub(super) w: WeightRows<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) y: &'a Target<'a>,
}

impl Kernel for Product<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { x, rows, w, outputs, y } = &self;
        assert!(w.row_bytes * outputs.end <= w.bytes.len(), "every output has its weights");
        assert_eq!(x.stride, w.row_bytes.div_ceil(L::W_BYTES) * L::X_BYTES, "rows are as long as weight rows");
        assert!(rows.end <= x.n_rows && x.stride * x.n_rows <= x.bytes.len(), "every row is there");
        assert!(outputs.end <= y.stride && rows.end * y.stride <= y.len, "every product has its place");
        // SAFETY: rows, outputs and places of results exist by the assertions; the caller vouches for the instruction set.
        unsafe { L::product(&self) };
    }
}

/// All rows times all outputs, by tiles that read weights as they lie.
///
/// # Safety
/// As [`tile`], for all rows and outputs.
#[inline(always)]
pub(super) unsafe fn in_place<L: Lanes>(product: &Product<'_>) {
    let Product { x, rows, w, outputs, y } = product;
    let rows_at_once = (CACHED_BYTES / x.stride).max(8) / 4 * 4;
    for first in rows.clone().step_by(rows_at_once) {
        let rows = first..rows.end.min(first + rows_at_once);
        // SAFETY: as the caller vouches.
        unsafe { block::<L>(*x, rows, *w, outputs.clone(), y) };
    }
}

/// The length of parts of `n` things, as few parts as have at most `most` each, so that none is much shorter than the others.
pub(super) fn split_evenly(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).max(1)
}

/// All outputs for rows that fit the cache.
///
/// # Safety
/// As [`tile`], for all rows and outputs.
#[inline(always)]
unsafe fn block<L: Lanes>(x: Rows<'_>, rows: Range<usize>, w: WeightRows<'_>, outputs: Range<usize>, y: &Target<'_>) {
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
    x: Rows<'_>,
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
    x: Rows<'_>,
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
        let x_at = x.bytes.as_ptr().add(row * x.stride);
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
unsafe fn single<L: Lanes, const C: usize>(x: Rows<'_>, row: usize, w: WeightRows<'_>, output: usize, y: &Target<'_>) {
    let (n_steps, rest) = (w.row_bytes / L::W_BYTES, w.row_bytes % L::W_BYTES);
    // SAFETY: as in `tile`.
    unsafe {
        let mut acc = [[L::zero()]; C];
        let x_at = x.bytes.as_ptr().add(row * x.stride);
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
