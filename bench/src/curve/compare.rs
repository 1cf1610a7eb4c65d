//! What fixed shapes took beside what the meter says of them: as a table, as figures, and as the replica that a simulation runs.

use std::fmt::Write as _;

use stoker_cost::{StepCost, StepReport, StepWork};
use stoker_figures::{Figure, Key, Run, median};
use stoker_sim::ReplicaModel;

use super::{
    load::Seen,
    point::{Point, Timed},
};

/// Times that the engine was near a point before the load is said to have covered it.
const NEAR_MIN: usize = 10;
/// A learned cost is right when it is off by no more than this share.
const OFF_MAX: f64 = 0.1;

/// Sizes of an engine that belong to its curve.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Sizes {
    /// KV blocks.
    pub blocks: u32,
    /// Tokens computed in one step at most.
    pub max_batched_tokens: u32,
    /// Sequences in one step at most.
    pub max_num_seqs: u32,
    /// Tokens of a prompt and its completion at most.
    pub max_model_len: u32,
}

/// Both curves of one engine.
#[derive(Clone, Debug)]
pub struct Comparison {
    rows: Vec<Row>,
    sizes: Sizes,
    /// What the meter learned from the load, and how far from it the steps were.
    learned: StepCost,
    error: f64,
    /// The costs nearest to the fixed shapes: what a sum of costs can be right about at all.
    fitted: StepCost,
    refused: usize,
}

/// A point, timed and reckoned.
#[derive(Clone, Debug)]
struct Row {
    timed: Timed,
    learned: f64,
    fitted: f64,
    is_covered: bool,
}

impl Row {
    /// In shares of what was measured.
    fn off(&self) -> f64 {
        self.learned / self.timed.median() - 1.0
    }
}

impl Comparison {
    /// `None` before the meter or the points say what steps cost.
    pub(super) fn new(timed: Vec<Timed>, seen: &Seen, learned: StepReport, sizes: Sizes) -> Option<Self> {
        let StepReport { cost, error, .. } = learned;
        let (learned, fitted) = (cost?, fitted(&timed, sizes.max_batched_tokens)?);
        let row = |timed: Timed| Row {
            learned: timed.point.seconds(&learned, sizes.max_batched_tokens),
            fitted: timed.point.seconds(&fitted, sizes.max_batched_tokens),
            is_covered: seen.near(timed.point) >= NEAR_MIN,
            timed,
        };
        Some(Self { rows: timed.into_iter().map(row).collect(), sizes, learned, error, fitted, refused: seen.refused })
    }

    /// The replica of a simulation: costs of the fixed shapes, and the engine's sizes.
    pub fn replica(&self, start_seconds: f64) -> ReplicaModel {
        let Sizes { blocks, max_batched_tokens, max_num_seqs, .. } = self.sizes;
        ReplicaModel { blocks, max_batched_tokens, max_num_seqs, start_seconds, ..ReplicaModel::default() }
            .with_cost(&self.fitted)
    }

    /// For a terminal.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:>9} {:>8} {:>12} {:>11} {:>13}\n",
            "sequences", "context", "measured ms", "learned ms", "difference %"
        );
        for row in &self.rows {
            let (sequences, context) = match row.timed.point {
                Point::Decode { sequences, context } => (sequences.to_string(), context),
                Point::Prompt { tokens } => ("prompt".to_owned(), tokens),
            };
            let (measured, learned, off) = (row.timed.median() * 1e3, row.learned * 1e3, row.off() * 100.0);
            let unmet = if row.is_covered { "" } else { "  (the load was never near)" };
            let _ = writeln!(text, "{sequences:>9} {context:>8} {measured:>12.3} {learned:>11.3} {off:>13.1}{unmet}");
        }
        text + &self.summary()
    }

    fn summary(&self) -> String {
        let covered = self.covered_offs();
        let form: Vec<f64> = self.rows.iter().map(|row| (row.fitted / row.timed.median() - 1.0).abs()).collect();
        let words = |offs: &[f64]| match offs {
            [] => "none".to_owned(),
            _ => format!("{:.1} % in the middle, {:.1} % at worst", median(offs) * 100.0, most(offs) * 100.0),
        };
        let verdict = if !covered.is_empty() && most(&covered) <= OFF_MAX { "within" } else { "not within" };
        let n_points = self.rows.len();
        let mut text = format!(
            "learned from the load, {} of {n_points} points covered: off by {} ({verdict} {:.0} %)\n",
            covered.len(),
            words(&covered),
            OFF_MAX * 100.0
        );
        let _ = writeln!(text, "costs fitted to the points themselves, all {n_points}: off by {}", words(&form));
        let _ = writeln!(
            text,
            "steps of the load were off what was learned by {:.1} % (root mean square)",
            self.error * 100.0
        );
        if self.refused > 0 {
            let _ = writeln!(text, "{} requests of the load found the queue full", self.refused);
        }
        let _ = writeln!(text, "learned {:?}\nfitted  {:?}", self.learned, self.fitted);
        text
    }

    /// How far off the meter is where the load was, without sign.
    fn covered_offs(&self) -> Vec<f64> {
        self.rows.iter().filter(|row| row.is_covered).map(|row| row.off().abs()).collect()
    }

    /// Each point as measured and as learned, and how far apart they are.
    pub fn figures(&self, run: &Run, model: &str, dtype: &str) -> Vec<Figure> {
        let figure = |case: &str, metric, samples: &[f64]| run.figure(Key { model, dtype, case, metric }, samples);
        let mut figures = Vec::new();
        for row in &self.rows {
            let case = format!("curve_{}", row.timed.point);
            let (metric, learned_metric) = row.timed.point.metrics();
            let value = |seconds: &f64| row.timed.point.value(*seconds);
            figures.push(figure(&case, metric, &row.timed.seconds.iter().map(value).collect::<Vec<_>>()));
            figures.extend(row.is_covered.then(|| figure(&case, learned_metric, &[value(&row.learned)])));
        }
        let covered = self.covered_offs();
        if !covered.is_empty() {
            figures.push(figure("curve", "median_off", &[median(&covered)]));
            figures.push(figure("curve", "worst_off", &[most(&covered)]));
        }
        figures
    }
}

impl Point {
    /// As measured and as learned.
    fn metrics(self) -> (&'static str, &'static str) {
        match self {
            Self::Decode { .. } => ("step_ms", "learned_step_ms"),
            Self::Prompt { .. } => ("tok_s", "learned_tok_s"),
        }
    }

    /// Seconds in the metric's unit.
    fn value(self, seconds: f64) -> f64 {
        match self {
            Self::Decode { .. } => seconds * 1e3,
            Self::Prompt { .. } => f64::from(self.prompt_tokens()) / (seconds * self.members().count() as f64),
        }
    }
}

/// A point counts as its mean step.
fn fitted(timed: &[Timed], max_batched_tokens: u32) -> Option<StepCost> {
    let mean_step = |timed: &Timed| {
        let steps = timed.point.steps(max_batched_tokens);
        let n = steps.len() as f64;
        let sum = steps.into_iter().fold(StepWork::default(), std::ops::Add::add);
        (sum.times(1.0 / n), timed.median() * timed.point.members().count() as f64 / n)
    };
    StepCost::fitted(&timed.iter().map(mean_step).collect::<Vec<_>>())
}

fn most(offs: &[f64]) -> f64 {
    offs.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use stoker_cost::Spent;
    use stoker_figures::Conditions;

    use super::*;

    const COST: StepCost = StepCost {
        step_seconds: 5e-3,
        decode_seconds: 50e-6,
        context_token_seconds: 0.1e-6,
        prefill_token_seconds: 20e-6,
        prefill_pair_seconds: 2e-9,
    };
    const SIZES: Sizes = Sizes { blocks: 4096, max_batched_tokens: 512, max_num_seqs: 64, max_model_len: 2048 };

    /// Points that take what `COST` says, and a meter that believes in `learned`; the load met all but the largest.
    fn comparison(learned: StepCost) -> Comparison {
        let points = [(1, 128), (16, 128), (1, 1024), (16, 1024)];
        let decodes = points.map(|(sequences, context)| Point::Decode { sequences, context });
        let prompts = [128, 512, 1024].map(|tokens| Point::Prompt { tokens });
        let seconds = |point: Point| vec![point.seconds(&COST, 512); 3];
        let timed = decodes.into_iter().chain(prompts).map(|point| Timed { point, seconds: seconds(point) });
        let seen = Seen {
            states: [(1.0, 128.0), (16.0, 128.0), (1.0, 1024.0)].repeat(NEAR_MIN),
            prompts: [128, 512, 1024].repeat(NEAR_MIN),
            refused: 0,
        };
        let report = StepReport { cost: Some(learned), error: 0.02, spent: Spent::default() };
        Comparison::new(timed.collect(), &seen, report, SIZES).unwrap()
    }

    #[test]
    fn a_meter_that_is_right_is_off_by_nothing() {
        let table = comparison(COST).table();
        assert!(
            table.contains("6 of 7 points covered: off by 0.0 % in the middle, 0.0 % at worst (within 10 %)"),
            "{table}"
        );
        assert!(table.contains("all 7: off by 0.0 % in the middle, 0.0 % at worst"), "{table}");
    }

    #[test]
    fn only_points_that_the_load_met_are_judged() {
        let table = comparison(StepCost { context_token_seconds: 0.5e-6, ..COST }).table();
        let largest = table.lines().find(|line| line.trim_start().starts_with("16     1024")).unwrap();
        assert!(largest.ends_with("(the load was never near)"), "{table}");
        // About 16 x (131 + 16) tokens at 0.4 us more, of 6.05 ms.
        assert!(table.contains("15.7 % at worst (not within 10 %)"), "{table}");
    }

    #[test]
    fn the_replica_is_what_the_points_say_whatever_was_learned() {
        let replica = comparison(StepCost { step_seconds: 1.0, ..COST }).replica(30.0);
        assert!((replica.step_seconds / 5e-3 - 1.0).abs() < 0.01, "{replica:?}");
        assert_eq!((replica.blocks, replica.max_num_seqs, replica.start_seconds), (4096, 64, 30.0));
        assert_eq!(replica.error(), None);
    }

    #[test]
    fn figures_have_every_point_and_what_was_learned_of_covered_ones() {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "x".into() };
        let figures = comparison(COST).figures(&Run::named("r".into(), conditions), "ember", "bf16");
        let of = |metric: &str| figures.iter().filter(|figure| figure.metric == metric).count();
        assert_eq!([of("step_ms"), of("learned_step_ms"), of("tok_s"), of("learned_tok_s")], [4, 3, 3, 3]);
        assert_eq!(
            figures.last().map(|figure| (figure.metric.as_str(), figure.value < 1e-6)),
            Some(("worst_off", true))
        );
    }
}
