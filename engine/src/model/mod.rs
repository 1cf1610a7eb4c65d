//! Models: reading their files and computing their forward pass over `Ops`.

mod assets;
mod config;
mod error;
mod files;
mod llama;
mod rope;
mod weights;

pub use assets::ModelAssets;
pub use config::{Llama3Scaling, LlamaConfig, RopeScaling, YarnScaling};
pub use error::ModelError;
pub use files::{FileBytes, ModelSource};
pub use llama::Llama;
pub use rope::RopeTable;
pub use weights::{Tensor, WeightStore};
