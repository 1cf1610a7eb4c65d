//! Lanes of sets with registers of 8 numbers, or with pairs of registers of 4 that are taken for one: AVX2 and NEON.
//!
//! A step is 16 inputs in two chains of 8 lanes, so that one row alone waits half as long for its sums. bf16 comes apart into
//! even and odd inputs, for a shift and a mask; its rows are packed so:
//!
//! ```text
//! weights in the file:  w0 w1 w2 ... w15      16 x bf16, one register
//! first chain:          w0 w2 w4 ... w14      << 16
//! second chain:         w1 w3 w5 ... w15      & 0xFFFF0000
//! ```
//! Several rows meet weights in a panel, one chain after the other, since the sums of both do not fit 16 registers: 3 rows x
//! 4 outputs take 12 for sums, 3 for rows and 1 for weights, and 7 loads feed 12 FMAs. With panel and rows in the first-level cache that
//! is the peak of the FMA units; runs of 1,024 inputs (16 KB of panel, 12 KB of rows) keep them there on every chip that has AVX2.
//!
//! Rows of keys are too short for that: folding would take longer than summing. A KV block is turned around instead, so that its 16
//! tokens lie in the lanes of two registers, and a query meets it number by number:
//!
//! ```text
//! turned block:   k0[n] k1[n] ... k15[n]      for each number n of a packed row
//! scores:       + q[n] * that                 6 queries x 16 tokens, 12 registers, nothing to fold
//! ```

use std::{array, marker::PhantomData};

use half::{bf16, f16};

use super::{
    Line, PackedRows, WeightRows,
    lanes::{CacheLevel, Lanes, Strided, Tiles, Wide},
    portable::Stored,
    product::{Target, w_rest},
};
use crate::kv::BLOCK_TOKENS;

/// Inputs of a chain in a step.
pub(super) const CHAIN: usize = 8;
const CHAIN_BYTES: usize = CHAIN * size_of::<f32>();
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
    /// Adds both chains of four sums and folds their lanes: `i + 4` onto `i`, then 2, then 1.
    unsafe fn fold4(chains: [[Self; 2]; 4]) -> [f32; 4];
    /// The even and the odd ones of sixteen numbers of bf16.
    unsafe fn of_bf16(at: *const u8) -> [Self; 2];
    /// Sixteen numbers of f16.
    unsafe fn of_f16(at: *const u8) -> [Self; 2];
    /// Lane `i` of register `j` to lane `j` of register `i`.
    unsafe fn turn(rows: [Self; CHAIN]) -> [Self; CHAIN];
    /// Even and odd numbers in the order in which they were.
    unsafe fn interleave(even_odd: [Self; 2]) -> [Self; 2];
    /// As [`Lanes::prefetch`].
    unsafe fn prefetch(at: *const u8, level: CacheLevel);
}

/// Stored numbers, sixteen of which make a step of both chains.
///
/// # Safety
/// As [`Lanes`].
pub(super) unsafe trait Chained: Stored {
    /// Reads and widens sixteen numbers.
    unsafe fn load<V: Eight>(w: *const u8) -> [V; 2];
    /// The sums of both chains in the order of their inputs.
    unsafe fn in_order<V: Eight>(sums: [V; 2]) -> [V; 2];
    /// Sixteen numbers in the order in which chains take them.
    fn order(numbers: [f32; 2 * CHAIN]) -> [f32; 2 * CHAIN];
}

/// f32 activations, weights widened from `T`, in registers `V`.
pub(super) struct Chains<V, T>(PhantomData<(V, T)>);

macro_rules! chained_in_order {
    ($number:ty, $load:expr) => {
        // SAFETY: reads sixteen numbers.
        unsafe impl Chained for $number {
            #[inline(always)]
            unsafe fn load<V: Eight>(w: *const u8) -> [V; 2] {
                // SAFETY: the caller vouches for the bytes and the instruction set.
                unsafe { $load(w) }
            }

            #[inline(always)]
            unsafe fn in_order<V: Eight>(sums: [V; 2]) -> [V; 2] {
                sums
            }

            #[inline(always)]
            fn order(numbers: [f32; 2 * CHAIN]) -> [f32; 2 * CHAIN] {
                numbers
            }
        }
    };
}

chained_in_order!(f32, read_both);
chained_in_order!(f16, V::of_f16);

// SAFETY: reads sixteen numbers.
unsafe impl Chained for bf16 {
    #[inline(always)]
    unsafe fn load<V: Eight>(w: *const u8) -> [V; 2] {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { V::of_bf16(w) }
    }

    #[inline(always)]
    unsafe fn in_order<V: Eight>(sums: [V; 2]) -> [V; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::interleave(sums) }
    }

    #[inline(always)]
    fn order(numbers: [f32; 2 * CHAIN]) -> [f32; 2 * CHAIN] {
        array::from_fn(|lane| numbers[lane % CHAIN * 2 + lane / CHAIN])
    }
}

// SAFETY: uses the set of `V`, and reads and writes sixteen numbers a step.
unsafe impl<V: Eight, T: Chained> Lanes for Chains<V, T> {
    const STEP: usize = 2 * CHAIN;
    const X_BYTES: usize = 2 * CHAIN_BYTES;
    const W_BYTES: usize = 2 * CHAIN * T::BYTES;
    const RUN: usize = 1024;
    const TILES: Tiles = Tiles::Panel;
    type Acc = [V; 2];
    type X = [V; 2];
    type Wide = Self;

    #[inline(always)]
    unsafe fn zero() -> [V; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { [V::splat(0.0); 2] }
    }

    #[inline(always)]
    unsafe fn x(x: *const u8) -> [V; 2] {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { read_both(x) }
    }

    #[inline(always)]
    unsafe fn w(w: *const u8) -> [V; 2] {
        // SAFETY: the caller vouches for the bytes and the instruction set.
        unsafe { T::load(w) }
    }

    #[inline(always)]
    unsafe fn put(x: [V; 2], at: *mut u8) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe {
            x[0].write(at);
            x[1].write(at.add(CHAIN_BYTES));
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8, level: CacheLevel) {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::prefetch(at, level) }
    }

    #[inline(always)]
    unsafe fn add(acc: [V; 2], x: [V; 2], w: [V; 2]) -> [V; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { [acc[0].add_product(x[0], w[0]), acc[1].add_product(x[1], w[1])] }
    }

    #[inline(always)]
    unsafe fn sums<const R: usize, const C: usize>(x: Strided, w: Strided, n_steps: usize) -> [[[V; 2]; C]; R] {
        // No closures: they need not be compiled for the instruction set.
        // SAFETY: the caller vouches for the rows and the instruction set.
        unsafe {
            let first = chain::<V, R, C>(x, w, n_steps);
            let second = chain::<V, R, C>(x.from(CHAIN_BYTES), w.from(CHAIN_BYTES), n_steps);
            let mut sums = [[[V::splat(0.0); 2]; C]; R];
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sums) in sums.iter_mut().enumerate() {
                    *sums = [first[c][r], second[c][r]];
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn scores(x: &PackedRows, w: WeightRows<'_>, y: &Target<'_>, turned: &mut Vec<Line>) {
        let n_numbers = x.stride / size_of::<f32>();
        turned.resize(n_numbers, Line([0; 64]));
        // SAFETY: the caller vouches for 16 rows as long as a packed one, for their places and for the instruction set.
        unsafe {
            turn_block::<V, T>(w, turned);
            let mut row = 0;
            while row + SCORED_ROWS <= x.n_rows {
                score::<V, SCORED_ROWS>(x, row, turned, y);
                row += SCORED_ROWS;
            }
            match x.n_rows - row {
                5 => score::<V, 5>(x, row, turned, y),
                4 => score::<V, 4>(x, row, turned, y),
                3 => score::<V, 3>(x, row, turned, y),
                2 => score::<V, 2>(x, row, turned, y),
                1 => score::<V, 1>(x, row, turned, y),
                _ => {}
            }
        }
    }

    #[inline(always)]
    unsafe fn fold4(acc: [[V; 2]; 4]) -> [f32; 4] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { V::fold4(acc) }
    }

    #[inline(always)]
    fn pack(row: &[f32], packed: &mut [u8]) {
        let (whole, rest) = row.as_chunks::<{ 2 * CHAIN }>();
        let mut last = [0.0; 2 * CHAIN];
        last[..rest.len()].copy_from_slice(rest);
        let steps = whole.iter().chain((!rest.is_empty()).then_some(&last));
        for (numbers, packed) in steps.zip(packed.as_chunks_mut::<{ 2 * CHAIN_BYTES }>().0) {
            *packed = bytemuck::cast(T::order(*numbers));
        }
    }
}

// SAFETY: uses the set of `V`, and writes sixteen numbers.
unsafe impl<V: Eight, T: Chained> Wide for Chains<V, T> {
    const COLUMNS: usize = 1;
    const ROWS: usize = SCORED_ROWS;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [V; 2] {
        // SAFETY: the caller vouches for the instruction set.
        unsafe { [V::splat(x); 2] }
    }

    #[inline(always)]
    unsafe fn write(acc: [V; 2], out: *mut f32) {
        // SAFETY: the caller vouches for the place and the instruction set.
        unsafe { Self::put(T::in_order(acc), out.cast()) }
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
unsafe fn turn_block<V: Eight, T: Chained>(w: WeightRows<'_>, turned: &mut [Line]) {
    let step_bytes = 2 * CHAIN * T::BYTES;
    let (n_steps, rest) = (w.row_bytes / step_bytes, w.row_bytes % step_bytes);
    // SAFETY: whole steps and the rest are inside each row, and each number has its line.
    unsafe {
        for half in 0..BLOCK_TOKENS / CHAIN {
            let first = w.bytes.as_ptr().add(half * CHAIN * w.row_bytes);
            for step in 0..w.row_bytes.div_ceil(step_bytes) {
                let (mut first_chain, mut second_chain) = ([V::splat(0.0); CHAIN], [V::splat(0.0); CHAIN]);
                for (token, (one, other)) in first_chain.iter_mut().zip(&mut second_chain).enumerate() {
                    let at = first.add(token * w.row_bytes + step * step_bytes);
                    [*one, *other] = if step < n_steps { T::load(at) } else { w_rest::<Chains<V, T>>(at, rest) };
                }
                for (chain, rows) in [first_chain, second_chain].into_iter().enumerate() {
                    let lines = turned.as_mut_ptr().add((2 * step + chain) * CHAIN).cast::<u8>();
                    for (number, tokens) in V::turn(rows).into_iter().enumerate() {
                        tokens.write(lines.add(number * size_of::<Line>() + half * CHAIN_BYTES));
                    }
                }
            }
        }
    }
}

/// Products of `R` packed rows from `row` with 16 rows turned around.
///
/// # Safety
/// The rows are in `x`, `turned` has a line for each of their numbers, and `y` a place for 16 products of each. The CPU has the set of `V`.
#[inline(always)]
unsafe fn score<V: Eight, const R: usize>(x: &PackedRows, row: usize, turned: &[Line], y: &Target<'_>) {
    // SAFETY: as the caller vouches; `at` looks whether the place is there.
    unsafe {
        let x_at = x.bytes().as_ptr().add(row * x.stride).cast::<f32>();
        let stride = x.stride / size_of::<f32>();
        let mut acc = [[V::splat(0.0); 2]; R];
        for (number, line) in turned.iter().enumerate() {
            let tokens: [V; 2] = read_both(line.0.as_ptr());
            for (r, sums) in acc.iter_mut().enumerate() {
                let x = V::splat(x_at.add(r * stride + number).read());
                *sums = [sums[0].add_product(x, tokens[0]), sums[1].add_product(x, tokens[1])];
            }
        }
        for (r, [one, other]) in acc.into_iter().enumerate() {
            let out = y.at(row + r, 0, BLOCK_TOKENS).cast::<u8>();
            one.write(out);
            other.write(out.add(CHAIN_BYTES));
        }
    }
}

/// Sixteen numbers of f32.
///
/// # Safety
/// As [`Lanes::x`].
#[inline(always)]
unsafe fn read_both<V: Eight>(at: *const u8) -> [V; 2] {
    // SAFETY: as the caller vouches.
    unsafe { [V::read(at), V::read(at.add(CHAIN_BYTES))] }
}

/// The sums of one chain of `R` packed rows with `C` rows of a panel.
///
/// # Safety
/// As [`Lanes::sums`].
#[inline(always)]
unsafe fn chain<V: Eight, const R: usize, const C: usize>(x: Strided, w: Strided, n_steps: usize) -> [[V; R]; C] {
    // SAFETY: as the caller vouches.
    unsafe {
        let mut acc = [[V::splat(0.0); R]; C];
        for step in 0..n_steps {
            let at = step * 2 * CHAIN_BYTES;
            let mut xs = [V::read(x.at.add(at)); R];
            for (r, x_step) in xs.iter_mut().enumerate().skip(1) {
                *x_step = V::read(x.at.add(r * x.stride + at));
            }
            for (c, sums) in acc.iter_mut().enumerate() {
                let w = V::read(w.at.add(c * w.stride + at));
                for (sum, x) in sums.iter_mut().zip(xs) {
                    *sum = sum.add_product(x, w);
                }
            }
        }
        acc
    }
}
