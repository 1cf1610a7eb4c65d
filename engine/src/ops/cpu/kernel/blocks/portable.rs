//! Blocks in plain Rust, for CPUs without an instruction set of ours.

use std::array;

use half::f16;

use super::{lanes::BlockLanes, rows::RowBlock};

const N: usize = 8;

/// Plain Rust.
pub(super) struct Portable;

// SAFETY: needs no instruction set; pointers are read and written for the bytes named.
unsafe impl BlockLanes for Portable {
    const OUTPUTS: usize = N;
    const COLUMNS: usize = 1;
    const ROWS: usize = 2;
    type Floats = [f32; N];
    type Ints = [i32; N];
    type Bytes = [[u8; 4]; N];

    #[inline(always)]
    unsafe fn zero() -> [f32; N] {
        [0.0; N]
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8) -> [f32; N] {
        // SAFETY: the caller vouches for the bytes.
        let bytes = unsafe { at.cast::<[[u8; 2]; N]>().read_unaligned() };
        bytes.map(|bytes| f16::from_le_bytes(bytes).to_f32())
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> [[u8; 4]; N] {
        // SAFETY: the caller vouches for the bytes.
        unsafe { at.cast::<[[u8; 4]; N]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn halves(bytes: [[u8; 4]; N]) -> [[[u8; 4]; N]; 2] {
        [bytes.map(|quad| quad.map(|byte| byte & 15)), bytes.map(|quad| quad.map(|byte| byte >> 4))]
    }

    #[inline(always)]
    unsafe fn start<const BIAS: i32>(_: &RowBlock) -> [i32; N] {
        [0; N]
    }

    #[inline(always)]
    unsafe fn dot<const BIAS: i32>(mut sum: [i32; N], w: [[u8; 4]; N], x: *const i8) -> [i32; N] {
        // SAFETY: the caller vouches for four inputs.
        let x = unsafe { x.cast::<[i8; 4]>().read_unaligned() };
        for lane in 0..N {
            for input in 0..4 {
                sum[lane] += (i32::from(w[lane][input]) - BIAS) * i32::from(x[input]);
            }
        }
        sum
    }

    #[inline(always)]
    unsafe fn add_scaled(sum: [f32; N], ints: [i32; N], w_scales: [f32; N], x_scale: f32) -> [f32; N] {
        array::from_fn(|lane| sum[lane] + ints[lane] as f32 * (w_scales[lane] * x_scale))
    }

    #[inline(always)]
    unsafe fn write(sum: [f32; N], out: *mut f32) {
        // SAFETY: the caller vouches for the place.
        unsafe { out.cast::<[f32; N]>().write_unaligned(sum) }
    }
}
