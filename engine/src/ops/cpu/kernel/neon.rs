//! Eight numbers in a pair of NEON's registers: what every 64-bit Arm CPU has. And NEON's dot product of bf16, which newer ones have beside it.

use std::arch::{aarch64::*, asm};

use super::{
    eights::{Eight, Eights, LANES},
    lanes::{CacheLevel, Lanes},
};
use half::bf16;

/// Lanes 0 to 3 and 4 to 7.
#[derive(Clone, Copy)]
pub(super) struct Pair(float32x4_t, float32x4_t);

// SAFETY: uses NEON, and reads and writes the bytes named.
unsafe impl Eight for Pair {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }

    #[inline(always)]
    unsafe fn read(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { Self(vld1q_f32(at.cast()), vld1q_f32(at.add(16).cast())) }
    }

    #[inline(always)]
    unsafe fn write(self, at: *mut u8) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe {
            vst1q_f32(at.cast(), self.0);
            vst1q_f32(at.add(16).cast(), self.1);
        }
    }

    #[inline(always)]
    unsafe fn add_product(self, x: Self, w: Self) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { Self(vfmaq_f32(self.0, x.0, w.0), vfmaq_f32(self.1, x.1, w.1)) }
    }

    #[inline(always)]
    unsafe fn fold4(sums: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let [a, b, c, d] = sums.map(|Self(low, high)| vaddq_f32(low, high));
            let mut folded = [0.0; 4];
            vst1q_f32(folded.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            folded
        }
    }

    #[inline(always)]
    unsafe fn of_bf16(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe {
            let numbers = vld1q_u16(at.cast());
            let low = vshll_n_u16::<16>(vget_low_u16(numbers));
            Self(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(vshll_high_n_u16::<16>(numbers)))
        }
    }

    #[inline(always)]
    unsafe fn of_f16(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        let [low, high] = unsafe { eight_of_f16(at) };
        Self(low, high)
    }

    #[inline(always)]
    unsafe fn turn(rows: [Self; LANES]) -> [Self; LANES] {
        let [a, b, c, d, e, f, g, h] = rows;
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let (low, high) = (turn4([a.0, b.0, c.0, d.0]), turn4([a.1, b.1, c.1, d.1]));
            let (low_after, high_after) = (turn4([e.0, f.0, g.0, h.0]), turn4([e.1, f.1, g.1, h.1]));
            let mut turned = rows;
            for idx in 0..4 {
                turned[idx] = Self(low[idx], low_after[idx]);
                turned[idx + 4] = Self(high[idx], high_after[idx]);
            }
            turned
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }
}

/// bf16 weights and activations, 8 products an instruction: twice as many as of f32.
pub(super) struct Bf16Dot;

// SAFETY: uses NEON with bf16, and reads 16 bytes a step.
unsafe impl Lanes for Bf16Dot {
    const STEP: usize = 8;
    const X_BYTES: usize = 16;
    const W_BYTES: usize = 16;
    type Acc = float32x4_t;
    type X = uint16x8_t;
    type Wide = Eights<Pair, bf16>;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> uint16x8_t {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { vld1q_u16(x.cast()) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> uint16x8_t {
        // SAFETY: as above.
        unsafe { Self::x(w) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }

    #[inline(always)]
    unsafe fn add(mut acc: float32x4_t, x: uint16x8_t, w: uint16x8_t) -> float32x4_t {
        // SAFETY: the caller vouches for the instruction set, whose compiler's name is not stable yet; it changes nothing but a register.
        unsafe {
            asm!("bfdot {acc:v}.4s, {x:v}.8h, {w:v}.8h", acc = inout(vreg) acc, x = in(vreg) x, w = in(vreg) w,
                options(pure, nomem, nostack));
        }
        acc
    }

    #[inline(always)]
    unsafe fn fold4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        let mut folded = [0.0; 4];
        // SAFETY: the caller vouches for the instruction set.
        unsafe { vst1q_f32(folded.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d))) };
        folded
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_bf16(row, packed);
    }
}

/// Asks for the cache line at `at`, which need not exist.
#[inline(always)]
pub(super) fn prefetch(at: *const u8, level: CacheLevel) {
    // SAFETY: every 64-bit Arm CPU has the instruction, and it never faults.
    unsafe {
        match level {
            CacheLevel::First => asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly)),
            CacheLevel::Second => asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, readonly)),
        }
    }
}

/// Lane `i` of register `j` to lane `j` of register `i`.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn turn4([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: as the caller vouches.
    unsafe {
        let twos = |x: float32x4_t| vreinterpretq_f64_f32(x);
        let (ab, ab_odd) = (twos(vtrn1q_f32(a, b)), twos(vtrn2q_f32(a, b)));
        let (cd, cd_odd) = (twos(vtrn1q_f32(c, d)), twos(vtrn2q_f32(c, d)));
        [vtrn1q_f64(ab, cd), vtrn1q_f64(ab_odd, cd_odd), vtrn2q_f64(ab, cd), vtrn2q_f64(ab_odd, cd_odd)]
            .map(|x| vreinterpretq_f32_f64(x))
    }
}

/// The instruction is part of NEON; the compiler's name for it takes a type that is not stable yet.
///
/// # Safety
/// `at` may be read for 16 bytes.
#[inline(always)]
pub(super) unsafe fn eight_of_f16(at: *const u8) -> [float32x4_t; 2] {
    // SAFETY: as the caller vouches; widening changes nothing but the two registers.
    unsafe {
        let halves = vld1q_u16(at.cast());
        let (low, high): (float32x4_t, float32x4_t);
        asm!(
            "fcvtl {low:v}.4s, {halves:v}.4h",
            "fcvtl2 {high:v}.4s, {halves:v}.8h",
            low = out(vreg) low, high = lateout(vreg) high, halves = in(vreg) halves,
            options(pure, nomem, nostack)
        );
        [low, high]
    }
}
