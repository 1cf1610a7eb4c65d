//! A model as its `config.json` describes it.

use serde_json::Value;

use crate::model::{CheckpointFormat, ModelConfig, ModelError, ModelSpec};

/// `config.json` of the model inside the agent.
const EMBER: &str = include_str!("../../../models/ember/config.json");

/// See the module.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its hyper-parameters.
    pub config: ModelConfig,
    /// Its layers and weights.
    pub spec: ModelSpec,
    /// How numbers are stored that are not quantised.
    stored: Stored,
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
        let config = ModelConfig::from_json(config, file)?;
        let spec = ModelSpec::new(&config, CheckpointFormat::HuggingFace)?;
        Ok(Self { config, spec, stored })
    }

    /// Bytes of all weights as they lie in files. Those that are quantised count as the eight bits that a CPU keeps them in.
    pub(super) fn stored_bytes(&self) -> u64 {
        let plain_bytes = match self.stored {
            Stored::Bf16 | Stored::F16 => 2,
            Stored::F32 => 4,
        };
        let bytes = |weight: &crate::model::spec::WeightSpec| match weight.scheme {
            None => weight.n_values().saturating_mul(plain_bytes),
            Some(_) => weight.n_values().saturating_mul(34) / 32,
        };
        self.spec.weights().map(bytes).fold(0, u64::saturating_add)
    }

    /// Bytes of a number of the KV cache on a CPU: no more exact than the weights are.
    pub(super) fn host_kv_bytes(&self) -> usize {
        match self.stored {
            Stored::Bf16 => 2,
            Stored::F16 | Stored::F32 => 4,
        }
    }
}
