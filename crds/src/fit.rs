//! What an object asks of a model's memory, as the arithmetic of [`stoker_fit`] takes it. Pure.

use stoker_fit::{
    AskedSizes,
    gpu::KvFormat,
    plan::{Asked, MEMORY_FRACTION},
};

use crate::{
    InferenceDeploymentSpec,
    contract::{KvCacheDtype, ParallelSettings, Quantization},
};

/// What a spec asks for.
pub fn asked(spec: &InferenceDeploymentSpec) -> Asked {
    let engine = spec.engine.clone().unwrap_or_default();
    let ParallelSettings { tensor, pipeline } = spec.parallel_settings();
    Asked {
        max_model_len: engine.max_model_len,
        sizes: AskedSizes { max_num_seqs: engine.max_num_seqs, max_batched_tokens: engine.max_batched_tokens },
        kv_cache_tokens: engine.kv_cache_tokens,
        memory_fraction: engine.memory_fraction.unwrap_or(MEMORY_FRACTION),
        n_ranks: tensor as usize,
        n_stages: pipeline as usize,
        fp8: engine.quantization == Some(Quantization::Fp8),
        kv_format: match engine.kv_cache_dtype {
            None => KvFormat::Bf16,
            Some(KvCacheDtype::Fp8) => KvFormat::E4m3,
        },
        batch_invariant: engine.batch_invariant.unwrap_or(false),
    }
}

/// Memory that a pod may use, if it is limited.
pub fn host_bytes(spec: &InferenceDeploymentSpec) -> Option<u64> {
    let bytes = spec.resources.as_ref()?.memory.as_ref()?.value()?;
    Some(bytes as u64)
}
