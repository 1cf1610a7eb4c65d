//! Blocks on NEON with its dot product of bytes: four outputs in a register, four inputs of each.
//!
//! Its dot product is of signed bytes: what makes weights positive is taken off them as they are read, for all rows at once.

use std::arch::{aarch64::*, asm};

use super::{lanes::BlockLanes, mmla, product::PanelProduct, rows::RowBlock};
use crate::ops::cpu::kernel::{lanes::CacheLevel, neon::prefetch};

/// Sixteen products an instruction. With `MMLA` several rows meet weights by its matrix instruction.
pub(super) struct NeonDot<const MMLA: bool>;

// SAFETY: uses NEON with its dot product, and the bytes named.
unsafe impl<const MMLA: bool> BlockLanes for NeonDot<MMLA> {
    const OUTPUTS: usize = 4;
    const COLUMNS: usize = 2;
    const ROWS: usize = 4;
    type Floats = float32x4_t;
    type Ints = int32x4_t;
    type Bytes = uint8x16_t;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8) -> float32x4_t {
        let scales: float32x4_t;
        // SAFETY: the caller vouches for the bytes; widening changes nothing but a register.
        unsafe {
            let halves = vld1_u16(at.cast());
            // Part of NEON; the compiler's name for it takes a type that is not stable yet.
            asm!("fcvtl {scales:v}.4s, {halves:v}.4h", scales = lateout(vreg) scales, halves = in(vreg) halves,
                options(pure, nomem, nostack));
        }
        scales
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> uint8x16_t {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { vld1q_u8(at) }
    }

    #[inline(always)]
    unsafe fn halves(bytes: uint8x16_t) -> [uint8x16_t; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { [vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes)] }
    }

    #[inline(always)]
    unsafe fn start<const BIAS: i32>(_: &RowBlock) -> int32x4_t {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { vdupq_n_s32(0) }
    }

    #[inline(always)]
    unsafe fn dot<const BIAS: i32>(mut sum: int32x4_t, w: uint8x16_t, x: *const i8) -> int32x4_t {
        // SAFETY: the caller vouches for four inputs and the instruction set; the dot product changes nothing but a register.
        unsafe {
            let signed = vsubq_u8(w, vdupq_n_u8(BIAS as u8));
            let x = vdupq_n_u32(x.cast::<u32>().read_unaligned());
            // The compiler's name for it is not stable yet.
            asm!("sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b", sum = inout(vreg) sum, w = in(vreg) signed, x = in(vreg) x,
                options(pure, nomem, nostack));
        }
        sum
    }

    #[inline(always)]
    unsafe fn add_scaled(sum: float32x4_t, ints: int32x4_t, w_scales: float32x4_t, x_scale: f32) -> float32x4_t {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let scale = vmulq_f32(w_scales, vdupq_n_f32(x_scale));
            vaddq_f32(sum, vmulq_f32(vcvtq_f32_s32(ints), scale))
        }
    }

    #[inline(always)]
    unsafe fn in_own_way(product: &PanelProduct<'_>) -> bool {
        let is_faster = MMLA && product.rows.len() > 1;
        if is_faster {
            // SAFETY: the caller vouches for the product and the instruction set, which has the matrix instruction with `MMLA`.
            unsafe { mmla::product(product) };
        }
        is_faster
    }

    #[inline(always)]
    unsafe fn write(sum: float32x4_t, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { vst1q_f32(out, sum) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }
}
