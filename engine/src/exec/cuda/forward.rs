//! Runs the program of a step on the GPU, operation by operation: with the model's weights, its cache and the buffers that a step
//! writes. The same function runs a step eagerly and is recorded into a graph. Which operations there are, and by which kernels,
//! is the program's: `program.rs`.

mod reading;

use std::ops::Range;

use stoker_fit::gpu::Capacity;
use stoker_kernels::{
    CudaSlice, CudaView, Device, KernelError, Kernels,
    attention::{PagedDecode, PagedKv, PagedPrefill},
    bf16,
    blas::Blas,
    cache::LayerCache,
    choose::{Chip, GemmDesc, GemmKernel, Prologue},
    handover::{Handover, copy_between},
    launch::{Epilogue, GemmShape, NormWeight, norm_tiles},
    linear::{Linear, Operand, Output, RowScale, Update},
    packed::{Field, Packed},
    plan::{PrefillTile, SplitPolicy},
    pointwise::{
        AddBias, AddRmsNorm, Embed, FeedTokens, GeluMul, NormChain, NormPart, QkNorm, RmsNorm, RopeKv, SiluMul, Softcap,
    },
    quantise::{QuantiseRows, QuantisedMut, QuantisedNorm, QuantisedRows, WidenInt4},
    ranks::{Exchange, Half, NormOf, SampleShared, SharesSum, Sum},
    sampling::{MarkTokens, Sample, SampleOptions, Selection, Turn},
    table::{ChipTable, Entry},
};

use super::{
    buffers::{Buffers, Stream},
    kv_scales::Scale,
    layout::{StepLayout, StepShape},
    memory::{Angles, Memory},
    program::{Adds, Between, Gemm, Matrix, Norm, Op, Programs, Reads, RowLimits, Rows},
    shape::{ModelShape, QkNorm as NormsOfHeads},
    slots::EntryLayout,
    weights::{Projection, Weights},
};
use crate::model::Activation;

/// A model on the GPU with its cache and everything that a step writes.
#[derive(Debug)]
pub(super) struct Forward {
    kernels: Kernels,
    /// None where all products are our own.
    blas: Option<Blas>,
    chip: Chip,
    rows: RowLimits,
    programs: Programs,
    shape: ModelShape,
    weights: Weights,
    /// Of each set that layers turn by.
    angles: Vec<Angles>,
    /// Per layer.
    cache: Vec<LayerCache>,
    buffers: Buffers,
    /// With the other ranks, if there are some.
    exchange: Option<Exchange>,
}

/// A step's inputs on the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepInputs<'a> {
    pub(super) shape: &'a StepShape,
    pub(super) layout: &'a StepLayout,
    pub(super) packed: &'a Packed,
    /// How decode attention was cut.
    pub(super) policy: SplitPolicy,
}

/// A part of a step's launches, in this order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Part {
    /// Up to where it is about to end.
    Most,
    /// The last layers, and the draw.
    Rest,
}

/// What a model on the GPU is made of.
#[derive(Debug)]
pub(super) struct ForwardParts {
    pub(super) kernels: Kernels,
    pub(super) blas: Option<Blas>,
    pub(super) chip: Chip,
    pub(super) shape: ModelShape,
    pub(super) weights: Weights,
    pub(super) memory: Memory,
}

impl Forward {
    /// Resolves the programs.
    pub(super) fn new(parts: ForwardParts, capacity: &Capacity) -> Self {
        let ForwardParts { kernels, blas, chip, shape, weights, memory } = parts;
        let rows = RowLimits { max_sampled: capacity.max_sampled, max_rows: capacity.max_rows };
        let programs = Programs::new(&shape, &chip, rows);
        let Memory { angles, cache, buffers, exchange } = memory;
        Self { kernels, blas, programs, chip, rows, weights, angles, cache, buffers, exchange, shape }
    }

    /// Tells the ranks of a model where each other's memory is. Nothing was launched yet.
    pub(super) fn connect(ranks: &mut [&mut Self]) {
        let exchanges = ranks.iter_mut().filter_map(|rank| rank.lending());
        Exchange::connect(&mut exchanges.collect::<Vec<_>>());
    }

    /// What it shares with the other ranks, with where they may leave norms.
    fn lending(&mut self) -> Option<&mut Exchange> {
        let exchange = self.exchange.as_mut()?;
        exchange.lend(&self.buffers.stream.normed, &self.buffers.quantised);
        Some(exchange)
    }

    /// The device it runs on.
    pub(super) fn device(&self) -> &Device {
        self.kernels.device()
    }

    /// The logits of drawn row `row`, gathered where ranks have shares of them, copied to the host after everything launched so far has run.
    pub(super) fn logits(&self, row: usize) -> Result<Vec<f32>, KernelError> {
        let vocab = self.shape.vocab;
        self.device().held(&self.buffers.logits.slice(row * vocab..(row + 1) * vocab))
    }

    /// What the last step drew, on the device: tokens, then log-probabilities behind all tokens that there may be.
    pub(super) fn results(&self, n: usize) -> CudaView<'_, u32> {
        self.buffers.sampled.slice(..n)
    }

    /// Loads the code of all products of cuBLASLt in steps that are launched one by one: the library does with the first product,
    /// and waits for the device then. Overwrites the buffers.
    pub(super) fn prepare(&mut self) -> Result<(), KernelError> {
        for n_rows in self.rows.unrecorded() {
            let body = self.programs.body(n_rows);
            let theirs = |op: &&Gemm| matches!(op.kernel, GemmKernel::CublasLt(_)) && op.layer == Some(0);
            for gemm in body.ops.iter().filter_map(Op::gemm).filter(theirs) {
                self.gemm(gemm, gemm.desc.shape.m)?;
            }
        }
        Ok(())
    }

    /// Scales of the cache: of each layer each head's keys, then each one's values.
    pub(super) fn set_kv_scales(&mut self, scales: &[Vec<Scale>]) -> Result<(), KernelError> {
        let device = self.device().clone();
        for (cache, scales) in self.cache.iter_mut().zip(scales) {
            cache.set_scales(&device, &scales.iter().map(|scale| scale.value()).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// The largest numbers, without their scales and in their order, of the cache's first blocks.
    pub(super) fn largest_stored(&self, n_blocks: usize) -> Result<Vec<Vec<f32>>, KernelError> {
        let heads = self.shape.heads;
        let largest = |cache: &LayerCache| cache.largest_stored(self.device(), n_blocks * heads.block_values(), heads);
        self.cache.iter().map(largest).collect()
    }

    /// Launches a whole step.
    pub(super) fn launch(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        self.launch_part(step, Part::Most)?;
        self.launch_part(step, Part::Rest)
    }

    /// Launches a part of it.
    pub(super) fn launch_part(&mut self, step: StepInputs<'_>, part: Part) -> Result<(), KernelError> {
        let body = self.programs.body(step.shape.n_rows);
        let (most, rest) = body.ops.split_at(body.near_end);
        match part {
            Part::Most => self.run(step, most, step.shape.n_rows),
            Part::Rest => {
                self.run(step, rest, step.shape.n_rows)?;
                self.launch_tail(step)
            }
        }
    }

    /// Hands the rows of a step over to the next stage.
    pub(super) fn send_rows(&self, n_rows: usize, to: &mut Handover) -> Result<(), KernelError> {
        to.send(&self.buffers.stream.residual.slice(..n_rows * self.shape.hidden))
    }

    /// Takes the rows of a step from the stage before.
    pub(super) fn take_rows(&mut self, n_rows: usize, from: &mut Handover) -> Result<(), KernelError> {
        from.take(&mut self.buffers.stream.residual.slice_mut(..n_rows * self.shape.hidden))
    }

    /// Leaves the last step's first `n` draws where the first stage finds them, from `slot` on.
    pub(super) fn feed(&self, first: &mut Self, n: usize, slot: usize) -> Result<(), KernelError> {
        let drawn = self.buffers.sampled.slice(..n);
        let target = &mut first.buffers.sampled.slice_mut(slot..slot + n);
        copy_between((self.kernels.device(), &drawn), (first.kernels.device(), target))
    }

    /// Launches what is behind the last layer's K and V.
    pub(super) fn launch_tail(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let tail = self.programs.tail(step.shape.n_sampled, step.shape.sampled);
        self.run(step, &tail, step.shape.n_sampled)?;
        if tail.contains(&Op::KeepDrawn) {
            // The next step begins where every recorded one does, with rows that the stage before hands over there.
            let stream = &mut self.buffers.stream;
            std::mem::swap(&mut stream.residual, &mut stream.update);
        }
        Ok(())
    }

    /// What steps do.
    pub(super) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The model's sizes.
    pub(super) fn model(&self) -> &ModelShape {
        &self.shape
    }

    /// What was measured on this chip.
    pub(super) fn table(&self) -> &ChipTable {
        self.chip.table()
    }

    /// What may be the fastest way.
    pub(super) fn candidates(&self, desc: GemmDesc) -> Vec<Entry> {
        self.chip.candidates(desc)
    }

    /// Chooses by rule from now on.
    pub(super) fn forget_measured(&mut self) {
        self.chip.forget_measured();
        self.programs = Programs::new(&self.shape, &self.chip, self.rows);
    }

    /// Chooses this for the GEMM from now on.
    pub(super) fn set_measured(&mut self, desc: GemmDesc, entry: Entry) {
        self.chip.set_measured(desc, entry);
        self.programs.resolve(&self.shape, &self.chip, desc.shape.m);
    }

    /// Launches operations of `m` rows.
    pub(super) fn run(&mut self, step: StepInputs<'_>, ops: &[Op], m: usize) -> Result<(), KernelError> {
        ops.iter().try_for_each(|op| self.run_op(step, op, m))
    }

    fn run_op(&mut self, step: StepInputs<'_>, op: &Op, m: usize) -> Result<(), KernelError> {
        match *op {
            Op::Embed => self.embed(step),
            Op::Norm(between) => self.norm(between, m),
            Op::Quantise(reads, rows) => self.quantise(reads, rows, m),
            Op::Widen { matrix, layer } => self.widen(matrix, layer),
            Op::Gemm(ref gemm) => self.gemm(gemm, m),
            Op::AddBias { matrix, layer } => self.add_bias(matrix, layer, m),
            Op::Activate => self.activate(m),
            Op::NormQk { layer } => self.norm_qk(layer, m),
            Op::RopeKv { layer } => self.rope_kv(step, layer),
            Op::Attention { layer } => self.attend(step, layer),
            Op::KeepDrawn => self.keep_drawn_rows(step),
            Op::Reduce { half } => self.reduce(half, m),
            Op::Softcap => self.softcap(m),
            Op::Draw => self.draw(step),
        }
    }

    /// Whether only drawn rows go on behind its keys and values.
    fn is_last(&self, layer: usize) -> bool {
        self.shape.stage.is_last() && layer + 1 == self.shape.n_layers()
    }

    fn embed(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, .. } = self;
        let n = step.shape.n_rows;
        kernels.feed_tokens(FeedTokens {
            out: b.tokens.slice_mut(..n),
            sources: step.packed.view(step.layout.sources),
            sampled: b.sampled.as_view(),
        })?;
        kernels.embed(Embed {
            out: b.stream.residual.slice_mut(..n * shape.hidden),
            table: table(weights).as_view(),
            tokens: b.tokens.slice(..n),
            width: shape.hidden,
            scale: shape.embedding_scale,
        })
    }

    /// What is between two GEMMs as a launch of its own.
    fn norm(&mut self, between: Between, m: usize) -> Result<(), KernelError> {
        if let Adds::RanksShares { half, copies_residual } = between.adds {
            return self.norm_shares(between, (half, copies_residual), m);
        }
        if let Some(rows) = between.quantises {
            return self.quantised_norm(between, rows, m);
        }
        let Between { adds, next, .. } = between;
        let Self { kernels, weights, buffers: b, shape, exchange, .. } = self;
        let (width, eps, size) = (shape.hidden, shape.eps, m * shape.hidden);
        let Stream { residual, update, normed, .. } = &mut b.stream;
        let (residual, out) = (residual.slice_mut(..size), normed.slice_mut(..size));
        let next = next.map(|norm| norm_weight(weights, norm).as_view());
        if let Adds::Ranks(half) = adds {
            let norm = NormOf { weight: next.expect("ranks' sums without a norm are rows of their own"), eps };
            return kernels.reduce(shared(exchange), half, m, Sum::Normed { out, residual, norm });
        }
        match (adds, next, shape.norm_weight) {
            (Adds::Nothing, Some(weight), NormWeight::Factor) => {
                kernels.rms_norm(RmsNorm { out, x: residual.as_view(), weight, eps })
            }
            (Adds::Update, Some(weight), NormWeight::Factor) => {
                kernels.add_rms_norm(AddRmsNorm { out, residual, x: update.slice(..size), weight, eps })
            }
            (adds, next, weight) => {
                let after = match adds {
                    Adds::NormedUpdate(norm) => Some(norm_weight(weights, norm).as_view()),
                    Adds::Nothing | Adds::Update | Adds::Ranks(_) | Adds::RanksShares { .. } => None,
                };
                let norm = next.map(|next| (out, next));
                if adds == Adds::Nothing {
                    let x = residual.as_view();
                    return kernels.norm_chain(NormChain { x, after, residual: None, norm, width, weight, eps });
                }
                let x = update.slice(..size);
                kernels.norm_chain(NormChain { x, after, residual: Some(residual), norm, width, weight, eps })
            }
        }
    }

    /// The same where a quantised product is next.
    fn quantised_norm(&mut self, Between { adds, next, .. }: Between, rows: Rows, m: usize) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, exchange, .. } = self;
        let (width, eps, size) = (shape.hidden, shape.eps, m * shape.hidden);
        let Stream { residual, update, .. } = &mut b.stream;
        let weight = norm_weight(weights, next.expect("what is quantised is a norm")).as_view();
        let (residual, x) = match adds {
            Adds::Ranks(half) => {
                let (out, residual) = (b.quantised.rows_mut(m, width), residual.slice_mut(..size));
                let sum = Sum::Quantised { out, residual, norm: NormOf { weight, eps } };
                return kernels.reduce(shared(exchange), half, m, sum);
            }
            Adds::Nothing => (None, residual.slice(..size)),
            Adds::Update => (Some(residual.slice_mut(..size)), update.slice(..size)),
            Adds::NormedUpdate(_) | Adds::RanksShares { .. } => unreachable!("these leave as bf16, or elsewhere"),
        };
        let out = quantised_mut(&mut b.quantised, rows, [m, width]);
        kernels.quantised_norm(QuantisedNorm { out, residual, x, weight, eps })
    }

    /// What all ranks gave, and the norm behind it, each rank of its share of the rows.
    fn norm_shares(
        &mut self,
        Between { next, quantises, .. }: Between,
        (half, copies_residual): (Half, bool),
        m: usize,
    ) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, exchange, .. } = self;
        let weight = norm_weight(weights, next.expect("ranks share out what is normed")).as_view();
        let (residual, norm) = (b.stream.residual.slice_mut(..m * shape.hidden), NormOf { weight, eps: shape.eps });
        let quantises = quantises.is_some();
        kernels.reduce_shares(shared(exchange), half, m, SharesSum { residual, norm, quantises, copies_residual })
    }

    /// What a product reads, to e4m3.
    fn quantise(&mut self, reads: Reads, to: Rows, m: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, .. } = self;
        let (rows, width) = match reads {
            Reads::Residual => (&b.stream.residual, shape.hidden),
            Reads::Normed => (&b.stream.normed, shape.hidden),
            Reads::Attended => (&b.attended, shape.attended_width()),
            Reads::KeptAttended => (&b.gathered, shape.attended_width()),
            Reads::Activated => (&b.activated, shape.inner),
        };
        let (out, x) = (quantised_mut(&mut b.quantised, to, [m, width]), rows.slice(..m * width));
        kernels.quantise_rows(QuantiseRows { out, x, width })
    }

    /// Weights, to e4m3.
    fn widen(&mut self, matrix: Matrix, layer: usize) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, .. } = self;
        let (n, k) = matrix.sizes(shape);
        match projection(weights, matrix, layer).operand() {
            Operand::Int4(w) => kernels.widen_int4(WidenInt4 { out: b.widened.rows_mut(n, k), w }),
            Operand::Bf16(_) | Operand::E4m3(_) | Operand::E4m3Blocks(_) => {
                unreachable!("only weights of four bits are widened")
            }
        }
    }

    /// Multiplies `m` rows.
    fn gemm(&mut self, gemm: &Gemm, m: usize) -> Result<(), KernelError> {
        match gemm.matrix {
            Matrix::Qkv | Matrix::GateUp | Matrix::Head => self.gemm_of_norm(gemm, m),
            Matrix::O | Matrix::Down => self.gemm_into_residual(gemm, m),
        }
    }

    /// `y = norm(residual) * w^T`: of the norm, or of the weighted residual that is scaled behind it.
    fn gemm_of_norm(&mut self, gemm: &Gemm, m: usize) -> Result<(), KernelError> {
        let Self { kernels, blas, weights, buffers: b, shape: model, exchange, .. } = self;
        let shape = GemmShape { m, ..gemm.desc.shape };
        let (size, tile, eps) = (m * shape.n, gemm.squares_tile, model.eps);
        let y = match (gemm.desc.epilogue, gemm.matrix) {
            (Epilogue::F32, _) => Output::F32(match exchange {
                Some(exchange) => exchange.logits_mut().slice_mut(..size),
                None => b.logits.slice_mut(..size),
            }),
            (Epilogue::Gated, _) => Output::Gated(b.activated.slice_mut(..size / 2)),
            (Epilogue::Bf16, Matrix::GateUp) => Output::Bf16(b.gate_up.slice_mut(..size)),
            (Epilogue::Bf16, _) => Output::Bf16(b.qkv.slice_mut(..size)),
            (Epilogue::Sum | Epilogue::Update, _) => unreachable!("only what reads no norm adds to the residual"),
        };
        let Stream { residual, normed, squares, .. } = &b.stream;
        let x = match (gemm.reads_quantised(), gemm.reads) {
            (Some(rows), _) => quantised(&b.quantised, rows, [m, shape.k]),
            (None, Reads::Residual) => Operand::Bf16(residual.slice(..m * shape.k)),
            (None, _) => Operand::Bf16(normed.slice(..m * shape.k)),
        };
        let op = Linear { y, x, w: matrix(weights, &b.widened, gemm, model), shape };
        let scale = match gemm.desc.prologue {
            Prologue::Normed => {
                let weight = norm_weight(weights, gemm.norm.expect("it is of a norm")).as_view();
                return kernels.gemm_quantising(op, Some(NormOf { weight, eps }));
            }
            Prologue::Plain => None,
            Prologue::NormScaled => Some(RowScale { squares: squares.slice(..m * shape.k.div_ceil(tile)), tile, eps }),
        };
        kernels.linear(blas.as_ref(), op, scale, gemm.kernel)
    }

    /// `residual += x * w^T`, or what the norm behind it adds.
    fn gemm_into_residual(&mut self, gemm: &Gemm, m: usize) -> Result<(), KernelError> {
        let Self { kernels, blas, weights, buffers: b, shape: model, exchange, .. } = self;
        let shape = GemmShape { m, ..gemm.desc.shape };
        let x = match gemm.reads {
            Reads::Attended => &b.attended,
            Reads::KeptAttended => &b.gathered,
            Reads::Activated => &b.activated,
            Reads::Residual | Reads::Normed => unreachable!("what is of the residual is not added to it"),
        };
        let (x, w, size) = (x.slice(..m * shape.k), matrix(weights, &b.widened, gemm, model), m * shape.n);
        let Stream { residual, update, normed, squares } = &mut b.stream;
        let y = match gemm.desc.epilogue {
            Epilogue::Bf16 => Output::Bf16(match exchange {
                Some(exchange) => exchange.partial_mut(gemm.matrix.half()).slice_mut(..size),
                None => update.slice_mut(..size),
            }),
            Epilogue::Sum => Output::Sum(residual.slice_mut(..size)),
            Epilogue::Update => {
                let (residual, weighted) = (residual.slice_mut(..size), normed.slice_mut(..size));
                let squares = squares.slice_mut(..m * norm_tiles(shape.n));
                let norm = gemm.norm.expect("an update is for a norm");
                let norm = norm_weight(weights, norm).as_view();
                return kernels.update(Update { residual, weighted, squares, norm, x, w, shape }, gemm.kernel);
            }
            Epilogue::F32 | Epilogue::Gated => unreachable!("what is added to the residual is as wide"),
        };
        let x = match gemm.reads_quantised() {
            Some(rows) => quantised(&b.quantised, rows, [m, shape.k]),
            None => Operand::Bf16(x),
        };
        kernels.linear(blas.as_ref(), Linear { y, x, w, shape }, None, gemm.kernel)
    }

    fn add_bias(&mut self, matrix: Matrix, layer: usize, m: usize) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, .. } = self;
        let layer = &weights.layers[layer];
        let (x, bias) = match matrix {
            Matrix::O => (&mut b.stream.update, &layer.o_bias),
            Matrix::GateUp => (&mut b.gate_up, &layer.gate_up_bias),
            Matrix::Down => (&mut b.stream.update, &layer.down_bias),
            Matrix::Qkv | Matrix::Head => unreachable!("these biases are added elsewhere, or are not"),
        };
        let bias = bias.as_ref().expect("the program adds biases that are there");
        kernels.add_bias(AddBias { x: x.slice_mut(..m * bias.len()), bias: bias.as_view() })
    }

    fn activate(&mut self, m: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, .. } = self;
        let width = shape.inner;
        let (out, gate_up) = (b.activated.slice_mut(..m * width), b.gate_up.slice(..2 * m * width));
        match shape.block.activation {
            Activation::Silu => kernels.silu_mul(SiluMul { out, gate_up, width }),
            Activation::GeluTanh => kernels.gelu_mul(GeluMul { out, gate_up, width }),
        }
    }

    /// Queries, then keys: parts of the fused rows.
    fn norm_qk(&mut self, layer: usize, m: usize) -> Result<(), KernelError> {
        let Self { kernels, weights, buffers: b, shape, .. } = self;
        let (q, k) = weights.layers[layer].qk_norm.as_ref().expect("the program norms what has weights");
        let (stride, eps) = (shape.heads.qkv_width(), shape.eps);
        for (first, weight) in [(0, q), (shape.attended_width(), k)] {
            let rows = b.qkv.slice_mut(..m * stride);
            kernels.norm_part(NormPart { rows, stride, first, weight: weight.as_view(), eps })?;
        }
        Ok(())
    }

    /// What all ranks gave, to what is added to the residual.
    fn reduce(&mut self, half: Half, m: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, exchange, .. } = self;
        kernels.reduce(shared(exchange), half, m, Sum::Plain(b.stream.update.slice_mut(..m * shape.hidden)))
    }

    /// Brings the logits of `m` drawn rows from the other ranks, where there are some, for who looks at whole rows.
    pub(super) fn gather_logits(&mut self, m: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, exchange, .. } = self;
        match exchange {
            Some(exchange) => kernels.gather_logits(exchange, m, shape.vocab, b.logits.slice_mut(..m * shape.vocab)),
            None => Ok(()),
        }
    }

    fn softcap(&mut self, m: usize) -> Result<(), KernelError> {
        let Self { kernels, buffers: b, shape, exchange, .. } = self;
        let cap = shape.logit_softcap.expect("the program bounds where there is a bound");
        let logits = exchange.as_mut().map_or(&mut b.logits, Exchange::logits_mut);
        kernels.softcap(Softcap { logits: logits.slice_mut(..m * shape.own_tokens().len()), cap })
    }

    fn rope_kv(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        let n = step.shape.n_rows;
        let Self { kernels, weights, angles, cache, buffers: b, shape, .. } = self;
        let layer = &weights.layers[idx];
        let norm = layer.qk_norm.as_ref().filter(|_| shape.block.qk_norm == NormsOfHeads::EveryHead);
        kernels.rope_kv(RopeKv {
            qkv: b.qkv.slice_mut(..n * shape.heads.qkv_width()),
            cache: &mut cache[idx],
            bias: layer.qkv_bias.as_ref().map(CudaSlice::as_view),
            norm: norm.map(|(q, k)| QkNorm {
                q_weight: q.as_view(),
                k_weight: k.as_view(),
                weight: shape.norm_weight,
                eps: shape.eps,
            }),
            rotary: shape.layers[idx].rope_set.map(|set| angles[set].rotary()),
            positions: step.packed.view(step.layout.positions),
            slots: step.packed.view(step.layout.slots),
            heads: shape.heads,
        })
    }

    fn attend(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        self.attend_decodes(step, idx)?;
        if !self.is_last(idx) {
            return self.attend_prefills(step, step.layout.tiles, idx);
        }
        self.attend_prefills(step, step.layout.drawn_tiles, idx)
    }

    /// Drawn rows of the residual and of what attention gave come to the front.
    fn keep_drawn_rows(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let (n, m) = (step.shape.n_rows, step.shape.n_sampled);
        let shares_rows = self.programs.body(n).shares_rows;
        let Self { kernels, buffers: b, shape, exchange, .. } = self;
        let gather = |out: &mut CudaSlice<bf16>, table: &CudaSlice<bf16>, width: usize| {
            kernels.embed(Embed {
                out: out.slice_mut(..m * width),
                table: table.slice(..n * width),
                tokens: step.packed.view(step.layout.listed),
                width,
                scale: None,
            })
        };
        gather(&mut b.gathered, &b.attended, shape.attended_width())?;
        let residual = exchange.as_ref().filter(|_| shares_rows).map(|exchange| exchange.partial(Half::FeedForward));
        gather(&mut b.stream.update, residual.unwrap_or(&b.stream.residual), shape.hidden)?;
        // Both hold nothing yet that outlives a step, and both have room for the largest. (Norms stay where other ranks write them.)
        std::mem::swap(&mut b.stream.residual, &mut b.stream.update);
        Ok(())
    }

    fn attend_decodes(&mut self, step: StepInputs<'_>, idx: usize) -> Result<(), KernelError> {
        if step.layout.items.is_empty() {
            return Ok(());
        }
        let n = step.shape.n_decode;
        let Self { kernels, cache, buffers: b, shape, .. } = self;
        kernels.paged_decode(PagedDecode {
            out: b.attended.slice_mut(..n * shape.attended_width()),
            q: b.qkv.slice(..n * shape.heads.qkv_width()),
            q_stride: shape.heads.qkv_width(),
            kv: paged_kv(&cache[idx], step),
            items: step.packed.view(step.layout.items),
            readers: step.packed.view(step.layout.readers),
            scratch: &mut b.decode_scratch,
            policy: step.policy,
            spec: shape.attention(idx),
        })
    }

    fn attend_prefills(
        &mut self,
        step: StepInputs<'_>,
        tiles: Field<PrefillTile>,
        idx: usize,
    ) -> Result<(), KernelError> {
        if tiles.is_empty() {
            return Ok(());
        }
        let n = step.shape.n_rows;
        let Self { kernels, cache, buffers: b, shape, .. } = self;
        kernels.paged_prefill(PagedPrefill {
            out: b.attended.slice_mut(..n * shape.attended_width()),
            q: b.qkv.slice(..n * shape.heads.qkv_width()),
            q_stride: shape.heads.qkv_width(),
            kv: paged_kv(&cache[idx], step),
            tiles: step.packed.view(tiles),
            scratch: &mut b.prefill_scratch,
            spec: shape.attention(idx),
        })
    }

    /// Takes newcomers into their slots.
    pub(super) fn enter_slots(&mut self, packed: &Packed, layout: EntryLayout) -> Result<(), KernelError> {
        self.kernels.mark_tokens(MarkTokens {
            marks: &mut self.buffers.marks,
            entries: packed.view(layout.entries),
            histories: packed.view(layout.histories),
            edits: packed.view(layout.edits),
        })
    }

    /// Draws a token for each row without options.
    fn draw(&mut self, step: StepInputs<'_>) -> Result<(), KernelError> {
        let m = step.shape.n_sampled;
        if m == 0 {
            return Ok(());
        }
        let Self { kernels, buffers: b, shape, exchange, .. } = self;
        let (tokens, rows) = (b.sampled.slice_mut(..m), step.packed.view(step.layout.rows));
        let scratch = &mut b.sample_scratch;
        if let Some(exchange) = exchange {
            return kernels.sample_shared(exchange, SampleShared { tokens, rows, own: shape.own_tokens(), scratch });
        }
        let logits = b.logits.slice(..m * shape.vocab);
        kernels.sample(Sample { tokens, logits, rows, scratch, vocab: shape.vocab })
    }

    /// Draws a token for each row with options whose turn it is.
    pub(super) fn draw_options(
        &mut self,
        step: StepInputs<'_>,
        turn: Turn<'_>,
        selection: Selection,
    ) -> Result<(), KernelError> {
        let m = step.shape.n_sampled;
        self.gather_logits(m)?;
        let b = &mut self.buffers;
        let (mut tokens, logprobs) = b.sampled.split_at_mut(b.max_sampled);
        self.kernels.sample_options(SampleOptions {
            tokens: tokens.slice_mut(..m),
            logprobs,
            logits: b.logits.slice(..m * self.shape.vocab),
            rows: step.packed.view(step.layout.rows),
            marks: &mut b.marks,
            turn,
            selection,
            scratch: &mut b.sample_scratch,
        })
    }
}

fn quantised(buffer: &QuantisedRows, rows: Rows, [m, width]: [usize; 2]) -> Operand<'_> {
    Operand::E4m3(match rows {
        Rows::Plain => buffer.rows(m, width),
        Rows::BesideCodes => buffer.rows_beside_codes(m, width),
    })
}

fn quantised_mut(buffer: &mut QuantisedRows, rows: Rows, [m, width]: [usize; 2]) -> QuantisedMut<'_> {
    match rows {
        Rows::Plain => buffer.rows_mut(m, width),
        Rows::BesideCodes => buffer.rows_beside_codes_mut(m, width),
    }
}

fn shared(exchange: &mut Option<Exchange>) -> &mut Exchange {
    exchange.as_mut().expect("the program of a model that ranks share")
}

fn paged_kv<'a>(cache: &'a LayerCache, step: StepInputs<'a>) -> PagedKv<'a> {
    PagedKv { cache, block_table: step.packed.view(step.layout.table), blocks_per_row: step.shape.blocks_per_row }
}

/// What a product multiplies with.
fn matrix<'a>(weights: &'a Weights, widened: &'a QuantisedRows, gemm: &Gemm, shape: &ModelShape) -> Operand<'a> {
    let Some(layer) = gemm.layer else {
        let tied = || {
            let Range { start, end } = shape.own_tokens();
            table(weights).slice(start * shape.hidden..end * shape.hidden)
        };
        return weights.lm_head.as_ref().map_or_else(tied, CudaSlice::as_view).into();
    };
    if gemm.reads_widened(shape) {
        let GemmShape { n, k, .. } = gemm.desc.shape;
        return Operand::E4m3(widened.rows(n, k));
    }
    projection(weights, gemm.matrix, layer).operand()
}

/// The embedding table.
fn table(weights: &Weights) -> &CudaSlice<bf16> {
    weights.embed.as_ref().expect("who looks tokens up, or has it as a head, has the table")
}

fn projection(weights: &Weights, matrix: Matrix, layer: usize) -> &Projection {
    let layer = &weights.layers[layer];
    match matrix {
        Matrix::Qkv => &layer.qkv,
        Matrix::O => &layer.o,
        Matrix::GateUp => &layer.gate_up,
        Matrix::Down => &layer.down,
        Matrix::Head => unreachable!("the head is of no layer"),
    }
}

fn norm_weight(weights: &Weights, norm: Norm) -> &CudaSlice<bf16> {
    let layers = &weights.layers;
    let weight = match norm {
        Norm::BeforeAttention { layer } => &layers[layer].before_attention,
        Norm::AfterAttention { layer } => &layers[layer].after_attention,
        Norm::BeforeFeedForward { layer } => &layers[layer].before_feed_forward,
        Norm::AfterFeedForward { layer } => &layers[layer].after_feed_forward,
        Norm::Final => &weights.norm,
    };
    weight.as_ref().expect("the program norms where there is a norm")
}
