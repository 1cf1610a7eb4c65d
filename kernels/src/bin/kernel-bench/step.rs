//! A whole decode step of Llama-3.1-8B from these kernels, random weights, as one graph: what launches cost together, and
//! how far from reading the weights once. Not an engine: nothing is planned, and every step is the same.

use anyhow::Result;
use stoker_kernels::{
    CudaSlice, KernelError,
    attention::{DecodeScratch, PagedDecode, PagedKv, ScratchSize},
    bf16,
    checks::Gpu,
    launch::{BLOCK_SIZE, GemmShape, Heads},
    linear::{Linear, Output},
    plan::{self, SplitPolicy},
    pointwise::{AddRmsNorm, Embed, RmsNorm, RopeKv, SiluMul, angle_table},
    sampling::{Filters, Sample, SampleRow, SampleScratch},
};

use crate::{
    cases::random,
    clock,
    figures::{Report, Work},
};

const HEADS: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
const HIDDEN: usize = 4096;
const INTERMEDIATE: usize = 14336;
const VOCAB: usize = 128_256;
const LAYERS: usize = 32;
const CONTEXT: usize = 1024;

struct Layer {
    qkv: CudaSlice<bf16>,
    o: CudaSlice<bf16>,
    gate_up: CudaSlice<bf16>,
    down: CudaSlice<bf16>,
    norm: CudaSlice<bf16>,
    k_cache: CudaSlice<bf16>,
    v_cache: CudaSlice<bf16>,
}

/// Everything a step touches.
struct Model {
    layers: Vec<Layer>,
    table: CudaSlice<bf16>,
    head: CudaSlice<bf16>,
    angles: CudaSlice<f32>,
}

struct Batch {
    n: usize,
    residual: CudaSlice<bf16>,
    normed: CudaSlice<bf16>,
    qkv: CudaSlice<bf16>,
    attended: CudaSlice<bf16>,
    update: CudaSlice<bf16>,
    gate_up: CudaSlice<bf16>,
    activated: CudaSlice<bf16>,
    logits: CudaSlice<f32>,
    tokens: CudaSlice<u32>,
    rows: CudaSlice<SampleRow>,
    positions: CudaSlice<i32>,
    slots: CudaSlice<i32>,
    block_table: CudaSlice<i32>,
    items: CudaSlice<plan::DecodeItem>,
    decode_scratch: DecodeScratch,
    sample_scratch: SampleScratch,
}

/// Decode steps of batches of several sizes at a context of 1024 tokens.
pub(crate) fn steps(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    let batches = [1, 8, 16, 32, 128, 256];
    let name = |n: usize| format!("decode_step_{n}x{CONTEXT}");
    let wanted: Vec<usize> = batches.into_iter().filter(|&n| report.wants(&name(n))).collect();
    let Some(&largest) = wanted.last() else { return Ok(()) };
    let mut model = Model::new(gpu, largest)?;
    for n in wanted {
        let mut batch = Batch::new(gpu, n)?;
        tune(gpu, &model, &mut batch)?;
        let us = clock::time(gpu, 1, |_| step(gpu, &mut model, &mut batch))?;
        let weights = 2 * (LAYERS * (HIDDEN * (HEADS.qkv_width() + HIDDEN + 3 * INTERMEDIATE)) + HIDDEN * VOCAB);
        let kv = n * CONTEXT * LAYERS * 4 * HEADS.n_kv * HEADS.dim;
        report.add(&name(n), "stoker", Work::Bytes((weights + kv) as f64), us);
    }
    Ok(())
}

impl Model {
    fn new(gpu: &mut Gpu, largest: usize) -> Result<Self> {
        let inv_freq: Vec<f64> = (0..HEADS.dim / 2).map(|i| 5e5f64.powf(-2.0 * i as f64 / HEADS.dim as f64)).collect();
        let cache = largest * CONTEXT / BLOCK_SIZE * HEADS.block_values();
        let mut layer = || {
            Ok(Layer {
                qkv: random(gpu, HIDDEN * HEADS.qkv_width())?,
                o: random(gpu, HIDDEN * HIDDEN)?,
                gate_up: random(gpu, HIDDEN * 2 * INTERMEDIATE)?,
                down: random(gpu, HIDDEN * INTERMEDIATE)?,
                norm: random(gpu, HIDDEN)?,
                k_cache: random(gpu, cache)?,
                v_cache: random(gpu, cache)?,
            })
        };
        let layers = (0..LAYERS).map(|_| layer()).collect::<Result<_>>()?;
        let (table, head) = (random(gpu, HIDDEN * VOCAB)?, random(gpu, HIDDEN * VOCAB)?);
        Ok(Self { layers, table, head, angles: gpu.upload(&angle_table(CONTEXT, &inv_freq, 1.0))? })
    }
}

impl Batch {
    fn new(gpu: &mut Gpu, n: usize) -> Result<Self> {
        let n_slots = 2 * gpu.kernels.device().properties().n_multiprocessors as usize;
        let items = plan::plan_decode(&vec![CONTEXT; n], HEADS, SplitPolicy::Balanced { n_slots });
        let blocks = CONTEXT / BLOCK_SIZE;
        let order = gpu.noise.permutation(n * blocks);
        let slots: Vec<i32> = order.chunks(blocks).map(|row| row[blocks - 1] * BLOCK_SIZE as i32 + 15).collect();
        let size = ScratchSize { n_sequences: n, n_items: items.len(), heads: HEADS };
        Ok(Self {
            n,
            residual: random(gpu, n * HIDDEN)?,
            normed: random(gpu, n * HIDDEN)?,
            qkv: random(gpu, n * HEADS.qkv_width())?,
            attended: random(gpu, n * HIDDEN)?,
            update: random(gpu, n * HIDDEN)?,
            gate_up: random(gpu, n * 2 * INTERMEDIATE)?,
            activated: random(gpu, n * INTERMEDIATE)?,
            logits: gpu.upload(&vec![0.0; n * VOCAB])?,
            tokens: gpu.upload(&vec![1; n])?,
            rows: gpu.upload(&vec![SampleRow::GREEDY; n])?,
            positions: gpu.upload(&vec![CONTEXT as i32 - 1; n])?,
            slots: gpu.upload(&slots)?,
            block_table: gpu.upload(&order)?,
            items: gpu.upload(&items)?,
            decode_scratch: DecodeScratch::new(gpu.stream(), size)?,
            sample_scratch: SampleScratch::new(gpu.stream(), n)?,
        })
    }
}

/// Algorithms for the products that cuBLASLt does.
fn tune(gpu: &Gpu, model: &Model, batch: &mut Batch) -> Result<()> {
    let m = batch.n;
    let layer = &model.layers[0];
    let one = |y: &mut CudaSlice<bf16>, x: &CudaSlice<bf16>, w: &CudaSlice<bf16>| {
        let shape = GemmShape { m, n: y.len() / m, k: x.len() / m };
        gpu.blas.tune(Linear { y: Output::Bf16(y.as_view_mut()), x: x.as_view(), w: w.as_view(), shape })
    };
    one(&mut batch.qkv, &batch.normed, &layer.qkv)?;
    one(&mut batch.update, &batch.attended, &layer.o)?;
    one(&mut batch.gate_up, &batch.normed, &layer.gate_up)?;
    one(&mut batch.update, &batch.activated, &layer.down)?;
    let shape = GemmShape { m, n: VOCAB, k: HIDDEN };
    let (x, w) = (batch.normed.as_view(), model.head.as_view());
    gpu.blas.tune(Linear { y: Output::F32(batch.logits.as_view_mut()), x, w, shape })?;
    Ok(())
}

fn step(gpu: &Gpu, model: &mut Model, b: &mut Batch) -> Result<(), KernelError> {
    let (kernels, eps) = (&gpu.kernels, 1e-5);
    let out = b.residual.as_view_mut();
    kernels.embed(Embed { out, table: model.table.as_view(), tokens: b.tokens.as_view(), width: HIDDEN })?;
    let weight = model.layers[0].norm.as_view();
    kernels.rms_norm(RmsNorm { out: b.normed.as_view_mut(), x: b.residual.as_view(), weight, eps })?;
    for layer in &mut model.layers {
        linear(gpu, b.n, &mut b.qkv, &b.normed, &layer.qkv)?;
        attend(gpu, &model.angles, layer, b)?;
        linear(gpu, b.n, &mut b.update, &b.attended, &layer.o)?;
        add_norm(gpu, layer, b)?;
        linear(gpu, b.n, &mut b.gate_up, &b.normed, &layer.gate_up)?;
        let (out, gate_up) = (b.activated.as_view_mut(), b.gate_up.as_view());
        kernels.silu_mul(SiluMul { out, gate_up, width: INTERMEDIATE })?;
        linear(gpu, b.n, &mut b.update, &b.activated, &layer.down)?;
        add_norm(gpu, layer, b)?;
    }
    let shape = GemmShape { m: b.n, n: VOCAB, k: HIDDEN };
    let (x, w) = (b.normed.as_view(), model.head.as_view());
    kernels.linear(&gpu.blas, Linear { y: Output::F32(b.logits.as_view_mut()), x, w, shape })?;
    kernels.sample(Sample {
        tokens: b.tokens.as_view_mut(),
        logits: b.logits.as_view(),
        rows: b.rows.as_view(),
        scratch: &mut b.sample_scratch,
        vocab: VOCAB,
        filters: Filters::Off,
    })
}

fn linear(
    gpu: &Gpu,
    m: usize,
    y: &mut CudaSlice<bf16>,
    x: &CudaSlice<bf16>,
    w: &CudaSlice<bf16>,
) -> Result<(), KernelError> {
    let shape = GemmShape { m, n: y.len() / m, k: x.len() / m };
    gpu.kernels.linear(&gpu.blas, Linear { y: Output::Bf16(y.as_view_mut()), x: x.as_view(), w: w.as_view(), shape })
}

fn add_norm(gpu: &Gpu, layer: &Layer, b: &mut Batch) -> Result<(), KernelError> {
    gpu.kernels.add_rms_norm(AddRmsNorm {
        out: b.normed.as_view_mut(),
        residual: b.residual.as_view_mut(),
        x: b.update.as_view(),
        weight: layer.norm.as_view(),
        eps: 1e-5,
    })
}

fn attend(gpu: &Gpu, angles: &CudaSlice<f32>, layer: &mut Layer, b: &mut Batch) -> Result<(), KernelError> {
    gpu.kernels.rope_kv(RopeKv {
        qkv: b.qkv.as_view_mut(),
        k_cache: layer.k_cache.as_view_mut(),
        v_cache: layer.v_cache.as_view_mut(),
        bias: None,
        norm: None,
        angles: angles.as_view(),
        positions: b.positions.as_view(),
        slots: b.slots.as_view(),
        heads: HEADS,
    })?;
    gpu.kernels.paged_decode(PagedDecode {
        out: b.attended.as_view_mut(),
        q: b.qkv.as_view(),
        q_stride: HEADS.qkv_width(),
        kv: PagedKv {
            k_cache: layer.k_cache.as_view(),
            v_cache: layer.v_cache.as_view(),
            block_table: b.block_table.as_view(),
            blocks_per_row: CONTEXT / BLOCK_SIZE,
        },
        items: b.items.as_view(),
        scratch: &mut b.decode_scratch,
        heads: HEADS,
        scale: 0.088,
    })
}
