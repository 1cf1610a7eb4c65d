//! When a model is fetched onto a node before its replica goes, and who waits for that: values in, the plan out.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use stoker_crds::contract::DrainSettings;
use stoker_operator::{
    lint,
    plan::Plan,
    rollout::{
        Replacing, RolloutPlan, Strategy, Wanted, plan_rollout,
        prefetch::{ModelToCome, PrefetchPod, PrefetchState, Prefetching},
    },
};
use stoker_replica::{Needs, ObservedPod, Reading, Replica, Stage, Trouble};

const OLD: &str = "aaaaaaaa";
const NEW: &str = "bbbbbbbb";
const SURGE: i64 = 60;
const PATIENCE: i64 = 600;

fn begun() -> Timestamp {
    "2026-11-26T10:00:00Z".parse().unwrap()
}

fn gpu() -> Needs {
    Needs { requests: BTreeMap::from([("nvidia.com/gpu".to_owned(), "1".to_owned())]), ..Needs::default() }
}

fn replica(revision: &str, ordinal: u32, node: Option<&str>, stage: Stage) -> Replica {
    let name = format!("chat-{revision}-{ordinal}");
    let pod = ObservedPod {
        uid: format!("uid-{name}"),
        name,
        revision: revision.to_owned(),
        ordinal,
        resource_version: "1".to_owned(),
        created: begun(),
        stage,
        lost: false,
        gone_by: None,
        node: node.map(str::to_owned),
        needs: gpu(),
    };
    Replica { pod, reading: Reading::default(), intent: None }
}

fn without_room() -> Stage {
    let trouble = Trouble::new("Unschedulable", "0/6 nodes are available: 6 Insufficient nvidia.com/gpu.");
    Stage::Unscheduled { trouble, since: begun() }
}

fn fetch(node: &str, state: PrefetchState) -> PrefetchPod {
    let name = format!("chat-{NEW}-prefetch-{node}");
    let uid = format!("uid-{name}");
    PrefetchPod { name, uid, revision: NEW.to_owned(), node: node.to_owned(), state, is_leaving: false }
}

fn fetching() -> PrefetchState {
    PrefetchState::Fetching { trouble: None }
}

/// A full cluster: a replica of the old revision on each node, one of the new revision that waits for room.
struct World {
    wanted: Wanted,
    replicas: Vec<Replica>,
}

impl World {
    fn full(nodes: &[&str]) -> Self {
        let places = (0..).zip(nodes);
        let mut replicas: Vec<Replica> =
            places.map(|(ordinal, node)| replica(OLD, ordinal, Some(node), Stage::Serving)).collect();
        replicas.push(replica(NEW, 0, None, without_room()));
        let model = ModelToCome {
            revision: NEW.to_owned(),
            also_in: BTreeSet::new(),
            patience: SignedDuration::from_secs(PATIENCE),
            is_refused: false,
        };
        let wanted = Wanted {
            replicas: nodes.len(),
            revision: NEW.to_owned(),
            drain: DrainSettings { deadline_seconds: 60, withdraw_seconds: 3 },
            replacing: Replacing { max_unavailable: 1, max_surge: 1, surge_patience: SignedDuration::from_secs(SURGE) },
            paused: false,
            needs: gpu(),
            canary: None,
            foreign_pods: BTreeSet::new(),
            prefetching: Prefetching { model: Some(model), pods: Vec::new() },
        };
        Self { wanted, replicas }
    }

    fn model(&mut self) -> &mut ModelToCome {
        self.wanted.prefetching.model.as_mut().unwrap()
    }

    fn with(mut self, pods: impl IntoIterator<Item = PrefetchPod>) -> Self {
        self.wanted.prefetching.pods = pods.into_iter().collect();
        self
    }

    fn after(&self, seconds: i64) -> RolloutPlan {
        let now = begun() + SignedDuration::from_secs(seconds);
        let pods = plan_rollout(&self.wanted, &self.replicas, now);
        let plan = Plan { pods: pods.clone(), revision: NEW.to_owned(), ..Plan::default() };
        assert_eq!(lint::check(&plan, &self.wanted, &self.replicas, now), []);
        pods
    }
}

/// Nodes that a plan begins on, nodes that it waits for, names of pods that it drains.
fn said(plan: &RolloutPlan) -> (Vec<&str>, Vec<&str>, Vec<&str>) {
    let begin = plan.prefetch.begin.iter().map(String::as_str).collect();
    let awaited = plan.prefetch.awaited.iter().map(String::as_str).collect();
    (begin, awaited, plan.drain.iter().map(|pod| pod.name.as_str()).collect())
}

const NONE: [&str; 0] = [];

#[test]
fn a_node_fetches_as_soon_as_room_is_wanted_and_its_replica_goes_when_it_has_the_model() {
    let world = World::full(&["a"]);
    assert_eq!(said(&world.after(0)), (vec!["a"], vec!["a"], vec![]));
    let world = world.with([fetch("a", fetching())]);
    let plan = world.after(SURGE + 1);
    assert_eq!((said(&plan), plan.strategy), ((vec![], vec!["a"], vec![]), Strategy::ReplaceInPlace));
    assert_eq!(plan.look_again, Some(begun() + SignedDuration::from_secs(PATIENCE)));
    let plan = world.with([fetch("a", PrefetchState::Done)]).after(SURGE + 1);
    assert_eq!(said(&plan), (vec![], vec![], vec!["chat-aaaaaaaa-0"]));
    assert!(plan.prefetch.end.is_empty(), "its node still has a replica of the other model");
}

#[test]
fn who_waits_for_a_fetch_does_so_until_the_deadline_and_for_one_that_failed_not_at_all() {
    let met = PrefetchState::Fetching { trouble: Some("401 from the hub".to_owned()) };
    for state in [fetching(), met] {
        let world = World::full(&["a"]).with([fetch("a", state)]);
        assert_eq!(said(&world.after(PATIENCE - 1)).2, NONE);
        assert_eq!(said(&world.after(PATIENCE + 1)), (vec![], vec![], vec!["chat-aaaaaaaa-0"]));
    }
    let failed = PrefetchState::Failed { trouble: "Evicted".to_owned() };
    assert_eq!(said(&World::full(&["a"]).with([fetch("a", failed)]).after(SURGE + 1)).2, ["chat-aaaaaaaa-0"]);
}

#[test]
fn a_few_nodes_fetch_at_a_time_and_the_first_that_has_it_gives_its_replica() {
    let nodes = ["a", "b", "c", "d", "e", "f"];
    let plan = World::full(&nodes).after(0);
    assert_eq!(said(&plan), (nodes[..4].to_vec(), nodes.to_vec(), vec![]));
    let under_way =
        nodes[..4].iter().map(|node| fetch(node, if *node == "c" { PrefetchState::Done } else { fetching() }));
    let plan = World::full(&nodes).with(under_way).after(SURGE + 1);
    assert_eq!(said(&plan), (vec!["e"], vec!["a", "b", "d", "e", "f"], vec!["chat-aaaaaaaa-2"]));
}

#[test]
fn nothing_is_fetched_ahead_where_it_helps_nobody() {
    let goes = |world: &World| {
        let plan = world.after(SURGE + 1);
        let (begin, awaited, drain) = said(&plan);
        assert_eq!((begin, awaited), (vec![], vec![]));
        !drain.is_empty()
    };
    let mut world = World::full(&["a"]);
    world.model().also_in.insert(OLD.to_owned());
    assert!(goes(&world), "the node serves that model");
    world.model().also_in.clear();
    world.model().is_refused = true;
    assert!(goes(&world), "the API server takes no such pod");
    world.wanted.prefetching.model = None;
    assert!(goes(&world), "nodes keep no models");

    let mut world = World::full(&["a"]);
    world.wanted.replacing.max_unavailable = 0;
    assert!(!goes(&world), "who waits for room gets none of an old one's");
    let mut world = World::full(&["a"]);
    world.wanted.paused = true;
    assert!(!goes(&world));
    let mut world = World::full(&["a"]);
    world.replicas[1].pod.stage = Stage::Starting;
    assert!(!goes(&world), "there is room beside the old one, and the new one fetches there itself");
}

#[test]
fn pods_that_no_node_needs_any_more_end() {
    let ended = |world: &World| world.after(0).prefetch.end.len();
    let mut world = World::full(&["a"]).with([fetch("a", PrefetchState::Done), fetch("b", fetching())]);
    assert_eq!(world.after(0).prefetch.end, [fetch("b", fetching())], "no replica of the other model is there");
    let other = PrefetchPod { revision: "cccccccc".to_owned(), ..fetch("a", fetching()) };
    world.wanted.prefetching.pods = vec![other];
    assert_eq!(ended(&world), 1, "the model of another revision");
    world.wanted.prefetching.pods = vec![PrefetchPod { is_leaving: true, ..fetch("b", fetching()) }];
    assert_eq!(ended(&world), 0, "it goes already");

    let mut world = world.with([fetch("a", PrefetchState::Done)]);
    world.replicas.remove(0);
    world.replicas[0].pod.stage = Stage::Serving;
    world.replicas[0].pod.node = Some("a".to_owned());
    let plan = world.after(0);
    assert_eq!((plan.prefetch.end.len(), plan.prefetch.nodes.len()), (1, 0), "the roll is over");
    world.wanted.prefetching.model = None;
    assert_eq!(ended(&world), 1, "nodes keep no models any more");
}
