//! The pods of a deployment, sorted by what the rollout may do with them. Pure.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

use stoker_crds::quantity::amount;
use stoker_replica::{Needs, Replica, Stage};

use super::Wanted;

/// Beyond its grace period, how long a pod may take to go.
const STUCK_AFTER: SignedDuration = SignedDuration::from_secs(60);

/// Live pods by what the rollout may do with them.
pub(super) struct Fleet<'a> {
    /// Of the wanted revision, meant to stay.
    pub(super) current: Vec<&'a Replica>,
    /// The one of the revision that is tried.
    pub(super) canary: Option<&'a Replica>,
    /// Of other revisions, not yet draining.
    pub(super) old: Vec<&'a Replica>,
    /// Draining, of any revision.
    pub(super) draining: Vec<&'a Replica>,
    /// How many are draining or on their way out.
    pub(super) leaving: usize,
    names: BTreeSet<&'a str>,
}

impl<'a> Fleet<'a> {
    pub(super) fn sort(wanted: &'a Wanted, pods: &'a [Replica], now: Timestamp) -> Self {
        let live = || pods.iter().filter(|pod| pod.is_live());
        let (draining, staying): (Vec<_>, Vec<_>) = live().partition(|pod| pod.drain_since().is_some());
        let (current, mut old): (Vec<_>, Vec<_>) =
            staying.into_iter().partition(|pod| pod.pod.revision == wanted.revision);
        let canary = wanted.canary.as_ref().and_then(|canary| take_canary(&mut old, &canary.revision));
        let goes = |pod: &&Replica| pod.pod.stage == Stage::Leaving && !pod.pod.lost && !is_stuck(pod, now);
        let leaving = draining.len() + pods.iter().filter(goes).count();
        let names = pods.iter().map(|pod| pod.pod.name.as_str()).chain(wanted.foreign_pods.iter().map(String::as_str));
        Self { current, canary, old, draining, leaving, names: names.collect() }
    }

    /// Replicas that serve and are meant to stay.
    pub(super) fn serving(&self) -> usize {
        self.current.iter().chain(&self.old).filter(|pod| pod.serves()).count()
    }

    /// Fewest replicas of the wanted revision. The canary stands in the place of one where one may be missing, else beside them.
    pub(super) fn fewest(&self, wanted: &Wanted) -> usize {
        wanted.replicas - usize::from(self.canary_stands_in(wanted))
    }

    pub(super) fn canary_stands_in(&self, wanted: &Wanted) -> bool {
        self.canary.is_some() && wanted.may_be_missing() > 0
    }

    /// Whom a pod that waits for room would replace, and what that one asks of a node.
    pub(super) fn replaced<'w>(&self, wanted: &'w Wanted) -> (&[&'a Replica], &'w Needs) {
        match &wanted.canary {
            Some(canary) if self.old.is_empty() => (&self.current, &canary.needs),
            _ => (&self.old, &wanted.needs),
        }
    }

    /// A replica of the wanted revision serves: more of them may be made at a time.
    pub(super) fn is_proven(&self) -> bool {
        self.current.iter().any(|pod| pod.serves())
    }

    /// Replicas of the wanted revision that have no room yet.
    pub(super) fn waiting(&self) -> usize {
        self.current.iter().filter(|pod| short_of_room(pod).is_some()).count()
    }

    /// Replicas of the wanted revision that have room and do not serve.
    pub(super) fn loading(&self) -> usize {
        self.current.iter().filter(|pod| !pod.serves() && short_of_room(pod).is_none()).count()
    }

    /// Since when pods that replace others wait for room on a node, longest first.
    pub(super) fn short_of_room_since(&self) -> Vec<Timestamp> {
        let newcomers = if self.old.is_empty() { self.canary.as_slice() } else { &self.current };
        let mut since: Vec<Timestamp> = newcomers.iter().filter_map(|pod| short_of_room(pod)).collect();
        since.sort_unstable();
        since
    }

    /// Ordinals whose pod name is free, smallest first.
    pub(super) fn free_ordinals(&self, revision: &str) -> impl Iterator<Item = u32> {
        let suffix = move |ordinal: u32| format!("-{revision}-{ordinal}");
        (0..).filter(move |&ordinal| !self.names.iter().any(|name| name.ends_with(&suffix(ordinal))))
    }
}

/// The only one of another revision. Where there are more, a roll to the wanted one is not over, and nothing is tried beside it.
fn take_canary<'a>(old: &mut Vec<&'a Replica>, revision: &str) -> Option<&'a Replica> {
    match old[..] {
        [canary] if canary.pod.revision == revision => old.pop(),
        _ => None,
    }
}

/// True when it should have been gone for a while: its node is lost, and nobody knows when its room is free.
fn is_stuck(pod: &Replica, now: Timestamp) -> bool {
    pod.pod.gone_by.is_some_and(|gone_by| now >= gone_by + STUCK_AFTER)
}

/// Since when it waits for room on a node or in a queue: for lack of resources, not for want of a matching node.
fn short_of_room(pod: &Replica) -> Option<Timestamp> {
    match &pod.pod.stage {
        Stage::Unscheduled { trouble, since } if is_shortage(&trouble.message) => Some(*since),
        _ => None,
    }
}

/// The scheduler's words for nodes that match but are full, and Kueue's gate: its queue has no room, or lets nobody in.
/// Those about devices do not say whether there are any at all, but who makes room for a pod has some of the same class.
fn is_shortage(message: &str) -> bool {
    let words = ["Insufficient", "Too many pods", "cannot allocate all claims", "kueue.x-k8s.io/admission"];
    words.iter().any(|words| message.contains(words))
}

/// True when a draining pod can still serve what is wanted.
pub(super) fn can_return(pod: &Replica, wanted: &Wanted) -> bool {
    pod.pod.revision == wanted.revision && matches!(pod.pod.stage, Stage::Serving | Stage::Faltering { .. })
}

/// True when a pod that goes surely makes room for one with `needs`: on nodes that this one may have, at least as much of everything.
/// Whoever let the pod in may have told it to select by more labels.
pub(super) fn frees_enough(victim: &Needs, needs: &Needs) -> bool {
    needs.node_selector.iter().all(|(label, value)| victim.node_selector.get(label) == Some(value))
        && needs.requests.iter().all(|(name, wanted)| {
            let freed = victim.requests.get(name).and_then(|freed| amount(freed));
            freed.zip(amount(wanted)).is_some_and(|(freed, wanted)| freed >= wanted)
        })
}
