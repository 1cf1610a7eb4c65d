//! Eight numbers in a pair of NEON's registers: what every 64-bit Arm CPU has.

use std::arch::{aarch64::*, asm};

use super::{
    chains::{CHAIN, Eight},
    lanes::CacheLevel,
};

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
    unsafe fn fold4(chains: [[Self; 2]; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let mut fours = [vdupq_n_f32(0.0); 4];
            for (four, [first, second]) in fours.iter_mut().zip(chains) {
                *four = vaddq_f32(vaddq_f32(first.0, second.0), vaddq_f32(first.1, second.1));
            }
            let [a, b, c, d] = fours.map(|four| vreinterpretq_f64_f32(four));
            // Lanes 2 and 3 onto 0 and 1, of two sums side by side.
            let halves = |low, high| {
                vaddq_f32(vreinterpretq_f32_f64(vtrn1q_f64(low, high)), vreinterpretq_f32_f64(vtrn2q_f64(low, high)))
            };
            let (ab, cd) = (halves(a, b), halves(c, d));
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vaddq_f32(vuzp1q_f32(ab, cd), vuzp2q_f32(ab, cd)));
            sums
        }
    }

    #[inline(always)]
    unsafe fn of_bf16(at: *const u8) -> [Self; 2] {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe {
            let (low, high) = (vld1q_u32(at.cast()), vld1q_u32(at.add(16).cast()));
            let odd = vdupq_n_u32(0xFFFF_0000);
            let number = |bits| vreinterpretq_f32_u32(bits);
            [
                Self(number(vshlq_n_u32::<16>(low)), number(vshlq_n_u32::<16>(high))),
                Self(number(vandq_u32(low, odd)), number(vandq_u32(high, odd))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn of_f16(at: *const u8) -> [Self; 2] {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { [eight_of_f16(at), eight_of_f16(at.add(CHAIN * 2))] }
    }

    #[inline(always)]
    unsafe fn turn(rows: [Self; CHAIN]) -> [Self; CHAIN] {
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
    unsafe fn interleave([even, odd]: [Self; 2]) -> [Self; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            [
                Self(vzip1q_f32(even.0, odd.0), vzip2q_f32(even.0, odd.0)),
                Self(vzip1q_f32(even.1, odd.1), vzip2q_f32(even.1, odd.1)),
            ]
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        // SAFETY: every 64-bit Arm CPU has the instruction, and it never faults.
        unsafe {
            match level {
                CacheLevel::First => asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly)),
                CacheLevel::Second => asm!("prfm pldl2keep, [{}]", in(reg) at, options(nostack, readonly)),
            }
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
unsafe fn eight_of_f16(at: *const u8) -> Pair {
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
        Pair(low, high)
    }
}
