//! Mistral 7B, Nemo and Small: Llama without biases; the first versions look back a window only.

use super::llama::LLAMA;
use crate::model::family::{Biases, Defaults, Family, Windows};

pub(crate) const MISTRAL: Family = Family {
    architecture: "MistralForCausalLM",
    biases: Biases::NONE,
    windows: Windows::EveryLayer,
    defaults: Defaults { num_key_value_heads: Some(8), sliding_window: Some(4096), ..LLAMA.defaults },
    ..LLAMA
};
