//! How the projections of a rank's layers lie on a GPU: each in the format of its own that it is stored in, where the chip multiplies it so.
//! Pure.

use super::{BLOCK_INPUTS, BLOCK_OUTPUTS, GroupSize, Int4Size, block_scales};
use crate::model::{
    ModelSpec, Scheme,
    spec::{AttentionLayer, FeedForwardLayer, LayerSpec, LinearSpec, Rank, WeightSpec},
};

/// Widths of rows in e4m3 are multiples of this.
const E4M3_STEP: usize = 16;
/// Widths of rows that four bits are multiplied with.
const INT4_STEP: usize = 8;
/// Chips that multiply in e4m3 and in four bits: H100, H200, GH200.
const HOPPER: (i32, i32) = (9, 0);

/// How the weights of a GEMM are stored.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum WeightFormat {
    /// As bf16.
    Bf16,
    /// As e4m3 with a scale a row. One row of x stays bf16, more are quantised too.
    E4m3,
    /// The same with a scale for each block of [`BLOCK_OUTPUTS`] rows and [`BLOCK_INPUTS`] columns.
    E4m3Blocks,
    /// In four bits with a scale and a zero point for each group. Few rows of x stay bf16.
    Int4(GroupSize),
}

impl WeightFormat {
    /// Whether numbers are e4m3.
    pub fn is_e4m3(self) -> bool {
        matches!(self, Self::E4m3 | Self::E4m3Blocks)
    }

    /// Whether numbers are of four bits.
    pub fn is_int4(self) -> bool {
        matches!(self, Self::Int4(_))
    }

    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::E4m3 | Self::E4m3Blocks => "fp8",
            Self::Int4(_) => "int4",
        }
    }

    /// Bytes of a matrix of `n` outputs and a depth of `k`, with its scales.
    pub fn bytes(self, [n, k]: [usize; 2]) -> u64 {
        let bytes = match self {
            Self::Bf16 => 2 * n * k,
            Self::E4m3 => n * k + 4 * n,
            Self::E4m3Blocks => n * k + 4 * block_scales(n, k),
            Self::Int4(group) => Int4Size { n, k, group }.n_bytes(),
        };
        bytes as u64
    }
}

/// How the projections of a layer lie: those of queries, keys and values are one, those of gate and up are one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LayerFormats {
    /// Queries, keys and values.
    pub qkv: WeightFormat,
    /// What attention gave.
    pub o: WeightFormat,
    /// The feed-forward's gate, and what it gates.
    pub gate_up: WeightFormat,
    /// What the feed-forward gives.
    pub down: WeightFormat,
}

impl LayerFormats {
    /// All alike.
    pub fn all(format: WeightFormat) -> Self {
        Self { qkv: format, o: format, gate_up: format, down: format }
    }

    /// In the order of fields.
    pub fn each(self) -> [WeightFormat; 4] {
        [self.qkv, self.o, self.gate_up, self.down]
    }
}

/// Of every layer of a model's share. Projections that lie in one matrix are of one format, or all bf16. With `fp8` no number takes more than a
/// byte: what is stored in e4m3 stays what it is, the rest is quantised by rows; or why the chip or a width is not for that.
pub fn layer_formats(
    spec: &ModelSpec,
    rank: Rank,
    capability: (i32, i32),
    fp8: bool,
) -> Result<Vec<LayerFormats>, String> {
    if fp8 && capability != HOPPER {
        let (major, minor) = capability;
        return Err(format!(
            "quantization fp8 needs a GPU of compute capability 9.0 (H100, H200, GH200), this one has {major}.{minor}: leave it out"
        ));
    }
    let of = |parts: &[&LinearSpec]| match stored(parts, rank).filter(|_| capability == HOPPER) {
        Some((k, format)) if fp8 && !format.is_e4m3() => quantised(k),
        Some((_, format)) => Ok(format),
        None => Ok(WeightFormat::Bf16),
    };
    let of_layer = |LayerSpec { attention, feed_forward }: &LayerSpec| {
        let AttentionLayer { q, k, v, o, .. } = attention;
        let FeedForwardLayer { gate, up, down, .. } = feed_forward;
        Ok(LayerFormats { qkv: of(&[q, k, v])?, o: of(&[o])?, gate_up: of(&[gate, up])?, down: of(&[down])? })
    };
    spec.layers.iter().map(of_layer).collect()
}

fn quantised(k: usize) -> Result<WeightFormat, String> {
    match k.is_multiple_of(E4M3_STEP) {
        true => Ok(WeightFormat::E4m3),
        false => Err(format!(
            "quantization fp8 takes rows of multiples of {E4M3_STEP} values, this model has rows of {k}: leave it out"
        )),
    }
}

/// The depth of a rank's share of what lies in one matrix, and how it is kept as it is stored; `None` where ranks do not divide it.
fn stored(parts: &[&LinearSpec], rank: Rank) -> Option<(usize, WeightFormat)> {
    let k = parts.first()?.weight.slice(rank).ok()?.columns.len();
    let schemes: Option<Vec<&Scheme>> = parts.iter().map(|part| part.weight.scheme.as_ref()).collect();
    let format = schemes.and_then(|schemes| {
        let all_are = |is_so: fn(&Scheme) -> bool| schemes.iter().all(|scheme| is_so(scheme));
        if all_are(Scheme::has_rows_of_e4m3) {
            return Some(WeightFormat::E4m3);
        }
        if all_are(Scheme::has_blocks_of_e4m3) {
            // Ranks have all the same.
            let is_whole = |part: &&LinearSpec| Rank::all(rank.of).all(|rank| has_whole_blocks(&part.weight, rank));
            return parts.iter().all(is_whole).then_some(WeightFormat::E4m3Blocks);
        }
        let groups: Vec<GroupSize> = schemes.iter().map(|scheme| scheme.int4_group(k)).collect::<Option<_>>()?;
        Some(WeightFormat::Int4(GroupSize::smallest(&groups)))
    });
    let is_taken = |format: &WeightFormat| k.is_multiple_of(if format.is_int4() { INT4_STEP } else { E4M3_STEP });
    Some((k, format.filter(is_taken).unwrap_or(WeightFormat::Bf16)))
}

/// The last inputs of all may be less than a block.
fn has_whole_blocks(weight: &WeightSpec, rank: Rank) -> bool {
    let Ok(share) = weight.slice(rank) else { return false };
    let n_inputs = weight.tensor_shape.get(1).copied().unwrap_or(1);
    let are_whole = |at: usize| at.is_multiple_of(BLOCK_INPUTS) || at == n_inputs;
    [share.rows.start, share.rows.end].iter().all(|at| at.is_multiple_of(BLOCK_OUTPUTS))
        && are_whole(share.columns.start)
        && are_whole(share.columns.end)
}
