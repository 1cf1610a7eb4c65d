//! Revisions over time, values in and values out: which one a deployment is worked towards, what is kept, and when a new one is
//! given up.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod canary;
mod life;

use serde_json::{Value, json};
use stoker_crds::status::RolloutPhase;
use stoker_operator::{course::Course, rollout::Strategy};
use stoker_replica::{Stage, Trouble};

use crate::life::{Life, spec};

fn cannot_be_pulled() -> Stage {
    Stage::Blocked(Trouble::new("ErrImagePull", "no such image"))
}

/// A change whose only pod is in that stage, looked at for as long as progress may take.
fn waited(rollout: Value, stage: Stage) -> (Life, String, String) {
    let mut life = Life::begun(rollout);
    let good = life.status.as_ref().unwrap().revision.clone();
    life.change("b");
    let bad = life.round().desired.revision;
    life.add(&bad, stage);
    life.after(1);
    let seen = life.after(599);
    assert_eq!((seen.course, life.rollout().rolled_back.clone()), (Course::AsAsked, None), "not before its time");
    life.after(1);
    (life, good, bad)
}

#[test]
fn a_revision_that_never_served_is_given_up_after_its_deadline_and_not_tried_again() {
    let (mut life, good, bad) = waited(json!({}), cannot_be_pulled());
    let gone = life.rollout().rolled_back.clone().expect("it is given up");
    assert_eq!((gone.revision.as_str(), gone.to.as_str()), (bad.as_str(), good.as_str()));
    assert!(gone.message.contains("ErrImagePull"), "{}", gone.message);

    let seen = life.after(1);
    assert_eq!(seen.desired.revision, good);
    assert_eq!(seen.plan.pods.delete.len(), 1, "the pod that never served goes: {}", seen.plan);
    assert!(seen.plan.pods.create.is_empty() && seen.plan.pods.drain.is_empty(), "{}", seen.plan);
    life.replicas.truncate(1);
    life.after(1);
    assert_eq!(life.condition("Ready"), ("False".into(), "RolledBack".into()));
    assert_eq!(life.condition("Stalled").0, "True");
    assert_eq!(life.condition("Available").0, "True");

    let settled = life.status.clone();
    let seen = life.after(100_000);
    assert!(seen.plan.pods.is_empty() && seen.outlook.look_again.is_none(), "{}", seen.plan);
    assert_eq!(life.status, settled, "nothing is written");

    life.change("c");
    assert_eq!(life.after(1).course, Course::AsAsked);
    assert_eq!(life.rollout().rolled_back, None);
}

#[test]
fn want_of_room_is_waited_for() {
    let trouble = Trouble::new("Unschedulable", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
    let since = "2026-01-31T12:00:00Z".parse().unwrap();
    let (life, _, _) = waited(json!({}), Stage::Unscheduled { trouble, since });
    assert_eq!(life.rollout().rolled_back, None);
}

/// Until its place is free nothing shows that it could not serve, however long an older replica's last streams take.
#[test]
fn room_that_an_older_replica_makes_is_waited_for() {
    let trouble = Trouble::new("Unschedulable", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.");
    let since = "2026-01-31T12:00:00Z".parse().unwrap();
    let (mut life, ..) = waited(json!({"maxUnavailable": 1}), Stage::Unscheduled { trouble, since });
    let seen = life.after(1);
    assert_eq!((seen.plan.pods.strategy, seen.plan.pods.drain.len()), (Strategy::ReplaceInPlace, 1), "{}", seen.plan);
    assert_eq!(life.rollout().rolled_back, None);

    life.replicas[1].pod.stage = cannot_be_pulled();
    life.after(1);
    life.after(599);
    assert_eq!(life.rollout().rolled_back, None, "it has as long as any other from when it has its place");
    life.after(1);
    assert!(life.rollout().rolled_back.is_some());
}

#[test]
fn a_revision_that_may_not_be_given_up_is_tried_for_ever() {
    let (mut life, _, bad) = waited(json!({"autoRollback": false}), cannot_be_pulled());
    assert_eq!((life.rollout().rolled_back.clone(), life.after(100_000).desired.revision), (None, bad));
}

#[test]
fn one_that_was_given_up_is_tried_again_when_that_is_switched_off() {
    let (mut life, _, bad) = waited(json!({}), cannot_be_pulled());
    life.spec["rollout"] = json!({"autoRollback": false});
    assert_eq!(life.after(1).desired.revision, bad);
}

#[test]
fn the_first_revision_has_nothing_to_go_back_to() {
    let now = "2026-01-31T12:00:00Z".parse().unwrap();
    let mut life =
        Life { spec: spec("a", json!({})), status: None, replicas: Vec::new(), maps: Vec::new(), now, finding: None };
    let first = life.round().desired.revision;
    life.add(&first, cannot_be_pulled());
    life.after(1);
    assert_eq!((life.after(100_000).course, life.rollout().rolled_back.clone()), (Course::AsAsked, None));
}

#[test]
fn a_replica_that_comes_further_has_as_long_again() {
    let mut life = Life::begun(json!({}));
    life.change("b");
    let slow = life.round().desired.revision;
    let since = life.now;
    life.add(&slow, Stage::Preparing { trouble: Trouble::new("ContainerCreating", ""), since });
    life.after(1);
    life.after(500);
    life.replicas[1].pod.stage = Stage::Starting;
    life.after(1);
    assert_eq!(life.after(599).course, Course::AsAsked);
    assert_eq!(life.rollout().rolled_back, None);
    life.replicas[1].pod.stage = Stage::Serving;
    life.after(1);
    life.replicas[1].pod.stage = cannot_be_pulled();
    life.after(1);
    life.after(100_000);
    assert_eq!(life.rollout().rolled_back, None, "it served once");
}

#[test]
fn a_change_is_held_until_it_is_resumed() {
    let mut life = Life::begun(json!({"paused": true}));
    let good = life.status.as_ref().unwrap().revision.clone();
    life.change("b");
    let seen = life.after(1);
    assert_eq!(seen.desired.revision, good);
    assert!(matches!(seen.course, Course::Held { .. }) && seen.plan.pods.is_empty(), "{}", seen.plan);
    assert_eq!((life.condition("Ready").1, life.rollout().phase), ("Paused".into(), RolloutPhase::Paused));
    life.spec["rollout"] = json!({});
    let seen = life.after(1);
    assert_ne!(seen.desired.revision, good);
    assert_eq!(seen.plan.pods.create.len(), 1);

    // In the middle both stay, and nobody else is replaced.
    life.spec["replicas"] = json!(2);
    let new = seen.desired.revision;
    life.add(&new, Stage::Serving);
    life.spec["rollout"] = json!({"paused": true});
    let seen = life.after(1);
    assert!(seen.plan.pods.is_empty(), "{}", seen.plan);
    assert_eq!(life.rollout().phase, RolloutPhase::Paused);
}

#[test]
fn as_many_revisions_are_kept_as_asked_and_one_that_comes_back_is_the_newest() {
    let mut life = Life::begun(json!({"keepRevisions": 2}));
    let first = life.status.as_ref().unwrap().revision.clone();
    for change in ["b", "c", "d", "e"] {
        life.change(change);
        let revision = life.after(1).desired.revision;
        life.replicas.clear();
        life.add(&revision, Stage::Serving);
        life.after(1);
    }
    life.after(1);
    let numbers = |life: &Life| life.rollout().revisions.iter().map(|entry| entry.number).collect::<Vec<_>>();
    assert_eq!(numbers(&life), [3, 4, 5]);
    assert_eq!(life.maps.len(), 3, "with their ConfigMaps");
    life.change("c");
    life.after(1);
    assert_eq!(numbers(&life), [4, 5, 6]);
    assert!(life.rollout().revisions.iter().all(|entry| entry.served && entry.revision != first));
}

/// The next change came between the making of its pod and the status of that round.
#[test]
fn a_revision_whose_round_never_wrote_its_status_is_known_by_its_pod() {
    let mut life = Life::begun(json!({}));
    let before = life.status.clone();
    life.change("b");
    let overtaken = life.round().desired.revision;
    life.add(&overtaken, cannot_be_pulled());
    life.status = before;
    life.change("c");
    life.after(1);
    life.after(1);
    let seen: Vec<_> = life.rollout().revisions.iter().map(|entry| (entry.number, entry.served)).collect();
    assert_eq!(seen, [(1, true), (2, false), (3, false)]);
    assert_eq!(life.rollout().revisions[1].revision, overtaken);
}
