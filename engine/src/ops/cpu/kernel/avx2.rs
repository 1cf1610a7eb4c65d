//! Eight numbers in a register of AVX2, with FMA and F16C.

use std::arch::x86_64::*;

use super::{
    avx512::prefetch,
    eights::{Eight, LANES},
    lanes::CacheLevel,
};

// SAFETY: uses AVX2, FMA and F16C, and reads and writes the bytes named.
unsafe impl Eight for __m256 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn read(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }

    #[inline(always)]
    unsafe fn write(self, at: *mut u8) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { _mm256_storeu_ps(at.cast(), self) }
    }

    #[inline(always)]
    unsafe fn add_product(self, x: Self, w: Self) -> Self {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_fmadd_ps(x, w, self) }
    }

    #[inline(always)]
    unsafe fn fold4([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set; both types are four plain numbers.
        unsafe {
            // Of each half of the registers: [a0 + a2, b0 + b2, a1 + a3, b1 + b3]
            let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            let low = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
            let high = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
            let halves = _mm256_add_ps(low, high);
            std::mem::transmute(_mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps::<1>(halves)))
        }
    }

    #[inline(always)]
    unsafe fn of_bf16(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())))) }
    }

    #[inline(always)]
    unsafe fn of_f16(at: *const u8) -> Self {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn turn(rows: [Self; LANES]) -> [Self; LANES] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let [a, b, c, d, e, f, g, h] = rows;
            // Of each half, lanes 0 and 1, then 2 and 3, of two rows side by side; then of four; then the halves of all eight.
            let pairs = [
                [
                    _mm256_unpacklo_ps(a, b),
                    _mm256_unpacklo_ps(c, d),
                    _mm256_unpacklo_ps(e, f),
                    _mm256_unpacklo_ps(g, h),
                ],
                [
                    _mm256_unpackhi_ps(a, b),
                    _mm256_unpackhi_ps(c, d),
                    _mm256_unpackhi_ps(e, f),
                    _mm256_unpackhi_ps(g, h),
                ],
            ];
            let mut turned = rows;
            for (idx, [ab, cd, ef, gh]) in pairs.into_iter().enumerate() {
                let first = _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd);
                let second = _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd);
                let (third, fourth) =
                    (_mm256_shuffle_ps::<0b01_00_01_00>(ef, gh), _mm256_shuffle_ps::<0b11_10_11_10>(ef, gh));
                turned[2 * idx] = _mm256_permute2f128_ps::<0x20>(first, third);
                turned[2 * idx + 1] = _mm256_permute2f128_ps::<0x20>(second, fourth);
                turned[2 * idx + 4] = _mm256_permute2f128_ps::<0x31>(first, third);
                turned[2 * idx + 5] = _mm256_permute2f128_ps::<0x31>(second, fourth);
            }
            turned
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }
}
