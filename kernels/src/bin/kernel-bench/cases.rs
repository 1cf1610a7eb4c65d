//! What is timed: the operations of a Llama-3.1-8B step at decode and prefill sizes, each by itself, and the two ceilings. Whole steps
//! are timed by `stoker-bench program`. Buffers hold
//! random data and are rotated so that nothing is found in the L2 cache that would not be there while serving.

use anyhow::Result;
use stoker_kernels::{
    KernelError,
    blas::Algorithm,
    cache::LayerCache,
    checks::Gpu,
    gemm::GemmPlan,
    launch::{BLOCK_SIZE, Epilogue, GemmShape, Heads, SKINNY_ROWS_MAX, SkinnyKernel},
    linear::{Linear, Output},
    pointwise::{AddRmsNorm, Embed, RopeKv, Rotary, SiluMul, angle_table},
    sampling::{LOGPROB_WORDS, Marks, Sample, SampleOptions, SampleRow, SampleScratch, Selection, Turn},
};

use crate::{
    clock,
    figures::{Ceilings, Report, Work, median},
};

pub(crate) const HEADS: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
pub(crate) const HIDDEN: usize = 4096;
pub(crate) const INTERMEDIATE: usize = 14336;
const VOCAB: usize = 128_256;
/// Three times the L2 cache of an H200: what rotated buffers hold together at least.
const ROTATED_BYTES: usize = 180 << 20;

/// Copy and product, the best of what the machine does.
pub(crate) fn ceilings(gpu: &mut Gpu) -> Result<Ceilings> {
    let n = 1 << 30;
    let (source, mut target) = (gpu.random(n)?, gpu.random(n)?);
    // Not inside a graph: a copy node there was measured at 2.8 TB/s, this one at 4.3.
    let copied = clock::time_eagerly(gpu, |_| {
        gpu.stream().memcpy_dtod(&source, &mut target).map_err(|source| KernelError::Driver { call: "copy", source })
    })?;
    let (shape, size) = (GemmShape { m: 8192, n: 8192, k: 8192 }, 8192 * 8192);
    let mut product = |gpu: &Gpu| -> Result<Vec<f64>> {
        clock::time(gpu, 4, |_| {
            let (x, w, y) = (source.slice(..size), source.slice(size..2 * size), target.slice_mut(..size));
            gpu.blas.gemm(Linear { y: Output::Bf16(y), x: x.into(), w: w.into(), shape }, first_guess(shape))
        })
    };
    let products = product(gpu)?;
    Ok(Ceilings {
        gb_s: 4.0 * n as f64 / median(&copied) / 1e3,
        tflop_s: 2.0 * 8192f64.powi(3) / median(&products) / 1e6,
    })
}

/// Embedding, norm, rotary embedding and activation.
pub(crate) fn pointwise(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    for n_rows in [1, 32, 256, 2048, 8192] {
        embed(gpu, report, n_rows)?;
        add_rms_norm(gpu, report, n_rows)?;
        rope_kv(gpu, report, n_rows)?;
        silu_mul(gpu, report, n_rows)?;
    }
    Ok(())
}

fn embed(gpu: &mut Gpu, report: &mut Report, n_rows: usize) -> Result<()> {
    let name = format!("kernel_embed_{n_rows}x{HIDDEN}");
    if !report.wants(&name) {
        return Ok(());
    }
    let table = gpu.random(VOCAB * HIDDEN)?;
    let tokens: Vec<u32> = (0..16 * n_rows).map(|_| gpu.noise.below(VOCAB) as u32).collect();
    let (tokens, mut out) = (gpu.upload(&tokens)?, gpu.random(n_rows * HIDDEN)?);
    let us = clock::time(gpu, 16, |i| {
        let tokens = tokens.slice(i * n_rows..(i + 1) * n_rows);
        gpu.kernels.embed(Embed { out: out.as_view_mut(), table: table.as_view(), tokens, width: HIDDEN, scale: None })
    })?;
    report.add(&name, "stoker", Work::Bytes((4 * n_rows * HIDDEN) as f64), us);
    Ok(())
}

fn add_rms_norm(gpu: &mut Gpu, report: &mut Report, n_rows: usize) -> Result<()> {
    let name = format!("kernel_add_rms_norm_{n_rows}x{HIDDEN}");
    if !report.wants(&name) {
        return Ok(());
    }
    let size = n_rows * HIDDEN;
    let turns = turns(6 * size);
    let (x, weight) = (gpu.random(turns * size)?, gpu.random(HIDDEN)?);
    let (mut out, mut residual) = (gpu.random(turns * size)?, gpu.random(turns * size)?);
    let us = clock::time(gpu, 32, |i| {
        let own = i % turns * size..(i % turns + 1) * size;
        gpu.kernels.add_rms_norm(AddRmsNorm {
            out: out.slice_mut(own.clone()),
            residual: residual.slice_mut(own.clone()),
            x: x.slice(own),
            weight: weight.as_view(),
            eps: 1e-5,
        })
    })?;
    report.add(&name, "stoker", Work::Bytes((8 * size) as f64), us);
    Ok(())
}

fn rope_kv(gpu: &mut Gpu, report: &mut Report, n_rows: usize) -> Result<()> {
    let name = format!("kernel_rope_kv_{n_rows}");
    if !report.wants(&name) {
        return Ok(());
    }
    let (width, n_positions) = (HEADS.qkv_width(), 8192);
    let turns = turns(2 * n_rows * width);
    let n_blocks = n_positions / BLOCK_SIZE;
    let inv_freq: Vec<f64> = (0..HEADS.dim / 2).map(|i| 5e5f64.powf(-2.0 * i as f64 / HEADS.dim as f64)).collect();
    let angles = gpu.upload(&angle_table(n_positions, &inv_freq, 1.0))?;
    let positions: Vec<i32> = (0..n_rows).map(|_| gpu.noise.below(n_positions) as i32).collect();
    let mut slots = gpu.noise.permutation(n_blocks * BLOCK_SIZE);
    slots.truncate(n_rows);
    let (positions, slots) = (gpu.upload(&positions)?, gpu.upload(&slots)?);
    let mut qkv = gpu.random(turns * n_rows * width)?;
    let size = n_blocks * HEADS.block_values();
    let mut cache = LayerCache::Bf16 { k: gpu.random(size)?, v: gpu.random(size)? };
    let us = clock::time(gpu, 32, |i| {
        gpu.kernels.rope_kv(RopeKv {
            qkv: qkv.slice_mut(i % turns * n_rows * width..(i % turns + 1) * n_rows * width),
            cache: &mut cache,
            bias: None,
            norm: None,
            rotary: Some(Rotary { angles: angles.as_view(), n_pairs: HEADS.dim / 2 }),
            positions: positions.as_view(),
            slots: slots.as_view(),
            heads: HEADS,
        })
    })?;
    report.add(&name, "stoker", Work::Bytes((n_rows * (4 * width + 4 * HEADS.dim)) as f64), us);
    Ok(())
}

fn silu_mul(gpu: &mut Gpu, report: &mut Report, n_rows: usize) -> Result<()> {
    let name = format!("kernel_silu_mul_{n_rows}x{INTERMEDIATE}");
    if !report.wants(&name) {
        return Ok(());
    }
    let size = n_rows * INTERMEDIATE;
    let turns = turns(6 * size);
    let (gate_up, mut out) = (gpu.random(turns * 2 * size)?, gpu.random(turns * size)?);
    let us = clock::time(gpu, 32, |i| {
        let turn = i % turns;
        gpu.kernels.silu_mul(SiluMul {
            out: out.slice_mut(turn * size..(turn + 1) * size),
            gate_up: gate_up.slice(2 * turn * size..2 * (turn + 1) * size),
            width: INTERMEDIATE,
        })
    })?;
    report.add(&name, "stoker", Work::Bytes((6 * size) as f64), us);
    Ok(())
}

/// The five products of a step: ours for few rows, the batch-invariant one and cuBLASLt beside it.
pub(crate) fn linear(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    let layers = [
        ("qkv", HEADS.qkv_width(), HIDDEN),
        ("o", HIDDEN, HIDDEN),
        ("gate_up", 2 * INTERMEDIATE, HIDDEN),
        ("down", HIDDEN, INTERMEDIATE),
        ("lm_head", VOCAB, HIDDEN),
    ];
    for m in [1, 8, 16, 32, 64, 128, 256, 2048, 8192] {
        for (layer, n, k) in layers {
            // Logits are wanted of one row a sequence: never of all of a prefill.
            if m >= 2048 && layer == "lm_head" {
                continue;
            }
            product(gpu, report, &format!("kernel_gemm_{layer}_m{m}"), GemmShape { m, n, k })?;
        }
    }
    Ok(())
}

fn product(gpu: &mut Gpu, report: &mut Report, name: &str, shape: GemmShape) -> Result<()> {
    if !report.wants(name) {
        return Ok(());
    }
    let GemmShape { m, n, k } = shape;
    let turns = turns(2 * n * k);
    let (x, w) = (gpu.random(m * k)?, gpu.random(turns * n * k)?);
    let mut logits = gpu.stream().alloc_zeros::<f32>(m * n)?;
    let mut y = gpu.random(m * n)?;
    let is_head = n == VOCAB;
    let mut linear = |turn: usize, run: &dyn Fn(Linear<'_>) -> Result<(), KernelError>| {
        let y = if is_head { Output::F32(logits.as_view_mut()) } else { Output::Bf16(y.as_view_mut()) };
        run(Linear { y, x: x.as_view().into(), w: w.slice(turn * n * k..(turn + 1) * n * k).into(), shape })
    };
    let work = if m < 256 { Work::Bytes((2 * n * k) as f64) } else { flops(shape) };
    let n_launches = if m < 256 { 20 } else { 4 };
    if m <= SKINNY_ROWS_MAX {
        let best = SkinnyKernel::for_device(gpu.kernels.properties());
        for (suffix, kernel) in [("", best), ("_registers", SkinnyKernel::Registers)] {
            let us = clock::time(gpu, n_launches, |i| linear(i % turns, &|op| gpu.kernels.skinny_gemm_by(op, kernel)))?;
            report.add(&format!("{name}{suffix}"), "stoker", work, us);
        }
    }
    if gpu.kernels.properties().capability == (9, 0) {
        let epilogue = if is_head { Epilogue::F32 } else { Epilogue::Bf16 };
        let plan = GemmPlan::new(shape, epilogue, gpu.kernels.properties().n_multiprocessors)?;
        let us = clock::time(gpu, n_launches, |i| linear(i % turns, &|op| gpu.kernels.gemm_by_plan(op, &plan)))?;
        report.add(&format!("{name}_invariant"), "stoker", work, us);
    }
    let us = clock::time(gpu, n_launches, |i| linear(i % turns, &|op| gpu.blas.gemm(op, first_guess(shape))))?;
    report.add(name, "cublaslt", work, us);
    Ok(())
}

/// Gate and up with their activation: in one product, and cuBLASLt's with the activation behind it.
pub(crate) fn gated(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    for m in [1, 8, 16, 32, 64, 128, 256, 2048, 8192] {
        let name = format!("kernel_gated_m{m}");
        if report.wants(&name) {
            gated_product(gpu, report, &name, GemmShape { m, n: 2 * INTERMEDIATE, k: HIDDEN })?;
        }
    }
    Ok(())
}

fn gated_product(gpu: &mut Gpu, report: &mut Report, name: &str, shape: GemmShape) -> Result<()> {
    let GemmShape { m, n, k } = shape;
    let (x, w) = (gpu.random(m * k)?, gpu.random(n * k)?);
    let (mut gate_up, mut out) = (gpu.random(m * n)?, gpu.random(m * n / 2)?);
    let multiply = |y: Output<'_>, run: &dyn Fn(Linear<'_>) -> Result<(), KernelError>| {
        run(Linear { y, x: x.as_view().into(), w: w.as_view().into(), shape })
    };
    let work = if m < 256 { Work::Bytes((2 * n * k) as f64) } else { flops(shape) };
    if gpu.kernels.properties().capability == (9, 0) {
        let plan = GemmPlan::new(shape, Epilogue::Gated, gpu.kernels.properties().n_multiprocessors)?;
        let us = clock::time(gpu, 4, |_| {
            multiply(Output::Gated(out.as_view_mut()), &|op| gpu.kernels.gemm_by_plan(op, &plan))
        })?;
        report.add(name, "stoker", work, us);
    }
    let us = clock::time(gpu, 4, |_| {
        multiply(Output::Bf16(gate_up.as_view_mut()), &|op| gpu.blas.gemm(op, first_guess(shape)))?;
        gpu.kernels.silu_mul(SiluMul { out: out.as_view_mut(), gate_up: gate_up.as_view(), width: n / 2 })
    })?;
    report.add(name, "cublaslt", work, us);
    Ok(())
}

/// cuBLASLt's for the shape.
fn first_guess(shape: GemmShape) -> Algorithm {
    Algorithm { rows: shape.m, rank: 0 }
}

fn flops(shape: GemmShape) -> Work {
    Work::Flops(2.0 * (shape.m * shape.n * shape.k) as f64)
}

/// The tail of a step over logits of the whole vocabulary.
pub(crate) fn sampling(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    let drawn = SampleRow { temperature: 0.8, seed: 7, ..SampleRow::GREEDY };
    let nucleus = SampleRow { top_p: 0.9, ..drawn };
    let qwen = SampleRow { top_k: 20, top_p: 0.8, slot: 0, repetition: 1.05, ..drawn };
    let logprobs = SampleRow { logprobs: 0, n_top: 20, ..SampleRow::GREEDY };
    let kinds = [
        ("greedy", SampleRow::GREEDY),
        ("draw", drawn),
        ("filtered", SampleRow { top_k: 50, top_p: 0.9, ..drawn }),
        ("nucleus", nucleus),
        ("min_p", SampleRow { ln_min_p: 0.05f32.ln(), ..drawn }),
        ("qwen", qwen),
        ("logprobs20", logprobs),
    ];
    for n_rows in [1, 32, 64, 256] {
        for (kind, row) in kinds {
            let name = format!("kernel_sample_{kind}_{n_rows}");
            if report.wants(&name) {
                let us = sample(gpu, row, n_rows)?;
                report.add(&name, "stoker", Work::Bytes((4 * n_rows * VOCAB) as f64), us);
            }
        }
    }
    Ok(())
}

/// Both launches of a step in which all rows are drawn alike.
fn sample(gpu: &mut Gpu, how: SampleRow, n_rows: usize) -> Result<Vec<f64>> {
    let own = |at: usize, place: i32| if place < 0 { -1 } else { at as i32 };
    let row = |at| SampleRow { slot: own(at, how.slot), logprobs: own(at, how.logprobs), ..how }.with_options();
    let rows: Vec<SampleRow> = (0..n_rows).map(row).collect();
    let size = n_rows * VOCAB;
    let turns = turns(4 * size);
    let piece: Vec<f32> = (0..1 << 20).map(|_| 3.0 * gpu.noise.normal()).collect();
    let logits: Vec<f32> = piece.iter().copied().cycle().take(turns * size).collect();
    let (logits, rows_gpu, mut tokens) = (gpu.upload(&logits)?, gpu.upload(&rows)?, gpu.upload(&vec![0u32; n_rows])?);
    let mut logprobs = gpu.upload(&vec![0u32; n_rows * LOGPROB_WORDS])?;
    let device = gpu.kernels.device().clone();
    let (mut scratch, mut marks) = (SampleScratch::new(&device, n_rows)?, Marks::new(&device, n_rows, VOCAB)?);
    let selection = if how.needs_selection(VOCAB) { Selection::Needed } else { Selection::NotNeeded };
    clock::time(gpu, 10, |i| {
        let logits = || logits.slice(i % turns * size..(i % turns + 1) * size);
        gpu.kernels.sample(Sample {
            tokens: tokens.as_view_mut(),
            logits: logits(),
            rows: rows_gpu.as_view(),
            scratch: &mut scratch,
            vocab: VOCAB,
        })?;
        if rows[0].options == 0 {
            return Ok(());
        }
        gpu.kernels.sample_options(SampleOptions {
            tokens: tokens.as_view_mut(),
            logprobs: logprobs.as_view_mut(),
            logits: logits(),
            rows: rows_gpu.as_view(),
            marks: &mut marks,
            turn: Turn::Free,
            selection,
            scratch: &mut scratch,
        })
    })
}

/// Copies needed so that a rotation of `bytes` each does not fit the cache.
pub(crate) fn turns(bytes: usize) -> usize {
    ROTATED_BYTES.div_ceil(bytes).clamp(1, 32)
}
