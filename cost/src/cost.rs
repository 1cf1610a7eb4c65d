//! The cost of a step as a sum over the kinds of work in it.

use serde::{Deserialize, Serialize};

use crate::squares::least_squares;

/// Kinds of work, the step itself included.
pub(crate) const KINDS: usize = 5;
/// What a step by itself takes at least, in shares of a mean one.
const STEP_SHARE_MIN: f64 = 0.01;

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Sequences that get one more token.
    pub decodes: f64,
    /// Tokens before them whose keys and values are read, of all sequences together.
    pub context_tokens: f64,
    /// Tokens of prompts.
    pub prefill_tokens: f64,
    /// Pairs of such a token and one before it, which attention looks at.
    pub prefill_pairs: f64,
}

impl StepWork {
    /// A prompt, or the part of it behind `before` tokens that are there.
    pub fn prefill(tokens: f64, before: f64) -> Self {
        Self { prefill_tokens: tokens, prefill_pairs: tokens * (before + tokens / 2.0), ..Self::default() }
    }

    /// So many tokens of an answer, one after the other, the first of them behind `before` tokens.
    pub fn answer(tokens: f64, before: f64) -> Self {
        Self { decodes: tokens, context_tokens: tokens * (before + tokens / 2.0), ..Self::default() }
    }

    /// So many steps with this work.
    #[must_use]
    pub fn times(self, n: f64) -> Self {
        Self {
            decodes: self.decodes * n,
            context_tokens: self.context_tokens * n,
            prefill_tokens: self.prefill_tokens * n,
            prefill_pairs: self.prefill_pairs * n,
        }
    }

    pub(crate) fn kinds(self) -> [f64; KINDS] {
        [1.0, self.decodes, self.context_tokens, self.prefill_tokens, self.prefill_pairs]
    }
}

impl std::ops::Add for StepWork {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            decodes: self.decodes + other.decodes,
            context_tokens: self.context_tokens + other.context_tokens,
            prefill_tokens: self.prefill_tokens + other.prefill_tokens,
            prefill_pairs: self.prefill_pairs + other.prefill_pairs,
        }
    }
}

/// Seconds that a step takes: the weights are read once, whatever else is done; everything else adds to it.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepCost {
    /// A step by itself.
    pub step_seconds: f64,
    /// A sequence that gets one more token.
    pub decode_seconds: f64,
    /// A token of context that decoding reads.
    pub context_token_seconds: f64,
    /// A token of a prompt.
    pub prefill_token_seconds: f64,
    /// A pair of a token of a prompt and one before it.
    pub prefill_pair_seconds: f64,
}

impl StepCost {
    /// Seconds that this work adds to the steps that it is part of.
    pub fn work_seconds(&self, work: StepWork) -> f64 {
        self.step(work) - self.step_seconds
    }

    /// Seconds of one step with this work.
    pub fn step(&self, work: StepWork) -> f64 {
        self.kinds().iter().zip(work.kinds()).map(|(cost, amount)| cost * amount).sum()
    }

    /// It can be reckoned with: numbers, none below zero, and a step takes time.
    pub fn is_sound(&self) -> bool {
        self.kinds().iter().all(|cost| cost.is_finite() && *cost >= 0.0) && self.step_seconds > 0.0
    }

    /// The costs nearest to what steps with these works took, in seconds: a step counts by the share that it is off, whatever it takes.
    /// Nothing is forgotten or assumed; kinds of work that none has cost nothing. `None` where a step would take no time.
    pub fn fitted(steps: &[(StepWork, f64)]) -> Option<Self> {
        let (mut products, mut sums, mut rates) = ([[0.0; KINDS]; KINDS], [0.0; KINDS], 0.0);
        for (work, seconds) in steps {
            rates += 1.0 / seconds;
            let shares = work.kinds().map(|amount| amount / seconds);
            for (kind, share) in shares.into_iter().enumerate() {
                products[kind].iter_mut().zip(shares).for_each(|(product, other)| *product += share * other);
                sums[kind] += share;
            }
        }
        let cost = least_squares(&products, &sums).map(Self::of_kinds)?;
        Some(cost.at_least(steps.len() as f64 / rates)).filter(Self::is_sound)
    }

    /// A step by itself is never free, though noise may have it so: it takes some of what a mean step does.
    pub(crate) fn at_least(self, mean_step: f64) -> Self {
        Self { step_seconds: self.step_seconds.max(STEP_SHARE_MIN * mean_step), ..self }
    }

    /// Of an engine that takes so many times as long for everything.
    pub fn times(self, factor: f64) -> Self {
        Self::of_kinds(self.kinds().map(|cost| cost * factor))
    }

    /// The mean of several; `None` of none.
    pub fn mean(costs: impl IntoIterator<Item = Self>) -> Option<Self> {
        let (mut n, mut sum) = (0.0, [0.0; KINDS]);
        for cost in costs {
            n += 1.0;
            sum.iter_mut().zip(cost.kinds()).for_each(|(sum, cost)| *sum += cost);
        }
        (n > 0.0).then(|| Self::of_kinds(sum.map(|sum| sum / n)))
    }

    pub(crate) fn kinds(&self) -> [f64; KINDS] {
        [
            self.step_seconds,
            self.decode_seconds,
            self.context_token_seconds,
            self.prefill_token_seconds,
            self.prefill_pair_seconds,
        ]
    }

    pub(crate) fn of_kinds(kinds: [f64; KINDS]) -> Self {
        let [step_seconds, decode_seconds, context_token_seconds, prefill_token_seconds, prefill_pair_seconds] = kinds;
        Self { step_seconds, decode_seconds, context_token_seconds, prefill_token_seconds, prefill_pair_seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: StepCost = StepCost {
        step_seconds: 5e-3,
        decode_seconds: 10e-6,
        context_token_seconds: 0.04e-6,
        prefill_token_seconds: 20e-6,
        prefill_pair_seconds: 1e-9,
    };

    #[test]
    fn work_adds_up_whether_in_one_step_or_in_many() {
        let work = StepWork::prefill(1000.0, 500.0) + StepWork::answer(200.0, 1500.0);
        let expected = 1000.0 * 20e-6 + 1e6 * 1e-9 + 200.0 * 10e-6 + 200.0 * 1600.0 * 0.04e-6;
        assert!((COST.work_seconds(work) - expected).abs() < 1e-12);
        assert!((COST.step(StepWork::default()) - 5e-3).abs() < 1e-15);
        let parts = StepWork::prefill(400.0, 0.0) + StepWork::prefill(600.0, 400.0);
        assert_eq!(parts, StepWork::prefill(1000.0, 0.0));
    }

    #[test]
    fn what_cannot_be_reckoned_with_is_not_sound() {
        assert!(COST.is_sound());
        for wrong in [
            StepCost { step_seconds: 0.0, ..COST },
            StepCost { decode_seconds: -1e-9, ..COST },
            StepCost { prefill_pair_seconds: f64::NAN, ..COST },
            StepCost { context_token_seconds: f64::INFINITY, ..COST },
        ] {
            assert!(!wrong.is_sound(), "{wrong:?}");
        }
    }

    #[test]
    fn costs_fitted_to_steps_are_those_that_made_them() {
        let decode = |n: f64, context: f64| StepWork { decodes: n, context_tokens: n * context, ..StepWork::default() };
        let mut works = vec![decode(1.0, 100.0), decode(16.0, 100.0), decode(16.0, 1000.0)];
        works.extend([100.0, 1000.0, 4000.0].map(|tokens| StepWork::prefill(tokens, 0.0)));
        let steps: Vec<_> = works.into_iter().map(|work| (work, COST.step(work))).collect();
        let found = StepCost::fitted(&steps).unwrap();
        for (found, cost) in found.kinds().into_iter().zip(COST.kinds()) {
            assert!((found / cost - 1.0).abs() < 1e-6, "{found:?}");
        }
        assert_eq!(StepCost::fitted(&[]), None);
        assert_eq!(StepCost::fitted(&[(StepWork::default(), f64::NAN)]), None);
    }

    #[test]
    fn the_mean_is_of_each_part() {
        let other = StepCost { step_seconds: 15e-3, ..COST };
        assert_eq!(StepCost::mean([COST, other]), Some(StepCost { step_seconds: 10e-3, ..COST }));
        assert_eq!(StepCost::mean([]), None);
    }
}
