//! The tensors of a GGUF file that are weights.

use std::sync::Arc;

use stoker_fit::gguf::SETTINGS;

use super::Gguf;
use crate::model::{CheckpointFormat, WeightStore, tensor::Tensor};

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
