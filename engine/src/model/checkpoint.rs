//! A model's parts, whatever the format they are stored in: a Hugging Face directory, a GGUF file, files inside the
//! binary. Chooses the format; the formats' own modules read it.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{
    ModelAssets, ModelConfig, ModelError, ModelSource, ModelSpec, WeightStore,
    gguf::Gguf,
    safetensors,
    spec::{Description, Rank},
};
use crate::config::ModelFiles;

const CONFIG_FILE: &str = "config.json";

/// Everything a model is made of, checked but not taken in.
#[derive(Debug)]
pub struct Checkpoint {
    /// Hyper-parameters.
    pub config: ModelConfig,
    /// Tokenizer, template, special tokens.
    pub assets: ModelAssets,
    /// Tensors.
    pub weights: WeightStore,
}

impl Checkpoint {
    /// Opens every part; reads no weight.
    pub fn open(files: &ModelFiles) -> Result<Self, ModelError> {
        match gguf_file(files)? {
            Some(path) => Self::open_gguf(&path),
            None => Self::open_files(&ModelSource::new(files.clone())),
        }
    }

    /// The parts of a directory that has no weights.
    pub fn without_weights(files: &ModelFiles) -> Result<(ModelConfig, ModelAssets), ModelError> {
        Self::describe(&ModelSource::new(files.clone()))
    }

    fn open_files(source: &ModelSource) -> Result<Self, ModelError> {
        let (config, assets) = Self::describe(source)?;
        Ok(Self { config, assets, weights: safetensors::open(source)? })
    }

    fn describe(source: &ModelSource) -> Result<(ModelConfig, ModelAssets), ModelError> {
        let config = read_config(source)?;
        let assets = ModelAssets::open(source, &config)?;
        Ok((config, assets))
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let gguf = Gguf::open(path)?;
        let config = ModelConfig::from_json(&gguf.config()?, gguf.file())?;
        let assets = ModelAssets::of_gguf(&gguf, &config)?;
        Ok(Self { config, assets, weights: gguf.weights() })
    }
}

/// What a plan needs to know of a GGUF file, as the `config.json` that it has not; `None` for other models. Reads no weight.
pub fn planning_config(files: &ModelFiles) -> Result<Option<Value>, ModelError> {
    let Some(path) = gguf_file(files)? else { return Ok(None) };
    Gguf::open(&path)?.planning_config().map(Some)
}

/// A model in words: its layers, weights with shapes and formats, and what they take. Looks for every weight; reads none,
/// and no tokenizer.
pub fn describe(files: &ModelFiles) -> Result<String, ModelError> {
    let (config, weights) = match gguf_file(files)? {
        Some(path) => {
            let gguf = Gguf::open(&path)?;
            (ModelConfig::from_json(&gguf.config()?, gguf.file())?, gguf.weights())
        }
        None => {
            let source = ModelSource::new(files.clone());
            (read_config(&source)?, safetensors::open(&source)?)
        }
    };
    let spec = ModelSpec::new(&config, weights.format())?;
    let weights = weights.bind(&spec, Rank::ALONE)?;
    let text = Description { spec: &spec, stored: &|weight| weights.matrix(weight).stored_as() }.to_string();
    let n_bytes: usize = spec.weights().map(|weight| weights.matrix(weight).n_bytes()).sum();
    Ok(format!("{text}{} of weights\n", bytes_text(n_bytes)))
}

fn read_config(source: &ModelSource) -> Result<ModelConfig, ModelError> {
    ModelConfig::from_json(&source.json(CONFIG_FILE)?, &source.display(CONFIG_FILE))
}

fn bytes_text(n_bytes: usize) -> String {
    match n_bytes {
        0..0x10_0000 => format!("{n_bytes} bytes"),
        0x10_0000..0x4000_0000 => format!("{:.1} MiB", n_bytes as f64 / f64::from(1 << 20)),
        _ => format!("{:.2} GiB", n_bytes as f64 / f64::from(1 << 30)),
    }
}

/// The GGUF file that is meant: the path itself, or the only one in a directory without `config.json`.
fn gguf_file(files: &ModelFiles) -> Result<Option<PathBuf>, ModelError> {
    let ModelFiles::Directory(path) = files else { return Ok(None) };
    if is_gguf(path) && !path.is_dir() {
        return Ok(Some(path.clone()));
    }
    let Ok(entries) = path.read_dir() else { return Ok(None) };
    if path.join(CONFIG_FILE).exists() {
        return Ok(None);
    }
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| is_gguf(p)).collect();
    match found.len() {
        0 | 1 => Ok(found.pop()),
        n_files => Err(ModelError::ManyFiles { directory: path.display().to_string(), n_files }),
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gguf")
}
