//! One reading of one replica's load, judged before anything believes it.
//!
//! Owns the four things a reading can be (fresh, stale, absurd, missing) and why. A [`Load`] exists only if its numbers
//! are finite, consistent, of the expected revision and of the expected process. Never asks anybody: the caller brings
//! the answer and the time.

use serde::{Deserialize, Serialize};
use stoker_crds::contract::{AgentPhase, LoadReport};

/// Readings are taken every two seconds. One may be lost; with the second, within three ticks, sight is called lost.
pub const FRESH_FOR_MS: u64 = 4_100;
/// How far an agent's clock may be ahead of ours before its time is called a lie.
pub const CLOCK_AHEAD_MS_MAX: u64 = 5_000;

/// How far an agent's clock may be behind ours before its answer is taken for an old one.
pub const CLOCK_BEHIND_MS_MAX: u64 = 7_000;

/// What a replica answered when it was last asked.
#[derive(Clone, Copy, Debug)]
pub enum Answer<'a> {
    /// A well-formed load report.
    Report(&'a LoadReport),
    /// Something else: HTML, an error status, half a body.
    NotAReport,
    /// Nothing within the timeout.
    Silence,
    /// Not about what was believed before: its process ended meanwhile.
    Down,
}

/// A reading as it counts at some moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reading<'a> {
    /// Believed.
    Fresh(&'a Load),
    /// Believed once, too long ago.
    Stale {
        /// How long ago.
        age_ms: u64,
    },
    /// The last answer contradicts itself or what is known.
    Absurd(Absurdity),
    /// Never answered.
    Missing,
}

/// Why an answer is not believed.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Absurdity {
    /// Not a load report at all.
    NotAReport,
    /// A number that is negative or not finite.
    NotANumber,
    /// Block counts that do not add up, or no blocks in a serving replica.
    Blocks,
    /// A time further in the future than clocks differ.
    Future,
    /// A time so far in the past that the answer was not made for this question.
    Past,
    /// A counter that went down within one process.
    CounterWentBack,
    /// Another revision than the replica's pod.
    Revision,
    /// A phase in which no load is served.
    Phase,
    /// Its process ended since it was last believed.
    Down,
}

impl Absurdity {
    /// What such a replica does, after its name.
    pub fn words(self) -> &'static str {
        match self {
            Self::NotAReport => "answered something that is no load report",
            Self::NotANumber => "reported a negative or endless number",
            Self::Blocks => "reported blocks that do not add up",
            Self::Future => "reported a time in the future",
            Self::Past => "reported a time long past",
            Self::CounterWentBack => "reported a counter that went back",
            Self::Revision => "runs another revision than its pod",
            Self::Phase => "serves no load in its phase",
            Self::Down => "does not run, or was just started again",
        }
    }
}

/// Why a replica does not count as fresh, for people and records.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum NotFresh {
    /// See [`Reading::Stale`].
    #[serde(rename_all = "camelCase")]
    Stale {
        /// How long ago the last believed answer was.
        age_ms: u64,
    },
    /// See [`Reading::Absurd`].
    Absurd {
        /// What is wrong with it.
        why: Absurdity,
    },
    /// See [`Reading::Missing`].
    Missing,
}

/// The believed part of a load report.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Process the counters belong to.
    pub start_id: String,
    /// KV blocks in all.
    pub total_blocks: u32,
    /// KV blocks referenced by sequences.
    pub referenced_blocks: u32,
    /// Sequences being computed.
    pub running: u32,
    /// Requests waiting for their first step.
    pub waiting: u32,
    /// Prompt tokens of waiting requests that still need prefill.
    pub waiting_prefill_tokens: u64,
    /// Preemptions since the process started.
    pub preemptions: u64,
    /// Requests that ended since the process started.
    pub finished: u64,
    /// 95th percentile of the time to first token, seconds.
    pub ttft_p95_seconds: Option<f64>,
    /// 95th percentile of the inter-token latency, seconds.
    pub itl_p95_seconds: Option<f64>,
    /// Prefill speed, tokens per second.
    pub prefill_tokens_per_second: Option<f64>,
}

/// What is known about a replica apart from what it says.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// Revision of the replica's pod.
    pub revision: &'a str,
    /// When the answer arrived, by our clock.
    pub now_ms: u64,
}

impl Load {
    /// Believes a report, or says why not. `before` is the last believed load of the same replica.
    pub fn believe(report: &LoadReport, before: Option<&Load>, expected: Expected<'_>) -> Result<Self, Absurdity> {
        believe_origin(report, expected)?;
        believe_numbers(report)?;
        if let Some(before) = before.filter(|before| before.start_id == report.start_id) {
            let went_back = report.preemptions < before.preemptions || report.finished < before.finished;
            if went_back {
                return Err(Absurdity::CounterWentBack);
            }
        }
        Ok(Self {
            start_id: report.start_id.clone(),
            total_blocks: report.total_blocks,
            referenced_blocks: report.referenced_blocks,
            running: report.running,
            waiting: report.waiting,
            waiting_prefill_tokens: report.waiting_prefill_tokens,
            preemptions: report.preemptions,
            finished: report.finished,
            ttft_p95_seconds: report.ttft_p95_seconds,
            itl_p95_seconds: report.itl_p95_seconds,
            prefill_tokens_per_second: report.prefill_tokens_per_second.filter(|rate| *rate > 0.0),
        })
    }
}

fn believe_origin(report: &LoadReport, expected: Expected<'_>) -> Result<(), Absurdity> {
    if report.revision != expected.revision {
        return Err(Absurdity::Revision);
    }
    if report.time_ms > expected.now_ms.saturating_add(CLOCK_AHEAD_MS_MAX) {
        return Err(Absurdity::Future);
    }
    if report.time_ms.saturating_add(CLOCK_BEHIND_MS_MAX) < expected.now_ms {
        return Err(Absurdity::Past);
    }
    if report.phase != AgentPhase::Ready {
        return Err(Absurdity::Phase);
    }
    Ok(())
}

fn believe_numbers(report: &LoadReport) -> Result<(), Absurdity> {
    let optional = [report.ttft_p95_seconds, report.itl_p95_seconds, report.prefill_tokens_per_second];
    let numbers = optional.into_iter().flatten().chain([report.stalled_seconds, report.load_progress]);
    if numbers.into_iter().any(|number| !number.is_finite() || number < 0.0) {
        return Err(Absurdity::NotANumber);
    }
    let parts = [report.referenced_blocks, report.cached_blocks, report.free_blocks];
    let sum: u64 = parts.into_iter().map(u64::from).sum();
    if report.total_blocks == 0 || sum != u64::from(report.total_blocks) {
        return Err(Absurdity::Blocks);
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report() -> LoadReport {
        LoadReport {
            time_ms: 100_000,
            start_id: "a".to_owned(),
            revision: "r1".to_owned(),
            running: 10,
            waiting: 2,
            waiting_prefill_tokens: 320,
            referenced_blocks: 400,
            cached_blocks: 100,
            free_blocks: 500,
            preemptions: 3,
            finished: 50,
            ttft_p95_seconds: Some(0.2),
            prefill_tokens_per_second: Some(5000.0),
            ..LoadReport::idle(1000)
        }
    }

    fn check(change: impl Fn(&mut LoadReport), expected: Result<(), Absurdity>) {
        let mut changed = report();
        change(&mut changed);
        let known = Expected { revision: "r1", now_ms: 100_000 };
        let before = Load::believe(&report(), None, known).unwrap();
        assert_eq!(Load::believe(&changed, Some(&before), known).map(|_| ()), expected);
    }

    #[test]
    fn a_consistent_report_is_believed() {
        check(|_| {}, Ok(()));
        check(|report| report.time_ms += CLOCK_AHEAD_MS_MAX, Ok(()));
        check(|report| report.time_ms -= CLOCK_BEHIND_MS_MAX, Ok(()));
    }

    #[test]
    fn each_lie_has_its_name() {
        check(|report| report.revision = "r2".to_owned(), Err(Absurdity::Revision));
        check(|report| report.time_ms += CLOCK_AHEAD_MS_MAX + 1, Err(Absurdity::Future));
        check(|report| report.time_ms -= CLOCK_BEHIND_MS_MAX + 1, Err(Absurdity::Past));
        check(|report| report.phase = AgentPhase::Loading, Err(Absurdity::Phase));
        check(|report| report.ttft_p95_seconds = Some(f64::NAN), Err(Absurdity::NotANumber));
        check(|report| report.itl_p95_seconds = Some(-0.1), Err(Absurdity::NotANumber));
        check(|report| report.stalled_seconds = f64::INFINITY, Err(Absurdity::NotANumber));
        check(|report| report.free_blocks = 400, Err(Absurdity::Blocks));
        check(|report| report.finished = 49, Err(Absurdity::CounterWentBack));
        check(|report| report.preemptions = 2, Err(Absurdity::CounterWentBack));
    }

    #[test]
    fn a_replica_without_blocks_cannot_serve() {
        let empty = |report: &mut LoadReport| {
            (report.total_blocks, report.referenced_blocks, report.cached_blocks, report.free_blocks) = (0, 0, 0, 0);
        };
        check(empty, Err(Absurdity::Blocks));
    }

    #[test]
    fn a_new_process_starts_its_counters_again() {
        let restarted = |report: &mut LoadReport| {
            report.start_id = "b".to_owned();
            report.finished = 0;
            report.preemptions = 0;
        };
        check(restarted, Ok(()));
    }
}
