//! What gateways tell each other: how much each has on which replica, and what it sent there. Plain serde, no clock, no I/O.
//!
//! `GET /v1/in-flight` on a gateway's port is answered by a stream of lines, each an [`InFlight`] in JSON: first of all replicas on which
//! it has something, then of those where that changed, as it is from then on, and now and then of none. It ends when the gateway leaves:
//! whoever does not hear it any more knows nothing of it. Prompts are told once: who was away does not hear of those meanwhile.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

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
    /// Prompts that were sent since the line before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prompts: Vec<SentPrompt>,
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

/// A prompt that a gateway sent to a replica.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SentPrompt {
    /// UID of its pod.
    pub uid: String,
    /// Of its beginnings, the shortest first; `NAME NAME …`, in hexadecimal, as in [`KvEvent`](crate::kv_events::KvEvent)s.
    #[serde(serialize_with = "write_names", deserialize_with = "read_names")]
    pub names: Vec<u64>,
    /// Bytes of it that the replica has to compute.
    pub new_bytes: u32,
}

fn write_names<S: Serializer>(names: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
    let names: Vec<String> = names.iter().map(|name| format!("{name:016x}")).collect();
    serializer.serialize_str(&names.join(" "))
}

fn read_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    let names = String::deserialize(deserializer)?;
    let name = |name| u64::from_str_radix(name, 16).map_err(|_| D::Error::custom(format!("{name:?} is no name")));
    names.split_ascii_whitespace().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_is_where() {
        let replica = ReplicaInFlight { uid: "u".into(), requests: 3, prefill_tokens: 700 };
        let mut line = InFlight { gateway: "g".into(), replicas: vec![replica], prompts: vec![] };
        let text = serde_json::to_string(&line).unwrap();
        assert_eq!(text, r#"{"gateway":"g","replicas":[{"uid":"u","requests":3,"prefillTokens":700}]}"#);
        assert_eq!(serde_json::from_str::<InFlight>(&text).unwrap(), line);
        line.prompts.push(SentPrompt { uid: "u".into(), names: vec![255, u64::MAX], new_bytes: 80 });
        let prompt = r#"{"uid":"u","names":"00000000000000ff ffffffffffffffff","newBytes":80}"#;
        let text = serde_json::to_string(&line).unwrap();
        assert!(text.ends_with(&format!(r#","prompts":[{prompt}]}}"#)), "{text}");
        assert_eq!(serde_json::from_str::<InFlight>(&text).unwrap(), line);
        let no_name = prompt.replace("ff ", "xy ");
        assert!(serde_json::from_str::<SentPrompt>(&no_name).unwrap_err().to_string().contains("is no name"));
    }
}
