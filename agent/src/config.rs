//! From `AgentConfig` to what the process runs with. Every rejection names the setting, the value and the limit; `wording`
//! calls settings as the reader does. Reads the configuration file; looks at no model file and no environment.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use stoker_crds::contract::{
    AgentConfig, DrainSettings, EngineSettings, KvCacheDtype, ModelConfig, PIPELINE_PARALLEL_MAX, ParallelSettings,
    Quantization, TENSOR_PARALLEL_MAX,
};
use stoker_engine::{DeviceChoice, EngineConfig, EngineLimits, ModelFiles, ops::Isa};

use crate::{
    answer::{FormatChoice, UnknownFormat},
    builtin,
    health::Patience,
    intent::Authority,
};

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
    /// How the model's answers are read.
    pub formats: FormatChoice,
    /// Chat templates that requests bring are rendered.
    pub trusts_request_templates: bool,
    /// The engine's sizes.
    pub limits: EngineLimits,
    /// What computes.
    pub device: DeviceChoice,
    /// How the agent leaves.
    pub drain: DrainSettings,
    /// Who started the process.
    pub started_by: StartedBy,
    /// How long standing still is normal.
    pub patience: Patience,
    /// Whose orders it takes.
    pub authority: Authority,
    /// What answers say that a request did not ask about.
    pub wording: AnswerWording,
}

/// What answers say that a request did not ask about.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct AnswerWording {
    /// Log-probabilities call tokens `token_id:N`, if the request does not say.
    pub names_tokens_by_id: bool,
    /// `metrics`, how long the answer took, stands beside `usage`.
    pub tells_times: bool,
}

/// Who started the process: what a model that cannot be served means for it, and what settings are called.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum StartedBy {
    /// It stays up and says why: the operator reads the reason from `/v1/load`. Exiting would hide it behind a restart
    /// loop.
    Operator,
    /// It exits with the message: a person reads the terminal.
    Person,
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
    #[error("model_source is empty: use {BUILTIN_SCHEME}NAME, a directory or a .gguf file")]
    NoSource,
    /// No or empty served name.
    #[error("served_names must hold at least one name and no empty one")]
    NoName,
    /// A format of tool calls or reasoning that nobody knows.
    #[error("tool_call_format or reasoning_format: {0}")]
    UnknownFormat(#[from] UnknownFormat),
    /// A name of instructions that no CPU has.
    #[error("--cpu-isa, STOKER_CPU_ISA: {0}")]
    UnknownIsa(String),
    /// A number of ranks that no model is shared by.
    #[error(
        "tensor_parallel is {tensor}: take 1 to {TENSOR_PARALLEL_MAX}, a number that divides the model's attention heads"
    )]
    Ranks {
        /// What was asked.
        tensor: u32,
    },
    /// A number of stages that no model is cut into.
    #[error("pipeline_parallel is {pipeline}: take 1 to {PIPELINE_PARALLEL_MAX}, no more than the model has layers")]
    Stages {
        /// What was asked.
        pipeline: u32,
    },
    /// The pod has other GPUs than its ranks need.
    #[error(
        "resources.gpus is {gpus}, tensor_parallel {} and pipeline_parallel {}: each rank of each stage has a GPU of its own, so make \
         resources.gpus {}, or the two others so that their product is {gpus}",
        parallelism.tensor, parallelism.pipeline, parallelism.n_gpus()
    )]
    Gpus {
        /// GPUs of the pod.
        gpus: u32,
        /// What they would share.
        parallelism: ParallelSettings,
    },
    /// A builtin model this program does not carry.
    #[error("model_source {BUILTIN_SCHEME}{name}: this agent carries {}", builtin::names().collect::<Vec<_>>().join(", "))]
    UnknownBuiltin {
        /// The name asked for.
        name: String,
    },
    /// A scheme the agent does not resolve.
    #[error(
        "model_source {source_uri}: the agent serves {BUILTIN_SCHEME}NAME, a directory or a .gguf file, not other URIs"
    )]
    UnknownScheme {
        /// The source.
        source_uri: String,
    },
}

impl Settings {
    /// The settings that a person asks for. A model without a name is called by the last part of its source.
    pub fn of_person(mut config: AgentConfig, device: DeviceChoice) -> Result<Self, ConfigError> {
        if config.model.served_names.is_empty() {
            config.model.served_names.push(own_name(&config.model.source));
        }
        let parallelism = config.parallelism;
        let mut settings = Self::validate(config, StartedBy::Person)?;
        settings.device = device_of_person(device, parallelism.n_gpus());
        Ok(settings)
    }

    /// The settings in the operator's file.
    pub fn of_operator(path: &Path, authority: Authority) -> Result<Self, ConfigError> {
        Ok(Self { authority, ..Self::validate(read(path)?, StartedBy::Operator)? })
    }

    /// Checks a configuration as far as it can be checked without looking for the model.
    pub fn validate(config: AgentConfig, started_by: StartedBy) -> Result<Self, ConfigError> {
        let AgentConfig { revision, model, gpus, parallelism, engine, drain } = config;
        if model.source.is_empty() {
            return Err(ConfigError::NoSource);
        }
        if model.served_names.is_empty() || model.served_names.iter().any(String::is_empty) {
            return Err(ConfigError::NoName);
        }
        check_ranks(parallelism, gpus)?;
        let trusts_request_templates = engine.trust_request_chat_template.unwrap_or(false);
        let ModelConfig { source, served_names, tool_call_format, reasoning_format } = model;
        let formats = FormatChoice::named(tool_call_format.as_deref(), reasoning_format.as_deref())?;
        Ok(Self {
            revision,
            source,
            served_names,
            formats,
            trusts_request_templates,
            limits: limits(engine, parallelism),
            device: device_of_pod(gpus),
            drain,
            started_by,
            patience: Patience::default(),
            authority: Authority::default(),
            wording: AnswerWording::default(),
        })
    }

    /// The engine to start. A source that is not served fails here and not in `validate`: as any model that cannot be
    /// loaded, it is for `/v1/load` to tell.
    pub fn engine(&self) -> Result<EngineConfig, ConfigError> {
        Ok(EngineConfig { model: model_files(&self.source)?, limits: self.limits.clone(), device: self.device })
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

/// The files that a model source names.
pub fn model_files(source: &str) -> Result<ModelFiles, ConfigError> {
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

/// Who asks for several GPUs has asked for GPUs: the CPUs do not take their place.
fn device_of_person(device: DeviceChoice, n_gpus: u32) -> DeviceChoice {
    if device == DeviceChoice::Auto && n_gpus > 1 { DeviceChoice::Cuda(0) } else { device }
}

/// Which numbers divide the model is the engine's to say.
fn check_ranks(parallelism: ParallelSettings, gpus: u32) -> Result<(), ConfigError> {
    let ParallelSettings { tensor, pipeline } = parallelism;
    if !(1..=TENSOR_PARALLEL_MAX).contains(&tensor) {
        return Err(ConfigError::Ranks { tensor });
    }
    if !(1..=PIPELINE_PARALLEL_MAX).contains(&pipeline) {
        return Err(ConfigError::Stages { pipeline });
    }
    if gpus != 0 && gpus != parallelism.n_gpus() {
        return Err(ConfigError::Gpus { gpus, parallelism });
    }
    Ok(())
}

/// The instructions asked for. A fleet has nodes of several kinds: one whose CPU lacks them serves with its best.
pub(crate) fn isa(name: Option<&str>) -> Result<Option<Isa>, ConfigError> {
    match name.map(Isa::named).transpose() {
        Ok(isa) => Ok(isa),
        Err(missing) if missing.is_known => {
            tracing::warn!(chosen = %Isa::best(), "STOKER_CPU_ISA: {missing}");
            Ok(None)
        }
        Err(unknown) => Err(ConfigError::UnknownIsa(unknown.to_string())),
    }
}

/// Ranges are the engine's to check: it knows the model's own limits.
fn limits(settings: EngineSettings, parallelism: ParallelSettings) -> EngineLimits {
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
        itl_target_ms,
        quantization,
        kv_cache_dtype,
        // Of prompts, which the engine does not make.
        trust_request_chat_template: _,
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
        itl_target: itl_target_ms.map(|ms| Duration::from_millis(ms.into())),
        quantization: quantization.map(|Quantization::Fp8| stoker_engine::Quantization::Fp8),
        tensor_parallel: parallelism.tensor as usize,
        pipeline_parallel: parallelism.pipeline as usize,
        kv_cache_dtype: kv_cache_dtype.map(|KvCacheDtype::Fp8| stoker_engine::KvCacheDtype::Fp8),
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(source: &str, engine: EngineSettings) -> AgentConfig {
        let model = ModelConfig { source: source.into(), served_names: vec!["m".into()], ..ModelConfig::default() };
        AgentConfig {
            revision: "r1".into(),
            model,
            gpus: 0,
            parallelism: ParallelSettings::default(),
            engine,
            drain: DrainSettings::default(),
        }
    }

    fn settings(config: AgentConfig) -> Settings {
        Settings::validate(config, StartedBy::Operator).expect("a configuration with a source and a name")
    }

    #[test]
    fn unset_sizes_are_the_engines_defaults() {
        let sizes = EngineSettings { max_waiting: Some(7), memory_fraction: Some(0.5), ..EngineSettings::default() };
        let expected = EngineLimits { max_waiting: 7, memory_fraction: 0.5, ..EngineLimits::default() };
        assert_eq!(settings(config("/m", sizes)).limits, expected);
    }

    #[test]
    fn batch_invariance_reaches_the_engine() {
        let asked = EngineSettings { batch_invariant: Some(true), ..EngineSettings::default() };
        assert!(settings(config("/m", asked)).limits.batch_invariant);
    }

    #[test]
    fn instructions_of_another_cpu_give_way_and_a_wrong_name_is_refused() {
        assert_eq!(isa(None).unwrap(), None);
        assert_eq!(isa(Some("portable")).unwrap(), Some(Isa::named("portable").unwrap()));
        let refusal = isa(Some("avx9")).unwrap_err().to_string();
        assert!(
            refusal.starts_with("--cpu-isa, STOKER_CPU_ISA: \"avx9\" is no instruction set")
                && refusal.contains("portable"),
            "{refusal}"
        );
    }

    #[test]
    fn formats_reach_the_engine() {
        let asked = EngineSettings { quantization: Some(Quantization::Fp8), ..EngineSettings::default() };
        assert_eq!(settings(config("/m", asked)).limits.quantization, Some(stoker_engine::Quantization::Fp8));
        let asked = EngineSettings { kv_cache_dtype: Some(KvCacheDtype::Fp8), ..EngineSettings::default() };
        assert_eq!(settings(config("/m", asked)).limits.kv_cache_dtype, Some(stoker_engine::KvCacheDtype::Fp8));
    }

    #[test]
    fn a_target_for_the_time_between_tokens_reaches_the_engine_and_there_is_none_otherwise() {
        let target = |itl_target_ms| {
            let asked = EngineSettings { itl_target_ms, ..EngineSettings::default() };
            settings(config("/m", asked)).limits.itl_target
        };
        assert_eq!((target(None), target(Some(40))), (None, Some(Duration::from_millis(40))));
    }

    #[test]
    fn a_replica_computes_on_the_gpu_it_was_given_and_on_no_other() {
        let device = |gpus| settings(AgentConfig { gpus, ..config("/m", EngineSettings::default()) }).device;
        assert_eq!([device(0), device(1)], [DeviceChoice::Cpu, DeviceChoice::Cuda(0)]);
    }

    #[test]
    fn as_many_ranks_of_all_stages_as_gpus_reach_the_engine() {
        let asked = |gpus, tensor, pipeline| {
            let parallelism = ParallelSettings { tensor, pipeline };
            let config = AgentConfig { gpus, parallelism, ..config("/m", EngineSettings::default()) };
            let Settings { device, limits, .. } =
                Settings::validate(config, StartedBy::Operator).map_err(|error| error.to_string())?;
            Ok::<_, String>((device, limits.tensor_parallel, limits.pipeline_parallel))
        };
        assert_eq!(asked(0, 1, 1), Ok((DeviceChoice::Cpu, 1, 1)));
        assert_eq!(asked(4, 4, 1), Ok((DeviceChoice::Cuda(0), 4, 1)));
        assert_eq!(asked(0, 2, 1), Ok((DeviceChoice::Cpu, 2, 1)));
        assert_eq!(asked(2, 1, 2), Ok((DeviceChoice::Cuda(0), 1, 2)));
        assert_eq!(asked(6, 2, 3), Ok((DeviceChoice::Cuda(0), 2, 3)));
        for n in [0, 9, u32::MAX] {
            let refusal = asked(n, n, 1).unwrap_err();
            assert!(refusal.starts_with(&format!("tensor_parallel is {n}: take 1 to 8")), "{refusal}");
            let refusal = asked(n, 1, n).unwrap_err();
            assert!(refusal.starts_with(&format!("pipeline_parallel is {n}: take 1 to 8")), "{refusal}");
        }
        for (gpus, tensor, pipeline) in [(2, 1, 1), (1, 2, 1), (2, 2, 2), (1, 1, 2)] {
            let refusal = asked(gpus, tensor, pipeline).unwrap_err();
            let said = format!("resources.gpus is {gpus}, tensor_parallel {tensor} and pipeline_parallel {pipeline}");
            let change = format!("make resources.gpus {}", tensor * pipeline);
            assert!(refusal.starts_with(&said) && refusal.contains(&change), "{refusal}");
        }
    }

    #[test]
    fn who_says_nothing_of_stages_has_one() {
        let read = |parallelism: &str| serde_json::from_str::<ParallelSettings>(parallelism);
        assert_eq!(read(r#"{"tensor": 2}"#).unwrap(), ParallelSettings { tensor: 2, pipeline: 1 });
        assert_eq!(read(r#"{"tensor": 2, "pipeline": 3}"#).unwrap(), ParallelSettings { tensor: 2, pipeline: 3 });
    }

    #[test]
    fn several_gpus_are_gpus_or_nothing_unless_another_device_is_named() {
        use DeviceChoice::{Auto, Cpu, Cuda};
        let cases = [(Auto, 1, Auto), (Auto, 2, Cuda(0)), (Cpu, 2, Cpu), (Cuda(4), 2, Cuda(4)), (Cpu, 1, Cpu)];
        for (device, n_gpus, expected) in cases {
            assert_eq!(device_of_person(device, n_gpus), expected, "{device} for {n_gpus} GPUs");
        }
    }

    #[test]
    fn sources_that_are_not_served_are_refused_with_what_is() {
        let refusal = |source| settings(config(source, EngineSettings::default())).engine().unwrap_err().to_string();
        assert!(refusal("builtin://gpt").ends_with("this agent carries ember"));
        assert!(refusal("hf://a/b").contains("a directory"));
        let empty = Settings::validate(config("", EngineSettings::default()), StartedBy::Operator).unwrap_err();
        assert!(empty.to_string().starts_with("model_source is empty"));
    }

    #[test]
    fn a_path_may_be_written_as_a_uri() {
        let engine = settings(config("file:///m/x.gguf", EngineSettings::default())).engine().unwrap();
        let ModelFiles::Directory(path) = engine.model else { panic!("a path") };
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
