//! A rank's share of a decoder, as far as memory depends on it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Heads, KvFormat, LayerFormats, Push, WeightFormat};
use crate::{
    format::BytesByFormat,
    model::{
        ModelSpec,
        spec::{Rank, Stage},
    },
};

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the rank's part of the feed-forward.
    pub inner: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// How the projections of each layer lie on the device.
    pub layers: Vec<LayerFormats>,
    /// Sets of rotary angles that layers name.
    pub n_rope_sets: usize,
    /// The rank's heads.
    pub heads: Heads,
    /// Which share it is.
    pub rank: Rank,
    /// Of which stage.
    pub stage: Stage,
    /// How few rows go from rank to rank.
    pub push: Push,
    /// How keys and values lie in the cache.
    pub kv_format: KvFormat,
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
            layers: vec![LayerFormats::all(WeightFormat::Bf16); spec.layers.len()],
            n_rope_sets: spec
                .layers
                .iter()
                .filter_map(|layer| layer.attention.rope_set)
                .max()
                .map_or(0, |last| last + 1),
            heads: Heads { n_q: heads.n_heads, n_kv: heads.n_kv_heads, dim: heads.head_dim },
            rank,
            stage: spec.stage,
            push: Push::Words,
            kv_format: KvFormat::Bf16,
        })
    }

    /// Bytes that one token takes in the cache: keys and values of all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.layers.len() * self.heads.n_kv * self.heads.dim * self.kv_format.bytes()) as u64
    }

    /// Bytes of all weights on the device; `n_params` are all numbers.
    pub fn weights_bytes(&self, n_params: u64) -> u64 {
        self.held(n_params).values().sum()
    }

    /// The same by formats.
    pub fn held(&self, n_params: u64) -> BytesByFormat {
        let projected: usize = self.projections().map(|(_, [n, k])| n * k).sum();
        let mut held = BTreeMap::from([(WeightFormat::Bf16.name(), 2 * (n_params - projected as u64))]);
        for (format, size) in self.projections() {
            *held.entry(format.name()).or_default() += format.bytes(size);
        }
        held
    }

    /// Every format that some projection has.
    pub fn formats(&self) -> BTreeSet<WeightFormat> {
        self.layers.iter().flat_map(|layer| layer.each()).collect()
    }

    /// Width of attention's output.
    pub fn attended_width(&self) -> usize {
        self.heads.n_q * self.heads.dim
    }

    /// The widest row that a projection multiplies.
    pub fn widest_input(&self) -> usize {
        self.hidden.max(self.attended_width()).max(self.inner)
    }

    /// Numbers of the largest projection in four bits, and outputs of the one that has most; 0 without.
    pub fn largest_int4(&self) -> (usize, usize) {
        let int4 = self.projections().filter(|(format, _)| format.is_int4());
        int4.fold((0, 0), |(values, outputs), (_, [n, k])| (values.max(n * k), outputs.max(n)))
    }

    /// All layers' projections: how they are stored, their outputs and depths as they are multiplied.
    fn projections(&self) -> impl Iterator<Item = (WeightFormat, [usize; 2])> {
        let Self { hidden, inner, .. } = *self;
        let sizes =
            [[self.heads.qkv_width(), hidden], [hidden, self.attended_width()], [2 * inner, hidden], [hidden, inner]];
        self.layers.iter().flat_map(move |layer| layer.each().into_iter().zip(sizes))
    }
}
