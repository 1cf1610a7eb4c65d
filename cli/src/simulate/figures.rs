//! Figures in the project's one form: a JSON line each, appended to a results file and never edited.

use std::{fs::OpenOptions, io::Write as _, path::Path, process::Command};

use anyhow::{Context, Result};
use serde::Serialize;
use stoker_scaling::sim::{Comparison, Outcomes};

const COMPARE: &str =
    "kubectl stoker simulate --trace all --against hpa-queue,kpa,wva --figures docs/benchmarks/results/scaling.jsonl";

/// One figure with everything needed to repeat it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    run: String,
    commit: String,
    machine: String,
    system: String,
    version: String,
    model: String,
    dtype: String,
    case: String,
    metric: String,
    value: f64,
    n: u32,
    min: f64,
    max: f64,
    command: String,
}

/// What a figure is of.
pub(crate) struct Key<'a> {
    /// Whose figure it is.
    pub(crate) system: &'a str,
    /// What was done.
    pub(crate) case: &'a str,
    /// What was read, with its unit last.
    pub(crate) metric: &'a str,
    /// What measures it again.
    pub(crate) command: &'a str,
}

impl Figure {
    /// A figure from its samples, of which there must be one.
    pub(crate) fn new(key: &Key<'_>, samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            run: format!("{}-{}", output_of("date", &["-u", "+%Y-%m-%dT%H:%M"]), std::process::id()),
            commit: output_of("git", &["describe", "--always", "--dirty", "--abbrev=9"]),
            machine: format!("{cores} cores, {}", cpu_model()),
            system: key.system.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: "none".to_owned(),
            dtype: "none".to_owned(),
            case: key.case.to_owned(),
            metric: key.metric.to_owned(),
            value: sorted[sorted.len() / 2],
            n: u32::try_from(sorted.len()).unwrap_or(u32::MAX),
            min: sorted[0],
            max: sorted[sorted.len() - 1],
            command: key.command.to_owned(),
        }
    }
}

/// The figures of comparisons: one run of a seeded simulation each.
pub(crate) fn of_comparisons(comparisons: &[Comparison]) -> Vec<Figure> {
    let rules =
        comparisons.iter().flat_map(|comparison| comparison.with_one_target().map(move |rule| (comparison, rule)));
    rules.flat_map(|(comparison, (system, outcomes))| of_outcomes(&comparison.trace, system, outcomes)).collect()
}

fn of_outcomes(trace: &str, system: &str, outcomes: &Outcomes) -> Vec<Figure> {
    let values = [
        ("slo_misses", outcomes.misses as f64),
        ("preemptions", outcomes.preemptions as f64),
        ("reversals_per_hour", outcomes.reversals_per_hour()),
        ("gpu_hours", outcomes.gpu_hours()),
    ];
    let case = format!("sim_{trace}");
    values
        .into_iter()
        .map(|(metric, value)| Figure::new(&Key { system, case: &case, metric, command: COMPARE }, &[value]))
        .collect()
}

/// Appends figures to a results file.
pub(crate) fn append(path: &Path, figures: &[Figure]) -> Result<()> {
    let context = || format!("append to {}", path.display());
    let mut file = OpenOptions::new().create(true).append(true).open(path).with_context(context)?;
    for figure in figures {
        writeln!(file, "{}", serde_json::to_string(figure)?).with_context(context)?;
    }
    Ok(())
}

fn output_of(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split(':').nth(1));
    model.map_or_else(|| std::env::consts::ARCH.to_owned(), |name| name.trim().to_owned())
}
