//! Nodes that have a deployment's model in memory although none of its replicas runs there, so that the next ones start warm: which nodes, and
//! which pods come and go for that. Pure.
//!
//! A pod that stands by asks for no GPU: it fetches the model into its node's cache, as those do that fetch ahead of a roll, and stays to keep
//! it in memory. Nobody waits for one, and one too few costs time alone.

mod room;
mod words;

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};

pub(crate) use self::{
    room::{Ground, spots},
    words::status,
};
use crate::rollout::prefetch::{AT_ONCE, PrefetchPod, PrefetchState};

/// How long a pod that ended for good stays: what its node did to it may be done to the next one at once.
pub const FAILED_PATIENCE: SignedDuration = SignedDuration::from_secs(300);

/// Between two looks at least: what replicas of other deployments take and leave of nodes is no event of this one.
const LOOK_PAUSE: SignedDuration = SignedDuration::from_secs(60);

/// A node that replicas may run on.
#[derive(Clone, Debug, PartialEq)]
pub struct Spot {
    /// Its name.
    pub node: String,
    /// Further replicas that have room there, the model's bytes in memory beside them counted.
    pub room: u64,
    /// Replicas of the deployment there.
    pub replicas: usize,
    /// One of these is still starting: what it reads is to stay where it is.
    pub is_starting: bool,
    /// Its cache had the model when a replica served there.
    pub has_model: bool,
    /// Something is wrong with it now: nothing begins there.
    pub is_troubled: bool,
}

/// A pod that stands by.
#[derive(Clone, Debug, PartialEq)]
pub struct StandbyPod {
    /// Which, where, and how far: done is who has the model in memory.
    pub fetch: PrefetchPod,
    /// When it was made.
    pub created: Timestamp,
}

/// What is looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene<'a> {
    /// Nodes that are to have the model.
    pub wanted: usize,
    /// The revision whose model it is.
    pub revision: &'a str,
    /// All nodes that its replicas may run on; or why none can be chosen now.
    pub spots: Result<Vec<Spot>, String>,
    /// Pods that stand by, for whatever revision.
    pub pods: &'a [StandbyPod],
    /// The API server refused such a pod of the revision: none is made any more.
    pub is_refused: bool,
}

/// What to do about it now, and how things stand.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StandbyPlan {
    /// Nodes that are to have the model.
    pub wanted: usize,
    /// The revision whose model it is.
    pub revision: String,
    /// Nodes to begin on.
    pub begin: Vec<String>,
    /// Pods that nobody needs any more.
    pub end: Vec<PrefetchPod>,
    /// Nodes that have it in memory, and room for a further replica.
    pub ready: Vec<String>,
    /// Why fewer nodes than wanted have it.
    pub lack: Option<Lack>,
    /// When to look again if nothing happens; `None` where nothing is wanted.
    pub look_again: Option<Timestamp>,
}

/// Why fewer nodes have the model than are wanted.
#[derive(Clone, Debug, PartialEq)]
pub enum Lack {
    /// No node can be chosen yet.
    Unknown(String),
    /// Only so many nodes have room for a further replica.
    Room {
        /// Nodes that do.
        nodes: usize,
    },
    /// They are on their way.
    UnderWay {
        /// What one of them met.
        trouble: Option<String>,
    },
}

impl StandbyPlan {
    /// True when no pod comes or goes.
    pub fn is_empty(&self) -> bool {
        self.begin.is_empty() && self.end.is_empty()
    }
}

/// Nodes that have room come first; a pod stays on one without, while no other has any, and where a replica that starts reads what it keeps.
pub fn plan(scene: &Scene<'_>, now: Timestamp) -> StandbyPlan {
    let Scene { wanted, revision, spots, pods, is_refused } = scene;
    let mut plan = StandbyPlan {
        wanted: *wanted,
        revision: (*revision).to_owned(),
        look_again: (*wanted > 0).then(|| now + LOOK_PAUSE),
        ..StandbyPlan::default()
    };
    let known = spots.as_deref().unwrap_or_default();
    let mut standing = Vec::new();
    for pod in pods.iter().filter(|pod| !pod.fetch.is_leaving) {
        let spot = known.iter().find(|spot| spot.node == pod.fetch.node);
        let is_of_it = pod.fetch.revision == *revision && *wanted > 0 && (spot.is_some() || spots.is_err());
        match (is_of_it, &pod.fetch.state) {
            (false, _) => plan.end.push(pod.fetch.clone()),
            (true, PrefetchState::Failed { .. }) => plan.end.extend(had_its_time(pod, now)),
            (true, PrefetchState::Fetching { .. } | PrefetchState::Done) => standing.push((spot, &pod.fetch)),
        }
    }
    let (useful, idle): (Vec<_>, Vec<_>) = standing.into_iter().partition(|(spot, _)| has_room(*spot));
    let fresh = if *is_refused { Vec::new() } else { fresh(known, pods) };
    let kept = useful.len().min(*wanted);
    let missing = *wanted - kept;
    let not_replaced = missing.saturating_sub(fresh.len());
    let surplus = by_worth(useful).skip(kept).chain(by_worth(idle).filter(may_go).skip(not_replaced));
    plan.end.extend(surplus.map(|(_, pod)| pod.clone()));
    plan.ready = ready(known, pods, &plan);
    let under_way = pods.iter().filter(|pod| is_fetching(&pod.fetch) && !plan.end.contains(&pod.fetch)).count();
    plan.begin = fresh.into_iter().take(missing.min(AT_ONCE.saturating_sub(under_way))).collect();
    plan.lack = lack(scene, &plan);
    plan
}

fn has_room(spot: Option<&Spot>) -> bool {
    spot.is_none_or(|spot| spot.room > 0)
}

/// What a replica that starts there reads stays.
fn may_go((spot, _): &Standing<'_>) -> bool {
    spot.is_none_or(|spot| !spot.is_starting)
}

/// One that failed goes once it was remembered for long enough.
fn had_its_time(pod: &StandbyPod, now: Timestamp) -> Option<PrefetchPod> {
    (now >= pod.created + FAILED_PATIENCE).then(|| pod.fetch.clone())
}

fn is_fetching(pod: &PrefetchPod) -> bool {
    matches!(pod.state, PrefetchState::Fetching { .. })
}

type Standing<'a> = (Option<&'a Spot>, &'a PrefetchPod);

/// Those that have it in memory first, then by name, so that the same ones stay each time.
fn by_worth(mut pods: Vec<Standing<'_>>) -> impl Iterator<Item = Standing<'_>> {
    pods.sort_by(|(_, one), (_, other)| (is_fetching(one), &one.name).cmp(&(is_fetching(other), &other.name)));
    pods.into_iter()
}

/// Nodes to begin on, the best first: those whose disk has the model, then those without a replica that would be lost with them.
fn fresh(spots: &[Spot], pods: &[StandbyPod]) -> Vec<String> {
    let taken: BTreeSet<&str> = pods.iter().map(|pod| pod.fetch.node.as_str()).collect();
    let is_open = |spot: &&Spot| spot.room > 0 && !spot.is_troubled && !taken.contains(spot.node.as_str());
    let mut open: Vec<&Spot> = spots.iter().filter(is_open).collect();
    open.sort_by_key(|spot| (!spot.has_model, spot.replicas, u64::MAX - spot.room, &spot.node));
    open.into_iter().map(|spot| spot.node.clone()).collect()
}

fn ready(spots: &[Spot], pods: &[StandbyPod], plan: &StandbyPlan) -> Vec<String> {
    let has_room = |node: &str| spots.iter().any(|spot| spot.node == node && spot.room > 0);
    let stays = |pod: &&PrefetchPod| pod.revision == plan.revision && !pod.is_leaving && !plan.end.contains(pod);
    let done = pods.iter().map(|pod| &pod.fetch).filter(|pod| pod.state == PrefetchState::Done);
    done.filter(stays).filter(|pod| has_room(&pod.node)).map(|pod| pod.node.clone()).collect()
}

fn lack(scene: &Scene<'_>, plan: &StandbyPlan) -> Option<Lack> {
    if plan.ready.len() >= scene.wanted {
        return None;
    }
    let spots = match &scene.spots {
        Err(why) => return Some(Lack::Unknown(why.clone())),
        Ok(spots) => spots,
    };
    let nodes = spots.iter().filter(|spot| spot.room > 0 && !spot.is_troubled).count();
    let mut troubles = scene.pods.iter().filter(|pod| pod.fetch.revision == scene.revision).filter_map(trouble);
    Some(match troubles.next() {
        None if nodes < scene.wanted => Lack::Room { nodes },
        trouble => Lack::UnderWay { trouble },
    })
}

fn trouble(pod: &StandbyPod) -> Option<String> {
    match &pod.fetch.state {
        PrefetchState::Fetching { trouble: Some(trouble) } | PrefetchState::Failed { trouble } => {
            Some(format!("{}: {trouble}", pod.fetch.node))
        }
        PrefetchState::Fetching { trouble: None } | PrefetchState::Done => None,
    }
}
