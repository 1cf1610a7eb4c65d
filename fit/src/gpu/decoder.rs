//! A rank's share of a decoder, as far as memory depends on it.

use std::collections::BTreeMap;

use super::{BLOCK_INPUTS, BLOCK_OUTPUTS, GroupSize, Heads, Int4Size, KvFormat, Push, WeightFormat, block_scales};
use crate::{
    format::BytesByFormat,
    model::{
        ModelSpec, Scheme,
        spec::{LayerSpec, LinearSpec, Rank, WeightRole, WeightSpec},
    },
};

/// Widths of rows in e4m3 are multiples of this.
const E4M3_STEP: usize = 16;
/// Chips that multiply in e4m3 and in four bits: H100, H200, GH200.
const HOPPER: (i32, i32) = (9, 0);

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecoderSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the rank's part of the feed-forward.
    pub inner: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Layers.
    pub n_layers: usize,
    /// Sets of rotary angles that layers name.
    pub n_rope_sets: usize,
    /// The rank's heads.
    pub heads: Heads,
    /// Which share it is.
    pub rank: Rank,
    /// How few rows go from rank to rank.
    pub push: Push,
    /// How the projections of layers lie on the device.
    pub projections: WeightFormat,
    /// How keys and values lie in the cache.
    pub kv_format: KvFormat,
    /// Bytes of those in four bits.
    pub int4_bytes: u64,
}

impl DecoderSizes {
    /// Of a model in bf16 whose layers are all alike; `None` for one without layers.
    pub fn of(spec: &ModelSpec, rank: Rank) -> Option<Self> {
        let first = spec.layers.first()?;
        let heads = first.attention.attention.heads.of_rank(rank);
        Some(Self {
            hidden: spec.hidden_size,
            inner: first.feed_forward.gate.weight.rows.len() / rank.of,
            vocab: spec.vocab_size,
            n_layers: spec.layers.len(),
            n_rope_sets: spec
                .layers
                .iter()
                .filter_map(|layer| layer.attention.rope_set)
                .max()
                .map_or(0, |last| last + 1),
            heads: Heads { n_q: heads.n_heads, n_kv: heads.n_kv_heads, dim: heads.head_dim },
            rank,
            push: Push::Words,
            projections: WeightFormat::Bf16,
            kv_format: KvFormat::Bf16,
            int4_bytes: 0,
        })
    }

    /// Whether rows can be quantised to e4m3 on a chip, or why not.
    pub fn check_fp8(&self, (major, minor): (i32, i32)) -> Result<(), String> {
        if (major, minor) != HOPPER {
            return Err(format!(
                "quantization fp8 needs a GPU of compute capability 9.0 (H100, H200, GH200), this one has {major}.{minor}: leave it out"
            ));
        }
        let widths = [self.hidden, self.attended_width(), self.inner];
        match widths.into_iter().find(|width| !width.is_multiple_of(E4M3_STEP)) {
            Some(width) => Err(format!(
                "quantization fp8 takes rows of multiples of {E4M3_STEP} values, this model has rows of {width}: leave it out"
            )),
            None => Ok(()),
        }
    }

    /// Whether a chip multiplies such projections in four bits.
    pub fn may_have_four_bits(&self, capability: (i32, i32)) -> bool {
        let widths = [self.hidden, self.attended_width(), self.inner];
        capability == HOPPER && widths.iter().all(|width| width.is_multiple_of(8))
    }

    /// Bytes that one token takes in the cache: keys and values of all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.n_layers * self.heads.n_kv * self.heads.dim * self.kv_format.bytes()) as u64
    }

    /// Bytes of all weights on the device; `n_params` are all numbers.
    pub fn weights_bytes(&self, n_params: u64) -> u64 {
        self.held(n_params).values().sum()
    }

    /// The same by formats.
    pub fn held(&self, n_params: u64) -> BytesByFormat {
        let projected = (self.n_layers * self.layer_values()) as u64;
        let others = || 2 * (n_params - projected);
        match self.projections {
            WeightFormat::Bf16 => BTreeMap::from([("bf16", 2 * n_params)]),
            WeightFormat::E4m3 => {
                let Self { hidden, inner, n_layers, .. } = *self;
                let scales = 4 * n_layers * (self.heads.qkv_width() + 2 * inner + 2 * hidden);
                BTreeMap::from([("bf16", others()), ("fp8", projected + scales as u64)])
            }
            WeightFormat::E4m3Blocks => {
                let scales: usize = self.projections().into_iter().map(|[n, k]| 4 * block_scales(n, k)).sum();
                BTreeMap::from([("bf16", others()), ("fp8", projected + (self.n_layers * scales) as u64)])
            }
            WeightFormat::Int4 => BTreeMap::from([("bf16", others()), ("int4", self.int4_bytes)]),
        }
    }

    /// Width of attention's output.
    pub fn attended_width(&self) -> usize {
        self.heads.n_q * self.heads.dim
    }

    /// The widest row that a projection multiplies.
    pub fn widest_input(&self) -> usize {
        self.hidden.max(self.attended_width()).max(self.inner)
    }

    /// Numbers of the largest projection.
    pub fn largest_projection(&self) -> usize {
        self.projections().into_iter().map(|[n, k]| n * k).max().unwrap_or(0)
    }

    /// Outputs of the projection that has most.
    pub fn most_outputs(&self) -> usize {
        self.projections().into_iter().map(|[n, _]| n).max().unwrap_or(0)
    }

    /// Numbers of a layer's projections.
    fn layer_values(&self) -> usize {
        self.projections().into_iter().map(|[n, k]| n * k).sum()
    }

    /// Outputs and depths of a layer's projections, as they are multiplied.
    fn projections(&self) -> [[usize; 2]; 4] {
        let Self { hidden, inner, .. } = *self;
        let attended = self.attended_width();
        [[self.heads.qkv_width(), hidden], [hidden, attended], [2 * inner, hidden], [hidden, inner]]
    }
}

/// How a rank's projections lie on a GPU that multiplies e4m3, where those of all layers are stored as such numbers and share scales by
/// rows, or by blocks that every rank has whole: all multiply alike.
pub fn stored_e4m3(spec: &ModelSpec, rank: Rank) -> Option<WeightFormat> {
    let projections = || spec.layers.iter().flat_map(LayerSpec::weights).filter(|it| it.role == WeightRole::Projection);
    let all_are = |is_so: &dyn Fn(&WeightSpec, &Scheme) -> bool| {
        projections().all(|weight| weight.scheme.as_ref().is_some_and(|scheme| is_so(weight, scheme)))
    };
    if all_are(&|_, scheme| scheme.has_rows_of_e4m3()) {
        return Some(WeightFormat::E4m3);
    }
    let is_whole = |weight: &WeightSpec| Rank::all(rank.of).all(|rank| has_whole_blocks(weight, rank));
    all_are(&|weight, scheme| scheme.has_blocks_of_e4m3() && is_whole(weight)).then_some(WeightFormat::E4m3Blocks)
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

/// Bytes of a rank's projections in four bits, where they all are by their description.
pub fn described_int4_bytes(spec: &ModelSpec, rank: Rank) -> Option<u64> {
    let of_layer = |LayerSpec { attention, feed_forward }: &LayerSpec| {
        let fused: [&[&LinearSpec]; 4] = [
            &[&attention.q, &attention.k, &attention.v],
            &[&attention.o],
            &[&feed_forward.gate, &feed_forward.up],
            &[&feed_forward.down],
        ];
        fused.iter().map(|parts| described_int4(parts, rank).map(|size| size.n_bytes() as u64)).sum::<Option<u64>>()
    };
    spec.layers.iter().map(of_layer).sum()
}

/// The size of projections that lie behind each other; the groups of one may be those of another in pieces.
fn described_int4(parts: &[&LinearSpec], rank: Rank) -> Option<Int4Size> {
    let shares: Vec<_> = parts.iter().map(|part| part.weight.slice(rank).ok()).collect::<Option<_>>()?;
    let k = shares.first()?.columns.len();
    let groups: Vec<GroupSize> =
        parts.iter().map(|part| part.weight.scheme.as_ref()?.int4_group(k)).collect::<Option<_>>()?;
    let n = shares.iter().map(|share| share.rows.len()).sum();
    Some(Int4Size { n, k, group: GroupSize::smallest(&groups) })
}
