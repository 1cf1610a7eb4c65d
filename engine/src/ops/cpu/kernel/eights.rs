//! Lanes of sets with registers of 8 numbers, or with pairs of registers of 4 that are taken for one: AVX2 and NEON.
//!
//! Several rows meet weights in panels ([`super::panel`]), because 16 registers hold fewer sums than the tiles of
//! [`super::product`] have.
//!
//! Rows of keys are too short for either: folding would take longer than summing. A KV block is turned around instead, so that its 16
//! tokens lie in the lanes of two registers, and a query meets it number by number:
//!
//! ```text
//! turned block:   k0[n] k1[n] ... k15[n]      for each number n of a packed row
//! scores:       + q[n] * that                 6 queries x 16 tokens, 12 registers, nothing to fold
//! ```

use std::marker::PhantomData;

use half::{bf16, f16};

use super::{
    Line, Rows, WeightRows,
    lanes::{CacheLevel, Lanes, Tiles, Wide},
    panel,
    portable::Stored,
    product::{Product, Target, split_evenly, w_rest},
};
use crate::kv::BLOCK_TOKENS;

/// Numbers of a register.
pub(super) const LANES: usize = 8;
/// Bytes of a register.
pub(super) const EIGHT_BYTES: usize = LANES * size_of::<f32>();
/// Queries that meet keys or values together: 12 registers for their sums.
const SCORED_ROWS: usize = 6;

/// Eight numbers of f32.
///
/// # Safety
/// As [`Lanes`].
pub(super) unsafe trait Eight: Copy {
    /// One number in all lanes.
    unsafe fn splat(x: f32) -> Self;
    /// Reads 32 bytes.
    unsafe fn read(at: *const u8) -> Self;
    /// Writes 32 bytes.
    unsafe fn write(self, at: *mut u8);
    /// `self + x * w`, rounded once.
    unsafe fn add_product(self, x: Self, w: Self) -> Self;
    /// The sum of the lanes of each, always in the same order.
    unsafe fn fold4(sums: [Self; 4]) -> [f32; 4];
    /// Eight numbers of bf16.
    unsafe fn of_bf16(at: *const u8) -> Self;
    /// Eight numbers of f16.
    unsafe fn of_f16(at: *const u8) -> Self;
    /// Lane `i` of register `j` to lane `j` of register `i`.
    unsafe fn turn(rows: [Self; LANES]) -> [Self; LANES];
    /// As [`Lanes::prefetch`].
    unsafe fn prefetch(at: *const u8, level: CacheLevel);
}

/// Stored numbers that eight lanes widen.
///
/// # Safety
/// As [`Lanes`].
pub(super) unsafe trait WideEight: Stored {
    /// Reads and widens eight.
    unsafe fn load<V: Eight>(w: *const u8) -> V;
}

macro_rules! widen {
    ($number:ty, $load:path) => {
        // SAFETY: reads eight numbers.
        unsafe impl WideEight for $number {
            #[inline(always)]
            unsafe fn load<V: Eight>(w: *const u8) -> V {
                // SAFETY: the caller vouches for the bytes and the instruction set.
                unsafe { $load(w) }
            }
        }
    };
}

widen!(f32, V::read);
widen!(bf16, V::of_bf16);
widen!(f16, V::of_f16);

/// f32 activations, weights widened from `T`, in registers `V`.
pub(super) struct Eights<V, T>(PhantomData<(V, T)>);

// SAFETY: uses the set of `V`, and reads and writes eight numbers a step.
unsafe impl<V: Eight, T: WideEight> Lanes for Eights<V, T> {
    const STEP: usize = LANES;
    const X_BYTES: usize = EIGHT_BYTES;
    const W_BYTES: usize = LANES * T::BYTES;
    const TILES: Tiles = Tiles::Panel;
    type Acc = V;
    type X = V;
    type Wide = Self;

    #[inline(always)]
    unsafe fn zero() -> V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::splat(0.0) }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> V {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { V::read(x) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> V {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { T::load(w) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::prefetch(at, level) }
    }

    #[inline(always)]
    unsafe fn add(acc: V, x: V, w: V) -> V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { acc.add_product(x, w) }
    }

    #[inline(always)]
    unsafe fn product(product: &Product<'_>) {
        // SAFETY: the caller vouches for the product and the instruction set.
        unsafe { panel::product::<V, T>(product) }
    }

    #[inline(always)]
    unsafe fn scores(x: Rows<'_>, w: WeightRows<'_>, y: &Target<'_>, turned: &mut Vec<Line>) {
        let n_numbers = x.stride / size_of::<f32>();
        turned.resize(n_numbers, Line([0; 64]));
        // SAFETY: the caller vouches for 16 rows as long as a packed one, for their places and for the instruction set.
        unsafe {
            turn_block::<V, T>(w, turned);
            // Even tiles: one of a query or two would wait for its sums.
            let at_once = split_evenly(x.n_rows, SCORED_ROWS);
            for row in (0..x.n_rows).step_by(at_once) {
                match at_once.min(x.n_rows - row) {
                    1 => score::<V, 1>(x, row, turned, y),
                    2 => score::<V, 2>(x, row, turned, y),
                    3 => score::<V, 3>(x, row, turned, y),
                    4 => score::<V, 4>(x, row, turned, y),
                    5 => score::<V, 5>(x, row, turned, y),
                    _ => score::<V, SCORED_ROWS>(x, row, turned, y),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [V; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::fold4(acc) }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        super::pack_f32(row, packed);
    }
}

// SAFETY: uses the set of `V`, and writes eight numbers.
unsafe impl<V: Eight, T: WideEight> Wide for Eights<V, T> {
    const COLUMNS: usize = 2;
    const ROWS: usize = SCORED_ROWS;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::splat(x) }
    }

    #[inline(always)]
    unsafe fn write(acc: V, out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { acc.write(out.cast()) }
    }

    #[inline(always)]
    fn widen(row: &[u8], idx: usize) -> f32 {
        T::widened(&row[idx * T::BYTES..])
    }
}

/// For each number of a packed row a line with that number of all 16 rows.
///
/// # Safety
/// `w` has 16 rows, and `turned` a line for each of their numbers. The CPU has the set of `V`.
#[inline(always)]
unsafe fn turn_block<V: Eight, T: WideEight>(w: WeightRows<'_>, turned: &mut [Line]) {
    let step_bytes = LANES * T::BYTES;
    let (n_steps, rest) = (w.row_bytes / step_bytes, w.row_bytes % step_bytes);
    // SAFETY: whole steps and the rest are inside each row, and each number has its line.
    unsafe {
        for half in 0..BLOCK_TOKENS / LANES {
            let first = w.bytes.as_ptr().add(half * LANES * w.row_bytes);
            for step in 0..w.row_bytes.div_ceil(step_bytes) {
                let mut rows = [V::splat(0.0); LANES];
                for (token, row) in rows.iter_mut().enumerate() {
                    let at = first.add(token * w.row_bytes + step * step_bytes);
                    *row = if step < n_steps { T::load(at) } else { w_rest::<Eights<V, T>>(at, rest) };
                }
                let lines = turned.as_mut_ptr().add(step * LANES).cast::<u8>();
                for (number, tokens) in V::turn(rows).into_iter().enumerate() {
                    tokens.write(lines.add(number * size_of::<Line>() + half * EIGHT_BYTES));
                }
            }
        }
    }
}

/// Products of `R` rows from `row` with 16 rows turned around.
///
/// # Safety
/// The rows are in `x`, `turned` has a line for each of their numbers, and `y` a place for 16 products of each. The CPU has the set of `V`.
#[inline(always)]
unsafe fn score<V: Eight, const R: usize>(x: Rows<'_>, row: usize, turned: &[Line], y: &Target<'_>) {
    // SAFETY: as the caller vouches; `at` looks whether the place is there.
    unsafe {
        let x_at = x.bytes.as_ptr().add(row * x.stride).cast::<f32>();
        let stride = x.stride / size_of::<f32>();
        let mut acc = [[V::splat(0.0); 2]; R];
        for (number, line) in turned.iter().enumerate() {
            let at = line.0.as_ptr();
            let tokens = [V::read(at), V::read(at.add(EIGHT_BYTES))];
            for (r, sums) in acc.iter_mut().enumerate() {
                let x = V::splat(x_at.add(r * stride + number).read());
                *sums = [sums[0].add_product(x, tokens[0]), sums[1].add_product(x, tokens[1])];
            }
        }
        for (r, [one, other]) in acc.into_iter().enumerate() {
            let out = y.at(row + r, 0, BLOCK_TOKENS).cast::<u8>();
            one.write(out);
            other.write(out.add(EIGHT_BYTES));
        }
    }
}
