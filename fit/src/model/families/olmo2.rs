//! OLMo 2: norms sit behind attention and feed-forward instead of before them; queries and keys are normed as whole
//! rows.

use super::llama::LLAMA;
use crate::model::family::{Biases, Defaults, Family, HasBias, NormNames, QkNorm};

pub(crate) const OLMO2: Family = Family {
    architecture: "Olmo2ForCausalLM",
    norms: NormNames {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_feed_forward: None,
        after_feed_forward: Some("post_feedforward_layernorm"),
    },
    qk_norm: QkNorm::WholeRow,
    biases: Biases { feed_forward: HasBias::Never, ..LLAMA.biases },
    defaults: Defaults { rms_norm_eps: 1e-5, ..LLAMA.defaults },
    gguf: None,
    ..LLAMA
};
