//! Models: reading their files, and handing their weights to whoever computes. What they are is described by [`stoker_fit::model`].
//! Computes nothing.

mod assets;
mod checkpoint;
#[cfg(test)]
mod damage;
mod files;
mod gguf;
mod kv_scales;
mod quantization;
mod rope;
mod safetensors;
mod tensor;
mod weights;

pub use assets::{ChatTemplates, ModelAssets};
pub use checkpoint::{Checkpoint, describe, planning_config};
pub use files::{FileBytes, ModelSource};
#[cfg(test)]
pub(crate) use quantization::tests::all_weights as quantised_goldens;
pub(crate) use quantization::{Int4Groups, QuantisedWeight};
pub use rope::RopeTable;
pub use stoker_fit::format::{WeightFormat, to_q8_0};
pub use stoker_fit::model::{
    Activation, Activations, AttentionSpec, BiasesPresent, Bits, CheckpointFormat, Codes, Family, GroupIndices,
    HeadShape, Llama3Scaling, LongRopeScaling, ModelConfig, ModelError, ModelSpec, NormWeight, Quantization,
    RopeOfLayer, RopeScaling, RopeSettings, Scheme, SharedBy, YarnScaling, spec,
};
pub(crate) use tensor::StoredWeight;
pub(crate) use weights::StoredMatrix;
pub use weights::{BoundWeights, TensorView, WeightStore};
