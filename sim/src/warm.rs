//! What nodes that stand by are worth: loads that take a deployment from one replica to eight, with and without such nodes, for starts of
//! some lengths.
//!
//! Owns the cases and the table of docs/autoscaling.md. A node that stands by costs memory and no GPU, so it is in no GPU-hours.

use std::fmt::Write as _;

use stoker_scaling::ScalingSpec;
use stoker_workload::{HashIds, Request, Rng, Trace};

use crate::{
    compare::{in_parallel, run_ours},
    fleet::Setting,
    model::{ReplicaModel, Slo},
    outcome::Outcomes,
    world::{World, named_world},
};

/// Replicas at most.
pub const REPLICAS_MAX: u32 = 8;
/// Nodes that stand by, of each column of the table.
pub const STANDBY: [u32; 4] = [0, 1, 2, 4];
const COLD_SECONDS: [f64; 2] = [300.0, 60.0];
const WARM_SECONDS: [f64; 2] = [20.0, 5.0];
/// The trace that jumps: requests a second, and for how many minutes.
const JUMP: [(f64, f64); 3] = [(5.0, 15.0), (40.0, 10.0), (5.0, 35.0)];
/// Where it finds the deployment is chance, so it is played so many times.
const JUMPS: u64 = 3;

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Row {
    /// Name of the trace.
    pub trace: &'static str,
    /// Median seconds of a cold start.
    pub cold_seconds: f64,
    /// The same of a warm one.
    pub warm_seconds: f64,
    /// What each column of [`STANDBY`] came to, each time that the trace was played.
    pub outcomes: Vec<Vec<Outcomes>>,
}

/// All rows.
pub fn rows() -> Vec<Row> {
    let ramp = named_world("ramp", 1).expect("a named trace");
    let loads = [("jump", (1..=JUMPS).map(jump).collect()), ("ramp", vec![ramp])];
    loads.iter().flat_map(|(trace, worlds)| rows_of(trace, worlds)).collect()
}

fn rows_of(trace: &'static str, worlds: &[World]) -> Vec<Row> {
    COLD_SECONDS.iter().flat_map(|cold| rows_of_cold(trace, worlds, *cold)).collect()
}

/// Without a node that stands by no start is warm, and the first cell of all rows is the same.
fn rows_of_cold(trace: &'static str, worlds: &[World], cold_seconds: f64) -> [Row; WARM_SECONDS.len()] {
    let [none, some @ ..] = STANDBY;
    let with_some = WARM_SECONDS.iter().flat_map(|warm| some.map(|standby| (standby, *warm)));
    let cells: Vec<(u32, f64)> = std::iter::once((none, cold_seconds)).chain(with_some).collect();
    let all = in_parallel(&cells, |(standby, warm)| runs(worlds, *standby, cold_seconds, *warm));
    let of_row = |warm| cells.iter().zip(&all).filter(move |((standby, of), _)| *standby == none || *of == warm);
    WARM_SECONDS.map(|warm_seconds| Row {
        trace,
        cold_seconds,
        warm_seconds,
        outcomes: of_row(warm_seconds).map(|(_, runs)| runs.clone()).collect(),
    })
}

fn runs(worlds: &[World], standby: u32, cold_seconds: f64, warm_seconds: f64) -> Vec<Outcomes> {
    let spec = ScalingSpec { standby, ..ScalingSpec::between(1, REPLICAS_MAX) };
    let run = |seed: u64, world: &World| {
        let replica = ReplicaModel {
            start_seconds: cold_seconds,
            warm_start_seconds: Some(warm_seconds),
            ..world.replica.clone()
        };
        let setting = Setting { min: 1, max: REPLICAS_MAX, seed, slo: Slo::default() };
        run_ours(&World { replica, standby, initial: 1, ..world.clone() }, &spec, &setting).0
    };
    (1..).zip(worlds).map(|(seed, world)| run(seed, world)).collect()
}

/// Load that is eight times as high from one second to the next.
fn jump(seed: u64) -> World {
    let mut rng = Rng::seeded(seed);
    let (mut requests, mut begun) = (Vec::new(), 0.0);
    for (rate, minutes) in JUMP {
        let end = begun + 60.0 * minutes;
        let mut arrived = begun + rng.exponential() / rate;
        while arrived < end {
            requests.push(request(arrived, &mut rng));
            arrived += rng.exponential() / rate;
        }
        begun = end;
    }
    let trace = Trace::of("jump", requests).expect("it has requests");
    World::of(trace, ReplicaModel::default()).expect("its requests fit")
}

fn request(arrived: f64, rng: &mut Rng) -> Request {
    Request {
        arrived,
        prompt_tokens: 1 + rng.log_normal(2000.0, 0.5) as u32,
        cached_tokens: 0,
        completion_tokens: 1 + rng.log_normal(300.0, 0.5) as u32,
        hash_ids: HashIds::default(),
    }
}

/// The table of docs/autoscaling.md.
pub fn table(rows: &[Row]) -> String {
    let mut text = String::from("| trace | cold, warm start |");
    for standby in STANDBY {
        write!(text, " standby {standby} |").expect("a string takes everything");
    }
    text += "\n|---|---|";
    text += &"---:|".repeat(STANDBY.len());
    text += "\n";
    for Row { trace, cold_seconds, warm_seconds, outcomes } in rows {
        write!(text, "| `{trace}` | {cold_seconds} s, {warm_seconds} s |").expect("a string takes everything");
        for runs in outcomes {
            let mean = |of: fn(&Outcomes) -> f64| runs.iter().map(of).sum::<f64>() / runs.len() as f64;
            let (late, hours) = (mean(|run| run.misses as f64), mean(Outcomes::gpu_hours));
            write!(text, " {late:.0} late, {hours:.1} h |").expect("a string takes everything");
        }
        text += "\n";
    }
    text
}
