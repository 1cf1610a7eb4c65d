//! `bench-operator`: twenty deployments on a real API server: how long until all are ready, what the operator writes once
//! they are settled, how long its rounds take and how much memory it holds. Figures are appended to a results file.

use std::{path::PathBuf, thread::sleep, time::Duration};

use anyhow::Result;
use clap::Parser;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use stoker_cluster::Audit;
use stoker_crds::InferenceDeployment;
use stoker_figures::{self as figures, Key, Run};
use stoker_tests::{
    measured::{Rounds, Writes},
    operator::Rig,
};

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
    let busy = Rounds::read(&rig.operator)?;
    sleep(SETTLE);
    let (before, begun) = (Writes::read(&rig.cluster.control_plane)?, Rounds::read(&rig.operator)?);
    sleep(Duration::from_secs(args.seconds));
    let written = Writes::read(&rig.cluster.control_plane)?.since(&before);
    touch(&rig, &names)?;
    let settled = Rounds::read(&rig.operator)?.since(&begun);
    let rss = rig.operator.rss_mb()?;

    let run = Run::start("make bench");
    let case = format!("reconcile_{}", args.deployments);
    let start_case = format!("{case}_start");
    let figure =
        |case: &str, metric: &str, value: f64| run.figure(Key { model: "none", dtype: "none", case, metric }, &[value]);
    println!("written in {} s: {written:?}; rounds from apply to ready: {busy:?}; settled: {settled:?}", args.seconds);
    let found = [
        figure(&start_case, "seconds", ready),
        figure(&start_case, "p99_ms", busy.p99_seconds() * 1e3),
        figure(&case, "api_writes", written.of_others() as f64),
        figure(&case, "lease_writes", written.of_lease() as f64),
        figure(&case, "p99_ms", settled.p99_seconds() * 1e3),
        figure(&case, "rss_mb", rss),
    ];
    found.iter().for_each(|figure| println!("{} {} {:.3}", figure.case, figure.metric, figure.value));
    figures::append(&args.out, &found)
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
