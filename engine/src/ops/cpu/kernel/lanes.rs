//! What a kernel is written in: the registers of one instruction set that multiply numbers of one weight format.
//!
//! A product sums over its inputs in lanes: step `s` adds the inputs `s * STEP..(s + 1) * STEP` to the lanes, and the
//! end folds the lanes in a fixed tree. Where weights are widened into panels, that is done run by run of inputs, and
//! what they give adds up in order. None of it depends on how many rows or outputs are computed together, so on one
//! machine a number has the same bits whoever computes it.

use super::{
    Line, Rows, WeightRows,
    product::{Product, Target, columns, in_place},
};
use crate::kv::BLOCK_TOKENS;

/// How near to the CPU weights are brought ahead of their use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum CacheLevel {
    First,
    Second,
}

/// How several rows meet weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Tiles {
    /// Each tile reads weights as they lie, widening them in registers: 4 rows x 6 outputs take 24 registers for sums.
    InPlace,
    /// Weights of a few outputs are widened once into a panel that all rows meet, 3 rows x 4 outputs at a time: 12 registers
    /// for sums, of 16 that there are. Rows of whole steps are read as they lie.
    Panel,
    /// A unit for tiles multiplies 32 outputs, as they lie, by 32 rows, of which 16 are packed together.
    #[cfg(target_arch = "x86_64")]
    Unit,
}

impl Tiles {
    /// Rows that are packed together.
    pub(super) fn packed_rows(self) -> usize {
        match self {
            Self::InPlace | Self::Panel => 1,
            #[cfg(target_arch = "x86_64")]
            Self::Unit => 16,
        }
    }
}

/// One instruction set on one weight format.
///
/// # Safety
/// Its functions are called only where `Isa` found the instruction set, and inlined into a function that
/// enables it. Pointers are read for the bytes named, at any alignment.
pub(super) unsafe trait Lanes: Sized {
    /// Inputs of one step.
    const STEP: usize;
    /// Bytes of a packed row in one step.
    const X_BYTES: usize;
    /// Bytes of a weight row in one step.
    const W_BYTES: usize;
    /// How several rows meet weights.
    const TILES: Tiles = Tiles::InPlace;
    /// Sums on the way.
    type Acc: Copy;
    /// A step of a row, of activations or weights.
    type X: Copy;
    /// The same format in f32 registers.
    type Wide: Wide;

    /// No sum yet.
    unsafe fn zero() -> Self::Acc;
    /// Reads a step of a packed row.
    unsafe fn x(x: *const u8) -> Self::X;
    /// Reads a step of a weight row.
    unsafe fn w(w: *const u8) -> Self::X;
    /// Asks for the cache line at `at`, which need not exist, ahead of its use.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        let _ = (at, level);
    }
    /// Adds the products of a step.
    unsafe fn add(acc: Self::Acc, x: Self::X, w: Self::X) -> Self::Acc;
    /// All products of a [`Product`], whose rows, outputs and places exist.
    #[inline(always)]
    unsafe fn product(product: &Product<'_>) {
        // SAFETY: the caller vouches for the product and the instruction set.
        unsafe { in_place::<Self>(product) }
    }
    /// Products of all packed rows with the 16 rows of a KV block, which are as long; `turned` is room for a block turned around.
    #[inline(always)]
    unsafe fn scores(x: Rows<'_>, w: WeightRows<'_>, y: &Target<'_>, turned: &mut Vec<Line>) {
        let _ = turned;
        // SAFETY: the caller vouches for the rows, their places in `y` and the instruction set.
        unsafe {
            if x.n_rows < 4 {
                columns::<Self, 8>(x, 0..x.n_rows, w, 0, y);
                columns::<Self, 8>(x, 0..x.n_rows, w, 8, y);
            } else {
                for token in (0..BLOCK_TOKENS).step_by(4) {
                    columns::<Self, 4>(x, 0..x.n_rows, w, token, y);
                }
            }
        }
    }
    /// Folds the lanes of four sums: halves onto each other until one is left.
    unsafe fn fold4(acc: [Self::Acc; 4]) -> [f32; 4];
    /// Writes part of a row, whole steps of it, as [`Lanes::x`] reads it.
    fn pack(row: &[f32], packed: &mut [u8]);
    /// Writes rows of `width` numbers as products read them.
    #[inline(always)]
    fn pack_rows(rows: &[f32], width: usize, lines: &mut [Line]) {
        super::pack::<Self>(rows, width, lines);
    }
}

/// Lanes whose activations are f32: sums of scaled rows are made of them too.
///
/// # Safety
/// As [`Lanes`].
pub(super) unsafe trait Wide: Lanes {
    /// Steps of columns that are summed together for a few rows.
    const COLUMNS: usize;
    /// How many rows those are, at most.
    const ROWS: usize;
    /// One number in all lanes.
    unsafe fn splat(x: f32) -> Self::X;
    /// Writes `STEP` sums in the order of the numbers that they are of.
    unsafe fn write(acc: Self::Acc, out: *mut f32);
    /// The `idx`-th number of a stored row.
    fn widen(row: &[u8], idx: usize) -> f32;
}
