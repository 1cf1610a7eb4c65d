//! Phi-3, Phi-3.5 and Phi-4: queries, keys and values are one matrix, gate and up another; Phi-4-mini turns a part of
//! each head only.

use super::llama::LLAMA;
use crate::model::family::{Biases, Defaults, Family, GgufFormat, Projections, Windows};

pub(crate) const PHI3: Family = Family {
    architecture: "Phi3ForCausalLM",
    projections: Projections::Fused,
    biases: Biases::NONE,
    windows: Windows::EveryLayer,
    defaults: Defaults { rms_norm_eps: 1e-5, ..LLAMA.defaults },
    gguf: GgufFormat::halves("phi3"),
    ..LLAMA
};
