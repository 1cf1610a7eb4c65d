//! Rolls, scale-downs, evictions and node drains, one after another and several deployments at a time, on real agents that
//! stream through their Services: every answer is whole. CI makes a few; `make rolls` makes a thousand.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{scope, sleep},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_cluster::{ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    cluster::run_with_input,
    operator::{Rig, is_ready, revision_of, serves},
};

const IMAGE: &str = "real/agent:1";
/// For one move, on a machine that is busy with several.
const SOON: Duration = Duration::from_secs(240);
const REPLICAS: usize = 2;
/// Moves that CI makes.
const FEW: usize = 6;
/// Moves for each deployment, while there are more than two and less than eight.
const MOVES_EACH: usize = 30;
/// One move of so many drains a node, which moves a half of all replicas.
const DRAINS: usize = 40;
const NODES: [&str; 2] = ["node-0", "node-1"];

/// What is done to a deployment.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Move {
    Roll,
    ScaleDown,
    Evict,
    DrainNode,
}

/// After so many moves more it is said how far it is: a thousand take an hour.
const SAID_EVERY: usize = 25;

/// Moves that are left, and those that were made.
struct Moves {
    left: AtomicUsize,
    made: Mutex<BTreeMap<Move, usize>>,
    begun: Instant,
}

impl Moves {
    /// True while there is another one to make.
    fn take(&self) -> bool {
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    fn note(&self, made: Move) {
        let mut all = self.made.lock().unwrap();
        *all.entry(made).or_default() += 1;
        let n_made: usize = all.values().sum();
        if n_made.is_multiple_of(SAID_EVERY) {
            println!("{n_made} moves after {:.0} s: {all:?}", self.begun.elapsed().as_secs_f64());
        }
    }
}

fn number_of(variable: &str) -> Option<usize> {
    std::env::var(variable).ok()?.parse().ok()
}

fn rig() -> (Rig, stoker_cluster::ProcessNode) {
    let node = |node_idx: usize| NodeOptions { name: NODES[node_idx].to_owned(), node_idx, ..NodeOptions::default() };
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let rig = Rig::start_with(options, node(0)).unwrap();
    let other = rig.add_node(node(1)).unwrap();
    for node in [&rig.cluster.node, &other] {
        node.add_image(IMAGE, agent::binary().unwrap());
    }
    (rig, other)
}

fn spec(change: usize) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": REPLICAS,
        "pod": {"image": IMAGE, "annotations": {"change": change.to_string()}},
        // The Service's proxy learns of a replica that withdraws within this time, and answers end within that.
        "drain": {"withdrawSeconds": 3, "deadlineSeconds": 120},
        "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
    })
}

fn settled(rig: &Rig, name: &str, replicas: usize) -> bool {
    let pods = rig.pods(name).unwrap_or_default();
    rig.get(name).is_ok_and(|deployment| is_ready(&deployment)) && pods.len() == replicas && pods.iter().all(serves)
}

fn wait_settled(rig: &Rig, name: &str, replicas: usize) {
    rig.wait(&format!("{name} has {replicas}"), SOON, |rig| Ok(settled(rig, name, replicas))).unwrap();
}

/// Asks as `kubectl drain` does for one pod; false when the budget does not allow it now.
fn evict(rig: &Rig, pod: &str) -> bool {
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}});
    let path = format!("/api/v1/namespaces/default/pods/{pod}/eviction");
    let mut kubectl = rig.cluster.control_plane.kubectl().unwrap();
    kubectl.args(["create", "--raw", &path, "-f", "-"]);
    run_with_input(kubectl, &eviction.to_string()).is_ok()
}

fn make(rig: &Rig, name: &str, number: usize, what: Move, random: &mut StdRng) {
    match what {
        Move::Roll => {
            let before = rig.get(name).unwrap().status.unwrap().revision;
            rig.apply(name, spec(number)).unwrap();
            rig.wait(&format!("{name} is rolled"), SOON, |rig| {
                Ok(settled(rig, name, REPLICAS) && rig.pods(name)?.iter().all(|pod| revision_of(pod) != before))
            })
            .unwrap();
        }
        Move::ScaleDown => {
            // Down to one, the budget lets a node drain take the last one, as it must.
            rig.scale(name, 3).unwrap();
            wait_settled(rig, name, 3);
            rig.scale(name, 2).unwrap();
        }
        Move::Evict | Move::DrainNode => {
            let pods = rig.pods(name).unwrap();
            let victim = &pods[random.random_range(0..pods.len())];
            rig.wait(&format!("{} is evicted", victim.name_any()), SOON, |rig| {
                let there = rig.pods(name)?.iter().any(|pod| pod.uid() == victim.uid());
                Ok(!there || evict(rig, &victim.name_any()))
            })
            .unwrap();
            rig.wait("it is gone", SOON, |rig| Ok(rig.pods(name)?.iter().all(|pod| pod.uid() != victim.uid())))
                .unwrap();
        }
    }
    wait_settled(rig, name, REPLICAS);
}

/// As `kubectl drain` and `uncordon`.
fn drain_node(rig: &Rig, node: &str) {
    let nodes = Api::<Node>::all(rig.client());
    let cordon = |closed: bool| {
        let patch = Patch::Merge(json!({"spec": {"unschedulable": closed}}));
        rig.block_on(nodes.patch(node, &PatchParams::default(), &patch)).unwrap();
    };
    cordon(true);
    rig.wait(&format!("{node} is drained"), SOON * 2, |rig| {
        let there = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = rig.block_on(rig.api::<Pod>().list(&there))?.items;
        let staying = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        staying.for_each(|pod| _ = evict(rig, &pod.name_any()));
        Ok(pods.is_empty())
    })
    .unwrap();
    cordon(false);
}

#[test]
fn whatever_moves_replicas_every_answer_is_whole() {
    let count = number_of("STOKER_ROLLS").unwrap_or(FEW);
    let seed = number_of("STOKER_TEST_SEED").unwrap_or(20_261_122) as u64;
    let (rig, _other) = rig();
    let names: Vec<String> = (0..(count / MOVES_EACH).clamp(2, 8)).map(|number| format!("roll-{number}")).collect();
    for name in &names {
        rig.apply(name, spec(0)).unwrap();
    }
    let clients: Vec<Clients> = names
        .iter()
        .map(|name| {
            wait_settled(&rig, name, REPLICAS);
            let base = format!("http://{}:8000", rig.service(name).unwrap().spec.unwrap().cluster_ip.unwrap());
            Clients::start(&Service { base, model: name.clone() }, 2, 40, Duration::from_millis(500))
        })
        .collect();

    let drains = count.div_ceil(DRAINS);
    let moves = Moves { left: AtomicUsize::new(count - drains), made: Mutex::default(), begun: Instant::now() };
    scope(|threads| {
        for (place, name) in names.iter().enumerate() {
            let (rig, moves) = (&rig, &moves);
            threads.spawn(move || {
                let mut random = StdRng::seed_from_u64(seed + place as u64);
                for number in 1.. {
                    if !moves.take() {
                        break;
                    }
                    // Each kind in turn, so that a few moves have all of them.
                    let what = [Move::Roll, Move::ScaleDown, Move::Evict][(number + place) % 3];
                    make(rig, name, number, what, &mut random);
                    moves.note(what);
                }
            });
        }
        for drain in 0..drains {
            // Spread over the others.
            while moves.left.load(Ordering::SeqCst) > (count - drains) * (drains - drain) / (drains + 1) {
                sleep(Duration::from_millis(200));
            }
            drain_node(&rig, NODES[drain % 2]);
            moves.note(Move::DrainNode);
        }
    });
    let (mut whole, mut failures) = (0, Vec::new());
    for clients in clients {
        let (answered, failed) = clients.stop();
        whole += answered;
        failures.extend(failed);
    }
    let made = moves.made.lock().unwrap().clone();
    println!(
        "STOKER_TEST_SEED={seed}: {made:?} in {:.0} s on {} deployments; {whole} answers whole, {} not",
        moves.begun.elapsed().as_secs_f64(),
        names.len(),
        failures.len()
    );
    assert_eq!(made.values().sum::<usize>(), count);
    assert!(whole > 0 && failures.is_empty(), "{failures:?}");
}
