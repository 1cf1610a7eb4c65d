//! From `AgentConfig` to what the process runs with. Every rejection names the field, the value and the limit. Reads the
//! configuration file; looks at no model file and no environment.

use std::{
    fs,
    path::{Path, PathBuf},
};

use stoker_crds::contract::{AgentConfig, DrainSettings, EngineSettings, ModelConfig};
use stoker_engine::{DeviceChoice, EngineConfig, EngineLimits, ModelFiles};

use crate::{args::Args, builtin, health::Patience};

const BUILTIN_SCHEME: &str = "builtin://";
const FILE_SCHEME: &str = "file://";

/// A validated configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Revision of the deployment; empty when started by hand.
    pub revision: String,
    /// The model source as it was given, for messages.
    pub source: String,
    /// Names accepted in requests; the first is the one answers carry. Never empty.
    pub served_names: Vec<String>,
    /// The model and the engine's sizes.
    pub engine: EngineConfig,
    /// How the agent leaves.
    pub drain: DrainSettings,
    /// What a failure of the engine means for the process.
    pub on_failure: OnFailure,
    /// How long standing still is normal.
    pub patience: Patience,
}

/// What a failure of the engine means for the process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum OnFailure {
    /// Stay up and say why: started by the operator, which reads the reason from `/v1/load`. Exiting would hide it
    /// behind a restart loop.
    Report,
    /// Exit with the message: a person started it and reads the terminal.
    Exit,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("read configuration {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// The file is not an agent configuration.
    #[error("configuration {path}: `{field}`: {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Path of the value.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No model.
    #[error("model.source is empty: use {BUILTIN_SCHEME}NAME, a directory or a .gguf file")]
    NoSource,
    /// No or empty served name.
    #[error("model.servedNames must hold at least one name and no empty one")]
    NoName,
    /// A builtin model this program does not carry.
    #[error("model.source {BUILTIN_SCHEME}{name}: this agent carries {}", builtin::names().collect::<Vec<_>>().join(", "))]
    UnknownBuiltin {
        /// The name asked for.
        name: String,
    },
    /// A scheme the agent does not resolve.
    #[error(
        "model.source {source_uri}: the agent serves {BUILTIN_SCHEME}NAME, a directory or a .gguf file, not other URIs"
    )]
    UnknownScheme {
        /// The source.
        source_uri: String,
    },
}

impl Settings {
    /// The settings the command line asks for.
    pub fn from_args(args: &Args) -> Result<Self, ConfigError> {
        match &args.config {
            Some(path) => Self::validate(read(path)?, OnFailure::Report),
            None => {
                let mut config = args.agent_config();
                if config.model.served_names.is_empty() {
                    config.model.served_names.push(own_name(&config.model.source));
                }
                let mut settings = Self::validate(config, OnFailure::Exit)?;
                settings.engine.device = args.flags.device;
                Ok(settings)
            }
        }
    }

    /// Checks a configuration.
    pub fn validate(config: AgentConfig, on_failure: OnFailure) -> Result<Self, ConfigError> {
        let AgentConfig { revision, model, gpus, engine, drain } = config;
        if model.source.is_empty() {
            return Err(ConfigError::NoSource);
        }
        if model.served_names.is_empty() || model.served_names.iter().any(String::is_empty) {
            return Err(ConfigError::NoName);
        }
        let engine =
            EngineConfig { model: model_files(&model.source)?, limits: limits(engine), device: device_of_pod(gpus) };
        let ModelConfig { source, served_names } = model;
        Ok(Self { revision, source, served_names, engine, drain, on_failure, patience: Patience::default() })
    }
}

fn read(path: &Path) -> Result<AgentConfig, ConfigError> {
    let text = fs::read_to_string(path).map_err(|error| ConfigError::Read { path: path.to_owned(), error })?;
    let mut json = serde_json::Deserializer::from_str(&text);
    serde_path_to_error::deserialize(&mut json).map_err(|error| ConfigError::Parse {
        path: path.to_owned(),
        field: error.path().to_string(),
        reason: error.inner().to_string(),
    })
}

/// The last part of the source: `builtin://ember` and `/models/ember` are both `ember`.
fn own_name(source: &str) -> String {
    let name = Path::new(source).file_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| source.to_owned())
}

fn model_files(source: &str) -> Result<ModelFiles, ConfigError> {
    if let Some(name) = source.strip_prefix(BUILTIN_SCHEME) {
        let (name, files) =
            builtin::files(name).ok_or_else(|| ConfigError::UnknownBuiltin { name: name.to_owned() })?;
        return Ok(ModelFiles::Builtin { name, files });
    }
    let path = source.strip_prefix(FILE_SCHEME).unwrap_or(source);
    if path.contains("://") {
        return Err(ConfigError::UnknownScheme { source_uri: source.to_owned() });
    }
    Ok(ModelFiles::Directory(path.into()))
}

/// A pod's GPUs are counted for it: it uses what it was given, and takes none that it was not.
fn device_of_pod(gpus: u32) -> DeviceChoice {
    if gpus == 0 { DeviceChoice::Cpu } else { DeviceChoice::Cuda(0) }
}

/// Ranges are the engine's to check: it knows the model's own limits.
fn limits(settings: EngineSettings) -> EngineLimits {
    let defaults = EngineLimits::default();
    let EngineSettings {
        max_model_len,
        max_num_seqs,
        max_batched_tokens,
        max_waiting,
        kv_cache_tokens,
        threads,
        memory_fraction,
        prefix_caching,
        batch_invariant,
    } = settings;
    EngineLimits {
        max_model_len,
        max_num_seqs,
        max_batched_tokens,
        max_waiting: max_waiting.unwrap_or(defaults.max_waiting),
        kv_cache_tokens,
        threads: threads.map(|threads| threads as usize),
        memory_fraction: memory_fraction.unwrap_or(defaults.memory_fraction),
        prefix_caching: prefix_caching.unwrap_or(defaults.prefix_caching),
        batch_invariant: batch_invariant.unwrap_or(defaults.batch_invariant),
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(source: &str, engine: EngineSettings) -> AgentConfig {
        let model = ModelConfig { source: source.into(), served_names: vec!["m".into()] };
        AgentConfig { revision: "r1".into(), model, gpus: 0, engine, drain: DrainSettings::default() }
    }

    fn refusal(source: &str, engine: EngineSettings) -> String {
        Settings::validate(config(source, engine), OnFailure::Report).unwrap_err().to_string()
    }

    #[test]
    fn unset_sizes_are_the_engines_defaults() {
        let sizes = EngineSettings { max_waiting: Some(7), memory_fraction: Some(0.5), ..EngineSettings::default() };
        let settings = Settings::validate(config("/m", sizes), OnFailure::Report).unwrap();
        let expected = EngineLimits { max_waiting: 7, memory_fraction: 0.5, ..EngineLimits::default() };
        assert_eq!(settings.engine.limits, expected);
    }

    #[test]
    fn batch_invariance_reaches_the_engine() {
        let asked = EngineSettings { batch_invariant: Some(true), ..EngineSettings::default() };
        assert!(Settings::validate(config("/m", asked), OnFailure::Report).unwrap().engine.limits.batch_invariant);
    }

    #[test]
    fn a_replica_computes_on_the_gpu_it_was_given_and_on_no_other() {
        let device = |gpus| {
            let config = AgentConfig { gpus, ..config("/m", EngineSettings::default()) };
            Settings::validate(config, OnFailure::Report).unwrap().engine.device
        };
        assert_eq!([device(0), device(1)], [DeviceChoice::Cpu, DeviceChoice::Cuda(0)]);
    }

    #[test]
    fn sources_that_are_not_served_are_refused_with_what_is() {
        assert!(refusal("builtin://gpt", EngineSettings::default()).ends_with("this agent carries ember"));
        assert!(refusal("hf://a/b", EngineSettings::default()).contains("a directory"));
        assert!(refusal("", EngineSettings::default()).starts_with("model.source is empty"));
    }

    #[test]
    fn a_path_may_be_written_as_a_uri() {
        let settings = Settings::validate(config("file:///m/x.gguf", EngineSettings::default()), OnFailure::Report);
        let ModelFiles::Directory(path) = settings.unwrap().engine.model else { panic!("a path") };
        assert_eq!(path, Path::new("/m/x.gguf"));
    }

    #[test]
    fn a_model_is_named_by_the_last_part_of_its_source() {
        assert_eq!(own_name("builtin://ember"), "ember");
        assert_eq!(own_name("/srv/models/tiny/"), "tiny");
    }

    #[test]
    fn a_wrong_file_names_the_field() {
        let file = std::env::temp_dir().join(format!("stoker-agent-config-{}.json", std::process::id()));
        fs::write(
            &file,
            r#"{"revision": "r", "model": {"source": "x", "servedNames": ["m"]}, "engine": {"maxNumSeqs": "many"}}"#,
        )
        .unwrap();
        let error = read(&file).unwrap_err().to_string();
        fs::remove_file(&file).unwrap();
        assert!(error.contains("`engine.maxNumSeqs`"), "{error}");
    }
}
