//! Gemma 3 (text): Gemma 2 with normed heads, five windowed layers to one that sees all, and rotary angles of their own
//! for the windowed ones; no soft-caps.

use super::{gemma2::GEMMA2, llama::LLAMA};
use crate::model::family::{Defaults, Family, GgufFormat, QkNorm, Rotary, Windows};

pub(crate) const GEMMA3: Family = Family {
    architecture: "Gemma3ForCausalLM",
    qk_norm: QkNorm::EveryHead,
    windows: Windows::AllButEvery { period: 6 },
    rotary: Rotary::OwnInWindows { theta_field: "rope_local_base_freq", theta: LLAMA.defaults.rope_theta },
    defaults: Defaults { rope_theta: 1_000_000.0, attention_softcap: None, logit_softcap: None, ..GEMMA2.defaults },
    gguf: GgufFormat::halves("gemma3"),
    ..GEMMA2
};
