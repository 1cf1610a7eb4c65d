//! Blocks on x86-64: AVX-512 with VNNI, AVX2 with VNNI, and AVX2 alone.
//!
//! VNNI multiplies unsigned bytes by signed ones: weights are stored with their bias, and what the bias adds is taken
//! off where a block's sum begins. AVX2 adds pairs of such products in 16 bits. For weights of four bits these hold the sum of
//! a whole block, `8 * 2 * 15 * 127`, which then becomes one of 32 bits and loses the bias. Weights of eight bits give
//! their sign to the activations first, because `128 * 127 * 2` fits and `255 * 127 * 2` does not.

use std::{arch::x86_64::*, marker::PhantomData};

use super::{BLOCK, Quant, lanes::BlockLanes, product::PanelProduct, rows::RowBlock, widened};
use crate::ops::cpu::kernel::{avx512::prefetch, lanes::CacheLevel};

/// 64 products an instruction.
pub(super) struct Vnni;
/// Half the width, products by `D`.
pub(super) struct Avx2<D>(PhantomData<D>);
/// 32 products an instruction: AVX-VNNI.
pub(super) struct Dpbusd;
/// 32 products in two instructions or, of eight bits, four.
pub(super) struct Maddubs;

// SAFETY: uses AVX-512F, BW and VNNI, and the bytes named.
unsafe impl BlockLanes for Vnni {
    const OUTPUTS: usize = 16;
    const COLUMNS: usize = 2;
    const ROWS: usize = 4;
    type Floats = __m512;
    type Ints = __m512i;
    type Bytes = __m512i;

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8) -> __m512 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m512i {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }

    #[inline(always)]
    unsafe fn halves(bytes: __m512i) -> [__m512i; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let low = _mm512_set1_epi8(15);
            [_mm512_and_si512(bytes, low), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), low)]
        }
    }

    #[inline(always)]
    unsafe fn start<const BIAS: i32>(x: &RowBlock) -> __m512i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm512_set1_epi32(-BIAS * x.sum) }
    }

    #[inline(always)]
    unsafe fn dot<const BIAS: i32>(sum: __m512i, w: __m512i, x: *const i8) -> __m512i {
        // SAFETY: the caller vouches for four inputs and the instruction set.
        unsafe { _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn add_scaled(sum: __m512, ints: __m512i, w_scales: __m512, x_scale: f32) -> __m512 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let scale = _mm512_mul_ps(w_scales, _mm512_set1_ps(x_scale));
            _mm512_add_ps(sum, _mm512_mul_ps(_mm512_cvtepi32_ps(ints), scale))
        }
    }

    #[inline(always)]
    unsafe fn write(sum: __m512, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { _mm512_storeu_ps(out, sum) }
    }

    #[inline(always)]
    unsafe fn sum(quants: &[i8; BLOCK]) -> i32 {
        // SAFETY: reads the block; the caller vouches for the instruction set.
        unsafe {
            let quants = _mm256_loadu_si256(quants.as_ptr().cast());
            let eights = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), quants);
            let fours = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256::<1>(eights));
            let twos = _mm_add_epi32(fours, _mm_shuffle_epi32::<0b01_00_11_10>(fours));
            _mm_cvtsi128_si32(_mm_add_epi32(twos, _mm_shuffle_epi32::<0b10_11_00_01>(twos)))
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }
}

/// How AVX2 adds products of bytes, in registers of eight integers of 32 bits or sixteen of 16.
///
/// # Safety
/// As [`BlockLanes`].
pub(super) unsafe trait Dot {
    /// Rows from which weights of eight bits are multiplied as integers of 16.
    const WIDENED_ROWS: usize = usize::MAX;
    /// As [`BlockLanes::start`].
    unsafe fn start<const BIAS: i32>(x: &RowBlock) -> __m256i;
    /// As [`BlockLanes::dot`], the four inputs in all lanes.
    unsafe fn add<const BIAS: i32>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i;
    /// As [`BlockLanes::finish`].
    unsafe fn finish<const BIAS: i32>(sum: __m256i, x: &RowBlock) -> __m256i;
}

// SAFETY: uses AVX-VNNI.
unsafe impl Dot for Dpbusd {
    #[inline(always)]
    unsafe fn start<const BIAS: i32>(x: &RowBlock) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_set1_epi32(-BIAS * x.sum) }
    }

    #[inline(always)]
    unsafe fn add<const BIAS: i32>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_dpbusd_avx_epi32(sum, w, x) }
    }

    #[inline(always)]
    unsafe fn finish<const BIAS: i32>(sum: __m256i, _: &RowBlock) -> __m256i {
        sum
    }
}

// SAFETY: uses AVX2.
unsafe impl Dot for Maddubs {
    const WIDENED_ROWS: usize = widened::MANY_ROWS;

    #[inline(always)]
    unsafe fn start<const BIAS: i32>(_: &RowBlock) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_setzero_si256() }
    }

    #[inline(always)]
    unsafe fn add<const BIAS: i32>(sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            if fits_16_bits(BIAS) {
                return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
            }
            let signed = _mm256_sub_epi8(w, _mm256_set1_epi8(BIAS as i8));
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn finish<const BIAS: i32>(sum: __m256i, x: &RowBlock) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            if fits_16_bits(BIAS) {
                let biased = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
                return _mm256_sub_epi32(biased, _mm256_set1_epi32(BIAS * x.sum));
            }
            sum
        }
    }
}

/// Whether the pairs of a whole block, four inputs at a time, add up in 16 bits: weights are below twice their bias.
const fn fits_16_bits(bias: i32) -> bool {
    (BLOCK / 4) as i32 * 2 * (2 * bias - 1) * 127 <= i16::MAX as i32
}

// SAFETY: uses AVX2 and F16C, and the bytes named.
unsafe impl<D: Dot> BlockLanes for Avx2<D> {
    const OUTPUTS: usize = 8;
    const COLUMNS: usize = 2;
    const ROWS: usize = 4;
    type Floats = __m256;
    type Ints = __m256i;
    type Bytes = __m256i;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn scales(at: *const u8) -> __m256 {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }

    #[inline(always)]
    unsafe fn bytes(at: *const u8) -> __m256i {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { _mm256_loadu_si256(at.cast()) }
    }

    #[inline(always)]
    unsafe fn halves(bytes: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let low = _mm256_set1_epi8(15);
            [_mm256_and_si256(bytes, low), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low)]
        }
    }

    #[inline(always)]
    unsafe fn start<const BIAS: i32>(x: &RowBlock) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { D::start::<BIAS>(x) }
    }

    #[inline(always)]
    unsafe fn dot<const BIAS: i32>(sum: __m256i, w: __m256i, x: *const i8) -> __m256i {
        // SAFETY: the caller vouches for four inputs and the instruction set.
        unsafe { D::add::<BIAS>(sum, w, _mm256_set1_epi32(x.cast::<i32>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn finish<const BIAS: i32>(sum: __m256i, x: &RowBlock) -> __m256i {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { D::finish::<BIAS>(sum, x) }
    }

    #[inline(always)]
    unsafe fn add_scaled(sum: __m256, ints: __m256i, w_scales: __m256, x_scale: f32) -> __m256 {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let scale = _mm256_mul_ps(w_scales, _mm256_set1_ps(x_scale));
            _mm256_add_ps(sum, _mm256_mul_ps(_mm256_cvtepi32_ps(ints), scale))
        }
    }

    #[inline(always)]
    unsafe fn in_own_way(product: &PanelProduct<'_>) -> bool {
        let is_faster = product.w.quant() == Quant::Q8 && product.rows.len() >= D::WIDENED_ROWS;
        if is_faster {
            // SAFETY: the caller vouches for the product and the instruction set.
            unsafe { widened::product(product) };
        }
        is_faster
    }

    #[inline(always)]
    unsafe fn write(sum: __m256, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { _mm256_storeu_ps(out, sum) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        prefetch(at, level);
    }
}
