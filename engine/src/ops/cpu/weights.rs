//! Weights on the CPU: f32, in place when the file has f32, widened once otherwise.
//!
//! bf16 and f16 are widened because the GEMM computes in f32 and has no mixed form: widening at every step would cost
//! more than the memory saved. A quantised path will bring its own matrix form and kernel and drop the copy.

use rayon::prelude::*;
use safetensors::Dtype;

use crate::model::Tensor;

/// A weight matrix, `outputs x inputs`, row-major.
#[derive(Debug)]
pub struct CpuMatrix {
    n_outputs: usize,
    n_inputs: usize,
    values: Values,
}

/// A weight vector.
#[derive(Debug)]
pub struct CpuVector {
    values: Values,
}

#[derive(Debug)]
enum Values {
    InPlace(Tensor),
    Widened(Vec<f32>),
}

impl CpuMatrix {
    pub(super) fn new(tensor: &Tensor) -> Self {
        let [n_outputs, n_inputs] = tensor.shape[..] else {
            panic!("{} was checked to be a matrix", tensor.name);
        };
        Self { n_outputs, n_inputs, values: Values::new(tensor) }
    }

    pub(super) fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    pub(super) fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    pub(super) fn values(&self) -> &[f32] {
        self.values.as_slice()
    }

    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.n_inputs..][..self.n_inputs]
    }
}

impl CpuVector {
    pub(super) fn new(tensor: &Tensor) -> Self {
        Self { values: Values::new(tensor) }
    }

    pub(super) fn values(&self) -> &[f32] {
        self.values.as_slice()
    }
}

impl Values {
    fn new(tensor: &Tensor) -> Self {
        let bytes = tensor.bytes();
        match tensor.dtype {
            // Little-endian f32 on a little-endian machine, aligned as the format pads it: no copy.
            Dtype::F32 if in_place(bytes).is_some() => Self::InPlace(tensor.clone()),
            Dtype::F32 => Self::Widened(widen(bytes, f32::from_le_bytes)),
            Dtype::BF16 => Self::Widened(widen(bytes, |b| half::bf16::from_le_bytes(b).to_f32())),
            Dtype::F16 => Self::Widened(widen(bytes, |b| half::f16::from_le_bytes(b).to_f32())),
            other => panic!("{other} was refused when the tensor was taken"),
        }
    }

    fn as_slice(&self) -> &[f32] {
        match self {
            Self::InPlace(tensor) => in_place(tensor.bytes()).expect("alignment was checked in new()"),
            Self::Widened(values) => values,
        }
    }
}

fn in_place(bytes: &[u8]) -> Option<&[f32]> {
    if cfg!(target_endian = "big") {
        return None;
    }
    bytemuck::try_cast_slice(bytes).ok()
}

fn widen<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32 + Sync) -> Vec<f32> {
    let (stored, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "the size was checked against the shape");
    stored.par_iter().with_min_len(1 << 16).map(|bytes| number(*bytes)).collect()
}

#[cfg(test)]
pub(super) fn test_matrix(n_outputs: usize, n_inputs: usize, values: Vec<f32>) -> CpuMatrix {
    CpuMatrix { n_outputs, n_inputs, values: Values::Widened(values) }
}
