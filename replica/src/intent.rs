//! What the operator wants of a replica, as it is kept on the replica's pod: a number, serve or drain, and since when.
//!
//! The annotation is the only memory: whoever leads next reads it there. It is raised under the pod's resource version, so
//! two operators cannot give one number to two intents; the probe sends it until the agent echoes its number.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use stoker_crds::{
    contract::LoadReport,
    intent::{Order, Want},
};

/// How long an order holds after the reading that it answers, by the agent's uptime.
const ORDER_HOLDS_MS: u64 = 30_000;

/// See the module.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Intent {
    /// Rises with every change.
    pub number: u64,
    /// What the replica should do.
    pub want: Want,
    /// Since when it should.
    pub since: Timestamp,
}

impl Intent {
    /// The intent that an annotation says. Words that nobody understands are none: the next one is numbered after what the
    /// agent echoes.
    pub fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }

    /// Since when the replica drains, if it should.
    pub fn drain_since(&self) -> Option<Timestamp> {
        match self.want {
            Want::Drain(_) => Some(self.since),
            Want::Serve => None,
        }
    }

    /// As the annotation carries it.
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("an intent is JSON")
    }

    /// True when the agent that reports this took the intent, or a later one.
    pub fn is_known_to(&self, report: &LoadReport) -> bool {
        report.intent >= Some(self.number)
    }

    /// The order for the process that gave `report`.
    pub fn order(&self, pod_uid: &str, report: &LoadReport) -> Order {
        Order {
            pod_uid: pod_uid.to_owned(),
            start_id: report.start_id.clone(),
            number: self.number,
            want: self.want,
            expires_up_ms: report.up_ms.saturating_add(ORDER_HOLDS_MS),
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::contract::DrainSettings;

    use super::*;

    #[test]
    fn an_intent_is_the_same_after_its_way_through_the_annotation() {
        let want = Want::Drain(DrainSettings { deadline_seconds: 60, withdraw_seconds: 3 });
        let intent = Intent { number: 4, want, since: "2026-11-22T10:00:00Z".parse().unwrap() };
        assert_eq!(Intent::parse(&intent.to_text()), Some(intent));
        assert_eq!(intent.drain_since(), Some(intent.since));
        assert_eq!(Intent::parse("{"), None);
    }

    #[test]
    fn an_agent_knows_an_intent_once_it_echoes_its_number_or_a_higher_one() {
        let intent = Intent { number: 4, want: Want::Serve, since: Timestamp::UNIX_EPOCH };
        let known = [None, Some(3), Some(4), Some(5)]
            .map(|echo| intent.is_known_to(&LoadReport { intent: echo, ..LoadReport::idle(1) }));
        assert_eq!(known, [false, false, true, true]);
    }
}
