//! What a product of blocks is written in: registers whose lanes are outputs, of one instruction set.

use super::{BLOCK, product::PanelProduct, rows::RowBlock};
use crate::ops::cpu::kernel::lanes::CacheLevel;

/// One instruction set.
///
/// # Safety
/// Its functions are called only where the instruction set was found, and inlined into a function that enables it.
/// Pointers are read and written for the bytes named, at any alignment.
pub(super) unsafe trait BlockLanes {
    /// Outputs of a register.
    const OUTPUTS: usize;
    /// Registers of outputs in a tile.
    const COLUMNS: usize;
    /// Rows of the highest tile: as many as leave its sums in registers.
    const ROWS: usize;
    /// A sum or scale for each output.
    type Floats: Copy;
    /// A sum of integers for each output.
    type Ints: Copy;
    /// Four inputs for each output: bytes that say `weight + bias`.
    type Bytes: Copy;

    /// No sum yet.
    unsafe fn zero() -> Self::Floats;
    /// Reads `OUTPUTS` scales of f16.
    unsafe fn scales(at: *const u8) -> Self::Floats;
    /// Reads `4 * OUTPUTS` bytes.
    unsafe fn bytes(at: *const u8) -> Self::Bytes;
    /// The low and the high halves of bytes, as bytes.
    unsafe fn halves(bytes: Self::Bytes) -> [Self::Bytes; 2];
    /// What the sum of a block begins with.
    unsafe fn start<const BIAS: i32>(x: &RowBlock) -> Self::Ints;
    /// Adds the products of the four inputs at `x`, in its own way of counting.
    unsafe fn dot<const BIAS: i32>(sum: Self::Ints, w: Self::Bytes, x: *const i8) -> Self::Ints;
    /// After all dots of a block: `sum (w - BIAS) * x`.
    #[inline(always)]
    unsafe fn finish<const BIAS: i32>(sum: Self::Ints, x: &RowBlock) -> Self::Ints {
        let _ = x;
        sum
    }
    /// `sum + ints * (w_scales * x_scale)`, each operation rounded.
    unsafe fn add_scaled(sum: Self::Floats, ints: Self::Ints, w_scales: Self::Floats, x_scale: f32) -> Self::Floats;
    /// Computes the product in a way of its own; `false` where it has none for so many rows and such weights.
    #[inline(always)]
    unsafe fn in_own_way(product: &PanelProduct<'_>) -> bool {
        let _ = product;
        false
    }
    /// Writes `OUTPUTS` numbers.
    unsafe fn write(sum: Self::Floats, out: *mut f32);
    /// The sum of a block's integers.
    #[inline(always)]
    unsafe fn sum(quants: &[i8; BLOCK]) -> i32 {
        quants.iter().map(|quant| i32::from(*quant)).sum()
    }
    /// Asks for the cache line at `at`, which need not exist, ahead of its use.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        let _ = (at, level);
    }
}
