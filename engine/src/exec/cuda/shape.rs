//! What the GPU executor needs to know of a model: its sizes, what its family has, and whether the kernels cover it. Pure.

use stoker_kernels::launch::{GROUP_MAX, Heads};

use crate::model::{Activation, ModelConfig, NormNames, NormWeight, Projections, QkNorm, RopeOfLayer, RopeTable};

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
    /// How the checkpoint names its projections.
    pub(super) projections: Projections,
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
    pub(super) fn of(config: &ModelConfig) -> Result<Self, String> {
        let problem = odd_family(config).or_else(|| odd_layers(config)).or_else(|| odd_sizes(config));
        if let Some(problem) = problem {
            return Err(format!("{}: {problem}", config.family.architecture));
        }
        Ok(Self {
            hidden: config.hidden_size,
            inner: config.intermediate_size,
            vocab: config.vocab_size,
            n_layers: config.num_hidden_layers,
            heads: heads(config),
            eps: config.rms_norm_eps,
            attention_scale: config.attention_scale,
            projections: config.family.projections,
            extras: Extras {
                tied_head: config.tie_word_embeddings,
                qkv_bias: config.biases.qkv,
                qk_norm: config.family.qk_norm == QkNorm::EveryHead,
            },
        })
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

    /// Numbers of all weights, tied ones counted once.
    pub(super) fn n_params(&self) -> u64 {
        super::weights::slots(self).iter().map(|slot| slot.len() as u64).sum()
    }
}

fn heads(config: &ModelConfig) -> Heads {
    Heads { n_q: config.num_attention_heads, n_kv: config.num_key_value_heads, dim: config.head_dim }
}

fn odd_family(config: &ModelConfig) -> Option<String> {
    let family = config.family;
    let NormNames { before_attention, after_attention, before_feed_forward, after_feed_forward } = family.norms;
    let norms_before = before_attention.is_some() && before_feed_forward.is_some();
    if !norms_before || after_attention.is_some() || after_feed_forward.is_some() {
        return Some("its norms do not stand before attention and feed-forward alone".into());
    }
    if family.norm_weight != NormWeight::Factor || family.qk_norm == QkNorm::WholeRow {
        return Some("its norms are of a kind that the kernels have not".into());
    }
    if config.biases.attention_output || config.biases.feed_forward {
        return Some("its output projections have biases, which the kernels do not add".into());
    }
    let is_plain = config.activation == Activation::Silu && config.embedding_scale.is_none();
    (!is_plain || config.logit_softcap.is_some()).then(|| "its activation, scales or soft-caps are not covered".into())
}

fn odd_layers(config: &ModelConfig) -> Option<String> {
    let mut layers = 0..config.num_hidden_layers;
    let is_plain = |idx| {
        let attention = config.attention_of_layer(idx);
        let sees_all = attention.window.is_none() && attention.softcap.is_none();
        sees_all && config.rope_of_layer(idx) == RopeOfLayer::Model
    };
    let odd = layers.find(|idx| !is_plain(*idx))?;
    Some(format!("layer {odd} has a window, a soft-cap or rotary angles of its own"))
}

fn odd_sizes(config: &ModelConfig) -> Option<String> {
    let heads = heads(config);
    if !matches!(heads.dim, 64 | 128) {
        return Some(format!("its head_dim is {}, the kernels have 64 and 128", heads.dim));
    }
    if heads.group() > GROUP_MAX {
        return Some(format!("{} query heads share a KV head, the kernels allow {GROUP_MAX}", heads.group()));
    }
    if 2 * RopeTable::new(&config.rope, config.head_dim, 1).n_pairs != config.head_dim {
        return Some("it turns a part of each head only".into());
    }
    let sizes = [("hidden_size", config.hidden_size), ("intermediate_size", config.intermediate_size)];
    let (name, width) = sizes.into_iter().find(|(_, width)| !width.is_multiple_of(8))?;
    Some(format!("its {name} is {width}, the kernels need multiples of 8"))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn shape(architecture: &str, changes: Value) -> Result<ModelShape, String> {
        let mut config = json!({"architectures": [architecture], "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "vocab_size": 100, "max_position_embeddings": 128});
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        ModelShape::of(&ModelConfig::from_json(&config, "config.json").unwrap())
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

    #[test]
    fn parameters_count_every_tensor_once() {
        let plain = shape("LlamaForCausalLM", json!({})).unwrap().n_params();
        let tied = shape("LlamaForCausalLM", json!({"tie_word_embeddings": true})).unwrap().n_params();
        let layer = 256 * 512 + 256 * 256 + 3 * 256 * 512 + 2 * 256;
        assert_eq!(tied, 100 * 256 + 2 * layer + 256);
        assert_eq!(plain, tied + 100 * 256);
    }
}
