//! The program of a step: its operations in order, with the kernel of every GEMM and whether norms, additions and the activation
//! are inside of it. Resolved before serving, for each bucket of rows; what is launched, recorded, timed and printed is this. A
//! pure function of the model, the chip and the buckets.
//!
//! ```text
//! body, all rows:     embed; for each layer: qkv = before(residual) Wqkv; rope and KV; attention; residual += after(attended Wo);
//!                     activated = act(before(residual) Wgate_up); residual += after(activated Wdown).
//!                     The last layer ends behind its KV. A stage behind another one has that one's residual in place of an embedding,
//!                     one before another one has all of its last layer, and no tail.
//! tail, drawn rows:   the rest of the last layer; logits = norm(residual) Whead; draw
//! ```
//!
//! Norms that a family has not are not there: `before` or `after` is then what it is of. Of several GPUs each has a share of heads, of
//! the feed-forward and of the vocabulary: what the two halves of a layer give is added up where it is added to the residual.

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc};

use stoker_kernels::{
    choose::{Chip, GemmDesc, GemmKernel, Operands, Prologue, QuantisedBy, WeightFormat},
    launch::{Epilogue, GemmShape, NormWeight},
    ranks::Half,
};

use super::{
    layout::{Sampled, buckets, prefill_sizes, prompt_buckets},
    shape::{Biases, ModelShape, QkNorm},
};
use crate::model::Activation;

/// One launch; two where attention has both decodes and prompts, and where both queries and keys are normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// The residual of each row's token.
    Embed,
    /// What is between two GEMMs of the residual stream and not inside of them.
    Norm(Between),
    /// What a quantised product reads, where no norm leaves it so.
    Quantise(Reads, Rows),
    /// Weights of four bits to e4m3, for the GEMM behind.
    Widen {
        matrix: Matrix,
        layer: usize,
    },
    /// y = x * w^T.
    Gemm(Gemm),
    /// The bias of what a GEMM gave.
    AddBias {
        matrix: Matrix,
        layer: usize,
    },
    /// The activation of gate and up that is not inside of a GEMM.
    Activate,
    /// Norms of all queries of a row, and of all its keys.
    NormQk {
        layer: usize,
    },
    /// Biases, norms of heads, rotation; K and V into the cache.
    RopeKv {
        layer: usize,
    },
    Attention {
        layer: usize,
    },
    /// Drawn rows of the residual and of what attention gave come to the front.
    KeepDrawn,
    /// What all ranks gave in a half of a layer is added up, where more than an addition and a norm stand behind it.
    Reduce {
        half: Half,
    },
    /// Bounds logits.
    Softcap,
    /// A token for each row of logits.
    Draw,
}

/// A norm of the residual stream, by its weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Norm {
    BeforeAttention { layer: usize },
    AfterAttention { layer: usize },
    BeforeFeedForward { layer: usize },
    AfterFeedForward { layer: usize },
    Final,
}

/// What is done with the residual stream between two GEMMs, in this order; each part is there or not.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Between {
    /// What the GEMM in front gave is added to the residual.
    pub(super) adds: Adds,
    /// The norm of the residual.
    pub(super) next: Option<Norm>,
    /// The norm leaves quantised, for a product that wants it so.
    pub(super) quantises: Option<Rows>,
}

/// How rows of e4m3 lie.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rows {
    /// In the order of columns.
    Plain,
    /// As products with weights of four bits want them.
    BesideCodes,
}

/// What is added to the residual.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Adds {
    Nothing,
    Update,
    NormedUpdate(Norm),
    /// What all ranks gave in a half of the layer.
    Ranks(Half),
    /// The same of rows that ranks share out: each has the residual of its own, and all have the norms.
    RanksShares {
        half: Half,
        /// All get the residual of all rows besides.
        copies_residual: bool,
    },
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Matrix {
    Qkv,
    O,
    GateUp,
    Down,
    Head,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gemm {
    pub(super) matrix: Matrix,
    /// None for the head.
    pub(super) layer: Option<usize>,
    /// At the bucket's rows.
    pub(super) desc: GemmDesc,
    pub(super) kernel: GemmKernel,
    pub(super) reads: Reads,
    /// The norm that an update leaves the weighted residual for, or that a product finds of the residual.
    pub(super) norm: Option<Norm>,
    /// Values that each sum of squares is of that scales it.
    pub(super) squares_tile: usize,
}

/// The x of a GEMM.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reads {
    /// Of a family without norms in front.
    Residual,
    /// The norm of the residual, or the weighted residual.
    Normed,
    Attended,
    /// What was kept of it for drawn rows.
    KeptAttended,
    Activated,
}

/// The programs of all steps.
#[derive(Debug)]
pub(super) struct Programs {
    /// Rows that may be drawn in a step.
    max_sampled: usize,
    bodies: BTreeMap<usize, Arc<Body>>,
    /// Where every row is drawn, and where drawn rows are listed.
    tails: [BTreeMap<usize, Arc<[Op]>>; 2],
}

/// Operations of all rows.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) ops: Vec<Op>,
    /// The operation behind which the step is about to end.
    pub(super) near_end: usize,
    /// Where the last layer begins.
    last_layer: usize,
    /// Ranks share its rows out: the residual of all of them lies where the last sum's terms had.
    pub(super) shares_rows: bool,
}

/// What a GEMM has left of the residual stream for the norm behind it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Left {
    /// The residual, with its result added.
    Residual,
    /// Its result, to be added; through this norm, if the family has one there.
    Update { after: Option<Norm> },
    /// What is this rank's of the result, to be added up and added.
    Partial(Half),
    /// The residual with its result added, weighted, and sums of so many squares each.
    Weighted { squares_tile: usize },
}

/// Row counts that programs are resolved for.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLimits {
    /// Sequences of a step.
    pub(super) max_sampled: usize,
    /// Rows of a step.
    pub(super) max_rows: usize,
}

impl RowLimits {
    /// Bodies of decodes, of prompts' ends and of all larger steps.
    fn bodies(self) -> impl Iterator<Item = usize> {
        buckets(self.max_sampled).chain(prompt_buckets(self.max_rows)).chain(self.unrecorded())
    }

    /// Of these, the steps that are launched one by one.
    pub(super) fn unrecorded(self) -> impl Iterator<Item = usize> {
        let recorded = prompt_buckets(self.max_rows).last().unwrap_or(0).max(self.max_sampled);
        prefill_sizes(recorded, self.max_rows)
    }
}

impl Programs {
    /// Resolves all of them.
    pub(super) fn new(shape: &ModelShape, chip: &Chip, limits: RowLimits) -> Self {
        let max_sampled = limits.max_sampled;
        let mut programs = Self { max_sampled, bodies: BTreeMap::new(), tails: Default::default() };
        let (bodies, tails) = (limits.bodies(), buckets(limits.max_sampled));
        bodies.for_each(|m| programs.resolve_body(shape, chip, m));
        tails.for_each(|m| programs.resolve_tails(shape, chip, m));
        programs
    }

    /// Resolves those of `m` rows anew.
    pub(super) fn resolve(&mut self, shape: &ModelShape, chip: &Chip, m: usize) {
        self.resolve_body(shape, chip, m);
        self.resolve_tails(shape, chip, m);
    }

    fn resolve_body(&mut self, shape: &ModelShape, chip: &Chip, m: usize) {
        // Where all rows may be drawn, all ranks have the residual of all.
        let may_share = m > self.max_sampled && shape.shares_rows(m);
        self.bodies.insert(m, Arc::new(Builder { may_share, ..Builder::new(shape, chip, m) }.body()));
    }

    fn resolve_tails(&mut self, shape: &ModelShape, chip: &Chip, m: usize) {
        if !shape.stage.is_last() {
            return;
        }
        for (tails, sampled) in self.tails.iter_mut().zip([Sampled::Every, Sampled::Listed]) {
            tails.insert(m, Builder::new(shape, chip, m).tail(sampled).into());
        }
    }

    /// The body of a step of `n_rows`.
    pub(super) fn body(&self, n_rows: usize) -> Arc<Body> {
        let (_, body) = self.bodies.range(n_rows..).next().expect("no step has more rows than the largest body");
        Arc::clone(body)
    }

    /// The tail of a step that draws `n` rows; nobody reads on where none is drawn, or the next stage does.
    pub(super) fn tail(&self, n: usize, sampled: Sampled) -> Arc<[Op]> {
        if n == 0 || self.tails[0].is_empty() {
            return Arc::new([]);
        }
        let [every, listed] = &self.tails;
        let tails = if sampled == Sampled::Every { every } else { listed };
        let (_, tail) = tails.range(n..).next().expect("no step draws more rows than the largest tail");
        Arc::clone(tail)
    }
}

impl Body {
    /// All layers but the last one, which has no end here.
    pub(super) fn layers(&self) -> &[Op] {
        &self.ops[..self.last_layer]
    }
}

impl Op {
    /// If it is a GEMM.
    pub(super) fn gemm(&self) -> Option<&Gemm> {
        if let Self::Gemm(gemm) = self { Some(gemm) } else { None }
    }
}

impl Matrix {
    /// Rows of the weights, and their width.
    pub(super) fn sizes(self, shape: &ModelShape) -> (usize, usize) {
        match self {
            Self::Qkv => (shape.heads.qkv_width(), shape.hidden),
            Self::O => (shape.hidden, shape.attended_width()),
            Self::GateUp => (2 * shape.inner, shape.hidden),
            Self::Down => (shape.hidden, shape.inner),
            Self::Head => (shape.own_tokens().len(), shape.hidden),
        }
    }

    /// How that of a layer is stored.
    fn stored(self, layer: Option<usize>, shape: &ModelShape) -> WeightFormat {
        let Some(layer) = layer else { return WeightFormat::Bf16 };
        let formats = shape.layers[layer].formats;
        match self {
            Self::Qkv => formats.qkv,
            Self::O => formats.o,
            Self::GateUp => formats.gate_up,
            Self::Down => formats.down,
            Self::Head => WeightFormat::Bf16,
        }
    }

    /// The half of a layer whose last projection it is.
    pub(super) fn half(self) -> Half {
        if self == Self::O { Half::Attention } else { Half::FeedForward }
    }
}

impl Gemm {
    /// Whether its weights are what [`Op::Widen`] in front leaves.
    pub(super) fn reads_widened(&self, shape: &ModelShape) -> bool {
        self.desc.operands == Operands::E4m3 && self.matrix.stored(self.layer, shape).is_int4()
    }

    /// How its x lies if it is in e4m3: the kernel for few rows takes bf16.
    pub(super) fn reads_quantised(&self) -> Option<Rows> {
        match self.desc.operands {
            _ if matches!(self.kernel, GemmKernel::Skinny(_) | GemmKernel::QuantisingRing) => None,
            Operands::E4m3 | Operands::E4m3Blocks => Some(Rows::Plain),
            Operands::Int4BesideE4m3 => Some(Rows::BesideCodes),
            Operands::Bf16 | Operands::Int4 => None,
        }
    }
}

/// Writes operations one behind the other.
struct Builder<'a> {
    shape: &'a ModelShape,
    chip: &'a Chip,
    m: usize,
    /// Ranks may share rows out.
    may_share: bool,
    left: Left,
    ops: Vec<Op>,
}

impl<'a> Builder<'a> {
    fn new(shape: &'a ModelShape, chip: &'a Chip, m: usize) -> Self {
        Self { shape, chip, m, may_share: false, left: Left::Residual, ops: Vec::new() }
    }

    fn body(mut self) -> Body {
        let (n_layers, stage) = (self.shape.n_layers(), self.shape.stage);
        self.ops.extend(stage.is_first().then_some(Op::Embed));
        let mut begins = Vec::with_capacity(n_layers);
        for layer in 0..n_layers {
            begins.push(self.ops.len());
            self.project(layer);
            if layer + 1 < n_layers || !stage.is_last() {
                self.ops.push(Op::Attention { layer });
                self.behind_attention(layer, Reads::Attended);
            }
        }
        // What is handed over is the residual with everything added to it.
        self.settle(None, None);
        let n_near_end = self.shape.n_layers_near_the_end(self.m);
        let near_end = begins.get(n_layers - n_near_end).copied().unwrap_or(self.ops.len());
        let last_layer = *begins.last().expect("a model has a layer");
        let is_shared = |op: &Op| matches!(op, Op::Norm(Between { adds: Adds::RanksShares { .. }, .. }));
        let shares_rows = self.ops.iter().any(is_shared);
        Body { ops: self.ops, near_end, last_layer, shares_rows }
    }

    fn tail(mut self, sampled: Sampled) -> Vec<Op> {
        let layer = self.shape.n_layers() - 1;
        self.ops.push(Op::Attention { layer });
        match sampled {
            Sampled::Every => self.behind_attention(layer, Reads::Attended),
            Sampled::Listed => {
                self.ops.push(Op::KeepDrawn);
                self.behind_attention(layer, Reads::KeptAttended);
            }
        }
        self.of_residual(Some(Norm::Final), (Matrix::Head, None), Epilogue::F32);
        self.ops.extend(self.shape.logit_softcap.map(|_| Op::Softcap));
        self.ops.push(Op::Draw);
        self.ops
    }

    fn project(&mut self, layer: usize) {
        self.of_residual(self.before(Norm::BeforeAttention { layer }), (Matrix::Qkv, Some(layer)), Epilogue::Bf16);
        if self.shape.block.qk_norm == QkNorm::WholeRow {
            self.ops.push(Op::NormQk { layer });
        }
        self.ops.push(Op::RopeKv { layer });
    }

    fn behind_attention(&mut self, layer: usize, reads: Reads) {
        let before = self.before(Norm::BeforeFeedForward { layer });
        self.add_to_residual((Matrix::O, layer), reads, Norm::AfterAttention { layer }, before);
        self.gate_up(layer, before);
        let next = match layer + 1 == self.shape.n_layers() {
            true => self.shape.stage.is_last().then_some(Norm::Final),
            false => self.before(Norm::BeforeAttention { layer: layer + 1 }),
        };
        self.add_to_residual((Matrix::Down, layer), Reads::Activated, Norm::AfterFeedForward { layer }, next);
    }

    /// `activated = act(norm(residual) * w^T + bias)`: in one launch where a kernel can.
    fn gate_up(&mut self, layer: usize, norm: Option<Norm>) {
        let (of, block) = ((Matrix::GateUp, Some(layer)), self.shape.block);
        let may_gate = block.activation == Activation::Silu && !block.biases.gate_up;
        if may_gate && self.has_epilogue(of, Epilogue::Gated) {
            return self.of_residual(norm, of, Epilogue::Gated);
        }
        self.of_residual(norm, of, Epilogue::Bf16);
        if block.biases.gate_up {
            self.ops.push(Op::AddBias { matrix: Matrix::GateUp, layer });
        }
        self.ops.push(Op::Activate);
    }

    /// The norm, if the family has norms in front.
    fn before(&self, norm: Norm) -> Option<Norm> {
        self.shape.block.norms.before.then_some(norm)
    }

    fn has_epilogue(&self, of: (Matrix, Option<usize>), epilogue: Epilogue) -> bool {
        let mut prologues = [Prologue::Plain].into_iter().chain(self.scaling().map(|_| Prologue::NormScaled));
        prologues.any(|prologue| self.gemm(of, (prologue, epilogue), Reads::Normed).is_some())
    }

    /// The tile of the squares, if what was left is to be scaled.
    fn scaling(&self) -> Option<usize> {
        if let Left::Weighted { squares_tile } = self.left { Some(squares_tile) } else { None }
    }

    /// `y = norm(residual) * w^T`, the norm inside where the GEMM can.
    fn of_residual(&mut self, norm: Option<Norm>, of: (Matrix, Option<usize>), epilogue: Epilogue) {
        if let Some(squares_tile) = self.scaling()
            && let Some(gemm) = self.gemm(of, (Prologue::NormScaled, epilogue), Reads::Normed)
        {
            self.ops.push(Op::Gemm(Gemm { squares_tile, ..gemm }));
            return;
        }
        if self.left == Left::Residual
            && norm.is_some()
            && self.shape.norm_weight == NormWeight::Factor
            && let Some(gemm) = self.gemm(of, (Prologue::Normed, epilogue), Reads::Residual)
        {
            self.ops.push(Op::Gemm(Gemm { norm, ..gemm }));
            return;
        }
        let reads = if norm.is_some() { Reads::Normed } else { Reads::Residual };
        let gemm = self.gemm(of, (Prologue::Plain, epilogue), reads).expect("it was seen, or all chips multiply so");
        let is_quantised = self.settle(norm, gemm.reads_quantised());
        self.ops.extend(gemm.reads_quantised().filter(|_| !is_quantised).map(|rows| Op::Quantise(reads, rows)));
        self.multiply(gemm);
    }

    /// With what its weights become in front of it.
    fn multiply(&mut self, gemm: Gemm) {
        if let Some(layer) = gemm.layer
            && gemm.reads_widened(self.shape)
        {
            self.ops.push(Op::Widen { matrix: gemm.matrix, layer });
        }
        self.ops.push(Op::Gemm(gemm));
    }

    /// Adds what is to be added, and norms. Whether what it leaves is quantised, as `wanted`.
    fn settle(&mut self, next: Option<Norm>, wanted: Option<Rows>) -> bool {
        let adds = match self.left {
            Left::Update { after: Some(norm) } => Adds::NormedUpdate(norm),
            Left::Update { after: None } => Adds::Update,
            Left::Partial(half) if self.may_share => {
                let layer = self.shape.n_layers() - 1;
                Adds::RanksShares { half, copies_residual: next == Some(Norm::BeforeAttention { layer }) }
            }
            Left::Partial(half) => Adds::Ranks(half),
            Left::Residual | Left::Weighted { .. } => Adds::Nothing,
        };
        let quantises = wanted.filter(|_| next.is_some() && self.may_quantise());
        self.left = Left::Residual;
        if adds != Adds::Nothing || next.is_some() {
            self.ops.push(Op::Norm(Between { adds, next, quantises }));
        }
        quantises.is_some()
    }

    /// Whether the norm of the residual, with what was left added, may leave quantised.
    fn may_quantise(&self) -> bool {
        !matches!(self.left, Left::Update { after: Some(_) }) && self.shape.norm_weight == NormWeight::Factor
    }

    /// `residual += after(x * w^T + bias)`, with as much of it, and of the norm behind it, inside as the GEMM can.
    fn add_to_residual(&mut self, (matrix, layer): (Matrix, usize), reads: Reads, after: Norm, next: Option<Norm>) {
        let after = self.shape.block.norms.after.then_some(after);
        let Biases { o, down, .. } = self.shape.block.biases;
        let has_bias = if matrix == Matrix::O { o } else { down };
        let is_plain = after.is_none() && !has_bias;
        let may_add = is_plain && !self.shape.is_shared();
        // Who weighs the residual knows weights that are the factors themselves.
        let has_plain_norm = next.is_some() && self.shape.norm_weight == NormWeight::Factor;
        let may_weigh = may_add && has_plain_norm;
        let epilogues = [(may_weigh, Epilogue::Update), (may_add, Epilogue::Sum), (true, Epilogue::Bf16)];
        let by = |(_, epilogue)| self.gemm((matrix, Some(layer)), (Prologue::Plain, epilogue), reads);
        let gemm = epilogues.into_iter().filter(|(may, _)| *may).find_map(by);
        let gemm = gemm.expect("activations are multiplied at every shape");
        self.left = match gemm.desc.epilogue {
            Epilogue::Update => Left::Weighted { squares_tile: gemm.kernel.squares_tile() },
            Epilogue::Sum => Left::Residual,
            Epilogue::Bf16 | Epilogue::F32 | Epilogue::Gated => Left::Update { after },
        };
        self.ops.extend(gemm.reads_quantised().map(|rows| Op::Quantise(reads, rows)));
        self.multiply(Gemm { norm: next, ..gemm });
        if self.shape.is_shared() {
            let half = matrix.half();
            match is_plain && has_plain_norm {
                true => self.left = Left::Partial(half),
                false => self.ops.push(Op::Reduce { half }),
            }
        }
        if has_bias {
            self.ops.push(Op::AddBias { matrix, layer });
        }
    }

    fn gemm(
        &self,
        (matrix, layer): (Matrix, Option<usize>),
        (prologue, epilogue): (Prologue, Epilogue),
        reads: Reads,
    ) -> Option<Gemm> {
        let (n, k) = matrix.sizes(self.shape);
        let shape = GemmShape { m: self.m, n, k };
        let by = if reads == Reads::Normed && self.may_quantise() { QuantisedBy::Norm } else { QuantisedBy::Launch };
        let stored = (matrix.stored(layer, self.shape), self.shape.is_shared());
        let operands = self.chip.multiplied_as(stored, shape, by);
        let desc = GemmDesc { shape, operands, prologue, epilogue };
        let kernel = self.chip.choose(desc)?;
        Some(Gemm { matrix, layer, desc, kernel, reads, norm: None, squares_tile: 0 })
    }
}
