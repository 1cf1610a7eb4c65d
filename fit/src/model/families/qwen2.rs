//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values; upper layers may look back a window only.

use super::llama::LLAMA;
use crate::model::family::{Biases, Defaults, Family, GgufFormat, HasBias, Windows};

pub(crate) const QWEN2: Family = Family {
    architecture: "Qwen2ForCausalLM",
    biases: Biases { qkv: HasBias::Always, ..Biases::NONE },
    windows: Windows::UpperLayers { from: 28 },
    defaults: Defaults { num_key_value_heads: Some(32), sliding_window: Some(4096), ..LLAMA.defaults },
    gguf: GgufFormat::halves("qwen2"),
    ..LLAMA
};
