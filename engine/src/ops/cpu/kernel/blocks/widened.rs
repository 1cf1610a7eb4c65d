//! Products with blocks of eight bits on AVX2 without VNNI, where rows are many.
//!
//! Bytes multiply in four instructions for 32 of them: sign, product, pairs, sum ([`super::x86`]), and weights lose their bias and sign for each
//! tile again. Integers of 16 bits need two for 16. So weights of a few outputs become such once for all rows, as do rows once for all
//! outputs of a task:
//!
//! ```text
//! rows whose run the second-level cache holds  >  run of blocks  >  16 outputs, widened once  >  tiles of 6 rows
//!
//! four bytes  b0 b1 b2 b3   become pairs  b0 b2  and  b1 b3      shifts, no shuffles
//! ```
//! Sums of blocks are exact, and add up in the order of the blocks whatever the runs: the results are those of other tiles.

use std::{arch::x86_64::*, cell::RefCell, ops::Range};

use super::{
    BLOCK,
    panels::{OUTPUTS, QUAD_BYTES, SCALE_BYTES},
    product::PanelProduct,
    rows::RowBlock,
};
use crate::ops::cpu::kernel::product::{Target, split_evenly};

/// Rows from which that is faster.
pub(super) const MANY_ROWS: usize = 48;
/// Rows of a tile: with its outputs, 12 registers of sums.
const ROWS: usize = 6;
/// Outputs of a register, and registers of a tile.
const LANES: usize = 8;
const COLUMNS: usize = 2;
/// Blocks of the longest run: 17 KB of weights and 7 KB of rows in the first-level cache.
const MAX_RUN: usize = 16;
/// Runs of widened rows that stay in the second-level cache, in bytes: about half of the 512 KB of chips that need this.
const CACHED_BYTES: usize = 264 << 10;
const BLOCK_BYTES: usize = SCALE_BYTES + BLOCK * OUTPUTS;
const QUADS: usize = BLOCK / 4;

/// A block of a row: of each four inputs the first and third, then of each the second and fourth.
#[derive(Clone, Copy, Default)]
struct WideBlock {
    pairs: [[i32; QUADS]; 2],
    scale: f32,
}

/// A block of the weights of a tile's outputs, in the same order.
#[derive(Clone, Copy)]
struct PanelBlock {
    scales: [__m256; COLUMNS],
    pairs: [[[__m256i; COLUMNS]; 2]; QUADS],
}

thread_local! {
    /// Widened rows, kept from task to task: fresh memory would be paged in each time.
    static SCRATCH: RefCell<Vec<WideBlock>> = RefCell::default();
}

/// All rows times all outputs.
///
/// # Safety
/// Rows are as long as weight rows, of eight bits. The CPU has AVX2, FMA and F16C.
#[inline(always)]
pub(super) unsafe fn product(product: &PanelProduct<'_>) {
    let (x, per_row) = (product.x, product.x.per_row);
    let per_run = split_evenly(per_row, MAX_RUN);
    let most_rows = CACHED_BYTES / (per_run * size_of::<WideBlock>()) / ROWS * ROWS;
    let rows_at_once = split_evenly(product.rows.len(), most_rows).next_multiple_of(ROWS);
    let panels = product.w.of(&product.outputs);
    // Taken out rather than borrowed in a closure, which need not be compiled for the instruction set.
    let mut wide = SCRATCH.take();
    for row in product.rows.clone().step_by(rows_at_once) {
        let rows = row..product.rows.end.min(row + rows_at_once);
        for first in (0..per_row).step_by(per_run) {
            let run = first..per_row.min(first + per_run);
            // SAFETY: as the caller vouches.
            unsafe {
                widen_rows(&x.blocks, per_row, rows.clone(), run.clone(), &mut wide);
                for (idx, panel) in panels.chunks_exact(per_row * BLOCK_BYTES).enumerate() {
                    let output = product.outputs.start + idx * OUTPUTS;
                    let outputs = output..product.outputs.end.min(output + OUTPUTS);
                    meet(&wide, rows.clone(), panel, outputs, run.clone(), product.y);
                }
            }
        }
    }
    SCRATCH.set(wide);
}

/// The blocks `run` of `rows`, one row behind the other.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen_rows(
    blocks: &[RowBlock],
    per_row: usize,
    rows: Range<usize>,
    run: Range<usize>,
    wide: &mut Vec<WideBlock>,
) {
    wide.resize(rows.len() * run.len(), WideBlock::default());
    for (row, wide) in rows.zip(wide.chunks_exact_mut(run.len())) {
        for (block, wide) in blocks[row * per_row..][run.clone()].iter().zip(wide) {
            // SAFETY: as the caller vouches; quants are 32 bytes, and pairs twice as many.
            unsafe {
                let pairs = pairs(_mm256_loadu_si256(block.quants.as_ptr().cast()));
                for (pairs, wide) in pairs.into_iter().zip(&mut wide.pairs) {
                    _mm256_storeu_si256(wide.as_mut_ptr().cast(), pairs);
                }
            }
            wide.scale = block.scale;
        }
    }
}

/// Of each four bytes the first and third as integers of 16 bits, and the second and fourth.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn pairs(bytes: __m256i) -> [__m256i; 2] {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)), _mm256_srai_epi16::<8>(bytes)] }
}

/// What the blocks `run` of a panel, which has `outputs`, add to some rows.
///
/// # Safety
/// `wide` has the run of the rows. The CPU has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn meet(
    wide: &[WideBlock],
    rows: Range<usize>,
    panel: &[u8],
    outputs: Range<usize>,
    run: Range<usize>,
    y: &Target<'_>,
) {
    assert_eq!(wide.len(), rows.len() * run.len(), "every row has its run");
    // SAFETY: any bits are numbers.
    let mut weights: [PanelBlock; MAX_RUN] = unsafe { std::mem::zeroed() };
    for first in (0..outputs.len()).step_by(COLUMNS * LANES) {
        let outputs = outputs.start + first..outputs.end.min(outputs.start + first + COLUMNS * LANES);
        // SAFETY: as the caller vouches.
        unsafe {
            for (block, weights) in run.clone().zip(&mut weights) {
                widen_weights(&panel[block * BLOCK_BYTES..][..BLOCK_BYTES], first, weights);
            }
            let weights = &weights[..run.len()];
            let mut at = wide.as_ptr();
            let mut row = rows.start;
            while row + ROWS <= rows.end {
                tile::<ROWS>(at, weights, row, &outputs, run.start == 0, y);
                at = at.add(ROWS * run.len());
                row += ROWS;
            }
            match rows.end - row {
                5 => tile::<5>(at, weights, row, &outputs, run.start == 0, y),
                4 => tile::<4>(at, weights, row, &outputs, run.start == 0, y),
                3 => tile::<3>(at, weights, row, &outputs, run.start == 0, y),
                2 => tile::<2>(at, weights, row, &outputs, run.start == 0, y),
                1 => tile::<1>(at, weights, row, &outputs, run.start == 0, y),
                _ => {}
            }
        }
    }
}

/// A block of a panel from its output `first` on.
///
/// # Safety
/// The CPU has AVX2 and F16C.
#[inline(always)]
unsafe fn widen_weights(block: &[u8], first: usize, weights: &mut PanelBlock) {
    let (scales, quants) = block.split_at(SCALE_BYTES);
    // SAFETY: the block has scales and quants of two registers of outputs from `first` on.
    unsafe {
        for c in 0..COLUMNS {
            let output = first + c * LANES;
            weights.scales[c] = _mm256_cvtph_ps(_mm_loadu_si128(scales.as_ptr().add(2 * output).cast()));
            for quad in 0..QUADS {
                let biased = _mm256_loadu_si256(quants.as_ptr().add(quad * QUAD_BYTES + 4 * output).cast());
                let [one, other] = pairs(_mm256_xor_si256(biased, _mm256_set1_epi8(i8::MIN)));
                weights.pairs[quad][0][c] = one;
                weights.pairs[quad][1][c] = other;
            }
        }
    }
}

/// What a run adds to `R` rows from `row`, the first of which is at `x`, and to `outputs`.
///
/// # Safety
/// `x` has the run of the rows. The CPU has AVX2.
#[inline(always)]
unsafe fn tile<const R: usize>(
    x: *const WideBlock,
    weights: &[PanelBlock],
    row: usize,
    outputs: &Range<usize>,
    is_first: bool,
    y: &Target<'_>,
) {
    // SAFETY: as the caller vouches; places are looked up.
    unsafe {
        let mut sums = [[_mm256_setzero_ps(); COLUMNS]; R];
        if !is_first {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = read(y, row + r, outputs, c);
                }
            }
        }
        for (block, w) in weights.iter().enumerate() {
            let mut ints = [[_mm256_setzero_si256(); COLUMNS]; R];
            for quad in 0..QUADS {
                for (half, w) in w.pairs[quad].iter().enumerate() {
                    for (r, ints) in ints.iter_mut().enumerate() {
                        let x = _mm256_set1_epi32((*x.add(r * weights.len() + block)).pairs[half][quad]);
                        for (sum, w) in ints.iter_mut().zip(w) {
                            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(*w, x));
                        }
                    }
                }
            }
            for (r, (sums, ints)) in sums.iter_mut().zip(ints).enumerate() {
                let x_scale = _mm256_set1_ps((*x.add(r * weights.len() + block)).scale);
                for c in 0..COLUMNS {
                    let scale = _mm256_mul_ps(w.scales[c], x_scale);
                    sums[c] = _mm256_add_ps(sums[c], _mm256_mul_ps(_mm256_cvtepi32_ps(ints[c]), scale));
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (c, sum) in sums.into_iter().enumerate() {
                write(sum, y, row + r, outputs, c);
            }
        }
    }
}

/// The outputs of a register that a row has, and where their results are.
#[inline(always)]
fn place(y: &Target<'_>, row: usize, outputs: &Range<usize>, column: usize) -> (*mut f32, usize) {
    let first = outputs.end.min(outputs.start + column * LANES);
    let n = LANES.min(outputs.end - first);
    (y.at(row, first, n), n)
}

/// Results so far, zeros behind those that there are.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn read(y: &Target<'_>, row: usize, outputs: &Range<usize>, column: usize) -> __m256 {
    let ((at, n), mut lanes) = (place(y, row, outputs, column), [0.0; LANES]);
    // SAFETY: the place is one for `n` numbers, at most as many as a register has.
    unsafe {
        if n == LANES {
            return _mm256_loadu_ps(at);
        }
        at.copy_to_nonoverlapping(lanes.as_mut_ptr(), n);
        _mm256_loadu_ps(lanes.as_ptr())
    }
}

/// Writes those results that there are.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn write(sum: __m256, y: &Target<'_>, row: usize, outputs: &Range<usize>, column: usize) {
    let ((at, n), mut lanes) = (place(y, row, outputs, column), [0.0; LANES]);
    // SAFETY: as above.
    unsafe {
        if n == LANES {
            return _mm256_storeu_ps(at, sum);
        }
        _mm256_storeu_ps(lanes.as_mut_ptr(), sum);
        at.copy_from_nonoverlapping(lanes.as_ptr(), n);
    }
}
