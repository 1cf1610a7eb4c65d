//! `kubectl stoker simulate`: what would the autoscaler do, and what would others?
//!
//! Reads a trace (named, or a file), runs the deciding function of the operator and the rivals asked for against the
//! same simulated replicas, and shows replicas, KV usage, late answers and preemptions over time. Touches nothing but
//! the files it is told to write.

mod claims;
mod figures;
mod html;
mod report;
mod tick;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use stoker_scaling::ScalingSpec;
use stoker_sim::{
    Comparison, Mishaps, PeerRule, Progress, ReplicaModel, Router, Setting, Slo, World, compare, named_world,
    recorded_replica, recorded_world, run_ours,
};
use stoker_workload::{TRACE_NAMES, Trace};

use crate::{output::Output, records, settings};

/// What to simulate.
#[derive(Debug, Args)]
pub(crate) struct Simulate {
    /// Name of a trace, `all`, or a file: one JSON object a line, requests or recorded decisions; or an Azure LLM
    /// inference trace of 2023 or 2024, BurstGPT or Mooncake as published.
    #[arg(long, required_unless_present = "fleet_tick")]
    trace: Option<String>,
    /// Changes the specification, e.g. `scaling.targets.kv=0.7`; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
    /// A rule to compare with at equal GPU-hours: `hpa-queue`, `kpa`, `wva` or `wva-v2`, with any of its own knobs, such as
    /// `kpa:target=70,scaleDownDelay=300`; may be repeated. Without a target the best one is looked for.
    #[arg(long, value_name = "RULE[:KNOB=VALUE,...]")]
    against: Vec<PeerRule>,
    /// The replicas: a JSON file with any of `stepSeconds`, `sequenceSeconds`, `contextTokenSeconds`,
    /// `prefillTokenSeconds`, `prefillPairSeconds`, `blocks`, `maxBatchedTokens`, `maxNumSeqs`, `startSeconds`,
    /// `warmStartSeconds`, `startSigma`, `drainSeconds` (`stoker-bench curve --replica-out` writes one); or recorded decisions of a
    /// deployment (`explain NAME --record FILE`), whose engines said what their steps cost. Default: an 8B model on one H200.
    #[arg(long, value_name = "FILE")]
    replica: Option<PathBuf>,
    /// Median seconds that a replica takes to start on a node that has the model in memory. `--set scaling.standby=N` asks for N such
    /// nodes; one that was taken is made up for by another, which fetches the model for as long as a cold start takes.
    #[arg(long, value_name = "SECONDS")]
    warm_start: Option<f64>,
    /// Replicas that serve when it begins. Default: enough for the first minute.
    #[arg(long)]
    start: Option<u32>,
    /// How a request finds its replica: `best-of-two`, `random` (kube-proxy, a connection a request), `least-requests`, or `prefix`
    /// (our gateway: the longest cached beginning within bounded load), for traces that name what prompts share, as Mooncake's and
    /// lines with `hashIds` do.
    #[arg(long, default_value = "best-of-two")]
    router: Router,
    /// Each request of the trace this many times, up to a minute apart.
    #[arg(long, default_value_t = 1)]
    copies: u32,
    /// Losses of a serving replica, per replica and hour.
    #[arg(long, default_value_t = 0.0)]
    losses_per_hour: f64,
    /// Share of the replicas that land on a node where everything takes `--slow-times` as long.
    #[arg(long, default_value_t = 0.0)]
    slow_share: f64,
    /// See `--slow-share`.
    #[arg(long, default_value_t = 2.0)]
    slow_times: f64,
    /// Replicas at least.
    #[arg(long, default_value_t = 1)]
    min: u32,
    /// Replicas at most.
    #[arg(long, default_value_t = 24)]
    max: u32,
    /// Seed of arrivals, sizes, start times, routing and mishaps.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes a report (HTML), a picture of each trace and, with several, a page of results into this directory.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Writes every decision into this file, one record a line: `explain --file` reads it, and it is a trace again.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
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
    let worlds = worlds(args, &spec)?;
    show(args, &compare(&worlds, &spec, &args.against, &setting(args, &spec), &tell))?;
    record(args, &spec, &worlds)
}

/// What was asked for, with every change of the replicas and their surroundings.
fn worlds(args: &Simulate, spec: &ScalingSpec) -> Result<Vec<World>> {
    ensure!(args.copies > 0 && args.start != Some(0), "--copies and --start take at least 1");
    let shares = [args.losses_per_hour, args.slow_share, args.slow_times];
    ensure!(
        shares.iter().all(|share| share.is_finite() && *share >= 0.0)
            && args.slow_share <= 1.0
            && args.slow_times >= 1.0,
        "--losses-per-hour takes 0 or more, --slow-share 0 to 1, --slow-times 1 or more"
    );
    let replica = args.replica.as_deref().map(replica).transpose()?;
    let change = |world: World| standing_by(changed(world, args, replica.as_ref())?, args, spec);
    loaded(args.trace.as_deref().unwrap_or_default(), args.seed)?.into_iter().map(change).collect()
}

fn changed(mut world: World, args: &Simulate, replica: Option<&ReplicaModel>) -> Result<World> {
    if args.copies > 1 || replica.is_some() {
        let trace = if args.copies > 1 { world.trace.copied(args.copies, args.seed) } else { world.trace };
        world = World::of(trace, replica.unwrap_or(&world.replica).clone())?;
    }
    world.initial = args.start.unwrap_or(world.initial);
    world.router = args.router;
    world.mishaps =
        Mishaps { losses_per_hour: args.losses_per_hour, slow_share: args.slow_share, slow_times: args.slow_times };
    Ok(world)
}

fn standing_by(mut world: World, args: &Simulate, spec: &ScalingSpec) -> Result<World> {
    let warm = args.warm_start.or(world.replica.warm_start_seconds);
    ensure!(
        spec.standby == 0 || warm.is_some(),
        "scaling.standby is {}, and nobody said how long a warm start takes: give --warm-start SECONDS, or warmStartSeconds in --replica",
        spec.standby
    );
    ensure!(
        args.warm_start.is_none() || spec.standby > 0,
        "--warm-start is for nodes that stand by: ask for some by --set scaling.standby=N"
    );
    ensure!(warm.is_none_or(|seconds| seconds.is_finite() && seconds >= 0.0), "--warm-start takes 0 or more seconds");
    world.replica.warm_start_seconds = warm;
    world.standby = spec.standby;
    Ok(world)
}

fn replica(path: &Path) -> Result<ReplicaModel> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    if records::are_in(&text) {
        let records = records::parse(&path.to_string_lossy(), &text)?;
        return recorded_replica(&records).with_context(|| format!("read {}", path.display()));
    }
    let model: ReplicaModel = serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?;
    match model.error() {
        Some(error) => bail!("{}: {error}", path.display()),
        None => Ok(model),
    }
}

fn loaded(name: &str, seed: u64) -> Result<Vec<World>> {
    if name == "all" {
        return Ok(TRACE_NAMES.iter().filter_map(|name| named_world(name, seed)).collect());
    }
    if let Some(world) = named_world(name, seed) {
        return Ok(vec![world]);
    }
    let path = PathBuf::from(name);
    if !path.exists() {
        bail!("no trace and no file is called {name:?}: use a file, `all`, or one of {}", TRACE_NAMES.join(", "));
    }
    let text = fs::read_to_string(&path).with_context(|| format!("read {name}"))?;
    let stem = path.file_stem().map_or_else(|| "trace".into(), |stem| stem.to_string_lossy());
    let world = if records::are_in(&text) {
        recorded_world(&stem, &records::parse(name, &text)?, seed).with_context(|| format!("read {name}"))?
    } else {
        let read = Trace::read(&stem, &text).with_context(|| format!("read {name}"))?;
        read.tell(|told| eprintln!("{told}"));
        World::of(read.trace, ReplicaModel::default()).with_context(|| format!("read {name}"))?
    };
    Ok(vec![world])
}

/// A line for each tenth of a search.
fn tell(progress: Progress) {
    let Progress { rival, done, of } = progress;
    if done % of.div_ceil(10) == 0 || done == of {
        eprintln!("{}: {done} of {of} simulations", rival);
    }
}

fn setting(args: &Simulate, spec: &ScalingSpec) -> Setting {
    Setting { min: spec.min, max: spec.max, seed: args.seed, slo: Slo::default() }
}

fn record(args: &Simulate, spec: &ScalingSpec, worlds: &[World]) -> Result<()> {
    let Some(path) = &args.record else { return Ok(()) };
    let records = worlds.iter().flat_map(|world| run_ours(world, spec, &setting(args, spec)).1);
    let lines: String = records.map(|record| record.to_line() + "\n").collect();
    fs::write(path, lines).with_context(|| format!("write {}", path.display()))
}

fn show(args: &Simulate, comparisons: &[Comparison]) -> Result<()> {
    let mut text: String = comparisons.iter().map(report::terminal).collect();
    if comparisons.len() > 1 {
        text += &format!("\n{}", report::sums(comparisons));
        text += &format!("\n{}", claims::table(comparisons, |comparison| &comparison.one_target));
    }
    args.output.print(&text, || report::json(comparisons));
    if let Some(dir) = &args.out {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        for comparison in comparisons {
            let path = dir.join(format!("{}.svg", comparison.trace));
            fs::write(&path, report::picture(comparison)).with_context(|| format!("write {}", path.display()))?;
        }
        let path = dir.join("report.html");
        fs::write(&path, html::report(comparisons)).with_context(|| format!("write {}", path.display()))?;
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
