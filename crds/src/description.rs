//! What an agent says of its model and of the memory that it took: the body of `GET /v1/model` on its admin port. It changes when a
//! model is loaded and not otherwise, so it is asked for once and is in no load report.
//!
//! Plain serde, no clock, no I/O.

use serde::{Deserialize, Serialize};

/// Where it is asked for.
pub const DESCRIPTION_PATH: &str = "/v1/model";
/// Bytes of a `config.json` that are told at most: it is kept in an object's status. Published ones take one to two thousand.
pub const CONFIG_BYTES_MAX: usize = 8 * 1024;
/// Bytes of an answer at most.
pub const DESCRIPTION_BYTES_MAX: usize = 4 * CONFIG_BYTES_MAX;

/// A model in one replica.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Description {
    /// Its `config.json`, as text without spaces; `None` before it was read, for models that have none or too long a one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    /// What its engine took; `None` before it serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryReport>,
}

/// Memory of an engine that serves; of one that several GPUs share, of the GPU with the least.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryReport {
    /// Where it computes, as a person reads it.
    pub device: String,
    /// Weights as held.
    pub weights_bytes: u64,
    /// Intermediate results of the largest step.
    pub workspace_bytes: u64,
    /// Tokens that the KV cache holds.
    pub kv_tokens: u64,
    /// Bytes for everything that it might have taken.
    pub limit_bytes: u64,
}
