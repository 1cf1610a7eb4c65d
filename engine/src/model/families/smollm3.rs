//! SmolLM3: Llama whose every fourth layer does not turn queries and keys (NoPE).

use super::llama::LLAMA;
use crate::model::family::{Defaults, Family, Rotary};

pub(crate) const SMOLLM3: Family = Family {
    architecture: "SmolLM3ForCausalLM",
    rotary: Rotary::AllButEvery { field: "no_rope_layer_interval", period: 4, list: "no_rope_layers" },
    defaults: Defaults { rope_theta: 2_000_000.0, tie_word_embeddings: true, ..LLAMA.defaults },
    gguf: None,
    ..LLAMA
};
