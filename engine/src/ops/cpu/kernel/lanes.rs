//! What a kernel is written in: the registers of one instruction set that multiply numbers of one weight format.
//!
//! A product sums over its inputs in lanes: step `s` adds the inputs `s * STEP..(s + 1) * STEP` to the lanes, and the
//! end folds the lanes in a fixed tree. Neither depends on how many rows or outputs are computed together, so on one
//! machine a number has the same bits whoever computes it.

/// How near to the CPU weights are brought ahead of their use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum CacheLevel {
    First,
    Second,
}

/// One instruction set on one weight format.
///
/// # Safety
/// Its functions are called only where `Isa::detect` found the instruction set, and inlined into a function that
/// enables it. Pointers are read for the bytes named, at any alignment.
pub(super) unsafe trait Lanes {
    /// Inputs of one step.
    const STEP: usize;
    /// Bytes of a packed row in one step.
    const X_BYTES: usize;
    /// Bytes of a weight row in one step.
    const W_BYTES: usize;
    /// Sums on the way.
    type Acc: Copy;
    /// A step of a packed row.
    type X: Copy;
    /// A step of a weight row.
    type W: Copy;
    /// The same format in f32 registers.
    type Wide: Wide;

    /// No sum yet.
    unsafe fn zero() -> Self::Acc;
    /// Reads a step of a packed row.
    unsafe fn x(x: *const u8) -> Self::X;
    /// Reads a step of a weight row.
    unsafe fn w(w: *const u8) -> Self::W;
    /// Asks for the cache line at `at`, which need not exist, ahead of its use.
    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        let _ = (at, level);
    }
    /// Adds the products of a step.
    unsafe fn add(acc: Self::Acc, x: Self::X, w: Self::W) -> Self::Acc;
    /// Folds the lanes of four sums: halves onto each other until one is left.
    unsafe fn fold4(acc: [Self::Acc; 4]) -> [f32; 4];
    /// Writes part of a row, whole steps of it, as [`Lanes::x`] reads it.
    fn pack(row: &[f32], packed: &mut [u8]);
}

/// Lanes whose activations are f32, a register's lane a number: sums of scaled rows are made of them too.
///
/// # Safety
/// As [`Lanes`].
pub(super) unsafe trait Wide: Lanes {
    /// One number in all lanes.
    unsafe fn splat(x: f32) -> Self::X;
    /// Writes the lanes, `STEP` numbers.
    unsafe fn write(acc: Self::Acc, out: *mut f32);
    /// The `idx`-th number of a stored row.
    fn widen(row: &[u8], idx: usize) -> f32;
}
