//! What is printed of decisions. Owns words; the explanation itself is `stoker_scaling::explain`.

use std::{fmt, process::ExitCode};

use jiff::Timestamp;
use stoker_scaling::{DecisionRecord, Replay, ScaleDecision, explain};

use super::pick::time;

/// One decision: when, and why.
pub(super) fn decision(record: &DecisionRecord) -> String {
    let when = time(record.at_ms).map_or_else(|| format!("{} ms", record.at_ms), |moment| moment.to_string());
    format!("{when}\n{}", explain(record))
}

/// A decision as it is made: one line, or the whole explanation when it is another one than before.
pub(super) fn live(before: Option<&DecisionRecord>, record: &DecisionRecord) -> String {
    let gist = |record: &DecisionRecord| {
        let ScaleDecision { desired, cause, bound, .. } = &record.decision;
        (*desired, *cause, *bound)
    };
    if before.map(gist) != Some(gist(record)) {
        return decision(record);
    }
    let explained = explain(record);
    format!("{}  {}", clock(record.at_ms), explained.lines().next().unwrap_or_default())
}

/// The time of day, UTC.
fn clock(at_ms: u64) -> String {
    time(at_ms).map_or_else(|| format!("{at_ms} ms"), |moment| moment.strftime("%H:%M:%S").to_string())
}

/// How long ago, in the largest unit that says enough.
pub(crate) fn ago(moment: Timestamp, now: Timestamp) -> String {
    match now.duration_since(moment).as_secs().max(0) {
        seconds @ ..120 => format!("{seconds}s"),
        seconds @ ..7200 => format!("{}m", seconds / 60),
        seconds @ ..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
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
    pub(super) fn of<'a>(records: impl IntoIterator<Item = &'a DecisionRecord>) -> Self {
        let mut count = 0;
        for record in records {
            if let Replay::Different { decision } = record.replay() {
                let (recorded, again) = (record.decision.desired, decision.desired);
                return Self::Different { at_ms: record.at_ms, recorded, again };
            }
            count += 1;
        }
        Self::Reproduced { count }
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.is_reproduced() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
                write!(f, "All {count} recorded decisions made again: the same, bit for bit.")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::pick::tests::records;

    #[test]
    fn the_same_decision_again_is_one_line_and_another_one_is_explained() {
        let [first, second, _] = &records()[..] else { panic!("three records") };
        let same = DecisionRecord { at_ms: 12_000, ..first.clone() };
        assert!(live(Some(first), &same).starts_with("00:00:12  stays at 1 replica"), "{}", live(Some(first), &same));
        assert_eq!(live(Some(first), &same).lines().count(), 1);
        assert!(live(Some(first), second).contains("1 -> 2 replicas") && live(None, first).lines().count() > 3);
    }

    #[test]
    fn an_altered_record_fails_the_verdict() {
        // The second was altered after it was decided.
        let [honest, altered, _] = &records()[..] else { panic!("three records") };
        let verdict = Verdict::of([honest]);
        assert!(verdict.is_reproduced() && verdict.to_string().contains("bit for bit"), "{verdict}");
        assert_eq!(Verdict::of([honest, altered]), Verdict::Different { at_ms: 20, recorded: 2, again: 1 });
    }

    #[test]
    fn a_while_is_told_in_the_unit_that_says_enough() {
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        let table = [(5, "5s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (200_000, "2d")];
        for (seconds, words) in table {
            assert_eq!(ago(now - jiff::SignedDuration::from_secs(seconds), now), words);
        }
    }
}
