//! What a started engine says about its model. Plain values, fixed at start.

use crate::{memory::MemoryPlan, request::TokenId};

/// The model behind an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Architecture by its Hugging Face name.
    pub architecture: String,
    /// Parameters.
    pub n_params: u64,
    /// Number format of the weights as stored.
    pub dtype: String,
    /// Longest prompt plus completion, in tokens.
    pub max_model_len: u32,
    /// Sequences that run together at most.
    pub max_num_seqs: u32,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Tokens that end a completion.
    pub eos: Vec<TokenId>,
    /// Memory, planned before serving.
    pub memory: MemoryPlan,
    /// Sampling defaults of `generation_config.json`.
    pub defaults: GenerationDefaults,
    /// The chat template (Jinja), if the model has one.
    pub chat_template: Option<String>,
    /// Text of the begin token, for the template.
    pub bos_token: Option<String>,
    /// Text of the end token, for the template.
    pub eos_token: Option<String>,
    /// Where it computes: `cpu, 2 threads`.
    pub device: String,
}

/// What `generation_config.json` says about sampling; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Likeliest tokens only.
    pub top_k: Option<u32>,
    /// Least probability relative to the likeliest.
    pub min_p: Option<f32>,
    /// Penalty on tokens seen before.
    pub repetition_penalty: Option<f32>,
}
