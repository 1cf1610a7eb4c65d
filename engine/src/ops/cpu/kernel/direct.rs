//! Products of few rows with weights as they lie, widened on their way: the sums of [`super::panel`], whose runs and chains these are.
//!
//! Up to three rows wait for memory. They meet one output after the other, which is one long stream, and go through both chains of a run at
//! once, since one alone would make them wait for their sums. Some more are worth no panel yet, which costs as much as two rows do: up to six
//! meet two outputs at a time, chain by chain, and run by run of a block of outputs, so that a run of all rows stays in the first-level cache.

use std::{hint::black_box, ops::Range};

use super::{
    Rows,
    eights::{EIGHT_BYTES, Eight, LANES, WideEight},
    lanes::CacheLevel,
    panel::{Ahead, Next, Runs, Steps, Strided},
    product::{AHEAD_BYTES, Product, Target, split_evenly},
};

/// Rows that meet one output at a time.
const FEW_ROWS: usize = 3;
/// Rows for which a panel costs more than it saves.
const SOME_ROWS: usize = 12;
/// Rows and outputs of a tile at most: 12 registers of sums, two for weights and one for a row.
const TILE_ROWS: usize = 6;
const TILE_OUTPUTS: usize = 2;
/// Outputs of a block.
const BLOCK_OUTPUTS: usize = 16;

/// Whether so many rows are best met like that.
#[inline(always)]
pub(super) fn takes<T: WideEight>(n_rows: usize, w: Steps<'_>) -> bool {
    // Weights in f32 are panels as they lie. A rest of a row is for those few that wait for memory.
    n_rows <= FEW_ROWS || n_rows <= SOME_ROWS && T::BYTES < size_of::<f32>() && w.rest == 0
}

/// All rows times all outputs.
///
/// # Safety
/// As [`super::panel::product`], for rows that [`takes`] takes.
#[inline(always)]
pub(super) unsafe fn product<V: Eight, T: WideEight>(product: &Product<'_>, w: Steps<'_>, runs: Runs) {
    // SAFETY: as the caller vouches.
    unsafe {
        if product.rows.len() <= FEW_ROWS {
            few_rows::<V, T>(product, w, runs);
        } else {
            some_rows::<V, T>(product, w, runs);
        }
    }
}

/// Rows that wait for memory.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn few_rows<V: Eight, T: WideEight>(product: &Product<'_>, w: Steps<'_>, runs: Runs) {
    let Product { x, rows, outputs, y, .. } = product;
    // A loop and no closure, which need not be compiled for the instruction set.
    for output in outputs.clone() {
        // SAFETY: as the caller vouches.
        unsafe {
            match rows.len() {
                3 => one_output::<V, T, 3>(*x, rows.start, w, runs, output, y),
                2 => one_output::<V, T, 2>(*x, rows.start, w, runs, output, y),
                1 => one_output::<V, T, 1>(*x, rows.start, w, runs, output, y),
                _ => {}
            }
        }
    }
}

/// `R` rows from `row` times one output as it lies: the sums of a panel.
///
/// # Safety
/// As [`product`], for these rows.
#[inline(always)]
unsafe fn one_output<V: Eight, T: WideEight, const R: usize>(
    x: Rows<'_>,
    row: usize,
    w: Steps<'_>,
    runs: Runs,
    output: usize,
    y: &Target<'_>,
) {
    let mut totals = [0.0; R];
    for first in (0..runs.n_steps).step_by(runs.per_run) {
        // SAFETY: as the caller vouches.
        unsafe {
            let run = first..runs.n_steps.min(first + runs.per_run);
            let sums = both_chains::<V, T, R>(x, row, w, output, run);
            for (total, [one, other]) in totals.iter_mut().zip(sums) {
                let [one, other, ..] = V::fold4([one, other, V::splat(0.0), V::splat(0.0)]);
                *total = if first == 0 { one } else { *total + one } + other;
            }
        }
    }
    for (r, total) in totals.into_iter().enumerate() {
        // SAFETY: as the caller vouches.
        unsafe { y.start.add((row + r) * y.stride + output).write(total) };
    }
}

/// The sums of a run of `R` rows with an output as it lies.
///
/// # Safety
/// As [`one_output`], for these steps.
#[inline(always)]
unsafe fn both_chains<V: Eight, T: WideEight, const R: usize>(
    x: Rows<'_>,
    row: usize,
    w: Steps<'_>,
    output: usize,
    run: Range<usize>,
) -> [[V; 2]; R] {
    let x = Strided { at: x.bytes.as_ptr().wrapping_add(row * x.stride), stride: x.stride };
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[V::splat(0.0); 2]; R];
        let n_whole = w.n_whole.min(run.end) - run.start;
        let (at, x_at) = (w.at::<T>(output, run.start), x.from(run.start).at);
        for pair in 0..n_whole / 2 {
            let at = at.add(2 * pair * LANES * T::BYTES);
            V::prefetch(at.wrapping_add(AHEAD_BYTES), CacheLevel::Second);
            let w = [T::load::<V>(at), T::load::<V>(at.add(LANES * T::BYTES))];
            for (r, [one, other]) in acc.iter_mut().enumerate() {
                let x = x_at.add(r * x.stride + 2 * pair * EIGHT_BYTES);
                *one = one.add_product(V::read(x), w[0]);
                *other = other.add_product(V::read(x.add(EIGHT_BYTES)), w[1]);
            }
        }
        for step in run.start + n_whole / 2 * 2..run.end {
            let w = w.load::<V, T>(output, step);
            for (r, sums) in acc.iter_mut().enumerate() {
                let sum = &mut sums[(step - run.start) % 2];
                *sum = sum.add_product(V::read(x.at.add(r * x.stride + step * EIGHT_BYTES)), w);
            }
        }
        acc
    }
}

/// Rows that are worth no panel.
///
/// # Safety
/// As [`product`]; weight rows have whole steps.
#[inline(always)]
unsafe fn some_rows<V: Eight, T: WideEight>(product: &Product<'_>, w: Steps<'_>, runs: Runs) {
    let Product { x, rows, outputs, y, .. } = product;
    let per_tile = split_evenly(rows.len(), TILE_ROWS);
    let n_runs = runs.n_steps.div_ceil(runs.per_run);
    let n_tiles = rows.len().div_ceil(per_tile) * n_runs * (BLOCK_OUTPUTS / TILE_OUTPUTS);
    for first in outputs.clone().step_by(BLOCK_OUTPUTS) {
        let block = first..outputs.end.min(first + BLOCK_OUTPUTS);
        let next = Next { output: block.end, step: 0, n_outputs: BLOCK_OUTPUTS, n_steps: runs.n_steps };
        let mut ahead = Ahead::new::<T>(w, &next, n_tiles);
        for step in (0..runs.n_steps).step_by(runs.per_run) {
            let run = step..runs.n_steps.min(step + runs.per_run);
            for row in rows.clone().step_by(per_tile) {
                // SAFETY: as the caller vouches.
                unsafe {
                    match per_tile.min(rows.end - row) {
                        6 => block_run::<V, T, 6>(*x, row, w, &block, &run, &mut ahead, y),
                        5 => block_run::<V, T, 5>(*x, row, w, &block, &run, &mut ahead, y),
                        4 => block_run::<V, T, 4>(*x, row, w, &block, &run, &mut ahead, y),
                        3 => block_run::<V, T, 3>(*x, row, w, &block, &run, &mut ahead, y),
                        2 => block_run::<V, T, 2>(*x, row, w, &block, &run, &mut ahead, y),
                        1 => block_run::<V, T, 1>(*x, row, w, &block, &run, &mut ahead, y),
                        _ => {}
                    }
                }
            }
        }
    }
}

/// What a run of a block of outputs adds to `R` rows from `row`.
///
/// # Safety
/// As [`some_rows`], for these rows, outputs and steps.
#[inline(always)]
unsafe fn block_run<V: Eight, T: WideEight, const R: usize>(
    x: Rows<'_>,
    row: usize,
    w: Steps<'_>,
    outputs: &Range<usize>,
    run: &Range<usize>,
    ahead: &mut Ahead,
    y: &Target<'_>,
) {
    let x = Strided { at: x.bytes.as_ptr().wrapping_add(row * x.stride), stride: x.stride }.from(run.start);
    for output in outputs.clone().step_by(TILE_OUTPUTS) {
        let w = Strided { at: w.at::<T>(output, run.start), stride: w.w.row_bytes };
        // SAFETY: as the caller vouches.
        unsafe {
            ahead.ask::<V>(CacheLevel::Second);
            let place = Place { at: y.start.add(row * y.stride + output), stride: y.stride, is_first: run.start == 0 };
            if output + 1 < outputs.end {
                tile::<V, T, R, TILE_OUTPUTS>(x, w, run.len(), &place);
            } else {
                tile::<V, T, R, 1>(x, w, run.len(), &place);
            }
        }
    }
}

/// Where results of a tile are added.
struct Place {
    at: *mut f32,
    /// Numbers from one row to the next.
    stride: usize,
    /// Whether there is nothing yet.
    is_first: bool,
}

/// What a run adds to `R` rows and `C` outputs.
///
/// # Safety
/// Rows and weights have `n_steps` of them, and there is a place for each result. The CPU has the set of `V`.
#[inline(always)]
unsafe fn tile<V: Eight, T: WideEight, const R: usize, const C: usize>(
    x: Strided,
    w: Strided,
    n_steps: usize,
    place: &Place,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let one = chain::<V, T, R, C>(x, w, n_steps.div_ceil(2));
        let w = Strided { at: w.at.wrapping_add(LANES * T::BYTES), ..w };
        let other = chain::<V, T, R, C>(x.from(1), w, n_steps / 2);
        for c in 0..C {
            for r in 0..R {
                let at = place.at.add(r * place.stride + c);
                let total = if place.is_first { one[c][r] } else { at.read() + one[c][r] };
                at.write(total + other[c][r]);
            }
        }
    }
}

/// The sums of every other step of `R` rows and `C` outputs.
///
/// # Safety
/// Rows and weights have `n_steps` of them. The CPU has the set of `V`.
#[inline(always)]
unsafe fn chain<V: Eight, T: WideEight, const R: usize, const C: usize>(
    x: Strided,
    w: Strided,
    n_steps: usize,
) -> [[f32; R]; C] {
    // No closures: they need not be compiled for the instruction set.
    // SAFETY: as the caller vouches.
    unsafe {
        // Hidden from the compiler, or it finds each row by an addition to the one before, one waiting for the other.
        let mut rows = [x.at; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = black_box(x.at.wrapping_add(r * x.stride));
        }
        let mut acc = [[V::splat(0.0); R]; C];
        for step in 0..n_steps {
            let mut weights = [V::splat(0.0); C];
            for (c, weight) in weights.iter_mut().enumerate() {
                *weight = T::load(w.at.add(c * w.stride + 2 * step * LANES * T::BYTES));
            }
            for (r, row) in rows.iter().enumerate() {
                let x = V::read(row.add(2 * step * EIGHT_BYTES));
                for (sums, weight) in acc.iter_mut().zip(weights) {
                    sums[r] = sums[r].add_product(x, weight);
                }
            }
        }
        let mut folded = [[0.0; R]; C];
        for (folded, sums) in folded.iter_mut().zip(acc) {
            fold(sums, folded);
        }
        folded
    }
}

/// Folds sums, four at a time: the last four may be fewer, and then one is folded again.
///
/// # Safety
/// The CPU has the set of `V`.
#[inline(always)]
unsafe fn fold<V: Eight, const R: usize>(sums: [V; R], folded: &mut [f32; R]) {
    for (idx, folded) in folded.chunks_mut(4).enumerate() {
        let mut four = [sums[R - 1]; 4];
        for (sum, of_row) in four.iter_mut().zip(&sums[4 * idx..]) {
            *sum = *of_row;
        }
        // SAFETY: as the caller vouches.
        let four = unsafe { V::fold4(four) };
        folded.copy_from_slice(&four[..folded.len()]);
    }
}
