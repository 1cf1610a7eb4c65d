//! What must hold whatever happens.

use std::fmt::{self, Display};

use stoker_operator::rollout::Why;

use crate::{
    pod::{AGE_MAX, Pod},
    round::Round,
    world::{Scope, World},
};

/// A promise that was not kept.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Broken {
    /// The linter refuses what the rollout decided.
    Lint(String),
    /// A pod was deleted that computes answers, before its time.
    CutsStreams {
        /// Why it was thought to be harmless.
        why: Why,
    },
    /// The operator's own write left fewer replicas than the deployment allows.
    ServesTooFew {
        /// Serving afterwards.
        after: usize,
        /// Fewest allowed.
        floor: usize,
    },
}

impl Broken {
    /// What deleting this pod breaks. One that had its time, or whose agent does not obey, is left to the kubelet's SIGTERM,
    /// which drains it.
    pub fn by_deleting(pod: &Pod, why: Why) -> Option<Self> {
        let waited = |ticks: u8| pod.intent.is_some_and(|intent| intent.drain && intent.age >= ticks);
        let harmless = match why {
            Why::Finished | Why::HoldsNoStreams | Why::Drained => !pod.holds_streams(),
            Why::DeadlinePassed => waited(AGE_MAX),
            Why::Unreachable | Why::OrderRefused => waited(1),
        };
        (!harmless).then_some(Self::CutsStreams { why })
    }
}

impl Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lint(violation) => write!(f, "the linter refuses the plan: {violation}"),
            Self::CutsStreams { why } => write!(f, "a pod that holds streams was deleted ({})", why.as_str()),
            Self::ServesTooFew { after, floor } => write!(f, "{after} replicas serve after a write, {floor} must"),
        }
    }
}

/// True when exactly what is wanted serves, and the operator wants nothing more. While changes are paused any revision is as wanted.
pub fn is_settled(world: &World, scope: &Scope) -> bool {
    let as_wanted = |pod: &Pod| (pod.revision == world.revision || world.paused) && pod.serves();
    let is_tried = world.trial && world.replicas > 0;
    world.round.is_none()
        && !is_tried
        && world.pods.len() == usize::from(world.replicas)
        && world.pods.iter().all(as_wanted)
        && Round::decide(world, scope) == Ok(None)
}
