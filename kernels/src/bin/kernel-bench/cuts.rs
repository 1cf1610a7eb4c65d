//! Every way to cut our product for any number of rows, timed at the shapes of three models: beside what cuBLASLt takes and
//! beside the order in which `gemm` counts them. Decides nothing.

use std::{io::Write, path::Path};

use anyhow::Result;
use stoker_kernels::{
    CudaSlice, KernelError, bf16,
    checks::Gpu,
    gemm::{self, Depth, GemmPlan},
    launch::{GemmShape, OutputType},
    linear::{Linear, Output},
    pointwise::SiluMul,
};

use crate::{cases, clock, figures::median};

/// Of a model: hidden size, width of q, k and v, width of attention, inner size.
const MODELS: [(&str, [usize; 4]); 3] = [
    ("llama-3.1-8b", [4096, 6144, 4096, 14336]),
    ("qwen3-8b", [4096, 6144, 4096, 12288]),
    ("llama-3.2-1b", [2048, 3072, 2048, 8192]),
];
const ROW_COUNTS: [usize; 7] = [8, 16, 32, 64, 96, 128, 256];
/// Times the cheapest by count, from which a cut is not timed.
const HOPELESS: f64 = 1.6;

/// Times those of all products whose model and layer contain `only`; prints one line a product, writes one line a cut.
pub(crate) fn run(gpu: &mut Gpu, only: &str, out: Option<&Path>) -> Result<()> {
    let mut file = out.map(std::fs::File::create).transpose()?;
    println!("{:32} {:>8} {:>22} {:>8} {:>22} {:>8}", "product", "cublaslt", "counted", "us", "fastest", "us");
    for (model, [hidden, qkv, attended, inner]) in MODELS {
        let products = [
            ("qkv", qkv, hidden, OutputType::Bf16),
            ("o", hidden, attended, OutputType::Bf16),
            ("gated", 2 * inner, hidden, OutputType::Activated),
            ("down", hidden, inner, OutputType::Bf16),
        ];
        for (layer, n, k, output) in
            products.into_iter().filter(|(layer, ..)| format!("{model} {layer}").contains(only))
        {
            let mut case = Case::new(gpu, [n, k], output)?;
            for m in ROW_COUNTS {
                let name = format!("{model} {layer} {m}");
                case.time(gpu, &name, m, file.as_mut())?;
            }
        }
    }
    Ok(())
}

/// A product's operands, for the most rows.
struct Case {
    w: CudaSlice<bf16>,
    x: CudaSlice<bf16>,
    y: CudaSlice<bf16>,
    out: CudaSlice<bf16>,
    n: usize,
    k: usize,
    turns: usize,
    output: OutputType,
}

impl Case {
    fn new(gpu: &mut Gpu, [n, k]: [usize; 2], output: OutputType) -> Result<Self> {
        let (turns, m) = (cases::turns(2 * n * k), ROW_COUNTS[ROW_COUNTS.len() - 1]);
        let (w, x) = (gpu.random(turns * n * k)?, gpu.random(m * k)?);
        Ok(Self { w, x, y: gpu.random(m * n)?, out: gpu.random(m * n)?, n, k, turns, output })
    }

    fn time(&mut self, gpu: &Gpu, name: &str, m: usize, mut file: Option<&mut std::fs::File>) -> Result<()> {
        let shape = GemmShape { m, n: self.n, k: self.k };
        let plans = gemm::ranked_plans(shape, self.output, Depth::MaySplit, gpu.kernels.properties().n_multiprocessors);
        let most = HOPELESS * plans[0].1;
        let mut timed = Vec::new();
        for (plan, cycles) in plans.into_iter().filter(|(_, cycles)| *cycles <= most) {
            let us = self.time_plan(gpu, shape, &plan)?;
            if let Some(file) = &mut file {
                writeln!(file, "{name} {} {cycles:.0} {us:.2}", described(&plan))?;
            }
            timed.push((us, plan));
        }
        let (first, blas) = (timed[0], self.time_blas(gpu, shape)?);
        let fastest = timed.into_iter().fold(first, |a, b| if b.0 < a.0 { b } else { a });
        print!("{name:32} {blas:8.2}");
        for (us, plan) in [first, fastest] {
            print!(" {:>22} {us:8.2}", described(&plan));
        }
        println!();
        Ok(())
    }

    fn time_plan(&mut self, gpu: &Gpu, shape: GemmShape, plan: &GemmPlan) -> Result<f64> {
        let GemmShape { m, n, k } = shape;
        let us = clock::time(gpu, 2 * self.turns.max(2), |i| {
            let turn = i % self.turns;
            let y = match self.output {
                OutputType::Activated => Output::Activated(self.out.slice_mut(..m * n / 2)),
                _ => Output::Bf16(self.y.slice_mut(..m * n)),
            };
            let op = Linear { y, x: self.x.slice(..m * k), w: self.w.slice(turn * n * k..(turn + 1) * n * k), shape };
            gpu.kernels.gemm_by_plan(op, plan)
        })?;
        Ok(median(&us))
    }

    /// Tuned, with the activation behind it where ours has it inside.
    fn time_blas(&mut self, gpu: &Gpu, shape: GemmShape) -> Result<f64> {
        let GemmShape { m, n, k } = shape;
        let mut run = |turn: usize, run: &dyn Fn(Linear<'_>) -> Result<(), KernelError>| {
            let w = self.w.slice(turn * n * k..(turn + 1) * n * k);
            run(Linear { y: Output::Bf16(self.y.slice_mut(..m * n)), x: self.x.slice(..m * k), w, shape })?;
            if self.output != OutputType::Activated {
                return Ok(());
            }
            let (out, gate_up) = (self.out.slice_mut(..m * n / 2), self.y.slice(..m * n));
            gpu.kernels.silu_mul(SiluMul { out, gate_up, width: n / 2 })
        };
        run(0, &|op| gpu.blas.tune(op, &[]).map(drop))?;
        Ok(median(&clock::time(gpu, 2 * self.turns.max(2), |i| run(i % self.turns, &|op| gpu.blas.gemm(op)))?))
    }
}

fn described(plan: &GemmPlan) -> String {
    format!("{} {}", plan.config.entry.name().trim_start_matches("gemm_sm90_"), plan.rows)
}
