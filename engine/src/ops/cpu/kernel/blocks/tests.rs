//! Products of blocks on every instruction set this CPU has, against a plain reading of the rule, with results poisoned
//! before.

use std::{borrow::Cow, ops::Range};

use half::f16;

use super::*;
use crate::{ops::cpu::kernel::product::Target, pool::Pool};

/// Below, at and above a panel; one block to many.
const SHAPES: [[usize; 2]; 7] = [[1, 32], [8, 64], [31, 96], [32, 32], [33, 320], [70, 1120], [129, 4864]];
const QUANTS: [Quant; 2] = [Quant::Q8, Quant::Q4];
const POISON: f32 = f32::NAN;

/// Numbers without a pattern, in -1..1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let draw = stoker_kernels::draw::Draw::new(seed, 0);
    (0..n as u32).map(|i| 2.0 * draw.uniform(i) - 1.0).collect()
}

/// Blocks as a file has them: any bytes, and scales of the size of weights' ones.
fn stored(quant: Quant, [n_outputs, n_inputs]: [usize; 2]) -> Vec<u8> {
    let draw = stoker_kernels::draw::Draw::new(7, 1);
    let n_blocks = n_outputs * n_inputs / BLOCK;
    let block = |block: usize| {
        let first = (block * quant.stored_bytes()) as u32;
        let bytes = (2..quant.stored_bytes() as u32).map(move |at| (draw.uniform(first + at) * 256.0) as u8);
        f16::from_f32(draw.uniform(first) / 64.0 - 0.005).to_le_bytes().into_iter().chain(bytes)
    };
    (0..n_blocks).flat_map(block).collect()
}

/// The scale and integers of each block of a row, by the format's definition.
fn read_blocks(quant: Quant, row: &[u8]) -> Vec<(f32, [i32; BLOCK])> {
    let read = |block: &[u8]| {
        let quants = std::array::from_fn(|i| match quant {
            Quant::Q8 => i32::from(block[2 + i] as i8),
            Quant::Q4 if i < 16 => i32::from(block[2 + i] & 15) - 8,
            Quant::Q4 => i32::from(block[2 + i - 16] >> 4) - 8,
        });
        (f16::from_le_bytes([block[0], block[1]]).to_f32(), quants)
    };
    row.chunks(quant.stored_bytes()).map(read).collect()
}

/// The same of a row of numbers, by the rule: a scale of a 127th of the largest, the nearest integers.
fn quantise_row(row: &[f32]) -> Vec<(f32, [i32; BLOCK])> {
    let quantise = |block: &[f32]| {
        let largest = block.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let inverse = if largest == 0.0 { 0.0 } else { 127.0 / largest };
        (largest / 127.0, std::array::from_fn(|i| (block[i] * inverse).round_ties_even() as i32))
    };
    row.chunks(BLOCK).map(quantise).collect()
}

struct Case {
    isa: Isa,
    quant: Quant,
    shape: [usize; 2],
    stored: Vec<u8>,
}

impl Case {
    fn all() -> Vec<Self> {
        let kinds = Isa::available().into_iter().flat_map(|isa| QUANTS.map(|quant| (isa, quant)));
        let new = |((isa, quant), shape)| Self { isa, quant, shape, stored: stored(quant, shape) };
        kinds.flat_map(|kind| SHAPES.map(|shape| (kind, shape))).map(new).collect()
    }

    fn row(&self, output: usize) -> &[u8] {
        let row_bytes = self.shape[1] / BLOCK * self.quant.stored_bytes();
        &self.stored[output * row_bytes..][..row_bytes]
    }

    fn panels(&self) -> Panels {
        let rows = |outputs: Range<usize>| outputs.map(|output| Cow::Borrowed(self.row(output))).collect();
        Panels::new(&mut Pool::new(2).unwrap(), self.quant, self.shape, rows)
    }

    /// The product, computed in two calls that each write their outputs and nothing else.
    fn multiply(&self, x: &[f32]) -> Vec<f32> {
        let [n_outputs, n_inputs] = self.shape;
        let x = BlockRows::new(&mut Pool::new(2).unwrap(), self.isa, x, n_inputs);
        let mut y = vec![POISON; x.n_rows() * n_outputs];
        let target = Target::new(&mut y, n_outputs);
        let (w, middle) = (self.panels(), n_outputs / 2 / PANEL_OUTPUTS * PANEL_OUTPUTS);
        for outputs in [0..middle, middle..n_outputs] {
            PanelProduct { x: &x, rows: 0..x.n_rows(), w: &w, outputs, y: &target }.run(self.isa);
        }
        y
    }

    fn naive(&self, x: &[f32], output: usize) -> f32 {
        let blocks = quantise_row(x).into_iter().zip(read_blocks(self.quant, self.row(output)));
        blocks.fold(0.0, |sum, ((x_scale, x), (w_scale, w))| {
            let ints: i32 = x.iter().zip(w).map(|(x, w)| x * w).sum();
            sum + ints as f32 * (w_scale * x_scale)
        })
    }

    fn name(&self) -> String {
        format!("{:?} {:?} {:?}", self.isa, self.quant, self.shape)
    }
}

#[test]
fn the_product_is_the_rules_bit_by_bit_on_every_instruction_set() {
    for case in Case::all() {
        let [n_outputs, n_inputs] = case.shape;
        let x = noise(5 * n_inputs, 1);
        let y = case.multiply(&x);
        for (i, y) in y.into_iter().enumerate() {
            let expected = case.naive(&x[i / n_outputs * n_inputs..][..n_inputs], i % n_outputs);
            assert_eq!(y.to_bits(), expected.to_bits(), "{}: {y} is not {expected}", case.name());
        }
    }
}

#[test]
fn the_product_is_as_near_that_of_the_weights_as_quantised_rows_allow() {
    for case in Case::all() {
        let [n_outputs, n_inputs] = case.shape;
        let x = noise(2 * n_inputs, 2);
        let (y, panels, mut w) = (case.multiply(&x), case.panels(), vec![POISON; n_inputs]);
        for (i, y) in y.into_iter().enumerate() {
            let x = &x[i / n_outputs * n_inputs..][..n_inputs];
            panels.read_row(i % n_outputs, &mut w);
            let exact: f64 = x.iter().zip(&w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let off = |(x, w): (&[f32], &[f32])| {
                let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                f64::from(largest) / 254.0 * w.iter().map(|w| f64::from(w.abs())).sum::<f64>()
            };
            // Half a scale for each input, and a thousandth of that for sums in f32.
            let bound = 1.001 * x.chunks(BLOCK).zip(w.chunks(BLOCK)).map(off).sum::<f64>();
            assert!((f64::from(y) - exact).abs() <= bound, "{}: {y} is not {exact}", case.name());
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    for case in Case::all() {
        let [n_outputs, n_inputs] = case.shape;
        let x = noise(130 * n_inputs, 4);
        let all = case.multiply(&x);
        for n_rows in [1, 2, 3, 4, 5, 6, 7, 8, 31, 47, 48, 49, 50, 51, 52, 53, 129] {
            let some = case.multiply(&x[..n_rows * n_inputs]);
            assert_eq!(some, all[..some.len()], "{n_rows} rows of {}", case.name());
        }
        let last = case.multiply(&x[129 * n_inputs..]);
        assert_eq!(last, all[129 * n_outputs..], "the last row of {} alone", case.name());
    }
}

#[test]
fn panels_have_the_weights_of_the_file() {
    for case in Case::all() {
        let (panels, mut out) = (case.panels(), vec![POISON; case.shape[1]]);
        for output in 0..case.shape[0] {
            panels.read_row(output, &mut out);
            let blocks = read_blocks(case.quant, case.row(output));
            let expected = blocks.into_iter().flat_map(|(scale, quants)| quants.map(|q| scale * q as f32));
            assert!(expected.eq(out.iter().copied()), "output {output} of {}", case.name());
        }
    }
}

#[test]
fn the_extremes_of_weights_and_rows_meet_without_overflow() {
    for (isa, quant) in Isa::available().into_iter().flat_map(|isa| QUANTS.map(|quant| (isa, quant))) {
        for byte in [0x80, 0x7F, 0x00, 0xFF, 0x88] {
            let block = [&f16::ONE.to_le_bytes()[..], &vec![byte; quant.stored_bytes() - 2]].concat();
            let case = Case { isa, quant, shape: [3, 64], stored: block.repeat(6) };
            for (x, n_rows) in [1.0, -1.0].into_iter().flat_map(|x| [(vec![x; 64], 1), (vec![x; 64], 48)]) {
                let expected = [0, 1, 2].map(|output| case.naive(&x, output)).repeat(n_rows);
                assert_eq!(case.multiply(&x.repeat(n_rows)), expected, "{n_rows} rows of {}", case.name());
            }
        }
    }
}

#[test]
fn rows_of_zeros_give_zero_and_what_is_not_finite_stays_so() {
    for (isa, quant) in Isa::available().into_iter().flat_map(|isa| QUANTS.map(|quant| (isa, quant))) {
        let case = Case { isa, quant, shape: [8, 64], stored: stored(quant, [8, 64]) };
        assert_eq!(case.multiply(&[0.0; 64]), [0.0; 8], "{}", case.name());
        assert!(case.multiply(&[f32::MIN_POSITIVE / 8.0; 64]).iter().all(|y| y.abs() < 1e-37), "{}", case.name());
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = noise(64, 3);
            x[40] = broken;
            assert!(case.multiply(&x).iter().all(|y| !y.is_finite()), "{broken} {}", case.name());
        }
    }
}
