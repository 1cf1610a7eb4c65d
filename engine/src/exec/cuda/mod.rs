//! The executor on NVIDIA GPUs, one or several: decoders in bf16, FP8 or four bits over the `kernels` crate.
//!
//! It has a forward pass of its own instead of the CPU's operations: the kernels fuse what those keep apart (QKV in one
//! product, residual and norm in one pass across the layer's border), all activations lie in buffers made at start, and a
//! decode step or the end of a short prompt is recorded once and replayed as CUDA graphs. Nothing here schedules; nothing allocates per step but
//! short host vectors.
//!
//! ```text
//! StepPlan -> Batch (rows, decodes first) -> one packed upload -> forward and plain draws (graph or eager)
//!          -> draws with options, if any; constrained ones once their masks are there -> read back
//! ```

mod batch;
mod buffers;
mod executor;
mod forward;
mod kv_scales;
mod layout;
mod listing;
mod masks;
mod memory;
mod open;
mod program;
mod ranks;
mod reads;
mod sampling;
mod shape;
mod slots;
mod stages;
mod weights;

pub use executor::{CudaRank, Decodes, MeasuredProgram};
pub use listing::{Ceilings, Line, list_program};
pub use open::{CudaError, CudaModel};
pub(crate) use open::{Gpus, OpenGpus};
pub use ranks::CudaExecutor;
pub use stoker_kernels::{
    survey::{Finding, survey},
    table::ChipTable,
};
