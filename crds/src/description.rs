//! What an agent says of its model and of the memory that it took: the body of `GET /v1/model` on its admin port. It changes when a
//! model is loaded and not otherwise, so it is asked for once and is in no load report.
//!
//! Plain serde, no clock, no I/O.

use std::{cmp::Reverse, collections::BTreeMap};

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
    /// The same by number formats; empty from agents that do not say.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub weights_by_format: BTreeMap<String, u64>,
    /// Intermediate results of the largest step.
    pub workspace_bytes: u64,
    /// Tokens that the KV cache holds.
    pub kv_tokens: u64,
    /// Bytes of keys and values that each of them takes; 0 from agents that do not say.
    #[serde(default)]
    pub kv_bytes_per_token: u64,
    /// Bytes for everything that it might have taken.
    pub limit_bytes: u64,
}

/// Formats by their share, the largest first: `fp8 81 %, bf16 19 %`; less than half a percent goes without saying, and so does one alone.
pub fn in_shares(held: impl IntoIterator<Item = (impl AsRef<str>, u64)>) -> String {
    let mut held: Vec<(String, u64)> =
        held.into_iter().map(|(format, bytes)| (format.as_ref().to_owned(), bytes)).collect();
    let all: u64 = held.iter().map(|(_, bytes)| bytes).sum();
    held.sort_by_key(|(_, bytes)| Reverse(*bytes));
    let percent = |bytes: u64| (bytes as f64 * 100.0 / all as f64).round();
    match &held[..] {
        [(format, _)] => format.clone(),
        several => {
            let said = several.iter().filter(|(_, bytes)| percent(*bytes) > 0.0);
            said.map(|(format, bytes)| format!("{format} {} %", percent(*bytes))).collect::<Vec<_>>().join(", ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_told_by_their_share_and_one_alone_by_its_name() {
        assert_eq!(in_shares([("bf16", 19), ("fp8", 81)]), "fp8 81 %, bf16 19 %");
        assert_eq!(in_shares([("bf16", 1000), ("f32", 3), ("q8_0", 3000)]), "q8_0 75 %, bf16 25 %");
        assert_eq!(in_shares([("f32", 7)]), "f32");
        assert_eq!(in_shares([("f32", 0); 0]), "");
    }
}
