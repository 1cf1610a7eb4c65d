//! `spec.rollout.canary`: how a change is tried on one replica before the others follow. What the API server checks stands beside each
//! field, as everywhere; what the numbers mean is in `docs/canary.md`. Bounds with a fraction are rules: of a minimum the API server takes
//! the whole part where a value has none.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use kube::KubeSchema;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Try a change on one replica first: it gets a part of the requests, and the change goes on once its gate has passed for long enough.
/// One that does not pass is given up, as one that never serves is (see `autoRollback`). A revision that served before is not tried again.
#[derive(Clone, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CanarySpec {
    /// Percent of the deployment's requests that the new replica gets through gateways, 1 to 50, and never more than any other replica.
    /// Clients that reach replicas without a gateway spread over all of them alike. Default: 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 50))]
    pub weight: Option<u32>,
    /// Seconds for which the gate has to pass without a break before the change goes on, 10 to 86400. Default: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400))]
    pub seconds: Option<u32>,
    /// What has to be as good as in the older replicas: the canary's gate.
    pub analysis: AnalysisSpec,
}

/// The gate of a canary; at least one of its parts.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.prompts) || has(self.traffic)").message(
    "rollout.canary.analysis: a canary without a gate would stop nothing; add prompts: {} (answers are compared), traffic: {} (errors and latencies are) or both, or remove rollout.canary"
))]
pub struct AnalysisSpec {
    /// Compare what old and new replica make of the same prompts. Not for a change to a model that shall answer otherwise. Default: not
    /// compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompts: Option<PromptsSpec>,
    /// Compare errors, TTFT and ITL of the requests that both get. Default: not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<TrafficSpec>,
}

/// A fixed set of prompts that an old replica and the new one continue greedily.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PromptsSpec {
    /// How far the log-probabilities of the old replica's tokens may be from those that the new one gives them, in the mean and in
    /// nats, 0.001 to 10. Default: 0.1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0.001 && self <= 10.0").message(
        "rollout.canary.analysis.prompts.maxMeanDrift: from 0.001 to 10 nats; no two builds compute all the same, so leave rounding room"
    ))]
    pub max_mean_drift: Option<f64>,
    /// The prompts, 1 to 16 texts of at most 4096 characters, continued as they are, without a chat template. Default: eight short ones
    /// of prose, code, numbers and several languages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16), schema_with = "texts_schema")]
    pub texts: Option<Vec<String>>,
}

/// How much worse the new replica may treat requests than the old ones.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrafficSpec {
    /// Requests of the new replica and of the old ones that must have been timed before latencies are compared, 1 to 100000; while there
    /// are fewer, prompts alone decide if they are compared, else the change waits. Default: 50.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub min_requests: Option<u32>,
    /// Highest time to first token, as a multiple of the old replicas', 1.05 to 100. Default: 1.5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1.05 && self <= 100.0").message(
        "rollout.canary.analysis.traffic.maxTtftRatio: from 1.05 to 100; equal replicas differ by a few percent"
    ))]
    pub max_ttft_ratio: Option<f64>,
    /// Highest inter-token latency, as a multiple of the old replicas', 1.05 to 100. Default: 1.5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 1.05 && self <= 100.0").message(
        "rollout.canary.analysis.traffic.maxItlRatio: from 1.05 to 100; equal replicas differ by a few percent"
    ))]
    pub max_itl_ratio: Option<f64>,
    /// Percent of requests that may end in an error beyond the old replicas' percent, 0.1 to 100. Default: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("self >= 0.1 && self <= 100.0").message(
        "rollout.canary.analysis.traffic.maxErrorPercent: from 0.1 to 100 percent"
    ))]
    pub max_error_percent: Option<f64>,
}

/// A list of texts whose length is bounded.
fn texts_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 4096},
    })
}
