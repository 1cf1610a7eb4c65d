//! Llama: weights and forward pass, written once over `Ops`.
//!
//! ```text
//! h = embed(tokens)
//! for each layer:  h += o(attention(rope(q(n)), rope(k(n)), v(n)))   with n = rms_norm(h)
//!                  h += down(silu(gate(n)) * up(n))                  with n = rms_norm(h)
//! logits = lm_head(rms_norm(h))                                      only for rows that are sampled
//! ```

use super::{LlamaConfig, ModelError, RopeTable, WeightStore};
use crate::{
    exec::BatchInputs,
    ops::{Activation, AttentionSpec, HeadShape, Ops},
};

const ARCHITECTURE: &str = "LlamaForCausalLM";

/// A Llama model on one back end.
#[derive(Debug)]
pub struct Llama<O: Ops> {
    config: LlamaConfig,
    rope: O::Rope,
    embed: O::Matrix,
    layers: Vec<Layer<O>>,
    norm: O::Vector,
    /// `None`: the embedding table is the output matrix too.
    lm_head: Option<O::Matrix>,
    n_params: u64,
    dtype: String,
}

#[derive(Debug)]
struct Layer<O: Ops> {
    attention_norm: O::Vector,
    q: Linear<O>,
    k: Linear<O>,
    v: Linear<O>,
    o: Linear<O>,
    mlp_norm: O::Vector,
    gate: Linear<O>,
    up: Linear<O>,
    down: Linear<O>,
}

#[derive(Debug)]
struct Linear<O: Ops> {
    weight: O::Matrix,
    bias: Option<O::Vector>,
}

impl<O: Ops> Llama<O> {
    /// Takes the weights over; `progress` hears the share of layers done.
    pub fn load(
        ops: &O,
        config: LlamaConfig,
        weights: WeightStore,
        n_positions: usize,
        progress: &dyn Fn(f32),
    ) -> Result<Self, ModelError> {
        let mut loader = Loader { ops, weights, n_params: 0, dtype: None };
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let embed = loader.matrix("model.embed_tokens.weight", [vocab, hidden])?;
        // Not reserved: the file's claim of how many layers there are is believed only as far as tensors exist.
        let mut layers = Vec::new();
        for layer in 0..config.num_hidden_layers {
            layers.push(loader.layer(&config, layer)?);
            progress((layer + 1) as f32 / config.num_hidden_layers as f32);
        }
        let norm = loader.vector("model.norm.weight", hidden)?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix("lm_head.weight", [vocab, hidden])?),
        };
        let (n_params, dtype) = loader.finish(config.tie_word_embeddings)?;
        let rope = ops.rope_table(RopeTable::new(&config, n_positions));
        Ok(Self { config, rope, embed, layers, norm, lm_head, n_params, dtype })
    }

    /// The logits of the batch's sampled rows.
    pub fn forward(&self, ops: &mut O, cache: &mut O::Cache, inputs: &BatchInputs) -> O::Activations {
        let batch = ops.bind(inputs);
        let mut hidden = ops.embed(&self.embed, &batch);
        for (idx, layer) in self.layers.iter().enumerate() {
            let attended = self.attention(ops, cache, idx, &hidden, &batch);
            ops.add(&mut hidden, &attended);
            let fed = layer.feed_forward(ops, &hidden, self.config.rms_norm_eps);
            ops.add(&mut hidden, &fed);
        }
        let sampled = ops.sampled_rows(&hidden, &batch);
        let normed = ops.rms_norm(&sampled, &self.norm, self.config.rms_norm_eps);
        ops.linear(&normed, self.lm_head.as_ref().unwrap_or(&self.embed), None)
    }

    /// Parameters, tied ones counted once.
    pub fn n_params(&self) -> u64 {
        self.n_params
    }

    /// Number format of the weights as stored.
    pub fn dtype(&self) -> &str {
        &self.dtype
    }

    /// The architecture's Hugging Face name.
    pub fn architecture(&self) -> &'static str {
        ARCHITECTURE
    }

    fn attention(
        &self,
        ops: &mut O,
        cache: &mut O::Cache,
        idx: usize,
        hidden: &O::Activations,
        batch: &O::Batch,
    ) -> O::Activations {
        let layer = &self.layers[idx];
        let normed = ops.rms_norm(hidden, &layer.attention_norm, self.config.rms_norm_eps);
        let mut queries = layer.q.apply(ops, &normed);
        let mut keys = layer.k.apply(ops, &normed);
        let values = layer.v.apply(ops, &normed);
        ops.rope(&mut queries, &self.rope, batch);
        ops.rope(&mut keys, &self.rope, batch);
        ops.store_kv(cache, idx, &keys, &values, batch);
        let attended = ops.attention(cache, idx, &queries, self.attention_spec(), batch);
        layer.o.apply(ops, &attended)
    }

    fn attention_spec(&self) -> AttentionSpec {
        let LlamaConfig { num_attention_heads, num_key_value_heads, head_dim, .. } = self.config;
        let heads = HeadShape { n_heads: num_attention_heads, n_kv_heads: num_key_value_heads, head_dim };
        AttentionSpec { heads, scale: 1.0 / (head_dim as f32).sqrt(), window: None, softcap: None }
    }
}

impl<O: Ops> Layer<O> {
    fn feed_forward(&self, ops: &mut O, hidden: &O::Activations, eps: f32) -> O::Activations {
        let normed = ops.rms_norm(hidden, &self.mlp_norm, eps);
        let gate = self.gate.apply(ops, &normed);
        let up = self.up.apply(ops, &normed);
        let activated = ops.activate_mul(gate, &up, Activation::Silu);
        self.down.apply(ops, &activated)
    }
}

impl<O: Ops> Linear<O> {
    fn apply(&self, ops: &mut O, x: &O::Activations) -> O::Activations {
        ops.linear(x, &self.weight, self.bias.as_ref())
    }
}

/// Takes tensors out of the store by name and shape, counting what it took.
struct Loader<'a, O: Ops> {
    ops: &'a O,
    weights: WeightStore,
    n_params: u64,
    dtype: Option<String>,
}

impl<O: Ops> Loader<'_, O> {
    fn layer(&mut self, config: &LlamaConfig, idx: usize) -> Result<Layer<O>, ModelError> {
        let LlamaConfig { hidden_size: hidden, intermediate_size: inner, head_dim, .. } = *config;
        let (q_width, kv_width) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let name = |part: &str| format!("model.layers.{idx}.{part}");
        let (attention, mlp) = (config.attention_bias, config.mlp_bias);
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            q: self.linear(&name("self_attn.q_proj"), [q_width, hidden], attention)?,
            k: self.linear(&name("self_attn.k_proj"), [kv_width, hidden], attention)?,
            v: self.linear(&name("self_attn.v_proj"), [kv_width, hidden], attention)?,
            o: self.linear(&name("self_attn.o_proj"), [hidden, q_width], attention)?,
            mlp_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            gate: self.linear(&name("mlp.gate_proj"), [inner, hidden], mlp)?,
            up: self.linear(&name("mlp.up_proj"), [inner, hidden], mlp)?,
            down: self.linear(&name("mlp.down_proj"), [hidden, inner], mlp)?,
        })
    }

    fn linear(&mut self, name: &str, shape: [usize; 2], has_bias: bool) -> Result<Linear<O>, ModelError> {
        let weight = self.matrix(&format!("{name}.weight"), shape)?;
        let bias = if has_bias { Some(self.vector(&format!("{name}.bias"), shape[0])?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2]) -> Result<O::Matrix, ModelError> {
        let tensor = self.weights.take(name, &shape)?;
        self.n_params += tensor.n_values() as u64;
        self.dtype.get_or_insert_with(|| tensor.dtype.to_string().to_lowercase());
        Ok(self.ops.matrix(&tensor))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<O::Vector, ModelError> {
        let tensor = self.weights.take(name, &[len])?;
        self.n_params += tensor.n_values() as u64;
        Ok(self.ops.vector(&tensor))
    }

    /// Old checkpoints carry the rotary frequencies, and some a second copy of a tied output matrix.
    fn finish(mut self, is_tied: bool) -> Result<(u64, String), ModelError> {
        self.weights.ignore(|name| name.ends_with("rotary_emb.inv_freq") || (is_tied && name == "lm_head.weight"));
        self.weights.finish(ARCHITECTURE)?;
        Ok((self.n_params, self.dtype.expect("the embedding table is a matrix")))
    }
}
