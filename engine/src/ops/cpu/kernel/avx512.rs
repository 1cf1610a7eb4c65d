//! Lanes of AVX-512, with and without its bf16 dot product. Which of them a CPU has is `Isa`'s business.
//!
//! Weights are read as they lie in the file and widened in registers, which is exact. Only the bf16 dot product takes
//! activations in bf16 too: it does twice the work of f32 per instruction, which prefill needs, and decode must use the
//! same arithmetic to give the same bits.

use std::{arch::x86_64::*, marker::PhantomData};

use half::{bf16, f16};

use super::{
    Line, amx,
    lanes::{CacheLevel, Lanes, Tiles, Wide},
    portable::Stored,
    product::{Product, in_place},
};

/// Sixteen stored numbers to f32.
///
/// # Safety
/// The CPU has AVX-512F, and `w` may be read for sixteen numbers.
pub(super) unsafe trait Wide512: Stored {
    /// Reads and widens.
    unsafe fn load(w: *const u8) -> __m512;
}

/// bf16 weights and activations, 32 products an instruction. `TILES`: products of matrices go to the tile unit of AMX.
pub(super) struct Bf16Dot<const TILES: bool>;
/// f32 activations, weights widened from `T`.
pub(super) struct Avx512<T>(PhantomData<T>);

macro_rules! widen {
    ($number:ty, |$w:ident| $load:expr) => {
        // SAFETY: reads exactly one register of numbers, with AVX-512F.
        unsafe impl Wide512 for $number {
            #[inline(always)]
            unsafe fn load($w: *const u8) -> __m512 {
                // SAFETY: the caller vouches for the bytes and the instruction set.
                unsafe { $load }
            }
        }
    };
}

widen!(f32, |w| _mm512_loadu_ps(w.cast()));
widen!(bf16, |w| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(w.cast())))));
widen!(f16, |w| _mm512_cvtph_ps(_mm256_loadu_si256(w.cast())));

// SAFETY: uses AVX-512F, BW and BF16, and AMX with `TILES`, and reads 64 bytes a step.
unsafe impl<const TILES: bool> Lanes for Bf16Dot<TILES> {
    const STEP: usize = 32;
    const X_BYTES: usize = 64;
    const W_BYTES: usize = 64;
    const TILES: Tiles = if TILES { Tiles::Unit } else { Tiles::InPlace };
    type Acc = __m512;
    type X = __m512bh;
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
    unsafe fn product(product: &Product<'_>) {
        // SAFETY: the caller vouches for the product and the instruction set.
        unsafe { if TILES { amx::product_here(product) } else { in_place::<Self>(product) } }
    }

    #[inline(always)]
    fn pack_rows(rows: &[f32], width: usize, lines: &mut [Line]) {
        if TILES { amx::pack_here(rows, width, lines) } else { super::pack::<Self>(rows, width, lines) }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [__m512; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { fold4_512(acc) }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_bf16(row, packed);
    }
}

// SAFETY: uses AVX-512F, and reads sixteen numbers a step.
unsafe impl<T: Wide512> Lanes for Avx512<T> {
    const STEP: usize = 16;
    const X_BYTES: usize = 64;
    const W_BYTES: usize = 16 * T::BYTES;
    type Acc = __m512;
    type X = __m512;
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

// SAFETY: uses AVX-512F, and writes one register.
unsafe impl<T: Wide512> Wide for Avx512<T> {
    const COLUMNS: usize = 4;
    const ROWS: usize = 4;

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

/// Asks for the cache line at `at`, which need not exist.
#[inline(always)]
pub(super) fn prefetch(at: *const u8, level: CacheLevel) {
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

/// Turns a tile of 4-byte numbers around: of `n_rows` rows, 16 numbers of each of which may be read, the first `n_columns` columns become rows.
/// Places are where the first row begins and the bytes from it to the next.
///
/// # Safety
/// The rows are there, at most 16 of both. The CPU has AVX-512F.
#[inline(always)]
pub(super) unsafe fn turn16(from: (*const u8, usize), n_rows: usize, to: (*mut u8, usize), n_columns: usize) {
    // SAFETY: as the caller vouches; columns of rows that are not there are not written.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (idx, row) in rows.iter_mut().enumerate().take(n_rows) {
            *row = _mm512_loadu_si512(from.0.add(idx * from.1).cast());
        }
        let written = if n_rows < 16 { (1 << n_rows) - 1 } else { u16::MAX };
        for (idx, column) in turned(rows).into_iter().enumerate().take(n_columns) {
            _mm512_mask_storeu_epi32(to.0.add(idx * to.1).cast(), written, column);
        }
    }
}

/// 16 x 16 numbers of 4 bytes, rows to columns.
///
/// # Safety
/// The CPU has AVX-512F.
#[inline(always)]
unsafe fn turned(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut turned = rows;
    // SAFETY: the caller vouches for the instruction set.
    unsafe {
        for i in 0..8 {
            let (a, b) = (rows[2 * i], rows[2 * i + 1]);
            turned[2 * i] = _mm512_unpacklo_epi32(a, b);
            turned[2 * i + 1] = _mm512_unpackhi_epi32(a, b);
        }
        let twos = turned;
        for i in 0..4 {
            let [a, b, c, d] = [twos[4 * i], twos[4 * i + 1], twos[4 * i + 2], twos[4 * i + 3]];
            turned[4 * i] = _mm512_unpacklo_epi64(a, c);
            turned[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            turned[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            turned[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // Quarter `q` of `fours[4 * i + c]` has column `4 * q + c` of rows `4 * i` to `4 * i + 3`.
        let fours = turned;
        for c in 0..4 {
            let [a, b, c4, d] = [fours[c], fours[4 + c], fours[8 + c], fours[12 + c]];
            let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xDD>(a, b));
            let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c4, d), _mm512_shuffle_i32x4::<0xDD>(c4, d));
            turned[c] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
            turned[8 + c] = _mm512_shuffle_i32x4::<0xDD>(ab_even, cd_even);
            turned[4 + c] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
            turned[12 + c] = _mm512_shuffle_i32x4::<0xDD>(ab_odd, cd_odd);
        }
    }
    turned
}
