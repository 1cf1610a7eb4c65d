//! The program of a step: its operations in order, with the kernel of every GEMM and whether norms, additions and the activation
//! are inside of it. Resolved before serving, for each bucket of rows; what is launched, recorded, timed and printed is this. A
//! pure function of the model, the chip and the buckets.
//!
//! ```text
//! body, all rows:     embed; for each layer: qkv = norm(residual) Wqkv; rope and KV; attention; residual += attended Wo;
//!                     activated = act(norm(residual) Wgate_up); residual += activated Wdown.   The last layer ends behind its KV.
//! tail, drawn rows:   the rest of the last layer; logits = norm(residual) Whead; draw
//! ```

use std::{collections::BTreeMap, sync::Arc};

use stoker_kernels::{
    choose::{Chip, GemmDesc, GemmKernel, Prologue, WeightFormat},
    launch::{Epilogue, GemmShape},
};

use super::{
    layout::{Sampled, buckets, prefill_sizes, prompt_buckets},
    shape::ModelShape,
};

/// One launch, or two where attention has both decodes and prompts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// The residual of each row's token.
    Embed,
    /// A norm that is not inside of a GEMM.
    Norm {
        norm: Norm,
        adds: Adds,
    },
    /// y = x * w^T.
    Gemm(Gemm),
    /// The activation of gate and up that is not inside of a GEMM.
    Activate,
    /// Biases, norms of heads, rotation; K and V into the cache.
    RopeKv {
        layer: usize,
    },
    Attention {
        layer: usize,
    },
    /// Drawn rows of the residual and of what attention gave come to the front.
    KeepDrawn,
    /// A token for each row of logits.
    Draw,
}

/// A norm of the residual stream, by its weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Norm {
    Attention { layer: usize },
    FeedForward { layer: usize },
    Final,
}

/// What a norm does before it norms.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Adds {
    Nothing,
    /// What the GEMM in front of it gave is added to the residual.
    Update,
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
    /// The norm that scales, or that an update leaves the weighted residual for.
    pub(super) norm: Norm,
    /// Values that each sum of squares is of that scales it.
    pub(super) squares_tile: usize,
    /// Its x is what was kept of drawn rows.
    pub(super) reads_kept: bool,
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
    /// Its result: the norm adds it.
    Update,
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
        let n_layers = self.shape.n_layers;
        self.ops.push(Op::Embed);
        let mut begins = Vec::with_capacity(n_layers);
        for layer in 0..n_layers {
            begins.push(self.ops.len());
            self.project(layer);
            if layer + 1 < n_layers {
                self.ops.push(Op::Attention { layer });
                self.behind_attention(layer, false);
            }
        }
        let n_near_end = self.shape.n_layers_near_the_end(self.m);
        let near_end = begins.get(n_layers - n_near_end).copied().unwrap_or(self.ops.len());
        let last_layer = *begins.last().expect("a model has a layer");
        Body { ops: self.ops, near_end, last_layer }
    }

    fn tail(mut self, sampled: Sampled) -> Vec<Op> {
        let layer = self.shape.n_layers - 1;
        self.ops.push(Op::Attention { layer });
        if sampled == Sampled::Listed {
            self.ops.push(Op::KeepDrawn);
        }
        self.behind_attention(layer, sampled == Sampled::Listed);
        let is_multiplied = self.normed(Norm::Final, (Matrix::Head, None), Epilogue::F32);
        assert!(is_multiplied, "logits are multiplied at every shape");
        self.ops.push(Op::Draw);
        self.ops
    }

    fn project(&mut self, layer: usize) {
        let is_multiplied = self.normed(Norm::Attention { layer }, (Matrix::Qkv, Some(layer)), Epilogue::Bf16);
        assert!(is_multiplied, "activations are multiplied at every shape");
        self.ops.push(Op::RopeKv { layer });
    }

    fn behind_attention(&mut self, layer: usize, reads_kept: bool) {
        let norm = Norm::FeedForward { layer };
        self.update((Matrix::O, Some(layer)), norm, reads_kept);
        let gate_up = (Matrix::GateUp, Some(layer));
        if !self.normed(norm, gate_up, Epilogue::Gated) {
            let is_multiplied = self.normed(norm, gate_up, Epilogue::Bf16);
            assert!(is_multiplied, "activations are multiplied at every shape");
            self.ops.push(Op::Activate);
        }
        let next = if layer + 1 == self.shape.n_layers { Norm::Final } else { Norm::Attention { layer: layer + 1 } };
        self.update((Matrix::Down, Some(layer)), next, false);
    }

    /// `y = norm(residual) * w^T`, the norm inside where the GEMM can. False, and nothing written, if no kernel has the epilogue.
    fn normed(&mut self, norm: Norm, of: (Matrix, Option<usize>), epilogue: Epilogue) -> bool {
        if let Left::Weighted { squares_tile } = self.left
            && let Some(gemm) = self.gemm(of, (Prologue::NormScaled, epilogue), norm)
        {
            self.ops.push(Op::Gemm(Gemm { squares_tile, ..gemm }));
            return true;
        }
        let Some(gemm) = self.gemm(of, (Prologue::Plain, epilogue), norm) else { return false };
        let adds = if self.left == Left::Update { Adds::Update } else { Adds::Nothing };
        self.left = Left::Residual;
        self.ops.extend([Op::Norm { norm, adds }, Op::Gemm(gemm)]);
        true
    }

    /// `residual += x * w^T`, with as much of the norm behind it inside as the GEMM can.
    fn update(&mut self, of: (Matrix, Option<usize>), next: Norm, reads_kept: bool) {
        let by = |epilogue| self.gemm(of, (Prologue::Plain, epilogue), next);
        let gemm = [Epilogue::Update, Epilogue::Sum, Epilogue::Bf16].into_iter().find_map(by);
        let gemm = Gemm { reads_kept, ..gemm.expect("activations are multiplied at every shape") };
        self.left = match gemm.desc.epilogue {
            Epilogue::Update => Left::Weighted { squares_tile: gemm.kernel.squares_tile() },
            Epilogue::Sum => Left::Residual,
            Epilogue::Bf16 | Epilogue::F32 | Epilogue::Gated => Left::Update,
        };
        self.ops.push(Op::Gemm(gemm));
    }

    fn gemm(
        &self,
        (matrix, layer): (Matrix, Option<usize>),
        (prologue, epilogue): (Prologue, Epilogue),
        norm: Norm,
    ) -> Option<Gemm> {
        let (n, k) = self.sizes(matrix);
        let desc = GemmDesc { shape: GemmShape { m: self.m, n, k }, weights: WeightFormat::Bf16, prologue, epilogue };
        let kernel = self.chip.choose(desc)?;
        Some(Gemm { matrix, layer, desc, kernel, norm, squares_tile: 0, reads_kept: false })
    }

    /// Rows of the weights, and their width.
    fn sizes(&self, matrix: Matrix) -> (usize, usize) {
        let shape = self.shape;
        match matrix {
            Matrix::Qkv => (shape.heads.qkv_width(), shape.hidden),
            Matrix::O => (shape.hidden, shape.attended_width()),
            Matrix::GateUp => (2 * shape.inner, shape.hidden),
            Matrix::Down => (shape.hidden, shape.inner),
            Matrix::Head => (shape.vocab, shape.hidden),
        }
    }
}
