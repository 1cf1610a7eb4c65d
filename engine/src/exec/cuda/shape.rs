//! What the GPU executor needs to know of a model: its sizes, what its family has, and whether the kernels cover it. Pure.

use stoker_kernels::launch::{GROUP_MAX, Heads};

use crate::model::{
    Activation, ModelSpec, NormWeight,
    spec::{AttentionLayer, LayerSpec},
};

/// Weights that a step still reads when it is about to end: 0.6 to 0.8 ms on an H200, as long as two threads take to wake up one
/// after the other.
const NEAR_THE_END_BYTES: usize = 5 << 29;

/// Up to so many rows a step takes as long as reading the weights. In longer ones each layer takes too long, but for the last one,
/// where only drawn rows go on.
const READING_ROWS_MAX: usize = 256;

/// A decoder that the kernels cover: norms before attention and feed-forward, gated SiLU, rotation of whole heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ModelShape {
    pub(super) hidden: usize,
    pub(super) inner: usize,
    pub(super) vocab: usize,
    pub(super) n_layers: usize,
    pub(super) heads: Heads,
    pub(super) eps: f32,
    /// What scores are multiplied by.
    pub(super) attention_scale: f32,
    pub(super) extras: Extras,
}

/// What some families have and others have not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Extras {
    /// The embedding table is the output matrix.
    pub(super) tied_head: bool,
    /// Queries, keys and values have biases.
    pub(super) qkv_bias: bool,
    /// Every head of queries and keys is normed.
    pub(super) qk_norm: bool,
}

impl ModelShape {
    /// The sizes, or what of the model the kernels do not cover.
    pub(super) fn of(spec: &ModelSpec) -> Result<Self, String> {
        let mut odd_layers = spec.layers.iter().enumerate().filter_map(|(idx, layer)| odd_layer(idx, layer));
        let Some(LayerSpec { attention, feed_forward }) = spec.layers.first() else {
            return Err("it has no layers".into());
        };
        let heads = attention.attention.heads;
        let shape = Self {
            hidden: spec.hidden_size,
            inner: feed_forward.gate.weight.rows.len(),
            vocab: spec.vocab_size,
            n_layers: spec.layers.len(),
            heads: Heads { n_q: heads.n_heads, n_kv: heads.n_kv_heads, dim: heads.head_dim },
            eps: spec.norm.eps,
            attention_scale: attention.attention.scale,
            extras: Extras {
                tied_head: spec.head.weight.is_none(),
                qkv_bias: attention.q.bias.is_some(),
                qk_norm: attention.qk_norm.is_some(),
            },
        };
        let problem = odd_layers.next().or_else(|| odd_ends(spec)).or_else(|| shape.odd_sizes(spec));
        match problem {
            Some(problem) => Err(format!("{}: {problem}", spec.architecture)),
            None => Ok(shape),
        }
    }

    /// Width of attention's output.
    pub(super) fn attended_width(&self) -> usize {
        self.heads.n_q * self.heads.dim
    }

    /// The last layers of a step of `n_rows`, from where it is about to end.
    pub(super) fn n_layers_near_the_end(&self, n_rows: usize) -> usize {
        if n_rows > READING_ROWS_MAX {
            return self.n_layers.min(1);
        }
        let layer = self.hidden * (self.heads.qkv_width() + self.attended_width() + 3 * self.inner);
        let (layer_bytes, head_bytes) = (2 * layer, 2 * self.hidden * self.vocab);
        (NEAR_THE_END_BYTES.saturating_sub(head_bytes) / layer_bytes).min(self.n_layers)
    }

    fn odd_sizes(&self, spec: &ModelSpec) -> Option<String> {
        let Self { hidden, inner, heads, .. } = *self;
        if !matches!(heads.dim, 64 | 128) {
            return Some(format!("its head_dim is {}, the kernels have 64 and 128", heads.dim));
        }
        if heads.group() > GROUP_MAX {
            return Some(format!("{} query heads share a KV head, the kernels allow {GROUP_MAX}", heads.group()));
        }
        if spec.rope_sets[0].width != heads.dim {
            return Some("it turns a part of each head only".into());
        }
        let sizes = [("hidden_size", hidden), ("intermediate_size", inner)];
        let (name, width) = sizes.into_iter().find(|(_, width)| !width.is_multiple_of(8))?;
        Some(format!("its {name} is {width}, the kernels need multiples of 8"))
    }
}

fn odd_ends(spec: &ModelSpec) -> Option<String> {
    let is_plain = spec.embedding.scale.is_none() && spec.head.softcap.is_none();
    (!is_plain).then(|| "it scales embeddings or caps logits, which the kernels do not".into())
}

fn odd_layer(idx: usize, LayerSpec { attention: layer, feed_forward }: &LayerSpec) -> Option<String> {
    let AttentionLayer { before, qk_norm, rope_set, attention, o, after, .. } = layer;
    let norms_before = before.is_some() && feed_forward.before.is_some();
    if !norms_before || after.is_some() || feed_forward.after.is_some() {
        return Some("its norms do not stand before attention and feed-forward alone".into());
    }
    let over_rows = qk_norm.as_ref().is_some_and(|norms| norms.q.weight.rows.len() != attention.heads.head_dim);
    if over_rows || before.as_ref().is_some_and(|norm| norm.stored != NormWeight::Factor) {
        return Some("its norms are of a kind that the kernels have not".into());
    }
    if [o, &feed_forward.gate, &feed_forward.down].into_iter().any(|linear| linear.bias.is_some()) {
        return Some("its output projections have biases, which the kernels do not add".into());
    }
    if feed_forward.activation != Activation::Silu {
        return Some("its activation is not covered".into());
    }
    let is_plain = attention.window.is_none() && attention.softcap.is_none() && *rope_set == Some(0);
    (!is_plain).then(|| format!("layer {idx} has a window, a soft-cap or rotary angles of its own"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::model::{CheckpointFormat, ModelConfig};

    fn shape(architecture: &str, changes: Value) -> Result<ModelShape, String> {
        let mut config = json!({"architectures": [architecture], "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "vocab_size": 100, "max_position_embeddings": 128});
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        let config = ModelConfig::from_json(&config, "config.json").unwrap();
        ModelShape::of(&ModelSpec::new(&config, CheckpointFormat::HuggingFace).unwrap())
    }

    #[test]
    fn llama_mistral_and_qwen_are_covered() {
        assert_eq!(shape("LlamaForCausalLM", json!({})).unwrap().heads, Heads { n_q: 4, n_kv: 2, dim: 64 });
        assert!(shape("MistralForCausalLM", json!({"sliding_window": null})).is_ok());
        assert!(shape("Qwen2ForCausalLM", json!({"use_sliding_window": false})).unwrap().extras.qkv_bias);
        assert!(shape("Qwen3ForCausalLM", json!({"use_sliding_window": false})).unwrap().extras.qk_norm);
    }

    #[test]
    fn what_is_not_covered_is_named_with_its_architecture() {
        let refusal = |architecture, changes| shape(architecture, changes).unwrap_err();
        assert!(refusal("LlamaForCausalLM", json!({"head_dim": 96})).contains("LlamaForCausalLM: its head_dim is 96"));
        assert!(refusal("LlamaForCausalLM", json!({"mlp_bias": true})).contains("biases"));
        assert!(refusal("MistralForCausalLM", json!({"sliding_window": 32})).contains("layer 0 has a window"));
        assert!(refusal("Olmo2ForCausalLM", json!({})).contains("norms"));
        assert!(refusal("Gemma2ForCausalLM", json!({"sliding_window": 32})).contains("norms"));
    }
}
