//! Weights on the CPU: matrices of plain numbers as they lie in the file, blocks in panels, vectors widened to f32, since
//! those are small.

use std::borrow::Cow;

use super::kernel::{Format, Panels, Quant, WeightRows, Weights, widen};
use half::{bf16, f16};

use crate::{
    model::{NormWeight, QuantisedWeight, StoredMatrix as Stored, StoredWeight, WeightFormat, to_q8_0},
    pool::{Pool, RowRuns},
};

/// Rows that are dequantised at once: a cache line of words along outputs has as many codes, so that it is read once.
const ROWS_AT_ONCE: usize = 128;

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
    bytes: MatrixBytes,
}

/// The numbers of a matrix, row by row.
#[derive(Debug)]
enum MatrixBytes {
    /// As they lie in the file.
    InFile(StoredWeight),
    /// Put together from rows that lie otherwise there.
    Gathered(Vec<u8>),
}

/// A weight vector.
#[derive(Debug)]
pub struct CpuVector {
    values: Vec<f32>,
}

impl CpuMatrix {
    /// A matrix that lies in memory, row by row.
    ///
    /// # Panics
    /// There are more or fewer bytes than `outputs x inputs` numbers have, or rows are not whole blocks.
    pub fn in_memory(format: WeightFormat, shape: [usize; 2], bytes: Vec<u8>) -> Self {
        let [n_outputs, n_inputs] = shape;
        assert_eq!(bytes.len(), format.bytes_of(n_outputs * n_inputs), "bytes for every number");
        if let Some(format) = plain(format) {
            let bytes = MatrixBytes::Gathered(bytes);
            return Self(Form::Stored(StoredMatrix { n_outputs, n_inputs, format, bytes }));
        }
        let row_bytes = format.bytes_of(n_inputs);
        let row = |output: usize| &bytes[output * row_bytes..][..row_bytes];
        let mut caller_alone = Pool::new(1).expect("no thread is started");
        let panels = Panels::new(&mut caller_alone, quant_of(format), shape, |outputs| {
            outputs.map(|output| quantised(format, row(output))).collect()
        });
        Self(Form::Panels(panels))
    }

    /// Takes a matrix over. Codes that are multiplied as numbers become such of that format.
    pub(super) fn new(pool: &mut Pool, matrix: &Stored, plain_format: WeightFormat) -> Self {
        match matrix {
            Stored::Plain(weight) => Self::stored(pool, weight),
            Stored::Quantised(weight) => match weight.kept_as(plain_format) {
                blocks if !blocks.is_plain() => Self::in_blocks(pool, weight, blocks),
                format => Self::dequantised(pool, weight, format),
            },
        }
    }

    fn in_blocks(pool: &mut Pool, weight: &QuantisedWeight, blocks: WeightFormat) -> Self {
        let shape = [weight.n_outputs(), weight.n_inputs()];
        let row_bytes = blocks.bytes_of(shape[1]);
        let panels = Panels::new(pool, quant_of(blocks), shape, |outputs| {
            weight.to_blocks(outputs, blocks).chunks_exact(row_bytes).map(|row| Cow::Owned(row.to_vec())).collect()
        });
        weight.release();
        Self(Form::Panels(panels))
    }

    fn dequantised(pool: &mut Pool, weight: &QuantisedWeight, format: WeightFormat) -> Self {
        let format = plain(format).expect("the largest tensor of plain numbers is of such");
        let (n_outputs, n_inputs) = (weight.n_outputs(), weight.n_inputs());
        let row_bytes = n_inputs * format.bytes();
        let mut bytes = vec![0; n_outputs * row_bytes];
        let runs = RowRuns { width: row_bytes, per_task: ROWS_AT_ONCE };
        pool.for_rows(&mut bytes, runs, |first, rows| {
            let values = weight.dequantise(first..first + rows.len() / row_bytes);
            narrow(format, &values, rows);
        });
        weight.release();
        Self(Form::Stored(StoredMatrix { n_outputs, n_inputs, format, bytes: MatrixBytes::Gathered(bytes) }))
    }

    fn stored(pool: &mut Pool, weight: &StoredWeight) -> Self {
        if let Some(format) = plain(weight.format()) {
            return Self(Form::Stored(StoredMatrix::new(weight, format)));
        }
        let (format, shape) = (weight.format(), [weight.n_outputs(), weight.n_inputs()]);
        let panels = Panels::new(pool, quant_of(format), shape, |outputs| {
            outputs.map(|output| quantised(format, weight.row(output))).collect()
        });
        // They would stay resident beside the panels.
        weight.release();
        Self(Form::Panels(panels))
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
    fn new(weight: &StoredWeight, format: Format) -> Self {
        let bytes = match weight.contiguous() {
            Some(_) => MatrixBytes::InFile(weight.clone()),
            None => MatrixBytes::Gathered(weight.runs(0..weight.n_outputs()).concat()),
        };
        Self { n_outputs: weight.n_outputs(), n_inputs: weight.n_inputs(), format, bytes }
    }

    fn rows(&self) -> WeightRows<'_> {
        let bytes = match &self.bytes {
            MatrixBytes::InFile(weight) => weight.contiguous().expect("it was when it was taken"),
            MatrixBytes::Gathered(bytes) => bytes,
        };
        WeightRows { bytes, row_bytes: self.n_inputs * self.format.bytes() }
    }
}

impl CpuVector {
    pub(crate) fn new(weight: &StoredWeight) -> Self {
        Self { values: weight.to_f32() }
    }

    /// What a norm multiplies with.
    pub(crate) fn of_norm(weight: &StoredWeight, stored: NormWeight) -> Self {
        let mut values = weight.to_f32();
        if stored == NormWeight::OnePlusFactor {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Self { values }
    }

    pub(super) fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Numbers as stored ones, each rounded to the nearest.
fn narrow(format: Format, values: &[f32], out: &mut [u8]) {
    let stored = out.chunks_exact_mut(format.bytes()).zip(values);
    match format {
        Format::F32 => stored.for_each(|(out, value)| out.copy_from_slice(&value.to_le_bytes())),
        Format::Bf16 => stored.for_each(|(out, value)| out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes())),
        Format::F16 => stored.for_each(|(out, value)| out.copy_from_slice(&f16::from_f32(*value).to_le_bytes())),
    }
}

/// The format of plain numbers; `None` of blocks.
pub(super) fn plain(format: WeightFormat) -> Option<Format> {
    match format {
        WeightFormat::F32 => Some(Format::F32),
        WeightFormat::Bf16 => Some(Format::Bf16),
        WeightFormat::F16 => Some(Format::F16),
        _ => None,
    }
}

/// What blocks are multiplied as.
fn quant_of(blocks: WeightFormat) -> Quant {
    match blocks {
        WeightFormat::Q4_0 => Quant::Q4,
        _ => Quant::Q8,
    }
}

/// A row in the blocks that it is multiplied as.
fn quantised(blocks: WeightFormat, row: &[u8]) -> Cow<'_, [u8]> {
    match blocks {
        WeightFormat::Q8_0 | WeightFormat::Q4_0 => Cow::Borrowed(row),
        _ => Cow::Owned(to_q8_0(&blocks.unpack(row))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{WeightFormat, quantised_goldens};

    /// Panels, and plain numbers where blocks would not be the same ones.
    #[test]
    fn a_quantised_matrix_holds_the_numbers_that_its_codes_stand_for() {
        let (mut pool, mut formats) = (Pool::new(2).unwrap(), Vec::new());
        for (name, weight) in quantised_goldens() {
            let format = weight.kept_as(WeightFormat::F32);
            let numbers = weight.dequantise(0..weight.n_outputs());
            let matrix = CpuMatrix::new(&mut pool, &Stored::Quantised(weight), WeightFormat::F32);
            let mut row = vec![0.0; matrix.n_inputs()];
            for (output, expected) in numbers.chunks_exact(matrix.n_inputs()).enumerate() {
                matrix.read_row(output, &mut row);
                assert_eq!(row, expected, "{name}, output {output}");
            }
            formats.push(format);
        }
        for format in [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q4_0] {
            assert!(formats.contains(&format), "no golden is kept as {}", format.name());
        }
    }
}
