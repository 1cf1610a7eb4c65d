//! `kubectl stoker simulate`: what would the autoscaler do, and what would others?
//!
//! Reads a trace (named, or a file), runs the deciding function of the operator and the rivals asked for against the
//! same simulated replicas, and shows replicas, KV usage, late answers and preemptions over time. Touches nothing but
//! the files it is told to write.

mod claims;
mod figures;
mod report;
mod tick;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use stoker_scaling::{
    ScalingSpec,
    sim::{
        Comparison, Progress, Promise, ReplicaModel, Rival, Setting, TRACE_NAMES, Trace, compare, named_trace,
        recorded_trace, run_ours,
    },
};

use crate::{records, settings};

/// What to simulate.
#[derive(Debug, Args)]
pub(crate) struct Simulate {
    /// Name of a trace, `all`, or a file: one JSON object a line, requests or recorded decisions.
    #[arg(long, required_unless_present = "fleet_tick")]
    trace: Option<String>,
    /// Changes the specification, e.g. `scaling.targets.kv=0.7`; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
    /// Rules to compare with at equal GPU-hours: `hpa-queue`, `kpa`, `wva`, separated by commas.
    #[arg(long, value_delimiter = ',')]
    against: Vec<String>,
    /// Replicas at least.
    #[arg(long, default_value_t = 1)]
    min: u32,
    /// Replicas at most.
    #[arg(long, default_value_t = 24)]
    max: u32,
    /// Seed of arrivals, sizes, start times and routing.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes a picture of each trace and, with several, a page of results into this directory.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Writes every decision into this file, one record a line: `explain --file` reads it, and it is a trace again.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Appends the figures to this file of results.
    #[arg(long, value_name = "FILE", hide = true)]
    figures: Option<PathBuf>,
    /// Measures instead how long a tick of 1,000 deployments with 10,000 replicas takes to decide.
    #[arg(long, hide = true)]
    fleet_tick: bool,
}

/// Runs it and prints what came out.
pub(crate) fn simulate(args: &Simulate) -> Result<()> {
    if args.fleet_tick {
        return tick::measure(args.figures.as_deref());
    }
    let spec = settings::spec(ScalingSpec::between(args.min, args.max), &args.settings)?;
    let traces = traces(args.trace.as_deref().unwrap_or_default(), args.seed)?;
    show(args, &compared(args, &spec, &traces)?)?;
    record(args, &spec, &traces)
}

fn traces(name: &str, seed: u64) -> Result<Vec<Trace>> {
    if name == "all" {
        return Ok(TRACE_NAMES.iter().filter_map(|name| named_trace(name, seed)).collect());
    }
    if let Some(trace) = named_trace(name, seed) {
        return Ok(vec![trace]);
    }
    let path = PathBuf::from(name);
    if !path.exists() {
        bail!("no trace and no file is called {name:?}: use a file, `all`, or one of {}", TRACE_NAMES.join(", "));
    }
    let text = fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
    let stem = path.file_stem().map_or_else(|| "trace".into(), |stem| stem.to_string_lossy());
    let trace = if records::are_in(&text) {
        recorded_trace(&stem, &records::parse(name, &text)?, seed).with_context(|| format!("read {name}"))?
    } else {
        Trace::parse(&stem, &text, ReplicaModel::default()).with_context(|| format!("read {name}"))?
    };
    Ok(vec![trace])
}

fn compared(args: &Simulate, spec: &ScalingSpec, traces: &[Trace]) -> Result<Vec<Comparison>> {
    let named = |name: &String| {
        Rival::named(name).with_context(|| format!("no rule is called {name:?}: use hpa-queue, kpa, wva"))
    };
    let rivals = args.against.iter().map(named).collect::<Result<Vec<_>>>()?;
    Ok(compare(traces, spec, &rivals, &setting(args, spec), &tell))
}

/// A line for each tenth of a search.
fn tell(progress: Progress) {
    let Progress { rival, done, of } = progress;
    if done % of.div_ceil(10) == 0 || done == of {
        eprintln!("{}: {done} of {of} simulations", rival.name());
    }
}

fn setting(args: &Simulate, spec: &ScalingSpec) -> Setting {
    Setting { min: spec.min, max: spec.max, seed: args.seed, promise: Promise::default() }
}

fn record(args: &Simulate, spec: &ScalingSpec, traces: &[Trace]) -> Result<()> {
    let Some(path) = &args.record else { return Ok(()) };
    let records = traces.iter().flat_map(|trace| run_ours(trace, spec, &setting(args, spec)).1);
    let lines: String = records.map(|record| record.to_line() + "\n").collect();
    fs::write(path, lines).with_context(|| format!("write {}", path.display()))
}

fn show(args: &Simulate, comparisons: &[Comparison]) -> Result<()> {
    for comparison in comparisons {
        print!("{}", report::terminal(comparison));
    }
    if comparisons.len() > 1 {
        print!("\n{}", report::sums(comparisons));
        print!("\n{}", claims::table(comparisons, |comparison| &comparison.one_target));
    }
    if let Some(dir) = &args.out {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        for comparison in comparisons {
            let path = dir.join(format!("{}.svg", comparison.trace));
            fs::write(&path, report::picture(comparison)).with_context(|| format!("write {}", path.display()))?;
        }
        if comparisons.len() > 1 {
            let path = dir.join("results.md");
            fs::write(&path, report::page(comparisons)).with_context(|| format!("write {}", path.display()))?;
        }
    }
    if let Some(path) = &args.figures {
        stoker_figures::append(path, &figures::of_comparisons(comparisons))?;
    }
    Ok(())
}
