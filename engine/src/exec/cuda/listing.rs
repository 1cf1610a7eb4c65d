//! The program of a step for a person: its operations, each with its shape, its kernel and what it must take at the least. Pure.

use std::fmt;

use stoker_kernels::{
    choose::{Chip, Numerics, Operands, Prologue},
    launch::{Epilogue, GemmShape, NormWeight},
};

use super::{
    layout::Sampled,
    program::{Adds, Between, Gemm, Op, Programs, Reads, RowLimits},
    shape::ModelShape,
};
use crate::{
    config::Quantization,
    model::{Activation, ModelSpec, spec::Rank},
};

/// Operations that differ in their layer only.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// What is done.
    pub op: String,
    /// Sizes of a GEMM, rows of anything else.
    pub shape: String,
    /// What does it.
    pub kernel: String,
    /// How often it stands in the step.
    pub n: usize,
    /// Microseconds of one by the bytes and operations that it takes, if these are known before contexts are.
    pub predicted_us: Option<f64>,
    /// Microseconds of one, where it was measured.
    pub measured_us: Option<f64>,
}

/// What the chip does at its best.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// A copy, bytes read and written.
    pub gb_s: f64,
    /// A large product.
    pub tflop_s: f64,
}

/// The program that a chip with a built-in table takes for a step that decodes `n` sequences; none without such a table. Of several that
/// share the model, that of the first.
pub fn list_program(
    spec: &ModelSpec,
    (chip, tensor_parallel): (&str, usize),
    n: usize,
    quantization: Option<Quantization>,
    ceilings: Ceilings,
) -> Result<Vec<Line>, String> {
    spec.check_ranks(tensor_parallel).map_err(|problem| problem.to_string())?;
    let shape = ModelShape::of(spec, Rank { idx: 0, of: tensor_parallel })?;
    let chip = Chip::of_table(chip, Numerics::Fastest).ok_or_else(|| {
        format!("no table of GEMMs was measured on {chip}: there are those of {}", Chip::with_tables())
    })?;
    let shape = shape.stored_as_described(spec, chip.properties(), quantization)?;
    let programs = Programs::new(&shape, &chip, RowLimits { max_sampled: n, max_rows: n });
    Ok(groups(&programs, n).iter().map(|ops| line(&shape, ops, n, ceilings)).collect())
}

/// The operations of a step that decodes `n` sequences, those together that differ in their layer only.
pub(super) fn groups(programs: &Programs, n: usize) -> Vec<Vec<Op>> {
    let (body, tail) = (programs.body(n), programs.tail(n, Sampled::Every));
    let mut groups: Vec<Vec<Op>> = Vec::new();
    for op in body.ops.iter().chain(tail.iter()) {
        match groups.iter_mut().find(|group| is_alike(&group[0], op)) {
            Some(group) => group.push(*op),
            None => groups.push(vec![*op]),
        }
    }
    groups
}

fn is_alike(a: &Op, b: &Op) -> bool {
    match (a, b) {
        (Op::Gemm(a), Op::Gemm(b)) => (a.matrix, a.desc, a.kernel) == (b.matrix, b.desc, b.kernel),
        (Op::Norm(a), Op::Norm(b)) => between_named(*a) == between_named(*b),
        (Op::AddBias { matrix: a, .. }, Op::AddBias { matrix: b, .. }) => a == b,
        (Op::Quantise(a, _), Op::Quantise(b, _)) => a == b,
        (Op::Widen { matrix: a, .. }, Op::Widen { matrix: b, .. }) => a == b,
        _ => std::mem::discriminant(a) == std::mem::discriminant(b),
    }
}

pub(super) fn line(shape: &ModelShape, ops: &[Op], m: usize, ceilings: Ceilings) -> Line {
    let us = |bytes: usize| Some(bytes as f64 / ceilings.gb_s / 1e3);
    let rows = format!("{m} rows");
    let (op, sizes, kernel, predicted_us) = match &ops[0] {
        Op::Embed => ("embed".into(), rows, "embed".into(), us(4 * m * shape.hidden)),
        Op::Norm(between) => {
            let (name, n_values) = between_named(*between);
            (name.into(), rows, norm_kernel(*between, shape.norm_weight).into(), us(2 * n_values * m * shape.hidden))
        }
        Op::Gemm(gemm) => {
            let GemmShape { m, n, k } = gemm.desc.shape;
            (named(gemm), format!("{m} x {n} x {k}"), gemm.kernel.to_string(), Some(gemm_us(gemm, ceilings)))
        }
        Op::Quantise(reads, _) => {
            let width = match reads {
                Reads::Residual | Reads::Normed => shape.hidden,
                Reads::Attended | Reads::KeptAttended => shape.attended_width(),
                Reads::Activated => shape.inner,
            };
            (format!("quantise {reads:?}").to_lowercase(), rows, "quantise_rows".into(), us(3 * m * width))
        }
        Op::Widen { matrix, .. } => {
            let (n, k) = matrix.sizes(shape);
            // Codes with their share of a group of 128 are read, a byte each is written.
            let bytes = n * k + n * k * 17 / 32;
            (format!("widen {matrix:?}"), format!("{n} x {k}"), "widen_int4".into(), us(bytes))
        }
        Op::AddBias { matrix, .. } => (format!("{matrix:?}'s bias"), rows, "add_bias".into(), None),
        Op::Activate => {
            let kernel = match shape.block.activation {
                Activation::Silu => "silu_mul",
                Activation::GeluTanh => "gelu_mul",
            };
            ("activate".into(), rows, kernel.into(), us(6 * m * shape.inner))
        }
        Op::NormQk { .. } => ("norm Q, K".into(), rows, "norm_part".into(), us(4 * m * shape.heads.qkv_width())),
        Op::RopeKv { .. } => ("rope, KV".into(), rows, "rope_kv".into(), us(4 * m * shape.heads.qkv_width())),
        Op::Attention { .. } => ("attention".into(), rows, "paged_decode".into(), None),
        Op::KeepDrawn => ("keep drawn".into(), rows, "embed".into(), us(8 * m * shape.hidden)),
        Op::Reduce { .. } => ("add ranks".into(), rows, "reduce".into(), us(6 * m * shape.hidden)),
        Op::Softcap => ("bound logits".into(), rows, "softcap".into(), us(8 * m * shape.own_tokens().len())),
        Op::Draw => ("draw".into(), rows, "sample".into(), us(4 * m * shape.own_tokens().len())),
    };
    Line { op, shape: sizes, kernel, n: ops.len(), predicted_us, measured_us: None }
}

/// What it does, and how many values of each column of the residual stream it reads and writes.
fn between_named(Between { adds, next, quantises }: Between) -> (&'static str, usize) {
    match (adds, next) {
        (Adds::RanksShares { .. }, _) if quantises.is_some() => ("add shares, norm, quantise", 5),
        (Adds::RanksShares { .. }, _) => ("add shares, norm", 5),
        (Adds::Ranks(_), _) if quantises.is_some() => ("add ranks, norm, quantise", 5),
        (Adds::Ranks(_), _) => ("add ranks, norm", 5),
        (Adds::Nothing, _) if quantises.is_some() => ("norm, quantise", 2),
        (Adds::Update, _) if quantises.is_some() => ("add, norm, quantise", 4),
        (Adds::Nothing, _) => ("norm", 2),
        (Adds::Update, Some(_)) => ("add, norm", 4),
        (Adds::Update, None) => ("add", 3),
        (Adds::NormedUpdate(_), Some(_)) => ("norm, add, norm", 4),
        (Adds::NormedUpdate(_), None) => ("norm, add", 3),
    }
}

fn norm_kernel(between: Between, weight: NormWeight) -> &'static str {
    match (between, weight) {
        (Between { adds: Adds::Nothing, next: Some(_), .. }, NormWeight::Factor) => "rms_norm",
        (Between { adds: Adds::Update, next: Some(_), .. }, NormWeight::Factor) => "add_rms_norm",
        (Between { adds: Adds::Ranks(_), .. }, _) => "reduce",
        (Between { adds: Adds::RanksShares { .. }, .. }, _) => "reduce_shares",
        _ => "norm_chain",
    }
}

fn named(gemm: &Gemm) -> String {
    let scaled = if gemm.desc.prologue == Prologue::Plain { "" } else { "norm, " };
    let epilogue = match gemm.desc.epilogue {
        Epilogue::Bf16 | Epilogue::F32 => "",
        Epilogue::Sum => ", add",
        Epilogue::Gated => ", activate",
        Epilogue::Update => ", add, weigh",
    };
    format!("{scaled}{:?}{epilogue}", gemm.matrix)
}

/// By whichever takes longer: reading and writing, or multiplying.
fn gemm_us(gemm: &Gemm, ceilings: Ceilings) -> f64 {
    let GemmShape { m, n, k } = gemm.desc.shape;
    let written = match gemm.desc.epilogue {
        Epilogue::Bf16 => 2 * m * n,
        Epilogue::Gated => m * n,
        Epilogue::F32 | Epilogue::Sum => 4 * m * n,
        Epilogue::Update => 6 * m * n,
    };
    // Bits of a weight, with its share of a group of 128, and bytes of a value of x: of one byte they are multiplied at twice the rate.
    let (bits, value) = match gemm.desc.operands {
        Operands::Bf16 => (16.0, 2),
        Operands::E4m3 | Operands::E4m3Blocks => (8.0, 1),
        Operands::Int4 => (4.25, 2),
        Operands::Int4BesideE4m3 => (4.25, 1),
    };
    let bytes = bits / 8.0 * (n * k) as f64 + (value * m * k + written) as f64;
    (bytes / ceilings.gb_s / 1e3).max((value * m * n * k) as f64 / ceilings.tflop_s / 1e6)
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.1}"));
        let Self { op, shape, kernel, n, .. } = self;
        let (predicted, measured) = (us(self.predicted_us), us(self.measured_us));
        write!(f, "{op:22} {shape:22} {kernel:20} {n:>4} {predicted:>9} {measured:>9}")
    }
}
