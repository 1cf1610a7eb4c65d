//! The figures of a comparison, in the project's one form.

use stoker_figures::{Figure, Key, Run, System};
use stoker_sim::{Comparison, Outcomes};

const COMMAND: &str = "kubectl stoker simulate --trace all --against hpa-queue --against kpa --against wva --against wva-v2 --figures docs/benchmarks/results/scaling.jsonl";

/// A figure each: one run of a seeded simulation.
pub(super) fn of_comparisons(comparisons: &[Comparison]) -> Vec<Figure> {
    let run = Run::start(COMMAND);
    let rules =
        comparisons.iter().flat_map(|comparison| comparison.with_one_target().map(move |rule| (comparison, rule)));
    rules.flat_map(|(comparison, (rule, outcomes))| of_outcomes(&run, &comparison.trace, rule, outcomes)).collect()
}

fn of_outcomes(run: &Run, trace: &str, rule: &str, outcomes: &Outcomes) -> Vec<Figure> {
    // Rules of others are written again here, so their version is ours.
    let system = System { name: rule.to_owned(), ..System::stoker() };
    let values = [
        ("slo_misses", outcomes.misses as f64),
        ("preemptions", outcomes.preemptions as f64),
        ("reversals_per_hour", outcomes.reversals_per_hour()),
        ("gpu_hours", outcomes.gpu_hours()),
    ];
    let case = format!("sim_{trace}");
    let figure =
        |(metric, value)| run.figure_of(&system, Key { model: "none", dtype: "none", case: &case, metric }, &[value]);
    values.into_iter().map(figure).collect()
}
