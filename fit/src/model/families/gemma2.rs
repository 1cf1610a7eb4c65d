//! Gemma 2: norms on both sides of attention and feed-forward, with weights stored around zero; scores and logits are
//! soft-capped; every second layer looks back a window only; embeddings are scaled by the root of their width.

use super::llama::LLAMA;
use crate::model::{
    Activation,
    family::{Biases, Defaults, EmbeddingScale, Family, GgufFormat, HasBias, NormNames, NormWeight, Windows},
};

pub(crate) const GEMMA2: Family = Family {
    architecture: "Gemma2ForCausalLM",
    norms: NormNames {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_attention_layernorm"),
        before_feed_forward: Some("pre_feedforward_layernorm"),
        after_feed_forward: Some("post_feedforward_layernorm"),
    },
    norm_weight: NormWeight::OnePlusFactor,
    biases: Biases { feed_forward: HasBias::Never, ..LLAMA.biases },
    embedding_scale: EmbeddingScale::RootOfWidth,
    windows: Windows::AllButEvery { period: 2 },
    defaults: Defaults {
        activation: Activation::GeluTanh,
        head_dim: Some(256),
        num_key_value_heads: Some(4),
        sliding_window: Some(4096),
        query_pre_attn_scalar: Some(256.0),
        attention_softcap: Some(50.0),
        logit_softcap: Some(30.0),
        tie_word_embeddings: true,
        ..LLAMA.defaults
    },
    gguf: GgufFormat::halves("gemma2"),
    ..LLAMA
};
