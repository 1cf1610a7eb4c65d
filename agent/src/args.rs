//! The command line. Parses only; what the values mean is `config`'s.

use std::{net::IpAddr, path::PathBuf};

use clap::{Parser, Subcommand};
use serde::de::DeserializeOwned;
use stoker_crds::{
    contract::{
        AGENT_PORT, AgentConfig, DrainSettings, EngineSettings, KvCacheDtype, ModelConfig, PIPELINE_PARALLEL_MAX,
        ParallelSettings, Quantization, TENSOR_PARALLEL_MAX,
    },
    intent::POD_UID_VARIABLE,
};
use stoker_edge::{cors::AllowedOrigin, playground::Playground};
use stoker_engine::DeviceChoice;

use crate::{
    config::{AnswerWording, ConfigError, Settings, StartedBy, isa},
    fetch::FetchArgs,
    intent::Authority,
};

/// Serves one language model over an OpenAI-compatible HTTP API.
///
/// Try it with the model inside this program, which needs no download and no GPU:
///
///     stoker-agent --model builtin://ember --port 8000
///
/// then ask it something:
///
///     curl http://127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
///
/// Everything not given on the command line is derived from the model and the machine, and printed at start.
/// In a pod the operator writes all of it into one file: see --config.
#[derive(Debug, Parser)]
#[command(version, verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// Model to serve: builtin://NAME, a directory in Hugging Face's layout (config.json, *.safetensors,
    /// tokenizer.json), or a .gguf file.
    #[arg(long, default_value = "builtin://ember", conflicts_with = "config")]
    pub model: String,

    /// Configuration file (JSON) that the operator writes; replaces every flag but the addresses.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Address to listen on.
    #[arg(long, env = "STOKER_HOST", default_value = "0.0.0.0")]
    pub host: IpAddr,

    /// Port for requests; 0 picks a free one, which the log names.
    #[arg(long, default_value_t = AGENT_PORT)]
    pub port: u16,

    /// Port for the operator: GET /v1/load, PUT /v1/intent; 0 picks a free one, which the log names. Default: the one
    /// after --port, or 0 if that is 0.
    #[arg(long)]
    pub admin_port: Option<u16>,

    /// Port for replicas that fetch the model served here: its files, for tickets of the operator; 0 picks a free one, which the log
    /// names. Default: the one after --admin-port, or 0 if that is 0.
    #[arg(long, requires = "operator_keys")]
    pub weights_port: Option<u16>,

    /// File with the public keys of the operators whose orders are taken, one a line; read again for every order.
    /// Default: none is taken.
    #[arg(long, value_name = "FILE", requires = "config")]
    pub operator_keys: Option<PathBuf>,

    /// UID of the pod that this process runs in: orders for another are refused.
    #[arg(long, env = POD_UID_VARIABLE, value_name = "UID", hide_env_values = true)]
    pub pod_uid: Option<String>,

    /// File with API keys, one a line: every request must send one of them, but those of probes and scrapers. Default: none is
    /// asked for.
    #[arg(long, env = "STOKER_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// The page at `/` on which people talk to the model.
    #[arg(long, env = "STOKER_PLAYGROUND", value_enum, default_value_t)]
    pub playground: Playground,

    /// Collector of traces, as http://localhost:4318: each request is a span there (OTLP over HTTP, in JSON). Default: none.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    pub otlp_endpoint: Option<String>,

    /// Origin whose pages may ask from a browser (CORS), as https://app.example, or `*` for all; repeat for more. Default: none may.
    #[arg(long = "allow-origin", env = "STOKER_ALLOW_ORIGIN", value_delimiter = ',', value_name = "ORIGIN")]
    pub allowed_origins: Vec<AllowedOrigin>,

    /// Path under which a proxy shows this server: every endpoint also answers below it.
    #[arg(long, value_name = "PATH")]
    pub root_path: Option<String>,

    /// Say how long each answer of chat and text completions took, as `metrics` beside `usage`: waiting, to the first token,
    /// between tokens.
    #[arg(long, env = "STOKER_PER_REQUEST_METRICS")]
    pub per_request_metrics: bool,

    /// Call tokens `token_id:N` in log-probabilities where a request does not say (`return_tokens_as_token_ids`).
    #[arg(long, env = "STOKER_RETURN_TOKENS_AS_TOKEN_IDS")]
    pub return_tokens_as_token_ids: bool,

    /// What to log: error, warn, info, debug, or a filter such as `stoker_agent=debug,info`.
    #[arg(long, env = "STOKER_LOG", default_value = "info", value_name = "FILTER")]
    pub log: String,

    /// Instructions that CPUs compute with, by one of the names that `doctor` prints; for tests and comparisons. Where this CPU
    /// has them not, it takes its best and says so. Default: its best.
    #[arg(long, env = "STOKER_CPU_ISA", value_name = "NAME")]
    pub cpu_isa: Option<String>,

    #[command(flatten)]
    pub(crate) flags: Flags,
}

/// What the program does besides serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Say what CPUs compute with, what is there for computing on a GPU (driver, GPUs, libraries, kernels) and what is
    /// missing for that; exit 1 if something is.
    Doctor,
    /// Say what a model is made of: layers, weights with shapes and formats, parameters, bytes. Reads no weight.
    Describe {
        /// As for serving: builtin://NAME, a directory, or a .gguf file.
        #[arg(long, default_value = "builtin://ember")]
        model: String,
    },
    /// Bring a model from a hub, a bucket or a registry into a cache of this node: only the files it needs, in parallel, each verified by its
    /// published hash. Who is killed goes on where it was. Prints the model's directory, which --model takes.
    Fetch(Box<FetchArgs>),
}

/// What the configuration file says in a pod.
#[derive(Clone, Debug, clap::Args)]
#[group(id = "flags", conflicts_with = "config", multiple = true)]
pub(crate) struct Flags {
    /// Name clients send in `model`; repeat for more, the first is the one answers carry. Default: the model's own name.
    #[arg(long = "served-name", value_name = "NAME")]
    served_names: Vec<String>,

    /// How the model writes tool calls: auto (as its chat template says), none, or a format's name (docs/api.md).
    /// Default: auto.
    #[arg(long, value_name = "FORMAT")]
    tool_call_format: Option<String>,

    /// How the model writes its reasoning: auto (as its chat template says), none, think, mistral, seed or harmony.
    /// Default: auto.
    #[arg(long, value_name = "FORMAT")]
    reasoning_format: Option<String>,

    /// Longest prompt plus completion, in tokens. Default: the model's own limit.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    max_model_len: Option<u32>,

    /// Sequences decoded together at most. Default: 64, on a GPU 256; --max-batched-tokens if that is less.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: Option<u32>,

    /// Tokens computed in one step at most, prefill chunks and decodes together. Default: 512, on a GPU 8192;
    /// --max-num-seqs if that is more.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_batched_tokens: Option<u32>,

    /// Requests that may wait; more are refused with 429. Default: 256.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_waiting: Option<u32>,

    /// Tokens the KV cache holds. Default: what the memory allows.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(16..))]
    kv_cache_tokens: Option<u32>,

    /// What computes: auto (the first GPU that can run the model, else the CPUs), cpu, cuda, or cuda:N for one GPU.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: DeviceChoice,

    /// GPUs that share the model, 1 to 8: each holds and computes its part of the attention heads, the feed-forward and the
    /// vocabulary. For a model that one GPU has no room for, or to have its tokens sooner: --model /models/llama-3.1-70b
    /// --tensor-parallel 2. Takes GPU 0 and those after it (--device cuda:4: from there on); they must reach each other's memory,
    /// and the number must divide the model's heads. With --device cpu groups of threads take their place, to try it. Default: 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(TENSOR_PARALLEL_MAX)))]
    tensor_parallel: Option<u32>,

    /// Stages that the model's layers are cut into, 1 to 8, each on as many GPUs of its own as --tensor-parallel says: they hold and
    /// compute its layers, and hand what comes out to the next stage. For a model that one GPU has no room for and that GPUs cannot
    /// share otherwise, with heads that their number does not divide, with norms over whole rows as OLMo 2 has them, or on GPUs that do
    /// not reach each other's memory: --model /models/olmo-2-32b --pipeline-parallel 2. One sequence's tokens come no sooner than from
    /// one stage, those of many at once do. Takes GPU 0 and those after it, the first stage's first. With --device cpu the same threads
    /// compute all stages, to try it. Default: 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(PIPELINE_PARALLEL_MAX)))]
    pipeline_parallel: Option<u32>,

    /// Share of the GPU's memory that the engine may use, above 0 and to at most 1. Default: 0.9.
    #[arg(long, value_name = "SHARE")]
    memory_fraction: Option<f64>,

    /// Compute threads. Default: the cores of the CPUs this process may use, no more than its quota.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    threads: Option<u32>,

    /// Keep the KV of prompts and completions for requests that begin with the same tokens. Default: true.
    #[arg(long, value_name = "true|false")]
    prefix_caching: Option<bool>,

    /// Give a request the same tokens whatever else runs beside it, at some cost in speed; on a GPU this needs an H100 or
    /// H200. On CPUs it is always so. Default: false.
    #[arg(long, value_name = "true|false")]
    batch_invariant: Option<bool>,

    /// Milliseconds between two tokens of a stream that prompts of others may take at most, or as long again as decoding takes if
    /// that is longer; at 10000 prompts fill steps. Default: 30, except while 24 requests, or more than stream, wait for a first
    /// token.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    itl_target_ms: Option<u32>,

    /// Multiply with weights in fewer bits than they are stored in: fp8 quantises the projections of layers when they are loaded.
    /// An 8B model on an H200: weights of 9.1 GB instead of 16.1, 1.4 times the tokens a second. Needs an H100 or H200. Default: as they
    /// are stored.
    #[arg(long, value_name = "fp8", value_parser = format::<Quantization>)]
    quantization: Option<Quantization>,

    /// Store keys and values in fewer bits than they are computed in: fp8 takes half the memory, so that twice as many tokens fit and
    /// decoding reads half as much of them. Scales are the checkpoint's, or measured at start. Needs a GPU. Default: as they are computed.
    #[arg(long, value_name = "fp8", value_parser = format::<KvCacheDtype>)]
    kv_cache_dtype: Option<KvCacheDtype>,

    /// Render the chat template that a request brings (`chat_template`) instead of the model's own. A template is a program: its length
    /// and its steps are bounded, the memory that it takes is not. Default: false, such requests are refused.
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    trust_request_chat_template: Option<bool>,

    /// After SIGTERM or Ctrl-C, seconds that open requests may take to finish; a second signal exits at once.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain_deadline_seconds: u32,

    /// After SIGTERM or Ctrl-C, seconds to go on admitting while load balancers notice.
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    drain_withdraw_seconds: u32,
}

/// A number format as a configuration file writes it.
fn format<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(name.into()).map_err(|_| "not known: take fp8".to_owned())
}

impl Args {
    /// Where the operator asks.
    pub fn admin_port(&self) -> u16 {
        self.admin_port.unwrap_or(next_port(self.port))
    }

    /// Where files of the model are given; `None`: nowhere, as nobody's tickets could be believed.
    pub fn weights_port(&self) -> Option<u16> {
        self.operator_keys.as_ref()?;
        Some(self.weights_port.unwrap_or(next_port(self.admin_port())))
    }

    /// What answers say unasked.
    fn wording(&self) -> AnswerWording {
        AnswerWording { names_tokens_by_id: self.return_tokens_as_token_ids, tells_times: self.per_request_metrics }
    }

    /// Whose orders are taken.
    fn authority(&self) -> Authority {
        Authority { pod_uid: self.pod_uid.clone(), keys: self.operator_keys.clone() }
    }

    /// What the process runs with.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let mut settings = match &self.config {
            Some(path) => Settings::of_operator(path, self.authority())?,
            None => Settings::of_person(self.agent_config(), self.flags.device)?,
        };
        settings.limits.isa = isa(self.cpu_isa.as_deref())?;
        settings.wording = self.wording();
        Ok(settings)
    }

    /// Who wrote the settings: with a configuration file the operator, else a person.
    pub fn started_by(&self) -> StartedBy {
        if self.config.is_some() { StartedBy::Operator } else { StartedBy::Person }
    }

    /// The configuration the flags describe; a file, if given, takes its place.
    fn agent_config(&self) -> AgentConfig {
        let flags = self.flags.clone();
        AgentConfig {
            revision: String::new(),
            model: ModelConfig {
                source: self.model.clone(),
                served_names: flags.served_names,
                tool_call_format: flags.tool_call_format,
                reasoning_format: flags.reasoning_format,
            },
            gpus: 0,
            parallelism: ParallelSettings {
                tensor: flags.tensor_parallel.unwrap_or(1),
                pipeline: flags.pipeline_parallel.unwrap_or(1),
            },
            engine: EngineSettings {
                max_model_len: flags.max_model_len,
                max_num_seqs: flags.max_num_seqs,
                max_batched_tokens: flags.max_batched_tokens,
                max_waiting: flags.max_waiting,
                kv_cache_tokens: flags.kv_cache_tokens,
                threads: flags.threads,
                memory_fraction: flags.memory_fraction,
                prefix_caching: flags.prefix_caching,
                batch_invariant: flags.batch_invariant,
                itl_target_ms: flags.itl_target_ms,
                quantization: flags.quantization,
                kv_cache_dtype: flags.kv_cache_dtype,
                trust_request_chat_template: flags.trust_request_chat_template,
            },
            drain: DrainSettings {
                deadline_seconds: flags.drain_deadline_seconds,
                withdraw_seconds: flags.drain_withdraw_seconds,
            },
        }
    }
}

/// The one after a port; 0, which picks a free one, after none.
fn next_port(port: u16) -> u16 {
    if port == 0 { 0 } else { port.checked_add(1).unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn without_flags_the_builtin_model_is_served_and_leaves_at_once() {
        let config = Args::parse_from(["stoker-agent"]).agent_config();
        assert_eq!(config.model.source, "builtin://ember");
        assert_eq!(config.drain, DrainSettings { deadline_seconds: 30, withdraw_seconds: 0 });
        assert_eq!(config.engine, EngineSettings::default());
    }

    #[test]
    fn the_operator_asks_on_the_next_port_unless_told_otherwise() {
        let admin_port = |args: &[&str]| Args::parse_from([&["stoker-agent"][..], args].concat()).admin_port();
        assert_eq!(admin_port(&[]), stoker_crds::contract::ADMIN_PORT);
        assert_eq!(admin_port(&["--port", "0"]), 0);
        assert_eq!(admin_port(&["--port", "9000", "--admin-port", "7"]), 7);
    }

    #[test]
    fn files_are_given_beside_the_operator_s_port_where_its_keys_are_known() {
        let port = |args: &[&str]| Args::parse_from([&["stoker-agent"][..], args].concat()).weights_port();
        let pod = ["--config", "a.json", "--operator-keys", "keys"];
        assert_eq!(port(&[]), None);
        assert_eq!(port(&pod), Some(stoker_crds::holders::WEIGHTS_PORT));
        assert_eq!(port(&[&pod[..], &["--admin-port", "0"]].concat()), Some(0));
        assert_eq!(port(&[&pod[..], &["--weights-port", "7"]].concat()), Some(7));
    }

    #[test]
    fn a_file_and_flags_that_it_replaces_are_refused_together() {
        assert!(Args::try_parse_from(["stoker-agent", "--config", "a.json", "--port", "0"]).is_ok());
        assert!(Args::try_parse_from(["stoker-agent", "--config", "a.json", "--threads", "2"]).is_err());
        assert!(Args::try_parse_from(["stoker-agent", "--config", "a.json", "--model", "x"]).is_err());
        assert!(Args::try_parse_from(["stoker-agent", "--max-num-seqs", "0"]).is_err());
        for flag in ["--tensor-parallel", "--pipeline-parallel"] {
            assert!(Args::try_parse_from(["stoker-agent", "--config", "a.json", flag, "2"]).is_err(), "{flag}");
        }
    }

    #[test]
    fn a_number_of_ranks_or_stages_is_refused_with_those_there_are() {
        for flag in ["--tensor-parallel", "--pipeline-parallel"] {
            for n in ["0", "9"] {
                let refusal = Args::try_parse_from(["stoker-agent", flag, n]).map(drop).unwrap_err().to_string();
                assert!(refusal.contains(flag) && refusal.contains("1..=8"), "{n}: {refusal}");
            }
        }
        let asked =
            |flags: &[&str]| Args::parse_from([&["stoker-agent"][..], flags].concat()).agent_config().parallelism;
        assert_eq!(asked(&[]), ParallelSettings::default());
        assert_eq!(asked(&["--tensor-parallel", "8"]), ParallelSettings { tensor: 8, pipeline: 1 });
        let both = ["--tensor-parallel", "2", "--pipeline-parallel", "8"];
        assert_eq!(asked(&both), ParallelSettings { tensor: 2, pipeline: 8 });
    }
}
