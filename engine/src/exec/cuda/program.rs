//! The program of a step: its operations in order, with the kernel of every GEMM and whether norms, additions and the activation
//! are inside of it. Resolved before serving, for each bucket of rows; what is launched, recorded, timed and printed is this. A
//! pure function of the model, the chip and the buckets.
//!
//! ```text
//! body, all rows:     embed; for each layer: qkv = before(residual) Wqkv; rope and KV; attention; residual += after(attended Wo);
//!                     activated = act(before(residual) Wgate_up); residual += after(activated Wdown).
//!                     The last layer ends behind its KV.
//! tail, drawn rows:   the rest of the last layer; logits = norm(residual) Whead; draw
//! ```
//!
//! Norms that a family has not are not there: `before` or `after` is then what it is of. Of several GPUs each has a share of heads, of
//! the feed-forward and of the vocabulary: what the two halves of a layer give is added up where it is added to the residual.

use std::{collections::BTreeMap, sync::Arc};

use stoker_kernels::{
    choose::{Chip, GemmDesc, GemmKernel, Prologue, WeightFormat},
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
    Quantise(Reads),
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
    pub(super) quantises: bool,
}

/// What is added to the residual.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Adds {
    Nothing,
    Update,
    NormedUpdate(Norm),
    /// What all ranks gave in a half of the layer.
    Ranks(Half),
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
    /// The norm that an update leaves the weighted residual for.
    pub(super) next: Option<Norm>,
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
        let mut programs = Self { bodies: BTreeMap::new(), tails: Default::default() };
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
        self.bodies.insert(m, Arc::new(Builder::new(shape, chip, m).body()));
    }

    fn resolve_tails(&mut self, shape: &ModelShape, chip: &Chip, m: usize) {
        for (tails, sampled) in self.tails.iter_mut().zip([Sampled::Every, Sampled::Listed]) {
            tails.insert(m, Builder::new(shape, chip, m).tail(sampled).into());
        }
    }

    /// The body of a step of `n_rows`.
    pub(super) fn body(&self, n_rows: usize) -> Arc<Body> {
        let (_, body) = self.bodies.range(n_rows..).next().expect("no step has more rows than the largest body");
        Arc::clone(body)
    }

    /// The tail of a step that draws `n` rows; nobody reads on where none is drawn.
    pub(super) fn tail(&self, n: usize, sampled: Sampled) -> Arc<[Op]> {
        if n == 0 {
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
    /// The half of a layer whose last projection it is.
    pub(super) fn half(self) -> Half {
        if self == Self::O { Half::Attention } else { Half::FeedForward }
    }
}

impl Gemm {
    /// Whether its x is in e4m3 as its weights are: the kernel for few rows takes bf16.
    pub(super) fn reads_quantised(&self) -> bool {
        self.desc.weights == WeightFormat::E4m3 && !matches!(self.kernel, GemmKernel::Skinny(_))
    }
}

/// Writes operations one behind the other.
struct Builder<'a> {
    shape: &'a ModelShape,
    chip: &'a Chip,
    m: usize,
    left: Left,
    ops: Vec<Op>,
}

impl<'a> Builder<'a> {
    fn new(shape: &'a ModelShape, chip: &'a Chip, m: usize) -> Self {
        Self { shape, chip, m, left: Left::Residual, ops: Vec::new() }
    }

    fn body(mut self) -> Body {
        let n_layers = self.shape.n_layers();
        self.ops.push(Op::Embed);
        let mut begins = Vec::with_capacity(n_layers);
        for layer in 0..n_layers {
            begins.push(self.ops.len());
            self.project(layer);
            if layer + 1 < n_layers {
                self.ops.push(Op::Attention { layer });
                self.behind_attention(layer, Reads::Attended);
            }
        }
        let n_near_end = self.shape.n_layers_near_the_end(self.m);
        let near_end = begins.get(n_layers - n_near_end).copied().unwrap_or(self.ops.len());
        let last_layer = *begins.last().expect("a model has a layer");
        Body { ops: self.ops, near_end, last_layer }
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
            true => Some(Norm::Final),
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
        let reads = if norm.is_some() { Reads::Normed } else { Reads::Residual };
        let gemm = self.gemm(of, (Prologue::Plain, epilogue), reads).expect("it was seen, or all chips multiply so");
        let is_quantised = self.settle(norm, gemm.reads_quantised());
        if gemm.reads_quantised() && !is_quantised {
            self.ops.push(Op::Quantise(reads));
        }
        self.ops.push(Op::Gemm(gemm));
    }

    /// Adds what is to be added, and norms. Whether what it leaves is quantised, as `wanted`.
    fn settle(&mut self, next: Option<Norm>, wanted: bool) -> bool {
        let adds = match self.left {
            Left::Update { after: Some(norm) } => Adds::NormedUpdate(norm),
            Left::Update { after: None } => Adds::Update,
            Left::Partial(half) => Adds::Ranks(half),
            Left::Residual | Left::Weighted { .. } => Adds::Nothing,
        };
        self.left = Left::Residual;
        let is_plain = !matches!(adds, Adds::NormedUpdate(_)) && self.shape.norm_weight == NormWeight::Factor;
        let quantises = wanted && next.is_some() && is_plain;
        if adds != Adds::Nothing || next.is_some() {
            self.ops.push(Op::Norm(Between { adds, next, quantises }));
        }
        quantises
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
        if gemm.reads_quantised() {
            self.ops.push(Op::Quantise(reads));
        }
        self.ops.push(Op::Gemm(Gemm { next, ..gemm }));
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
        let (n, k) = self.sizes(matrix);
        let weights = if matrix == Matrix::Head { WeightFormat::Bf16 } else { self.shape.projections };
        let desc = GemmDesc { shape: GemmShape { m: self.m, n, k }, weights, prologue, epilogue };
        let kernel = self.chip.choose(desc)?;
        Some(Gemm { matrix, layer, desc, kernel, reads, next: None, squares_tile: 0 })
    }

    /// Rows of the weights, and their width.
    fn sizes(&self, matrix: Matrix) -> (usize, usize) {
        let shape = self.shape;
        match matrix {
            Matrix::Qkv => (shape.heads.qkv_width(), shape.hidden),
            Matrix::O => (shape.hidden, shape.attended_width()),
            Matrix::GateUp => (2 * shape.inner, shape.hidden),
            Matrix::Down => (shape.hidden, shape.inner),
            Matrix::Head => (shape.own_tokens().len(), shape.hidden),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_kernels::{choose::Numerics, device::Properties};

    use super::*;
    use crate::{
        config::Quantization,
        exec::cuda::weights,
        model::{CheckpointFormat, ModelConfig, ModelSpec, spec::Rank},
    };

    fn shape(architecture: &str, changes: Value) -> ModelShape {
        ModelShape::of(&spec(architecture, changes), Rank::ALONE).unwrap()
    }

    fn spec(architecture: &str, changes: Value) -> ModelSpec {
        let mut config = json!({"architectures": [architecture], "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128256, "max_position_embeddings": 8192});
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        ModelSpec::new(&config, CheckpointFormat::HuggingFace).unwrap()
    }

    fn programs(architecture: &str, changes: Value, numerics: Numerics) -> Programs {
        let shape = shape(architecture, changes);
        let chip = Chip::of_table("NVIDIA H200", numerics).unwrap();
        Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 })
    }

    /// A word an operation.
    fn brief(ops: &[Op]) -> String {
        let words = ops.iter().map(|op| match op {
            Op::Embed => "embed".to_owned(),
            Op::Quantise(reads) => format!("quantise-{reads:?}"),
            Op::Norm(Between { adds, next, quantises }) => {
                let adds = match adds {
                    Adds::Nothing => "",
                    Adds::Update => "add+",
                    Adds::NormedUpdate(_) => "norm+add+",
                    Adds::Ranks(_) => "reduce+add+",
                };
                let next = if next.is_some() { "norm" } else { "." };
                format!("{adds}{next}{}", if *quantises { "-quantised" } else { "" })
            }
            Op::Gemm(Gemm { matrix, desc, reads, .. }) => {
                let scaled = if desc.prologue == Prologue::NormScaled { "scaled-" } else { "" };
                let of = if *reads == Reads::Residual { "-of-residual" } else { "" };
                format!("{scaled}{matrix:?}{of}:{:?}", desc.epilogue)
            }
            Op::AddBias { matrix, .. } => format!("bias-{matrix:?}"),
            Op::Activate => "act".to_owned(),
            Op::NormQk { .. } => "norm-qk".to_owned(),
            Op::RopeKv { .. } => "rope".to_owned(),
            Op::Attention { .. } => "attend".to_owned(),
            Op::KeepDrawn => "keep".to_owned(),
            Op::Reduce { .. } => "reduce".to_owned(),
            Op::Softcap => "softcap".to_owned(),
            Op::Draw => "draw".to_owned(),
        });
        words.collect::<Vec<_>>().join(" ")
    }

    fn check(programs: &Programs, n: usize, body: &str, tail: &str) {
        assert_eq!(brief(&programs.body(n).ops), body, "body of {n} rows");
        assert_eq!(brief(&programs.tail(n, Sampled::Every)), tail, "tail of {n} rows");
    }

    #[test]
    fn norms_and_additions_go_inside_of_gemms_where_rows_are_few() {
        let llama = programs("LlamaForCausalLM", json!({}), Numerics::Fastest);
        check(
            &llama,
            8,
            "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
            "attend O:Update scaled-GateUp:Gated Down:Update norm Head:F32 draw",
        );
        check(
            &llama,
            64,
            "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Qkv:Bf16 rope",
            "attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Head:F32 draw",
        );
        let body = brief(&llama.body(4096).ops);
        assert!(body.starts_with("embed norm Qkv:Bf16 rope attend O:Sum norm GateUp:Gated Down:Sum norm"), "{body}");
        let listed = brief(&llama.tail(1, Sampled::Listed));
        assert_eq!(listed, "attend keep O:Update scaled-GateUp:Gated Down:Update scaled-Head:F32 draw");
    }

    #[test]
    fn what_a_gemm_gives_is_normed_and_then_added_where_a_family_does_so() {
        let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
        check(
            &programs("Gemma2ForCausalLM", gemma, Numerics::Fastest),
            8,
            "embed norm Qkv:Bf16 rope attend O:Bf16 norm+add+norm GateUp:Bf16 act Down:Bf16 norm+add+norm Qkv:Bf16 rope",
            "attend O:Bf16 norm+add+norm GateUp:Bf16 act Down:Bf16 norm+add+norm Head:F32 softcap draw",
        );
        check(
            &programs("Olmo2ForCausalLM", json!({}), Numerics::Fastest),
            8,
            "embed Qkv-of-residual:Bf16 norm-qk rope attend O:Bf16 norm+add+. GateUp-of-residual:Gated Down:Bf16 \
             norm+add+. Qkv-of-residual:Bf16 norm-qk rope",
            "attend O:Bf16 norm+add+. GateUp-of-residual:Gated Down:Bf16 norm+add+norm Head:F32 draw",
        );
    }

    #[test]
    fn biases_are_added_to_what_a_gemm_gave_before_it_is_added_or_activated() {
        check(
            &programs("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true}), Numerics::Fastest),
            8,
            "embed norm Qkv:Bf16 rope attend O:Bf16 bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 bias-Down \
             add+norm Qkv:Bf16 rope",
            "attend O:Bf16 bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 bias-Down add+norm Head:F32 draw",
        );
    }

    fn shared(architecture: &str, changes: Value, quantization: Option<Quantization>) -> (Programs, ModelShape) {
        let chip = Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap();
        let shape = ModelShape::of(&spec(architecture, changes), Rank { idx: 1, of: 2 }).unwrap();
        let shape = match quantization {
            Some(quantization) => shape.quantised(quantization, chip.properties()).unwrap(),
            None => shape,
        };
        (Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 }), shape)
    }

    #[test]
    fn ranks_add_up_what_they_gave_where_it_is_added_to_the_residual() {
        let (llama, shape) = shared("LlamaForCausalLM", json!({}), None);
        assert_eq!((shape.heads.n_q, shape.heads.n_kv, shape.inner, shape.own_tokens()), (16, 4, 7168, 64128..128256));
        for n in [1, 8, 64, 4096] {
            let layer = "O:Bf16 reduce+add+norm GateUp:Gated Down:Bf16 reduce+add+norm";
            let body = format!("embed norm Qkv:Bf16 rope attend {layer} Qkv:Bf16 rope");
            assert_eq!(brief(&llama.body(n).ops), body, "body of {n} rows");
            if n <= 256 {
                let tail = format!("attend {layer} Head:F32 draw");
                assert_eq!(brief(&llama.tail(n, Sampled::Every)), tail, "tail of {n} rows");
            }
        }
        let widths =
            |matrix| Builder::new(&shape, &Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap(), 1).sizes(matrix);
        assert_eq!(widths(Matrix::Qkv), (3072, 4096));
        assert_eq!((widths(Matrix::O), widths(Matrix::Down)), ((4096, 2048), (4096, 7168)));
        assert_eq!((widths(Matrix::GateUp), widths(Matrix::Head)), ((14336, 4096), (64128, 4096)));
        let (fp8, _) = shared("LlamaForCausalLM", json!({}), Some(Quantization::Fp8));
        assert!(brief(&fp8.body(64).ops).contains("O:Bf16 reduce+add+norm-quantised GateUp:Gated quantise-Activated"));
    }

    #[test]
    fn what_ranks_gave_is_a_row_of_its_own_where_a_bias_or_a_norm_is_between_it_and_the_residual() {
        let (biased, _) = shared("LlamaForCausalLM", json!({"mlp_bias": true, "attention_bias": true}), None);
        let body = brief(&biased.body(8).ops);
        assert!(
            body.contains("O:Bf16 reduce bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 reduce bias-Down"),
            "{body}"
        );
        let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
        let (gemma, _) = shared("Gemma2ForCausalLM", gemma, None);
        let tail = brief(&gemma.tail(8, Sampled::Every));
        let expected =
            "attend O:Bf16 reduce norm+add+norm GateUp:Bf16 act Down:Bf16 reduce norm+add+norm Head:F32 softcap draw";
        assert_eq!(tail, expected);
    }

    fn quantised(architecture: &str, changes: Value, numerics: Numerics) -> Programs {
        let shape = shape(architecture, changes);
        let chip = Chip::of_table("NVIDIA H200", numerics).unwrap();
        let shape = shape.quantised(Quantization::Fp8, chip.properties()).unwrap();
        Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 })
    }

    #[test]
    fn quantised_products_read_what_norms_leave_quantised_and_one_row_stays_as_it_is() {
        let llama = quantised("LlamaForCausalLM", json!({}), Numerics::Fastest);
        check(
            &llama,
            1,
            "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
            "attend O:Update scaled-GateUp:Gated Down:Update scaled-Head:F32 draw",
        );
        let layer = "quantise-Attended O:Bf16 add+norm-quantised GateUp:Gated quantise-Activated Down:Bf16";
        for n in [8, 64, 256] {
            check(
                &llama,
                n,
                &format!("embed norm-quantised Qkv:Bf16 rope attend {layer} add+norm-quantised Qkv:Bf16 rope"),
                &format!("attend {layer} add+norm Head:F32 draw"),
            );
        }
        assert_eq!(brief(&llama.body(256).ops), brief(&llama.body(8192).ops));
        let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
        check(
            &quantised("Gemma2ForCausalLM", gemma, Numerics::Fastest),
            8,
            "embed norm quantise-Normed Qkv:Bf16 rope attend quantise-Attended O:Bf16 norm+add+norm quantise-Normed \
             GateUp:Bf16 act quantise-Activated Down:Bf16 norm+add+norm quantise-Normed Qkv:Bf16 rope",
            "attend quantise-Attended O:Bf16 norm+add+norm quantise-Normed GateUp:Bf16 act quantise-Activated Down:Bf16 \
             norm+add+norm Head:F32 softcap draw",
        );
        let invariant = quantised("LlamaForCausalLM", json!({}), Numerics::BatchInvariant);
        assert_eq!(brief(&invariant.body(1).ops), brief(&invariant.body(4096).ops));
    }

    const AWQ: &str = r#"{"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}"#;

    fn four_bits(numerics: Numerics) -> (Programs, ModelShape) {
        let quantization: Value = serde_json::from_str(AWQ).unwrap();
        let changes = json!({"quantization_config": quantization});
        let chip = Chip::of_table("NVIDIA H200", numerics).unwrap();
        let spec = spec("LlamaForCausalLM", changes);
        let shape = weights::as_described(ModelShape::of(&spec, Rank::ALONE).unwrap(), &spec, chip.properties());
        (Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 }), shape)
    }

    #[test]
    fn weights_of_four_bits_are_multiplied_with_norms_and_additions_inside_where_rows_are_few() {
        let (llama, shape) = four_bits(Numerics::Fastest);
        for n in [1, 8, 32] {
            check(
                &llama,
                n,
                "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
                &format!(
                    "attend O:Update scaled-GateUp:Gated Down:Update {} draw",
                    if n == 1 { "scaled-Head:F32" } else { "norm Head:F32" }
                ),
            );
        }
        let many = "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Qkv:Bf16 rope";
        assert_eq!([64, 4096].map(|n| brief(&llama.body(n).ops)), [many, many]);
        let invariant = four_bits(Numerics::BatchInvariant).0;
        assert_eq!(brief(&invariant.body(1).ops), brief(&invariant.body(4096).ops));
        // Of two layers, half a byte a weight and four bytes a group of 128.
        let values = 6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336;
        assert_eq!(shape.int4_bytes, 2 * (values / 2 + values / 128 * 4));
        assert_eq!(shape.weights_bytes(2 * values + 10), 20 + shape.int4_bytes);
    }

    #[test]
    fn a_chip_or_a_width_that_e4m3_is_not_for_is_refused_with_what_would_run() {
        let of = |capability, changes| {
            let h200 = Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap().properties();
            shape("LlamaForCausalLM", changes)
                .quantised(Quantization::Fp8, Properties { capability, ..h200 })
                .unwrap_err()
        };
        assert_eq!(
            of((8, 0), json!({})),
            "quantization fp8 needs a GPU of compute capability 9.0 (H100, H200, GH200), this one has 8.0: leave it out"
        );
        assert_eq!(
            of((9, 0), json!({"intermediate_size": 14328})),
            "quantization fp8 takes rows of multiples of 16 values, this model has rows of 14328: leave it out"
        );
    }

    #[test]
    fn weights_in_e4m3_take_the_bytes_that_their_numbers_and_scales_have() {
        let plain = shape("LlamaForCausalLM", json!({}));
        let h200 = Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap().properties();
        let n_params = 1_000_000_000;
        let saved = plain.weights_bytes(n_params)
            - plain.clone().quantised(Quantization::Fp8, h200).unwrap().weights_bytes(n_params);
        // Of a layer: qkv 6144 x 4096, o 4096 x 4096, gate and up 28672 x 4096, down 4096 x 14336.
        let (values, rows) = (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336, 6144 + 4096 + 28672 + 4096);
        assert_eq!(saved, 2 * (values - 4 * rows));
    }

    #[test]
    fn a_batch_invariant_step_is_the_same_program_at_every_row_count() {
        let llama = programs("LlamaForCausalLM", json!({}), Numerics::BatchInvariant);
        let [one, ten, many] = [1, 10, 4096].map(|n| brief(&llama.body(n).ops));
        assert_eq!((&one, &one), (&ten, &many));
        assert!(!one.contains("Update") && !one.contains("Sum"), "{one}");
    }
}
