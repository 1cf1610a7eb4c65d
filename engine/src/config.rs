//! What an engine is started with, and the bounds derived from it. Owns defaults and range checks; reads no file.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

pub use stoker_fit::StepSizes;
use stoker_fit::{AskedSizes, memory::CacheUse};

use crate::{
    ops::Isa,
    request::TokenId,
    sched::{ItlTarget, SchedLimits},
};

/// Tokens that a completion is taken to have before any has ended: what chats have on average.
const EXPECTED_COMPLETION: u32 = 256;

/// Which model to run, and how large.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The weights and what belongs to them.
    pub model: ModelFiles,
    /// Sizes.
    pub limits: EngineLimits,
    /// What computes.
    pub device: DeviceChoice,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum DeviceChoice {
    /// The first GPU if there is one that can run the model, else the CPUs.
    #[default]
    Auto,
    /// The CPUs.
    Cpu,
    /// This GPU or nothing.
    Cuda(usize),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let ordinal = name.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match (name, ordinal) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(0)),
            (_, Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            _ => Err(format!("{name} is no device: use auto, cpu, cuda or cuda:N")),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// Where a model's files are. The names are Hugging Face's: `config.json`, `tokenizer.json`, `model.safetensors`, ...
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A directory, or a GGUF file.
    Directory(PathBuf),
    /// Files inside the binary.
    Builtin {
        /// The model's name, for messages.
        name: &'static str,
        /// File name and content.
        files: &'static [(&'static str, &'static [u8])],
    },
    /// A directory without weights: they are random numbers from a seed, made on the GPU. For benchmarks.
    Random {
        /// `config.json`, `tokenizer.json`, ...
        directory: PathBuf,
        /// Of the weights.
        seed: u64,
    },
}

/// Sizes of an engine. `None` means: derived from the model and the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineLimits {
    /// Longest prompt plus completion, in tokens. Default: the model's own limit.
    pub max_model_len: Option<u32>,
    /// Sequences decoded together at most. Default: by the device.
    pub max_num_seqs: Option<u32>,
    /// Tokens computed in one step at most; not below `max_num_seqs`. Default: by the device.
    pub max_batched_tokens: Option<u32>,
    /// Requests that may wait beside the `max_num_seqs` that can run at once; more are refused.
    pub max_waiting: u32,
    /// Tokens the KV cache holds, rounded down to whole blocks.
    pub kv_cache_tokens: Option<u32>,
    /// Share of a GPU's memory that the engine may use, of all there is.
    pub memory_fraction: f64,
    /// Memory the process may use on the CPU. Default: what the machine or the container allows.
    pub memory_limit_bytes: Option<u64>,
    /// Let a sequence in only if all that run can be expected to end without preemption; a completion is taken to have so many
    /// tokens before any has ended. `None`: let in whoever fits now.
    pub expected_completion: Option<u32>,
    /// Time between two tokens of a sequence that prompts beside it may take, where decoding itself takes less. `None`:
    /// 30 ms, except in bursts ([`ItlTarget::DEFAULT`]).
    pub itl_target: Option<Duration>,
    /// Compute threads. Default: the cores of the CPUs the process may use, no more than its quota.
    pub threads: Option<usize>,
    /// Instructions that the CPUs compute with. Default: the best they have.
    pub isa: Option<Isa>,
    /// Keep the KV blocks of prompts and completions for requests that begin with the same tokens.
    pub prefix_caching: bool,
    /// Give a request the same bits whatever else runs beside it, however its prompt is cut and whatever of it is cached. The
    /// CPU always does; a GPU takes kernels for it that are slower, and refuses where it has none.
    pub batch_invariant: bool,
    /// Multiply with the weights of layers in fewer bits than they are stored in. `None`: as they are stored.
    pub quantization: Option<Quantization>,
    /// GPUs that share the model, each with its part of heads, feed-forward and vocabulary, and of the KV cache.
    pub tensor_parallel: usize,
    /// Stages that the model's layers are cut into, each on as many GPUs of its own as share it. For what does not fit or divide otherwise:
    /// a sequence's tokens come no sooner than from one stage.
    pub pipeline_parallel: usize,
    /// Keep keys and values in fewer bits than they are computed in. `None`: as they are computed.
    pub kv_cache_dtype: Option<KvCacheDtype>,
}

/// How keys and values are stored where that is not as they are computed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KvCacheDtype {
    /// In e4m3: half the bytes, so that decoding reads half as much and twice as many tokens fit. Each KV head's keys have a scale, its
    /// values another one. On GPUs.
    Fp8,
}

impl KvCacheDtype {
    /// All.
    pub const ALL: [Self; 1] = [Self::Fp8];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
        }
    }
}

impl std::str::FromStr for KvCacheDtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|known| known.name() == name);
        known.ok_or_else(|| format!("{name:?} is not known: take fp8"))
    }
}

/// How weights are quantised when they are loaded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quantization {
    /// Projections of layers in e4m3 with a scale for each of their outputs; rows that are multiplied are quantised as they come, with a
    /// scale each, except a row that is alone. Embeddings, norms, biases and the output matrix stay as they are. On Hopper GPUs.
    Fp8,
}

impl Quantization {
    /// All.
    pub const ALL: [Self; 1] = [Self::Fp8];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
        }
    }
}

impl std::str::FromStr for Quantization {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|known| known.name() == name)
            .ok_or_else(|| format!("{name:?} is not known: take fp8"))
    }
}

impl Default for EngineLimits {
    fn default() -> Self {
        Self {
            max_model_len: None,
            max_num_seqs: None,
            max_batched_tokens: None,
            max_waiting: 256,
            kv_cache_tokens: None,
            memory_fraction: 0.9,
            memory_limit_bytes: None,
            expected_completion: Some(EXPECTED_COMPLETION),
            itl_target: None,
            threads: None,
            isa: None,
            prefix_caching: true,
            batch_invariant: false,
            quantization: None,
            tensor_parallel: 1,
            pipeline_parallel: 1,
            kv_cache_dtype: None,
        }
    }
}

/// A size that cannot work; names the setting, its value and what would.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LimitError {
    /// A size is zero.
    #[error("{setting} is 0: set it to at least 1")]
    Zero {
        /// The setting's name.
        setting: &'static str,
    },
    /// Decodes of all running sequences would not fit one step.
    #[error(
        "max_batched_tokens {max_batched_tokens} is below max_num_seqs {max_num_seqs}: every running sequence needs \
         one token a step; raise max_batched_tokens to {max_num_seqs} or lower max_num_seqs to {max_batched_tokens}"
    )]
    BatchBelowSeqs {
        /// Tokens a step.
        max_batched_tokens: u32,
        /// Sequences a step.
        max_num_seqs: u32,
    },
    /// The model's positions end earlier.
    #[error("max_model_len {max_model_len} is above the model's own limit of {model_limit} tokens: lower it")]
    BeyondModel {
        /// What was asked.
        max_model_len: u32,
        /// `max_position_embeddings` of the model.
        model_limit: u32,
    },
    /// A share that is none.
    #[error("memory_fraction is {fraction}: set it above 0 and to at most 1")]
    Fraction {
        /// What was asked.
        fraction: f64,
    },
    /// No room for a prompt token and a completion token.
    #[error("max_model_len {max_model_len} is too short: set it to at least 2 (one prompt and one completion token)")]
    ContextTooShort {
        /// What was asked.
        max_model_len: u32,
    },
}

impl EngineLimits {
    /// Checks every size and derives the scheduler's bounds.
    pub fn validate(&self, model_limit: u32, eos: &[TokenId], defaults: StepSizes) -> Result<SchedLimits, LimitError> {
        let max_model_len = self.max_model_len.unwrap_or(model_limit);
        self.refuse_zeros()?;
        let asked = AskedSizes { max_num_seqs: self.max_num_seqs, max_batched_tokens: self.max_batched_tokens };
        let StepSizes { max_num_seqs, max_batched_tokens } = defaults.with(asked);
        if max_batched_tokens < max_num_seqs {
            return Err(LimitError::BatchBelowSeqs { max_batched_tokens, max_num_seqs });
        }
        if !(self.memory_fraction > 0.0 && self.memory_fraction <= 1.0) {
            return Err(LimitError::Fraction { fraction: self.memory_fraction });
        }
        if max_model_len > model_limit {
            return Err(LimitError::BeyondModel { max_model_len, model_limit });
        }
        if max_model_len < 2 {
            return Err(LimitError::ContextTooShort { max_model_len });
        }
        Ok(SchedLimits {
            max_num_seqs: max_num_seqs as usize,
            max_batched_tokens: max_batched_tokens as usize,
            max_model_len: max_model_len as usize,
            eos: eos.to_vec(),
            prefix_caching: self.prefix_caching,
            replays_decodes: false,
            copies_blocks: false,
            prefill_share: max_batched_tokens as usize,
            tile_rows: 1,
            itl_target: Some(self.itl_target.map_or(ItlTarget::DEFAULT, ItlTarget::asked)),
            expected_completion: self.expected_completion.map(|tokens| tokens as usize),
        })
    }

    /// What the KV cache of an engine with those bounds is for.
    pub fn cache_use(&self, sched: &SchedLimits) -> CacheUse {
        CacheUse {
            max_model_len: sched.max_model_len,
            max_num_seqs: sched.max_num_seqs,
            asked_tokens: self.kv_cache_tokens,
        }
    }

    fn refuse_zeros(&self) -> Result<(), LimitError> {
        let sizes = [
            ("max_num_seqs", self.max_num_seqs.unwrap_or(1) as u64),
            ("max_batched_tokens", self.max_batched_tokens.unwrap_or(1) as u64),
            ("max_waiting", self.max_waiting as u64),
            ("tensor_parallel", self.tensor_parallel as u64),
            ("pipeline_parallel", self.pipeline_parallel as u64),
            ("threads", self.threads.unwrap_or(1) as u64),
            ("kv_cache_tokens", self.kv_cache_tokens.unwrap_or(1) as u64),
            ("memory_limit_bytes", self.memory_limit_bytes.unwrap_or(1)),
        ];
        match sizes.into_iter().find(|(_, size)| *size == 0) {
            Some((setting, _)) => Err(LimitError::Zero { setting }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        let choices = ["auto", "cpu", "cuda:0", "cuda:3"].map(|name| name.parse::<DeviceChoice>().unwrap());
        assert_eq!(choices, [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(0), DeviceChoice::Cuda(3)]);
        assert_eq!(choices.map(|choice| choice.to_string()), ["auto", "cpu", "cuda:0", "cuda:3"]);
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert!(["cuda:", "cuda:x", "gpu", ""].iter().all(|name| name.parse::<DeviceChoice>().is_err()));
    }

    #[test]
    fn defaults_fit_any_model_with_two_positions() {
        assert_eq!(EngineLimits::default().validate(2048, &[7], StepSizes::CPU).unwrap().max_model_len, 2048);
        assert!(EngineLimits::default().validate(2, &[], StepSizes::CPU).is_ok());
    }

    #[test]
    fn a_step_too_small_for_all_decodes_names_both_settings() {
        let limits = EngineLimits { max_num_seqs: Some(32), max_batched_tokens: Some(16), ..EngineLimits::default() };
        let message = limits.validate(2048, &[], StepSizes::CPU).unwrap_err().to_string();
        assert!(message.contains("max_batched_tokens 16") && message.contains("max_num_seqs 32"), "{message}");
    }

    #[test]
    fn what_nobody_asked_gives_way_to_what_was_asked() {
        let sizes = |defaults, max_num_seqs, max_batched_tokens| {
            let limits = EngineLimits { max_num_seqs, max_batched_tokens, ..EngineLimits::default() };
            let sched = limits.validate(2048, &[], defaults).unwrap();
            (sched.max_num_seqs, sched.max_batched_tokens)
        };
        assert_eq!(sizes(StepSizes::CPU, None, None), (64, 512));
        assert_eq!(sizes(StepSizes::CPU, Some(1000), None), (1000, 1000));
        assert_eq!(sizes(StepSizes::CPU, None, Some(16)), (16, 16));
        assert_eq!(sizes(StepSizes::GPU, Some(600), None), (600, 8192));
        assert_eq!(sizes(StepSizes::GPU, None, Some(100)), (100, 100));
    }

    #[test]
    fn a_context_beyond_the_model_is_refused() {
        let limits = EngineLimits { max_model_len: Some(4096), ..EngineLimits::default() };
        assert_eq!(
            limits.validate(2048, &[], StepSizes::CPU),
            Err(LimitError::BeyondModel { max_model_len: 4096, model_limit: 2048 })
        );
    }

    #[test]
    fn a_share_of_the_gpu_is_above_0_and_at_most_1() {
        for fraction in [0.0, -1.0, 1.01, f64::NAN] {
            let limits = EngineLimits { memory_fraction: fraction, ..EngineLimits::default() };
            assert!(
                matches!(limits.validate(2048, &[], StepSizes::CPU), Err(LimitError::Fraction { .. })),
                "{fraction}"
            );
        }
    }

    #[test]
    fn a_size_of_zero_is_named() {
        let limits = EngineLimits { kv_cache_tokens: Some(0), ..EngineLimits::default() };
        assert_eq!(limits.validate(2048, &[], StepSizes::CPU), Err(LimitError::Zero { setting: "kv_cache_tokens" }));
    }
}
