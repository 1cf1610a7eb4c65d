//! Which pods to create, drain, take back and delete so that the wanted replicas of the wanted revision serve. Pure.
//!
//! Rules: missing capacity is created at once; an older revision is replaced by as many pods at a time as [`Replacing`] says, new ones
//! first where they fit (surge), old ones first where they do not and may (replace in place); by one pod until a replica of the new
//! revision serves, so that a bad one costs no more than that. Nobody who may hold streams is deleted before it is drained; serving
//! replicas never become fewer than wanted, except by those that replacing in place costs, where the deployment allows it. A revision that
//! is tried first gets one replica beside those, or in the place of one where one may be missing. Never looks at a clock: `now` is an
//! argument.

mod canary;
mod failures;
mod fleet;
mod leave;
pub mod prefetch;
mod replacing;

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::contract::DrainSettings;
use stoker_replica::{Needs, Replica};

pub use self::leave::deadline;
pub(crate) use self::leave::{told_since, unseen_since};
pub use self::replacing::{Missing, Replacing, ReplacingRule, Share};
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
    /// More pods than wanted: new ones serve before old ones go.
    Surge,
    /// Surplus pods do not fit, or there may be none: old ones go before new ones start.
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
    let overdue = overdue(wanted, &fleet, now, &mut plan);
    plan.strategy = strategy(wanted, &fleet, overdue);
    plan.failures = failures.count();
    plan.held_until = failures.pause_until().filter(|until| now < *until);
    create_missing(wanted, &fleet, now, &mut plan);
    prefetch::plan(wanted, &fleet, pods, now, &mut plan);
    let may_go_first = may_go_first(wanted, &fleet, overdue);
    leave::remove_surplus(wanted, &mut fleet, may_go_first, now, &mut plan);
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

/// Surge, unless surplus pods have been waiting for a node that old pods would free, or there may be none.
fn strategy(wanted: &Wanted, fleet: &Fleet<'_>, overdue: usize) -> Strategy {
    match () {
        () if fleet.old.is_empty() && wanted.canary.is_none() => Strategy::Settled,
        () if wanted.paused => Strategy::Held,
        () if overdue > 0 || goes_first(wanted, fleet) => Strategy::ReplaceInPlace,
        () => Strategy::Surge,
    }
}

/// Old replicas go although nobody waits for their room: no pod may be too many.
fn goes_first(wanted: &Wanted, fleet: &Fleet<'_>) -> bool {
    wanted.replacing.max_surge == 0 && wanted.may_be_missing() > 0 && !wanted.paused && !fleet.old.is_empty()
}

/// Surplus pods that have waited for as long as they should for a node that old pods would free.
fn overdue(wanted: &Wanted, fleet: &Fleet<'_>, now: Timestamp, plan: &mut RolloutPlan) -> usize {
    let waiting = wait_for_old(wanted, fleet);
    waiting.iter().filter(|since| !plan.wait_until(**since + wanted.replacing.surge_patience, now)).count()
}

/// Since when surplus pods wait for a node that old pods would free, where replicas may be missing; longest first.
fn wait_for_old(wanted: &Wanted, fleet: &Fleet<'_>) -> Vec<Timestamp> {
    let (replaced, needs) = fleet.replaced(wanted);
    let helps = || replaced.iter().any(|pod| fleet::frees_enough(&pod.pod.needs, needs));
    if wanted.paused || wanted.may_be_missing() == 0 || !helps() { Vec::new() } else { fleet.short_of_room_since() }
}

/// How many old replicas may go before their successors serve. Those on their way out free their places by themselves, and until a
/// replica of the new revision serves one place is enough to find out whether any does.
fn may_go_first(wanted: &Wanted, fleet: &Fleet<'_>, overdue: usize) -> usize {
    let under_way = fleet.loading() + fleet.waiting();
    let unasked = if goes_first(wanted, fleet) { wanted.may_be_missing().saturating_sub(under_way) } else { 0 };
    let most = if fleet.is_proven() { usize::MAX } else { 1_usize.saturating_sub(fleet.loading()) };
    overdue.max(unasked).min(most).saturating_sub(fleet.leaving)
}

/// Since when a surplus pod waits for room that nobody frees yet.
fn waits_for_room_since(wanted: &Wanted, fleet: &Fleet<'_>) -> Option<Timestamp> {
    wait_for_old(wanted, fleet).get(fleet.leaving).copied()
}

/// Creates what is missing, and surplus pods to roll an older revision.
fn create_missing(wanted: &Wanted, fleet: &Fleet<'_>, now: Timestamp, plan: &mut RolloutPlan) {
    let staying = fleet.current.len() + fleet.old.len();
    let missing = fleet.fewest(wanted).saturating_sub(staying);
    let count = match () {
        // A quota counts those that are on their way out, too.
        () if wanted.replacing.max_surge == 0 => {
            missing.min(wanted.replicas.saturating_sub(staying + fleet.leaving + plan.delete.len()))
        }
        () if missing > 0 => missing,
        () if wanted.paused => 0,
        () => surplus(wanted, fleet, staying),
    };
    if plan.held_until.is_some_and(|until| count > 0 && plan.wait_until(until, now)) {
        return;
    }
    plan.held_until = None;
    plan.create = fleet.free_ordinals(&wanted.revision).take(count).collect();
}

/// How many pods are made beyond the wanted ones. Those that load in the place of old ones hold up nobody: the next ones wait for room
/// meanwhile, and where there is some they need no old one to go.
fn surplus(wanted: &Wanted, fleet: &Fleet<'_>, staying: usize) -> usize {
    let room = (wanted.replicas + wanted.replacing.max_surge).saturating_sub(staying + fleet.draining.len());
    let (at_once, in_place) =
        if fleet.is_proven() { (wanted.replacing.max_surge, wanted.may_be_missing()) } else { (1, 0) };
    let loading = fleet.loading();
    let under_way = fleet.waiting() + loading - loading.min(in_place);
    let successors = fleet.old.len().min(wanted.replicas.saturating_sub(fleet.current.len()));
    successors.min(room).min(at_once.saturating_sub(under_way))
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
