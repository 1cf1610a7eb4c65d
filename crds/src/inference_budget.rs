//! `InferenceBudget`: how many GPUs the deployments of a namespace may have, and in which order namespaces get theirs.
//!
//! One in a namespace, of a fixed name, so that two can never disagree; priorities are numbers, so that they have an order. Nothing
//! here decides.

#![expect(unreachable_pub, reason = "the schema derive repeats each struct, `pub` included, inside a private scope")]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The name of every budget.
pub const BUDGET_NAME: &str = "default";

/// GPUs of a namespace.
#[derive(Clone, CustomResource, Debug, Deserialize, KubeSchema, PartialEq, Serialize)]
#[kube(
    group = "stoker.dev",
    version = "v1alpha1",
    kind = "InferenceBudget",
    plural = "inferencebudgets",
    singular = "inferencebudget",
    shortname = "infb",
    namespaced,
    status = "InferenceBudgetStatus",
    derive = "PartialEq",
    doc = "InferenceBudget says how many GPUs the InferenceDeployments of its namespace may have together. A namespace without one is not limited. Its name is always default.",
    printcolumn(name = "GPUs", type_ = "integer", json_path = ".spec.gpus"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(name = "Wanted", type_ = "integer", json_path = ".status.wantedGpus"),
    printcolumn(name = "Granted", type_ = "integer", json_path = ".status.grantedGpus"),
    printcolumn(name = "Borrowed", type_ = "integer", json_path = ".status.borrowedGpus"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name == 'default'").message(
        "metadata.name: a namespace has one InferenceBudget and its name is default; change that one"
    ),
    validation = Rule::new("self.spec.gpus > 0 || has(self.spec.borrowing)").message(
        "spec.gpus: 0 GPUs without spec.borrowing let nothing run; set gpus to at least 1, or borrowing: {} to run on what others leave. To stop what runs, set its replicas or scaling.max to 0"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct InferenceBudgetSpec {
    /// GPUs that replicas of the namespace's deployments may have by right, of any kind, 0 to 100000.
    #[schemars(range(min = 0, max = 100_000))]
    pub gpus: u32,
    /// Whose claim goes first, the higher number: when GPUs that nobody uses are lent, and when a namespace whose own GPUs are lent
    /// wants them back, which it gets from namespaces of a lower priority only. -1000 to 1000. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: Option<i32>,
    /// Lets the namespace have GPUs of other budgets while these do not use them. Default: it does not; its own are lent to others
    /// in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borrowing: Option<BorrowingSpec>,
}

/// What may be borrowed.
#[derive(Clone, Debug, Default, Deserialize, KubeSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct BorrowingSpec {
    /// GPUs beyond `gpus` at most, 1 to 100000. Default: as many as others leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub max_gpus: Option<u32>,
}

/// What became of a budget. Written by the operator alone.
#[derive(Clone, Debug, Default, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InferenceBudgetStatus {
    /// Generation of the spec that this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// GPUs that the namespace's deployments want.
    #[serde(default)]
    pub wanted_gpus: i64,
    /// GPUs that they were granted.
    #[serde(default)]
    pub granted_gpus: i64,
    /// Of these, GPUs beyond its own.
    #[serde(default)]
    pub borrowed_gpus: i64,
    /// Deployments that want more than they were granted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<String>,
}
