//! Llama 2 and 3, and who took the architecture over as it is: TinyLlama, SmolLM, SmolLM2, Yi. The others are described
//! by what they do differently.

use crate::model::{
    Activation,
    family::{
        Biases, Defaults, EmbeddingScale, Family, GgufFormat, GgufRows, HasBias, NormNames, NormWeight, Projections,
        QkNorm, Rotary, Windows,
    },
};

pub(crate) const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    norms: NormNames {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_feed_forward: Some("post_attention_layernorm"),
        after_feed_forward: None,
    },
    norm_weight: NormWeight::Factor,
    qk_norm: QkNorm::None,
    projections: Projections::Separate,
    biases: Biases {
        qkv: HasBias::If("attention_bias"),
        attention_output: HasBias::If("attention_bias"),
        feed_forward: HasBias::If("mlp_bias"),
    },
    embedding_scale: EmbeddingScale::One,
    windows: Windows::Never,
    rotary: Rotary::EveryLayer,
    defaults: Defaults {
        activation: Activation::Silu,
        head_dim: None,
        num_key_value_heads: None,
        sliding_window: None,
        query_pre_attn_scalar: None,
        attention_softcap: None,
        logit_softcap: None,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: false,
    },
    gguf: Some(GgufFormat { architecture: "llama", rows: GgufRows::Pairs }),
};
