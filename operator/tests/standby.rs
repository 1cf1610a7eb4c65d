//! Which nodes have a model in memory for replicas to come: values in, the plan out.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use stoker_operator::{
    rollout::prefetch::{PrefetchPod, PrefetchState},
    standby::{FAILED_PATIENCE, Lack, Scene, Spot, StandbyPlan, StandbyPod, plan},
};

const REVISION: &str = "bbbbbbbb";
const NONE: [&str; 0] = [];

fn begun() -> Timestamp {
    "2026-11-26T10:00:00Z".parse().unwrap()
}

fn spot(node: &str, room: u64) -> Spot {
    let node = node.to_owned();
    Spot { node, room, replicas: 0, is_starting: false, has_model: false, is_troubled: false }
}

fn pod(node: &str, state: PrefetchState) -> StandbyPod {
    let name = format!("chat-{REVISION}-standby-{node}");
    let uid = format!("uid-{name}");
    let fetch =
        PrefetchPod { name, uid, revision: REVISION.to_owned(), node: node.to_owned(), state, is_leaving: false };
    StandbyPod { fetch, created: begun() }
}

fn fetching() -> PrefetchState {
    PrefetchState::Fetching { trouble: None }
}

fn planned(wanted: usize, spots: &[Spot], pods: &[StandbyPod]) -> StandbyPlan {
    let scene = Scene { wanted, revision: REVISION, spots: Ok(spots.to_vec()), pods, is_refused: false };
    plan(&scene, begun())
}

fn ended(plan: &StandbyPlan) -> Vec<&str> {
    plan.end.iter().map(|pod| pod.node.as_str()).collect()
}

#[test]
fn nodes_with_room_are_taken_those_that_have_the_model_first() {
    let with_model = Spot { has_model: true, ..spot("c", 1) };
    let with_replica = Spot { replicas: 1, ..spot("a", 3) };
    let troubled = Spot { is_troubled: true, ..spot("e", 8) };
    let spots = [with_replica, spot("b", 1), with_model, spot("d", 0), troubled];
    let begin = |wanted| planned(wanted, &spots, &[]).begin;
    assert_eq!((begin(0), begin(1)), (vec![], vec!["c".to_owned()]));
    assert_eq!(begin(5), ["c", "b", "a"], "no more have room");
    assert_eq!(planned(5, &spots, &[]).lack, Some(Lack::Room { nodes: 3 }));
    let many: Vec<Spot> = (0..9).map(|idx| spot(&format!("n{idx}"), 1)).collect();
    let plan = planned(9, &many, &[pod("n7", fetching()), pod("n8", PrefetchState::Done)]);
    assert_eq!(plan.begin, ["n0", "n1", "n2"], "four fetch at a time");
    assert_eq!((plan.ready, plan.lack), (vec!["n8".to_owned()], Some(Lack::UnderWay { trouble: None })));
}

#[test]
fn who_lost_its_room_moves_where_there_is_some_and_stays_where_there_is_none() {
    let done = || [pod("a", PrefetchState::Done)];
    let plan = planned(1, &[spot("a", 0), spot("b", 1)], &done());
    assert_eq!((plan.begin.as_slice(), ended(&plan), plan.ready.len()), (&["b".to_owned()][..], vec!["a"], 0));
    let plan = planned(1, &[spot("a", 0), spot("b", 0)], &done());
    assert!(plan.is_empty() && plan.ready.is_empty(), "{plan:?}");
    assert_eq!(plan.lack, Some(Lack::Room { nodes: 0 }));

    // A replica starts there, and reads what the pod keeps.
    let taken = Spot { replicas: 1, is_starting: true, ..spot("a", 0) };
    let plan = planned(1, &[taken, spot("b", 1)], &done());
    assert_eq!((plan.begin.as_slice(), ended(&plan)), (&["b".to_owned()][..], NONE.to_vec()));
    let both = [pod("a", PrefetchState::Done), pod("b", PrefetchState::Done)];
    let serving = Spot { replicas: 1, ..spot("a", 0) };
    let plan = planned(1, &[serving, spot("b", 1)], &both);
    assert_eq!((ended(&plan), &plan.lack), (vec!["a"], &None));
}

#[test]
fn pods_go_with_the_number_the_revision_and_the_node() {
    let both = [pod("a", fetching()), pod("b", PrefetchState::Done)];
    let spots = [spot("a", 1), spot("b", 1)];
    assert_eq!(ended(&planned(1, &spots, &both)), ["a"], "who has it in memory stays");
    assert_eq!(ended(&planned(0, &spots, &both)), ["a", "b"]);
    assert_eq!(ended(&planned(2, &spots[..1], &both)), ["b"], "its node is closed or gone");
    let mut other = both.clone();
    other[1].fetch.revision = "aaaaaaaa".to_owned();
    let plan = planned(2, &spots, &other);
    assert_eq!((ended(&plan), plan.begin.len()), (vec!["b"], 0), "its node is free once it is gone");
    other[1].fetch.is_leaving = true;
    assert!(planned(2, &spots, &other).is_empty());

    let unknown = Scene { wanted: 1, revision: REVISION, spots: Err("?".into()), pods: &both, is_refused: false };
    assert_eq!(ended(&plan_of(&unknown)), ["a"], "what is known of pods is enough to end what is too much");
    assert_eq!(plan_of(&Scene { pods: &[], ..unknown }).lack, Some(Lack::Unknown("?".to_owned())));
    let refused = Scene { wanted: 2, revision: REVISION, spots: Ok(spots.to_vec()), pods: &[], is_refused: true };
    assert!(plan_of(&refused).is_empty());
}

fn plan_of(scene: &Scene<'_>) -> StandbyPlan {
    plan(scene, begun())
}

#[test]
fn one_that_failed_is_remembered_for_a_while_and_another_node_takes_its_place() {
    let pods = [pod("a", PrefetchState::Failed { trouble: "Evicted".to_owned() })];
    let spots = vec![spot("a", 1), spot("b", 1)];
    let scene = Scene { wanted: 1, revision: REVISION, spots: Ok(spots), pods: &pods, is_refused: false };
    let first = plan_of(&scene);
    assert_eq!((ended(&first), first.begin.as_slice()), (NONE.to_vec(), &["b".to_owned()][..]));
    assert!(first.look_again.is_some_and(|moment| moment < begun() + FAILED_PATIENCE));
    assert_eq!(first.lack, Some(Lack::UnderWay { trouble: Some("a: Evicted".to_owned()) }));
    let later = plan(&scene, begun() + FAILED_PATIENCE);
    assert_eq!(ended(&later), ["a"]);
    assert_eq!(planned(0, &[], &[]).look_again, None);
}

/// What a cluster does between two rounds.
#[derive(Clone, Debug)]
enum Happening {
    Room { node: usize, room: u64, is_starting: bool },
    Gone { node: usize },
    Wanted(usize),
    Revision(bool),
    Fetched { pod: usize },
    Failed { pod: usize },
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        (0..6_usize, 0..3_u64, any::<bool>()).prop_map(|(node, room, is_starting)| Happening::Room {
            node,
            room,
            is_starting
        }),
        (0..6_usize).prop_map(|node| Happening::Gone { node }),
        (0..5_usize).prop_map(Happening::Wanted),
        any::<bool>().prop_map(Happening::Revision),
        (0..8_usize).prop_map(|pod| Happening::Fetched { pod }),
        (0..8_usize).prop_map(|pod| Happening::Failed { pod }),
    ]
}

#[derive(Debug, Default)]
struct World {
    wanted: usize,
    is_second: bool,
    spots: Vec<Spot>,
    pods: Vec<StandbyPod>,
    made: usize,
    now: i64,
}

impl World {
    fn happens(&mut self, happening: Happening) {
        match happening {
            Happening::Room { node, room, is_starting } => {
                let name = format!("n{node}");
                self.spots.retain(|spot| spot.node != name);
                self.spots.push(Spot { is_starting, ..spot(&name, room) });
            }
            Happening::Gone { node } => self.spots.retain(|spot| spot.node != format!("n{node}")),
            Happening::Wanted(wanted) => self.wanted = wanted,
            Happening::Revision(is_second) => self.is_second = is_second,
            Happening::Fetched { pod } => self.becomes(pod, PrefetchState::Done),
            Happening::Failed { pod } => self.becomes(pod, PrefetchState::Failed { trouble: "Evicted".to_owned() }),
        }
    }

    fn becomes(&mut self, which: usize, state: PrefetchState) {
        let Some(pod) = self.pods.get_mut(which) else { return };
        if !matches!(pod.fetch.state, PrefetchState::Failed { .. }) {
            pod.fetch.state = state;
        }
    }

    fn revision(&self) -> &'static str {
        if self.is_second { "second" } else { "first" }
    }

    fn now(&self) -> Timestamp {
        begun() + SignedDuration::from_secs(self.now)
    }

    fn plan(&self) -> StandbyPlan {
        let spots = Ok(self.spots.clone());
        let scene =
            Scene { wanted: self.wanted, revision: self.revision(), spots, pods: &self.pods, is_refused: false };
        plan(&scene, self.now())
    }

    /// Carries a plan out, having looked at what no plan may do.
    fn carry_out(&mut self, plan: &StandbyPlan) {
        let nodes: BTreeSet<&String> = plan.begin.iter().collect();
        assert_eq!(nodes.len(), plan.begin.len(), "a node twice: {plan:?}");
        for node in &plan.begin {
            let room = self.spots.iter().find(|spot| spot.node == *node).map(|spot| spot.room);
            assert!(room.is_some_and(|room| room > 0), "{node} has no room: {plan:?}");
            assert!(self.pods.iter().all(|pod| pod.fetch.node != *node), "{node} has one: {plan:?}");
        }
        let ends = |pod: &StandbyPod| plan.end.iter().any(|end| end.uid == pod.fetch.uid);
        assert!(plan.end.iter().all(|end| self.pods.iter().any(|pod| pod.fetch.uid == end.uid)), "{plan:?}");
        self.pods.retain(|pod| !ends(pod));
        for node in &plan.begin {
            self.made += 1;
            let mut made = pod(node, fetching());
            made.fetch.revision = self.revision().to_owned();
            made.fetch.uid = format!("uid-{}", self.made);
            made.created = self.now();
            self.pods.push(made);
        }
        let standing = self.pods.iter().filter(|pod| !matches!(pod.fetch.state, PrefetchState::Failed { .. }));
        let read = |node: &str| self.spots.iter().any(|spot| spot.node == node && spot.is_starting && spot.room == 0);
        let standing = standing.filter(|pod| !read(&pod.fetch.node)).count();
        assert!(standing <= self.wanted, "{standing} of {}: {plan:?}", self.wanted);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever happens: no node twice, none without room, no more than wanted; it comes to rest without news, and where the cluster
    /// is calm as many nodes have the model as are wanted and have room.
    #[test]
    fn plans_come_to_rest_at_as_many_nodes_as_are_wanted(history in proptest::collection::vec(happening(), 1..40)) {
        let mut world = World::default();
        for happening in history {
            world.happens(happening);
            world.now += 7;
            world.carry_out(&world.plan());
        }
        world.spots.iter_mut().for_each(|spot| spot.is_starting = false);
        for _ in 0..12 {
            world.now += 300;
            world.carry_out(&world.plan());
            (0..world.pods.len()).for_each(|pod| world.becomes(pod, PrefetchState::Done));
        }
        let plan = world.plan();
        prop_assert!(plan.is_empty(), "it does not rest: {plan:?}");
        let with_room = world.spots.iter().filter(|spot| spot.room > 0).count();
        prop_assert_eq!(plan.ready.len(), world.wanted.min(with_room));
        prop_assert_eq!(plan.lack.is_none(), world.wanted <= with_room);
    }
}
