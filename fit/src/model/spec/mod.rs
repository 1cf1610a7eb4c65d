//! A decoder described once, layer by layer: what a loader reads, what the CPU computes and what the GPU's program is made
//! of. Values that print themselves; opens no file, knows no device.
//!
//! ```text
//! h = embedding(tokens) * scale
//! for each layer:  h += after(o(attention(rope(norm(q(n))), rope(norm(k(n))), v(n))))   with n = before(h)
//!                  h += after(down(activation(gate(n)) * up(n)))                        with n = before(h)
//! logits = cap(head(norm(h)))                                       only for rows that are sampled
//! ```
//!
//! What a model does not have is `None` here.

mod build;
mod print;
mod weight;

pub use build::{CheckpointFormat, LAYERS_MAX};
pub use print::Description;
pub use weight::{Rank, RowOrder, Sharding, Stage, VOCABULARY_STEP, WeightRole, WeightSlice, WeightSpec};

use super::{ModelError, RopeSettings, family::NormWeight};

/// A decoder, or a stage of one.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Hugging Face's name of the architecture.
    pub architecture: &'static str,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// From tokens to the residual stream.
    pub embedding: EmbeddingSpec,
    /// Which stage it is: of the others it has no layers.
    pub stage: Stage,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// The norm behind the last layer.
    pub norm: NormSpec,
    /// From the residual stream to logits.
    pub head: HeadSpec,
    /// Sets of rotary angles; a layer names its own by index.
    pub rope_sets: Vec<RopeSettings>,
}

/// From tokens to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// The table, `vocabulary x hidden`.
    pub weight: WeightSpec,
    /// Factor on its rows.
    pub scale: Option<f32>,
}

/// From the residual stream to logits.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSpec {
    /// The output matrix, `vocabulary x hidden`; `None`: the embedding table is it too (tied).
    pub weight: Option<WeightSpec>,
    /// Logits go through `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
}

/// One layer. Each half adds what it gives to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The first half.
    pub attention: AttentionLayer,
    /// The second half.
    pub feed_forward: FeedForwardLayer,
}

/// Attention with its projections and norms.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionLayer {
    /// The norm of what goes in.
    pub before: Option<NormSpec>,
    /// Queries, `heads x head width` outputs.
    pub q: LinearSpec,
    /// Keys, `KV heads x head width` outputs.
    pub k: LinearSpec,
    /// Values, as many as keys.
    pub v: LinearSpec,
    /// Norms of queries and keys, before they are turned.
    pub qk_norm: Option<QkNormSpec>,
    /// The rotary angles that queries and keys are turned by: an index into [`ModelSpec::rope_sets`]; `None`: they are not.
    pub rope_set: Option<usize>,
    /// How queries meet keys and values.
    pub attention: AttentionSpec,
    /// Output.
    pub o: LinearSpec,
    /// The norm of what is added.
    pub after: Option<NormSpec>,
}

/// How one layer attends to the tokens before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Its heads.
    pub heads: HeadShape,
    /// Factor on the product of query and key.
    pub scale: f32,
    /// Tokens a query sees, itself included; `None`: all up to itself.
    pub window: Option<usize>,
    /// Scores go through `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

/// Heads of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Norms of queries and keys. A norm is over as many numbers as its weight has: each head, or the whole row.
#[derive(Clone, Debug, PartialEq)]
pub struct QkNormSpec {
    /// Of queries.
    pub q: NormSpec,
    /// Of keys.
    pub k: NormSpec,
}

/// A gated feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForwardLayer {
    /// The norm of what goes in.
    pub before: Option<NormSpec>,
    /// What goes through the activation.
    pub gate: LinearSpec,
    /// What that is multiplied with.
    pub up: LinearSpec,
    /// The gate's curve.
    pub activation: Activation,
    /// Output.
    pub down: LinearSpec,
    /// The norm of what is added.
    pub after: Option<NormSpec>,
}

/// The curve a feed-forward gate goes through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
}

/// `x * weight^T + bias`.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    /// `outputs x inputs`.
    pub weight: WeightSpec,
    /// One number an output.
    pub bias: Option<WeightSpec>,
}

/// `x / sqrt(mean(x^2) + eps) * factor` over every run of a row that is as long as the weight.
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    /// One number a column.
    pub weight: WeightSpec,
    /// Whether it holds the factor.
    pub stored: NormWeight,
    /// Added under the root.
    pub eps: f32,
}

impl ModelSpec {
    /// Every weight once, in the order of the computation. A last stage has the embedding table as well where that is its head.
    pub fn weights(&self) -> impl Iterator<Item = &WeightSpec> {
        let is_last = self.stage.is_last();
        let embedding = self.has_embedding().then_some(&self.embedding.weight);
        let layers = self.layers.iter().flat_map(LayerSpec::weights);
        let head = self.head.weight.as_ref().filter(|_| is_last);
        embedding.into_iter().chain(layers).chain(is_last.then_some(&self.norm.weight)).chain(head)
    }

    /// Whether it reads the embedding table: to look tokens up, or as its head.
    pub fn has_embedding(&self) -> bool {
        self.stage.is_first() || (self.stage.is_last() && self.head.weight.is_none())
    }

    /// A stage of it, which has as many stages as layers at most.
    pub fn staged(&self, stage: Stage) -> Self {
        let layers = stage.layers(self.layers.len(), self.head_in_layers());
        Self { stage, layers: self.layers[layers].to_vec(), ..self.clone() }
    }

    /// How many layers take as long as the head: by what is read of both, and a layer takes as long again for what its weights are not in.
    /// (Llama-3.1-8B of 128 rows on an H200: 1.2 by this, 1.5 measured.)
    fn head_in_layers(&self) -> f64 {
        let head = self.vocab_size as f64 * self.hidden_size as f64;
        let layer: u64 = self.layers.iter().flat_map(LayerSpec::weights).map(WeightSpec::n_values).sum();
        head * self.layers.len() as f64 / (2.0 * layer as f64)
    }

    /// Whether so many stages have a layer each.
    pub fn check_stages(&self, of: usize) -> Result<(), ModelError> {
        match self.layers.len() {
            n_layers if of > n_layers => Err(ModelError::TooManyStages { n_layers, n_stages: of }),
            _ => Ok(()),
        }
    }

    /// Whether a weight is quantised in the checkpoint.
    pub fn is_quantised(&self) -> bool {
        self.weights().any(|weight| weight.scheme.is_some())
    }

    /// Whether a group of so many ranks can share it, before anything of it is read.
    pub fn check_ranks(&self, of: usize) -> Result<(), ModelError> {
        if of == 1 {
            return Ok(());
        }
        if let Some(norm) = self.layers.iter().find_map(LayerSpec::undivided) {
            return Err(ModelError::Undivided { tensor: norm.name.clone(), architecture: self.architecture.into() });
        }
        Rank::all(of).try_for_each(|rank| self.weights().try_for_each(|weight| weight.slice(rank).map(|_| ())))
    }

    /// Numbers of a rank's share of all weights.
    pub fn n_params_of(&self, rank: Rank) -> Result<u64, ModelError> {
        self.weights().try_fold(0u64, |sum, weight| Ok(sum.saturating_add(weight.n_values_of(rank)?)))
    }

    /// Floating-point operations that a prompt of so many tokens takes: two for each number of a matrix and row, the head's for the
    /// last row alone, and four for each number of a query and token that it sees. Norms, rotations and softmax are not counted.
    pub fn prompt_flop(&self, n_tokens: usize) -> f64 {
        let layers: f64 = self.layers.iter().map(|layer| layer.prompt_flop(n_tokens)).sum();
        layers + 2.0 * self.vocab_size as f64 * self.hidden_size as f64
    }

    /// Numbers of all weights, tied ones counted once.
    pub fn n_params(&self) -> u64 {
        self.weights().fold(0, |sum, weight| sum.saturating_add(weight.n_values()))
    }
}

impl LayerSpec {
    /// Why ranks cannot share it: what runs over a whole row that each has a part of.
    fn undivided(&self) -> Option<&WeightSpec> {
        let AttentionLayer { qk_norm, attention, .. } = &self.attention;
        let norm = qk_norm.as_ref().map(|norms| &norms.q.weight)?;
        (norm.rows.len() != attention.heads.head_dim).then_some(norm)
    }

    fn prompt_flop(&self, n_tokens: usize) -> f64 {
        let AttentionLayer { q, k, v, o, attention, .. } = &self.attention;
        let FeedForwardLayer { gate, up, down, .. } = &self.feed_forward;
        let n_numbers: u64 = [q, k, v, o, gate, up, down].iter().map(|linear| linear.weight.n_values()).sum();
        let seen: usize =
            (1..=n_tokens).map(|n_before| attention.window.map_or(n_before, |most| most.min(n_before))).sum();
        2.0 * n_numbers as f64 * n_tokens as f64 + 4.0 * attention.heads.q_width() as f64 * seen as f64
    }

    /// Every weight of the layer, in the order of the computation.
    pub fn weights(&self) -> impl Iterator<Item = &WeightSpec> {
        let AttentionLayer { before, q, k, v, qk_norm, o, after, .. } = &self.attention;
        let feed = &self.feed_forward;
        let qk_norms = qk_norm.iter().flat_map(|norms| [&norms.q.weight, &norms.k.weight]);
        norm_weight(before)
            .into_iter()
            .chain([q, k, v].into_iter().flat_map(LinearSpec::weights))
            .chain(qk_norms)
            .chain(o.weights())
            .chain(norm_weight(after))
            .chain(norm_weight(&feed.before))
            .chain([&feed.gate, &feed.up, &feed.down].into_iter().flat_map(LinearSpec::weights))
            .chain(norm_weight(&feed.after))
    }
}

fn norm_weight(norm: &Option<NormSpec>) -> Option<&WeightSpec> {
    norm.as_ref().map(|norm| &norm.weight)
}

impl LinearSpec {
    fn weights(&self) -> impl Iterator<Item = &WeightSpec> {
        [&self.weight].into_iter().chain(&self.bias)
    }
}

impl AttentionSpec {
    /// A rank's share of it.
    pub fn of_rank(self, rank: Rank) -> Self {
        Self { heads: self.heads.of_rank(rank), ..self }
    }
}

impl HeadShape {
    /// A rank's share of them.
    pub fn of_rank(self, rank: Rank) -> Self {
        Self { n_heads: self.n_heads / rank.of, n_kv_heads: rank.kv_heads(self.n_kv_heads), ..self }
    }

    /// Width of all queries of a token.
    pub fn q_width(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Width of all keys of a token, or of all values.
    pub fn kv_width(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }
}
