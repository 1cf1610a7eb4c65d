//! Safetensors: one file or several with an index. Checks every size and offset before a number is read; copies nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::Arc,
};

use safetensors::{Dtype, tensor::TensorInfo};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;
use stoker_fit::format::WeightFormat;

use super::{CheckpointFormat, FileBytes, ModelError, ModelSource, WeightStore, tensor::Tensor};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
/// Bytes in front of the header: its length.
const LENGTH_BYTES: usize = 8;

/// A file's own description. Read here rather than by the crate, whose refusals do not always name the tensor.
#[derive(Debug, Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    _metadata: Option<IgnoredAny>,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorInfo>,
}

/// Opens the weights of a model: the index if there is one, else the single file.
pub(super) fn open(source: &ModelSource) -> Result<WeightStore, ModelError> {
    let index = source.json_optional(INDEX_FILE)?;
    let (files, whole) = match index.is_null() {
        true => (BTreeSet::from([SINGLE_FILE.to_owned()]), SINGLE_FILE),
        false => (shard_files(&index, source)?, INDEX_FILE),
    };
    if index.is_null() && source.open_optional(SINGLE_FILE)?.is_none() && source.has_ending(".bin") {
        return Err(ModelError::OnlyPickles { directory: source.display("") });
    }
    let mut tensors = BTreeMap::new();
    for file in files {
        tensors.extend(open_file(source, &file)?);
    }
    Ok(WeightStore::new(with_full_names(tensors), source.display(whole), CheckpointFormat::HuggingFace))
}

/// Embedding models are often saved without the part that predicts tokens, and then their tensors are not named below `model`.
fn with_full_names(tensors: BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    if !tensors.contains_key("embed_tokens.weight") {
        return tensors;
    }
    let full = |(name, tensor): (String, Tensor)| {
        let name = if name.starts_with("lm_head.") { name } else { format!("model.{name}") };
        (name.clone(), Tensor { name, ..tensor })
    };
    tensors.into_iter().map(full).collect()
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
        Ok((name.clone(), Tensor { file, name, format: format_of(info.dtype), shape: info.shape, content, range }))
    };
    let tensors = header.tensors.into_iter().map(tensor).collect::<Result<_, ModelError>>()?;
    refuse_holes(&tensors, content.len() - data_start, &file)?;
    Ok(tensors)
}

fn format_of(dtype: Dtype) -> Result<WeightFormat, Dtype> {
    match dtype {
        Dtype::F32 => Ok(WeightFormat::F32),
        Dtype::F16 => Ok(WeightFormat::F16),
        Dtype::BF16 => Ok(WeightFormat::Bf16),
        other => Err(other),
    }
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

/// The tensors of one file of a directory.
#[cfg(test)]
pub(super) fn open_alone(source: &ModelSource, file: &str) -> Result<WeightStore, ModelError> {
    Ok(WeightStore::new(open_file(source, file)?, file.into(), CheckpointFormat::HuggingFace))
}

/// The tensors of a file in memory.
#[cfg(test)]
pub(super) fn read_bytes(bytes: Vec<u8>) -> Result<BTreeMap<String, Tensor>, ModelError> {
    read_file(Arc::new(FileBytes::Owned(bytes)), "m.safetensors".into())
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

    #[test]
    fn damaged_files_are_refused_or_hold_what_they_say() {
        assert_eq!(read_bytes(good()).unwrap().len(), 3);
        damage::read_all(&good(), |case, damaged| {
            for tensor in read_bytes(damaged).iter().flat_map(BTreeMap::values) {
                if let Ok(format) = tensor.format {
                    assert_eq!(tensor.bytes().len(), format.bytes_of(tensor.n_values()), "case {case}");
                }
            }
        });
    }
}
