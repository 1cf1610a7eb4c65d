//! `bench-operator`: twenty deployments on a real API server: how long until all are ready, what the operator writes once
//! they are settled, how long its rounds take and how much memory it holds. Figures are appended to a results file.

use std::{collections::BTreeMap, fs, path::PathBuf, thread::sleep, time::Duration};

use anyhow::{Context, Result};
use clap::Parser;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::InferenceDeployment;
use stoker_figures::{self as figures, Key, Run};
use stoker_tests::operator::Rig;

/// Measures the operator with stand-in agents on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to.
    #[arg(long, default_value = "docs/benchmarks/results/control_plane.jsonl")]
    out: PathBuf,
    /// Deployments, of one replica each.
    #[arg(long, default_value_t = 20)]
    deployments: usize,
    /// Seconds in which a settled operator is watched.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
}

/// Time for readings and statuses to come to rest.
const SETTLE: Duration = Duration::from_secs(35);
const READY_WITHIN: Duration = Duration::from_secs(180);
/// Changes of each deployment that ask for a round and nothing else.
const TOUCHES: usize = 10;
const OPERATOR_USER: &str = "system:serviceaccount:stoker-system:stoker-operator";
const ROUNDS: &str = "stoker_operator_reconcile_duration_seconds";

fn main() -> Result<()> {
    let args = Args::parse();
    let rig = Rig::start(Audit::Metadata)?;
    let names: Vec<String> = (0..args.deployments).map(|number| format!("bench-{number}")).collect();
    for name in &names {
        rig.apply(name, json!({"model": {"source": "builtin://ember"}, "drain": {"deadlineSeconds": 1}}))?;
    }
    let started = std::time::Instant::now();
    for name in &names {
        rig.wait_ready(name, READY_WITHIN)?;
    }
    let ready = started.elapsed().as_secs_f64();
    let busy = Rounds::read(&rig)?;
    sleep(SETTLE);
    let (before, begun) = (writes(&rig)?, Rounds::read(&rig)?);
    sleep(Duration::from_secs(args.seconds));
    let written = difference(&writes(&rig)?, &before);
    touch(&rig, &names)?;
    let settled = Rounds::read(&rig)?.since(&begun);
    let rss = rig.operator.rss_mb()?;

    let run = Run::start("make bench");
    let case = format!("reconcile_{}", args.deployments);
    let start_case = format!("{case}_start");
    let figure =
        |case: &str, metric: &str, value: f64| run.figure(Key { model: "none", dtype: "none", case, metric }, &[value]);
    let leases: u64 = written.iter().filter(|(what, _)| what.ends_with(" leases")).map(|(_, count)| count).sum();
    let others: u64 = written.values().sum::<u64>() - leases;
    println!("written in {} s: {written:?}; rounds from apply to ready: {busy:?}; settled: {settled:?}", args.seconds);
    let found = [
        figure(&start_case, "seconds", ready),
        figure(&start_case, "p99_ms", busy.p99_seconds() * 1e3),
        figure(&case, "api_writes", others as f64),
        figure(&case, "lease_writes", leases as f64),
        figure(&case, "p99_ms", settled.p99_seconds() * 1e3),
        figure(&case, "rss_mb", rss),
    ];
    found.iter().for_each(|figure| println!("{} {} {:.3}", figure.case, figure.metric, figure.value));
    figures::append(&args.out, &found)
}

/// Requests of the operator that changed something, by verb and resource, from the API server's own audit log.
fn writes(rig: &Rig) -> Result<BTreeMap<String, u64>> {
    let log = fs::read_to_string(rig.cluster.control_plane.audit_log())?;
    let entries = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut counts = BTreeMap::new();
    for entry in
        entries.filter(|entry| entry["user"]["username"] == OPERATOR_USER && entry["stage"] == "ResponseComplete")
    {
        let verb = entry["verb"].as_str().unwrap_or_default();
        if !["get", "list", "watch"].contains(&verb) {
            let resource = entry["objectRef"]["resource"].as_str().unwrap_or_default();
            *counts.entry(format!("{verb} {resource}")).or_default() += 1;
        }
    }
    Ok(counts)
}

fn difference(after: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = after.iter().map(|(what, count)| (what.clone(), count - before.get(what).unwrap_or(&0)));
    grown.filter(|(_, count)| *count > 0).collect()
}

/// Asks for rounds that find nothing to do.
fn touch(rig: &Rig, names: &[String]) -> Result<()> {
    let api = rig.api::<InferenceDeployment>();
    for touch in 0..TOUCHES {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {"bench/touch": touch.to_string()}}}));
        for name in names {
            rig.block_on(api.patch(name, &PatchParams::default(), &patch))?;
        }
    }
    sleep(Duration::from_secs(2));
    Ok(())
}

/// The operator's histogram of rounds.
#[derive(Debug)]
struct Rounds {
    /// Upper bound in seconds and number of rounds up to it.
    buckets: Vec<(f64, f64)>,
}

impl Rounds {
    fn read(rig: &Rig) -> Result<Self> {
        let text = rig.operator.metrics()?;
        let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("{ROUNDS}_bucket{{le=\"")));
        let buckets = lines.map(|line| {
            let (bound, count) = line.split_once("\"} ").context("a bucket has a count")?;
            Ok((bound.replace("+Inf", "inf").parse()?, count.parse()?))
        });
        Ok(Self { buckets: buckets.collect::<Result<_>>()? })
    }

    /// The rounds that came after `earlier`.
    fn since(&self, earlier: &Self) -> Self {
        let buckets = self.buckets.iter().zip(&earlier.buckets);
        Self { buckets: buckets.map(|((bound, count), (_, before))| (*bound, count - before)).collect() }
    }

    /// The upper bound of the bucket that holds the 99th percentile: never better than the truth.
    fn p99_seconds(&self) -> f64 {
        let total = self.buckets.last().map_or(0.0, |(_, count)| *count);
        let within = self.buckets.iter().find(|(_, count)| *count >= 0.99 * total);
        within.map_or(f64::INFINITY, |(bound, _)| *bound)
    }
}
