//! Every kernel on every instruction set this CPU has, against plain sums in f64, over odd shapes, with results poisoned
//! before.

use super::*;

const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::F16];
/// Odd and even, below and above a step, a tile, and a block of rows.
const SHAPES: [(usize, usize); 8] =
    [(2, 8), (32, 64), (7, 31), (64, 320), (23, 33), (48, 1100), (101, 257), (13, 5000)];
const POISON: f32 = f32::NAN;

/// Numbers without a pattern, in -1..1, exact in bf16.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let draw = stoker_kernels::draw::Draw::new(seed, 0);
    (0..n as u32).map(|i| (draw.uniform(i) * 256.0).floor() / 128.0 - 1.0).collect()
}

fn stored(values: &[f32], format: Format) -> Vec<u8> {
    let bytes = |value: &f32| match format {
        Format::F32 => value.to_le_bytes().to_vec(),
        Format::Bf16 => bf16::from_f32(*value).to_le_bytes().to_vec(),
        Format::F16 => f16::from_f32(*value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

struct Case {
    isa: Isa,
    format: Format,
    n_inputs: usize,
    n_outputs: usize,
    weights: Vec<u8>,
}

impl Case {
    fn all() -> Vec<Self> {
        let case = |isa: Isa, format: Format, (n_outputs, n_inputs): (usize, usize)| {
            let weights = stored(&noise(n_outputs * n_inputs, 3), format);
            Self { isa, format, n_inputs, n_outputs, weights }
        };
        let each_isa = Isa::available().into_iter();
        let each_format = each_isa.flat_map(|isa| FORMATS.map(|format| (isa, format)));
        each_format.flat_map(|(isa, format)| SHAPES.map(|shape| case(isa, format, shape))).collect()
    }

    /// The product, computed in two calls that each write their outputs and nothing else.
    fn multiply(&self, x: &[f32]) -> Vec<f32> {
        let packed = self.isa.pack(x, self.n_inputs, self.format);
        let mut y = vec![POISON; x.len() / self.n_inputs * self.n_outputs];
        let middle = self.n_outputs / 3;
        let target = Target::new(&mut y, self.n_outputs);
        for outputs in [0..middle, middle..self.n_outputs] {
            let w = WeightRows { bytes: &self.weights, row_bytes: self.n_inputs * self.format.bytes() };
            self.isa.run(self.format, Product { x: &packed, w, outputs, y: &target });
        }
        y
    }

    fn name(&self) -> String {
        format!("{:?} {:?} {} x {}", self.isa, self.format, self.n_outputs, self.n_inputs)
    }
}

#[test]
fn the_product_is_the_product() {
    for case in Case::all() {
        let x = noise(5 * case.n_inputs, 1);
        let w = noise(case.n_outputs * case.n_inputs, 3);
        let y = case.multiply(&x);
        for (i, y) in y.into_iter().enumerate() {
            let (row, output) = (i / case.n_outputs, i % case.n_outputs);
            let pair = |k| f64::from(x[row * case.n_inputs + k]) * f64::from(w[output * case.n_inputs + k]);
            let exact: f64 = (0..case.n_inputs).map(pair).sum();
            // Half a unit in the last place for each of the additions of a lane, of sums of at most `n_inputs`.
            let bound = case.n_inputs as f64 * f64::from(f32::EPSILON) * 8.0;
            assert!((f64::from(y) - exact).abs() <= bound, "{}: {y} is not {exact}", case.name());
        }
    }
}

#[test]
fn a_row_does_not_depend_on_its_neighbours() {
    for case in Case::all() {
        let x = noise(130 * case.n_inputs, 4);
        let all = case.multiply(&x);
        for n_rows in [1, 2, 3, 4, 5, 7, 8, 31, 64, 129] {
            let some = case.multiply(&x[..n_rows * case.n_inputs]);
            assert_eq!(some, all[..some.len()], "{n_rows} rows of {}", case.name());
        }
        let last = case.multiply(&x[129 * case.n_inputs..]);
        assert_eq!(last, all[129 * case.n_outputs..], "the last row of {} alone", case.name());
    }
}

#[test]
fn rounding_to_bf16_is_that_of_the_format() {
    let near = |bits: u32| (0..4).map(move |low| f32::from_bits(bits << 16 | low << 14));
    for value in (0..=u16::MAX).flat_map(|bits| near(u32::from(bits))) {
        let (ours, theirs) = (bf16::from_bits(rounded(value)), bf16::from_f32(value));
        assert!(ours == theirs || (ours.is_nan() && theirs.is_nan()), "{value}: {ours} is not {theirs}");
    }
}
