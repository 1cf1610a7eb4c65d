//! A revision that is tried on one replica before the others follow.

use jiff::SignedDuration;
use serde_json::{Value, json};
use stoker_crds::status::{CanaryPhase, RolloutPhase};
use stoker_operator::{
    canary::{
        drift::Drift,
        gate::{Compared, Finding},
        traffic::{Sample, Tally},
    },
    course::Course,
};
use stoker_replica::{Intent, Replica, Stage, Trouble};

use crate::life::{Life, Seen};

const SECONDS: i64 = 60;

fn rollout(more: Value) -> Value {
    let mut rollout = json!({"canary": {"seconds": SECONDS, "analysis": {"prompts": {}, "traffic": {}}}});
    rollout.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    rollout
}

/// Two replicas of revision `a` serve, `b` is asked for and announced; both revisions.
fn announced(rollout: Value) -> (Life, String, String) {
    let mut life = Life::begun(rollout);
    life.spec["replicas"] = json!(2);
    let good = life.status.as_ref().unwrap().revision.clone();
    life.add(&good, Stage::Serving);
    life.after(1);
    life.change("b");
    let seen = life.after(1);
    assert!(matches!(seen.course, Course::Canary(_)) && seen.plan.pods.is_empty(), "{}", seen.plan);
    assert_eq!(life.condition("Ready"), ("False".into(), "Canary".into()), "not ready, although all serve");
    let tried = life.rollout().asked.clone();
    (life, good, tried)
}

/// The same with the canary's replica serving.
fn served(rollout: Value) -> (Life, String, String) {
    let (mut life, good, tried) = announced(rollout);
    let plan = life.after(1).plan;
    assert!(plan.to_string().contains("a canary") && plan.pods.create.is_empty(), "{plan}");
    life.add(&tried, Stage::Serving);
    let seen = life.after(1);
    assert!(!seen.plan.pods.moves_replicas(), "{}", seen.plan);
    assert_eq!((life.rollout().phase, phase(&life)), (RolloutPhase::Canary, CanaryPhase::Analysing));
    (life, good, tried)
}

fn phase(life: &Life) -> CanaryPhase {
    life.rollout().canary.as_ref().unwrap().phase
}

fn uid_of(life: &Life, revision: &str) -> String {
    life.replicas.iter().find(|replica| replica.pod.revision == revision).unwrap().pod.uid.clone()
}

/// Answers of the replica of a revision are this far from those of others.
fn found(life: &mut Life, revision: &str, mean: f64) {
    let drift = Drift { tokens: 256, equal: 250, mean, max: mean * 3.0 };
    let before = life.finding.take().unwrap_or_default();
    life.finding = Some(Finding { pod_uid: uid_of(life, revision), prompts: Compared::By(drift), ..before });
}

/// So many requests ended on each side, those of the canary after so long.
fn answered(life: &mut Life, ended: u64, seconds: f64) {
    let tally = |seconds| {
        let mut tally = Tally::default();
        tally.note(Sample { ended, failed: 0, ttft_seconds: Some(seconds), itl_seconds: Some(0.01) });
        tally
    };
    let finding = life.finding.as_mut().unwrap();
    (finding.canary, finding.older) = (tally(seconds), tally(0.1));
}

fn passes_until_it_goes_on(life: &mut Life, tried: &str) -> Seen {
    found(life, tried, 0.01);
    let looks_again = life.after(1).outlook.look_again;
    assert_eq!(looks_again, Some(life.now + SignedDuration::from_secs(SECONDS)));
    life.after(SECONDS - 1);
    assert_eq!(phase(life), CanaryPhase::Analysing);
    life.after(1);
    assert_eq!(phase(life), CanaryPhase::Passed);
    life.after(1)
}

#[test]
fn a_change_that_passes_for_long_enough_goes_on() {
    let (mut life, good, tried) = served(rollout(json!({})));
    let seen = life.after(1000);
    assert_eq!((seen.outlook.look_again, seen.desired.revision), (None, good), "nobody looked yet");
    let seen = passes_until_it_goes_on(&mut life, &tried);
    assert_eq!((seen.course, seen.desired.revision.as_str()), (Course::AsAsked, tried.as_str()));
    assert_eq!(seen.plan.pods.drain.len(), 1, "{}", seen.plan);
    let canary = life.rollout().canary.clone().unwrap();
    assert!(canary.message.contains("0.010 nats") && canary.measured.mean_drift == Some(0.01), "{canary:?}");
    assert!(life.rollout().revisions.iter().all(|entry| entry.served), "{:?}", life.rollout());
}

#[test]
fn one_whose_answers_drifted_is_given_up_with_the_numbers_and_not_tried_again() {
    let (mut life, good, tried) = served(rollout(json!({})));
    found(&mut life, &tried, 0.42);
    life.after(1);
    let gone = life.rollout().rolled_back.clone().expect("it is given up");
    assert_eq!((gone.revision.as_str(), gone.to.as_str()), (tried.as_str(), good.as_str()));
    for said in ["0.420 nats", "the mean may be 0.1", "maxMeanDrift", "250 of 256 tokens"] {
        assert!(gone.message.contains(said), "{}", gone.message);
    }
    let seen = life.after(1);
    assert!(matches!(seen.course, Course::RolledBack(_)), "{:?}", seen.course);
    let drained: Vec<&str> = seen.plan.pods.drain.iter().map(|pod| pod.uid.as_str()).collect();
    assert_eq!((drained, seen.plan.pods.delete.len()), (vec![uid_of(&life, &tried).as_str()], 0), "{}", seen.plan);
    assert_eq!(life.condition("Ready"), ("False".into(), "RolledBack".into()));
    life.replicas.retain(|replica| replica.pod.revision == good);
    life.finding = None;
    life.after(1);
    assert!(life.after(100_000).plan.pods.is_empty());
    assert!(life.rollout().revisions.iter().any(|entry| entry.revision == tried && !entry.served));
    assert_eq!(phase(&life), CanaryPhase::Failed);

    life.change("c");
    assert!(matches!(life.after(1).course, Course::Canary(_)), "another revision is tried");
    assert_eq!(life.rollout().rolled_back, None);
}

#[test]
fn one_that_is_slow_has_a_minute_to_warm_up() {
    let (mut life, _, tried) = served(rollout(json!({})));
    found(&mut life, &tried, 0.01);
    answered(&mut life, 60, 0.3);
    life.after(1);
    life.after(59);
    answered(&mut life, 200, 0.1);
    life.after(1);
    assert_eq!((phase(&life), life.rollout().rolled_back.clone()), (CanaryPhase::Analysing, None));
    answered(&mut life, 200, 0.3);
    life.after(1);
    life.after(59);
    assert_eq!(life.rollout().rolled_back, None);
    life.after(1);
    let gone = life.rollout().rolled_back.clone().expect("it is given up");
    assert!(gone.message.contains("TTFT is 3.00 times") && gone.message.contains("maxTtftRatio"), "{}", gone.message);
}

#[test]
fn one_that_may_not_be_given_up_is_held() {
    let (mut life, good, tried) = served(rollout(json!({"autoRollback": false})));
    found(&mut life, &tried, 0.42);
    let seen = life.after(1);
    assert_eq!((life.rollout().rolled_back.clone(), seen.desired.revision), (None, good));
    assert_eq!(life.condition("Degraded"), ("True".into(), "CanaryFailed".into()));
    assert!(life.after(100_000).plan.pods.is_empty());
    assert_eq!(life.condition("Stalled").0, "True");
    found(&mut life, &tried, 0.01);
    life.after(1);
    assert_eq!(phase(&life), CanaryPhase::Analysing);
}

#[test]
fn a_third_revision_in_the_middle_is_tried_beside_the_first() {
    let (mut life, good, second) = served(rollout(json!({})));
    found(&mut life, &second, 0.01);
    life.after(1);
    life.change("c");
    let seen = life.after(1);
    assert!(matches!(seen.course, Course::Canary(_)));
    assert_eq!((seen.desired.revision, seen.plan.pods.drain.len()), (good.clone(), 1));
    let third = life.rollout().asked.clone();
    assert_eq!(phase(&life), CanaryPhase::Starting);
    assert!(life.after(1).plan.pods.create_canary.is_none(), "the second one is on its way out");
    life.replicas.retain(|replica| replica.pod.revision == good);
    assert_eq!(life.after(1).plan.pods.create_canary, Some(0));
    life.add(&third, Stage::Serving);
    life.after(1);
    assert_eq!(phase(&life), CanaryPhase::Analysing, "what was found of the second says nothing");
    found(&mut life, &third, 1.0);
    life.after(1);
    assert_eq!(life.rollout().rolled_back.as_ref().unwrap().to, good);
}

#[test]
fn a_lost_replica_is_made_again_and_has_to_pass_anew() {
    let (mut life, good, tried) = served(rollout(json!({"progressDeadlineSeconds": 30})));
    life.finding = None;
    life.after(10_000);
    assert_eq!(life.rollout().rolled_back, None, "the deadline is for what does not serve");
    found(&mut life, &tried, 0.01);
    life.after(SECONDS - 1);
    life.replicas.last_mut().unwrap().pod.stage = Stage::Leaving;
    life.after(1);
    assert_eq!((phase(&life), life.rollout().rolled_back.clone()), (CanaryPhase::Starting, None));
    life.replicas.retain(|replica| replica.pod.revision == good);
    assert_eq!(life.after(1).plan.pods.create_canary, Some(0));
    life.add(&tried, Stage::Starting);
    life.replicas.last_mut().unwrap().pod.uid = "another".into();
    life.after(1);
    life.replicas.last_mut().unwrap().pod.stage = Stage::Serving;
    life.after(1);
    assert_eq!(life.rollout().canary.as_ref().unwrap().passing_since, None, "what was found was of the lost one");
    let seen = passes_until_it_goes_on(&mut life, &tried);
    assert_eq!(seen.course, Course::AsAsked);
}

#[test]
fn an_operator_that_begins_in_the_middle_goes_on() {
    let (mut life, _, tried) = served(rollout(json!({})));
    found(&mut life, &tried, 0.01);
    life.after(1);
    let since = life.rollout().canary.as_ref().unwrap().passing_since.clone();
    life.finding = None;
    let before = life.status.clone();
    life.after(SECONDS - 2);
    assert_eq!(life.status, before, "nothing is written of what nobody saw");
    found(&mut life, &tried, 0.01);
    life.after(1);
    assert_eq!(life.rollout().canary.as_ref().unwrap().passing_since, since);
    life.after(1);
    assert_eq!(phase(&life), CanaryPhase::Passed);
}

#[test]
fn the_number_is_followed_by_replicas_of_the_older_revision() {
    let (mut life, good, tried) = served(rollout(json!({})));
    life.spec["replicas"] = json!(3);
    let seen = life.after(1);
    assert_eq!((seen.desired.revision.as_str(), seen.plan.pods.create.len()), (good.as_str(), 1), "{}", seen.plan);
    assert_eq!(seen.plan.pods.create_canary, None);
    life.add(&good, Stage::Serving);
    life.spec["replicas"] = json!(1);
    let seen = life.after(1);
    let canary = uid_of(&life, &tried);
    assert!(
        seen.plan.pods.drain.len() == 2 && seen.plan.pods.drain.iter().all(|pod| pod.uid != canary),
        "{}",
        seen.plan
    );
    life.spec["replicas"] = json!(0);
    let seen = life.after(1);
    assert!(seen.plan.pods.drain.iter().any(|pod| pod.uid == canary), "beside nobody there is none: {}", seen.plan);
}

#[test]
fn without_room_an_older_one_goes_if_it_may_be_missing_and_is_not_the_last() {
    let full = |life: &Life| Stage::Unscheduled {
        trouble: Trouble::new("Unschedulable", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        since: life.now,
    };
    let waited = |replicas: usize, max_unavailable: u32| {
        let (mut life, _, tried) = announced(rollout(json!({"maxUnavailable": max_unavailable, "surgeSeconds": 60})));
        life.spec["replicas"] = json!(replicas);
        life.replicas.truncate(replicas);
        life.after(1);
        let stage = full(&life);
        life.add(&tried, stage);
        assert!(life.after(59).plan.pods.is_empty());
        let seen = life.after(1);
        (life, seen)
    };
    let (mut life, seen) = waited(2, 1);
    assert_eq!(seen.plan.pods.drain.len(), 1, "{}", seen.plan);
    assert_eq!(waited(2, 0).1.plan.pods.drain.len(), 0);
    assert_eq!(waited(1, 1).1.plan.pods.drain.len(), 0, "nothing would be left to compare it with");

    // Its place is the canary's: it is not taken back, and no other one is made.
    let since = life.now;
    life.replicas[0].intent =
        Some(Intent { number: 1, want: stoker_crds::intent::Want::Drain(Default::default()), since });
    assert!(!life.after(1).plan.pods.moves_replicas());
    life.replicas.remove(0);
    life.replicas[1].pod.stage = Stage::Serving;
    let seen = life.after(1);
    assert!(!seen.plan.pods.moves_replicas(), "{}", seen.plan);
}

#[test]
fn the_first_revision_and_one_that_served_before_are_not_tried() {
    let (mut life, good, tried) = served(rollout(json!({})));
    assert_eq!(passes_until_it_goes_on(&mut life, &tried).course, Course::AsAsked);
    life.replicas.retain(|replica| replica.pod.revision == tried);
    life.add(&tried, Stage::Serving);
    life.after(1);
    life.change("a");
    let seen = life.after(1);
    assert_eq!((seen.course, seen.desired.revision), (Course::AsAsked, good));
}

#[test]
fn a_pause_holds_the_change_and_not_the_gate() {
    let (mut life, _, tried) = served(rollout(json!({})));
    life.spec["rollout"] = rollout(json!({"paused": true}));
    found(&mut life, &tried, 0.01);
    life.after(1);
    life.after(SECONDS * 10);
    assert_eq!((phase(&life), life.rollout().phase), (CanaryPhase::Analysing, RolloutPhase::Paused));
    let mut resumed =
        Life { spec: life.spec.clone(), status: life.status.clone(), replicas: life.replicas.clone(), ..life };
    resumed.spec["rollout"] = rollout(json!({}));
    resumed.after(1);
    assert_eq!(phase(&resumed), CanaryPhase::Passed);

    let (mut life, _, tried) = served(rollout(json!({})));
    life.spec["rollout"] = rollout(json!({"paused": true}));
    found(&mut life, &tried, 0.42);
    life.after(1);
    assert!(life.rollout().rolled_back.is_some(), "what harms is stopped all the same");
}

#[test]
fn a_change_that_is_paused_from_the_beginning_is_not_tried() {
    let mut life = Life::begun(rollout(json!({"paused": true})));
    life.change("b");
    assert!(matches!(life.after(1).course, Course::Held { .. }));
    assert_eq!(life.rollout().canary, None);
}

#[test]
fn one_that_never_serves_is_given_up_after_its_deadline() {
    let (mut life, good, tried) = announced(rollout(json!({"progressDeadlineSeconds": 30})));
    life.add(&tried, Stage::Blocked(Trouble::new("ErrImagePull", "no such image")));
    life.after(1);
    assert_eq!(life.condition("Ready").1, "ErrImagePull");
    life.after(30);
    let gone = life.rollout().rolled_back.clone().expect("it is given up");
    assert_eq!(gone.to, good);
    assert!(gone.message.contains("ErrImagePull"), "{}", gone.message);
    assert_eq!(life.after(1).plan.pods.delete.len(), 1, "the pod that never served goes");
}

#[test]
fn want_of_room_for_a_canary_is_waited_for() {
    let (mut life, _, tried) = announced(rollout(json!({"progressDeadlineSeconds": 30})));
    let since = life.now;
    life.add(
        &tried,
        Stage::Unscheduled { trouble: Trouble::new("Unschedulable", "1 Insufficient nvidia.com/gpu."), since },
    );
    life.after(1);
    life.after(1000);
    assert_eq!(life.rollout().rolled_back, None);
}

#[test]
fn one_whose_pods_end_at_once_is_made_later_each_time() {
    let (mut life, _, tried) = announced(rollout(json!({})));
    let fail = |life: &mut Life| {
        let since = life.now;
        life.add(&tried, Stage::Finished { trouble: Trouble::new("Error", "exit code 1"), since });
    };
    fail(&mut life);
    assert_eq!(life.after(1).plan.pods.create_canary, Some(0));
    fail(&mut life);
    let seen = life.after(1);
    assert!(seen.plan.pods.create_canary.is_none() && seen.plan.pods.held_until.is_some(), "{}", seen.plan);
    assert_eq!(life.condition("Ready").1, "PodsFail");
    assert!(life.after(10).plan.pods.create_canary.is_some());
}

#[test]
fn without_a_canary_that_is_wanted_nothing_is_tried_any_more() {
    let (mut life, _, tried) = served(rollout(json!({})));
    life.spec["rollout"] = json!({});
    let seen = life.after(1);
    assert_eq!((seen.course, seen.desired.revision), (Course::AsAsked, tried));
    assert_eq!(life.rollout().canary, None);
    let serving = |replica: &&Replica| replica.serves();
    assert_eq!(life.replicas.iter().filter(serving).count() - seen.plan.pods.drain.len(), 2, "{}", seen.plan);
}
