//! Models: reading their files, and describing them to whoever computes. Computes nothing.

mod assets;
mod checkpoint;
mod config;
#[cfg(test)]
mod damage;
mod error;
mod families;
mod family;
mod fields;
mod files;
mod gguf;
mod kv_scales;
mod layers;
mod quantization;
mod rope;
mod rope_scaling;
mod safetensors;
pub mod spec;
mod tensor;
mod weights;

pub use assets::{ChatTemplates, ModelAssets};
pub use checkpoint::{Checkpoint, describe};
pub use config::{BiasesPresent, ModelConfig, RopeOfLayer};
pub use error::ModelError;
pub use family::Family;
pub use family::NormWeight;
pub use files::{FileBytes, ModelSource};
pub(crate) use quantization::QuantisedWeight;
#[cfg(test)]
pub(crate) use quantization::tests::all_weights as quantised_goldens;
pub use quantization::{Activations, Bits, Codes, GroupIndices, Quantization, Scheme, SharedBy};
pub use rope::RopeTable;
pub use rope_scaling::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSettings, YarnScaling};
pub use spec::{Activation, AttentionSpec, CheckpointFormat, HeadShape, ModelSpec};
pub use stoker_kernels::format::{WeightFormat, to_q8_0};
pub(crate) use tensor::StoredWeight;
pub(crate) use weights::StoredMatrix;
pub use weights::{BoundWeights, WeightStore};
