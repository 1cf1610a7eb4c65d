//! Which pods to create, drain, take back and delete so that the wanted replicas of the wanted revision serve. Pure.
//!
//! Rules: missing capacity is created at once; an older revision is replaced one pod at a time, the new one first when
//! it fits (surge), the old one first when it does not and may (replace in place); nobody who may hold streams is deleted
//! before it is drained; serving replicas never become fewer than wanted, except by the one that replacing in place
//! costs, where the deployment allows it. A revision that is tried first gets one replica beside those, or in the place of one where one
//! may be missing. Never looks at a clock: `now` is an argument.

mod canary;
mod failures;
mod fleet;
mod leave;
pub mod prefetch;

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::contract::DrainSettings;
use stoker_replica::{Needs, Replica};

pub(crate) use self::leave::{deadline, told_since, unseen_since};
use self::{
    failures::Failures,
    fleet::Fleet,
    prefetch::{PrefetchPlan, Prefetching},
};
use crate::clock::SKEW;

/// Seconds that a replica of an old revision may be unready before it is replaced like a broken one.
pub const FALTER_PATIENCE: SignedDuration = SignedDuration::from_secs(30);
/// Seconds that a draining agent may be unreachable before it is left to the kubelet, whose SIGTERM drains it too.
pub const UNREACHABLE_PATIENCE: SignedDuration = SignedDuration::from_secs(15);
/// Seconds beyond the deadline in which the agent ends its last streams itself.
pub const DEADLINE_SLACK: SignedDuration = SignedDuration::from_secs(2);

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Replicas.
    pub replicas: usize,
    /// Revision of each.
    pub revision: String,
    /// How replicas leave.
    pub drain: DrainSettings,
    /// How an older revision is replaced.
    pub replacing: Replacing,
    /// Older revisions are not replaced.
    pub paused: bool,
    /// What a pod of the revision asks of a node.
    pub needs: Needs,
    /// A revision that is tried on one replica.
    pub canary: Option<CanaryWanted>,
    /// Names of pods that exist and are not ours.
    pub foreign_pods: BTreeSet<String>,
    /// What nodes may fetch before their replicas go, and what they do.
    pub prefetching: Prefetching,
}

/// A revision that is tried on one replica, beside those of the wanted one.
#[derive(Clone, Debug)]
pub struct CanaryWanted {
    /// The revision.
    pub revision: String,
    /// What its pod asks of a node.
    pub needs: Needs,
    /// It is written down that it is tried: gateways give its replica its part from the first request on.
    pub is_announced: bool,
}

impl Wanted {
    /// Replicas that may be missing. The last one of the revision that serves is not given up for a canary: nothing would be left to
    /// compare it with, or to go back to.
    pub(crate) fn may_be_missing(&self) -> usize {
        if self.canary.is_some() && self.replicas < 2 { 0 } else { self.replacing.max_unavailable }
    }
}

/// What replacing an older revision may cost.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Replacing {
    /// Replicas that may be missing.
    pub max_unavailable: usize,
    /// How long a surplus pod waits for room before one is given up for it.
    pub surge_patience: SignedDuration,
}

impl Default for Replacing {
    /// Never fewer than served; time for a cluster autoscaler to add a node.
    fn default() -> Self {
        Self { max_unavailable: 0, surge_patience: SignedDuration::from_secs(120) }
    }
}

/// What to do with pods now, and when to look again if nothing happens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutPlan {
    /// Ordinals of pods to create.
    pub create: Vec<u32>,
    /// Ordinal of the pod to create of the revision that is tried.
    pub create_canary: Option<u32>,
    /// Pods to begin draining.
    pub drain: Vec<PodRef>,
    /// Draining pods to take back into service.
    pub undrain: Vec<PodRef>,
    /// Pods whose agent took an order that is not written on them, or whose order has a date that is to come: what they
    /// should do is said again, under a number above the agent's.
    pub reassert: Vec<PodRef>,
    /// Pods to delete.
    pub delete: Vec<Deletion>,
    /// Pods that failed soon after they were made, while replicas are missing.
    pub failures: usize,
    /// Nothing is created before: pods failed one after another.
    pub held_until: Option<Timestamp>,
    /// How an older revision is being replaced.
    pub strategy: Strategy,
    /// What nodes fetch before their replicas go.
    pub prefetch: PrefetchPlan,
    /// When time alone changes the plan.
    pub look_again: Option<Timestamp>,
}

/// How an older revision is being replaced.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Strategy {
    /// No pod of an older revision is left.
    #[default]
    Settled,
    /// One pod more than wanted: the new one serves before an old one goes.
    Surge,
    /// The surplus pod does not fit: an old one goes before the new one starts.
    ReplaceInPlace,
    /// Nobody is replaced: somebody paused it.
    Held,
}

/// A pod that a plan names.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct PodRef {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The version that was looked at.
    pub resource_version: String,
    /// The number of its next intent.
    pub next_number: u64,
}

impl PodRef {
    /// Names the pod of a replica.
    pub fn to(replica: &Replica) -> Self {
        let pod = &replica.pod;
        Self {
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            resource_version: pod.resource_version.clone(),
            next_number: replica.next_number(),
        }
    }
}

/// A pod to delete, and why that cuts no stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Deletion {
    /// The pod.
    pub pod: PodRef,
    /// Why it may go.
    pub why: Why,
}

/// Why a pod may be deleted.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Why {
    /// It ended by itself.
    Finished,
    /// It never served, or its agent does not run.
    HoldsNoStreams,
    /// Its agent reports that it is empty.
    Drained,
    /// The drain deadline passed.
    DeadlinePassed,
    /// Its agent cannot be reached; the kubelet's SIGTERM drains it.
    Unreachable,
    /// Its agent answers and does not take the order; the kubelet's SIGTERM drains it.
    OrderRefused,
}

impl Why {
    /// The word for plans, Events and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::HoldsNoStreams => "holds no streams",
            Self::Drained => "drained",
            Self::DeadlinePassed => "drain deadline passed",
            Self::Unreachable => "agent unreachable",
            Self::OrderRefused => "agent refuses the order",
        }
    }
}

/// Decides what to do with `pods` now.
pub fn plan_rollout(wanted: &Wanted, pods: &[Replica], now: Timestamp) -> RolloutPlan {
    let mut plan = RolloutPlan::default();
    let mut fleet = Fleet::sort(wanted, pods, now);
    let failures = Failures::of(wanted, fleet.fewest(wanted), pods);
    leave::bury_finished(pods, &failures, &mut plan);
    take_back(wanted, &mut fleet, &mut plan);
    leave::settle_draining(wanted, &fleet.draining, now, &mut plan);
    leave::remove_useless_old(&mut fleet, &mut plan);
    plan.strategy = strategy(wanted, &fleet, now, &mut plan);
    plan.failures = failures.count();
    plan.held_until = failures.pause_until().filter(|until| now < *until);
    create_missing(wanted, &fleet, now, &mut plan);
    prefetch::plan(wanted, &fleet, pods, now, &mut plan);
    leave::remove_surplus(wanted, &mut fleet, now, &mut plan);
    canary::create(wanted, &fleet, &failures, now, &mut plan);
    reassert(pods, now, &mut plan);
    plan
}

/// An agent ahead of its pod is caught up with, unless the pod's intent changes or ends anyway. So is an intent that was
/// written by a clock ahead of ours: its deadline would come as late as that clock was early.
fn reassert(pods: &[Replica], now: Timestamp, plan: &mut RolloutPlan) {
    let misdated = |pod: &Replica| pod.intent.is_some_and(|intent| intent.since.duration_since(now) > SKEW);
    let ahead = pods.iter().filter(|pod| pod.is_live() && (pod.agent_is_ahead() || misdated(pod)));
    let deleted = plan.delete.iter().map(|deletion| &deletion.pod);
    let named: BTreeSet<&String> = plan.drain.iter().chain(&plan.undrain).chain(deleted).map(|pod| &pod.uid).collect();
    plan.reassert = ahead.filter(|pod| !named.contains(&pod.pod.uid)).map(PodRef::to).collect();
}

/// Demand that returned is met by replicas that are still there before new ones are made.
fn take_back(wanted: &Wanted, fleet: &mut Fleet<'_>, plan: &mut RolloutPlan) {
    while fleet.current.len() < fleet.fewest(wanted) {
        let Some(found) = fleet.draining.iter().position(|pod| fleet::can_return(pod, wanted)) else { break };
        let pod = fleet.draining.remove(found);
        plan.undrain.push(PodRef::to(pod));
        fleet.current.push(pod);
    }
}

/// Surge, unless the surplus pod has been waiting for a node that an old pod would free, and one may be missing.
fn strategy(wanted: &Wanted, fleet: &Fleet<'_>, now: Timestamp, plan: &mut RolloutPlan) -> Strategy {
    if fleet.old.is_empty() && wanted.canary.is_none() {
        return Strategy::Settled;
    }
    if wanted.paused {
        return Strategy::Held;
    }
    match waits_for_room_since(wanted, fleet) {
        Some(since) if !plan.wait_until(since + wanted.replacing.surge_patience, now) => Strategy::ReplaceInPlace,
        Some(_) | None => Strategy::Surge,
    }
}

/// Since when a surplus pod waits for a node that an old pod would free, where one may be missing.
fn waits_for_room_since(wanted: &Wanted, fleet: &Fleet<'_>) -> Option<Timestamp> {
    if wanted.paused || wanted.may_be_missing() == 0 {
        return None;
    }
    // Pods on their way out will free their place by themselves.
    let since = fleet.short_of_room_since().filter(|_| fleet.nobody_leaves)?;
    let (replaced, needs) = fleet.replaced(wanted);
    replaced.iter().any(|pod| fleet::frees_enough(&pod.pod.needs, needs)).then_some(since)
}

/// Creates what is missing, and one surplus pod to roll an older revision.
fn create_missing(wanted: &Wanted, fleet: &Fleet<'_>, now: Timestamp, plan: &mut RolloutPlan) {
    let staying = fleet.current.len() + fleet.old.len();
    let missing = fleet.fewest(wanted).saturating_sub(staying);
    let surge = fleet.old.len().min(1).min(wanted.replicas.saturating_sub(fleet.current.len()));
    let room_to_surge = !wanted.paused
        && staying + fleet.draining.len() <= wanted.replicas
        && fleet.current.iter().all(|pod| pod.serves());
    let count = if missing > 0 {
        missing
    } else if room_to_surge {
        surge
    } else {
        0
    };
    if plan.held_until.is_some_and(|until| count > 0 && plan.wait_until(until, now)) {
        return;
    }
    plan.held_until = None;
    plan.create = fleet.free_ordinals(&wanted.revision).take(count).collect();
}

impl RolloutPlan {
    /// True while `moment` lies ahead; then the plan is looked at again when it comes.
    fn wait_until(&mut self, moment: Timestamp, now: Timestamp) -> bool {
        let ahead = now < moment;
        if ahead {
            self.look_again = Some(self.look_again.map_or(moment, |earlier| earlier.min(moment)));
        }
        ahead
    }

    /// True when replicas come, go or come back.
    pub fn moves_replicas(&self) -> bool {
        let Self {
            create,
            create_canary,
            drain,
            undrain,
            reassert: _,
            delete,
            failures: _,
            held_until: _,
            strategy: _,
            prefetch: _,
            look_again: _,
        } = self;
        let comes = !create.is_empty() || create_canary.is_some();
        comes || !(drain.is_empty() && undrain.is_empty() && delete.is_empty())
    }

    /// True when pods stay as they are.
    pub fn is_empty(&self) -> bool {
        !self.moves_replicas() && self.reassert.is_empty() && self.prefetch.is_empty()
    }
}
