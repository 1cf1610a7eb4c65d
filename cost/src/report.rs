//! What an engine tells of its steps.

use serde::{Deserialize, Serialize};

use crate::cost::{StepCost, StepWork};

/// Part of a load report.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepReport {
    /// What a step costs; `None` before enough was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<StepCost>,
    /// How far the duration of a step is from its cost: root of the mean square, in shares of the step.
    pub error: f64,
    /// What was done since start.
    pub spent: Spent,
}

impl StepReport {
    /// It can be reckoned with.
    pub fn is_sound(&self) -> bool {
        self.cost.is_none_or(|cost| cost.is_sound())
            && self.error.is_finite()
            && self.error >= 0.0
            && self.spent.is_sound()
    }
}

/// Work done since start, and what ended requests took.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Spent {
    /// Tokens of answers.
    pub decodes: f64,
    /// Tokens of context read for them.
    pub context_tokens: f64,
    /// Tokens of prompts.
    pub prefill_tokens: f64,
    /// Pairs of those and tokens before them.
    pub prefill_pairs: f64,
    /// Seconds of work of requests that ended, by the cost of when each did.
    pub request_seconds: f64,
    /// The same with the square of each, in seconds².
    pub request_seconds_squared: f64,
    /// How many there were.
    pub requests: f64,
}

impl Spent {
    /// Adds the work of a step, or of many.
    pub fn step(&mut self, work: StepWork) {
        self.decodes += work.decodes;
        self.context_tokens += work.context_tokens;
        self.prefill_tokens += work.prefill_tokens;
        self.prefill_pairs += work.prefill_pairs;
    }

    /// Adds a request that ended and took so many seconds of work.
    pub fn request(&mut self, seconds: f64) {
        self.request_seconds += seconds;
        self.request_seconds_squared += seconds * seconds;
        self.requests += 1.0;
    }

    /// What was done, without regard to whom for.
    pub fn work(&self) -> StepWork {
        StepWork {
            decodes: self.decodes,
            context_tokens: self.context_tokens,
            prefill_tokens: self.prefill_tokens,
            prefill_pairs: self.prefill_pairs,
        }
    }

    /// More than before: what was done since.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        self.with(before, |now, before| (now - before).max(0.0))
    }

    /// Both together.
    #[must_use]
    pub fn and(&self, more: &Self) -> Self {
        self.with(more, |one, other| one + other)
    }

    /// So many times as much.
    #[must_use]
    pub fn times(&self, factor: f64) -> Self {
        self.with(self, |one, _| one * factor)
    }

    /// Numbers, none below zero.
    pub fn is_sound(&self) -> bool {
        self.all().iter().all(|amount| amount.is_finite() && *amount >= 0.0)
    }

    /// Something is less than it was.
    pub fn fell_below(&self, before: &Self) -> bool {
        self.all().iter().zip(before.all()).any(|(now, before)| *now < before)
    }

    fn all(&self) -> [f64; 7] {
        [
            self.decodes,
            self.context_tokens,
            self.prefill_tokens,
            self.prefill_pairs,
            self.request_seconds,
            self.request_seconds_squared,
            self.requests,
        ]
    }

    fn with(&self, other: &Self, of: impl Fn(f64, f64) -> f64) -> Self {
        let mut all = self.all();
        all.iter_mut().zip(other.all()).for_each(|(one, other)| *one = of(*one, other));
        let [decodes, context_tokens, prefill_tokens, prefill_pairs, request_seconds, squared, requests] = all;
        Self {
            decodes,
            context_tokens,
            prefill_tokens,
            prefill_pairs,
            request_seconds,
            request_seconds_squared: squared,
            requests,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_since_then_is_the_difference_and_never_less_than_nothing() {
        let mut spent = Spent::default();
        spent.step(StepWork::prefill(100.0, 0.0));
        let before = spent;
        spent.step(StepWork::answer(10.0, 100.0));
        spent.request(0.5);
        let since = spent.since(&before);
        assert_eq!(since.work(), StepWork::answer(10.0, 100.0));
        assert_eq!((since.requests, since.request_seconds, since.request_seconds_squared), (1.0, 0.5, 0.25));
        assert_eq!(before.and(&since), spent);
        assert_eq!(before.since(&spent), Spent::default());
        assert!(before.fell_below(&spent) && !spent.fell_below(&before));
        assert_eq!(since.times(2.0).decodes, 20.0);
    }

    #[test]
    fn what_is_no_number_is_not_sound() {
        assert!(Spent::default().is_sound());
        assert!(!Spent { decodes: f64::NAN, ..Spent::default() }.is_sound());
        assert!(!Spent { requests: -1.0, ..Spent::default() }.is_sound());
    }

    #[test]
    fn a_report_reads_as_it_is_written() {
        let report = StepReport { cost: None, error: 1.0, spent: Spent::default() };
        let text = serde_json::to_string(&report).unwrap_or_default();
        assert_eq!(serde_json::from_str::<StepReport>(&text).ok(), Some(report), "{text}");
    }

    #[test]
    fn a_kind_of_cost_that_a_later_agent_knows_is_passed_over() {
        let known = StepCost { step_seconds: 0.01, ..StepCost::default() };
        let report = StepReport { cost: Some(known), error: 0.0, spent: Spent::default() };
        let text = serde_json::to_string(&report).unwrap_or_default();
        let later = text.replace("\"stepSeconds\"", "\"expertSeconds\":0.1,\"stepSeconds\"");
        assert_ne!(later, text);
        assert_eq!(serde_json::from_str::<StepReport>(&later).ok(), Some(report), "{later}");
    }
}
