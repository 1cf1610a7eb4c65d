//! Where a gateway would send a request, and what its choice sees of each replica: the answer to a request with `x-stoker-route: dry-run`.
//! Words are those of docs/gateway.md.
//!
//! Plain serde, no clock, no I/O.

use serde::{Deserialize, Serialize};

/// The header by which a request asks about its route.
pub const ROUTE_HEADER: &str = "x-stoker-route";
/// Its value: the reasons come in the same header of the answer.
pub const EXPLAIN: &str = "explain";
/// Its value: the request is sent to nobody.
pub const DRY_RUN: &str = "dry-run";

/// Where a request would go now.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ForeseenRoute {
    /// `NAME.NAMESPACE` of the InferenceDeployment that it is for.
    pub deployment: String,
    /// Tokens of its prompt, as the gateway counts them.
    pub prompt_tokens: u32,
    /// The pod; `None`: nobody takes requests.
    pub replica: Option<String>,
    /// Why that one.
    pub reason: Option<String>,
    /// All that the gateway knows of, those that take no requests last.
    pub replicas: Vec<ForeseenReplica>,
}

/// A replica.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ForeseenReplica {
    /// Its pod.
    pub pod: String,
    /// Whether it serves, and if not why.
    pub state: String,
    /// The request would go there.
    pub chosen: bool,
    /// What the choice sees of it; `None` of one that takes no requests.
    #[serde(flatten)]
    pub seen: Option<SeenReplica>,
}

/// What a choice sees of a replica.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SeenReplica {
    /// `fits`, or why it is left out.
    pub standing: String,
    /// How it is known what of the prompt it holds: `exact`, `predicted`, or `none` is held.
    pub prefix: String,
    /// Tokens of the prompt that it holds.
    pub cached_tokens: u32,
    /// Tokens of the prompt that it would have to compute.
    pub uncached_tokens: u32,
    /// Tokens of other prompts that come first.
    pub waiting_tokens: u64,
    /// Requests there.
    pub requests: u32,
    /// Share of its KV blocks in use, to three places.
    pub kv_share: f64,
    /// Its load is not older than gateways believe.
    pub load_is_fresh: bool,
    /// Its weight in hundredths, beside others.
    pub weight: u32,
    /// All of it, in tokens that wait: the least is chosen.
    pub cost: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_no_requests_has_a_state_and_nothing_else() {
        let text = r#"{"pod":"a","state":"starting","chosen":false}"#;
        let replica: ForeseenReplica = serde_json::from_str(text).unwrap();
        assert_eq!(replica.seen, None);
        assert_eq!(serde_json::to_string(&replica).unwrap(), text);
    }
}
