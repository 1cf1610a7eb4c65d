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

use super::{FileBytes, ModelError, ModelSource};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Bytes in front of the header: its length.
const LENGTH_BYTES: usize = 8;

/// All tensors of a model.
#[derive(Debug)]
pub struct WeightStore {
    tensors: BTreeMap<String, Tensor>,
    /// What a missing tensor is missing from.
    whole: String,
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
    /// Number format: F32, BF16 or F16 once it came through [`WeightStore::take`].
    pub dtype: Dtype,
    /// Rows, columns.
    pub shape: Vec<usize>,
    content: Arc<FileBytes>,
    range: Range<usize>,
}

impl Tensor {
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
        let bytes: Vec<u8> = self.to_f32().into_iter().flat_map(|value| (1.0 + value).to_le_bytes()).collect();
        let range = 0..bytes.len();
        Self { dtype: Dtype::F32, content: Arc::new(FileBytes::Computed(bytes)), range, ..self.clone() }
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
            return Ok(Self { tensors, whole: source.display(SINGLE_FILE) });
        }
        let mut tensors = BTreeMap::new();
        for file in shard_files(&index, source)? {
            tensors.extend(open_file(source, &file)?);
        }
        Ok(Self { tensors, whole: source.display(INDEX_FILE) })
    }

    /// Takes one tensor out, checked against the shape the model needs.
    pub fn take(&mut self, name: &str, expected: &[usize]) -> Result<Tensor, ModelError> {
        let tensor = self.tensors.remove(name).ok_or_else(|| ModelError::MissingTensor {
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
        Ok(tensor)
    }

    /// Forgets a tensor that the model may have and does not need.
    pub fn ignore(&mut self, is_ignored: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| !is_ignored(name));
    }

    /// Refuses what nobody took: computing without it would be wrong.
    pub fn finish(self, architecture: &str) -> Result<(), ModelError> {
        match self.tensors.into_values().next() {
            None => Ok(()),
            Some(Tensor { file, name, .. }) => Err(ModelError::UnexpectedTensor {
                file: file.to_string(),
                tensor: name,
                architecture: architecture.into(),
            }),
        }
    }

    /// Number format of the largest tensor; `None` without tensors.
    pub fn main_dtype(&self) -> Option<Dtype> {
        self.tensors.values().max_by_key(|tensor| tensor.n_values()).map(|tensor| tensor.dtype)
    }

    /// Bytes of all tensors, as stored.
    pub fn n_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.bytes().len() as u64).sum()
    }
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
    let content = Arc::new(source.open(file)?);
    let file: Arc<str> = source.display(file).into();
    let (header, data_start) = read_header(&content, &file)?;
    let tensor = |(name, info): (String, TensorInfo)| {
        let range = checked_range(&name, &info, data_start, &content, &file)?;
        let (file, content) = (Arc::clone(&file), Arc::clone(&content));
        Ok((name.clone(), Tensor { file, name, dtype: info.dtype, shape: info.shape, content, range }))
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
    Err(ModelError::Header { file: file.into(), reason })
}

/// The header: 8 bytes of length, then JSON. Returns where the data begins.
fn read_header(content: &[u8], file: &str) -> Result<(Header, usize), ModelError> {
    let error = |reason: String| ModelError::Header { file: file.into(), reason };
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
