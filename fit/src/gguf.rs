//! GGUF, the one-file format of llama.cpp, as far as a model's sizes go: its header, its hyper-parameters in the words of `config.json`,
//! and what its blocks take. Knows no vocabulary, reads no weight; its caller has the file, or the beginning of one.

mod config;
mod header;

use std::ops::Range;

use serde_json::Value;

pub use self::header::{Extent, Header, TensorInfo};
use crate::{
    format::WeightFormat,
    host::weight_bytes,
    model::{Family, ModelError},
    plan::HOST_WEIGHTS_BYTES,
};

/// Tensors that are settings: they go into the configuration.
pub const SETTINGS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

/// Bytes of a file; `None` where they are not here.
pub type Bytes<'a> = &'a dyn Fn(Range<usize>) -> Option<Vec<u8>>;

/// A file whose header was read.
#[derive(Clone, Copy, Debug)]
pub struct Gguf<'a> {
    /// Its name in messages.
    pub file: &'a str,
    /// What it begins with.
    pub header: &'a Header,
}

impl Gguf<'_> {
    /// What its `config.json` would say.
    pub fn config(&self, bytes: Bytes<'_>) -> Result<Value, ModelError> {
        config::config_json(self, bytes)
    }

    /// The same with what a plan needs to know beside that: how numbers are stored that are in no blocks, and what weights take on a CPU.
    pub fn planning_config(&self, bytes: Bytes<'_>) -> Result<Value, ModelError> {
        let mut config = self.config(bytes)?;
        config["dtype"] = if self.is_bf16_or_less() { "bfloat16" } else { "float32" }.into();
        let kept = self.weights().map(|info| weight_bytes(info.format, &info.shape));
        config[HOST_WEIGHTS_BYTES] = kept.fold(0, u64::saturating_add).into();
        Ok(config)
    }

    /// The family that its architecture belongs to.
    pub fn family(&self) -> Result<&'static Family, ModelError> {
        config::family_of(self)
    }

    /// The value of a key, `null` where there is none.
    pub fn value(&self, key: &str) -> &Value {
        static NULL: Value = Value::Null;
        self.header.metadata.get(key).unwrap_or(&NULL)
    }

    fn weights(&self) -> impl Iterator<Item = &TensorInfo> {
        let weights = self.header.tensors.iter().filter(|(name, _)| !SETTINGS.contains(&name.as_str()));
        weights.map(|(_, info)| info)
    }

    /// Of the largest tensor; blocks are less exact than bf16.
    fn is_bf16_or_less(&self) -> bool {
        let largest = self.weights().max_by_key(|info| info.shape.iter().product::<usize>());
        largest.is_some_and(|info| info.format == WeightFormat::Bf16 || !info.format.is_plain())
    }

    fn error(&self, key: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Field { file: self.file.to_owned(), field: key.into(), problem: problem.into() }
    }
}
