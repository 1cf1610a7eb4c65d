//! `status.scaling`: how many replicas are wanted, who says so, and the last decisions in short.
//!
//! Coarse on purpose, and bounded in bytes: full records with every input are served by the operator, see
//! [`RECORDS_PATH`]. Written by the operator alone; nothing here decides.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::scaling::ScalingMode;

/// Where the operator serves full decision records: `RECORDS_PATH/NAMESPACE/NAME`, one JSON object a line, oldest first.
/// `?after=MS` leaves out records made at or before that Unix time in milliseconds.
pub const RECORDS_PATH: &str = "/v1/scaling";
/// Short decisions kept in the status at most.
pub const DECISIONS_KEPT: usize = 20;

/// How many replicas are wanted, and why.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ScalingStatus {
    /// Who acts on decisions, as in the spec.
    pub mode: ScalingMode,
    /// Replicas that the operator works towards. Mode native: what the last decision wanted; otherwise `spec.replicas`.
    pub desired: i32,
    /// Serving replicas whose reading was fresh at the last decision, of all serving ones, as "3/3".
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub coverage: String,
    /// Requests that gateways hold while no replica serves, as of the last look worth writing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub held: i32,
    /// The last decision worth writing: it changed the number, its cause or its bound, or the pressure moved by a fifth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<DecisionStatus>,
    /// Decisions that changed the number, oldest first, at most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub decisions: Vec<DecisionStatus>,
    /// What the next decision needs of the last ones, as JSON: lets another operator go on without a jump.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub state: String,
}

fn is_zero(count: &i32) -> bool {
    *count == 0
}

/// One decision in short.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DecisionStatus {
    /// When it was made.
    pub at: Time,
    /// Replicas wanted before.
    pub from: i32,
    /// Replicas wanted from then on.
    pub to: i32,
    /// Largest term over the serving replicas, in percent.
    pub pressure_percent: i32,
    /// The term that wanted most: arrivals, kv, queue, preemptions, ttft, itl, held, or none.
    pub cause: String,
    /// What kept the number from what load alone wants, or nothing.
    pub bound: String,
    /// Serving replicas whose reading was fresh, of all serving ones, as "3/3".
    pub coverage: String,
}
