//! The operations of a forward pass on the CPU, and what a step hands them. Activations are f32 matrices, one row a token;
//! weights keep the form that they are multiplied in.

mod batch;
mod cpu;

pub use batch::{BatchInputs, FedRow};
pub use cpu::{Buffer, CpuCache, CpuMatrix, CpuOps, CpuTensor, CpuVector, Isa, NoSuchIsa};
