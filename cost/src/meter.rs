//! Learns what steps cost from steps: least squares with costs that are not negative, forgetting.

use crate::{
    cost::{KINDS, StepCost, StepWork},
    report::StepReport,
    squares::least_squares,
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

/// Steps after which it is looked at again what they are expected to take.
const BELIEF_STEPS: u32 = 64;
/// How many times shorter or longer than expected a step is taken to be when it is weighed: a kind of work that is met for the
/// first time may cost many times what was assumed, and would outweigh what comes later.
const SURPRISE_MAX: f64 = 4.0;

/// Sums of the normal equations. A step errs by a share of what it takes, and each second of steps counts as much as any other:
/// so a step counts by the inverse of what such steps take. Not of what it took itself: of steps that are alike the quick ones
/// would count for more, and on a machine where others compute too, costs would be less than the mean, by half and more.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostMeter {
    /// `sum w x x^T`.
    products: [[f64; KINDS]; KINDS],
    /// `sum w x t`.
    with_seconds: [f64; KINDS],
    /// `sum w t^2`.
    squares: f64,
    /// What steps are expected to take, and how many came since that was looked at.
    belief: Option<StepCost>,
    since_belief: u32,
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
        let (row, weight) = (work.kinds(), n / self.expected(work, seconds));
        for (products, amount) in self.products.iter_mut().zip(row) {
            for (product, other) in products.iter_mut().zip(row) {
                *product = *product * keep + weight * amount * other;
            }
        }
        for (sum, amount) in self.with_seconds.iter_mut().zip(row) {
            *sum = *sum * keep + weight * amount * seconds;
        }
        self.squares = self.squares * keep + weight * seconds * seconds;
        self.steps = self.steps * keep + n;
        self.seconds = self.seconds * keep + seconds * n;
    }

    /// Seconds that a step with this work is expected to take; what it took before anything is known.
    fn expected(&mut self, work: StepWork, seconds: f64) -> f64 {
        if self.since_belief >= BELIEF_STEPS {
            self.belief = self.cost().map(|(cost, _)| cost);
            self.since_belief = 0;
        }
        self.since_belief += 1;
        let believed = |cost: StepCost| cost.step(work).clamp(seconds / SURPRISE_MAX, seconds * SURPRISE_MAX);
        self.belief.map_or(seconds, believed)
    }

    /// What steps cost, and how far that is from what they took; `None` before enough was seen.
    pub fn cost(&self) -> Option<(StepCost, f64)> {
        if self.steps < STEPS_MIN || self.seconds < SECONDS_MIN {
            return None;
        }
        let (products, with_seconds) = self.with_assumption();
        let kinds = least_squares(&products, &with_seconds)?;
        let cost = StepCost::of_kinds(kinds).at_least(self.mean_step());
        cost.is_sound().then(|| (cost, self.error(&kinds)))
    }

    /// The same as a report, with what was done.
    pub fn report(&self, spent: crate::Spent) -> StepReport {
        let cost = self.cost();
        StepReport { cost: cost.map(|(cost, _)| cost), error: cost.map_or(1.0, |(_, error)| error), spent }
    }

    /// Adds what is assumed as if it had been seen: each cost by itself, in shares of a mean step. Where steps say that it is more,
    /// in shares of that: an engine on CPUs computes prompts at a hundred times what is assumed, and would be held back by it.
    fn with_assumption(&self) -> ([[f64; KINDS]; KINDS], [f64; KINDS]) {
        let (mut products, mut with_seconds) = (self.products, self.with_seconds);
        let step = self.mean_step();
        for kind in 1..KINDS {
            let assumed = ASSUMED[kind] * step;
            let unit = self.belief.map_or(assumed, |cost| assumed.max(cost.kinds()[kind]));
            let weight = ASSUMED_WEIGHT * self.seconds / (unit * unit);
            products[kind][kind] += weight;
            with_seconds[kind] += weight * assumed;
        }
        (products, with_seconds)
    }

    /// The harmonic one.
    fn mean_step(&self) -> f64 {
        self.steps / self.products[0][0].max(f64::MIN_POSITIVE)
    }

    /// Root of the mean squared relative error.
    fn error(&self, kinds: &[f64; KINDS]) -> f64 {
        // sum w (t - x c)^2 = sum w t^2 - 2 c (sum w x t) + c (sum w x x^T) c.
        let linear: f64 = kinds.iter().zip(self.with_seconds).map(|(cost, sum)| cost * sum).sum();
        let of = |row: &[f64; KINDS]| row.iter().zip(kinds).map(|(product, cost)| product * cost).sum::<f64>();
        let square: f64 = self.products.iter().zip(kinds).map(|(row, cost)| cost * of(row)).sum();
        ((self.squares - 2.0 * linear + square).max(0.0) / self.squares).sqrt()
    }
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
        if draw.is_multiple_of(7) {
            decode + StepWork::prefill((draw % 1531) as f64 + 1.0, (draw % 419) as f64)
        } else {
            decode
        }
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

    /// One step in ten takes six times as long: others compute on the machine.
    #[test]
    fn steps_that_are_interrupted_now_and_then_cost_their_mean() {
        let (cost, _) = learned(TRUE, 20_000, |draw| if (draw / 7919).is_multiple_of(10) { 6.0 } else { 1.0 });
        let busy = StepWork { decodes: 60.0, context_tokens: 60.0 * 600.0, ..StepWork::default() };
        for work in [work(1), busy, busy + StepWork::prefill(1000.0, 0.0)] {
            let times = cost.step(work) / TRUE.step(work);
            assert!((1.4..1.6).contains(&times), "{times} at {work:?}");
        }
    }

    #[test]
    fn a_kind_of_work_that_comes_late_is_learned_at_its_cost() {
        let (mut meter, cost) = (CostMeter::default(), StepCost { prefill_token_seconds: 1e-3, ..TRUE });
        let decode = |draw: u64| StepWork { prefill_tokens: 0.0, prefill_pairs: 0.0, ..work(draw) };
        (0..2000).for_each(|draw| meter.step(decode(draw), cost.step(decode(draw))));
        (0..200).for_each(|draw| meter.step(work(draw * 7919), cost.step(work(draw * 7919))));
        let (found, _) = meter.cost().expect("enough was seen");
        assert!((found.prefill_token_seconds / 1e-3 - 1.0).abs() < 0.02, "{found:?}");
        assert!((found.step_seconds / TRUE.step_seconds - 1.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn a_step_by_itself_is_never_free() {
        let mut meter = CostMeter::default();
        for n in (0..2000).map(|draw| 1.0 + f64::from(draw % 32)) {
            meter.step(StepWork { decodes: n, context_tokens: 100.0 * n, ..StepWork::default() }, 1e-3 * n * n);
        }
        let (cost, _) = meter.cost().expect("enough was seen");
        assert!(cost.is_sound() && cost.step_seconds < 1e-3, "{cost:?}");
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
            // A thousand steps of a fast engine are not yet a second.
            let (mut step, mut spent) = (0, 0.0);
            while step < 1000 || spent < 1.1 * SECONDS_MIN {
                let work = work(seed.wrapping_mul(2 * step + 1));
                meter.step(work, cost.step(work));
                (step, spent) = (step + 1, spent + cost.step(work));
            }
            let (found, error) = meter.cost().expect("enough was seen");
            prop_assert!(found.is_sound());
            prop_assert!(error < 0.05, "{error}");
        }
    }
}
