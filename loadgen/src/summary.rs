//! What a run came to: percentiles, rates, failures by kind, goodput. Pure.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::Serialize;

use crate::{
    client::FailureKind,
    run::{Heard, Outcome},
};

/// What makes an answer good. An absent target is met by every answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Targets {
    /// Time to first token, in milliseconds from the planned moment.
    pub ttft_ms: Option<f64>,
    /// Mean time per token after the first, in milliseconds.
    pub itl_ms: Option<f64>,
}

/// Percentiles of one quantity, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Half is at most this.
    pub p50: f64,
    /// Nine tenths are at most this.
    pub p90: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

/// Failures of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failures {
    /// How many.
    pub count: usize,
    /// What the first one said.
    pub first: String,
}

/// Answers that met the targets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// How many.
    pub count: usize,
    /// Of all planned requests, so failures count against it.
    pub share: f64,
    /// Per second of the run.
    pub per_second: f64,
}

/// See the module. Serialized, it is the answer of `stoker-load --json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// From the first planned moment to the last end.
    pub seconds: f64,
    /// Requests that were meant to leave before the run was stopped.
    pub planned: usize,
    /// Complete answers.
    pub answered: usize,
    /// Everything else, by kind.
    pub failures: BTreeMap<String, Failures>,
    /// Complete answers per second.
    pub answered_per_second: f64,
    /// By the server's count.
    pub prompt_tokens: u64,
    /// By the server's count.
    pub completion_tokens: u64,
    /// Per second of the run.
    pub completion_tokens_per_second: f64,
    /// From the planned moment to the first text.
    pub ttft_seconds: Percentiles,
    /// Between pieces of text, over all answers.
    pub itl_seconds: Percentiles,
    /// From the planned moment to the last text.
    pub e2e_seconds: Percentiles,
    /// How late requests left: far above zero, this program was the bottleneck.
    pub send_lag_seconds: Percentiles,
    /// Answers that met the targets.
    pub goodput: Goodput,
}

impl Summary {
    /// Counts the outcomes of a run of this length.
    pub fn of(outcomes: &[Outcome], elapsed: Duration, targets: Targets) -> Self {
        let heard: Vec<&Heard> = outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok()).collect();
        let seconds = elapsed.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let completion_tokens = heard.iter().map(|heard| u64::from(heard.usage.completion_tokens)).sum();
        let good = heard.iter().filter(|heard| targets.are_met(heard)).count();
        Self {
            seconds,
            planned: outcomes.len(),
            answered: heard.len(),
            failures: failures(outcomes),
            answered_per_second: per_second(heard.len() as f64),
            prompt_tokens: heard.iter().map(|heard| u64::from(heard.usage.prompt_tokens)).sum(),
            completion_tokens,
            completion_tokens_per_second: per_second(completion_tokens as f64),
            ttft_seconds: Percentiles::of(heard.iter().map(|heard| heard.ttft)),
            itl_seconds: Percentiles::of(heard.iter().flat_map(|heard| heard.gaps.iter().copied())),
            e2e_seconds: Percentiles::of(heard.iter().map(|heard| heard.e2e)),
            send_lag_seconds: Percentiles::of(sent(outcomes).map(|outcome| outcome.send_lag)),
            goodput: Goodput {
                count: good,
                share: good as f64 / outcomes.len().max(1) as f64,
                per_second: per_second(good as f64),
            },
        }
    }
}

impl Targets {
    /// Whether an answer is good.
    pub fn are_met(self, heard: &Heard) -> bool {
        let within = |time: Duration, target: Option<f64>| target.is_none_or(|ms| time.as_secs_f64() * 1000.0 <= ms);
        within(heard.ttft, self.ttft_ms) && heard.time_per_token().is_none_or(|time| within(time, self.itl_ms))
    }
}

impl Percentiles {
    /// By nearest rank: each is a value that occurred. All zero of nothing.
    pub fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut seconds: Vec<f64> = times.map(|time| time.as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        let rank = |share: f64| {
            let rank = (share * seconds.len() as f64).ceil() as usize;
            seconds.get(rank.saturating_sub(1)).copied().unwrap_or_default()
        };
        Self { p50: rank(0.50), p90: rank(0.90), p99: rank(0.99), max: rank(1.0) }
    }
}

fn sent(outcomes: &[Outcome]) -> impl Iterator<Item = &Outcome> {
    let was_sent =
        |outcome: &&Outcome| outcome.result.as_ref().err().is_none_or(|failure| failure.kind != FailureKind::NotSent);
    outcomes.iter().filter(was_sent)
}

fn failures(outcomes: &[Outcome]) -> BTreeMap<String, Failures> {
    let mut kinds = BTreeMap::new();
    for failure in outcomes.iter().filter_map(|outcome| outcome.result.as_ref().err()) {
        let first = || Failures { count: 0, first: failure.message.clone() };
        kinds.entry(failure.kind.to_string()).or_insert_with(first).count += 1;
    }
    kinds
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, planned, answered, goodput, .. } = self;
        writeln!(
            f,
            "{answered} of {planned} requests answered in {seconds:.1} s, {:.2} per second",
            self.answered_per_second
        )?;
        writeln!(
            f,
            "{} prompt tokens, {} completion tokens, {:.1} per second",
            self.prompt_tokens, self.completion_tokens, self.completion_tokens_per_second
        )?;
        writeln!(f, "\nseconds          p50      p90      p99      max")?;
        let rows = [
            ("ttft", &self.ttft_seconds),
            ("itl", &self.itl_seconds),
            ("e2e", &self.e2e_seconds),
            ("sent late by", &self.send_lag_seconds),
        ];
        for (name, Percentiles { p50, p90, p99, max }) in rows {
            writeln!(f, "{name:<12} {p50:>7.3}  {p90:>7.3}  {p99:>7.3}  {max:>7.3}")?;
        }
        writeln!(
            f,
            "\ngoodput      {} of {planned} ({:.1} %), {:.2} per second",
            goodput.count,
            goodput.share * 100.0,
            goodput.per_second
        )?;
        for (kind, Failures { count, first }) in &self.failures {
            writeln!(f, "failed       {count} {kind}: {first}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{answer::Usage, client::Failure};

    fn heard(ttft_ms: u64, e2e_ms: u64) -> Outcome {
        let usage = Usage { prompt_tokens: 10, completion_tokens: 11 };
        let (ttft, e2e) = (Duration::from_millis(ttft_ms), Duration::from_millis(e2e_ms));
        Outcome {
            planned: None,
            send_lag: Duration::ZERO,
            result: Ok(Heard { ttft, e2e, gaps: vec![(e2e - ttft) / 10; 10], usage }),
        }
    }

    fn failed(kind: FailureKind, message: &str) -> Outcome {
        Outcome { planned: None, send_lag: Duration::ZERO, result: Err(Failure::new(kind, message)) }
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let of = |n: u64| Percentiles::of((1..=n).map(Duration::from_secs));
        assert_eq!(of(100), Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(of(1), Percentiles { p50: 1.0, p90: 1.0, p99: 1.0, max: 1.0 });
        assert_eq!(of(0), Percentiles::default());
        assert_eq!(of(3).p50, 2.0);
    }

    #[test]
    fn goodput_wants_every_target_and_counts_failures_as_planned() {
        let outcomes = [heard(100, 1100), heard(300, 1300), heard(100, 3100), failed(FailureKind::Status(429), "full")];
        let good = |targets| Summary::of(&outcomes, Duration::from_secs(2), targets).goodput;
        let both = Targets { ttft_ms: Some(200.0), itl_ms: Some(150.0) };
        assert_eq!(good(both), Goodput { count: 1, share: 0.25, per_second: 0.5 });
        assert_eq!(good(Targets { itl_ms: None, ..both }).count, 2);
        assert_eq!(good(Targets { ttft_ms: None, ..both }).count, 2);
        assert_eq!(good(Targets::default()).count, 3);
    }

    #[test]
    fn failures_are_counted_by_kind_with_the_words_of_the_first() {
        let status = FailureKind::Status(503);
        let outcomes = [failed(status, "loading"), failed(FailureKind::Cut, "x"), failed(status, "other")];
        let summary = Summary::of(&outcomes, Duration::from_secs(1), Targets::default());
        assert_eq!(summary.failures["status 503"], Failures { count: 2, first: "loading".into() });
        assert_eq!((summary.answered, summary.planned, summary.failures.len()), (0, 3, 2));
    }
}
