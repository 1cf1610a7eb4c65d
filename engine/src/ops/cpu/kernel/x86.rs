//! Lanes on x86-64: AVX-512 with and without its bf16 dot product, and AVX2. Which of them a CPU has is `Isa`'s
//! business.
//!
//! Weights are read as they lie in the file and widened in registers, which is exact. Only the bf16 dot product takes
//! activations in bf16 too: it does twice the work of f32 per instruction, which prefill needs, and decode must use the
//! same arithmetic to give the same bits.

use std::{arch::x86_64::*, marker::PhantomData};

use half::{bf16, f16};

use super::{
    lanes::{CacheLevel, Lanes, Wide},
    portable::Stored,
};

/// Sixteen stored numbers to f32.
///
/// # Safety
/// The CPU has AVX-512F, and `w` may be read for sixteen numbers.
pub(super) unsafe trait Wide512: Stored {
    /// Reads and widens.
    unsafe fn load(w: *const u8) -> __m512;
}

/// Eight stored numbers to f32.
///
/// # Safety
/// The CPU has AVX2 and F16C, and `w` may be read for eight numbers.
pub(super) unsafe trait Wide256: Stored {
    /// Reads and widens.
    unsafe fn load(w: *const u8) -> __m256;
}

/// bf16 weights and activations, 32 products an instruction.
pub(super) struct Bf16Dot;
/// f32 activations, weights widened from `T`.
pub(super) struct Avx512<T>(PhantomData<T>);
/// f32 activations, weights widened from `T`, half the width.
pub(super) struct Avx2<T>(PhantomData<T>);

macro_rules! widen {
    ($wide:ident, $number:ty, $register:ty, |$w:ident| $load:expr) => {
        // SAFETY: reads exactly one register of numbers, with instructions of the set that the trait names.
        unsafe impl $wide for $number {
            #[inline(always)]
            unsafe fn load($w: *const u8) -> $register {
                // SAFETY: the caller vouches for the bytes and the instruction set.
                unsafe { $load }
            }
        }
    };
}

widen!(Wide512, f32, __m512, |w| _mm512_loadu_ps(w.cast()));
widen!(Wide512, bf16, __m512, |w| {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(w.cast()))))
});
widen!(Wide512, f16, __m512, |w| _mm512_cvtph_ps(_mm256_loadu_si256(w.cast())));
widen!(Wide256, f32, __m256, |w| _mm256_loadu_ps(w.cast()));
widen!(Wide256, bf16, __m256, |w| {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(w.cast()))))
});
widen!(Wide256, f16, __m256, |w| _mm256_cvtph_ps(_mm_loadu_si128(w.cast())));

// SAFETY: uses AVX-512F, BW and BF16, and reads 64 bytes a step.
unsafe impl Lanes for Bf16Dot {
    const STEP: usize = 32;
    const X_BYTES: usize = 64;
    const W_BYTES: usize = 64;
    type Acc = __m512;
    type X = __m512bh;
    type W = __m512bh;
    type Wide = Avx512<bf16>;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> __m512bh {
        // SAFETY: the caller vouches for the bytes and the instruction set; both types are 512 plain bits.
        unsafe { std::mem::transmute(_mm512_loadu_si512(x.cast())) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> __m512bh {
        // SAFETY: as above.
        unsafe { Self::x(w) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }

    #[inline(always)]
    unsafe fn add(acc: __m512, x: __m512bh, w: __m512bh) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_dpbf16_ps(acc, x, w) }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { fold4_512(acc) }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        pack_bf16(row, packed);
    }
}

// SAFETY: uses AVX-512F, and reads sixteen numbers a step.
unsafe impl<T: Wide512> Lanes for Avx512<T> {
    const STEP: usize = 16;
    const X_BYTES: usize = 64;
    const W_BYTES: usize = 16 * T::BYTES;
    type Acc = __m512;
    type X = __m512;
    type W = __m512;
    type Wide = Self;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> __m512 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm512_loadu_ps(x.cast()) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> __m512 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { T::load(w) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }

    #[inline(always)]
    unsafe fn add(acc: __m512, x: __m512, w: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_fmadd_ps(x, w, acc) }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { fold4_512(acc) }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_f32(row, packed);
    }
}

// SAFETY: uses AVX2, FMA and F16C, and reads eight numbers a step.
unsafe impl<T: Wide256> Lanes for Avx2<T> {
    const STEP: usize = 8;
    const X_BYTES: usize = 32;
    const W_BYTES: usize = 8 * T::BYTES;
    type Acc = __m256;
    type X = __m256;
    type W = __m256;
    type Wide = Self;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> __m256 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_loadu_ps(x.cast()) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> __m256 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { T::load(w) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }

    #[inline(always)]
    unsafe fn add(acc: __m256, x: __m256, w: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_fmadd_ps(x, w, acc) }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [__m256; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let mut fours = [_mm_setzero_ps(); 4];
            for (four, acc) in fours.iter_mut().zip(acc) {
                *four = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps::<1>(acc));
            }
            quarters(fours)
        }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_f32(row, packed);
    }
}

// SAFETY: uses AVX-512F, and writes one register.
unsafe impl<T: Wide512> Wide for Avx512<T> {
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn write(acc: __m512, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { _mm512_storeu_ps(out, acc) }
    }

    #[inline(always)]
    fn widen(row: &[u8], idx: usize) -> f32 {
        T::widened(&row[idx * T::BYTES..])
    }
}

// SAFETY: uses AVX, and writes one register.
unsafe impl<T: Wide256> Wide for Avx2<T> {
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn write(acc: __m256, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { _mm256_storeu_ps(out, acc) }
    }

    #[inline(always)]
    fn widen(row: &[u8], idx: usize) -> f32 {
        T::widened(&row[idx * T::BYTES..])
    }
}

/// Asks for the cache line at `at`, which need not exist.
#[inline(always)]
fn prefetch(at: *const u8, level: CacheLevel) {
    // SAFETY: every x86-64 CPU has the instruction, and it never faults.
    unsafe {
        match level {
            CacheLevel::First => _mm_prefetch::<_MM_HINT_T0>(at.cast()),
            CacheLevel::Second => _mm_prefetch::<_MM_HINT_T1>(at.cast()),
        }
    }
}

/// Lane `i` onto lane `i + 8`, then 4, 2, 1, for four sums side by side.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn fold4_512(acc: [__m512; 4]) -> [f32; 4] {
    let [a, b, c, d] = acc;
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        // [a low + a high | b low + b high], eight lanes each
        let (low, high) = (_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b));
        let ab = _mm512_add_ps(low, high);
        let (low, high) = (_mm512_shuffle_f32x4::<0b01_00_01_00>(c, d), _mm512_shuffle_f32x4::<0b11_10_11_10>(c, d));
        let cd = _mm512_add_ps(low, high);
        // [a | b | c | d], four lanes each
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
        let odd = _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd);
        let fours = _mm512_add_ps(even, odd);
        let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0b01_00_11_10>(fours));
        let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b10_11_00_01>(twos));
        let first_lanes = _mm512_maskz_compress_ps(0x1111, ones);
        std::mem::transmute(_mm512_castps512_ps128(first_lanes))
    }
}

/// The same from four sums of four lanes each.
///
/// # Safety
/// The CPU has SSE3.
#[inline(always)]
unsafe fn quarters(fours: [__m128; 4]) -> [f32; 4] {
    let [a, b, c, d] = fours;
    // SAFETY: every x86-64 CPU with AVX2 has these.
    unsafe {
        let ab = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let cd = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
        let sums = _mm_add_ps(_mm_shuffle_ps::<0b10_00_10_00>(ab, cd), _mm_shuffle_ps::<0b11_01_11_01>(ab, cd));
        std::mem::transmute(sums)
    }
}

/// Rounded to the nearest, ties to even.
#[inline(always)]
fn pack_bf16(row: &[f32], packed: &mut [u8]) {
    for (value, packed) in row.iter().zip(packed.as_chunks_mut().0) {
        *packed = super::rounded(*value).to_ne_bytes();
    }
}
