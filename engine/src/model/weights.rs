//! Weights by name, in one safetensors file or several. Checks every size and offset before a number is read;
//! copies nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use safetensors::{Dtype, tensor::TensorInfo};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;

use super::{FileBytes, ModelError, ModelSource, family::NormWeight, gguf::BlockFormat};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Bytes in front of the header: its length.
const LENGTH_BYTES: usize = 8;

/// All tensors of a model.
#[derive(Debug)]
pub struct WeightStore {
    tensors: BTreeMap<String, Stored>,
    /// What a missing tensor is missing from.
    whole: String,
    /// How norms are stored, where the format has its own way.
    norm_weight: Option<NormWeight>,
}

/// A tensor in its file, and what has to be undone to have its rows in the order everybody else has them.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) tensor: Tensor,
    /// The rows of each of so many heads are stored rotary pair by pair.
    pub(super) paired_heads: Option<usize>,
}

/// A file's own description. Read here rather than by the crate, whose refusals do not always name the tensor.
#[derive(Debug, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    _metadata: Option<IgnoredAny>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// One tensor as stored.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its file, for messages.
    pub file: Arc<str>,
    /// Its name.
    pub name: String,
    /// Number format: F32, BF16 or F16 once it was taken; F32 of blocks.
    pub dtype: Dtype,
    /// Rows, columns.
    pub shape: Vec<usize>,
    /// Its bytes are blocks.
    pub(crate) blocks: Option<BlockFormat>,
    content: Arc<FileBytes>,
    range: Range<usize>,
}

impl Tensor {
    /// A tensor whose range was checked.
    pub(super) fn new(
        file: &Arc<str>,
        name: &str,
        dtype: Dtype,
        shape: Vec<usize>,
        content: Arc<FileBytes>,
        range: Range<usize>,
    ) -> Self {
        Self { file: Arc::clone(file), name: name.into(), dtype, shape, blocks: None, content, range }
    }

    /// The same tensor, whose bytes are blocks.
    pub(super) fn in_blocks(self, blocks: BlockFormat) -> Self {
        Self { blocks: Some(blocks), ..self }
    }

    /// Its numbers, if they are in blocks. What is not is not copied.
    fn dequantised(self) -> Self {
        match self.blocks {
            Some(blocks) => Self { blocks: None, ..self.with_f32(blocks.dequantise(self.bytes()).into_iter()) },
            None => self,
        }
    }

    /// Says that its bytes are not read again soon: a mapped file's leave memory until they are.
    pub(crate) fn release(&self) {
        self.content.release(self.range.clone());
    }

    /// Its bytes, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.content[self.range.clone()]
    }

    /// Some of its rows, not copied. Panics beyond the last row.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let n_rows = self.shape[0];
        assert!(rows.end <= n_rows, "{} has {n_rows} rows", self.name);
        let bytes_per_row = self.range.len() / n_rows;
        let start = self.range.start + rows.start * bytes_per_row;
        let range = start..start + rows.len() * bytes_per_row;
        let shape = [&[rows.len()], &self.shape[1..]].concat();
        Self { shape, range, ..self.clone() }
    }

    /// The same tensor in f32 with one added to each number.
    pub fn plus_one(&self) -> Self {
        self.with_f32(self.to_f32().into_iter().map(|value| 1.0 + value))
    }

    fn with_f32(&self, values: impl Iterator<Item = f32>) -> Self {
        Self { dtype: Dtype::F32, ..self.with_bytes(values.flat_map(f32::to_le_bytes).collect()) }
    }

    fn with_bytes(&self, bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { content: Arc::new(FileBytes::Computed(bytes)), range, ..self.clone() }
    }

    /// Its numbers in f32, which holds every supported format exactly.
    fn to_f32(&self) -> Vec<f32> {
        let bytes = self.bytes();
        match self.dtype {
            Dtype::BF16 => bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("{other} was refused when the tensor was taken"),
        }
    }

    /// How many numbers it has.
    pub fn n_values(&self) -> usize {
        self.shape.iter().product()
    }
}

impl WeightStore {
    /// Opens the weights of a model: the index if there is one, else the single file.
    pub fn open(source: &ModelSource) -> Result<Self, ModelError> {
        let index = source.json_optional(INDEX_FILE)?;
        if index.is_null() {
            let tensors = open_file(source, SINGLE_FILE)?;
            return Ok(Self::new(as_stored(tensors), source.display(SINGLE_FILE), None));
        }
        let mut tensors = BTreeMap::new();
        for file in shard_files(&index, source)? {
            tensors.extend(as_stored(open_file(source, &file)?));
        }
        Ok(Self::new(tensors, source.display(INDEX_FILE), None))
    }

    pub(super) fn new(tensors: BTreeMap<String, Stored>, whole: String, norm_weight: Option<NormWeight>) -> Self {
        Self { tensors, whole, norm_weight }
    }

    /// How norms are stored, where that is not for the family to say.
    pub(super) fn norm_weight(&self) -> Option<NormWeight> {
        self.norm_weight
    }

    /// Takes one tensor out, checked against the shape the model needs, as plain numbers.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Tensor, ModelError> {
        self.take_in_blocks(name, expected).map(Tensor::dequantised)
    }

    /// The same, in blocks if that is how it is stored.
    pub(super) fn take_in_blocks(&mut self, name: &str, expected: &[usize]) -> Result<Tensor, ModelError> {
        let Stored { tensor, paired_heads } = self.tensors.remove(name).ok_or_else(|| ModelError::MissingTensor {
            file: self.whole.clone(),
            tensor: name.into(),
            expected: expected.to_vec(),
        })?;
        let Tensor { file, shape, dtype, .. } = &tensor;
        if shape != expected {
            let (expected, found) = (expected.to_vec(), shape.clone());
            return Err(ModelError::Shape { file: file.to_string(), tensor: name.into(), expected, found });
        }
        if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(ModelError::Dtype { file: file.to_string(), tensor: name.into(), found: dtype.to_string() });
        }
        Ok(match paired_heads {
            Some(n_heads) => unpair(&tensor, n_heads),
            None => tensor,
        })
    }

    /// Forgets a tensor that the model may have and does not need.
    pub fn ignore(&mut self, is_ignored: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !is_ignored(name));
    }

    /// Refuses what nobody took: computing without it would be wrong.
    pub fn finish(self, architecture: &str) -> Result<(), ModelError> {
        match self.tensors.into_values().next() {
            None => Ok(()),
            Some(Stored { tensor: Tensor { file, name, .. }, .. }) => Err(ModelError::UnexpectedTensor {
                file: file.to_string(),
                tensor: name,
                architecture: architecture.into(),
            }),
        }
    }

    /// Number format of the largest tensor; `None` without tensors. Blocks are no more exact than bf16.
    pub fn main_dtype(&self) -> Option<Dtype> {
        let largest = self.tensors().max_by_key(|tensor| tensor.n_values())?;
        Some(largest.blocks.map_or(largest.dtype, |_| Dtype::BF16))
    }

    /// Name of the number format of the largest tensor, as stored; empty without tensors.
    pub fn format_name(&self) -> String {
        let largest = self.tensors.values().max_by_key(|stored| stored.tensor.n_values());
        largest.map(Stored::format_name).unwrap_or_default()
    }

    /// All tensors that were not taken.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.tensors.values().map(|stored| &stored.tensor)
    }
}

impl Stored {
    fn format_name(&self) -> String {
        match self.tensor.blocks {
            Some(blocks) => blocks.name().into(),
            None => self.tensor.dtype.to_string().to_lowercase(),
        }
    }
}

/// In each head, rows `0 2 4 ... 1 3 5 ...` of the file.
fn unpair(tensor: &Tensor, n_heads: usize) -> Tensor {
    let rows_per_head = tensor.shape[0] / n_heads.max(1);
    let n_bytes = tensor.bytes().len();
    // Heads of an odd height have no pairs: the shape is wrong and is refused as such.
    if rows_per_head == 0 || !rows_per_head.is_multiple_of(2) || !tensor.shape[0].is_multiple_of(rows_per_head) {
        return tensor.clone();
    }
    let row_bytes = n_bytes / tensor.shape[0];
    let mut bytes = Vec::with_capacity(n_bytes);
    for head in tensor.bytes().chunks_exact(rows_per_head * row_bytes) {
        for first in [0, 1] {
            head.chunks_exact(row_bytes).skip(first).step_by(2).for_each(|row| bytes.extend_from_slice(row));
        }
    }
    tensor.with_bytes(bytes)
}

fn as_stored(tensors: BTreeMap<String, Tensor>) -> BTreeMap<String, Stored> {
    let stored = |(name, tensor)| (name, Stored { tensor, paired_heads: None });
    tensors.into_iter().map(stored).collect()
}

/// The files an index names. A name with a path in it would lead out of the model's directory.
fn shard_files(index: &Value, source: &ModelSource) -> Result<BTreeSet<String>, ModelError> {
    let error =
        |problem: String| ModelError::Field { file: source.display(INDEX_FILE), field: "weight_map".into(), problem };
    let map = index["weight_map"].as_object().ok_or_else(|| error("is not an object".into()))?;
    let plain_name = |(tensor, file): (&String, &Value)| match file.as_str() {
        Some(name) if !name.is_empty() && !name.contains(['/', '\\']) => Ok(name.to_owned()),
        _ => Err(error(format!("names {file} for tensor {tensor}, expected a file name without a path"))),
    };
    map.iter().map(plain_name).collect()
}

fn open_file(source: &ModelSource, file: &str) -> Result<BTreeMap<String, Tensor>, ModelError> {
    read_file(Arc::new(source.open(file)?), source.display(file).into())
}

fn read_file(content: Arc<FileBytes>, file: Arc<str>) -> Result<BTreeMap<String, Tensor>, ModelError> {
    let (header, data_start) = read_header(&content, &file)?;
    let tensor = |(name, info): (String, TensorInfo)| {
        let range = checked_range(&name, &info, data_start, &content, &file)?;
        let (file, content) = (Arc::clone(&file), Arc::clone(&content));
        Ok((name.clone(), Tensor { file, name, dtype: info.dtype, shape: info.shape, blocks: None, content, range }))
    };
    let tensors = header.tensors.into_iter().map(tensor).collect::<Result<_, ModelError>>()?;
    refuse_holes(&tensors, content.len() - data_start, &file)?;
    Ok(tensors)
}

/// The format has neither gaps nor overlaps: a file with either is not what its header says.
fn refuse_holes(tensors: &BTreeMap<String, Tensor>, n_bytes: usize, file: &str) -> Result<(), ModelError> {
    let described: usize = tensors.values().map(|tensor| tensor.range.len()).sum();
    if described == n_bytes {
        return Ok(());
    }
    let reason = format!("its tensors describe {described} bytes, its data has {n_bytes}");
    Err(ModelError::Header { file: file.into(), format: "safetensors", reason })
}

/// The header: 8 bytes of length, then JSON. Returns where the data begins.
fn read_header(content: &[u8], file: &str) -> Result<(Header, usize), ModelError> {
    let error = |reason: String| ModelError::Header { file: file.into(), format: "safetensors", reason };
    let Some((length, rest)) = content.split_first_chunk::<LENGTH_BYTES>() else {
        return Err(error(format!("it has {} bytes, a header alone has more", content.len())));
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let header =
        header.ok_or_else(|| error(format!("its header claims {length} bytes, the file has {}", content.len())))?;
    let parsed = serde_json::from_slice(header).map_err(|reason| error(format!("its header: {reason}")))?;
    Ok((parsed, LENGTH_BYTES + header.len()))
}

/// Where a tensor's bytes lie in the file; refuses offsets beyond it and sizes that disagree with the shape.
fn checked_range(
    name: &str,
    info: &TensorInfo,
    data_start: usize,
    content: &[u8],
    file: &str,
) -> Result<Range<usize>, ModelError> {
    let (begin, end) = info.data_offsets;
    let values = info.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
    let needed = values.and_then(|values| values.checked_mul(info.dtype.bitsize())).map(|bits| bits / 8);
    if end.checked_sub(begin) != needed || needed.is_none() {
        return Err(ModelError::Size {
            file: file.into(),
            tensor: name.into(),
            shape: format!("{:?} of {}", info.shape, info.dtype),
            expected: needed.map_or("more than any machine has".into(), |bytes| bytes.to_string()),
            found: end.saturating_sub(begin) as u64,
        });
    }
    let expected = data_start.saturating_add(end);
    if expected > content.len() {
        let (expected, found) = (expected as u64, content.len() as u64);
        return Err(ModelError::Truncated { file: file.into(), tensor: name.into(), expected, found });
    }
    Ok(data_start + begin..expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::damage;

    fn good() -> Vec<u8> {
        let header = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
            "b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"F16","shape":[1,1,2],
            "data_offsets":[32,36]}}"#;
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[7; 36]].concat()
    }

    fn read(bytes: Vec<u8>) -> Result<BTreeMap<String, Tensor>, ModelError> {
        read_file(Arc::new(FileBytes::Computed(bytes)), "m.safetensors".into())
    }

    #[test]
    fn damaged_files_are_refused_or_hold_what_they_say() {
        assert_eq!(read(good()).unwrap().len(), 3);
        damage::read_all(&good(), |case, damaged| {
            for tensor in read(damaged).iter().flat_map(BTreeMap::values) {
                assert_eq!(tensor.bytes().len() * 8, tensor.n_values() * tensor.dtype.bitsize(), "case {case}");
            }
        });
    }
}
