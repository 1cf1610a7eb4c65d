//! A replica's pod as the cluster shows it, in one [`Stage`], so that no later step looks at container statuses.

use std::collections::BTreeMap;

use jiff::Timestamp;

/// One pod of a deployment.
#[derive(Clone, Debug, PartialEq)]
pub struct ObservedPod {
    /// Its name.
    pub name: String,
    /// Its UID: what a delete is bound to.
    pub uid: String,
    /// Revision it was made for.
    pub revision: String,
    /// Its number within the revision.
    pub ordinal: u32,
    /// Its version: what a change of its intent is bound to.
    pub resource_version: String,
    /// When it was created, by the API server's clock.
    pub created: Timestamp,
    /// How far it is.
    pub stage: Stage,
    /// Its node is taken for lost: whatever should happen there may never happen.
    pub lost: bool,
    /// Being deleted, by when it should be gone.
    pub gone_by: Option<Timestamp>,
    /// The node that it runs on, once it is on one.
    pub node: Option<String>,
    /// What it asks of a node.
    pub needs: Needs,
}

/// How far a pod is.
#[derive(Clone, Debug, PartialEq)]
pub enum Stage {
    /// The scheduler finds no node for it.
    Unscheduled {
        /// The scheduler's reason.
        trouble: Trouble,
        /// Since when.
        since: Timestamp,
    },
    /// On its way to a node, or its image and volumes being prepared.
    Preparing {
        /// What it waits for.
        trouble: Trouble,
        /// Since when.
        since: Timestamp,
    },
    /// It cannot start, or starts and dies; the kubelet keeps trying.
    Blocked(Trouble),
    /// Its agent runs and was not ready yet.
    Starting,
    /// Ready: requests reach it.
    Serving,
    /// It was ready and is not now.
    Faltering {
        /// What the kubelet says.
        trouble: Trouble,
        /// Since when.
        since: Timestamp,
    },
    /// It ended and will not start again: failed, evicted, completed.
    Finished {
        /// Why.
        trouble: Trouble,
        /// Since when.
        since: Timestamp,
    },
    /// Being deleted.
    Leaving,
}

impl Needs {
    /// How many it requests of what is counted in whole numbers, as GPUs are.
    pub fn count(&self, resource: &str) -> u64 {
        self.requests.get(resource).and_then(|count| count.parse().ok()).unwrap_or_default()
    }
}

impl Stage {
    /// Since when, as whoever saw it begin says.
    pub(crate) fn since_mut(&mut self) -> Option<&mut Timestamp> {
        match self {
            Self::Unscheduled { since, .. }
            | Self::Preparing { since, .. }
            | Self::Faltering { since, .. }
            | Self::Finished { since, .. } => Some(since),
            Self::Blocked(_) | Self::Starting | Self::Serving | Self::Leaving => None,
        }
    }
}

/// What is wrong with a pod, in the words of who noticed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trouble {
    /// CamelCase word.
    pub reason: String,
    /// Sentence.
    pub message: String,
}

impl Trouble {
    /// A trouble of this reason.
    pub fn new(reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self { reason: reason.into(), message: message.into() }
    }
}

/// What a pod asks of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Needs {
    /// Requested Kubernetes quantities by resource name.
    pub requests: BTreeMap<String, String>,
    /// Labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
}
