//! Models: reading their files and computing their forward pass over `Ops`.

mod assets;
mod checkpoint;
mod config;
#[cfg(test)]
mod damage;
mod decoder;
mod error;
mod families;
mod family;
mod fields;
mod files;
mod gguf;
mod layers;
mod loader;
mod rope;
mod rope_scaling;
pub mod spec;
mod weights;

pub use assets::{ChatTemplates, ModelAssets};
pub use checkpoint::Checkpoint;
pub use config::{BiasesPresent, ModelConfig, RopeOfLayer};
pub use decoder::Decoder;
pub use error::ModelError;
pub use family::Family;
pub use family::NormWeight;
pub(crate) use family::{NormNames, Projections, QkNorm};
pub use files::{FileBytes, ModelSource};
pub(crate) use gguf::BlockFormat;
pub use gguf::dequantise;
pub use rope::RopeTable;
pub use rope_scaling::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSettings, YarnScaling};
pub use spec::{Activation, AttentionSpec, CheckpointFormat, HeadShape, ModelSpec};
pub use weights::{Tensor, WeightStore};
