//! What is printed of decisions. Owns words; the explanation itself is `stoker_scaling::explain`.

use std::fmt;

use stoker_scaling::{DecisionRecord, Replay, ScaleDecision, explain};

use super::pick::time;

/// One decision: when, and why.
pub(super) fn decision(record: &DecisionRecord) -> String {
    let when = time(record.at_ms).map_or_else(|| format!("{} ms", record.at_ms), |moment| moment.to_string());
    format!("{when}\n{}", explain(record))
}

/// What another specification would have decided.
pub(super) fn otherwise(settings: &[String], other: &ScaleDecision) -> String {
    format!("  with {}: {}\n", settings.join(" "), other.desired)
}

/// What came out when records were decided again.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// Each the same, to the last bit.
    Reproduced {
        /// How many.
        count: usize,
    },
    /// One of them is not.
    Different {
        /// When it was made, Unix time in milliseconds.
        at_ms: u64,
        /// Replicas by the record.
        recorded: u32,
        /// Replicas by the replay.
        again: u32,
    },
}

impl Verdict {
    pub(super) fn of(records: &[DecisionRecord]) -> Self {
        let different = records.iter().find_map(|record| match record.replay() {
            Replay::Identical => None,
            Replay::Different { decision } => Some(Self::Different {
                at_ms: record.at_ms,
                recorded: record.decision.desired,
                again: decision.desired,
            }),
        });
        different.unwrap_or(Self::Reproduced { count: records.len() })
    }

    pub(super) fn is_reproduced(&self) -> bool {
        matches!(self, Self::Reproduced { .. })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reproduced { count: 1 } => write!(f, "Decided again from its record: the same, bit for bit."),
            Self::Reproduced { count } => {
                write!(f, "All {count} decisions made again from their records: the same, bit for bit.")
            }
            Self::Different { at_ms, recorded, again } => write!(
                f,
                "NOT REPRODUCED: the record of {} says {recorded} replicas; decided again it is {again} or differs in \
                 what led there. The record was altered, or made by another build.",
                time(*at_ms).map_or_else(|| format!("{at_ms} ms"), |moment| moment.to_string()),
            ),
        }
    }
}
