//! A whole decode step of a Llama, random weights, from these kernels in the order in which an executor launches them. Run
//! one by one and as a graph it must give the same bits: kernels that start before the one in front has ended (`common.cuh`)
//! may not see anything half-written. `kernel-bench` times the same step. Not an engine: nothing is planned between steps.

use super::{Gpu, Outcome};
use crate::{
    CudaSlice, CudaView, KernelError,
    attention::{DecodeScratch, PagedDecode, PagedKv, ScratchSize},
    bf16,
    gated::Gated,
    launch::{AttentionSpec, BLOCK_SIZE, GemmShape, Heads, Left, NORM_TILE, OutputType, norm_tiles},
    linear::{Linear, Output},
    plan::{self, SplitPolicy},
    pointwise::{AddRmsNorm, Embed, RmsNorm, RopeKv, Rotary, angle_table},
    sampling::{Sample, SampleRow, SampleScratch},
    skinny::{RowScale, Update},
};

const EPS: f32 = 1e-5;

/// Sizes of a model and of the context of every sequence.
#[derive(Clone, Copy, Debug)]
pub struct StepShape {
    /// Attention heads; hidden width is query heads x dim.
    pub heads: Heads,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Layers.
    pub n_layers: usize,
    /// Tokens of each sequence, the new one included.
    pub context: usize,
}

impl StepShape {
    fn hidden(self) -> usize {
        self.heads.n_q * self.heads.dim
    }

    /// Bytes that a step of `n` sequences must read: all weights and all KV.
    pub fn bytes(self, n: usize) -> usize {
        let layer = self.hidden() * (self.heads.qkv_width() + self.hidden() + 3 * self.intermediate);
        let kv = n * self.context * self.n_layers * 2 * self.heads.n_kv * self.heads.dim;
        2 * (self.n_layers * layer + self.hidden() * self.vocab + kv)
    }
}

#[derive(Debug)]
struct Layer {
    qkv: CudaSlice<bf16>,
    o: CudaSlice<bf16>,
    gate_up: CudaSlice<bf16>,
    down: CudaSlice<bf16>,
    norm: CudaSlice<bf16>,
    k_cache: CudaSlice<bf16>,
    v_cache: CudaSlice<bf16>,
}

/// Weights and caches.
#[derive(Debug)]
pub struct Model {
    shape: StepShape,
    layers: Vec<Layer>,
    table: CudaSlice<bf16>,
    head: CudaSlice<bf16>,
    angles: CudaSlice<f32>,
}

/// One batch's activations and the plan of its step.
#[derive(Debug)]
pub struct Batch {
    n: usize,
    /// What the last product left of the residual stream.
    left: Left,
    /// Values of a sum of squares, as it said.
    tile: usize,
    residual: CudaSlice<bf16>,
    /// The residual's norm, or the weighted residual.
    normed: CudaSlice<bf16>,
    squares: CudaSlice<f32>,
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
    readers: CudaSlice<plan::DecodeReader>,
    decode_scratch: DecodeScratch,
    sample_scratch: SampleScratch,
}

impl Model {
    /// Random weights, and KV for `largest` sequences.
    pub fn new(gpu: &mut Gpu, shape: StepShape, largest: usize) -> Result<Self, KernelError> {
        let inv_freq: Vec<f64> =
            (0..shape.heads.dim / 2).map(|i| 5e5f64.powf(-2.0 * i as f64 / shape.heads.dim as f64)).collect();
        let cache = largest * shape.context / BLOCK_SIZE * shape.heads.block_values();
        let mut layer = || {
            Ok(Layer {
                qkv: gpu.random(shape.hidden() * shape.heads.qkv_width())?,
                o: gpu.random(shape.hidden() * shape.hidden())?,
                gate_up: gpu.random(shape.hidden() * 2 * shape.intermediate)?,
                down: gpu.random(shape.hidden() * shape.intermediate)?,
                norm: gpu.random(shape.hidden())?,
                k_cache: gpu.random(cache)?,
                v_cache: gpu.random(cache)?,
            })
        };
        let layers = (0..shape.n_layers).map(|_| layer()).collect::<Result<_, KernelError>>()?;
        let (table, head) = (gpu.random(shape.hidden() * shape.vocab)?, gpu.random(shape.hidden() * shape.vocab)?);
        Ok(Self { shape, layers, table, head, angles: gpu.upload(&angle_table(shape.context, &inv_freq, 1.0))? })
    }
}

impl Batch {
    /// `n` sequences at the end of their context.
    pub fn new(gpu: &mut Gpu, shape: StepShape, n: usize) -> Result<Self, KernelError> {
        let policy = SplitPolicy::Balanced { n_slots: n_slots(gpu) };
        let blocks = shape.context / BLOCK_SIZE;
        let order = gpu.noise.permutation(n * blocks);
        let contexts = order.chunks(blocks).map(|blocks| plan::Context { n_tokens: shape.context, blocks });
        let plan = plan::plan_decode(&contexts.collect::<Vec<_>>(), shape.heads, policy);
        let slots: Vec<i32> = order.chunks(blocks).map(|row| row[blocks - 1] * BLOCK_SIZE as i32 + 15).collect();
        let size = ScratchSize { n_sequences: n, n_items: plan.items.len(), policy, heads: shape.heads };
        Ok(Self {
            n,
            left: Left::Residual,
            tile: NORM_TILE,
            residual: gpu.random(n * shape.hidden())?,
            normed: gpu.random(n * shape.hidden())?,
            squares: gpu.upload(&vec![0.0; n * norm_tiles(shape.hidden())])?,
            qkv: gpu.random(n * shape.heads.qkv_width())?,
            attended: gpu.random(n * shape.hidden())?,
            update: gpu.random(n * shape.hidden())?,
            gate_up: gpu.random(n * 2 * shape.intermediate)?,
            activated: gpu.random(n * shape.intermediate)?,
            logits: gpu.upload(&vec![0.0; n * shape.vocab])?,
            tokens: gpu.upload(&vec![1; n])?,
            rows: gpu.upload(&vec![SampleRow::GREEDY; n])?,
            positions: gpu.upload(&vec![shape.context as i32 - 1; n])?,
            slots: gpu.upload(&slots)?,
            block_table: gpu.upload(&order)?,
            items: gpu.upload(&plan.items)?,
            readers: gpu.upload(&plan.readers)?,
            decode_scratch: DecodeScratch::new(gpu.stream(), size)?,
            sample_scratch: SampleScratch::new(gpu.kernels.device(), n)?,
        })
    }
}

/// Chooses how every product of a step is multiplied, as an executor does at its start. Changes the batch's residual.
pub fn tune(gpu: &Gpu, model: &Model, b: &mut Batch) -> Result<(), KernelError> {
    let (m, shape) = (b.n, model.shape);
    let layer = &model.layers[0];
    let others = |part: fn(&Layer) -> &CudaSlice<bf16>| {
        model.layers[1..].iter().take(2).map(|layer| part(layer).as_view()).collect::<Vec<_>>()
    };
    let (x, w) = (b.normed.as_view(), layer.qkv.as_view());
    let size = GemmShape { m, n: b.qkv.len() / m, k: shape.hidden() };
    let qkv = Linear { y: Output::Bf16(b.qkv.as_view_mut()), x, w, shape: size };
    gpu.kernels.tune_linear(&gpu.blas, qkv, &others(|layer| &layer.qkv))?;
    tune_update(gpu, b, Half::Attention, (&layer.o, &layer.norm), &others(|layer| &layer.o))?;
    let (out, gate_up) = (b.activated.as_view_mut(), b.gate_up.as_view_mut());
    let size = GemmShape { m, n: gate_up.len() / m, k: shape.hidden() };
    let gated = Gated { out, gate_up, x: b.normed.as_view(), w: layer.gate_up.as_view(), shape: size };
    gpu.kernels.tune_gated(&gpu.blas, gated, &others(|layer| &layer.gate_up))?;
    tune_update(gpu, b, Half::Mlp, (&layer.down, &layer.norm), &others(|layer| &layer.down))?;
    let size = GemmShape { m, n: shape.vocab, k: shape.hidden() };
    let (x, w) = (b.normed.as_view(), model.head.as_view());
    gpu.kernels.tune_linear(&gpu.blas, Linear { y: Output::F32(b.logits.as_view_mut()), x, w, shape: size }, &[])
}

fn tune_update(
    gpu: &Gpu,
    b: &mut Batch,
    half: Half,
    (w, norm): (&CudaSlice<bf16>, &CudaSlice<bf16>),
    others: &[CudaView<'_, bf16>],
) -> Result<(), KernelError> {
    let x = match half {
        Half::Attention => b.attended.as_view(),
        Half::Mlp => b.activated.as_view(),
    };
    let (shape, w) = (GemmShape { m: b.n, n: norm.len(), k: x.len() / b.n }, w.as_view());
    if Left::of_update(shape, gpu.kernels.properties()) != Left::Weighted {
        let y = Output::Bf16(b.update.as_view_mut());
        return gpu.kernels.tune_linear(&gpu.blas, Linear { y, x, w, shape }, others);
    }
    let (residual, weighted, squares) = (b.residual.as_view_mut(), b.normed.as_view_mut(), b.squares.as_view_mut());
    gpu.kernels.tune_update(Update { residual, weighted, squares, norm: norm.as_view(), x, w, shape }, others)
}

/// Whether the device is waited for between launches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Between {
    /// Launches overlap as they will.
    Nothing,
    /// Each ends before the next begins.
    Wait,
}

/// Launches one step. The tokens it draws are those that the next one embeds.
pub fn launch(gpu: &Gpu, model: &mut Model, b: &mut Batch, between: Between) -> Result<(), KernelError> {
    let (kernels, shape) = (&gpu.kernels, model.shape);
    let pause = || match between {
        Between::Nothing => Ok(()),
        Between::Wait => gpu.stream().synchronize().map_err(KernelError::driver("wait for the device")),
    };
    let (out, width) = (b.residual.as_view_mut(), shape.hidden());
    kernels.embed(Embed { out, table: model.table.as_view(), tokens: b.tokens.as_view(), width, scale: None })?;
    b.left = Left::Residual;
    for idx in 0..model.layers.len() {
        project(gpu, model, b, idx, &pause)?;
        pause()?;
        rope(gpu, shape, &model.angles, &mut model.layers[idx], b)?;
        pause()?;
        let layer = &model.layers[idx];
        attend(gpu, shape, layer, b)?;
        pause()?;
        update(gpu, b, Half::Attention, (&layer.o, &layer.norm))?;
        feed_forward(gpu, layer, b, &pause)?;
        pause()?;
        update(gpu, b, Half::Mlp, (&layer.down, &model.layers[(idx + 1) % model.layers.len()].norm))?;
    }
    head(gpu, model, b, &pause)?;
    pause()?;
    kernels.sample(Sample {
        tokens: b.tokens.as_view_mut(),
        logits: b.logits.as_view(),
        rows: b.rows.as_view(),
        scratch: &mut b.sample_scratch,
        vocab: shape.vocab,
    })
}

fn project(
    gpu: &Gpu,
    model: &Model,
    b: &mut Batch,
    idx: usize,
    pause: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let layer = &model.layers[idx];
    let shape = GemmShape { m: b.n, n: b.qkv.len() / b.n, k: layer.norm.len() };
    let is_scaled = norm(gpu, b, &layer.norm, (shape, OutputType::Bf16), pause)?;
    let (y, x, w) = (Output::Bf16(b.qkv.as_view_mut()), b.normed.as_view(), layer.qkv.as_view());
    normed(gpu, Linear { y, x, w, shape }, is_scaled.then(|| scale(&b.squares, b.tile, shape)))
}

fn feed_forward(
    gpu: &Gpu,
    layer: &Layer,
    b: &mut Batch,
    pause: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let shape = GemmShape { m: b.n, n: b.gate_up.len() / b.n, k: layer.norm.len() };
    let is_scaled = norm(gpu, b, &layer.norm, (shape, OutputType::Activated), pause)?;
    let (x, w) = (b.normed.as_view(), layer.gate_up.as_view());
    if is_scaled {
        let y = Output::Activated(b.activated.as_view_mut());
        return normed(gpu, Linear { y, x, w, shape }, Some(scale(&b.squares, b.tile, shape)));
    }
    let (out, gate_up) = (b.activated.as_view_mut(), b.gate_up.as_view_mut());
    gpu.kernels.gated(&gpu.blas, Gated { out, gate_up, x, w, shape })
}

fn head(
    gpu: &Gpu,
    model: &Model,
    b: &mut Batch,
    pause: &dyn Fn() -> Result<(), KernelError>,
) -> Result<(), KernelError> {
    let weight = &model.layers[0].norm;
    let shape = GemmShape { m: b.n, n: model.shape.vocab, k: weight.len() };
    let is_scaled = norm(gpu, b, weight, (shape, OutputType::F32), pause)?;
    let (y, x, w) = (Output::F32(b.logits.as_view_mut()), b.normed.as_view(), model.head.as_view());
    normed(gpu, Linear { y, x, w, shape }, is_scaled.then(|| scale(&b.squares, b.tile, shape)))
}

/// The norm as a launch of its own, unless the product behind it scales its result; whether it does.
fn norm(
    gpu: &Gpu,
    b: &mut Batch,
    weight: &CudaSlice<bf16>,
    (shape, output): (GemmShape, OutputType),
    pause: &dyn Fn() -> Result<(), KernelError>,
) -> Result<bool, KernelError> {
    let (out, weight, eps) = (b.normed.as_view_mut(), weight.as_view(), EPS);
    pause()?;
    match b.left {
        Left::Weighted if gpu.kernels.scales(shape, output) => return Ok(true),
        Left::Weighted | Left::Residual => {
            gpu.kernels.rms_norm(RmsNorm { out, x: b.residual.as_view(), weight, eps })?;
        }
        Left::Result => {
            let (x, residual) = (b.update.as_view(), b.residual.as_view_mut());
            gpu.kernels.add_rms_norm(AddRmsNorm { out, residual, x, weight, eps })?;
        }
    }
    pause()?;
    Ok(false)
}

/// The product of a norm, or of the weighted residual.
fn normed(gpu: &Gpu, op: Linear<'_>, scale: Option<RowScale<'_>>) -> Result<(), KernelError> {
    match scale {
        Some(scale) => gpu.kernels.scaled(op, scale),
        None => gpu.kernels.linear(&gpu.blas, op),
    }
}

fn scale(squares: &CudaSlice<f32>, tile: usize, shape: GemmShape) -> RowScale<'_> {
    RowScale { squares: squares.slice(..shape.m * shape.k.div_ceil(tile)), tile, eps: EPS }
}

/// What ends in the residual stream.
enum Half {
    Attention,
    Mlp,
}

fn update(
    gpu: &Gpu,
    b: &mut Batch,
    half: Half,
    (w, norm): (&CudaSlice<bf16>, &CudaSlice<bf16>),
) -> Result<(), KernelError> {
    let x = match half {
        Half::Attention => b.attended.as_view(),
        Half::Mlp => b.activated.as_view(),
    };
    let shape = GemmShape { m: b.n, n: norm.len(), k: x.len() / b.n };
    let (residual, w) = (b.residual.as_view_mut(), w.as_view());
    b.left = Left::of_update(shape, gpu.kernels.properties());
    let y = match b.left {
        Left::Result => Output::Bf16(b.update.as_view_mut()),
        Left::Residual => Output::Sum(residual),
        Left::Weighted => {
            let (weighted, squares, norm) = (b.normed.as_view_mut(), b.squares.as_view_mut(), norm.as_view());
            b.tile = gpu.kernels.update(Update { residual, weighted, squares, norm, x, w, shape })?;
            return Ok(());
        }
    };
    gpu.kernels.linear(&gpu.blas, Linear { y, x, w, shape })
}

fn rope(
    gpu: &Gpu,
    shape: StepShape,
    angles: &CudaSlice<f32>,
    layer: &mut Layer,
    b: &mut Batch,
) -> Result<(), KernelError> {
    gpu.kernels.rope_kv(RopeKv {
        qkv: b.qkv.as_view_mut(),
        k_cache: layer.k_cache.as_view_mut(),
        v_cache: layer.v_cache.as_view_mut(),
        bias: None,
        norm: None,
        rotary: Some(Rotary { angles: angles.as_view(), n_pairs: shape.heads.dim / 2 }),
        positions: b.positions.as_view(),
        slots: b.slots.as_view(),
        heads: shape.heads,
    })
}

fn n_slots(gpu: &Gpu) -> usize {
    2 * gpu.kernels.properties().n_multiprocessors as usize
}

fn attend(gpu: &Gpu, shape: StepShape, layer: &Layer, b: &mut Batch) -> Result<(), KernelError> {
    gpu.kernels.paged_decode(PagedDecode {
        out: b.attended.as_view_mut(),
        q: b.qkv.as_view(),
        q_stride: shape.heads.qkv_width(),
        kv: PagedKv {
            k_cache: layer.k_cache.as_view(),
            v_cache: layer.v_cache.as_view(),
            block_table: b.block_table.as_view(),
            blocks_per_row: shape.context / BLOCK_SIZE,
        },
        items: b.items.as_view(),
        readers: b.readers.as_view(),
        policy: SplitPolicy::Balanced { n_slots: n_slots(gpu) },
        scratch: &mut b.decode_scratch,
        spec: AttentionSpec::plain(shape.heads, 1.0 / (shape.heads.dim as f32).sqrt()),
    })
}

/// Small layers with head widths and group sizes of real models, one batch for each of the ways to multiply.
pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let heads = [Heads { n_q: 8, n_kv: 2, dim: 128 }, Heads { n_q: 14, n_kv: 2, dim: 64 }];
    let mut outcomes = Vec::new();
    for heads in heads {
        let shape = StepShape { heads, intermediate: 2816, vocab: 5003, n_layers: 6, context: 272 };
        for n in [1, 8, 32, 33] {
            outcomes.push(overlap(gpu, shape, n)?);
        }
    }
    Ok(outcomes)
}

/// Twenty replays of three steps each must end like three steps launched one by one.
fn overlap(gpu: &mut Gpu, shape: StepShape, n: usize) -> Result<Outcome, KernelError> {
    const STEPS: usize = 3;
    let (mut model, mut batch) = (Model::new(gpu, shape, n)?, Batch::new(gpu, shape, n)?);
    let first = vec![1; n];
    for _ in 0..STEPS {
        launch(gpu, &mut model, &mut batch, Between::Wait)?;
    }
    let wanted = (bits(gpu, &batch)?, gpu.download(&batch.tokens)?);
    let mut graph =
        gpu.capture(|gpu| (0..STEPS).try_for_each(|_| launch(gpu, &mut model, &mut batch, Between::Nothing)))?;
    let mut n_wrong = 0;
    for _ in 0..20 {
        gpu.overwrite(&mut batch.tokens, &first)?;
        graph.launch()?;
        let found = (bits(gpu, &batch)?, gpu.download(&batch.tokens)?);
        n_wrong += usize::from(found != wanted);
    }
    let case = format!("{n} sequences, {} / {} heads of {}", shape.heads.n_q, shape.heads.n_kv, shape.heads.dim);
    Ok(Outcome { op: "decode_step", case, error: n_wrong as f64, limit: 0.0 })
}

fn bits(gpu: &Gpu, batch: &Batch) -> Result<Vec<u32>, KernelError> {
    Ok(gpu.download(&batch.logits)?.into_iter().map(f32::to_bits).collect())
}
