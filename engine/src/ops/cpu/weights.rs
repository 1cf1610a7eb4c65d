//! Weights on the CPU: matrices of plain numbers as they lie in the file, blocks in panels, vectors widened to f32, since
//! those are small.

use std::borrow::Cow;

use safetensors::Dtype;

use super::{
    kernel::{Format, Panels, Quant, WeightRows, Weights, widen},
    pool::Pool,
};
use crate::model::{BlockFormat, Tensor};

/// A weight matrix, `outputs x inputs`.
#[derive(Debug)]
pub struct CpuMatrix(Form);

#[derive(Debug)]
enum Form {
    /// Plain numbers, row-major, in their file.
    Stored(StoredMatrix),
    /// Blocks, brought into the order in which they are multiplied.
    Panels(Panels),
}

/// Plain numbers in their file.
#[derive(Debug)]
struct StoredMatrix {
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
    pub(super) fn new(pool: &mut Pool, tensor: &Tensor) -> Self {
        let [n_outputs, n_inputs] = tensor.shape[..] else {
            panic!("{} was checked to be a matrix", tensor.name);
        };
        let Some(blocks) = tensor.blocks else {
            return Self(Form::Stored(StoredMatrix::new(tensor, [n_outputs, n_inputs])));
        };
        let row_bytes = tensor.bytes().len() / n_outputs;
        let row = |output: usize| quantised(blocks, &tensor.bytes()[output * row_bytes..][..row_bytes]);
        let panels = Panels::new(pool, quant_of(blocks), [n_outputs, n_inputs], row);
        // They would stay resident beside the panels.
        tensor.release();
        Self(Form::Panels(panels))
    }

    /// Bytes that it takes in memory, or keeps of its file there.
    pub(super) fn bytes_of(tensor: &Tensor) -> u64 {
        let bytes = match tensor.blocks {
            Some(blocks) if tensor.shape.len() == 2 => quant_of(blocks).bytes_of(tensor.n_values()),
            _ => tensor.n_values() * tensor.dtype.bitsize() / 8,
        };
        bytes as u64
    }

    pub(super) fn n_outputs(&self) -> usize {
        match &self.0 {
            Form::Stored(matrix) => matrix.n_outputs,
            Form::Panels(panels) => panels.n_outputs(),
        }
    }

    pub(super) fn n_inputs(&self) -> usize {
        match &self.0 {
            Form::Stored(matrix) => matrix.n_inputs,
            Form::Panels(panels) => panels.n_inputs(),
        }
    }

    pub(super) fn weights(&self) -> Weights<'_> {
        match &self.0 {
            Form::Stored(matrix) => Weights::Rows(matrix.rows(), matrix.format),
            Form::Panels(panels) => Weights::Panels(panels),
        }
    }

    /// One row, widened, into `out`.
    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        match &self.0 {
            Form::Stored(matrix) => {
                let WeightRows { bytes, row_bytes } = matrix.rows();
                widen(matrix.format, &bytes[row * row_bytes..][..row_bytes], out);
            }
            Form::Panels(panels) => panels.read_row(row, out),
        }
    }
}

impl StoredMatrix {
    fn new(tensor: &Tensor, [n_outputs, n_inputs]: [usize; 2]) -> Self {
        let format = format_of(tensor);
        assert_eq!(tensor.bytes().len(), n_outputs * n_inputs * format.bytes(), "sizes were checked against the shape");
        Self { n_outputs, n_inputs, format, stored: tensor.clone() }
    }

    fn rows(&self) -> WeightRows<'_> {
        WeightRows { bytes: self.stored.bytes(), row_bytes: self.n_inputs * self.format.bytes() }
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

/// What blocks are multiplied as.
fn quant_of(blocks: BlockFormat) -> Quant {
    match blocks {
        BlockFormat::Q4_0 => Quant::Q4,
        _ => Quant::Q8,
    }
}

/// A row in the blocks that it is multiplied as.
fn quantised(blocks: BlockFormat, row: &[u8]) -> Cow<'_, [u8]> {
    match blocks {
        BlockFormat::Q8_0 | BlockFormat::Q4_0 => Cow::Borrowed(row),
        _ => Cow::Owned(BlockFormat::q8_0(&blocks.dequantise(row))),
    }
}
