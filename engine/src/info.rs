//! What a started engine says about its model. Plain values, fixed at start.

use stoker_fit::{format::BytesByFormat, memory::MemoryPlan};

use crate::{
    model::{ChatTemplates, ModelAssets, ModelConfig},
    pooling::EmbeddingForm,
    relevance::Relevance,
    request::TokenId,
    sched::SchedLimits,
};

/// The model behind an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Architecture by its Hugging Face name.
    pub architecture: String,
    /// Parameters.
    pub n_params: u64,
    /// Number format of the weights as stored.
    pub dtype: String,
    /// What the weights are held in; of a model that several GPUs share, on each.
    pub held: BytesByFormat,
    /// Longest prompt plus completion, in tokens.
    pub max_model_len: u32,
    /// Sequences that run together at most.
    pub max_num_seqs: u32,
    /// Size of the vocabulary.
    pub vocab_size: u32,
    /// Values of what a token becomes: the length of embeddings.
    pub hidden_size: u32,
    /// Tokens that end a completion.
    pub eos: Vec<TokenId>,
    /// Memory, planned before serving.
    pub memory: MemoryPlan,
    /// Sampling defaults of `generation_config.json`.
    pub defaults: GenerationDefaults,
    /// How embeddings are made.
    pub embedding: EmbeddingForm,
    /// How it compares texts, if it was made for that.
    pub relevance: Option<Relevance>,
    /// The chat templates, if the model has any.
    pub chat_template: Option<ChatTemplates>,
    /// Text of the begin token, for the template.
    pub bos_token: Option<String>,
    /// Text of the end token, for the template.
    pub eos_token: Option<String>,
    /// Where it computes: `cpu, 2 threads, avx2`.
    pub device: String,
}

/// What only the back end knows that took the weights.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Parameters.
    pub(crate) n_params: u64,
    /// Number format of the weights as stored.
    pub(crate) dtype: String,
    /// What they are held in.
    pub(crate) held: BytesByFormat,
    /// As planned.
    pub(crate) memory: MemoryPlan,
    /// Where it computes.
    pub(crate) device: String,
}

impl ModelInfo {
    pub(crate) fn new(config: &ModelConfig, assets: &ModelAssets, sched: &SchedLimits, loaded: Loaded) -> Self {
        let Loaded { n_params, dtype, held, memory, device } = loaded;
        Self {
            architecture: config.family.architecture.into(),
            n_params,
            dtype,
            held,
            max_model_len: sched.max_model_len as u32,
            max_num_seqs: sched.max_num_seqs as u32,
            vocab_size: config.vocab_size as u32,
            hidden_size: config.hidden_size as u32,
            eos: assets.eos.clone(),
            memory,
            defaults: assets.defaults.clone(),
            embedding: assets.embedding,
            relevance: assets.relevance.clone(),
            chat_template: assets.chat_template.clone(),
            bos_token: assets.bos_token.clone(),
            eos_token: assets.eos_token.clone(),
            device,
        }
    }
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
