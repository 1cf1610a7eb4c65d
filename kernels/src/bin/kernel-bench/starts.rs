//! What timing chooses at start for the products of Llama-3.1-8B, several starts one behind the other: how often they agree, and what
//! one takes. Decides nothing.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;
use stoker_kernels::{
    CudaSlice, CudaView, Device, bf16,
    blas::Blas,
    checks::Gpu,
    gated::Gated,
    launch::{GemmShape, Left, OutputType, norm_tiles},
    linear::{Linear, Output, Products},
    skinny::Update,
};

/// The row counts that an engine for 256 sequences times.
const ROW_COUNTS: [usize; 7] = [8, 16, 32, 64, 128, 192, 256];
/// Layer, weight rows, depth, output.
const LAYERS: [(&str, usize, usize, OutputType); 4] = [
    ("qkv", 6144, 4096, OutputType::Bf16),
    ("o", 4096, 4096, OutputType::Updated),
    ("gated", 28672, 4096, OutputType::Activated),
    ("down", 4096, 14336, OutputType::Updated),
];
/// Weights of a shape that are timed in turn, as the engine does.
const TURNS: usize = 3;

/// Of a product of some rows: what each start chose.
type Choices = BTreeMap<(usize, &'static str), Vec<String>>;

/// Starts `n_starts` times; prints what every start took, and the products that they did not agree on.
pub(crate) fn run(device: &Device, n_starts: usize) -> Result<()> {
    let mut choices = Choices::new();
    for _ in 0..n_starts {
        let mut gpu = Gpu::new(device)?;
        let products = Products::Fastest(Box::new(Blas::new(device)?));
        let mut took = Duration::ZERO;
        for layer in LAYERS {
            took += Buffers::new(&mut gpu, layer)?.tune(&gpu, &products, &mut choices)?;
        }
        println!("a start times for {:.0} ms", 1e3 * took.as_secs_f64());
    }
    let n_alike = choices.values().filter(|chosen| chosen.iter().all(|choice| *choice == chosen[0])).count();
    println!("{n_alike} of {} products are alike in {n_starts} starts", choices.len());
    for ((m, layer), chosen) in &choices {
        println!("{layer:6} {m:4} {}", chosen.join(" | "));
    }
    Ok(())
}

/// A layer's operands, for the most rows.
struct Buffers {
    layer: &'static str,
    output: OutputType,
    n: usize,
    k: usize,
    weights: Vec<CudaSlice<bf16>>,
    x: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
    out: CudaSlice<bf16>,
    squares: CudaSlice<f32>,
}

impl Buffers {
    fn new(gpu: &mut Gpu, (layer, n, k, output): (&'static str, usize, usize, OutputType)) -> Result<Self> {
        let m = ROW_COUNTS[ROW_COUNTS.len() - 1];
        let weights = (0..TURNS).map(|_| gpu.random(n * k)).collect::<Result<_, _>>()?;
        let (x, y, out) = (gpu.random(m * k)?, gpu.random(m * n)?, gpu.random(m * n)?);
        let squares = gpu.kernels.device().zeros(m * norm_tiles(n))?;
        Ok(Self { layer, output, n, k, weights, x, y, out, squares })
    }

    /// At all row counts; how long it took.
    fn tune(&mut self, gpu: &Gpu, products: &Products, choices: &mut Choices) -> Result<Duration> {
        gpu.kernels.device().synchronize()?;
        let begin = Instant::now();
        for m in ROW_COUNTS {
            self.tune_rows(gpu, products, m)?;
        }
        gpu.kernels.device().synchronize()?;
        let took = begin.elapsed();
        for m in ROW_COUNTS {
            let (shape, output) = self.of_rows(gpu, products, m);
            let chosen = gpu.kernels.chosen(shape, output).map_or("not ours".to_owned(), |plan| {
                format!("{} {}", plan.config.entry.name().trim_start_matches("gemm_sm90_"), plan.rows)
            });
            choices.entry((m, self.layer)).or_default().push(chosen);
        }
        Ok(took)
    }

    /// Shape, and what the engine wants of it: the residual alone is updated where the step hands it on weighted.
    fn of_rows(&self, gpu: &Gpu, products: &Products, m: usize) -> (GemmShape, OutputType) {
        let shape = GemmShape { m, n: self.n, k: self.k };
        let updates = products.leaves(&gpu.kernels, shape) == Left::Weighted;
        (shape, if self.output == OutputType::Updated && !updates { OutputType::Bf16 } else { self.output })
    }

    fn tune_rows(&mut self, gpu: &Gpu, products: &Products, m: usize) -> Result<()> {
        let (shape, output) = self.of_rows(gpu, products, m);
        let w = self.weights[0].as_view();
        let others: Vec<CudaView<'_, bf16>> = self.weights[1..].iter().map(|w| w.as_view()).collect();
        let (x, y) = (self.x.slice(..m * self.k), self.y.slice_mut(..m * self.n));
        match output {
            OutputType::Activated => {
                let out = self.out.slice_mut(..m * self.n / 2);
                products.tune_gated(&gpu.kernels, Gated { out, gate_up: y, x, w, shape }, &others)?;
            }
            OutputType::Updated => {
                let (weighted, norm) = (self.out.slice_mut(..m * self.n), self.x.slice(..self.n));
                let squares = self.squares.slice_mut(..m * norm_tiles(self.n));
                gpu.kernels.tune_update(Update { residual: y, weighted, squares, norm, x, w, shape }, &others)?;
            }
            OutputType::Bf16 | OutputType::F32 => {
                products.tune(&gpu.kernels, Linear { y: Output::Bf16(y), x, w, shape }, &others)?;
            }
        }
        Ok(())
    }
}
