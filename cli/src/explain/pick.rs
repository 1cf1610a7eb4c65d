//! Which of the recorded decisions were asked for. Pure.

use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use jiff::{SignedDuration, Timestamp};
use stoker_scaling::DecisionRecord;

/// A moment, as a person writes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum At {
    /// On the clock.
    Moment(Timestamp),
    /// This long ago.
    Ago(SignedDuration),
}

impl At {
    /// Unix time in milliseconds.
    pub(crate) fn ms(self, now: Timestamp) -> u64 {
        let moment = match self {
            Self::Moment(moment) => moment,
            Self::Ago(ago) => now - ago,
        };
        u64::try_from(moment.as_millisecond()).unwrap_or(0)
    }
}

impl FromStr for At {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let moment = text.parse().map(Self::Moment);
        let ago = || text.parse::<SignedDuration>().ok().filter(|ago| ago.is_positive()).map(Self::Ago);
        moment.ok().or_else(ago).ok_or_else(|| "write 2026-01-31T12:00:00Z, or 10m for ten minutes ago".to_owned())
    }
}

/// Which ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pick {
    /// Every one.
    All,
    /// The last few.
    Last(usize),
    /// The last one made at or before this Unix time in milliseconds.
    InForceAt(u64),
}

/// The records asked for, oldest first; at least one.
pub(super) fn picked(records: &[DecisionRecord], pick: Pick, changes_only: bool) -> Result<Vec<&DecisionRecord>> {
    let is_asked_for = |record: &&DecisionRecord| !changes_only || record.decision.desired != record.decision.previous;
    let all: Vec<_> = records.iter().filter(is_asked_for).collect();
    ensure!(!all.is_empty(), "none of the {} recorded decisions changed the number", records.len());
    match pick {
        Pick::All => Ok(all),
        Pick::Last(n) => Ok(all[all.len().saturating_sub(n)..].to_vec()),
        Pick::InForceAt(at_ms) => match all.iter().rev().find(|record| record.at_ms <= at_ms) {
            Some(record) => Ok(vec![*record]),
            None => bail!("the oldest record is of {}", time(all[0].at_ms).context("a record without a time")?),
        },
    }
}

/// The moment of a Unix time in milliseconds.
pub(super) fn time(at_ms: u64) -> Option<Timestamp> {
    Timestamp::from_millisecond(i64::try_from(at_ms).ok()?).ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use stoker_scaling::{LoadWindow, ScaleState, ScalingSpec, decide_scale};

    /// Records at these times; the second changes the number.
    pub(in crate::explain) fn records() -> Vec<DecisionRecord> {
        let spec = ScalingSpec::between(1, 4);
        let record = |at_ms: u64, from: u32| {
            let state = ScaleState::starting_at(from);
            let mut record =
                DecisionRecord::new(&spec, &state, decide_scale(&spec, &LoadWindow::default(), &state, at_ms), at_ms);
            record.decision.previous = from;
            record.decision.desired = if at_ms == 20 { from + 1 } else { from };
            record
        };
        vec![record(10, 1), record(20, 1), record(30, 2)]
    }

    fn times(pick: Pick, changes_only: bool) -> Vec<u64> {
        picked(&records(), pick, changes_only).unwrap().iter().map(|record| record.at_ms).collect()
    }

    #[test]
    fn the_last_ones_and_those_that_changed_something_are_found() {
        assert_eq!(times(Pick::Last(1), false), [30]);
        assert_eq!(times(Pick::Last(2), false), [20, 30]);
        assert_eq!(times(Pick::Last(9), false), [10, 20, 30]);
        assert_eq!(times(Pick::All, true), [20]);
        assert!(picked(&records()[..1], Pick::All, true).unwrap_err().to_string().contains("none of the 1"));
    }

    #[test]
    fn the_decision_in_force_is_the_last_one_before() {
        assert_eq!(times(Pick::InForceAt(29), false), [20]);
        assert_eq!(times(Pick::InForceAt(30), false), [30]);
        let early = picked(&records(), Pick::InForceAt(9), false).unwrap_err().to_string();
        assert!(early.contains("1970-01-01T00:00:00.01Z"), "{early}");
    }

    #[test]
    fn a_moment_is_written_by_the_clock_or_as_ago() {
        let now: Timestamp = "2026-01-31T12:10:00Z".parse().unwrap();
        let ms = |text: &str| text.parse::<At>().map(|at| at.ms(now));
        assert_eq!(ms("10m"), ms("2026-01-31T12:00:00Z"));
        assert_eq!(ms("1h 10m"), ms("2026-01-31T11:00:00+00:00"));
        for text in ["", "yesterday", "-10m", "12:00"] {
            assert!(ms(text).is_err(), "{text}");
        }
    }
}
