//! The loop closed on real agents: load on a real Service, KV blocks and preemptions of a real engine, on an API server
//! with real scheduling. KV budgets are small, so that pressure comes before two CPU cores are full.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{thread::sleep, time::Duration};

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_scaling::{Cause, DecisionRecord, Replay, explain};
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    operator::{Rig, serves},
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(120);
/// Decisions for fewer replicas than the load needs, one each two seconds. How soon it needs them is the machine's.
const ROUNDS: usize = 2;
/// Requests end within the drain's deadline even on a busy machine.
const DRAIN: (u32, u32) = (3, 120);

/// A cluster whose node has the real agent.
fn rig() -> Rig {
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    rig
}

/// Windows of this many seconds, so that a test takes minutes.
struct Windows {
    stable: u32,
    panic: u32,
}

fn spec(kv_cache_tokens: u32, targets: Value, windows: Windows) -> Value {
    let (withdraw, deadline) = DRAIN;
    json!({
        "model": {"source": "builtin://ember"}, "pod": {"image": IMAGE},
        "drain": {"withdrawSeconds": withdraw, "deadlineSeconds": deadline},
        "engine": {"maxModelLen": 512, "kvCacheTokens": kv_cache_tokens, "threads": 1},
        "scaling": {"max": 3, "targets": targets, "behavior": {
            "stableWindowSeconds": windows.stable, "panicWindowSeconds": windows.panic, "downStabilizationSeconds": 8,
            "spareReplicas": 0}},
    })
}

fn chat(rig: &Rig) -> Service {
    let base = format!("http://{}:8000", rig.service("chat").unwrap().spec.unwrap().cluster_ip.unwrap());
    Service { base, model: "chat".to_owned() }
}

fn serving(rig: &Rig) -> usize {
    rig.pods("chat").unwrap().iter().filter(|pod| serves(pod)).count()
}

fn records(rig: &Rig) -> Vec<DecisionRecord> {
    let records = rig.operator.records("chat", 0).unwrap();
    assert!(records.iter().all(|record| record.replay() == Replay::Identical));
    records
}

/// Every number that was wanted, without repetitions.
fn path(records: &[DecisionRecord]) -> Vec<u32> {
    let mut path: Vec<u32> = records.iter().map(|record| record.decision.desired).collect();
    path.dedup();
    path
}

/// Why the number moved, each time that it did.
fn moves(records: &[DecisionRecord]) -> String {
    let moved = records.iter().filter(|record| record.decision.desired != record.decision.previous);
    moved.map(explain).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_load_step_takes_one_replica_to_three_and_its_end_takes_them_back_without_cutting_a_stream() {
    let rig = rig();
    rig.apply("chat", spec(2048, json!({"slowdown": 20}), Windows { stable: 8, panic: 4 })).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    // A client that never stops sees every replica come and go. It is far from one replica's work: where other tests take the cores a
    // request takes twice as long, and a witness of two thirds of a replica becomes a load of its own.
    let witness = Clients::start(&chat(&rig), 1, 40, Duration::from_millis(700));
    sleep(Duration::from_secs(8));
    assert_eq!(path(&records(&rig)), [1], "one client is no pressure");
    let crowd = Clients::start(&chat(&rig), 24, 200, Duration::ZERO);
    rig.wait("three serve", SOON, |rig| Ok(serving(rig) == 3)).unwrap();
    let seen = records(&rig);
    let reached = seen.iter().position(|record| record.decision.desired == 3).unwrap();
    let short = |record: &&DecisionRecord| record.decision.unbounded > record.decision.desired;
    let n_short = seen[..=reached].iter().filter(short).count();
    println!("{n_short} rounds in which less was wanted than the load needs");
    assert!(n_short <= ROUNDS, "{n_short} rounds");
    sleep(Duration::from_secs(6));
    let (n_crowd, crowd_failures) = crowd.stop();

    rig.wait("one is left", SOON * 2, |rig| Ok(rig.pods("chat")?.len() == 1)).unwrap();
    let (n_witness, witness_failures) = witness.stop();
    println!("{n_crowd} + {n_witness} streams; {:?}", path(&records(&rig)));
    assert!(crowd_failures.is_empty() && witness_failures.is_empty(), "{crowd_failures:?} {witness_failures:?}");
    let path = path(&records(&rig));
    let peak = path.iter().position(|desired| *desired == 3).unwrap();
    let is_monotone = path[..=peak].is_sorted() && path[peak..].iter().rev().is_sorted();
    assert!(is_monotone, "reversals: {path:?}\n{}", moves(&records(&rig)));
}

#[test]
fn a_mix_that_preempts_scales_up_although_mean_kv_is_under_target() {
    let rig = rig();
    // Few long requests: the blocks of one and a half. Two clients that pause end at most eight a minute, however fast or slow
    // the machine is: too few to learn from, so that no other term can speak first. One preemption is above its target.
    let windows = Windows { stable: 60, panic: 6 };
    rig.apply("chat", spec(640, json!({"kv": 1, "preemptionsPerMinute": 0.5}), windows)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    sleep(Duration::from_secs(40));
    let mix = Clients::start(&chat(&rig), 2, 400, Duration::from_secs(15));
    rig.wait("a second replica is wanted", SOON, |rig| Ok(path(&rig.operator.records("chat", 0)?).len() > 1)).unwrap();
    let seen = records(&rig);
    let up = seen.iter().find(|record| record.decision.desired > record.decision.previous).unwrap();
    let (_, failures) = mix.stop();
    assert!(failures.is_empty(), "{failures:?}");
    let stable = &up.signals.stable;
    let mean_kv = stable.referenced / (stable.serving * up.signals.blocks_per_replica);
    println!(
        "{} -> {} at mean kv {mean_kv:.2}: {:?}",
        up.decision.previous, up.decision.desired, up.decision.demand.terms
    );
    // Who was preempted stands in line again: at the same moment the line may ask for as much, and not for more.
    let terms = &up.decision.demand.terms;
    let preemptions = terms.iter().find(|term| term.cause == Cause::Preemptions).unwrap();
    assert!(preemptions.replicas > 1.0 && terms.iter().all(|term| term.replicas <= preemptions.replicas), "{terms:?}");
    assert!(mean_kv < up.spec.targets.kv, "{mean_kv}");
    assert!(up.signals.preemptions_stable > 0);
}
