//! Weights on the CPU: matrices as they lie in the file, vectors widened to f32, since those are small.

use safetensors::Dtype;

use super::kernel::{Format, WeightRows, Weights, widen};
use crate::model::Tensor;

/// A weight matrix, `outputs x inputs`, row-major, in its file.
#[derive(Debug)]
pub struct CpuMatrix {
    n_outputs: usize,
    n_inputs: usize,
    format: Format,
    stored: Tensor,
}

/// A weight vector.
#[derive(Debug)]
pub struct CpuVector {
    values: Vec<f32>,
}

impl CpuMatrix {
    pub(super) fn new(tensor: &Tensor) -> Self {
        let [n_outputs, n_inputs] = tensor.shape[..] else {
            panic!("{} was checked to be a matrix", tensor.name);
        };
        let format = format_of(tensor);
        assert_eq!(tensor.bytes().len(), n_outputs * n_inputs * format.bytes(), "sizes were checked against the shape");
        Self { n_outputs, n_inputs, format, stored: tensor.clone() }
    }

    pub(super) fn n_outputs(&self) -> usize {
        self.n_outputs
    }

    pub(super) fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    pub(super) fn weights(&self) -> Weights<'_> {
        let rows = WeightRows { bytes: self.stored.bytes(), row_bytes: self.n_inputs * self.format.bytes() };
        Weights { rows, format: self.format }
    }

    /// One row, widened, into `out`.
    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        let WeightRows { bytes, row_bytes } = self.weights().rows;
        widen(self.format, &bytes[row * row_bytes..][..row_bytes], out);
    }
}

impl CpuVector {
    pub(super) fn new(tensor: &Tensor) -> Self {
        let mut values = vec![0.0; tensor.n_values()];
        widen(format_of(tensor), tensor.bytes(), &mut values);
        Self { values }
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }
}

fn format_of(tensor: &Tensor) -> Format {
    match tensor.dtype {
        Dtype::F32 => Format::F32,
        Dtype::BF16 => Format::Bf16,
        Dtype::F16 => Format::F16,
        other => panic!("{other} was refused when the tensor was taken"),
    }
}
