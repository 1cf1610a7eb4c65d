//! Why a reading does not count: words for people, names for records.

use serde::{Deserialize, Serialize};

/// Why an answer is not believed.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Absurdity {
    /// Not a load report at all.
    NotAReport,
    /// A number that is negative or not finite.
    NotANumber,
    /// Costs of steps below zero or endless, or a step that takes no time: nothing can be reckoned with them.
    Costs,
    /// Block counts that do not add up, or no blocks in a replica that is ready.
    Blocks,
    /// More requests than any replica holds.
    Requests,
    /// No later than the answer before it, by the agent's own uptime: not made for this question. Records of before
    /// compared wall clocks and named two such cases.
    #[serde(alias = "future", alias = "past")]
    Repeated,
    /// A counter that went down within one process.
    CounterWentBack,
    /// Another revision than the replica's pod.
    Revision,
    /// A phase in which no load is served.
    Phase,
    /// Its process ended since it was last believed.
    Down,
    /// It takes clients and has nothing where its load would be read: an agent of an older release, or none.
    OlderAgent,
    /// It speaks a protocol that is to come.
    NewerAgent,
}

impl Absurdity {
    /// What such a replica does, after its name.
    pub fn words(self) -> &'static str {
        match self {
            Self::NotAReport => "answered something that is no load report",
            Self::NotANumber => "reported a negative or endless number",
            Self::Costs => "reported costs of steps that cannot be",
            Self::Blocks => "reported blocks that do not add up",
            Self::Requests => "reported more requests than a replica holds",
            Self::Repeated => "repeated an answer of before",
            Self::CounterWentBack => "reported a counter that went back",
            Self::Revision => "runs another revision than its pod",
            Self::Phase => "serves no load in its phase",
            Self::Down => "does not run, or was just started again",
            Self::OlderAgent => "runs an agent of an older release, which does not say its load",
            Self::NewerAgent => "runs an agent of a newer release, whose protocol is not known here",
        }
    }
}

/// Why a replica does not count as fresh, for people and records.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum NotFresh {
    /// Believed once, too long ago.
    #[serde(rename_all = "camelCase")]
    Stale {
        /// How long ago the last believed answer was.
        age_ms: u64,
    },
    /// The last answer contradicts itself or what is known.
    Absurd {
        /// What is wrong with it.
        why: Absurdity,
    },
    /// Never answered.
    Missing,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_before_are_still_read() {
        for word in ["future", "past", "repeated"] {
            let read: Absurdity = serde_json::from_str(&format!("\"{word}\"")).unwrap();
            assert_eq!(read, Absurdity::Repeated, "{word}");
        }
    }
}
