//! What two replicas must have in common for one to go on with the other's answer: the same tokens, and, for the same text, logits
//! of the same bits. Names of both, for comparing only.

use sha2::{Digest, Sha256};
use stoker_engine::{EngineHandle, ModelInfo};

use crate::config::Settings;

/// Hexadecimal digits of a name.
const NAME_DIGITS: usize = 16;

/// See the module.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Identity {
    /// Of the vocabulary.
    pub vocabulary: String,
    /// Of all that logits depend on; `None` where they also depend on who shares a step.
    pub bits: Option<String>,
}

impl Identity {
    /// Of what this process serves.
    pub fn of(engine: &EngineHandle, settings: &Settings) -> Self {
        let model = engine.model();
        let is_cpu = model.device.starts_with("cpu");
        let promises = is_cpu || settings.limits.batch_invariant;
        Self { vocabulary: vocabulary(engine), bits: promises.then(|| bits(model, settings, is_cpu)) }
    }
}

fn vocabulary(engine: &EngineHandle) -> String {
    let mut hash = Sha256::new();
    for token in 0..engine.model().vocab_size {
        let bytes = engine.tokenizer().token_bytes(token);
        hash.update((bytes.len() as u32).to_le_bytes());
        hash.update(bytes);
    }
    for end in &engine.model().eos {
        hash.update(end.to_le_bytes());
    }
    name(hash)
}

/// The revision stands for the weights, the chat template and all settings; the same source without one for the same files.
fn bits(model: &ModelInfo, settings: &Settings, is_cpu: bool) -> String {
    let ModelInfo { architecture, n_params, dtype, max_model_len, .. } = model;
    let Settings { revision, source, limits, .. } = settings;
    // Threads share out rows and outputs: their number changes no sum. That of ranks does, and as many GPUs may be fewer ranks of more stages.
    let device = if is_cpu { format!("cpu {:?}", instruction_sets()) } else { model.device.clone() };
    let (version, n_ranks) = (env!("CARGO_PKG_VERSION"), limits.tensor_parallel);
    let all = format!(
        "{version} {architecture} {n_params} {dtype} {max_model_len} {revision} {source} {n_ranks} of {device}"
    );
    name(Sha256::new().chain_update(all))
}

/// Those that kernels are chosen by.
fn instruction_sets() -> Vec<bool> {
    #[cfg(target_arch = "x86_64")]
    return vec![
        is_x86_feature_detected!("avx2"),
        is_x86_feature_detected!("fma"),
        is_x86_feature_detected!("f16c"),
        is_x86_feature_detected!("avx512f"),
        is_x86_feature_detected!("avx512bw"),
        is_x86_feature_detected!("avx512vl"),
        is_x86_feature_detected!("avx512dq"),
        is_x86_feature_detected!("avx512bf16"),
        is_x86_feature_detected!("avx512vnni"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    vec![]
}

fn name(hash: Sha256) -> String {
    let digest = hash.finalize();
    digest.iter().take(NAME_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}
