//! Products of bf16 by bf16 on CPUs with AMX (Sapphire Rapids and later), whose tile unit does thirty times the work of their dot product in
//! registers.
//!
//! ```text
//!                        16 rows, by pairs of inputs
//! 16 outputs, as they    [ tile of sums ]    a step adds the products of 32 inputs
//! lie in the file
//! ```
//! Weights are the left operand, read as they lie; rows are the right one, packed so that pairs of inputs of up to 16 rows stand side
//! by side. A block is 2 x 2 tiles: 32 outputs and 32 rows. Sums go out to memory between runs of inputs, so that a run of the weights stays
//! in the first-level cache while all rows that the second-level one holds pass by; they come out turned, outputs by rows, and are turned
//! back where they are written.
//!
//! A sum is made step by step from the first input to the last, 16 first and 16 second numbers of pairs apart in each: its bits depend on nothing
//! that is computed beside it.

#[cfg(test)]
mod tests;
mod unit;

use std::ops::Range;

pub(super) use unit::is_here;
use unit::{Block, PAIR_BYTES, ROW_BYTES, SIDE, Strided, TILE, TILE_SUMS, Tmul, Unit};

use super::{
    Line, Rows, WeightRows,
    product::{Product, Target, split_evenly},
};
use crate::ops::cpu::buffer::Buffer;

/// Rows and outputs that a block has at most; tasks have a multiple of it.
pub(super) const BLOCK: usize = SIDE * TILE;
/// Steps of the longest run: weights of a block, 32 KB, fill two thirds of the first-level cache.
const MAX_RUN: usize = 16;
/// What stays in the second-level cache of rows while weights pass by, in bytes: half of the 2 MB of chips with tiles.
const CACHED_BYTES: usize = 1 << 20;

/// Rounds rows to bf16 and writes them as tiles read them: of each 16 rows, or of the last that are fewer, one pair of inputs after the
/// other.
#[inline(always)]
fn pack<U: Unit>(rows: &[f32], width: usize, lines: &mut [Line]) {
    let stride = stride(width);
    let mut plain = Buffer::<u8>::zeros(if rows.len() > width { TILE * stride } else { 0 });
    let groups = bytemuck::cast_slice_mut::<_, u8>(lines).chunks_mut(TILE * stride);
    for (rows, packed) in rows.chunks(TILE * width).zip(groups) {
        let n_rows = rows.len() / width;
        if n_rows == 1 {
            // Its pairs are in order as they are.
            super::pack_bf16(rows, packed);
            continue;
        }
        for (row, plain) in rows.chunks_exact(width).zip(plain.chunks_exact_mut(stride)) {
            super::pack_bf16(row, plain);
        }
        for (step, packed) in packed[..n_rows * stride].chunks_exact_mut(n_rows * ROW_BYTES).enumerate() {
            let from = Strided { at: plain[step * ROW_BYTES..].as_ptr(), stride };
            let to = Strided { at: packed.as_mut_ptr(), stride: n_rows * PAIR_BYTES };
            // SAFETY: `plain` has 16 rows of whole steps, and a step of the group takes what `packed` has.
            unsafe { U::turn(from, n_rows, to, TILE) };
        }
    }
}

/// Bytes of a packed row of `width` numbers, and of a whole number of weight rows' steps.
fn stride(width: usize) -> usize {
    (width * 2).next_multiple_of(ROW_BYTES)
}

/// All rows times all outputs.
///
/// # Safety
/// Rows are as long as weight rows, every output has its weights, and every product its place. The CPU has what `U` needs.
#[inline(always)]
unsafe fn product<U: Unit>(product: &Product<'_>) {
    let Product { x, rows, w, outputs, y } = product;
    assert!(
        rows.start.is_multiple_of(TILE) && (rows.end.is_multiple_of(TILE) || rows.end == x.n_rows),
        "tasks have whole groups of rows"
    );
    let mut unit = U::default();
    let n_steps = x.stride / ROW_BYTES;
    let per_run = split_evenly(n_steps, MAX_RUN);
    let rows_at_once = (CACHED_BYTES / (per_run * ROW_BYTES)).next_multiple_of(BLOCK);
    // Rows of which all inputs stay meet block after block of weights. Of others a run stays, and the sums of all outputs wait for the next.
    let all_stay = rows.len() * x.stride <= CACHED_BYTES;
    let rows_at_once = if all_stay { rows.len() } else { rows_at_once };
    for first in rows.clone().step_by(rows_at_once.max(1)) {
        let rows = first..rows.end.min(first + rows_at_once);
        let n_places = rows.len().next_multiple_of(BLOCK);
        let n_outputs = if all_stay { BLOCK } else { outputs.len().next_multiple_of(BLOCK) };
        let mut work = Work {
            x: *x,
            rows,
            w: *w,
            outputs: outputs.clone(),
            n_steps,
            sums: Buffer::unwritten(n_places * n_outputs),
            padded: Buffer::default(),
        };
        let runs = (0..n_steps).step_by(per_run).map(|step| step..n_steps.min(step + per_run));
        let blocks = outputs.clone().step_by(BLOCK);
        // SAFETY: as the caller vouches.
        unsafe {
            if all_stay {
                for output in blocks {
                    for run in runs.clone() {
                        work.meet(&mut unit, output, run, 0, y);
                    }
                }
            } else {
                for run in runs {
                    for output in blocks.clone() {
                        work.meet(&mut unit, output, run.clone(), (output - outputs.start) * n_places, y);
                    }
                }
            }
        }
    }
}

/// Some rows, which pass by while the weights of a block stay near.
struct Work<'a> {
    x: Rows<'a>,
    rows: Range<usize>,
    w: WeightRows<'a>,
    outputs: Range<usize>,
    /// Of a row.
    n_steps: usize,
    /// Those of a block's outputs, one block of rows behind the other.
    sums: Buffer<f32>,
    /// Weights that do not fill their tiles, padded with zeros.
    padded: Buffer<u8>,
}

impl Work<'_> {
    /// What a run of the weights of a block, those from `output` on, adds to all rows. Their sums are at `place`, and are written to `y` behind
    /// the last run.
    ///
    /// # Safety
    /// As [`product`].
    #[inline(always)]
    unsafe fn meet<U: Unit>(&mut self, unit: &mut U, output: usize, run: Range<usize>, place: usize, y: &Target<'_>) {
        let outputs = output..self.outputs.end.min(output + BLOCK);
        let w = self.weights(&outputs, &run);
        for (idx, first) in self.rows.clone().step_by(BLOCK).enumerate() {
            let columns = [first, first + TILE].map(|row| self.rows.end.saturating_sub(row).min(TILE));
            let sums = self.sums[place + idx * BLOCK * BLOCK..][..BLOCK * BLOCK].as_mut_ptr();
            let x = [first, first + TILE].map(|row| self.group(row, run.start));
            let n_w = outputs.len().div_ceil(TILE);
            let is_first = run.start == 0;
            let block = Block { w: w.at, row_bytes: w.stride, n_w, x, columns, n_steps: run.len(), sums, is_first };
            // SAFETY: weights, rows and sums of the block exist: `weights`, `group` and the slice above.
            unsafe { unit.run(&block) };
            if run.end == self.n_steps {
                // SAFETY: as the caller vouches; the block's sums are there.
                unsafe { write::<U>(sums, &outputs, first, columns, y) };
            }
        }
    }

    /// Where a step of the group of rows that begins with `row` is. It need not exist.
    fn group(&self, row: usize, step: usize) -> *const u8 {
        let n_rows = self.x.n_rows.saturating_sub(row).min(TILE);
        self.x.bytes.as_ptr().wrapping_add(row * self.x.stride + step * n_rows * ROW_BYTES)
    }

    /// A run of the weights of some outputs: as they lie, or padded to whole tiles.
    fn weights(&mut self, outputs: &Range<usize>, run: &Range<usize>) -> Strided<*const u8> {
        let (row_bytes, start) = (self.w.row_bytes, run.start * ROW_BYTES);
        if outputs.len().is_multiple_of(TILE) && run.end * ROW_BYTES <= row_bytes {
            let first = outputs.start * row_bytes + start;
            return Strided { at: self.w.bytes[first..].as_ptr(), stride: row_bytes };
        }
        let stride = run.len() * ROW_BYTES;
        self.padded = Buffer::zeros(outputs.len().next_multiple_of(TILE) * stride);
        for (output, padded) in outputs.clone().zip(self.padded.chunks_exact_mut(stride)) {
            let n_bytes = (row_bytes - start).min(stride);
            padded[..n_bytes].copy_from_slice(&self.w.bytes[output * row_bytes + start..][..n_bytes]);
        }
        Strided { at: self.padded.as_ptr(), stride }
    }
}

/// Writes the sums of a block to their rows.
///
/// # Safety
/// `sums` are those of a block, and `y` has a place for each. The CPU has what `U` needs.
#[inline(always)]
unsafe fn write<U: Unit>(sums: *const f32, outputs: &Range<usize>, row: usize, columns: [usize; SIDE], y: &Target<'_>) {
    for (tile, output) in outputs.clone().step_by(TILE).enumerate() {
        let n_outputs = TILE.min(outputs.end - output);
        for (group, n_rows) in columns.into_iter().enumerate().filter(|(_, n_rows)| *n_rows > 0) {
            let from = sums.wrapping_add((tile * SIDE + group) * TILE_SUMS).cast();
            let at = y.at(row + group * TILE, output, n_outputs).cast();
            let to = Strided { at, stride: y.stride * size_of::<f32>() };
            // SAFETY: as the caller vouches.
            unsafe { U::turn(Strided { at: from, stride: ROW_BYTES }, n_outputs, to, n_rows) };
        }
    }
}

/// Multiplies and adds in registers alone; how many operations that were.
///
/// # Safety
/// [`is_here`].
pub(super) unsafe fn multiply_add(n_steps: usize) -> u64 {
    // SAFETY: as the caller vouches.
    unsafe { unit::multiply_add(n_steps) }
}

/// Rows of the unit of this CPU.
#[inline(always)]
pub(super) fn pack_here(rows: &[f32], width: usize, lines: &mut [Line]) {
    pack::<Tmul>(rows, width, lines);
}

/// All products, by the unit of this CPU.
///
/// # Safety
/// [`is_here`], and as [`product`].
#[inline(always)]
pub(super) unsafe fn product_here(product: &Product<'_>) {
    // SAFETY: as the caller vouches.
    unsafe { self::product::<Tmul>(product) }
}
