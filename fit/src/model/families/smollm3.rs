//! SmolLM3: Llama whose every fourth layer does not turn queries and keys (NoPE).

use super::llama::LLAMA;
use crate::model::family::{Defaults, Family, Rotary, Windows};

pub(crate) const SMOLLM3: Family = Family {
    architecture: "SmolLM3ForCausalLM",
    windows: Windows::Unsupported,
    rotary: Rotary::AllButEvery { field: "no_rope_layer_interval", period: 4, list: "no_rope_layers" },
    defaults: Defaults {
        num_key_value_heads: Some(4),
        rope_theta: 2_000_000.0,
        tie_word_embeddings: true,
        ..LLAMA.defaults
    },
    gguf: None,
    ..LLAMA
};
