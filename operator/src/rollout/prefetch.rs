//! Models that come onto a node before the replica there goes. Where there is no room for a surplus pod, an older replica is drained before its
//! successor starts, and nobody serves in its place for as long as that one fetches and loads. Pure.
//!
//! It can only help: who waits for it does so until a deadline, and a replica fetches for itself what is not there.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};
use stoker_replica::Replica;

use super::{RolloutPlan, Wanted, fleet::Fleet, waits_for_room_since};

/// Nodes that fetch at the same time: one source answers all of them.
pub(crate) const AT_ONCE: usize = 4;

/// What may be fetched ahead, and what is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefetching {
    /// The model of replicas to come, if nodes keep it.
    pub model: Option<ModelToCome>,
    /// Pods that fetch ahead, for whatever revision.
    pub pods: Vec<PrefetchPod>,
}

/// A model that nodes keep and replicas to come will serve.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelToCome {
    /// Their revision.
    pub revision: String,
    /// Other revisions that serve it: the nodes of their replicas have it.
    pub also_in: BTreeSet<String>,
    /// How long a pod that waits for room waits for it, too.
    pub patience: SignedDuration,
    /// The API server refused a pod that was to fetch it: none is made any more.
    pub is_refused: bool,
}

/// A pod that fetches ahead.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefetchPod {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The revision whose model it fetches.
    pub revision: String,
    /// The node that it fetches onto.
    pub node: String,
    /// How far it is.
    pub state: PrefetchState,
    /// It is being deleted.
    pub is_leaving: bool,
}

/// How far such a pod is.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefetchState {
    /// It fetches, or will.
    Fetching {
        /// What it met the last time, if it failed before: its kubelet starts it again.
        trouble: Option<String>,
    },
    /// The node has the model.
    Done,
    /// It ended for good.
    Failed {
        /// Why.
        trouble: String,
    },
}

/// What to do about it now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PrefetchPlan {
    /// The revision whose model it is.
    pub revision: String,
    /// Nodes to begin on.
    pub begin: Vec<String>,
    /// Pods that nobody needs any more.
    pub end: Vec<PrefetchPod>,
    /// Nodes whose replicas stay until it is there, or the deadline passes.
    pub awaited: BTreeSet<String>,
    /// Nodes with replicas of another model, and how far they are, while anything is fetched; `None`: not begun.
    pub nodes: BTreeMap<String, Option<PrefetchState>>,
}

impl PrefetchPlan {
    /// True when no pod comes or goes.
    pub fn is_empty(&self) -> bool {
        self.begin.is_empty() && self.end.is_empty()
    }

    /// True when a replica stays for what its node fetches.
    pub(super) fn awaits(&self, replica: &Replica) -> bool {
        replica.pod.node.as_ref().is_some_and(|node| self.awaited.contains(node))
    }
}

/// Begins as soon as a pod waits for room that one of another model will make for it, and ends what no node needs any more.
pub(super) fn plan(wanted: &Wanted, fleet: &Fleet<'_>, replicas: &[Replica], now: Timestamp, plan: &mut RolloutPlan) {
    let Prefetching { model, pods } = &wanted.prefetching;
    let nodes = model.as_ref().map(|model| nodes_of_others(model, replicas)).unwrap_or_default();
    let is_needed = |pod: &&PrefetchPod| {
        model.as_ref().is_some_and(|model| model.revision == pod.revision) && nodes.contains(pod.node.as_str())
    };
    plan.prefetch.end = pods.iter().filter(|pod| !is_needed(pod) && !pod.is_leaving).cloned().collect();
    let Some(model) = model else { return };
    let waits_since = waits_for_room_since(wanted, fleet);
    let state = |node: &str| pods.iter().filter(is_needed).find(|pod| pod.node == node).map(|pod| pod.state.clone());
    let stand: BTreeMap<String, Option<PrefetchState>> =
        nodes.iter().map(|node| ((*node).to_owned(), state(node))).collect();
    if waits_since.is_none() && stand.values().all(Option::is_none) {
        return;
    }
    plan.prefetch.revision = model.revision.clone();
    if let Some(since) = waits_since.filter(|_| !model.is_refused) {
        plan.prefetch.begin = to_begin(&stand);
        plan.prefetch.awaited = awaited(&stand);
        if !plan.prefetch.awaited.is_empty() && !plan.wait_until(since + model.patience, now) {
            plan.prefetch.awaited.clear();
        }
    }
    plan.prefetch.nodes = stand;
}

/// Nodes with replicas that serve another model.
fn nodes_of_others<'a>(model: &ModelToCome, replicas: &'a [Replica]) -> BTreeSet<&'a str> {
    let has_it = |revision: &String| *revision == model.revision || model.also_in.contains(revision);
    let others = replicas.iter().filter(|replica| replica.is_live() && !has_it(&replica.pod.revision));
    others.filter_map(|replica| replica.pod.node.as_deref()).collect()
}

fn to_begin(stand: &BTreeMap<String, Option<PrefetchState>>) -> Vec<String> {
    let fetching = stand.values().flatten().filter(|state| matches!(state, PrefetchState::Fetching { .. })).count();
    let idle = stand.iter().filter(|(_, state)| state.is_none()).map(|(node, _)| node.clone());
    idle.take(AT_ONCE.saturating_sub(fetching)).collect()
}

fn awaited(stand: &BTreeMap<String, Option<PrefetchState>>) -> BTreeSet<String> {
    let is_to_come = |state: &Option<PrefetchState>| matches!(state, None | Some(PrefetchState::Fetching { .. }));
    stand.iter().filter(|(_, state)| is_to_come(state)).map(|(node, _)| node.clone()).collect()
}
