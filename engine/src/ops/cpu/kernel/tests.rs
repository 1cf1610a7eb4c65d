//! Every kernel on every instruction set this CPU has, against plain sums in f64, over odd shapes, with results poisoned
//! before.

use super::*;
use crate::{
    kv::{BLOCK_TOKENS, KvLayout},
    model::HeadShape,
    ops::cpu::CpuCache,
};

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

/// The same with all bits of f32 in use: sums of these depend on their order.
fn rough(n: usize, seed: u64) -> Vec<f32> {
    noise(n, seed).into_iter().map(|x| x / 3.0).collect()
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
        let mut packed = self.isa.unpacked(x.len() / self.n_inputs, self.n_inputs, self.format);
        self.isa.pack(x, self.n_inputs, self.format, &mut packed.lines);
        let mut y = vec![POISON; x.len() / self.n_inputs * self.n_outputs];
        let middle = self.n_outputs / 3;
        let target = Target::new(&mut y, self.n_outputs);
        for outputs in [0..middle, middle..self.n_outputs] {
            let w = WeightRows { bytes: &self.weights, row_bytes: self.n_inputs * self.format.bytes() };
            let (x, rows) = (packed.rows(), 0..packed.n_rows);
            self.isa.run(self.format, Product { x, rows, w, outputs, y: &target });
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
        let x = rough(130 * case.n_inputs, 4);
        let all = case.multiply(&x);
        for n_rows in [0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 31, 64, 129] {
            let some = case.multiply(&x[..n_rows * case.n_inputs]);
            assert_eq!(some, all[..some.len()], "{n_rows} rows of {}", case.name());
        }
        let last = case.multiply(&x[129 * case.n_inputs..]);
        assert_eq!(last, all[129 * case.n_outputs..], "the last row of {} alone", case.name());
    }
}

#[test]
fn matrices_multiplied_at_once_give_what_each_gives_alone() {
    let n_rows = 300;
    // Rows that are packed, and such as may be read where they are; few threads, and more than there are units of outputs.
    for (isa, n_inputs, n_threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 321, 3), (isa, 320, 16)]) {
        let x = rough(n_rows * n_inputs, 5);
        let cases = [(101, FORMATS[1]), (7, FORMATS[0]), (64, FORMATS[1])].map(|(n_outputs, format)| {
            let weights = stored(&noise(n_outputs * n_inputs, 3), format);
            Case { isa, format, n_inputs, n_outputs, weights }
        });
        let matrices = cases.each_ref().map(|case| {
            Weights::Rows(WeightRows { bytes: &case.weights, row_bytes: n_inputs * case.format.bytes() }, case.format)
        });
        let together = multiply(&mut Pool::new(n_threads).unwrap(), isa, &x, matrices);
        for (case, together) in cases.iter().zip(together) {
            assert_eq!(together[..], case.multiply(&x), "{n_threads} threads, {}", case.name());
        }
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

/// Attention of one sequence over a cache whose unused slots are poisoned.
struct AttentionCase {
    isa: Isa,
    spec: AttentionSpec,
    cache: CpuCache,
    blocks: Vec<u32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

const N_TOKENS: usize = 50;
const HEADS: [(usize, usize, usize); 5] = [(4, 2, 64), (7, 1, 24), (3, 3, 8), (14, 2, 80), (2, 1, 128)];

impl AttentionCase {
    fn all() -> Vec<Self> {
        let specs = HEADS.into_iter().flat_map(|(n_heads, n_kv_heads, head_dim)| {
            let heads = HeadShape { n_heads, n_kv_heads, head_dim };
            let spec = AttentionSpec { heads, scale: 0.3, window: None, softcap: None };
            let odd = AttentionSpec { window: Some(19), softcap: Some(2.0), ..spec };
            [spec, AttentionSpec { window: Some(1), ..spec }, odd]
        });
        let cases = specs.flat_map(|spec| [KvDtype::F32, KvDtype::Bf16].map(|dtype| (spec, dtype)));
        let new = |(spec, dtype)| Isa::available().into_iter().map(move |isa| Self::new(isa, spec, dtype));
        cases.flat_map(new).collect()
    }

    fn new(isa: Isa, spec: AttentionSpec, dtype: KvDtype) -> Self {
        let HeadShape { n_heads, n_kv_heads, head_dim } = spec.heads;
        let layout = KvLayout { n_layers: 1, n_kv_heads, head_dim, n_blocks: 7, dtype };
        let kv_width = n_kv_heads * head_dim;
        let (keys, values) = (noise(N_TOKENS * kv_width, 7), noise(N_TOKENS * kv_width, 8));
        let (mut cache, blocks) = (CpuCache::new(layout), vec![5, 0, 6, 2]);
        let poison = vec![POISON; kv_width];
        (0..layout.n_blocks * BLOCK_TOKENS).for_each(|slot| cache.store(0, slot, &poison, &poison));
        for token in 0..N_TOKENS {
            let slot = blocks[token / BLOCK_TOKENS] as usize * BLOCK_TOKENS + token % BLOCK_TOKENS;
            let row = token * kv_width..(token + 1) * kv_width;
            cache.store(0, slot, &keys[row.clone()], &values[row]);
        }
        let queries = noise(N_TOKENS * n_heads * head_dim, 9);
        Self { isa, spec, cache, blocks, queries, keys, values }
    }

    /// Rows of the sequence, `per_task` at a time, each task with a batch of its own.
    fn attend(&self, per_task: usize) -> Vec<f32> {
        let HeadShape { n_heads, n_kv_heads, head_dim } = self.spec.heads;
        let (mut pool, mut all) = (Pool::new(2).unwrap(), Vec::new());
        for (idx, queries) in self.queries.chunks(per_task * n_heads * head_dim).enumerate() {
            let rows = 0..queries.len() / (n_heads * head_dim);
            let task = |kv_head| {
                let (rows, blocks) = (rows.clone(), &self.blocks[..]);
                AttentionTask { rows, position: idx * per_task, blocks, kv_head }
            };
            let tasks: Vec<_> = (0..n_kv_heads).map(task).collect();
            let mut out = vec![POISON; queries.len()];
            self.isa.attend(&mut pool, &tasks, self.cache.layer(0), self.spec, queries, &mut out);
            all.extend(out);
        }
        all
    }

    /// One head of one row, by the formula.
    fn naive(&self, row: usize, head: usize) -> Vec<f64> {
        let HeadShape { n_heads, n_kv_heads, head_dim } = self.spec.heads;
        let query = &self.queries[(row * n_heads + head) * head_dim..][..head_dim];
        let of = |all: &[f32], token: usize| -> Vec<f64> {
            let at = (token * n_kv_heads + head / (n_heads / n_kv_heads)) * head_dim;
            all[at..][..head_dim].iter().copied().map(f64::from).collect()
        };
        let seen = (row + 1).saturating_sub(self.spec.window.unwrap_or(row + 1))..row + 1;
        let weight = |token| {
            let dot: f64 = query.iter().zip(of(&self.keys, token)).map(|(q, k)| f64::from(*q) * k).sum();
            let score = dot * f64::from(self.spec.scale);
            self.spec.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh()).exp()
        };
        let sum: f64 = seen.clone().map(weight).sum();
        let column = |d: usize| seen.clone().map(|token| weight(token) / sum * of(&self.values, token)[d]).sum();
        (0..head_dim).map(column).collect()
    }
}

#[test]
fn attention_is_the_formula_and_reads_only_what_a_row_sees() {
    for case in AttentionCase::all() {
        let HeadShape { n_heads, head_dim, .. } = case.spec.heads;
        let ours = case.attend(N_TOKENS);
        for row in [0, 1, 15, 16, 17, 49] {
            for head in [0, n_heads - 1] {
                let ours = &ours[(row * n_heads + head) * head_dim..][..head_dim];
                for (ours, exact) in ours.iter().zip(case.naive(row, head)) {
                    let name = format!("{:?} {:?} row {row} head {head}", case.isa, case.spec);
                    // Some 50 additions of numbers below one, after an exponential of a sum of 128.
                    assert!((f64::from(*ours) - exact).abs() < 2e-5, "{name}: {ours} is not {exact}");
                }
            }
        }
    }
}

#[test]
fn a_row_attends_alike_alone_and_in_company() {
    for case in AttentionCase::all() {
        let together = case.attend(N_TOKENS);
        for per_task in [1, 2, 16, 23] {
            assert_eq!(case.attend(per_task), together, "{:?} {:?} {per_task} rows", case.isa, case.spec);
        }
    }
}
