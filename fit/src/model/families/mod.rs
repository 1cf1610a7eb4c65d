//! The families of models there are, one file each: a description and nothing else. A new family is one such file, its
//! line in `FAMILIES` and a golden.

mod gemma2;
mod gemma3;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod smollm3;

use super::Family;

/// Every family that can run.
pub static FAMILIES: &[&Family] = &[
    &llama::LLAMA,
    &mistral::MISTRAL,
    &qwen2::QWEN2,
    &qwen3::QWEN3,
    &smollm3::SMOLLM3,
    &olmo2::OLMO2,
    &phi3::PHI3,
    &gemma2::GEMMA2,
    &gemma3::GEMMA3,
];
