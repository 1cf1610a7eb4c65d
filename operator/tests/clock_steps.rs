//! Clocks that were set: of kubelets and schedulers, which date the stages of pods, and of an operator before this one, which
//! dated its intents. By minutes or by years, ahead or back: no plan waits for longer than it would by clocks that agree, and
//! what has to be dated anew is dated once.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;
use stoker_crds::{contract::DrainSettings, intent::Want};
use stoker_operator::{
    clock::SKEW,
    rollout::{FALTER_PATIENCE, Replacing, RolloutPlan, Wanted, plan_rollout},
};
use stoker_replica::{Intent, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

const DRAIN: DrainSettings = DrainSettings { deadline_seconds: 60, withdraw_seconds: 5 };
/// The longest pause after pods that failed, the longest time to leave, the longest to find room: a plan waits for no more.
const LONGEST_WAIT: SignedDuration = SignedDuration::from_secs(200);
const REPLICAS: usize = 3;

fn now() -> Timestamp {
    "2026-11-22T12:00:00Z".parse().unwrap()
}

/// How far a clock is from the right one: a little, an hour or so, years.
fn steps() -> impl Strategy<Value = SignedDuration> {
    let hours = SignedDuration::from_hours;
    prop_oneof![
        (-90_i64..90).prop_map(SignedDuration::from_secs),
        (-7200_i64..7200).prop_map(SignedDuration::from_secs),
        (-20_i64..20).prop_map(move |years| hours(years * 8766)),
    ]
}

/// A pod that is minutes old, in a stage that began after that by a clock that is a step off.
fn replicas() -> impl Strategy<Value = Vec<Replica>> {
    let pod = (0..5_usize, 0..2_usize, 0_i64..600, 0_i64..600, steps(), proptest::option::of(steps()));
    proptest::collection::vec(pod, 1..6).prop_map(|pods| {
        let made = pods.into_iter().enumerate();
        made.map(|(ordinal, (stage, revision, age, after, step, drain))| {
            let created = now() - SignedDuration::from_secs(age);
            let since = created + SignedDuration::from_secs(after.min(age)) + step;
            let trouble = Trouble::new("Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.");
            let stage = match stage {
                0 => Stage::Unscheduled { trouble, since },
                1 => Stage::Preparing { trouble, since },
                2 => Stage::Faltering { trouble, since },
                3 => Stage::Finished { trouble, since },
                _ => Stage::Serving,
            };
            let revision = ["aaaaaaaa", "bbbbbbbb"][revision];
            let name = format!("amber-{revision}-{ordinal}");
            let pod = ObservedPod {
                uid: name.clone(),
                name,
                revision: revision.to_owned(),
                ordinal: u32::try_from(ordinal).unwrap(),
                resource_version: "1".to_owned(),
                created,
                stage,
                lost: false,
                gone_by: None,
                node: None,
                needs: Needs::default(),
            };
            let intent = drain.map(|step| Intent { number: 1, want: Want::Drain(DRAIN), since: now() + step });
            Replica { pod, reading: Reading::default(), intent }
        })
        .collect()
    })
}

fn plan(replicas: &[Replica], now: Timestamp) -> RolloutPlan {
    let wanted = Wanted {
        revision: "aaaaaaaa".to_owned(),
        replicas: REPLICAS,
        paused: false,
        needs: Needs::default(),
        canary: None,
        drain: DRAIN,
        replacing: Replacing { max_unavailable: 1, max_surge: 1, surge_patience: SignedDuration::from_secs(60) },
        foreign_pods: Default::default(),
        prefetching: Default::default(),
    };
    let dated: Vec<Replica> = replicas.iter().map(|replica| replica.clone().dated_by(now, SKEW)).collect();
    plan_rollout(&wanted, &dated, now)
}

/// Intents as they are written for a plan.
fn carry_out(plan: &RolloutPlan, replicas: &mut [Replica], now: Timestamp) {
    for pod in &plan.reassert {
        let replica = replicas.iter_mut().find(|replica| replica.pod.uid == pod.uid).unwrap();
        let intent = replica.intent.unwrap();
        replica.intent = Some(Intent { number: pod.next_number, since: intent.since.min(now), ..intent });
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn no_plan_waits_for_longer_than_by_clocks_that_agree(mut replicas in replicas()) {
        // An intent of a clock ahead is dated anew in the first round; by then all dates can be.
        carry_out(&plan(&replicas, now()), &mut replicas, now());
        let plan = plan(&replicas, now());
        for moment in plan.held_until.iter().chain(&plan.look_again) {
            prop_assert!(moment.duration_since(now()) <= LONGEST_WAIT, "waits until {moment}: {plan:?}");
        }
    }

    #[test]
    fn what_is_dated_anew_is_dated_once(mut replicas in replicas(), later in 0_i64..100_000) {
        carry_out(&plan(&replicas, now()), &mut replicas, now());
        let later = now() + SignedDuration::from_secs(later);
        prop_assert_eq!(plan(&replicas, later).reassert, vec![]);
    }

    /// Stages by a clock that is ahead count for as old as their pod, and those by one that is back for no older.
    #[test]
    fn a_stage_is_no_older_than_its_pod_and_does_not_begin_tomorrow(replicas in replicas()) {
        for replica in replicas {
            let created = replica.pod.created;
            let dated = replica.dated_by(now(), SKEW);
            if let Stage::Faltering { since, .. } | Stage::Finished { since, .. } = dated.pod.stage {
                prop_assert!(created <= since && since.duration_since(now()) <= SKEW);
            }
        }
    }
}

/// One by hand: a kubelet a few minutes ahead says that pods fail later today. Without a look at its date none would be
/// made until then.
#[test]
fn pods_that_fail_later_today_are_replaced_now() {
    let (minutes, year) = (SignedDuration::from_mins(5), SignedDuration::from_hours(8766));
    let failed = |ordinal: u32, step: SignedDuration| {
        let created = now() - SignedDuration::from_secs(100);
        let trouble = Trouble::new("Error", "exit code 1");
        let name = format!("amber-aaaaaaaa-{ordinal}");
        let pod = ObservedPod {
            uid: name.clone(),
            name,
            revision: "aaaaaaaa".to_owned(),
            ordinal,
            resource_version: "1".to_owned(),
            created,
            stage: Stage::Finished { trouble, since: created + FALTER_PATIENCE + step },
            lost: false,
            gone_by: None,
            node: None,
            needs: Needs::default(),
        };
        Replica { pod, reading: Reading::default(), intent: None }
    };
    for step in [SignedDuration::ZERO, minutes, -minutes, year, -year] {
        let replicas = [failed(0, step), failed(1, step)];
        assert_eq!(plan(&replicas, now()).create.len(), REPLICAS, "{step}");
    }
}
