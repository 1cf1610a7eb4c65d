//! What gateways tell each other: how much each has on which replica. Plain serde, no clock, no I/O.
//!
//! `GET /v1/in-flight` on a gateway's port is answered by a stream of lines, each an [`InFlight`] in JSON: first of all replicas on which
//! it has something, then of those where that changed, as it is from then on, and now and then of none. It ends when the gateway leaves:
//! whoever does not hear it any more knows nothing of it.

use serde::{Deserialize, Serialize};

/// Path of the stream on each port of a gateway.
pub const IN_FLIGHT_PATH: &str = "/v1/in-flight";
/// Without a change so many seconds pass before a line says that the gateway is there.
pub const ALIVE_SECONDS: u64 = 5;

/// A line.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InFlight {
    /// Which gateway says so: a process's own word, by which it knows itself.
    pub gateway: String,
    /// Replicas of which there is something to say.
    pub replicas: Vec<ReplicaInFlight>,
}

/// What a gateway has on a replica.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaInFlight {
    /// UID of its pod.
    pub uid: String,
    /// Requests that were sent and have not ended.
    pub requests: u32,
    /// Tokens of the prompts of which nothing has come back, without what is thought to be cached there.
    pub prefill_tokens: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_where() {
        let replica = ReplicaInFlight { uid: "u".into(), requests: 3, prefill_tokens: 700 };
        let line = InFlight { gateway: "g".into(), replicas: vec![replica] };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"gateway":"g","replicas":[{"uid":"u","requests":3,"prefillTokens":700}]}"#);
        assert_eq!(serde_json::from_str::<InFlight>(&text).unwrap(), line);
    }
}
