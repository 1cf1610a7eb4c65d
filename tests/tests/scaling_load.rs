//! The loop closed on real agents: load on a real Service, KV blocks and preemptions of a real engine, on an API server
//! with real scheduling. KV budgets are small, so that pressure comes before two CPU cores are full.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, sleep},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_loadgen::client::{Ask, Client, Connections, Ending, Form, Options, Prompt, Sampling};
use stoker_scaling::{Cause, DecisionRecord, Replay};
use stoker_tests::{
    agent,
    operator::{Rig, serves},
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(120);
/// Requests end within the drain's deadline even on a busy machine.
const DRAIN: (u32, u32) = (3, 120);

/// Clients that ask one request after the other until they are told to stop.
struct Clients {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<String>>>,
    answered: Arc<AtomicUsize>,
}

impl Clients {
    /// `count` clients, each with requests of this many completion tokens, and a pause between two of them.
    fn start(base: &str, count: usize, max_tokens: u32, pause: Duration) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let threads = (0..count as u64).map(|seed| {
            let (stop, answered, base) = (stop.clone(), answered.clone(), base.to_owned());
            let ask = Ask { prompt: Prompt::Text("Tell me a story about the sea.".into()), max_tokens, seed };
            std::thread::spawn(move || client(&base, &ask, pause, &stop, &answered))
        });
        Self { threads: threads.collect(), stop, answered }
    }

    /// Lets each finish what it asked; every failure they saw.
    fn stop(self) -> (usize, Vec<String>) {
        self.stop.store(true, Ordering::SeqCst);
        let failures = self.threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        (self.answered.load(Ordering::SeqCst), failures)
    }
}

/// Asks until told to stop; each request has a connection of its own, so that the Service spreads them.
fn client(base: &str, ask: &Ask, pause: Duration, stop: &AtomicBool, answered: &AtomicUsize) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = Options {
        url: base.to_owned(),
        form: Form::Chat,
        connections: Connections::Fresh,
        ending: Ending::AtMaxTokens,
        sampling: Sampling::OfModel,
        api_key: None,
    };
    let http = runtime.block_on(async { Client::new(options) }).unwrap();
    let mut failures = Vec::new();
    while !stop.load(Ordering::SeqCst) {
        let answer = runtime.block_on(async { http.ask("chat", ask, (Instant::now() + SOON).into()).await });
        match answer.map(|answer| answer.usage.map(|usage| usage.completion_tokens)) {
            Ok(Some(tokens)) if tokens == ask.max_tokens => _ = answered.fetch_add(1, Ordering::SeqCst),
            Ok(tokens) => failures.push(format!("{tokens:?} of {} tokens", ask.max_tokens)),
            Err(failure) => failures.push(failure.to_string()),
        }
        sleep(pause);
    }
    failures
}

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

fn base(rig: &Rig) -> String {
    format!("http://{}:8000", rig.service("chat").unwrap().spec.unwrap().cluster_ip.unwrap())
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

#[test]
fn a_load_step_takes_one_replica_to_three_and_its_end_takes_them_back_without_cutting_a_stream() {
    let rig = rig();
    rig.apply("chat", spec(2048, json!({"slowdown": 20}), Windows { stable: 8, panic: 4 })).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    // A client that never stops sees every replica come and go.
    let witness = Clients::start(&base(&rig), 1, 40, Duration::from_millis(200));
    sleep(Duration::from_secs(8));
    assert_eq!(path(&records(&rig)), [1], "one client is no pressure");
    let crowd = Clients::start(&base(&rig), 24, 200, Duration::ZERO);
    rig.wait("three serve", SOON, |rig| Ok(serving(rig) == 3)).unwrap();
    let seen = records(&rig);
    let pressed = seen.iter().find(|record| record.decision.pressure > 1.0).unwrap().at_ms;
    let reached = seen.iter().find(|record| record.decision.desired == 3).unwrap().at_ms;
    println!("{} ms from pressure above target to three wanted", reached - pressed);
    assert!(reached - pressed <= 10_000, "{} ms", reached - pressed);
    sleep(Duration::from_secs(6));
    let (n_crowd, crowd_failures) = crowd.stop();

    rig.wait("one is left", SOON * 2, |rig| Ok(rig.pods("chat")?.len() == 1)).unwrap();
    let (n_witness, witness_failures) = witness.stop();
    println!("{n_crowd} + {n_witness} streams; {:?}", path(&records(&rig)));
    assert!(crowd_failures.is_empty() && witness_failures.is_empty(), "{crowd_failures:?} {witness_failures:?}");
    let path = path(&records(&rig));
    let peak = path.iter().position(|desired| *desired == 3).unwrap();
    assert!(path[..=peak].is_sorted() && path[peak..].iter().rev().is_sorted(), "reversals: {path:?}");
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
    let mix = Clients::start(&base(&rig), 2, 400, Duration::from_secs(15));
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
    assert_eq!(up.decision.cause, Some(Cause::Preemptions));
    assert!(mean_kv < up.spec.targets.kv, "{mean_kv}");
    assert!(up.signals.preemptions_stable > 0);
}
