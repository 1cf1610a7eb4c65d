//! What the operator tells gateways: where replicas are, what they serve and how they are. Plain serde, no clock, no I/O.
//!
//! One document says all, and has a number that rises with every change. `GET /v1/endpoints?source=S&after=N&wait=SECONDS` is answered
//! as soon as there is another document than number N of source S, or after the wait with the one that there is. So nothing can be
//! lost on the way, and whoever was away goes on with what is.

use serde::{Deserialize, Serialize};

use crate::contract::{AgentPhase, LoadReport};

/// Path of the document on the operator's port.
pub const ENDPOINTS_PATH: &str = "/v1/endpoints";
/// Path of what all replicas say at this moment, for people who look.
pub const FLEET_PATH: &str = "/v1/fleet";
/// Path on each port of a gateway of what waits there.
pub const LINES_PATH: &str = "/v1/lines";
/// Longest wait for a change, in seconds. Common proxies give up a silent server after 60.
pub const WAIT_SECONDS_MAX: u64 = 30;
/// Weight of a replica that takes a whole replica's part.
pub const WHOLE_WEIGHT: u32 = 100;

/// All replicas of all deployments.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoints {
    /// Who numbers: another process counts from the beginning.
    pub source: String,
    /// Higher in every document of a source than in the one before.
    pub number: u64,
    /// `IP:PORT` of every gateway, on a port without TLS: they tell each other what they have on replicas
    /// ([`IN_FLIGHT_PATH`](crate::in_flight::IN_FLIGHT_PATH)). Who reads it is one of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<String>,
    /// Every deployment, also one without replicas.
    pub deployments: Vec<DeploymentEndpoints>,
}

/// The replicas of a deployment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeploymentEndpoints {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Names that its replicas take in `model`.
    pub models: Vec<String>,
    /// Replicas that it should have.
    pub replicas_wanted: u32,
    /// The port of gateways that its Service leads to: what comes there is for it, whatever host or model it names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Those that it has.
    pub replicas: Vec<ReplicaEndpoint>,
}

/// One replica.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaEndpoint {
    /// Name of its pod.
    pub pod: String,
    /// UID of its pod.
    pub uid: String,
    /// `IP:PORT` of its inference port; nothing before it has one.
    pub address: Option<String>,
    /// `IP:PORT` where it tells what its prefix cache holds ([`KV_EVENTS_PATH`](crate::kv_events::KV_EVENTS_PATH)), if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<String>,
    /// Revision that it runs.
    pub revision: String,
    /// Its part of requests beside others'; [`WHOLE_WEIGHT`] unless something says otherwise.
    pub weight: u32,
    /// Whether it takes requests.
    pub state: EndpointState,
    /// What its agent said last, if that can be believed.
    pub load: Option<EndpointLoad>,
}

/// What a gateway has.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Lines {
    /// Deployments that it has something of.
    pub lines: Vec<Line>,
}

/// What a gateway has of a deployment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Line {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Requests in line.
    pub waiting: u32,
    /// Replicas where it has requests, or that do not answer it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<RoutedReplica>,
}

/// A replica as a gateway sees it.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RoutedReplica {
    /// Name of its pod.
    pub pod: String,
    /// Requests that were sent there and have not ended.
    pub requests: u32,
    /// It should serve and does not answer: nothing is sent there now.
    pub circuit_open: bool,
}

/// What all replicas say at this moment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetLoad {
    /// Every deployment, also one without replicas.
    pub deployments: Vec<DeploymentLoad>,
}

/// What the replicas of a deployment say.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DeploymentLoad {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Replicas that it should have.
    pub replicas_wanted: u32,
    /// Requests in line at gateways; `None` where no gateway says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_line: Option<u32>,
    /// Those that it has.
    pub replicas: Vec<ReplicaLoad>,
}

/// What a replica says.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaLoad {
    /// Name of its pod.
    pub pod: String,
    /// Whether it takes requests.
    pub state: EndpointState,
    /// GPUs that its pod holds: from when the scheduler gave it a node until it is gone.
    #[serde(default)]
    pub gpus: u64,
    /// These, times the seconds for which it has held them.
    #[serde(default)]
    pub gpu_seconds: u64,
    /// Tokens that it generates a second, over the last seconds; `None` until there were some readings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Its whole report, if it can be believed now.
    pub load: Option<LoadReport>,
    /// What all gateways have there, and whether one of them gets no answer; `None` where no gateway says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routed: Option<RoutedReplica>,
}

/// Whether a replica takes requests.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum EndpointState {
    /// On its way.
    Starting,
    /// It does.
    Serving,
    /// It finishes what it has.
    Draining,
    /// It was ready and is not, or has ended.
    Unready,
}

impl EndpointState {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Starting, Self::Serving, Self::Draining, Self::Unready];

    /// One word, for metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Unready => "unready",
        }
    }

    /// What a phase that an agent is in means for requests.
    pub fn of(phase: AgentPhase) -> Self {
        match phase {
            AgentPhase::Loading => Self::Starting,
            AgentPhase::Ready => Self::Serving,
            AgentPhase::Withdrawing | AgentPhase::Draining | AgentPhase::Empty => Self::Draining,
            AgentPhase::Failed => Self::Unready,
        }
    }
}

/// The part of a load report that requests are routed by. It has no age: whoever reads it has a clock of its own, and sees when it changes.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointLoad {
    /// Random per start of the agent: with another one its cache is empty.
    pub start_id: String,
    /// Milliseconds since that start at which this was so.
    pub up_ms: u64,
    /// Sequences being computed.
    pub running: u32,
    /// Requests waiting for their first step.
    pub waiting: u32,
    /// Prompt tokens of waiting requests that need prefill.
    pub waiting_prefill_tokens: u64,
    /// KV blocks in all.
    pub total_blocks: u32,
    /// KV blocks referenced by sequences.
    pub referenced_blocks: u32,
    /// Seconds since the last completed step while work was waiting; 0 when idle.
    pub stalled_seconds: f64,
}

impl From<&LoadReport> for EndpointLoad {
    fn from(report: &LoadReport) -> Self {
        Self {
            start_id: report.start_id.clone(),
            up_ms: report.up_ms,
            running: report.running,
            waiting: report.waiting,
            waiting_prefill_tokens: report.waiting_prefill_tokens,
            total_blocks: report.total_blocks,
            referenced_blocks: report.referenced_blocks,
            stalled_seconds: report.stalled_seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_is_camel_case_and_comes_back() {
        let load = EndpointLoad::from(&LoadReport { running: 3, ..LoadReport::idle(100) });
        let replica = ReplicaEndpoint {
            pod: "chat-abc-0".into(),
            uid: "u".into(),
            address: Some("10.0.0.7:8000".into()),
            events: Some("10.0.0.7:8001".into()),
            revision: "abc".into(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: Some(load),
        };
        let chat = DeploymentEndpoints {
            namespace: "default".into(),
            name: "chat".into(),
            models: vec!["chat".into()],
            replicas_wanted: 1,
            port: Some(10_007),
            replicas: vec![replica],
        };
        let all = Endpoints { source: "s".into(), number: 7, gateways: vec![], deployments: vec![chat] };
        let text = serde_json::to_string(&all).unwrap();
        assert!(text.contains(r#""replicasWanted":1"#) && text.contains(r#""state":"serving""#), "{text}");
        assert_eq!(serde_json::from_str::<Endpoints>(&text).unwrap(), all);
    }

    #[test]
    fn only_a_ready_agent_takes_requests() {
        use AgentPhase::{Draining, Empty, Failed, Loading, Ready, Withdrawing};
        let serving = [Loading, Ready, Withdrawing, Draining, Empty, Failed].map(EndpointState::of);
        assert_eq!(serving.iter().filter(|state| **state == EndpointState::Serving).count(), 1);
    }
}
