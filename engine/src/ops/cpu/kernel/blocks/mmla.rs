//! Products with blocks on NEON's matrix instruction for bytes (i8mm): two rows times two outputs, eight inputs of each.
//!
//! ```text
//! panel:        quad q of outputs 0 1 2 3   quad q + 1 of outputs 0 1 2 3      four inputs each
//! zipped:       outputs 0 1, eight inputs   outputs 2 3, eight inputs
//! rows 0 1  x   that  =  r0 o0, r0 o1, r1 o0, r1 o1                            32 products an instruction
//! ```
//! Sums of blocks are exact, and add up in the order of the blocks: the results are those of other tiles.

use std::{
    arch::{aarch64::*, asm},
    ops::Range,
};

use super::{
    BLOCK, Quant,
    panels::{OUTPUTS, QUAD_BYTES, SCALE_BYTES},
    product::PanelProduct,
    rows::RowBlock,
};
use crate::ops::cpu::kernel::neon::eight_of_f16;

/// Outputs of a tile, and pairs of rows: 16 registers of sums.
const TILE_OUTPUTS: usize = 8;
const PAIRS: usize = 2;

/// All rows times all outputs.
///
/// # Safety
/// Rows are as long as weight rows. The CPU has NEON with i8mm.
#[inline(always)]
pub(super) unsafe fn product(product: &PanelProduct<'_>) {
    let (quant, per_row) = (product.w.quant(), product.x.per_row);
    let panels = product.w.of(&product.outputs).chunks_exact(per_row * quant.panel_block_bytes());
    for (idx, panel) in panels.enumerate() {
        let output = product.outputs.start + idx * OUTPUTS;
        for first in (0..OUTPUTS).step_by(TILE_OUTPUTS) {
            let outputs = output + first..product.outputs.end.min(output + first + TILE_OUTPUTS);
            if outputs.is_empty() {
                continue;
            }
            let part = Part { panel, quant, first, outputs };
            for row in product.rows.clone().step_by(2 * PAIRS) {
                let rows = row..product.rows.end.min(row + 2 * PAIRS);
                // SAFETY: as the caller vouches.
                unsafe {
                    match rows.len() {
                        1 | 2 => tile::<1>(product, &part, rows),
                        _ => tile::<PAIRS>(product, &part, rows),
                    }
                }
            }
        }
    }
}

/// Outputs of a panel, the first of which is its `first`.
struct Part<'a> {
    panel: &'a [u8],
    quant: Quant,
    first: usize,
    outputs: Range<usize>,
}

/// `rows`, at most `P` pairs of them, times some outputs. The last of an odd number is its own neighbour.
///
/// # Safety
/// The CPU has NEON with i8mm.
#[inline(always)]
unsafe fn tile<const P: usize>(product: &PanelProduct<'_>, part: &Part<'_>, rows: Range<usize>) {
    let per_row = product.x.per_row;
    let block_bytes = part.quant.panel_block_bytes();
    // SAFETY: a block has scales and quants of eight outputs from `first` on; places are looked up.
    unsafe {
        let mut sums = [[[vdupq_n_f32(0.0); 2]; 2]; P];
        for block in 0..per_row {
            let bytes = part.panel[block * block_bytes..][..block_bytes].as_ptr();
            let row = |row: usize| &product.x.blocks[(rows.start + row).min(rows.end - 1) * per_row + block];
            let mut pairs = [[row(0), row(1)]; P];
            for (p, pair) in pairs.iter_mut().enumerate().skip(1) {
                *pair = [row(2 * p), row(2 * p + 1)];
            }
            let quants = bytes.add(SCALE_BYTES + 4 * part.first);
            let ints = match part.quant {
                Quant::Q8 => of_eight_bits(quants, &pairs),
                Quant::Q4 => of_four_bits(quants, &pairs),
            };
            let scales = eight_of_f16(bytes.add(2 * part.first));
            for ((sums, ints), pair) in sums.iter_mut().zip(ints).zip(pairs) {
                let rows = [
                    [vget_low_s32(ints[0]), vget_low_s32(ints[1]), vget_low_s32(ints[2]), vget_low_s32(ints[3])],
                    [vget_high_s32(ints[0]), vget_high_s32(ints[1]), vget_high_s32(ints[2]), vget_high_s32(ints[3])],
                ];
                for ((sums, [a, b, c, d]), x) in sums.iter_mut().zip(rows).zip(pair) {
                    for (c, (sum, ints)) in sums.iter_mut().zip([vcombine_s32(a, b), vcombine_s32(c, d)]).enumerate() {
                        let scale = vmulq_f32(scales[c], vdupq_n_f32(x.scale));
                        *sum = vaddq_f32(*sum, vmulq_f32(vcvtq_f32_s32(ints), scale));
                    }
                }
            }
        }
        for (idx, sums) in sums.into_iter().flatten().enumerate().take(rows.len()) {
            let mut lanes = [0.0; TILE_OUTPUTS];
            vst1q_f32(lanes.as_mut_ptr(), sums[0]);
            vst1q_f32(lanes.as_mut_ptr().add(4), sums[1]);
            let n = part.outputs.len();
            product.y.at(rows.start + idx, part.outputs.start, n).copy_from_nonoverlapping(lanes.as_ptr(), n);
        }
    }
}

/// The sums of a block of eight bits: of each pair of rows with four pairs of outputs.
///
/// # Safety
/// `quants` may be read for a block of a panel from a tile's first output on. The CPU has NEON with i8mm.
#[inline(always)]
unsafe fn of_eight_bits<const P: usize>(quants: *const u8, pairs: &[[&RowBlock; 2]; P]) -> [[int32x4_t; 4]; P] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 4]; P];
        for quad in (0..BLOCK / 4).step_by(2) {
            let at = quants.add(quad * QUAD_BYTES);
            let signed = |at: *const u8| vsubq_u8(vld1q_u8(at), vdupq_n_u8(128));
            let [one, other] = [at, at.add(QUAD_BYTES)].map(|at| [signed(at), signed(at.add(16))]);
            add(&mut sums, one, other, pairs, 4 * quad);
        }
        sums
    }
}

/// The same of four bits, which have the inputs 16 to 31 in their upper halves.
///
/// # Safety
/// As [`of_eight_bits`].
#[inline(always)]
unsafe fn of_four_bits<const P: usize>(quants: *const u8, pairs: &[[&RowBlock; 2]; P]) -> [[int32x4_t; 4]; P] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut sums = [[vdupq_n_s32(0); 4]; P];
        for quad in (0..BLOCK / 8).step_by(2) {
            let at = quants.add(quad * QUAD_BYTES);
            let bytes = [at, at.add(QUAD_BYTES)].map(|at| [vld1q_u8(at), vld1q_u8(at.add(16))]);
            let bias = vdupq_n_u8(8);
            let [one, other] = bytes.map(|bytes| bytes.map(|bytes| vsubq_u8(vandq_u8(bytes, vdupq_n_u8(15)), bias)));
            add(&mut sums, one, other, pairs, 4 * quad);
            let [one, other] = bytes.map(|bytes| bytes.map(|bytes| vsubq_u8(vshrq_n_u8::<4>(bytes), bias)));
            add(&mut sums, one, other, pairs, BLOCK / 2 + 4 * quad);
        }
        sums
    }
}

/// Adds the products of eight inputs, of which `first` is the first: two quads of eight outputs, four in a register.
///
/// # Safety
/// The CPU has NEON with i8mm.
#[inline(always)]
unsafe fn add<const P: usize>(
    sums: &mut [[int32x4_t; 4]; P],
    one: [uint8x16_t; 2],
    other: [uint8x16_t; 2],
    pairs: &[[&RowBlock; 2]; P],
    first: usize,
) {
    // SAFETY: the caller vouches for the instruction set; a block has eight inputs from `first` on.
    unsafe {
        let quads = |bytes: uint8x16_t| vreinterpretq_u32_u8(bytes);
        let (a, b) = ([quads(one[0]), quads(one[1])], [quads(other[0]), quads(other[1])]);
        let w = [vzip1q_u32(a[0], b[0]), vzip2q_u32(a[0], b[0]), vzip1q_u32(a[1], b[1]), vzip2q_u32(a[1], b[1])];
        for (sums, pair) in sums.iter_mut().zip(pairs) {
            let eight = |row: &RowBlock| vld1_s8(row.quants.as_ptr().add(first));
            let x = vcombine_s8(eight(pair[0]), eight(pair[1]));
            for (sum, w) in sums.iter_mut().zip(w) {
                // The compiler's name for it is not stable yet.
                asm!("smmla {sum:v}.4s, {x:v}.16b, {w:v}.16b", sum = inout(vreg) *sum, x = in(vreg) x, w = in(vreg) w,
                    options(pure, nomem, nostack));
            }
        }
    }
}
