//! `bench-scaling`: what one tick of the operator's autoscaler takes with a thousand deployments of ten replicas each:
//! pods grouped and read, windows filled, decisions made, recorded and compared with the status. No cluster and no agent:
//! their pods and answers are made up. Figures are appended to a results file.
//!
//! `bench-scaling --steady --minutes 30`: constant load at three rates, one after the other, on real agents under the real operator,
//! with a roll in the middle of each. The machine should do nothing else: agents on busy cores are slower agents.

use std::{path::PathBuf, sync::Arc, time::Instant};

use anyhow::{Context, Result};
use clap::Parser;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{
    reflector::{Store, store::Writer},
    watcher::Event,
};
use serde_json::{Value, json};
use stoker_crds::{InferenceDeployment, contract::LoadReport};
use stoker_figures::{self as figures, Figure, Key, Run};
use stoker_operator::{
    lines::Waiting,
    metrics::Metrics,
    readings::Readings,
    scaling::{Autoscaler, DECIDE_EVERY, Kept, Ledger},
    vitals::Vitals,
};
use stoker_scaling::Answer;
use stoker_tests::steady::{Bench, Constant, Seen};
use tokio::sync::mpsc;

/// Measures a tick over a large fleet on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to.
    #[arg(long, default_value = "docs/benchmarks/results/scaling.jsonl")]
    out: PathBuf,
    /// Constant load on real agents instead.
    #[arg(long)]
    steady: bool,
    /// Minutes of each rate.
    #[arg(long, default_value_t = 30, requires = "steady", value_parser = clap::value_parser!(u32).range(2..))]
    minutes: u32,
}

/// Requests in flight in the mean at each rate: little for one replica, something for two, more for three.
const IN_FLIGHT: [f64; 3] = [0.15, 0.6, 1.2];

const DEPLOYMENTS: usize = 1000;
const REPLICAS: usize = 10;
/// The stable window is full before anything is measured.
const WARM_TICKS: u32 = 35;
const MEASURED_TICKS: u32 = 31;

fn main() -> Result<()> {
    let args = Args::parse();
    let figures = if args.steady { steady(args.minutes)? } else { vec![tick()?] };
    figures::append(&args.out, &figures)
}

/// Constant load at each rate; a table for people on the way.
fn steady(minutes: u32) -> Result<Vec<Figure>> {
    let bench = Bench::start()?;
    let rates = bench.rates(&IN_FLIGHT)?;
    let run = Run::start(&format!("bench-scaling --steady --minutes {minutes}"));
    let (mut rows, mut figures) = (Vec::new(), Vec::new());
    for (seed, rate) in (1..).zip(rates) {
        println!("{rate:.2} requests/s for {minutes} minutes");
        let seen = bench.run(Constant { rate, minutes, seed })?;
        rows.push(row(rate, &seen));
        figures.extend(figures_of(&run, seed, rate, &seen));
    }
    println!(
        "{:>10} {:>6} {:>18} {:>22} {:>10}  wanted each minute",
        "requests/s", "needed", "changes, settled", "changes after the roll", "late"
    );
    rows.iter().for_each(|row| println!("{row}"));
    Ok(figures)
}

fn row(rate: f64, seen: &Seen) -> String {
    let Seen { needed, wanted, changes, planned, late, .. } = seen;
    let wanted: Vec<String> = wanted.iter().map(u32::to_string).collect();
    let late = format!("{late} of {planned}");
    format!(
        "{rate:>10.2} {needed:>6} {:>18} {:>22} {late:>10}  {}",
        changes.settled,
        changes.since_roll,
        wanted.join(" ")
    )
}

fn figures_of(run: &Run, place: u64, rate: f64, seen: &Seen) -> Vec<Figure> {
    let case = format!("steady_{place}");
    let figure =
        |metric, samples: &[f64]| run.figure(Key { model: "ember", dtype: "bf16", case: &case, metric }, samples);
    let second_half = &seen.wanted[seen.wanted.len() / 2..];
    let wanted: Vec<f64> = second_half.iter().copied().map(f64::from).collect();
    vec![
        figure("requests_per_second", &[rate]),
        figure("replicas_needed", &[f64::from(seen.needed)]),
        figure("replicas_wanted", &wanted),
        figure("changes_settled", &[seen.changes.settled as f64]),
        figure("changes_after_roll", &[seen.changes.since_roll as f64]),
        figure("slo_misses", &[seen.late as f64]),
    ]
}

/// A tick over a large fleet.
fn tick() -> Result<Figure> {
    let begun: Timestamp = "2026-01-01T00:00:00Z".parse()?;
    let pods: Vec<Pod> = (0..DEPLOYMENTS * REPLICAS).map(pod).collect::<Result<_>>()?;
    let uids: Vec<String> = pods.iter().filter_map(|pod| pod.metadata.uid.clone()).collect();
    let deployments: Vec<InferenceDeployment> = (0..DEPLOYMENTS).map(deployment).collect::<Result<_>>()?;
    // Nobody reads what changed: a full channel is part of the worst case.
    let (changed, _changes) = mpsc::channel(1);
    let autoscaler = Autoscaler {
        deployments: store(deployments),
        pods: store(pods),
        ahead: store(Vec::new()),
        readings: Readings::default(),
        gateways: None,
        waiting: Waiting::default(),
        ledger: Ledger::default(),
        changed,
        metrics: Arc::new(Metrics::new()?),
        vitals: Vitals::default(),
    };
    let (mut kept, mut samples_ms) = (Kept::default(), Vec::new());
    for tick in 1..=WARM_TICKS + MEASURED_TICKS {
        let now = begun + SignedDuration::try_from(DECIDE_EVERY * tick)?;
        answer(&autoscaler.readings, &uids, now)?;
        let started = Instant::now();
        autoscaler.tick(&mut kept, now);
        if tick > WARM_TICKS {
            samples_ms.push(started.elapsed().as_secs_f64() * 1e3);
        }
    }
    let case = format!("operator_tick_{}", DEPLOYMENTS * REPLICAS);
    let run = Run::start("bench-scaling");
    let figure = run.figure(Key { model: "none", dtype: "none", case: &case, metric: "decide_ms" }, &samples_ms);
    println!("{} {} {:.2} (min {:.2}, max {:.2})", figure.case, figure.metric, figure.value, figure.min, figure.max);
    Ok(figure)
}

/// Every agent answers, with a load of its own.
fn answer(readings: &Readings, uids: &[String], now: Timestamp) -> Result<()> {
    let at_ms = u64::try_from(now.as_millisecond())?;
    let template: LoadReport = serde_json::from_value(json!({
        "timeMs": at_ms, "startId": "a", "upMs": at_ms, "intent": null, "revision": "0a", "phase": "ready", "error": null, "loadProgress": 1.0,
        "running": 20, "waiting": 1, "waitingPrefillTokens": 400, "totalBlocks": 50_000, "referencedBlocks": 0,
        "cachedBlocks": 0, "freeBlocks": 50_000, "preemptions": 0, "finished": at_ms / 250, "ttftP95Seconds": 0.2,
        "itlP95Seconds": 0.02, "prefillTokensPerSecond": 30_000.0, "stalledSeconds": 0.0
    }))?;
    for (idx, uid) in uids.iter().enumerate() {
        let referenced = 10_000 + u32::try_from(idx % 20_000)?;
        let report = LoadReport { referenced_blocks: referenced, free_blocks: 50_000 - referenced, ..template.clone() };
        readings.hear(uid, Answer::Report(&report), "0a", now);
    }
    Ok(())
}

fn deployment(idx: usize) -> Result<InferenceDeployment> {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": format!("chat-{idx}"), "namespace": "default", "uid": format!("deployment-{idx}")},
        "spec": {"model": {"source": "builtin://ember"}, "scaling": {"max": 32}},
        "status": {"replicas": REPLICAS, "revision": "0a"},
    });
    serde_json::from_value(object).context("a deployment")
}

fn pod(idx: usize) -> Result<Pod> {
    let (owner, ordinal) = (idx / REPLICAS, idx % REPLICAS);
    let condition = |type_: &str| -> Value {
        json!({"type": type_, "status": "True", "lastTransitionTime": "2025-12-31T00:00:41Z"})
    };
    let object = json!({
        "metadata": {
            "name": format!("chat-{owner}-0a-{ordinal}"), "namespace": "default", "uid": format!("pod-{idx}"),
            "creationTimestamp": "2025-12-31T00:00:00Z", "labels": {"stoker.dev/revision": "0a"},
            "ownerReferences": [{"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "controller": true,
                "name": format!("chat-{owner}"), "uid": format!("deployment-{owner}")}],
        },
        "spec": {"nodeName": format!("node-{}", idx % 100), "containers": []},
        "status": {
            "phase": "Running", "conditions": [condition("PodScheduled"), condition("Ready")],
            "containerStatuses": [{"name": "agent", "image": "", "imageID": "", "ready": true, "started": true,
                "restartCount": 0, "state": {"running": {"startedAt": "2025-12-31T00:00:05Z"}}}],
        },
    });
    serde_json::from_value(object).context("a pod")
}

fn store<K>(objects: Vec<K>) -> Store<K>
where
    K: kube::Resource<DynamicType = ()> + Clone + 'static,
{
    let mut writer = Writer::<K>::default();
    let reader = writer.as_reader();
    writer.apply_watcher_event(&Event::Init);
    objects.into_iter().for_each(|object| writer.apply_watcher_event(&Event::InitApply(object)));
    writer.apply_watcher_event(&Event::InitDone);
    reader
}
