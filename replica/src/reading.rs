//! A replica's load as it counts at one moment: a [`Judge`] and the time it was asked at, as a value.

use stoker_crds::contract::{AgentPhase, LoadReport};

use crate::{
    absurdity::{Absurdity, NotFresh},
    judge::{Answer, Expected, Judge, OtherRelease},
};

/// See the module. The default was never asked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    judge: Judge,
    now_ms: u64,
}

/// How a reading counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sight<'a> {
    /// Believed, a moment ago.
    Fresh(&'a LoadReport),
    /// Believed once, too long ago.
    Stale {
        /// How long ago.
        age_ms: u64,
    },
    /// The last answer contradicts itself or what is known.
    Absurd(Absurdity),
    /// Asked, and never answered.
    Missing,
    /// Not asked yet.
    Unread,
}

impl<'a> Sight<'a> {
    /// The load of a replica that should serve, or why it does not count.
    pub fn serving(self) -> Result<&'a LoadReport, NotFresh> {
        match self {
            Self::Fresh(report) if report.phase == AgentPhase::Ready => Ok(report),
            Self::Fresh(_) => Err(NotFresh::Absurd { why: Absurdity::Phase }),
            Self::Stale { age_ms } => Err(NotFresh::Stale { age_ms }),
            Self::Absurd(why) => Err(NotFresh::Absurd { why }),
            Self::Missing | Self::Unread => Err(NotFresh::Missing),
        }
    }

    /// One word, for metrics.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Fresh(_) => "fresh",
            Self::Stale { .. } => "stale",
            Self::Absurd(_) => "absurd",
            Self::Missing => "missing",
            Self::Unread => "unread",
        }
    }
}

impl Reading {
    pub(crate) fn new(judge: Judge, now_ms: u64) -> Self {
        Self { judge, now_ms }
    }

    /// A reading in which this report just arrived from an agent of this revision.
    pub fn of(report: &LoadReport) -> Self {
        Self::default().after(Answer::Report(report), &report.revision)
    }

    /// A reading of an agent that never answered.
    pub fn missing() -> Self {
        Self::default().after(Answer::Silence, "")
    }

    /// A reading of an agent that takes clients and has no load to read.
    pub fn of_older_agent() -> Self {
        Self::default().after(Answer::OlderAgent, "")
    }

    fn after(mut self, answer: Answer<'_>, revision: &str) -> Self {
        self.judge.hear(answer, Expected { revision, now_ms: self.now_ms });
        self
    }

    /// How it counts.
    pub fn sight(&self) -> Sight<'_> {
        self.judge.sight(self.now_ms)
    }

    /// The report, if it can be trusted.
    pub fn report(&self) -> Option<&LoadReport> {
        match self.sight() {
            Sight::Fresh(report) => Some(report),
            Sight::Stale { .. } | Sight::Absurd(_) | Sight::Missing | Sight::Unread => None,
        }
    }

    /// Of which other release its agent is.
    pub fn other_release(&self) -> Option<OtherRelease> {
        self.judge.other_release()
    }

    /// Preemptions within the last minute.
    pub fn preemptions_last_minute(&self) -> u64 {
        self.judge.preemptions_last_minute()
    }

    /// Tokens generated a second, over the last seconds; `None` until there were some readings.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.judge.tokens_per_second()
    }

    /// What it was made from, for who goes on judging.
    pub fn judge(&self) -> &Judge {
        &self.judge
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_ready_replica_has_load_that_counts() {
        let of = |phase| Reading::of(&LoadReport { phase, ..LoadReport::idle(10) });
        assert!(of(AgentPhase::Ready).sight().serving().is_ok());
        let draining = of(AgentPhase::Draining);
        assert!(draining.report().is_some(), "a rollout looks at it all the same");
        assert_eq!(draining.sight().serving(), Err(NotFresh::Absurd { why: Absurdity::Phase }));
        assert_eq!(Reading::missing().sight().serving(), Err(NotFresh::Missing));
        assert_eq!(Reading::default().sight(), Sight::Unread);
    }
}
