//! Tensors as they lie in their files, and the part of one that is a weight. Copies nothing.

use std::{ops::Range, sync::Arc};

use safetensors::Dtype;
use stoker_fit::format::WeightFormat;

use super::{
    FileBytes, ModelError,
    spec::{Rank, RowOrder, WeightSlice, WeightSpec},
};

/// One tensor of a file. Its range lies in the file and is as long as its shape needs.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    /// Its file, for messages.
    pub(super) file: Arc<str>,
    /// Its name there.
    pub(super) name: String,
    /// How its numbers are stored, if that is known.
    pub(super) format: Result<WeightFormat, Dtype>,
    /// Rows, columns.
    pub(super) shape: Vec<usize>,
    /// The file.
    pub(super) content: Arc<FileBytes>,
    /// Its bytes there.
    pub(super) range: Range<usize>,
}

impl Tensor {
    pub(super) fn n_values(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.content[self.range.clone()]
    }

    /// Name of its number format.
    pub(super) fn format_name(&self) -> String {
        self.format.map_or_else(|dtype| dtype.to_string().to_lowercase(), |format| format.name().into())
    }

    /// A rank's share of a weight that is rows of this tensor; refused if it is not what was described.
    pub(super) fn weight(
        &self,
        spec: &WeightSpec,
        rank: Rank,
        described_by: &'static str,
    ) -> Result<StoredWeight, ModelError> {
        let (file, tensor) = (|| self.file.to_string(), || spec.label());
        if self.shape != spec.tensor_shape {
            let (expected, found) = (spec.tensor_shape.clone(), self.shape.clone());
            return Err(ModelError::Shape { file: file(), tensor: tensor(), described_by, expected, found });
        }
        let format = self.format.map_err(|dtype| ModelError::Dtype {
            file: file(),
            tensor: tensor(),
            found: dtype.to_string(),
        })?;
        let slice = spec.slice(rank)?;
        let block = format.block_values();
        let n_columns = self.shape.get(1).copied().unwrap_or(1);
        // Of a vector the rows lie side by side.
        let lengths = if self.shape.len() == 1 { [slice.rows.len(), block] } else { [block, slice.columns.len()] };
        if let Some(len) = lengths.into_iter().find(|len| !len.is_multiple_of(block)) {
            let problem = format!("a share of {len} numbers ends inside a block of {block}");
            return Err(ModelError::InsideBlock { file: file(), tensor: tensor(), problem });
        }
        Ok(StoredWeight { tensor: self.clone(), format, slice, n_columns, order: spec.order })
    }
}

/// A rank's share of a weight: rows of a tensor in its file, from one column to another.
#[derive(Clone, Debug)]
pub(crate) struct StoredWeight {
    tensor: Tensor,
    format: WeightFormat,
    slice: WeightSlice,
    /// Of the whole tensor.
    n_columns: usize,
    order: RowOrder,
}

impl StoredWeight {
    /// How its numbers are stored.
    pub(crate) fn format(&self) -> WeightFormat {
        self.format
    }

    /// Rows; of a vector, its length.
    pub(crate) fn n_outputs(&self) -> usize {
        self.slice.rows.len()
    }

    /// Columns.
    pub(crate) fn n_inputs(&self) -> usize {
        self.slice.columns.len()
    }

    /// The bytes of one row.
    pub(crate) fn row(&self, row: usize) -> &[u8] {
        let start = self.stored_row(self.slice.rows.start + row) * self.n_columns;
        self.bytes_of(start + self.slice.columns.start..start + self.slice.columns.end)
    }

    /// The bytes of some rows, in as few runs as there are in the file.
    pub(crate) fn runs(&self, rows: Range<usize>) -> Vec<&[u8]> {
        if !self.is_contiguous() {
            return rows.map(|row| self.row(row)).collect();
        }
        let first = self.slice.rows.start;
        vec![self.bytes_of((first + rows.start) * self.n_columns..(first + rows.end) * self.n_columns)]
    }

    /// All bytes, if they are one run of the file.
    pub(crate) fn contiguous(&self) -> Option<&[u8]> {
        self.is_contiguous().then(|| self.runs(0..self.n_outputs())[0])
    }

    /// Its numbers in f32, which holds every format exactly.
    pub(crate) fn to_f32(&self) -> Vec<f32> {
        self.runs(0..self.n_outputs()).into_iter().flat_map(|run| self.format.unpack(run)).collect()
    }

    /// Says that its bytes are not read again soon: a mapped file's leave memory until they are.
    pub(crate) fn release(&self) {
        let at = |row: usize| self.tensor.range.start + self.format.bytes_of(row * self.n_columns);
        self.tensor.content.release(at(self.slice.rows.start)..at(self.slice.rows.end));
    }

    fn is_contiguous(&self) -> bool {
        self.order == RowOrder::AsNeeded && self.slice.columns.len() == self.n_columns
    }

    /// Which row of the tensor is needed as this one.
    fn stored_row(&self, row: usize) -> usize {
        match self.order {
            RowOrder::AsNeeded => row,
            RowOrder::Pairs { head_dim } => {
                let (head, within, half) = (row / head_dim, row % head_dim, head_dim / 2);
                head * head_dim + if within < half { 2 * within } else { 2 * (within - half) + 1 }
            }
        }
    }

    fn bytes_of(&self, values: Range<usize>) -> &[u8] {
        &self.tensor.bytes()[self.format.bytes_of(values.start)..self.format.bytes_of(values.end)]
    }
}

#[cfg(test)]
impl StoredWeight {
    /// A whole matrix that lies in memory.
    pub(crate) fn in_memory(format: WeightFormat, [rows, columns]: [usize; 2], bytes: Vec<u8>) -> Self {
        assert_eq!(bytes.len(), format.bytes_of(rows * columns));
        let (file, name, range) = ("m".into(), "w".into(), 0..bytes.len());
        let content = Arc::new(FileBytes::Owned(bytes));
        let tensor = Tensor { file, name, format: Ok(format), shape: vec![rows, columns], content, range };
        let slice = WeightSlice { rows: 0..rows, columns: 0..columns };
        Self { tensor, format, slice, n_columns: columns, order: RowOrder::AsNeeded }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::spec::{Sharding, WeightRole};

    /// A matrix whose numbers count up, in f32.
    fn counting(rows: usize, columns: usize) -> Tensor {
        let bytes: Vec<u8> = (0..rows * columns).flat_map(|number| (number as f32).to_le_bytes()).collect();
        tensor(WeightFormat::F32, vec![rows, columns], bytes)
    }

    fn tensor(format: WeightFormat, shape: Vec<usize>, bytes: Vec<u8>) -> Tensor {
        let (file, name, range) = ("m.safetensors".into(), "w".into(), 0..bytes.len());
        Tensor { file, name, format: Ok(format), shape, content: Arc::new(FileBytes::Owned(bytes)), range }
    }

    fn spec(tensor: &Tensor, sharding: Sharding) -> WeightSpec {
        WeightSpec {
            name: "w".into(),
            tensor: "w".into(),
            tensor_shape: tensor.shape.clone(),
            rows: 0..tensor.shape[0],
            order: RowOrder::AsNeeded,
            role: WeightRole::Projection,
            sharding,
            scheme: None,
        }
    }

    fn share(tensor: &Tensor, spec: &WeightSpec, rank: Rank) -> StoredWeight {
        tensor.weight(spec, rank, "config.json").unwrap()
    }

    #[test]
    fn what_a_rank_reads_is_that_slice_of_the_whole() {
        let matrix = counting(6, 4);
        let whole = share(&matrix, &spec(&matrix, Sharding::Replicated), Rank::ALONE).to_f32();
        let of = |sharding, idx| share(&matrix, &spec(&matrix, sharding), Rank { idx, of: 2 });
        let lower = of(Sharding::Outputs { unit: 1 }, 1);
        assert_eq!(lower.to_f32(), whole[12..]);
        assert!(lower.contiguous().is_some(), "rows that follow each other are one run");
        let right = of(Sharding::Inputs { unit: 2 }, 1);
        let expected: Vec<f32> = whole.chunks(4).flat_map(|row| row[2..].to_vec()).collect();
        assert_eq!(right.to_f32(), expected);
        assert_eq!((right.runs(1..3).len(), right.contiguous()), (2, None));
    }

    #[test]
    fn rows_of_a_shared_tensor_and_rows_in_pairs_come_as_they_are_needed() {
        let matrix = counting(8, 1);
        let values = WeightSpec { rows: 4..8, ..spec(&matrix, Sharding::Outputs { unit: 2 }) };
        assert_eq!(share(&matrix, &values, Rank { idx: 1, of: 2 }).to_f32(), [6.0, 7.0]);
        let paired =
            WeightSpec { order: RowOrder::Pairs { head_dim: 4 }, ..spec(&matrix, Sharding::Outputs { unit: 4 }) };
        assert_eq!(share(&matrix, &paired, Rank::ALONE).to_f32(), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        assert_eq!(share(&matrix, &paired, Rank { idx: 1, of: 2 }).to_f32(), [4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn a_share_that_would_end_inside_a_block_is_refused_with_its_name() {
        let blocks = tensor(WeightFormat::Q8_0, vec![2, 32], vec![0; 68]);
        let refused =
            |idx| blocks.weight(&spec(&blocks, Sharding::Inputs { unit: 1 }), Rank { idx, of: 2 }, "config.json");
        let text = "m.safetensors: tensor w: a share of 16 numbers ends inside a block of 32; take fewer ranks";
        assert_eq!([0, 1].map(|idx| refused(idx).unwrap_err().to_string()), [text; 2]);
    }
}
