//! The model as the operator sees it: its own types, so that its own functions decide.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::{
    contract::{AgentPhase, DrainSettings, LoadReport},
    intent::Want,
};
use stoker_operator::rollout::{CanaryWanted, Replacing, Wanted, prefetch::Prefetching};
use stoker_replica::{Answer, Expected, Intent, Judge, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

use crate::{
    pod::{self, Agent, Pod, Service, TICK_SECONDS},
    world::{Scope, World},
};

/// The deadline is over after two ticks.
pub const DRAIN: DrainSettings = DrainSettings { withdraw_seconds: 2, deadline_seconds: 28 };
/// Room is waited for one tick before an old pod is given up for it.
const SURGE_PATIENCE: SignedDuration = SignedDuration::from_secs(TICK_SECONDS);
const REVISIONS: [&str; 2] = ["r0", "r1"];

/// The present. It never moves: times lie so far before it.
pub fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + SignedDuration::from_hours(1)
}

fn before(ticks: u8) -> Timestamp {
    now() - SignedDuration::from_secs(i64::from(ticks) * TICK_SECONDS)
}

/// What the user wants.
pub fn wanted(world: &World, scope: &Scope) -> Wanted {
    let max_unavailable = usize::from(scope.max_unavailable);
    Wanted {
        replicas: world.replicas.into(),
        revision: REVISIONS[usize::from(world.revision)].into(),
        drain: DRAIN,
        replacing: Replacing { max_unavailable, max_surge: scope.max_surge.into(), surge_patience: SURGE_PATIENCE },
        paused: world.paused,
        needs: Needs::default(),
        canary: (world.trial && world.replicas > 0).then(|| CanaryWanted {
            revision: REVISIONS[usize::from(world.tried())].into(),
            needs: Needs::default(),
            is_announced: true,
        }),
        foreign_pods: BTreeSet::new(),
        prefetching: Prefetching::default(),
    }
}

/// What is known of each replica.
pub fn replicas(world: &World, scope: &Scope) -> Vec<Replica> {
    let full = !world.has_room(scope);
    world.pods.iter().map(|pod| replica(pod, full)).collect()
}

/// Revision and ordinal of a pod's name.
pub fn place_of(name: &str) -> (u8, u8) {
    let mut parts = name.split('-').skip(1);
    let mut number = |prefix: &str| parts.next().and_then(|part| part.strip_prefix(prefix)?.parse().ok());
    number("r").zip(number("")).expect("names are made here")
}

fn replica(pod: &Pod, full: bool) -> Replica {
    let revision = REVISIONS[usize::from(pod.revision)];
    let name = format!("chat-{revision}-{}", pod.ordinal);
    let pod_observed = ObservedPod {
        uid: name.clone(),
        name,
        revision: revision.into(),
        ordinal: pod.ordinal.into(),
        resource_version: String::new(),
        created: created(pod),
        stage: stage(pod, full),
        lost: false,
        gone_by: None,
        node: None,
        needs: Needs::default(),
    };
    Replica { pod: pod_observed, reading: reading(pod, revision), intent: pod.intent.map(intent) }
}

/// What ended had not lived for long.
fn created(pod: &Pod) -> Timestamp {
    match pod.stage {
        pod::Stage::Finished { age } => before(age),
        _ => before(pod::AGE_MAX),
    }
}

fn stage(pod: &Pod, full: bool) -> Stage {
    match pod.stage {
        pod::Stage::Unscheduled { age } => {
            let message = if full { "0/1 nodes are available: 1 Insufficient nvidia.com/gpu." } else { "" };
            Stage::Unscheduled { trouble: Trouble::new("Unschedulable", message), since: before(age) }
        }
        pod::Stage::Starting => Stage::Starting,
        pod::Stage::Serving => Stage::Serving,
        pod::Stage::Faltering { age } => Stage::Faltering { trouble: Trouble::default(), since: before(age) },
        pod::Stage::Blocked => Stage::Blocked(Trouble::new("CrashLoopBackOff", "")),
        pod::Stage::Finished { age } => Stage::Finished { trouble: Trouble::default(), since: before(age) },
        pod::Stage::Leaving => Stage::Leaving,
    }
}

fn intent(intent: pod::Intent) -> Intent {
    let want = if intent.drain { Want::Drain(DRAIN) } else { Want::Serve };
    Intent { number: intent.number.into(), want, since: before(intent.age) }
}

fn reading(pod: &Pod, revision: &str) -> Reading {
    let mut judge = Judge::default();
    let expected = Expected { revision, now_ms: 0 };
    match pod.reading {
        pod::Reading::Unread => Reading::default(),
        pod::Reading::Missing => {
            judge.hear(Answer::Silence, expected);
            judge.reading(0)
        }
        pod::Reading::Heard { agent, age } => {
            judge.hear(Answer::Report(&report(&agent, revision)), expected);
            judge.reading(u64::from(age) * TICK_SECONDS.unsigned_abs() * 1000)
        }
    }
}

fn report(agent: &Agent, revision: &str) -> LoadReport {
    let phase = match (agent.service, agent.loaded) {
        (Service::Serving, false) => AgentPhase::Loading,
        (Service::Serving, true) => AgentPhase::Ready,
        (Service::Withdrawing, _) => AgentPhase::Withdrawing,
        (Service::Draining, _) => AgentPhase::Draining,
        (Service::Empty, _) => AgentPhase::Empty,
    };
    LoadReport {
        revision: revision.into(),
        phase,
        intent: agent.taken.map(|taken| taken.number.into()),
        up_ms: u64::from(agent.up) * TICK_SECONDS.unsigned_abs() * 1000,
        running: agent.streams.into(),
        ..LoadReport::idle(8)
    }
}
