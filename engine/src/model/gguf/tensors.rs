//! The tensors of a GGUF file that are weights.

use std::sync::Arc;

use super::Gguf;
use crate::model::{CheckpointFormat, WeightStore, tensor::Tensor};

/// Those that are settings: they went into the configuration.
const SETTINGS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

pub(super) fn weights(gguf: &Gguf) -> WeightStore {
    let described = gguf.header.tensors.iter().filter(|(name, _)| !SETTINGS.contains(&name.as_str()));
    let tensors = described.map(|(name, info)| {
        let tensor = Tensor {
            file: Arc::clone(&gguf.file),
            name: name.clone(),
            format: Ok(info.format),
            shape: info.shape.clone(),
            content: Arc::clone(&gguf.content),
            range: info.range.clone(),
        };
        (name.clone(), tensor)
    });
    WeightStore::new(tensors.collect(), gguf.file().into(), CheckpointFormat::Gguf)
}
