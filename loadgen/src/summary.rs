//! What a run came to: percentiles, rates, failures by kind, goodput. Pure.

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::Serialize;

use crate::{
    client::FailureKind,
    run::{AnswerTiming, Model, Outcome},
    shape::Verdict,
    slo::Slo,
};

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

/// Answers that met a target, and were what was asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The target, as it was written.
    pub slo: String,
    /// How many.
    pub count: usize,
    /// Of all planned requests, so failures count against it.
    pub share: f64,
    /// Per second of the run.
    pub per_second: f64,
}

/// Answers that had to be JSON of a schema or a tool call.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// They are.
    pub valid: usize,
    /// They ended at their `max_tokens`.
    pub short: usize,
    /// Text, where no tool had to be called.
    pub no_call: usize,
    /// They are not.
    pub invalid: usize,
    /// What was wrong with the first of these.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_invalid: Option<String>,
}

/// The requests to one model, of one kind, or of one place in their sessions.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// What its requests have in common: `model`, `kind` or `turn`.
    pub by: &'static str,
    /// And which that is.
    pub name: String,
    /// What they came to.
    #[serde(flatten)]
    pub summary: Summary,
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
    /// For each target, answers that met it.
    pub goodput: Vec<Goodput>,
    /// Answers that were judged, if any were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checked: Option<Checked>,
}

impl Summary {
    /// Counts the outcomes of a run of this length.
    pub fn of<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>, elapsed: Duration, slos: &[Slo]) -> Self {
        let outcomes: Vec<&Outcome> = outcomes.into_iter().collect();
        let timings: Vec<&AnswerTiming> = outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok()).collect();
        let seconds = elapsed.as_secs_f64();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let completion_tokens = timings.iter().map(|timing| u64::from(timing.usage.completion_tokens)).sum();
        let goodput = |slo: &Slo| {
            let count = outcomes.iter().filter(|outcome| is_good(outcome, slo)).count();
            let share = count as f64 / outcomes.len().max(1) as f64;
            Goodput { slo: slo.to_string(), count, share, per_second: per_second(count as f64) }
        };
        Self {
            seconds,
            planned: outcomes.len(),
            answered: timings.len(),
            failures: failures(&outcomes),
            answered_per_second: per_second(timings.len() as f64),
            prompt_tokens: timings.iter().map(|timing| u64::from(timing.usage.prompt_tokens)).sum(),
            completion_tokens,
            completion_tokens_per_second: per_second(completion_tokens as f64),
            ttft_seconds: Percentiles::of(timings.iter().map(|timing| timing.ttft)),
            itl_seconds: Percentiles::of(timings.iter().flat_map(|timing| timing.gaps.iter().copied())),
            e2e_seconds: Percentiles::of(timings.iter().map(|timing| timing.e2e)),
            send_lag_seconds: Percentiles::of(sent(&outcomes).map(|outcome| outcome.send_lag)),
            goodput: slos.iter().map(goodput).collect(),
            checked: checked(&outcomes),
        }
    }
}

/// What requests are grouped by.
pub const SORTS: [&str; 3] = ["model", "kind", "turn"];

/// Groups of every sort that has more than one of them.
pub fn groups(outcomes: &[Outcome], models: &[Model], elapsed: Duration, slos: &[Slo]) -> Vec<Group> {
    let of_sort = |by: &'static str| {
        let mut members: BTreeMap<String, Vec<&Outcome>> = BTreeMap::new();
        for outcome in outcomes {
            members.entry(outcome.group(by, models)).or_default().push(outcome);
        }
        let is_worth_it = members.len() > 1;
        let group =
            move |(name, of): (String, Vec<&Outcome>)| Group { by, name, summary: Summary::of(of, elapsed, slos) };
        members.into_iter().filter(move |_| is_worth_it).map(group).collect::<Vec<_>>()
    };
    SORTS.into_iter().flat_map(of_sort).collect()
}

impl Outcome {
    /// The name of its group among those of one of [`SORTS`].
    pub(crate) fn group(&self, by: &str, models: &[Model]) -> String {
        match by {
            "model" => models[self.which.model_idx].name.clone(),
            "kind" => self.which.kind.to_string(),
            _ => if self.which.turn_idx == 0 { "first" } else { "later" }.to_owned(),
        }
    }
}

fn is_good(outcome: &Outcome, slo: &Slo) -> bool {
    let is_as_asked = !matches!(outcome.verdict, Some(Verdict::Invalid(_)));
    is_as_asked && outcome.result.as_ref().is_ok_and(|timing| slo.is_met(timing))
}

fn checked(outcomes: &[&Outcome]) -> Option<Checked> {
    let mut checked = Checked::default();
    for verdict in outcomes.iter().filter_map(|outcome| outcome.verdict.as_ref()) {
        match verdict {
            Verdict::Valid => checked.valid += 1,
            Verdict::Short => checked.short += 1,
            Verdict::NoCall => checked.no_call += 1,
            Verdict::Invalid(reason) => {
                checked.invalid += 1;
                checked.first_invalid.get_or_insert_with(|| reason.clone());
            }
        }
    }
    (checked != Checked::default()).then_some(checked)
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

fn sent<'a>(outcomes: &[&'a Outcome]) -> impl Iterator<Item = &'a Outcome> {
    let was_sent = |outcome: &&Outcome| {
        let failed = outcome.result.as_ref().err().map(|failure| failure.kind);
        !matches!(failed, Some(FailureKind::NotSent | FailureKind::Unreached))
    };
    outcomes.iter().copied().filter(was_sent)
}

fn failures(outcomes: &[&Outcome]) -> BTreeMap<String, Failures> {
    let mut kinds = BTreeMap::new();
    for failure in outcomes.iter().filter_map(|outcome| outcome.result.as_ref().err()) {
        let first = || Failures { count: 0, first: failure.message.clone() };
        kinds.entry(failure.kind.to_string()).or_insert_with(first).count += 1;
    }
    kinds
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seconds, planned, answered, .. } = self;
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
        writeln!(f)?;
        for Goodput { slo, count, share, per_second } in &self.goodput {
            writeln!(
                f,
                "goodput      {count} of {planned} ({:.1} %), {per_second:.2} per second, by {slo}",
                share * 100.0
            )?;
        }
        if let Some(checked) = &self.checked {
            writeln!(f, "checked      {checked}")?;
        }
        for (kind, Failures { count, first }) in &self.failures {
            writeln!(f, "failed       {count} {kind}: {first}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { valid, short, no_call, invalid, first_invalid } = self;
        write!(f, "{valid} valid, {short} cut by max_tokens, {no_call} without a call, {invalid} invalid")?;
        first_invalid.iter().try_for_each(|reason| write!(f, ", the first: {reason}"))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { by, name, summary } = self;
        let [ttft, itl, e2e] = [&summary.ttft_seconds, &summary.itl_seconds, &summary.e2e_seconds]
            .map(|Percentiles { p50, p99, .. }| format!("{p50:.3}, {p99:.3}"));
        let of = format!("{} of {} answered", summary.answered, summary.planned);
        write!(f, "{by} {name}: {of}; p50, p99 of ttft {ttft}, itl {itl}, e2e {e2e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        answer::Usage,
        client::Failure,
        prompt::{Counted, TokenCount},
        run::Which,
        shape::Kind,
    };

    const WHICH: Which = Which { planned: Duration::ZERO, model_idx: 0, turn_idx: 0, kind: Kind::Text };

    fn answered(ttft_ms: u64, e2e_ms: u64) -> Outcome {
        let usage = Usage { prompt_tokens: 10, completion_tokens: 11 };
        let (ttft, e2e) = (Duration::from_millis(ttft_ms), Duration::from_millis(e2e_ms));
        let timing = AnswerTiming { ttft, e2e, gaps: vec![(e2e - ttft) / 10; 10], usage };
        Outcome { which: WHICH, send_lag: Duration::ZERO, result: Ok(timing), verdict: None }
    }

    fn failed(kind: FailureKind, message: &str) -> Outcome {
        Outcome { result: Err(Failure::new(kind, message)), ..answered(0, 0) }
    }

    fn slos(texts: &[&str]) -> Vec<Slo> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
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
    fn goodput_is_told_for_every_target_and_counts_failures_as_planned() {
        let outcomes =
            [answered(100, 1100), answered(300, 1300), answered(100, 3100), failed(FailureKind::Status(429), "full")];
        let slos = slos(&["ttft=200ms,itl=150ms", "ttft=200ms", "itl=150ms", "e2e=1.2s"]);
        let goodput = Summary::of(&outcomes, Duration::from_secs(2), &slos).goodput;
        let first = Goodput { slo: "ttft=200ms,itl=150ms".into(), count: 1, share: 0.25, per_second: 0.5 };
        assert_eq!(goodput[0], first);
        assert_eq!(goodput.iter().map(|good| good.count).collect::<Vec<_>>(), [1, 2, 2, 1]);
    }

    #[test]
    fn answers_that_are_not_what_was_asked_for_are_counted_and_not_good() {
        let verdicts = [
            None,
            Some(Verdict::Valid),
            Some(Verdict::Short),
            Some(Verdict::NoCall),
            Some(Verdict::Invalid("one".into())),
            Some(Verdict::Invalid("two".into())),
        ];
        let outcomes = verdicts.map(|verdict| Outcome { verdict, ..answered(100, 1100) });
        let summary = Summary::of(&outcomes, Duration::from_secs(2), &slos(&["e2e=9s"]));
        let checked = Checked { valid: 1, short: 1, no_call: 1, invalid: 2, first_invalid: Some("one".into()) };
        assert_eq!((summary.checked, summary.goodput[0].count), (Some(checked), 4));
        assert_eq!(Summary::of(&outcomes[..1], Duration::from_secs(2), &[]).checked, None);
    }

    #[test]
    fn groups_are_those_that_differ() {
        let at = |model_idx, turn_idx| Outcome { which: Which { model_idx, turn_idx, ..WHICH }, ..answered(100, 1100) };
        let counted = |words, tokens| Counted { words, tokens };
        let token_count = TokenCount::through(counted(0, 0), counted(1, 1)).unwrap();
        let models = ["b", "a"].map(|name| Model { name: name.into(), token_count });
        let outcomes = [at(0, 0), at(0, 1), at(0, 2), at(1, 0)];
        let groups = groups(&outcomes, &models, Duration::from_secs(1), &[]);
        let told: Vec<_> = groups.iter().map(|group| (group.by, group.name.as_str(), group.summary.planned)).collect();
        assert_eq!(told, [("model", "a", 1), ("model", "b", 3), ("turn", "first", 2), ("turn", "later", 2)]);
    }

    #[test]
    fn failures_are_counted_by_kind_with_the_words_of_the_first() {
        let status = FailureKind::Status(503);
        let outcomes = [failed(status, "loading"), failed(FailureKind::Cut, "x"), failed(status, "other")];
        let summary = Summary::of(&outcomes, Duration::from_secs(1), &[]);
        assert_eq!(summary.failures["status 503"], Failures { count: 2, first: "loading".into() });
        assert_eq!((summary.answered, summary.planned, summary.failures.len()), (0, 3, 2));
    }
}
