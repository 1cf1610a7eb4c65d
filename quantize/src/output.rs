//! The checkpoint that is written: a shard a layer and one for the rest, each under its name when it is whole; the index, the files beside
//! weights, and `config.json` last, without which nobody takes the directory for a model.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use half::{bf16, f16};
use safetensors::{Dtype, serialize_to_file, tensor::TensorView as Written};
use serde_json::{Value, json};
use stoker_engine::model::WeightFormat;

use crate::{
    matrix::Matrix,
    round::{Grid, Rounded, byte_of_e4m3},
    scheme::Format,
};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Ends of names of weights, which are written anew, and of what belongs to them.
const WEIGHTS: [&str; 8] = [".safetensors", INDEX, ".bin", ".bin.index.json", ".gguf", ".pth", ".pt", CONFIG];

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Numbers in a plain format.
    pub(crate) fn plain(name: String, format: WeightFormat, shape: Vec<usize>, values: &[f32]) -> Self {
        Self { name, dtype: dtype(format), shape, bytes: stored(format, values) }
    }
}

/// How safetensors calls a plain format.
pub(crate) fn dtype(format: WeightFormat) -> Dtype {
    match format {
        WeightFormat::F32 => Dtype::F32,
        WeightFormat::F16 => Dtype::F16,
        _ => Dtype::BF16,
    }
}

fn stored(format: WeightFormat, values: &[f32]) -> Vec<u8> {
    match format {
        WeightFormat::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        WeightFormat::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    }
}

/// The tensors of a projection, as compressed-tensors stores it. `largest_input`: of a scale for what enters, which is measured.
pub(crate) fn tensors_of(
    module: &str,
    rounded: &Rounded,
    grid: Grid,
    format: Format,
    largest_input: Option<f32>,
) -> Vec<Tensor> {
    let (n_inputs, n_outputs) = (rounded.width, rounded.codes.len() / rounded.width);
    let shape = vec![n_outputs, n_inputs];
    let named = |part: &str| format!("{module}.{part}");
    let bytes = |byte: &dyn Fn(f32) -> u8| rounded.codes.iter().map(|code| byte(*code)).collect();
    let mut tensors = match format {
        Format::Fp8 | Format::Fp8Static => {
            vec![Tensor { name: named("weight"), dtype: Dtype::F8_E4M3, shape, bytes: bytes(&byte_of_e4m3) }]
        }
        Format::Int8 => {
            vec![Tensor { name: named("weight"), dtype: Dtype::I8, shape, bytes: bytes(&|code| code as i8 as u8) }]
        }
        Format::Int4 => {
            let shape_bytes = shape.iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
            vec![
                Tensor {
                    name: named("weight_packed"),
                    dtype: Dtype::I32,
                    shape: vec![n_outputs, n_inputs / 8],
                    bytes: packed(&rounded.codes),
                },
                Tensor { name: named("weight_shape"), dtype: Dtype::I64, shape: vec![2], bytes: shape_bytes },
            ]
        }
    };
    let n_groups = n_inputs.div_ceil(rounded.group);
    tensors.push(Tensor::plain(named("weight_scale"), grid.scale_format(), vec![n_outputs, n_groups], &rounded.scales));
    if let Some(largest) = largest_input {
        let scale = if largest > 0.0 { largest / grid.largest() } else { 1.0 };
        tensors.push(Tensor::plain(named("input_scale"), grid.scale_format(), vec![1], &[scale]));
    }
    tensors
}

/// Two codes a byte, the first one low, each 8 more than it is.
fn packed(codes: &[f32]) -> Vec<u8> {
    codes.chunks_exact(2).map(|pair| (pair[0] + 8.0) as u8 | (((pair[1] + 8.0) as u8) << 4)).collect()
}

/// The name of a shard, from 1 on.
pub(crate) fn shard_name(idx: usize, of: usize) -> String {
    format!("model-{idx:05}-of-{of:05}.safetensors")
}

/// Writes a shard; it has its name when it is whole.
pub(crate) fn write_shard(path: &Path, tensors: &[Tensor]) -> Result<()> {
    let part = path.with_extension("part");
    let views = tensors.iter().map(|tensor| {
        let Tensor { name, dtype, shape, bytes } = tensor;
        let view = Written::new(*dtype, shape.clone(), bytes).with_context(|| format!("tensor {name}"))?;
        Ok((name.as_str(), view))
    });
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    serialize_to_file(views.collect::<Result<Vec<_>>>()?, Some(metadata), &part)
        .with_context(|| format!("write {}", part.display()))?;
    fs::rename(&part, path).with_context(|| format!("name {}", path.display()))
}

/// The rest of a directory whose shards are written: `config` is the original's with how it is quantised.
pub(crate) fn finish(
    model: &Path,
    out: &Path,
    shards: &[PathBuf],
    mut config: Value,
    quantization: Value,
) -> Result<()> {
    let mut names = BTreeMap::new();
    let mut n_bytes = 0;
    for shard in shards {
        let file = fs::File::open(shard).with_context(|| format!("open {}", shard.display()))?;
        let header = header(&file).with_context(|| format!("read {}", shard.display()))?;
        let shard_name = shard.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        for (name, tensor) in header.as_object().into_iter().flatten().filter(|(name, _)| *name != "__metadata__") {
            let ends = [0, 1].map(|idx| tensor["data_offsets"][idx].as_u64().unwrap_or_default());
            n_bytes += ends[1] - ends[0];
            names.insert(name.clone(), shard_name.clone());
        }
    }
    write_json(&out.join(INDEX), &json!({"metadata": {"total_size": n_bytes}, "weight_map": names}))?;
    for entry in fs::read_dir(model).with_context(|| format!("list {}", model.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() || WEIGHTS.iter().any(|end| name.ends_with(end)) {
            continue;
        }
        fs::copy(entry.path(), out.join(&name)).with_context(|| format!("copy {name}"))?;
    }
    config["quantization_config"] = quantization;
    write_json(&out.join(CONFIG), &config)
}

/// Of a file that was just written.
fn header(mut file: &fs::File) -> Result<Value> {
    use std::io::Read as _;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut text = vec![0; usize::try_from(u64::from_le_bytes(length))?];
    file.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Under its name when it is whole.
pub(crate) fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<()> {
    let part = path.with_extension("part");
    let text = serde_json::to_string_pretty(value)? + "\n";
    fs::write(&part, text).with_context(|| format!("write {}", part.display()))?;
    fs::rename(&part, path).with_context(|| format!("name {}", path.display()))
}

/// The numbers of a tensor of a plain format, as one matrix; a vector is one row.
pub(crate) fn numbers(format: WeightFormat, shape: &[usize], bytes: &[u8]) -> Matrix {
    Matrix { width: *shape.last().unwrap_or(&1), values: format.unpack(bytes) }
}
