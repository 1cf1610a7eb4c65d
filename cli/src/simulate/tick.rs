//! How long one tick of a large fleet takes: readings taken in, signals reduced, decisions made, on one core.

use std::{path::Path, time::Instant};

use anyhow::Result;
use stoker_crds::contract::LoadReport;
use stoker_figures::{Key, Run, append};
use stoker_scaling::{Answer, Expected, LoadWindow, ScaleState, ScalingSpec, Standing, decide_scale};

const DEPLOYMENTS: usize = 1000;
const REPLICAS: usize = 10;
const TICK_MS: u64 = 2000;
/// The windows are full before anything is measured.
const WARM_TICKS: u64 = 70;
const MEASURED_TICKS: u64 = 31;

struct Deployment {
    window: LoadWindow,
    state: ScaleState,
    reports: Vec<LoadReport>,
}

/// Prints the median of some ticks and appends it when a file is given.
pub(crate) fn measure(figures: Option<&Path>) -> Result<()> {
    let ids: Vec<String> = (0..REPLICAS).map(|idx| format!("chat-6f7d9c-{idx}")).collect();
    let mut fleet: Vec<Deployment> = (0..DEPLOYMENTS).map(|idx| deployment(idx, &ids)).collect();
    let spec = ScalingSpec::between(1, 32);
    let mut samples_ms = Vec::new();
    for tick in 1..=WARM_TICKS + MEASURED_TICKS {
        let now_ms = 1_000_000 + tick * TICK_MS;
        fleet.iter_mut().for_each(|deployment| report(deployment, now_ms));
        let start = Instant::now();
        for deployment in &mut fleet {
            decide(deployment, &ids, &spec, now_ms);
        }
        if tick > WARM_TICKS {
            samples_ms.push(start.elapsed().as_secs_f64() * 1000.0);
        }
    }
    let run = Run::start("kubectl stoker simulate --fleet-tick --figures docs/benchmarks/results/scaling.jsonl");
    let key = Key { model: "none", dtype: "none", case: "fleet_tick_10000", metric: "decide_ms" };
    let figure = run.figure(key, &samples_ms);
    println!("{}", serde_json::to_string(&figure)?);
    figures.map_or(Ok(()), |path| append(path, &[figure]))
}

fn deployment(idx: usize, ids: &[String]) -> Deployment {
    let mut window = LoadWindow::default();
    window.set_fleet(ids.iter().map(|id| (id.as_str(), Standing::Serving)));
    let reports = (0..REPLICAS).map(|replica| idle_report(idx * REPLICAS + replica)).collect();
    Deployment { window, state: ScaleState::starting_at(REPLICAS as u32), reports }
}

fn idle_report(seed: usize) -> LoadReport {
    LoadReport {
        start_id: seed.to_string(),
        revision: "r1".to_owned(),
        running: 20 + (seed % 40) as u32,
        waiting: (seed % 3) as u32,
        waiting_prefill_tokens: (seed % 3) as u64 * 400,
        referenced_blocks: 10_000 + (seed % 20_000) as u32,
        cached_blocks: 1_000,
        free_blocks: 39_000 - (seed % 20_000) as u32,
        ttft_p95_seconds: Some(0.2),
        itl_p95_seconds: Some(0.02),
        prefill_tokens_per_second: Some(30_000.0),
        ..LoadReport::idle(50_000)
    }
}

fn report(deployment: &mut Deployment, now_ms: u64) {
    for report in &mut deployment.reports {
        report.up_ms = now_ms;
        report.finished += u64::from(report.running) / 5;
    }
}

fn decide(deployment: &mut Deployment, ids: &[String], spec: &ScalingSpec, now_ms: u64) {
    let Deployment { window, state, reports } = deployment;
    window.set_fleet(ids.iter().map(|id| (id.as_str(), Standing::Serving)));
    for (id, report) in ids.iter().zip(reports.iter()) {
        window.take(id, Answer::Report(report), Expected { revision: "r1", now_ms });
    }
    window.tick(now_ms);
    *state = decide_scale(spec, window, state, now_ms).next;
}
