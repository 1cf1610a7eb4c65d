//! What a model is and what memory it takes, before anything of it is read: arithmetic over a configuration, formats, ranks and a
//! GPU's memory.
//!
//! The engine plans by it, the kernels size their scratch by it, and operator and command line say with it, before a pod is made,
//! whether a model fits: one arithmetic, so that none of them can be right alone. Opens no file, asks no device, reads no clock.

pub mod format;
pub mod gguf;
pub mod gpu;
pub mod host;
pub mod memory;
pub mod model;
pub mod plan;
mod sizes;

pub use self::sizes::{AskedSizes, BLOCK_TOKENS, StepSizes, blocks_for};
