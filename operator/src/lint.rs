//! Checks a plan against what no plan may do, whoever made it. Pure; run before every apply and in every test of plans.
//!
//! It repeats none of the rollout's reasoning: it only looks at what would be left if the plan were carried out.

use std::collections::BTreeSet;

use jiff::Timestamp;
use stoker_replica::{Replica, Sight, Stage};
use thiserror::Error;

use crate::{
    plan::Plan,
    rollout::{self, Deletion, PodRef, Strategy, Wanted, Why},
};

/// What a plan would break.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum Violation {
    /// A pod that may hold streams would be deleted before it is drained.
    #[error("{pod} would be deleted ({why:?}) while it may hold streams", why = why.as_str())]
    CutsStreams {
        /// The pod.
        pod: String,
        /// The plan's reason.
        why: Why,
    },
    /// Too few replicas would serve.
    #[error("{after} replicas would serve, {needed} must ({before} do now)")]
    ServesTooFew {
        /// Serving now.
        before: usize,
        /// Serving afterwards.
        after: usize,
        /// Fewest allowed.
        needed: usize,
    },
    /// More pods would be created than may be beyond the wanted ones.
    #[error("{after} pods would stay, {allowed} may")]
    TooManyPods {
        /// Staying afterwards.
        after: usize,
        /// Most allowed.
        allowed: usize,
    },
    /// A created pod's name is in use.
    #[error("pod name {name} is in use")]
    NameInUse {
        /// The name.
        name: String,
    },
    /// A pod is named in two actions.
    #[error("{pod} is named twice")]
    NamedTwice {
        /// The pod.
        pod: String,
    },
    /// A pod that was not observed, or is on its way out already, is named.
    #[error("{pod} is not there to act on")]
    NotThere {
        /// The pod.
        pod: String,
    },
}

/// What `plan` would break, carried out on `pods`.
pub fn check(plan: &Plan, wanted: &Wanted, pods: &[Replica], now: Timestamp) -> Vec<Violation> {
    let mut violations = Vec::new();
    violations.extend(plan.pods.delete.iter().filter_map(|deletion| cuts_streams(deletion, wanted, pods, now)));
    violations.extend(serves_too_few(plan, wanted, pods));
    violations.extend(too_many_pods(plan, wanted, pods));
    violations.extend(names_in_use(plan, wanted, pods));
    violations.extend(named_wrongly(plan, pods));
    violations
}

fn cuts_streams(deletion: &Deletion, wanted: &Wanted, pods: &[Replica], now: Timestamp) -> Option<Violation> {
    let pod = find(pods, &deletion.pod)?;
    let harmless = !pod.may_hold_streams() || pod.drain_since().is_some_and(|since| drained(pod, since, wanted, now));
    (!harmless).then(|| Violation::CutsStreams { pod: pod.pod.name.clone(), why: deletion.why })
}

/// True when a pod that drains since then holds no streams, or had its time, or can only be drained by the kubelet.
fn drained(pod: &Replica, since: Timestamp, wanted: &Wanted, now: Timestamp) -> bool {
    let told_since = match pod.reading.sight() {
        Sight::Fresh(_) if pod.is_drained() => return true,
        Sight::Fresh(_) if pod.knows_its_intent() => None,
        Sight::Fresh(report) => Some(rollout::told_since(report, since, now)),
        unseen @ (Sight::Stale { .. } | Sight::Absurd(_) | Sight::Missing) => {
            Some(rollout::unseen_since(unseen, since, now))
        }
        Sight::Unread => None,
    };
    now >= rollout::deadline(&wanted.drain, since)
        || told_since.is_some_and(|since| now >= since + rollout::UNREACHABLE_PATIENCE)
}

fn serves_too_few(plan: &Plan, wanted: &Wanted, pods: &[Replica]) -> Option<Violation> {
    let serving: Vec<&Replica> = pods.iter().filter(|pod| pod.serves()).collect();
    let gone = going(plan);
    let after = serving.iter().filter(|pod| !gone.contains(pod.pod.uid.as_str())).count();
    let dip = if plan.pods.strategy == Strategy::ReplaceInPlace { wanted.replacing.max_unavailable } else { 0 };
    let needed = serving.len().min(wanted.replicas.saturating_sub(dip));
    (after < needed).then_some(Violation::ServesTooFew { before: serving.len(), after, needed })
}

fn too_many_pods(plan: &Plan, wanted: &Wanted, pods: &[Replica]) -> Option<Violation> {
    let gone = going(plan);
    let staying = pods.iter().filter(|pod| pod.is_live() && pod.drain_since().is_none());
    let kept = staying.filter(|pod| !gone.contains(pod.pod.uid.as_str())).count() + plan.pods.undrain.len();
    let created = plan.pods.create.len() + usize::from(plan.pods.create_canary.is_some());
    let surplus = wanted.replacing.max_surge.max(usize::from(wanted.canary.is_some()));
    let (after, allowed) = (kept + created, wanted.replicas + surplus);
    (created > 0 && after > allowed).then_some(Violation::TooManyPods { after, allowed })
}

fn names_in_use<'a>(plan: &'a Plan, wanted: &'a Wanted, pods: &'a [Replica]) -> impl Iterator<Item = Violation> + 'a {
    let names = pods.iter().map(|pod| &pod.pod.name).chain(&wanted.foreign_pods);
    let names: Vec<&String> = names.collect();
    let canary =
        wanted.canary.iter().flat_map(|canary| plan.pods.create_canary.map(|ordinal| (&canary.revision, ordinal)));
    plan.pods.create.iter().map(|ordinal| (&plan.revision, *ordinal)).chain(canary).filter_map(
        move |(revision, ordinal)| {
            let end = format!("-{revision}-{ordinal}");
            let name = names.iter().find(|name| name.ends_with(&end))?;
            Some(Violation::NameInUse { name: (*name).clone() })
        },
    )
}

fn named_wrongly(plan: &Plan, pods: &[Replica]) -> Vec<Violation> {
    let mut seen = BTreeSet::new();
    let mut violations = Vec::new();
    for pod in named(plan) {
        if !seen.insert(&pod.uid) {
            violations.push(Violation::NamedTwice { pod: pod.name.clone() });
        }
        if find(pods, pod).is_none_or(|pod| pod.pod.stage == Stage::Leaving) {
            violations.push(Violation::NotThere { pod: pod.name.clone() });
        }
    }
    violations
}

/// UIDs of pods that the plan takes out of service.
fn going(plan: &Plan) -> BTreeSet<&str> {
    let deleted = plan.pods.delete.iter().map(|deletion| &deletion.pod);
    plan.pods.drain.iter().chain(deleted).map(|pod| pod.uid.as_str()).collect()
}

fn named(plan: &Plan) -> impl Iterator<Item = &PodRef> {
    let deleted = plan.pods.delete.iter().map(|deletion| &deletion.pod);
    plan.pods.drain.iter().chain(&plan.pods.undrain).chain(&plan.pods.reassert).chain(deleted)
}

fn find<'a>(pods: &'a [Replica], pod: &PodRef) -> Option<&'a Replica> {
    pods.iter().find(|observed| observed.pod.uid == pod.uid)
}
