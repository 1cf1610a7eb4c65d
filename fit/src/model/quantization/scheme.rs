//! How one projection is quantised: its codes, who shares a scale, and the tensors of a checkpoint that hold them. Pure;
//! finding and reading them is the engine's.
//!
//! ```text
//! number = (code - zero point) * scale                     codes of outputs x inputs
//!
//! codes       tensor             shape                     packed
//! e4m3        weight             outputs, inputs           a byte each
//! int8        weight             outputs, inputs           a byte each
//! packed      weight_packed      outputs, inputs / n       n = 32 / bits inputs a word, the first lowest; code + half
//! gptq        qweight            inputs / n, outputs       as packed
//! awq         qweight            inputs, outputs / 8       outputs 0 2 4 6 1 3 5 7 of a word, the first lowest
//! e2m1        weight_packed      outputs, inputs / 2       two a byte, the first in the low half
//! levels      weight             outputs * inputs / 2, 1   two a byte, the first in the high half; number = level[code] * scale
//! ```

use std::fmt;

use crate::{
    format::WeightFormat,
    gpu::{BLOCK_INPUTS, BLOCK_OUTPUTS, GroupSize},
};
use safetensors::Dtype;

/// Inputs of a block of integers.
const BLOCK: usize = 32;

/// How a projection is quantised.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheme {
    /// How codes are stored.
    pub codes: Codes,
    /// Which weights share a scale, and a zero point where there are some.
    pub shared: SharedBy,
    /// Whether there are zero points.
    pub zero_points: bool,
    /// Whether inputs name their group each, rather than following each other in groups.
    pub group_indices: GroupIndices,
    /// What the scales' tensor may be called, without its module.
    pub scale_names: &'static [&'static str],
    /// What activations are rounded to where the hardware multiplies codes with codes. Information: they are not rounded here.
    pub activations: Activations,
}

/// How codes are stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Codes {
    /// Eight-bit floats with four bits of exponent.
    E4m3,
    /// Bytes with a sign.
    Int8,
    /// Words along inputs, with half their range added (compressed-tensors).
    Packed(Bits),
    /// Words along inputs, input by input (GPTQ).
    Gptq {
        /// Of a code.
        bits: Bits,
        /// Words of zero points are stored less one in each place.
        zeros_less_one: bool,
    },
    /// Words along outputs, of four bits (AWQ).
    Awq,
    /// Four-bit floats with two bits of exponent (MXFP4 of compressed-tensors).
    E2m1,
    /// Places in a list of 16 numbers, NF4 or FP4 (bitsandbytes).
    Levels,
}

/// Bits of an integer code.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bits {
    /// Eight codes a word.
    Four,
    /// Four codes a word.
    Eight,
}

/// The weights that share a scale.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SharedBy {
    /// All of them.
    Tensor,
    /// Those of an output.
    Output,
    /// So many neighbouring inputs of an output.
    Group(usize),
    /// So many outputs and inputs.
    Block {
        /// Rows.
        outputs: usize,
        /// Columns.
        inputs: usize,
    },
}

/// Whether a tensor says of every input which group it belongs to (act-order).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GroupIndices {
    /// No such tensor.
    None,
    /// There may be one.
    Optional,
    /// There is one.
    Needed,
}

/// What activations were meant to be rounded to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activations {
    /// Nothing.
    AsTheyAre,
    /// As many bits as weights, with a scale for every token.
    Dynamic,
    /// The same with one scale, which the checkpoint has.
    Static,
}

/// What a tensor beside a projection is to it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PartKind {
    /// The codes.
    Codes,
    /// What they are multiplied by.
    Scales,
    /// What is subtracted from them.
    ZeroPoints,
    /// Which group each input belongs to.
    GroupIndices,
    /// The shape before packing, which is known.
    Shape,
    /// The numbers that codes are places of.
    Levels,
    /// Scales that scales were divided by, when those are bytes.
    OuterScales,
    /// The numbers that such bytes are places of.
    OuterLevels,
    /// What else is to be known, as JSON.
    State,
    /// Of activations: not read here.
    Activations,
}

/// One of the tensors that hold a projection.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What it is.
    pub kind: PartKind,
    /// Names it may have, without its module.
    pub names: &'static [&'static str],
    /// Shapes it may have; the first is the usual one. None: any.
    pub shapes: Vec<Vec<usize>>,
    /// Number formats it may have.
    pub dtypes: &'static [Dtype],
    /// Whether it has to be there.
    pub needed: bool,
}

/// Scales that are divided by the same one, when they are bytes.
pub const SCALES_OF_ONE: usize = 256;
const SCALE_DTYPES: &[Dtype] = &[Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F8_E8M0, Dtype::U8];
const INDEX_DTYPES: &[Dtype] = &[Dtype::I32, Dtype::I64];

impl Bits {
    /// As a number.
    pub fn n(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// Codes of a word of 32 bits.
    pub fn per_word(self) -> usize {
        32 / self.n()
    }

    /// One in each place of a word.
    pub fn ones(self) -> u32 {
        match self {
            Self::Four => 0x1111_1111,
            Self::Eight => 0x0101_0101,
        }
    }

    /// What is added to codes with a sign to store them without.
    pub fn half(self) -> i32 {
        1 << (self.n() - 1)
    }
}

impl Scheme {
    /// The blocks of integers that a CPU keeps its weights in, as far as a description tells; `None`: they become plain numbers, as all codes
    /// do that are no integers, whose groups are out of order or smaller than a block, or whose difference from a zero point has nine bits.
    /// GPTQ's zero points are in files and nearly always in the middle: it counts as with eight bits.
    pub fn host_blocks(&self) -> Option<WeightFormat> {
        let splits_blocks = match self.shared {
            SharedBy::Tensor | SharedBy::Output => false,
            SharedBy::Group(inputs) | SharedBy::Block { inputs, .. } => !inputs.is_multiple_of(BLOCK),
        };
        if splits_blocks || self.group_indices == GroupIndices::Needed {
            return None;
        }
        match (self.codes, self.codes.bits(), self.zero_points) {
            (Codes::E4m3 | Codes::E2m1 | Codes::Levels, ..) | (Codes::Int8 | Codes::Packed(_), Bits::Eight, true) => {
                None
            }
            (_, Bits::Four, false) => Some(WeightFormat::Q4_0),
            (..) => Some(WeightFormat::Q8_0),
        }
    }
}

impl Codes {
    /// Of a code.
    pub fn bits(self) -> Bits {
        match self {
            Self::E4m3 | Self::Int8 => Bits::Eight,
            Self::Packed(bits) | Self::Gptq { bits, .. } => bits,
            Self::E2m1 | Self::Awq | Self::Levels => Bits::Four,
        }
    }
}

impl SharedBy {
    /// Outputs and inputs that share a scale in a matrix of that shape.
    pub fn block(self, [outputs, inputs]: [usize; 2]) -> [usize; 2] {
        match self {
            Self::Tensor => [outputs, inputs],
            Self::Output => [1, inputs],
            Self::Group(size) => [1, size],
            Self::Block { outputs, inputs } => [outputs, inputs],
        }
    }

    /// Scales along outputs and along inputs. The last ones may be of fewer weights.
    pub fn grid(self, shape: [usize; 2]) -> [usize; 2] {
        let block = self.block(shape);
        [shape[0].div_ceil(block[0]), shape[1].div_ceil(block[1])]
    }
}

impl Scheme {
    /// Whether numbers are e4m3 and those of a row share a scale.
    pub fn has_rows_of_e4m3(&self) -> bool {
        self.codes == Codes::E4m3 && matches!(self.shared, SharedBy::Tensor | SharedBy::Output)
    }

    /// Whether numbers are e4m3 and those of a block share a scale, as DeepSeek and Qwen publish them.
    pub fn has_blocks_of_e4m3(&self) -> bool {
        let is_block = |shared| match shared {
            SharedBy::Block { outputs, inputs } => inputs == BLOCK_INPUTS && outputs.is_multiple_of(BLOCK_OUTPUTS),
            SharedBy::Tensor | SharedBy::Output | SharedBy::Group(_) => false,
        };
        self.codes == Codes::E4m3 && is_block(self.shared)
    }

    /// Whether codes are integers of four bits.
    pub fn is_int4(&self) -> bool {
        matches!(self.codes, Codes::Packed(Bits::Four) | Codes::Gptq { bits: Bits::Four, .. } | Codes::Awq)
    }

    /// Who shares a scale where a GPU keeps a projection of that many inputs in four bits, if by its description it may.
    pub fn int4_group(&self, n_inputs: usize) -> Option<GroupSize> {
        let size = self.shared.block([1, n_inputs])[1];
        GroupSize::of(size, n_inputs).filter(|_| self.is_int4() && self.group_indices != GroupIndices::Needed)
    }

    /// The tensors that hold a projection of that shape.
    pub fn parts(&self, shape: [usize; 2]) -> Vec<Part> {
        let mut parts = vec![self.codes_part(shape), self.scales_part(shape)];
        parts.extend(self.zero_points.then(|| self.zero_points_part(shape)));
        parts.extend(self.group_indices_part(shape[1]));
        if self.codes == Codes::Levels {
            parts.extend(self.level_parts(shape));
        }
        if let Codes::Packed(_) = self.codes {
            let names = &["weight_shape"];
            parts.push(Part { names, ..part(PartKind::Shape, vec![vec![2]], &[Dtype::I64, Dtype::I32]) });
        }
        let names: &[&str] = &["input_scale", "activation_scale", "input_zero_point", "input_scale_ub"];
        parts.extend(names.chunks(1).map(|names| Part {
            names,
            needed: false,
            ..part(PartKind::Activations, vec![], &[])
        }));
        parts
    }

    /// What the tensors that may hold a projection are called.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.parts([1, 1]).into_iter().flat_map(|part| part.names).copied()
    }

    fn codes_part(&self, [outputs, inputs]: [usize; 2]) -> Part {
        let (name, shape, dtypes): (&[&str], _, &[Dtype]) = match self.codes {
            Codes::E4m3 => (&["weight"], [outputs, inputs], &[Dtype::F8_E4M3]),
            Codes::Int8 => (&["weight"], [outputs, inputs], &[Dtype::I8]),
            Codes::Packed(bits) => (&["weight_packed"], [outputs, inputs.div_ceil(bits.per_word())], &[Dtype::I32]),
            Codes::E2m1 => (&["weight_packed"], [outputs, inputs.div_ceil(2)], &[Dtype::U8]),
            Codes::Gptq { bits, .. } => (&["qweight"], [inputs.div_ceil(bits.per_word()), outputs], &[Dtype::I32]),
            Codes::Awq => (&["qweight"], [inputs, outputs.div_ceil(Bits::Four.per_word())], &[Dtype::I32]),
            Codes::Levels => (&["weight"], [(outputs * inputs).div_ceil(2), 1], &[Dtype::U8]),
        };
        Part { names: name, ..part(PartKind::Codes, vec![shape.to_vec()], dtypes) }
    }

    fn scales_part(&self, shape: [usize; 2]) -> Part {
        let [rows, columns] = self.shared.grid(shape);
        let shapes = match self.shared {
            _ if self.codes == Codes::Levels => vec![vec![rows * columns]],
            SharedBy::Tensor => vec![vec![], vec![1], vec![1, 1]],
            SharedBy::Output if !self.is_by_inputs() => vec![vec![rows, 1], vec![rows]],
            _ if self.is_by_inputs() => vec![vec![columns, rows]],
            _ => vec![vec![rows, columns]],
        };
        Part { names: self.scale_names, ..part(PartKind::Scales, shapes, SCALE_DTYPES) }
    }

    fn zero_points_part(&self, shape: [usize; 2]) -> Part {
        let [rows, columns] = self.shared.grid(shape);
        let (names, shapes, dtypes): (&[&str], _, &[Dtype]) = match self.codes {
            Codes::Packed(bits) => {
                (&["weight_zero_point"], vec![vec![rows.div_ceil(bits.per_word()), columns]], &[Dtype::I32])
            }
            Codes::Gptq { bits, .. } => {
                (&["qzeros"], vec![vec![columns, rows.div_ceil(bits.per_word())]], &[Dtype::I32])
            }
            Codes::Awq => (&["qzeros"], vec![vec![columns, rows.div_ceil(Bits::Four.per_word())]], &[Dtype::I32]),
            Codes::E4m3 | Codes::E2m1 | Codes::Int8 | Codes::Levels => {
                (&["weight_zero_point"], self.scales_part(shape).shapes, &[Dtype::I8])
            }
        };
        Part { names, ..part(PartKind::ZeroPoints, shapes, dtypes) }
    }

    fn level_parts(&self, shape: [usize; 2]) -> Vec<Part> {
        let [rows, columns] = self.shared.grid(shape);
        let one = |kind, names, len: usize| Part { names, ..part(kind, vec![vec![len]], &[Dtype::F32]) };
        let n_outer = (rows * columns).div_ceil(SCALES_OF_ONE);
        let states: &[&str] = &["weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"];
        vec![
            one(PartKind::Levels, &["weight.quant_map"], 16),
            Part { needed: false, ..one(PartKind::OuterScales, &["weight.nested_absmax"], n_outer) },
            Part { needed: false, ..one(PartKind::OuterLevels, &["weight.nested_quant_map"], 256) },
            Part { names: states, ..part(PartKind::State, vec![], &[Dtype::U8]) },
        ]
    }

    fn group_indices_part(&self, n_inputs: usize) -> Option<Part> {
        let needed = match self.group_indices {
            GroupIndices::None => return None,
            GroupIndices::Optional => false,
            GroupIndices::Needed => true,
        };
        let names: &[&str] = if self.is_by_inputs() { &["g_idx"] } else { &["weight_g_idx"] };
        Some(Part { names, needed, ..part(PartKind::GroupIndices, vec![vec![n_inputs]], INDEX_DTYPES) })
    }

    /// Whether scales and zero points lie input by input.
    pub fn is_by_inputs(&self) -> bool {
        matches!(self.codes, Codes::Gptq { .. } | Codes::Awq)
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes {
            Codes::E4m3 => f.write_str("e4m3")?,
            Codes::Int8 => f.write_str("int8")?,
            Codes::Packed(bits) => write!(f, "int{} packed", bits.n())?,
            Codes::Gptq { bits, .. } => write!(f, "int{} as GPTQ packs", bits.n())?,
            Codes::Awq => f.write_str("int4 as AWQ packs")?,
            Codes::E2m1 => f.write_str("e2m1")?,
            Codes::Levels => f.write_str("4 bits of 16 levels")?,
        }
        f.write_str(if self.zero_points { ", scales and zero points by " } else { ", scales by " })?;
        match self.shared {
            SharedBy::Tensor => f.write_str("tensor")?,
            SharedBy::Output => f.write_str("output")?,
            SharedBy::Group(size) => write!(f, "{size} inputs")?,
            SharedBy::Block { outputs, inputs } => write!(f, "block of {outputs} x {inputs}")?,
        }
        if self.group_indices == GroupIndices::Needed {
            f.write_str(", inputs in any order")?;
        }
        Ok(())
    }
}

fn part(kind: PartKind, shapes: Vec<Vec<usize>>, dtypes: &'static [Dtype]) -> Part {
    Part { kind, names: &[], shapes, dtypes, needed: true }
}
