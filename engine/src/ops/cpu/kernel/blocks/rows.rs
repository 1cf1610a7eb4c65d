//! Rows of activations in blocks of 32 integers of 8 bits with one scale, as products of blocks read them.
//!
//! A number is off by at most half a scale: the largest of its block divided by 254.

use super::{BLOCK, BlockKernel, Isa, lanes::BlockLanes};
use crate::{
    ops::cpu::buffer::Buffer,
    pool::{Pool, RowRuns},
};

/// Values below which quantising is not worth sharing out.
const MIN_VALUES_PER_TASK: usize = 16 * 1024;
/// Adding it rounds to the nearest integer, ties to even, which then lies in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Rows in blocks, one row behind the other.
#[derive(Debug)]
pub(in super::super) struct BlockRows {
    pub(super) blocks: Buffer<RowBlock>,
    pub(super) per_row: usize,
}

/// 32 numbers of a row: `scale * quants`.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct RowBlock {
    pub(super) quants: [i8; BLOCK],
    pub(super) scale: f32,
    /// The sum of the quants.
    pub(super) sum: i32,
}

impl BlockRows {
    /// Quantises rows of `width` numbers, a multiple of 32.
    pub(in super::super) fn new(pool: &mut Pool, isa: Isa, x: &[f32], width: usize) -> Self {
        let per_row = width / BLOCK;
        let mut blocks = Buffer::unwritten(x.len() / BLOCK);
        let runs = RowRuns { width: per_row, per_task: (MIN_VALUES_PER_TASK / width).max(1) };
        pool.for_rows(&mut blocks, runs, |first, blocks| {
            isa.run_on_blocks(Quantise { x: &x[first * width..][..blocks.len() * BLOCK], blocks });
        });
        Self { blocks, per_row }
    }

    #[cfg(test)]
    pub(super) fn n_rows(&self) -> usize {
        self.blocks.len() / self.per_row
    }
}

struct Quantise<'a> {
    x: &'a [f32],
    blocks: &'a mut [RowBlock],
}

impl BlockKernel for Quantise<'_> {
    #[inline(always)]
    unsafe fn run<L: BlockLanes>(self) {
        for (x, block) in self.x.as_chunks::<BLOCK>().0.iter().zip(self.blocks) {
            quantise(x, block);
            // SAFETY: the caller vouches for the instruction set.
            block.sum = unsafe { L::sum(&block.quants) };
        }
    }
}

/// All but the sum. Plain loops, which the compiler makes vectors of. What is not finite makes the scale so, and with it every product.
#[inline(always)]
fn quantise(x: &[f32; BLOCK], block: &mut RowBlock) {
    // Magnitudes order like their bits, NaN above all.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7FFF_FFFF);
    }
    let largest = f32::from_bits(largest);
    let inverse = 127.0 / largest;
    // Zero and what is next to it has no inverse and becomes zero.
    let inverse = if inverse < f32::MAX { inverse } else { 0.0 };
    for (x, quant) in x.iter().zip(&mut block.quants) {
        *quant = (x * inverse + ROUND).to_bits() as i8;
    }
    block.scale = largest / 127.0;
}
