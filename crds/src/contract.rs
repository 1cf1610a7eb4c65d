//! What the operator writes and the agent answers: plain serde, no Kubernetes, no clock.
//!
//! `AgentConfig` travels as one JSON file in the revision's ConfigMap. `LoadReport` is the body of `GET /v1/load`; what
//! a replica is told to do is in [`crate::intent`]. Unknown fields of `AgentConfig` are refused, so an operator that is
//! newer than its agents is visible at start, never guessed. Nothing here does I/O.

use serde::{Deserialize, Serialize};
use stoker_cost::StepReport;

/// The port every agent answers requests on.
pub const AGENT_PORT: u16 = 8000;
/// Name of [`AGENT_PORT`] in container and Service ports.
pub const AGENT_PORT_NAME: &str = "http";
/// The port every agent reports its load on and takes orders on. No Service has it.
pub const ADMIN_PORT: u16 = AGENT_PORT + 1;
/// Name of [`ADMIN_PORT`] in containers.
pub const ADMIN_PORT_NAME: &str = "admin";
/// Where the revision's ConfigMap is mounted in an agent pod.
pub const CONFIG_DIR: &str = "/etc/stoker";
/// File name of [`AgentConfig`] (JSON) inside [`CONFIG_DIR`].
pub const CONFIG_FILE: &str = "agent.json";
/// File beside it with what of the spec the revision was made from (JSON): what undoing a change puts back.
pub const SPEC_FILE: &str = "spec.json";
/// Tokens in one KV block. One definition for agent, operator and router.
pub const KV_BLOCK_TOKENS: u32 = 16;
/// What an operator and its agents rely on in each other: ports, what kubelets ask there, arguments, configuration, reports and orders. Raised
/// when a pod as operators make it from now on would not live with an agent of before; reports stay readable, so that it can be told why.
/// 0: agents that say nothing of it. 1: the admin port says whether a process lives, and is there before the public one.
pub const PROTOCOL: u32 = 1;
/// Ranks that share a model, or a stage of it, at most: GPUs of one machine that reach each other's memory.
pub const TENSOR_PARALLEL_MAX: u32 = 8;
/// Stages that a model's layers are cut into at most.
pub const PIPELINE_PARALLEL_MAX: u32 = 8;
/// GPUs of a replica at most: as many as all ranks of all stages. What a node has is less, and the nodes' to say.
pub const GPUS_MAX: u32 = TENSOR_PARALLEL_MAX * PIPELINE_PARALLEL_MAX;

/// Everything one replica needs to know. The operator writes it, the agent validates it before serving.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AgentConfig {
    /// Revision of the deployment this configuration belongs to; echoed in `/v1/load`.
    pub revision: String,
    /// Which weights to serve.
    pub model: ModelConfig,
    /// GPUs the pod was given; 0: compute on CPUs. Left out where there is none, so that agents which do not know it
    /// still read their configuration.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// How ranks and stages share the model. Left out where there is one of both, for the same reason.
    #[serde(default, skip_serializing_if = "ParallelSettings::is_one")]
    pub parallelism: ParallelSettings,
    /// Sizes of the engine.
    #[serde(default)]
    pub engine: EngineSettings,
    /// How the agent leaves.
    #[serde(default)]
    pub drain: DrainSettings,
}

fn is_zero<T: Default + PartialEq>(count: &T) -> bool {
    *count == T::default()
}

/// How ranks and stages share a model.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ParallelSettings {
    /// Ranks of each stage, each with a part of heads, feed-forward and vocabulary.
    pub tensor: u32,
    /// Stages, each with some of the layers and ranks of its own. Left out where there is one, so that agents which do not know it still
    /// read their configuration, and revisions from before there were several stay what they are.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub pipeline: u32,
}

fn one() -> u32 {
    1
}

fn is_one(count: &u32) -> bool {
    *count == 1
}

impl Default for ParallelSettings {
    fn default() -> Self {
        Self { tensor: 1, pipeline: 1 }
    }
}

impl ParallelSettings {
    /// Nobody shares.
    pub fn is_one(&self) -> bool {
        *self == Self::default()
    }

    /// GPUs that they have, where there are some: one for each rank of each stage.
    pub fn n_gpus(&self) -> u32 {
        self.tensor.saturating_mul(self.pipeline)
    }
}

/// Which weights a replica serves and under which names.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelConfig {
    /// `builtin://NAME` or a directory inside the pod (`pvc://` and `file://` are resolved by the operator).
    pub source: String,
    /// Names accepted in the `model` field of requests; the first is the one answers carry. Never empty.
    pub served_names: Vec<String>,
    /// How the model writes tool calls: `auto` (as its chat template says), `none` or a format's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_format: Option<String>,
    /// How the model writes its reasoning: `auto` (as its chat template says), `none` or a format's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_format: Option<String>,
}

/// Sizes of the engine. `None` means: the agent derives it from the model and the machine, and reports it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineSettings {
    /// Longest prompt plus completion, in tokens. Default: the model's own limit.
    pub max_model_len: Option<u32>,
    /// Sequences decoded together at most. Default: 64, on a GPU 256; `max_batched_tokens` if that is less.
    pub max_num_seqs: Option<u32>,
    /// Tokens computed in one step at most, prefill chunks and decodes together. Default: 512, on a GPU 8192;
    /// `max_num_seqs` if that is more.
    pub max_batched_tokens: Option<u32>,
    /// Requests waiting at most before new ones are refused with 429. Default: 256.
    pub max_waiting: Option<u32>,
    /// Tokens the KV cache holds, rounded down to whole blocks. Default: from the memory the pod may use.
    pub kv_cache_tokens: Option<u32>,
    /// Compute threads of the CPU back end. Default: the CPUs the pod may use.
    pub threads: Option<u32>,
    /// Share of a GPU's memory that the engine may use, above 0 and to at most 1. Default: 0.9.
    pub memory_fraction: Option<f64>,
    /// Keep the KV of prompts and completions for requests that begin with the same tokens. Default: true.
    pub prefix_caching: Option<bool>,
    /// Give a request the same tokens whatever else runs beside it. Default: false. Left out where nobody asks, so that
    /// agents which do not know it still read their configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_invariant: Option<bool>,
    /// Milliseconds between two tokens of a stream that prompts of others may take. Default: 30, except in bursts. Left out
    /// where nobody asks, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub itl_target_ms: Option<u32>,
    /// How weights are quantised when they are loaded. Default: not. Left out where nobody asks, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<Quantization>,
    /// How keys and values are stored. Default: as they are computed. Left out where nobody asks, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Render chat templates that requests bring. Default: false. Left out where nobody asks, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_request_chat_template: Option<bool>,
}

/// Multiply with weights in fewer bits than they are stored in: "fp8" quantises the projections of layers when they are loaded, and
/// the rows they are multiplied with. An 8B model on an H200: weights of 9.1 GB instead of 16.1, 1.4 times the tokens a second. Needs
/// an H100 or H200. Default: as they are stored.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "resource", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Quantization {
    /// Projections of layers in 8-bit floating point, e4m3, with a scale for each of their outputs; rows that are multiplied are
    /// quantised as they come.
    Fp8,
}

/// Store keys and values in fewer bits than they are computed in: "fp8" takes half the memory, so that twice as many tokens fit and
/// decoding reads half as much of them. Each head has scales, the checkpoint's or measured at start. Needs a GPU. Default: as they are
/// computed.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[cfg_attr(feature = "resource", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum KvCacheDtype {
    /// 8-bit floating point, e4m3, with a scale for each KV head's keys and one for its values.
    Fp8,
}

/// How an agent leaves: withdraw from endpoints first, then finish streams, then exit.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct DrainSettings {
    /// Seconds in-flight requests may take to finish before they are ended with an error.
    pub deadline_seconds: u32,
    /// Seconds a draining agent is unready but still admits, so that load balancers stop sending before it refuses; up to ten times as
    /// long while some still do.
    pub withdraw_seconds: u32,
}

impl Default for DrainSettings {
    fn default() -> Self {
        Self { deadline_seconds: 600, withdraw_seconds: 3 }
    }
}

/// Where an agent is in its life.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum AgentPhase {
    /// Reading weights, planning memory, warming up.
    Loading,
    /// Serving.
    Ready,
    /// Draining, unready, still admitting while endpoints are withdrawn.
    Withdrawing,
    /// Draining: admits nothing, finishes what runs.
    Draining,
    /// Drained: nothing runs and nothing is admitted; safe to delete.
    Empty,
    /// The model or the engine failed; `LoadReport::error` says why.
    Failed,
}

/// Body of `GET /v1/load`: one reading of one replica.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadReport {
    /// [`PROTOCOL`] of the agent's release.
    #[serde(default)]
    pub protocol: u32,
    /// Unix time of the reading in milliseconds, by the agent's clock.
    pub time_ms: u64,
    /// Random per process start: counters restart when it changes.
    pub start_id: String,
    /// Milliseconds since the process started, by a clock that never jumps; higher in every report than in the one before.
    pub up_ms: u64,
    /// Number of the last order that the agent took; `None` before the first.
    pub intent: Option<u64>,
    /// Revision the agent runs (empty when started by hand).
    pub revision: String,
    /// Where the agent is in its life.
    pub phase: AgentPhase,
    /// Why the phase is `Failed`: the path and the reason.
    pub error: Option<String>,
    /// Progress of loading, 0 to 1.
    pub load_progress: f64,
    /// Sequences being computed.
    pub running: u32,
    /// Requests waiting for their first step (preempted ones included).
    pub waiting: u32,
    /// Prompt tokens of waiting requests that still need prefill.
    pub waiting_prefill_tokens: u64,
    /// KV blocks in all.
    pub total_blocks: u32,
    /// KV blocks referenced by sequences.
    pub referenced_blocks: u32,
    /// KV blocks held only by the prefix cache; free for scaling (D4).
    pub cached_blocks: u32,
    /// KV blocks that hold nothing.
    pub free_blocks: u32,
    /// Preemptions since start.
    pub preemptions: u64,
    /// Requests that ended, in any way, since start.
    pub finished: u64,
    /// Of these, requests that ended in an error; `None` from agents that do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<u64>,
    /// Tokens generated since start; `None` from agents that do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generated_tokens: Option<u64>,
    /// Median of the time to first token over the last minute, in seconds; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_p50_seconds: Option<f64>,
    /// 95th percentile of the time to first token over the last minute, in seconds; `None` without samples.
    pub ttft_p95_seconds: Option<f64>,
    /// Median of the inter-token latency over the last minute, in seconds; `None` without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl_p50_seconds: Option<f64>,
    /// 95th percentile of the inter-token latency over the last minute, in seconds; `None` without samples.
    pub itl_p95_seconds: Option<f64>,
    /// Prefill speed over the last minute, tokens per second; `None` without samples.
    pub prefill_tokens_per_second: Option<f64>,
    /// What steps cost and what was done, as the engine learned it; `None` from agents that do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<StepReport>,
    /// Seconds since the last completed step while work was waiting; 0 when idle.
    pub stalled_seconds: f64,
    /// What is served, if it was fetched and is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelReport>,
}

/// A model that was fetched, in one replica.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelReport {
    /// Its commit.
    pub commit: String,
    /// Bytes of its files; 0 while it is fetched, and from agents that do not say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bytes: u64,
    /// How far it is, while it is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetch: Option<FetchReport>,
    /// Of whom it takes files beside the source, while it is fetched; `None` from who would not take any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holders: Option<HoldersReport>,
}

/// What who fetches was told of replicas that have the model.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HoldersReport {
    /// Names of their pods, in order.
    pub told: Vec<String>,
    /// Nobody told it yet, or not for so long that tickets end.
    pub asks: bool,
}

/// How far the fetch of a model is.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FetchReport {
    /// Bytes that are there.
    pub bytes_done: u64,
    /// Bytes in all; 0 while nobody knows.
    pub bytes_total: u64,
    /// Speed of the last seconds.
    pub bytes_per_second: u64,
    /// Bytes of `bytes_done` that other replicas gave.
    #[serde(default, skip_serializing_if = "is_none_of_it")]
    pub bytes_from_replicas: u64,
}

fn is_none_of_it(bytes: &u64) -> bool {
    *bytes == 0
}

/// Whether `revision` is a commit, written out: it can never mean other bytes. Git's name of one, or a SHA-256: of a registry's
/// manifest, of what a bucket lists.
pub fn is_commit(revision: &str) -> bool {
    matches!(revision.len(), 40 | 64) && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl LoadReport {
    /// A ready agent without work that has told nothing yet: what stand-ins and tests start from.
    pub fn idle(total_blocks: u32) -> Self {
        Self {
            protocol: PROTOCOL,
            time_ms: 0,
            start_id: String::new(),
            up_ms: 0,
            intent: None,
            revision: String::new(),
            phase: AgentPhase::Ready,
            error: None,
            load_progress: 1.0,
            running: 0,
            waiting: 0,
            waiting_prefill_tokens: 0,
            total_blocks,
            referenced_blocks: 0,
            cached_blocks: 0,
            free_blocks: total_blocks,
            preemptions: 0,
            finished: 0,
            failed: None,
            generated_tokens: None,
            ttft_p50_seconds: None,
            ttft_p95_seconds: None,
            itl_p50_seconds: None,
            itl_p95_seconds: None,
            prefill_tokens_per_second: None,
            steps: None,
            stalled_seconds: 0.0,
            model: None,
        }
    }
}
