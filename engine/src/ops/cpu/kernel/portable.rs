//! Lanes in plain Rust, for CPUs without an instruction set of ours. Arrays of eight that the compiler may vectorise.

use half::{bf16, f16};

use super::lanes::{Lanes, Wide};

const N: usize = 8;

/// A number as weights store it.
pub(super) trait Stored {
    /// Bytes of a number.
    const BYTES: usize;
    /// Reads a number from the start of `bytes`.
    fn widened(bytes: &[u8]) -> f32;
}

impl Stored for f32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn widened(bytes: &[u8]) -> f32 {
        Self::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl Stored for bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn widened(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16)
    }
}

impl Stored for f16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn widened(bytes: &[u8]) -> f32 {
        Self::from_le_bytes([bytes[0], bytes[1]]).to_f32()
    }
}

/// Plain Rust on weights stored as `T`.
pub(super) struct Portable<T>(std::marker::PhantomData<T>);

// SAFETY: needs no instruction set; each pointer is read for the bytes of one step.
unsafe impl<T: Stored> Lanes for Portable<T> {
    const STEP: usize = N;
    const X_BYTES: usize = N * size_of::<f32>();
    const W_BYTES: usize = N * T::BYTES;
    type Acc = [f32; N];
    type X = [f32; N];
    type Wide = Self;

    #[inline(always)]
    unsafe fn zero() -> [f32; N] {
        [0.0; N]
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> [f32; N] {
        // SAFETY: the caller vouches for `X_BYTES` bytes.
        unsafe { x.cast::<[f32; N]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> [f32; N] {
        // SAFETY: the caller vouches for `W_BYTES` bytes.
        let bytes = unsafe { std::slice::from_raw_parts(w, Self::W_BYTES) };
        std::array::from_fn(|lane| T::widened(&bytes[lane * T::BYTES..]))
    }

    #[inline(always)]
    unsafe fn add(mut acc: [f32; N], x: [f32; N], w: [f32; N]) -> [f32; N] {
        for lane in 0..N {
            acc[lane] += x[lane] * w[lane];
        }
        acc
    }

    #[inline(always)]
    unsafe fn fold4(acc: [[f32; N]; 4]) -> [f32; 4] {
        acc.map(|mut lanes| {
            for half in [4, 2, 1] {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
            }
            lanes[0]
        })
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_f32(row, packed);
    }
}

// SAFETY: needs no instruction set; writes one step.
unsafe impl<T: Stored> Wide for Portable<T> {
    const COLUMNS: usize = 4;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; N] {
        [x; N]
    }

    #[inline(always)]
    unsafe fn write(acc: [f32; N], out: *mut f32) {
        // SAFETY: the caller vouches for `STEP` numbers.
        unsafe { out.cast::<[f32; N]>().write_unaligned(acc) }
    }

    #[inline(always)]
    fn widen(row: &[u8], idx: usize) -> f32 {
        T::widened(&row[idx * T::BYTES..])
    }
}
