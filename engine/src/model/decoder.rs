//! The decoder of every family: its forward pass, written once over `Ops`. What a family does not have is `None` here.
//!
//! ```text
//! h = embed(tokens) * scale
//! for each layer:  h += after(o(attention(rope(norm(q(n))), rope(norm(k(n))), v(n))))   with n = before(h)
//!                  h += after(down(activation(gate(n)) * up(n)))                        with n = before(h)
//! logits = cap(lm_head(norm(h)))                                    only for rows that are sampled
//! ```

use super::{AttentionSpec, ModelConfig, ModelError, RopeOfLayer, RopeTable, WeightStore, loader::Loader};
use crate::{exec::BatchInputs, ops::Ops};

/// A model on one back end.
#[derive(Debug)]
pub struct Decoder<O: Ops> {
    config: ModelConfig,
    rope: Ropes<O>,
    embed: O::Matrix,
    layers: Vec<Layer<O>>,
    norm: O::Vector,
    /// `None`: the embedding table is the output matrix too.
    lm_head: Option<O::Matrix>,
    n_params: u64,
    dtype: String,
}

/// The angles of the model's layers.
#[derive(Debug)]
struct Ropes<O: Ops> {
    model: O::Rope,
    windowed: Option<O::Rope>,
}

#[derive(Debug)]
pub(super) struct Layer<O: Ops> {
    pub(super) attention: Attention<O>,
    pub(super) feed_forward: FeedForward<O>,
}

#[derive(Debug)]
pub(super) struct Attention<O: Ops> {
    pub(super) spec: AttentionSpec,
    pub(super) rope: RopeOfLayer,
    pub(super) before: Option<O::Vector>,
    pub(super) q: Linear<O>,
    pub(super) k: Linear<O>,
    pub(super) v: Linear<O>,
    pub(super) q_norm: Option<O::Vector>,
    pub(super) k_norm: Option<O::Vector>,
    pub(super) o: Linear<O>,
    pub(super) after: Option<O::Vector>,
}

#[derive(Debug)]
pub(super) struct FeedForward<O: Ops> {
    pub(super) before: Option<O::Vector>,
    pub(super) gate: Linear<O>,
    pub(super) up: Linear<O>,
    pub(super) down: Linear<O>,
    pub(super) after: Option<O::Vector>,
}

#[derive(Debug)]
pub(super) struct Linear<O: Ops> {
    pub(super) weight: O::Matrix,
    pub(super) bias: Option<O::Vector>,
}

impl<O: Ops> Decoder<O> {
    /// Takes the weights over; `progress` hears the share of layers done.
    pub fn load(
        ops: &mut O,
        config: ModelConfig,
        weights: WeightStore,
        n_positions: usize,
        progress: &dyn Fn(f32),
    ) -> Result<Self, ModelError> {
        let mut loader = Loader::new(ops, weights, &config);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embed = loader.matrix("model.embed_tokens.weight", [vocab, hidden])?;
        // Not reserved: the file's claim of how many layers there are is believed only as far as tensors exist.
        let mut layers = Vec::new();
        for layer in 0..config.num_hidden_layers {
            layers.push(loader.layer(layer)?);
            progress((layer + 1) as f32 / config.num_hidden_layers as f32);
        }
        let norm = loader.norm("model.norm.weight", hidden)?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix("lm_head.weight", [vocab, hidden])?),
        };
        let (n_params, dtype) = loader.finish()?;
        let rope = Ropes::new(ops, &config, n_positions);
        Ok(Self { config, rope, embed, layers, norm, lm_head, n_params, dtype })
    }

    /// The logits of the batch's sampled rows.
    pub fn forward(&self, ops: &mut O, cache: &mut O::Cache, inputs: &BatchInputs) -> O::Activations {
        let batch = ops.bind(inputs);
        let mut hidden = self.embed(ops, &batch);
        for (idx, layer) in self.layers.iter().enumerate() {
            let attended = self.attend(ops, cache, idx, &hidden, &batch);
            ops.add(&mut hidden, &attended);
            let fed = self.feed_forward(ops, &layer.feed_forward, &hidden);
            ops.add(&mut hidden, &fed);
        }
        let sampled = ops.sampled_rows(&hidden, &batch);
        self.logits(ops, &sampled)
    }

    /// Parameters, tied ones counted once.
    pub fn n_params(&self) -> u64 {
        self.n_params
    }

    /// Number format of the weights as stored.
    pub fn dtype(&self) -> &str {
        &self.dtype
    }

    fn embed(&self, ops: &mut O, batch: &O::Batch) -> O::Activations {
        let mut hidden = ops.embed(&self.embed, batch);
        if let Some(factor) = self.config.embedding_scale {
            ops.scale(&mut hidden, factor);
        }
        hidden
    }

    fn attend(
        &self,
        ops: &mut O,
        cache: &mut O::Cache,
        idx: usize,
        hidden: &O::Activations,
        batch: &O::Batch,
    ) -> O::Activations {
        let Attention { spec, rope, before, q, k, v, q_norm, k_norm, o, after } = &self.layers[idx].attention;
        let normed = before.as_ref().map(|norm| self.norm(ops, hidden, norm));
        let input = normed.as_ref().unwrap_or(hidden);
        let [queries, keys, values] = ops.linear(input, [q.parts(), k.parts(), v.parts()]);
        let mut queries = self.norm_if(ops, queries, q_norm);
        let mut keys = self.norm_if(ops, keys, k_norm);
        if let Some(angles) = self.rope.of(*rope) {
            ops.rope(&mut queries, angles, batch);
            ops.rope(&mut keys, angles, batch);
        }
        ops.store_kv(cache, idx, &keys, &values, batch);
        let attended = ops.attention(cache, idx, &queries, *spec, batch);
        let [output] = ops.linear(&attended, [o.parts()]);
        self.norm_if(ops, output, after)
    }

    fn feed_forward(&self, ops: &mut O, layer: &FeedForward<O>, hidden: &O::Activations) -> O::Activations {
        let normed = layer.before.as_ref().map(|norm| self.norm(ops, hidden, norm));
        let input = normed.as_ref().unwrap_or(hidden);
        let [gate, up] = ops.linear(input, [layer.gate.parts(), layer.up.parts()]);
        let activated = ops.activate_mul(gate, &up, self.config.activation);
        let [output] = ops.linear(&activated, [layer.down.parts()]);
        self.norm_if(ops, output, &layer.after)
    }

    fn logits(&self, ops: &mut O, sampled: &O::Activations) -> O::Activations {
        let normed = self.norm(ops, sampled, &self.norm);
        let [mut logits] = ops.linear(&normed, [(self.lm_head.as_ref().unwrap_or(&self.embed), None)]);
        if let Some(cap) = self.config.logit_softcap {
            ops.softcap(&mut logits, cap);
        }
        logits
    }

    fn norm(&self, ops: &mut O, x: &O::Activations, weight: &O::Vector) -> O::Activations {
        ops.rms_norm(x, weight, self.config.rms_norm_eps)
    }

    fn norm_if(&self, ops: &mut O, x: O::Activations, weight: &Option<O::Vector>) -> O::Activations {
        match weight {
            Some(weight) => self.norm(ops, &x, weight),
            None => x,
        }
    }
}

impl<O: Ops> Ropes<O> {
    fn new(ops: &O, config: &ModelConfig, n_positions: usize) -> Self {
        let table = |settings| ops.rope_table(RopeTable::new(settings, config.head_dim, n_positions));
        Self { model: table(&config.rope), windowed: config.windowed_rope.as_ref().map(table) }
    }

    fn of(&self, layer: RopeOfLayer) -> Option<&O::Rope> {
        match layer {
            RopeOfLayer::None => None,
            RopeOfLayer::Model => Some(&self.model),
            RopeOfLayer::Windowed => self.windowed.as_ref(),
        }
    }
}

impl<O: Ops> Linear<O> {
    fn parts(&self) -> (&O::Matrix, Option<&O::Vector>) {
        (&self.weight, self.bias.as_ref())
    }
}
