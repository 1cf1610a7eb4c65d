//! A model as its `config.json` describes it, or what stands for one where a file describes itself.

use serde_json::Value;

use crate::model::{CheckpointFormat, ModelConfig, ModelError, ModelSpec};

/// Numbers of a block of integers.
const BLOCK: u64 = 32;
/// `config.json` of the model inside the agent.
const EMBER: &str = include_str!("../../../models/ember/config.json");

/// What GGUF's blocks take on a CPU, as they are kept there: a member of the configuration that stands for such a file. On a GPU they become
/// bf16, whatever they are.
pub const HOST_WEIGHTS_BYTES: &str = "stoker_host_weights_bytes";

/// See the module.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its hyper-parameters.
    pub config: ModelConfig,
    /// Its layers and weights.
    pub spec: ModelSpec,
    /// How numbers are stored that are not quantised.
    stored: Stored,
    /// Bytes of all weights on a CPU, where the configuration says so.
    host_weights_bytes: Option<u64>,
}

/// A number format of files.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Stored {
    Bf16,
    F16,
    F32,
}

impl Model {
    /// What a model inside the agent says in its `config.json`, by the name behind `builtin://`.
    pub fn builtin(name: &str) -> Option<&'static str> {
        (name == "ember").then_some(EMBER)
    }

    /// Of a configuration; `file` is its name in messages.
    pub fn from_json(config: &Value, file: &str) -> Result<Self, ModelError> {
        let dtype = ["dtype", "torch_dtype"].iter().find_map(|field| config.get(*field)?.as_str());
        let stored = match dtype {
            Some("float32") => Stored::F32,
            Some("float16") => Stored::F16,
            _ => Stored::Bf16,
        };
        let host_weights_bytes = config.get(HOST_WEIGHTS_BYTES).and_then(Value::as_u64);
        let config = ModelConfig::from_json(config, file)?;
        let spec = ModelSpec::new(&config, CheckpointFormat::HuggingFace)?;
        Ok(Self { config, spec, stored, host_weights_bytes })
    }

    /// Bytes of all weights as a CPU keeps them. Where nobody says that, as they lie in files, and those that are quantised by their scheme.
    pub(super) fn host_bytes(&self) -> u64 {
        let plain_bytes = match self.stored {
            Stored::Bf16 | Stored::F16 => 2,
            Stored::F32 => 4,
        };
        let bytes = |weight: &crate::model::spec::WeightSpec| match &weight.scheme {
            None => weight.n_values().saturating_mul(plain_bytes),
            Some(scheme) => {
                let block =
                    scheme.host_blocks().map_or(BLOCK * plain_bytes, |blocks| blocks.bytes_of(BLOCK as usize) as u64);
                weight.n_values().saturating_mul(block) / BLOCK
            }
        };
        self.host_weights_bytes.unwrap_or_else(|| self.spec.weights().map(bytes).fold(0, u64::saturating_add))
    }

    /// Bytes of a number of the KV cache on a CPU: no more exact than the weights are.
    pub(super) fn host_kv_bytes(&self) -> usize {
        match self.stored {
            Stored::Bf16 => 2,
            Stored::F16 | Stored::F32 => 4,
        }
    }
}
