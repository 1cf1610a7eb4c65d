//! What a model is: its configuration, checked field by field, and the description of every layer and weight that follows from it.
//! Reads JSON values; opens no file, computes nothing.

mod config;
mod error;
mod families;
mod family;
mod fields;
mod layers;
pub mod quantization;
mod rope_scaling;
pub mod spec;

pub use config::{BiasesPresent, ModelConfig, RopeOfLayer};
pub use error::ModelError;
pub use families::FAMILIES;
pub use family::{Family, GgufFormat, GgufRows, NormWeight};
pub use fields::Fields;
pub use quantization::{Activations, Bits, Codes, GroupIndices, Quantization, Scheme, SharedBy};
pub use rope_scaling::{Llama3Scaling, LongRopeScaling, RopeScaling, RopeSettings, YarnScaling};
pub use spec::{Activation, AttentionSpec, CheckpointFormat, HeadShape, ModelSpec};

/// A token's number.
pub type TokenId = u32;
