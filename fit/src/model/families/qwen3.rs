//! Qwen3: every head of queries and keys is normed before it is turned; heads are wider than hidden size / heads.

use super::qwen2::QWEN2;
use crate::model::family::{Biases, Defaults, Family, GgufFormat, HasBias, QkNorm};

pub(crate) const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    qk_norm: QkNorm::EveryHead,
    biases: Biases {
        qkv: HasBias::If("attention_bias"),
        attention_output: HasBias::If("attention_bias"),
        feed_forward: HasBias::Never,
    },
    windows: QWEN2.windows,
    defaults: Defaults { head_dim: Some(128), ..QWEN2.defaults },
    gguf: GgufFormat::halves("qwen3"),
    ..QWEN2
};
