//! Learns what steps cost from steps: least squares with costs that are not negative, forgetting.

use crate::{
    cost::{KINDS, StepCost, StepWork},
    report::StepReport,
};

/// Busy seconds after which a step counts a third: machines get hot, and neighbours come and go.
const MEMORY_SECONDS: f64 = 600.0;
/// Busy seconds before costs are told.
const SECONDS_MIN: f64 = 1.0;
/// Steps before costs are told.
const STEPS_MIN: f64 = 50.0;
/// What is assumed of a kind of work that was never told apart from others, in shares of a step by itself: the ratios of an
/// 8B model on one H200. Weighs as this share of what was seen.
const ASSUMED: [f64; KINDS] = [1.0, 1.0 / 400.0, 1.0 / 135_000.0, 1.0 / 255.0, 1.0 / 3_400_000.0];
const ASSUMED_WEIGHT: f64 = 1e-4;
/// Rounds of descent, coordinate by coordinate, and by which share a cost moves in one that goes on.
const ROUNDS: usize = 400;
const STILL: f64 = 1e-7;

/// Sums of the normal equations. A step errs by a share of what it takes, and each second of steps counts as much as any other:
/// so a step counts by the inverse of what it takes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostMeter {
    /// `sum w x x^T`.
    products: [[f64; KINDS]; KINDS],
    /// `sum w x t`.
    with_seconds: [f64; KINDS],
    /// Steps that count, and how long they took.
    steps: f64,
    seconds: f64,
}

impl CostMeter {
    /// A step with this work took so long.
    pub fn step(&mut self, work: StepWork, seconds: f64) {
        self.steps(work, seconds, 1.0);
    }

    /// So many steps, alike but for the growth of their contexts: their mean work and duration.
    pub fn steps(&mut self, work: StepWork, seconds: f64, n: f64) {
        if !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        let keep = (-seconds * n / MEMORY_SECONDS).exp();
        let (row, weight) = (work.kinds(), n / seconds);
        for (products, amount) in self.products.iter_mut().zip(row) {
            for (product, other) in products.iter_mut().zip(row) {
                *product = *product * keep + weight * amount * other;
            }
        }
        for (sum, amount) in self.with_seconds.iter_mut().zip(row) {
            *sum = *sum * keep + weight * amount * seconds;
        }
        self.steps = self.steps * keep + n;
        self.seconds = self.seconds * keep + seconds * n;
    }

    /// What steps cost, and how far that is from what they took; `None` before enough was seen.
    pub fn cost(&self) -> Option<(StepCost, f64)> {
        if self.steps < STEPS_MIN || self.seconds < SECONDS_MIN {
            return None;
        }
        let (products, with_seconds) = self.with_assumption();
        let kinds = descend(&products, &with_seconds);
        let cost = StepCost::of_kinds(kinds);
        cost.is_sound().then(|| (cost, self.error(&kinds)))
    }

    /// The same as a report, with what was done.
    pub fn report(&self, spent: crate::Spent) -> StepReport {
        let cost = self.cost();
        StepReport { cost: cost.map(|(cost, _)| cost), error: cost.map_or(1.0, |(_, error)| error), spent }
    }

    /// Adds what is assumed as if it had been seen: each cost by itself, in shares of a mean step.
    fn with_assumption(&self) -> ([[f64; KINDS]; KINDS], [f64; KINDS]) {
        let (mut products, mut with_seconds) = (self.products, self.with_seconds);
        let step = self.steps / self.products[0][0].max(f64::MIN_POSITIVE);
        for kind in 1..KINDS {
            let assumed = ASSUMED[kind] * step;
            let weight = ASSUMED_WEIGHT * self.seconds / (assumed * assumed);
            products[kind][kind] += weight;
            with_seconds[kind] += weight * assumed;
        }
        (products, with_seconds)
    }

    /// Root of the mean squared relative error.
    fn error(&self, kinds: &[f64; KINDS]) -> f64 {
        // sum w (t - x c)^2 = sum w t^2 - 2 c (sum w x t) + c (sum w x x^T) c, and w t^2 is t.
        let linear: f64 = kinds.iter().zip(self.with_seconds).map(|(cost, sum)| cost * sum).sum();
        let of = |row: &[f64; KINDS]| row.iter().zip(kinds).map(|(product, cost)| product * cost).sum::<f64>();
        let square: f64 = self.products.iter().zip(kinds).map(|(row, cost)| cost * of(row)).sum();
        ((self.seconds - 2.0 * linear + square).max(0.0) / self.seconds).sqrt()
    }
}

/// Minimises `c P c - 2 c s` over `c >= 0`, one coordinate after the other: it goes down with each and is convex.
fn descend(products: &[[f64; KINDS]; KINDS], with_seconds: &[f64; KINDS]) -> [f64; KINDS] {
    let mut kinds = [0.0; KINDS];
    for _ in 0..ROUNDS {
        let before = kinds;
        for kind in 0..KINDS {
            let own = products[kind][kind];
            if own <= 0.0 {
                continue;
            }
            let others: f64 =
                (0..KINDS).filter(|other| *other != kind).map(|other| products[kind][other] * kinds[other]).sum();
            kinds[kind] = ((with_seconds[kind] - others) / own).max(0.0);
        }
        let moved = kinds.iter().zip(before).any(|(now, before)| (now - before).abs() > STILL * before.abs());
        if !moved {
            break;
        }
    }
    kinds
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRUE: StepCost = StepCost {
        step_seconds: 4.87e-3,
        decode_seconds: 12e-6,
        context_token_seconds: 0.036e-6,
        prefill_token_seconds: 19.1e-6,
        prefill_pair_seconds: 1.43e-9,
    };

    /// Steps of a serving engine: some sequences at some context, now and then a prompt.
    fn work(draw: u64) -> StepWork {
        let n = (draw % 61) as f64;
        let decode = StepWork { decodes: n, context_tokens: n * (200.0 + (draw % 977) as f64), ..StepWork::default() };
        if draw % 7 == 0 { decode + StepWork::prefill((draw % 1531) as f64 + 1.0, (draw % 419) as f64) } else { decode }
    }

    fn learned(cost: StepCost, steps: u64, noise: impl Fn(u64) -> f64) -> (StepCost, f64) {
        let mut meter = CostMeter::default();
        (0..steps).map(|step| step * 7919).for_each(|draw| meter.step(work(draw), cost.step(work(draw)) * noise(draw)));
        meter.cost().expect("enough was seen")
    }

    #[test]
    fn costs_are_found_from_steps_that_vary() {
        let (cost, error) = learned(TRUE, 2000, |_| 1.0);
        assert!(error < 2e-3, "{error}");
        for draw in (0..500).map(|draw| draw * 104_729) {
            let off = cost.step(work(draw)) / TRUE.step(work(draw)) - 1.0;
            assert!(off.abs() < 0.01, "{off} at {:?}", work(draw));
        }
        assert!((cost.step_seconds / TRUE.step_seconds - 1.0).abs() < 0.01, "{cost:?}");
    }

    #[test]
    fn noise_is_told_and_averaged_out() {
        let (cost, error) = learned(TRUE, 5000, |draw| if draw % 2 == 0 { 0.9 } else { 1.1 });
        assert!((0.09..0.11).contains(&error), "{error}");
        let busy = StepWork { decodes: 60.0, context_tokens: 60.0 * 600.0, ..StepWork::default() };
        assert!((cost.step(busy) / TRUE.step(busy) - 1.0).abs() < 0.05, "{cost:?}");
    }

    #[test]
    fn what_was_never_told_apart_costs_what_is_assumed() {
        let mut meter = CostMeter::default();
        let one = StepWork { decodes: 1.0, context_tokens: 600.0, ..StepWork::default() };
        (0..1000).for_each(|_| meter.step(one, 5e-3));
        let (cost, _) = meter.cost().expect("enough was seen");
        assert!((cost.step(one) / 5e-3 - 1.0).abs() < 1e-3);
        let many = StepWork { decodes: 100.0, context_tokens: 60_000.0, ..StepWork::default() };
        assert!((1.3..2.5).contains(&(cost.step(many) / 5e-3)), "{cost:?}");
    }

    #[test]
    fn little_says_nothing_and_a_step_without_time_teaches_nothing() {
        let mut meter = CostMeter::default();
        (0..49).for_each(|draw| meter.step(work(draw), 1.0));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            meter.step(work(3), wrong);
        }
        assert_eq!(meter.cost(), None);
        assert_eq!(meter.report(crate::Spent::default()).cost, None);
    }

    #[test]
    fn what_became_slower_is_believed_within_three_times_the_memory() {
        let (mut meter, slow) = (CostMeter::default(), StepCost { step_seconds: 20e-3, ..TRUE });
        let busy = |meter: &mut CostMeter, cost: StepCost, seconds: f64| {
            let (mut spent, mut draw) = (0.0, 1);
            while spent < seconds {
                (draw, spent) = (draw + 7919, spent + cost.step(work(draw)));
                meter.step(work(draw), cost.step(work(draw)));
            }
        };
        busy(&mut meter, TRUE, 1800.0);
        busy(&mut meter, slow, 3.0 * MEMORY_SECONDS);
        let (cost, _) = meter.cost().expect("enough was seen");
        assert!(cost.step_seconds > 12e-3, "{cost:?}");
    }

    #[test]
    fn many_steps_at_once_count_as_many() {
        let (mut one_by_one, mut at_once) = (CostMeter::default(), CostMeter::default());
        (0..300).for_each(|_| one_by_one.step(work(11), 0.01));
        at_once.steps(work(11), 0.01, 300.0);
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-2;
        assert!(close(one_by_one.seconds, at_once.seconds) && close(one_by_one.steps, at_once.steps));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn costs_are_sound_and_fit_whatever_the_engine(
            times in prop::array::uniform5(0.05..20.0f64),
            seed in 1..1_000_000u64,
        ) {
            let cost = StepCost {
                step_seconds: TRUE.step_seconds * times[0],
                decode_seconds: TRUE.decode_seconds * times[1],
                context_token_seconds: TRUE.context_token_seconds * times[2],
                prefill_token_seconds: TRUE.prefill_token_seconds * times[3],
                prefill_pair_seconds: TRUE.prefill_pair_seconds * times[4],
            };
            let mut meter = CostMeter::default();
            for step in 0..1000 {
                let work = work(seed.wrapping_mul(2 * step + 1));
                meter.step(work, cost.step(work));
            }
            let (found, error) = meter.cost().expect("enough was seen");
            prop_assert!(found.is_sound());
            prop_assert!(error < 0.05, "{error}");
        }
    }
}
