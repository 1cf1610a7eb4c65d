//! `InferenceDeployment.status`: what the operator reports. Written by the operator alone.
//!
//! Values that move all the time (KV use, start progress) are coarse on purpose: a settled deployment causes no writes.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scaling_status::ScalingStatus;

/// What the operator saw when it last looked, and for which generation of the spec.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceDeploymentStatus {
    /// Generation of the spec that everything else in this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Ready, Available, Progressing, Degraded, Fits, with an InferenceBudget Granted, and with `spec.scaling` MetricsHealthy and Scaling, each with reason,
    /// message and the generation it is about. Reconciling and Stalled are there only while they are True.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// Pods that exist and are not being deleted, of any revision.
    #[serde(default)]
    pub replicas: i32,
    /// Pods of any revision that serve.
    #[serde(default)]
    pub ready_replicas: i32,
    /// Pods of the current revision that serve.
    #[serde(default)]
    pub updated_replicas: i32,
    /// Serving and wanted replicas, as "2/3".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ready_of_wanted: String,
    /// Label selector of the pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// Hash of everything that a replica's pod depends on.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// Revisions that there were, and how the change to the newest one goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// What a `model.source` that is fetched turned out to be: all replicas get this commit, until the source is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelStatus>,
    /// Nodes that have the model in memory for replicas to come; absent without `spec.scaling.standby`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<StandbyStatus>,
    /// Base URL for OpenAI clients inside the cluster.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub url: String,
    /// KV cache of the serving replicas together, as measured by the agents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<CapacityStatus>,
    /// What the namespace's InferenceBudget grants; absent without one, and without GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
    /// The memory of one replica: as planned from the model's config.json, and as it turned out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<FitStatus>,
    /// How many replicas are wanted, and why; absent without `spec.scaling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<ScalingStatus>,
    /// Pods with names of this deployment's replicas and without their labels: somebody took them away, so they are not
    /// counted, and others were made. Give the labels back, or delete the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stray_pods: Vec<String>,
    /// The replica that is furthest behind in starting; absent when none is starting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startup: Option<StartupStatus>,
}

/// Revisions, and how a change goes.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The revision that the spec asks for.
    pub asked: String,
    /// How far the change to it is.
    pub phase: RolloutPhase,
    /// When a revision that never served was last seen to come further.
    pub moved_at: Time,
    /// How far it came; a number that only grows.
    #[serde(default)]
    pub progress: i32,
    /// Why the revision that is asked for is not tried any more, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back: Option<RolledBack>,
    /// How the revision that is asked for does, or did, on one replica, if it is tried on one first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<CanaryStatus>,
    /// How far nodes are that fetch the model of a revision before their replicas are drained for it; absent while none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PrefetchStatus>,
    /// Revisions whose configuration is kept, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revisions: Vec<RevisionStatus>,
}

/// How far a change is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum RolloutPhase {
    /// All replicas are of one revision.
    Settled,
    /// Replicas are made, or replaced.
    Progressing,
    /// One replica of the revision that is asked for is tried: `canary` says how it does.
    Canary,
    /// `rollout.paused` holds it.
    Paused,
    /// The revision that is asked for was given up.
    RolledBack,
}

/// How a revision does on one replica.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryStatus {
    /// The revision.
    pub revision: String,
    /// How far it is.
    pub phase: CanaryPhase,
    /// Since when its gate passes without a break, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passing_since: Option<Time>,
    /// Since when it is slower than its gate allows, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_since: Option<Time>,
    /// What was found, with its bound, or what is waited for.
    pub message: String,
    /// What was measured of it and of the older replicas.
    #[serde(default, skip_serializing_if = "CanaryMeasured::is_empty")]
    pub measured: CanaryMeasured,
}

/// How far a canary is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
pub enum CanaryPhase {
    /// Its replica does not serve yet, or not any more.
    Starting,
    /// Its replica serves and is compared with the older ones.
    Analysing,
    /// Its gate passed for long enough: the change goes on.
    Passed,
    /// It did not pass its gate.
    Failed,
}

/// What was measured of a canary; what was not is absent. Of three digits, so that it moves when something moved.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CanaryMeasured {
    /// Requests that ended in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<i64>,
    /// Percent of them that ended in an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error_percent: Option<f64>,
    /// Its time to first token, as a multiple of the older replicas'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ratio: Option<f64>,
    /// Its inter-token latency, as a multiple of the older replicas'.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl_ratio: Option<f64>,
    /// Mean distance of log-probabilities of an older replica's tokens, in nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_drift: Option<f64>,
    /// The greatest such distance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_drift: Option<f64>,
    /// Percent of the older replica's greedy tokens that it said, too, up to the first other one of each prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equal_percent: Option<f64>,
}

impl CanaryMeasured {
    /// Nothing was measured.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How far nodes are that fetch a model before their replicas are drained.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrefetchStatus {
    /// The revision whose model it is.
    pub revision: String,
    /// Nodes with replicas of another model.
    pub nodes: i32,
    /// Those of them that have it by now.
    pub done: i32,
    /// The same in words, with what a fetch met.
    pub message: String,
    /// What the API server said when it refused a pod that was to fetch: then replicas fetch for themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Nodes that have the model in memory although no replica that serves needs it there: further replicas start warm on them.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StandbyStatus {
    /// The revision whose model it is.
    pub revision: String,
    /// Nodes that are to have it.
    pub wanted: i32,
    /// Those of them that have it by now, and room for a further replica.
    pub ready: i32,
    /// The same in words, with what is missing for more.
    pub message: String,
    /// What the API server said when it refused a pod that was to keep it: then replicas start cold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// A revision that was given up.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolledBack {
    /// It.
    pub revision: String,
    /// The one that serves instead.
    pub to: String,
    /// When.
    pub at: Time,
    /// What kept it from serving, or what its canary's gate found.
    pub message: String,
}

/// A revision whose configuration is kept.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RevisionStatus {
    /// Its number; the newest has the highest.
    pub number: i64,
    /// Its hash.
    pub revision: String,
    /// Whether a replica of it ever served; one that is tried on one replica first, once its gate has passed.
    #[serde(default)]
    pub served: bool,
    /// The commit of its model, if that is fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
}

/// A model that was fetched.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelStatus {
    /// The source that was asked for.
    pub source: String,
    /// What the source was when the first replica asked: a hub's commit, the SHA-256 of a registry's manifest, or of names, sizes and
    /// ETags of a bucket's files.
    pub commit: String,
    /// Bytes of its files, once a replica has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<i64>,
    /// Nodes on which a replica served it out of the node's cache, the latest at the end, at most 16; empty where caches are no node's.
    /// Their caches may have let it go since. New replicas prefer these nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Whether the cluster mounts the image for new replicas, and if it does not, why they fetch it; of an image's folder
    /// (oci://…#path=FOLDER).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery: Option<String>,
}

/// KV cache of the serving replicas together.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CapacityStatus {
    /// Tokens that the KV caches hold together.
    pub kv_tokens: i64,
    /// Share of them that running sequences reference, in percent. Updated when it moved by 5 or more, at most every 30 s.
    pub kv_used_percent: i32,
    /// Sequences thrown out for lack of KV blocks within the last minute. Updated with the share above, and when there are
    /// any or none again.
    #[serde(default)]
    pub preemptions_per_minute: i32,
    /// When these numbers were read.
    pub observed_at: Time,
}

/// What a budget grants.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BudgetStatus {
    /// Replicas that are wanted.
    pub wanted: i32,
    /// Replicas that are granted: no more are worked towards.
    pub granted: i32,
    /// Who has the GPUs that are missing, as NAMESPACE/NAME, those with most first; at most 3.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked_by: Vec<String>,
}

/// The memory of one replica.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FitStatus {
    /// The model's source that this is about.
    pub source: String,
    /// The model's config.json, as an agent that read it told; absent for a model inside the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// What it was planned for: the GPUs where a replica serves, or the smallest that its pods may land on.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub place: String,
    /// By the arithmetic, before anything is loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub planned: Option<ReplicaMemory>,
    /// What a replica that serves took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<ReplicaMemory>,
    /// How much more weights and workspace were planned than taken, in percent of what was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_error_percent: Option<f64>,
    /// How many more tokens of the KV cache were planned than there are, in percent of these.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_error_percent: Option<f64>,
}

/// Memory of a replica; of one that several GPUs share, of each of them.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaMemory {
    /// Bytes of weights as held.
    pub weights_bytes: i64,
    /// The same by number formats; absent of what is planned, and where the agent does not say.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights_by_format: BTreeMap<String, i64>,
    /// Bytes of intermediate results of the largest step.
    pub workspace_bytes: i64,
    /// Tokens that the KV cache holds.
    pub kv_tokens: i64,
    /// Bytes of keys and values that each of them takes; 0 where the agent does not say.
    #[serde(default)]
    pub kv_bytes_per_token: i64,
}

/// How far a starting replica is.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartupStatus {
    /// Its pod.
    pub pod: String,
    /// What it waits for.
    pub phase: StartupPhase,
}

/// What a starting replica waits for, in order.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, Ord, PartialEq, PartialOrd, Serialize)]
pub enum StartupPhase {
    /// A node.
    Scheduling,
    /// Its image and volumes.
    Preparing,
    /// Its model, from where it is.
    Fetching,
    /// Weights being read, memory planned, a warm-up step.
    Loading,
    /// Its first good answer to the readiness probe.
    BecomingReady,
}
