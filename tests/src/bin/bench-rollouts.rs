//! `bench-rollouts`: changes of a fleet on a real API server and a scheduler that counts GPUs, with streams on every replica all the
//! time: how long each takes, how many replicas serve at least, and what becomes of the streams. A dip beyond what was allowed, a
//! stream that is cut, or a bad revision that is given up late ends it.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use clap::Parser;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use stoker_cluster::{Audit, Capacity, ControlPlaneOptions, Controllers, Gpus, NodeOptions};
use stoker_figures::{self as figures, Figure, Key, Run};
use stoker_tests::operator::{Rig, condition, intent_of, is_ready, revision_of, serves};

/// Measures rollouts of stand-in agents on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to. Default: they are only printed.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// GPUs of the first node; a replica has one.
const GPUS: u32 = 5;
const WITHIN: Duration = Duration::from_secs(300);
/// Clients at least, and one a replica; each has a stream at a time, of so many seconds.
const CLIENTS: u32 = 8;
const STREAM_SECONDS: u32 = 2;
/// In which a bad revision may show that it comes further.
const PROGRESS_SECONDS: u32 = 30;
/// From the change to its end, for a bad one: that, and until it has begun and those of it are gone.
const GIVEN_UP_WITHIN: Duration = Duration::from_secs(PROGRESS_SECONDS as u64 + 5);
const PAUSED: Duration = Duration::from_secs(10);
const NODE_GRACE: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_secs(3);

/// A change of a fleet.
struct Case {
    name: &'static str,
    replicas: u32,
    /// Of a second node; 0: there is none.
    more_gpus: u32,
    rollout: Value,
    /// What else replicas are made from.
    change: Value,
    middle: Middle,
    /// Whether it is given up.
    is_bad: bool,
    /// Replicas that serve at least.
    least: usize,
}

/// What happens on the way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Middle {
    Nothing,
    Edited,
    Paused,
    NodeLost,
}

/// What was seen.
struct Seen {
    took: Duration,
    fewest_serving: usize,
    most_pods: usize,
    whole: usize,
    cut: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let options = ControlPlaneOptions {
        controllers: Controllers::All { node_grace: NODE_GRACE },
        audit: Audit::Off,
        ..ControlPlaneOptions::default()
    };
    let rig = Rig::start_with(options, node(0, GPUS))?;
    let run = Run::start("make bench-rollouts");
    let mut found = Vec::new();
    println!(
        "| Case | Replicas | GPUs | `rollout` | Done after | Serving, at least | Pods, at most | Streams whole | Streams cut |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (number, case) in cases().iter().enumerate() {
        let name = format!("fleet-{number}");
        let other = (case.more_gpus > 0).then(|| rig.add_node(node(1, case.more_gpus))).transpose()?;
        rig.apply(&name, spec(case, &json!({}), false))?;
        rig.wait_ready(&name, WITHIN)?;
        let seen = roll(&rig, &name, case, || other.iter().for_each(|node| node.fall_silent()))?;
        println!("{}", line(case, &seen));
        ensure!(seen.cut == 0, "{}: {} streams were cut", case.name, seen.cut);
        ensure!(seen.fewest_serving >= case.least, "{}: {} served", case.name, seen.fewest_serving);
        let is_late = case.is_bad && seen.took > GIVEN_UP_WITHIN;
        ensure!(!is_late, "{}: given up after {:?}", case.name, seen.took);
        found.extend(figures_of(&run, case, &seen));
        other.iter().for_each(|node| node.speak());
        rig.delete(&name)?;
        rig.wait("its replicas are gone", WITHIN, |rig| Ok(rig.pods(&name)?.is_empty()))?;
    }
    args.out.map_or(Ok(()), |out| figures::append(&out, &found))
}

fn node(node_idx: usize, gpus: u32) -> NodeOptions {
    let capacity = Capacity { gpus: Gpus::Pretended(gpus), ..Capacity::default() };
    NodeOptions { name: format!("node-{node_idx}"), node_idx, heartbeat: HEARTBEAT, capacity, ..NodeOptions::default() }
}

fn cases() -> [Case; 9] {
    let fleet = Case {
        name: "one GPU more",
        replicas: GPUS - 1,
        more_gpus: 0,
        rollout: json!({}),
        change: json!({"pod": {"annotations": {"change": "b"}}}),
        middle: Middle::Nothing,
        is_bad: false,
        least: GPUS as usize - 1,
    };
    let like = || Case { rollout: fleet.rollout.clone(), change: fleet.change.clone(), ..fleet };
    [
        Case {
            name: "as many GPUs as replicas",
            replicas: GPUS,
            rollout: json!({"maxUnavailable": 1, "surgeSeconds": 2}),
            ..like()
        },
        like(),
        Case {
            name: "bad image",
            change: json!({"pod": {"image": "nowhere.example/agent:9"}}),
            is_bad: true,
            ..like()
        },
        Case {
            name: "bad model",
            change: json!({"model": {"source": "file:///stand-in/load-fails"}}),
            is_bad: true,
            ..like()
        },
        Case {
            name: "slow start, 15 s",
            change: json!({"model": {"source": "file:///stand-in/loads-seconds/15"}}),
            ..like()
        },
        Case { name: "edited in the middle", middle: Middle::Edited, ..like() },
        Case { name: "paused for 10 s", middle: Middle::Paused, ..like() },
        // Two on each node; those of the other one are missing until they are replaced.
        Case { name: "node with two replicas lost", middle: Middle::NodeLost, more_gpus: GPUS, least: 2, ..like() },
        Case {
            name: "a full cluster",
            replicas: 100,
            more_gpus: 100 - GPUS,
            rollout: json!({"minAvailable": "90%", "surgeSeconds": 2}),
            least: 90,
            ..like()
        },
    ]
}

/// Of a fleet whose replicas are made from this, too.
fn spec(case: &Case, more: &Value, is_paused: bool) -> Value {
    let mut rollout = json!({"progressDeadlineSeconds": PROGRESS_SECONDS});
    let mut spec = json!({
        "model": {"source": "builtin://ember"}, "replicas": case.replicas, "resources": {"gpus": 1},
        "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
    });
    extend(&mut rollout, &case.rollout);
    extend(&mut spec, more);
    if is_paused {
        rollout["paused"] = json!(true);
    }
    spec["rollout"] = rollout;
    spec
}

fn extend(object: &mut Value, more: &Value) {
    let more = more.as_object().cloned().unwrap_or_default();
    if let Some(object) = object.as_object_mut() {
        object.extend(more);
    }
}

/// Makes the change and looks on until it is done, or given up.
fn roll(rig: &Rig, name: &str, case: &Case, lose_node: impl Fn()) -> Result<Seen> {
    let old = revisions(&rig.pods(name)?);
    let load = Load::start(rig, case.replicas.max(CLIENTS));
    load.aim(&rig.pods(name)?);
    let begun = Instant::now();
    match case.middle {
        Middle::NodeLost => lose_node(),
        middle => rig.apply(name, spec(case, &case.change, middle == Middle::Paused))?,
    }
    let (mut fewest_serving, mut most_pods, mut is_untouched) = (usize::MAX, 0, true);
    rig.wait(&format!("{}: the change is over", case.name), WITHIN, |rig| {
        let pods = rig.pods(name)?;
        load.aim(&pods);
        fewest_serving = fewest_serving.min(pods.iter().filter(|pod| takes_requests(pod)).count());
        most_pods = most_pods.max(pods.len());
        let is_under_way =
            revisions(&pods) != old && pods.iter().any(|pod| !old.contains(&revision_of(pod)) && serves(pod));
        let is_time = match case.middle {
            Middle::Nothing | Middle::NodeLost => false,
            Middle::Edited => is_under_way,
            Middle::Paused => begun.elapsed() > PAUSED,
        };
        if is_time && std::mem::take(&mut is_untouched) {
            let change = if case.middle == Middle::Edited {
                json!({"pod": {"annotations": {"change": "c"}}})
            } else {
                case.change.clone()
            };
            rig.apply(name, spec(case, &change, false))?;
        }
        is_over(rig, name, case, (&pods, &old), is_untouched)
    })?;
    let took = begun.elapsed();
    let (whole, cut) = load.stop();
    Ok(Seen { took, fewest_serving, most_pods, whole, cut })
}

fn is_over(rig: &Rig, name: &str, case: &Case, (pods, old): (&[Pod], &[String]), is_untouched: bool) -> Result<bool> {
    let deployment = rig.get(name)?;
    let all_serve = pods.iter().filter(|pod| takes_requests(pod)).count() == case.replicas as usize;
    if case.is_bad {
        let is_given_up = condition(&deployment, "Ready").is_some_and(|(_, reason, _)| reason == "RolledBack");
        return Ok(is_given_up && all_serve && pods.len() == case.replicas as usize);
    }
    if case.middle == Middle::NodeLost {
        let is_here = |pod: &&Pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some("node-0");
        let here = pods.iter().filter(is_here).filter(|pod| takes_requests(pod)).count();
        return Ok(here == case.replicas as usize);
    }
    let has_old = pods.iter().any(|pod| old.contains(&revision_of(pod)));
    let was_touched = case.middle == Middle::Nothing || !is_untouched;
    Ok(was_touched && is_ready(&deployment) && all_serve && pods.len() == case.replicas as usize && !has_old)
}

/// Serves, and was not told to drain.
fn takes_requests(pod: &Pod) -> bool {
    serves(pod) && intent_of(pod).is_none_or(|(_, drains)| !drains)
}

fn revisions(pods: &[Pod]) -> Vec<String> {
    let mut revisions: Vec<String> = pods.iter().map(revision_of).collect();
    revisions.sort();
    revisions.dedup();
    revisions
}

/// Clients that have a stream each, one after the other, of whichever replica takes requests.
struct Load {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    addresses: Mutex<Vec<String>>,
    is_over: AtomicBool,
    running: AtomicUsize,
    whole: AtomicUsize,
    cut: AtomicUsize,
}

impl Load {
    fn start(rig: &Rig, n_clients: u32) -> Self {
        let shared = Arc::new(Shared::default());
        for client in 0..n_clients as usize {
            shared.running.fetch_add(1, Ordering::SeqCst);
            rig.spawn(stream_after_stream(shared.clone(), client));
        }
        Self { shared }
    }

    /// Says who takes requests.
    fn aim(&self, pods: &[Pod]) {
        let address = |pod: &Pod| pod.status.as_ref()?.pod_ip.clone();
        let addresses = pods.iter().filter(|pod| takes_requests(pod)).filter_map(address).collect();
        *self.shared.addresses.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
    }

    /// Lets the last streams end; how many were whole, and how many were cut.
    fn stop(self) -> (usize, usize) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        while self.shared.running.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(Duration::from_millis(50));
        }
        (self.shared.whole.load(Ordering::SeqCst), self.shared.cut.load(Ordering::SeqCst))
    }
}

async fn stream_after_stream(shared: Arc<Shared>, client: usize) {
    let mut turn = client;
    while !shared.is_over.load(Ordering::SeqCst) {
        let addresses = shared.addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        turn += 1;
        let begun = match addresses.get(turn % addresses.len().max(1)) {
            Some(address) => reqwest::get(format!("http://{address}:8000/stream/{STREAM_SECONDS}")).await.ok(),
            None => None,
        };
        // Who is refused before a stream begins asks another replica: no answer was lost.
        let Some(begun) = begun.filter(|answer| answer.status().is_success()) else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let is_whole = begun.text().await.is_ok_and(|text| text.trim_end().ends_with("done"));
        if is_whole { &shared.whole } else { &shared.cut }.fetch_add(1, Ordering::SeqCst);
    }
    shared.running.fetch_sub(1, Ordering::SeqCst);
}

fn line(case: &Case, seen: &Seen) -> String {
    let rollout = case.rollout.as_object().into_iter().flatten();
    let rollout: Vec<String> = rollout.map(|(field, value)| format!("{field}: {value}")).collect();
    let rollout = if rollout.is_empty() { String::new() } else { format!("`{}`", rollout.join(", ")) };
    let Seen { took, fewest_serving, most_pods, whole, cut } = seen;
    let (name, replicas, gpus) = (case.name, case.replicas, GPUS + case.more_gpus);
    let took = took.as_secs_f64();
    format!(
        "| {name} | {replicas} | {gpus} | {rollout} | {took:.0} s | {fewest_serving} | {most_pods} | {whole} | {cut} |"
    )
}

fn figures_of(run: &Run, case: &Case, seen: &Seen) -> Vec<Figure> {
    let name = format!("rollout {}", case.name);
    let figure = |metric, value: f64| run.figure(Key { model: "none", dtype: "none", case: &name, metric }, &[value]);
    vec![
        figure("seconds", seen.took.as_secs_f64()),
        figure("fewest_serving", seen.fewest_serving as f64),
        figure("streams", seen.whole as f64),
        figure("streams_cut", seen.cut as f64),
    ]
}
