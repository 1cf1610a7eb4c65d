//! From a model's name and a format to files that the engine and its peers read. Reads descriptions; makes what the cache lacks.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stoker_engine::{
    model::{CheckpointFormat, ModelConfig, ModelSpec, WeightFormat},
    ops::Isa,
};

use crate::{
    checkpoint::{self, Dtype},
    gguf::Toolbox,
    in_process::Weights,
    quantised::Quantised,
};

/// The small trained model, in a checkout.
const EMBER: &str = "models/ember";

/// The format of a model's weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum Format {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
    /// Blocks of 32 in 8 bits, as GGUF.
    #[value(name = "q8_0")]
    Q8_0,
    /// Blocks of 32 in 4 bits, as GGUF.
    #[value(name = "q4_0")]
    Q4_0,
}

impl Format {
    /// The checkpoint it is made of.
    fn checkpoint(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 | Self::Q8_0 | Self::Q4_0 => Dtype::Bf16,
        }
    }

    /// By its name in figures, if it is one of GGUF's.
    fn quantised(self) -> Option<&'static str> {
        match self {
            Self::Bf16 | Self::F32 => None,
            Self::Q8_0 => Some("q8_0"),
            Self::Q4_0 => Some("q4_0"),
        }
    }
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// `ember`, a named shape, or a directory.
    pub model: &'a str,
    /// Its format; of a directory only the quantised ones.
    pub format: Format,
    /// Whether its weights are files.
    pub weights: Weights,
    /// How they are quantised, if they are.
    pub quantised: Option<Quantised>,
    /// Instructions that the llama.cpp that quantises is built for, if not this machine's best.
    pub isa: Option<Isa>,
}

/// A model on disk.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its name in figures.
    pub name: String,
    /// Its format in figures.
    pub dtype: String,
    /// What is run: a directory or a GGUF file.
    pub path: PathBuf,
    /// Positions it was made for.
    pub max_position_embeddings: u64,
    /// Bytes of weights that one decoded token reads; none if no file holds them.
    pub bytes_per_token: Option<u64>,
    /// What it is made of.
    pub spec: ModelSpec,
}

impl Model {
    /// Finds it, or makes it in the cache.
    pub fn open(wanted: &Wanted<'_>, cache: &Path) -> Result<Self> {
        let is_stored = wanted.quantised.is_some_and(|kind| kind.at_start().is_none());
        let is_drawn = wanted.model != "ember" && !is_directory(wanted.model);
        ensure!(is_drawn || !is_stored, "{} says how it is quantised itself: leave --quantization out", wanted.model);
        let on_device = wanted.weights == Weights::Device;
        let only_disk = wanted.quantised == Some(Quantised::Fp8Stored);
        ensure!(!(on_device && only_disk), "fp8-stored is read from a file: --weights disk, or --quantization fp8");
        let directory = wanted.directory(cache)?;
        let config = read_config(&directory)?;
        let name = if is_directory(wanted.model) { directory.file_name() } else { Some(wanted.model.as_ref()) };
        let mut model = Self {
            name: name.context("a directory has a name")?.to_string_lossy().to_lowercase(),
            dtype: dtype_of(&config)?.to_owned(),
            max_position_embeddings: config["max_position_embeddings"]
                .as_u64()
                .context("config.json has no max_position_embeddings")?,
            bytes_per_token: match wanted.weights {
                Weights::Disk => Some(checkpoint::bytes_per_token(&directory)?),
                Weights::Device => None,
            },
            spec: spec(&config, &directory)?,
            path: directory,
        };
        if let Some(format) = wanted.format.quantised() {
            ensure!(wanted.weights == Weights::Disk, "{format} is read from a file: --weights disk");
            model.quantise(&Toolbox::open(cache, wanted.isa).context("llama.cpp")?, format)?;
        }
        Ok(model)
    }

    /// Every matrix shrinks alike, so what a token reads does too.
    fn quantise(&mut self, toolbox: &Toolbox, format: &str) -> Result<()> {
        let whole = fs::metadata(self.path.join("model.safetensors"))?.len();
        self.path = toolbox.quantize(&self.path, format)?;
        let share = fs::metadata(&self.path)?.len() as f64 / whole as f64;
        self.bytes_per_token = self.bytes_per_token.map(|bytes| (bytes as f64 * share) as u64);
        self.dtype = format.to_owned();
        Ok(())
    }

    /// The format of its weights.
    pub fn format(&self) -> WeightFormat {
        [WeightFormat::F32, WeightFormat::Q8_0, WeightFormat::Q4_0]
            .into_iter()
            .find(|format| format.name() == self.dtype)
            .unwrap_or(WeightFormat::Bf16)
    }
}

impl Wanted<'_> {
    fn directory(&self, cache: &Path) -> Result<PathBuf> {
        match (self.model, self.weights) {
            ("ember", _) => {
                ensure!(is_directory(EMBER), "no {EMBER} here: run from a checkout of the repository");
                Ok(EMBER.into())
            }
            (model, _) if is_directory(model) => Ok(model.into()),
            (model, Weights::Disk) => checkpoint::ensure(cache, model, self.format.checkpoint(), self.quantised),
            (model, Weights::Device) => {
                checkpoint::without_weights(cache, model, self.format.checkpoint(), self.quantised)
            }
        }
    }
}

fn is_directory(model: &str) -> bool {
    Path::new(model).join("config.json").exists()
}

fn read_config(directory: &Path) -> Result<Value> {
    let path = directory.join("config.json");
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))
}

fn spec(config: &Value, directory: &Path) -> Result<ModelSpec> {
    let config = ModelConfig::from_json(config, &directory.join("config.json").display().to_string())?;
    Ok(ModelSpec::new(&config, CheckpointFormat::HuggingFace)?)
}

/// A figure says what the file holds, not what was asked for.
fn dtype_of(config: &Value) -> Result<&'static str> {
    match config["torch_dtype"].as_str().or(config["dtype"].as_str()) {
        Some("bfloat16") => Ok("bf16"),
        Some("float16") => Ok("f16"),
        Some("float32") => Ok("f32"),
        other => anyhow::bail!("config.json has torch_dtype {other:?}: bfloat16, float16 and float32 are measured"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::shape::Shape;

    #[test]
    fn a_shape_on_the_device_needs_no_file_of_weights() {
        let cache = tempfile::tempdir().unwrap();
        let wanted = Wanted {
            model: "llama-3.1-8b",
            format: Format::Bf16,
            weights: Weights::Device,
            quantised: None,
            isa: None,
        };
        let model = Model::open(&wanted, cache.path()).unwrap();
        assert_eq!((model.name.as_str(), model.dtype.as_str(), model.bytes_per_token), ("llama-3.1-8b", "bf16", None));
        assert!(!model.path.join("model.safetensors").exists());
    }

    #[test]
    fn a_directory_says_its_own_name_and_format() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("Mine");
        fs::create_dir(&path).unwrap();
        let mut config = Shape::named("tinyllama-1.1b").unwrap().config("float32");
        config["max_position_embeddings"] = json!(64);
        fs::write(path.join("config.json"), config.to_string()).unwrap();
        let wanted = Wanted {
            model: path.to_str().unwrap(),
            format: Format::Bf16,
            weights: Weights::Device,
            quantised: None,
            isa: None,
        };
        let model = Model::open(&wanted, dir.path()).unwrap();
        assert_eq!((model.name.as_str(), model.dtype.as_str(), model.max_position_embeddings), ("mine", "f32", 64));
    }

    #[test]
    fn a_quantised_model_without_llama_cpp_says_how_to_get_it() {
        let cache = tempfile::tempdir().unwrap();
        let wanted = Wanted {
            model: "tinyllama-1.1b",
            format: Format::Q8_0,
            weights: Weights::Device,
            quantised: None,
            isa: None,
        };
        let error = format!("{:#}", Model::open(&wanted, cache.path()).unwrap_err());
        assert!(error.contains("--weights disk"), "{error}");
        let error = format!("{:#}", Toolbox::open(cache.path(), None).unwrap_err());
        assert!(error.contains("tools/bench/llama-cpp.sh"), "{error}");
    }
}
