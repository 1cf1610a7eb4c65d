//! CUDA kernels of a Llama step in bf16, behind safe launchers. `csrc` holds one operation a file; `sys` loads and starts
//! them, `launch` and `plan` decide shapes from values, the modules below check buffers and launch. `reference` computes
//! every operation naively on the CPU and is what they are tested against.
//!
//! Everything runs in order on the one stream of a [`Device`]; nothing here waits for the GPU or allocates while
//! launching, so any sequence of launches may be captured into a graph.

/// Plain numbers without padding, as the kernels read them.
macro_rules! records {
    ($($record:ty),*) => {$(
        // SAFETY: plain numbers without padding, as the kernels read them.
        unsafe impl cudarc::driver::DeviceRepr for $record {}
        // SAFETY: as above: any bits are a value.
        unsafe impl bytemuck::Zeroable for $record {}
        // SAFETY: as above.
        unsafe impl bytemuck::Pod for $record {}
    )*};
}

pub mod attention;
pub mod blas;
pub mod cache;
pub mod checks;
pub mod choose;
pub mod code_words;
pub mod codes;
pub mod device;
pub mod draw;
mod entry;
pub mod error;
pub mod gemm;
pub mod graph;
pub mod handover;
pub mod int4;
pub mod launch;
pub mod linear;
pub mod mark;
pub mod noise;
pub mod packed;
mod pinned;
pub mod plan;
pub mod pointwise;
pub mod quantise;
mod quantising_ring;
pub mod ranks;
pub mod readback;
pub mod reads;
pub mod reference;
pub mod sampling;
pub mod skinny;
pub mod span;
pub mod survey;
mod sys;
pub mod table;
mod tensor_map;
mod tiled;
pub mod timing;
#[cfg(test)]
mod toolchain;
pub mod upload;

pub use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
pub use half::bf16;

pub use crate::{
    device::{Device, Properties},
    error::KernelError,
    sys::{built_for, built_with_kernels},
};

/// All kernels, loaded on one device. Operations are methods; their arguments travel in a struct each.
#[derive(Debug)]
pub struct Kernels {
    functions: sys::Functions,
    device: Device,
}

impl Kernels {
    /// Loads the kernels that this program was built with.
    pub fn load(device: &Device) -> Result<Self, KernelError> {
        Ok(Self { functions: sys::Functions::load(device)?, device: device.clone() })
    }

    /// The device they were loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The device's properties as kernels are chosen by them: the capability is that of the loaded code where this is older
    /// than the chip.
    pub fn properties(&self) -> Properties {
        Properties { capability: self.functions.capability(), ..self.device.properties() }
    }
}

/// Refuses a buffer whose length is not what the shape needs.
fn check_len(op: &'static str, name: &str, found: usize, expected: usize) -> Result<(), KernelError> {
    if found == expected {
        return Ok(());
    }
    Err(launch::refused(op, format!("{name} holds {found} values, the shape needs {expected}")))
}

/// Refuses a buffer that is too small; a larger one is fine (caches, tables, capacity of a captured graph).
fn check_room(op: &'static str, name: &str, found: usize, needed: usize) -> Result<(), KernelError> {
    if found >= needed {
        return Ok(());
    }
    Err(launch::refused(op, format!("{name} holds {found} values, at least {needed} are needed")))
}
