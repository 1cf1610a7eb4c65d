//! Products by tiles in plain Rust on every CPU, against sums in f64 and against themselves in other company; and the unit of a CPU that has one,
//! to the bit of them.

use half::bf16;

use super::{unit::Model, *};
use crate::ops::cpu::kernel::stride as row_stride;

/// Outputs and inputs: odd and even, below and above a step, a tile, a block, a run.
const SHAPES: [(usize, usize); 8] =
    [(2, 8), (16, 64), (7, 31), (33, 320), (48, 1100), (64, 512), (70, 545), (32, 2080)];
const N_ROWS: [usize; 9] = [1, 2, 15, 16, 17, 31, 32, 33, 70];
const POISON: f32 = f32::NAN;

/// Numbers with all bits in use: sums of these depend on their order.
fn rough(n: usize, seed: u64) -> Vec<f32> {
    let draw = stoker_kernels::draw::Draw::new(seed, 0);
    (0..n as u32).map(|i| draw.uniform(i) * 2.0 - 1.0).collect()
}

struct Case {
    n_outputs: usize,
    n_inputs: usize,
    w: Vec<u8>,
}

impl Case {
    fn all() -> impl Iterator<Item = Self> {
        SHAPES.into_iter().map(|(n_outputs, n_inputs)| {
            let values = rough(n_outputs * n_inputs, 3);
            let w = values.into_iter().flat_map(|w| bf16::from_f32(w).to_le_bytes()).collect();
            Self { n_outputs, n_inputs, w }
        })
    }

    fn x(&self, n_rows: usize) -> Vec<f32> {
        rough(n_rows * self.n_inputs, 1)
    }

    /// By two tasks of outputs, the first of which begins and ends anywhere.
    fn multiply<U: Unit>(&self, x: &[f32]) -> Vec<f32> {
        let (n_rows, stride) = (x.len() / self.n_inputs, stride(self.n_inputs));
        let mut lines = vec![Line([0; 64]); n_rows * stride / ROW_BYTES];
        pack::<U>(x, self.n_inputs, &mut lines);
        let mut y = vec![POISON; n_rows * self.n_outputs];
        let target = Target::new(&mut y, self.n_outputs);
        let (x, middle) = (Rows { bytes: bytemuck::cast_slice(&lines), stride, n_rows }, self.n_outputs / 3);
        let w = WeightRows { bytes: &self.w, row_bytes: self.n_inputs * 2 };
        for outputs in [0..middle, middle..self.n_outputs] {
            // Rows of a task are whole groups.
            for rows in [0..n_rows.min(TILE), TILE..n_rows].into_iter().filter(|rows| !rows.is_empty()) {
                let outputs = outputs.clone();
                // SAFETY: rows, weights and results are there.
                unsafe { product::<U>(&Product { x, rows, w, outputs, y: &target }) };
            }
        }
        y
    }

    /// A product in f64 of numbers in bf16, and the sum of its terms' sizes.
    fn exact(&self, x: &[f32], output: usize) -> (f64, f64) {
        let w = self.w[output * self.n_inputs * 2..].as_chunks().0.iter().map(|w| bf16::from_le_bytes(*w));
        let terms = x.iter().zip(w).map(|(x, w)| bf16::from_f32(*x).to_f64() * w.to_f64());
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

#[test]
fn tiles_give_the_product() {
    for case in Case::all() {
        for n_rows in N_ROWS {
            let x = case.x(n_rows);
            for (idx, y) in case.multiply::<Model>(&x).into_iter().enumerate() {
                let row = &x[idx / case.n_outputs * case.n_inputs..][..case.n_inputs];
                let (exact, size) = case.exact(row, idx % case.n_outputs);
                let bound = size * f64::from(f32::EPSILON) * case.n_inputs as f64;
                let name = format!("{} x {}, {n_rows} rows, {idx}", case.n_outputs, case.n_inputs);
                assert!((f64::from(y) - exact).abs() <= bound, "{name}: {y} is not {exact}");
            }
        }
    }
}

#[test]
fn rows_in_tiles_do_not_depend_on_their_neighbours() {
    for case in Case::all() {
        let x = case.x(70);
        let all = case.multiply::<Model>(&x);
        for n_rows in N_ROWS {
            let some = case.multiply::<Model>(&x[..n_rows * case.n_inputs]);
            assert_eq!(some, all[..some.len()], "{n_rows} rows of {} x {}", case.n_outputs, case.n_inputs);
        }
    }
}

/// So many rows that some of them at a time stay in the cache, and sums wait in memory.
#[test]
fn many_long_rows_give_what_each_gives_alone() {
    let (n_outputs, n_inputs, n_rows) = (40, 2100, 300);
    let w = rough(n_outputs * n_inputs, 3).into_iter().flat_map(|w| bf16::from_f32(w).to_le_bytes()).collect();
    let case = Case { n_outputs, n_inputs, w };
    assert!(n_rows * stride(n_inputs) > CACHED_BYTES, "they do not all stay");
    let x = case.x(n_rows);
    let all = case.multiply::<Model>(&x);
    for row in [0, 15, 16, 31, 32, 255, 256, 299] {
        let alone = case.multiply::<Model>(&x[row * n_inputs..][..n_inputs]);
        assert_eq!(alone, all[row * n_outputs..][..n_outputs], "row {row}");
    }
}

#[test]
fn the_unit_of_this_cpu_computes_what_the_manual_says() {
    if !is_here() {
        return skipped("the_unit_of_this_cpu_computes_what_the_manual_says", "no AMX on this CPU");
    }
    for case in Case::all() {
        for n_rows in N_ROWS {
            let x = case.x(n_rows);
            let name = format!("{} x {}, {n_rows} rows", case.n_outputs, case.n_inputs);
            assert_eq!(case.multiply::<Tmul>(&x), case.multiply::<Model>(&x), "{name}");
        }
    }
}

/// As the tests of other crates say it, to be counted at the end.
fn skipped(test: &str, reason: &str) {
    let line = format!("skipped: {test}: {reason}");
    println!("{line}");
    if let Some(log) = std::env::var_os("SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(log).expect("the log opens");
        std::io::Write::write_all(&mut log, format!("{line}\n").as_bytes()).expect("the log takes a line");
    }
}

#[test]
fn packed_rows_take_the_room_that_they_are_given() {
    for n_inputs in [1, 31, 32, 33, 545] {
        assert_eq!(stride(n_inputs), row_stride::<crate::ops::cpu::kernel::avx512::Bf16Dot<true>>(n_inputs));
    }
}
