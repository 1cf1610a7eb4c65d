//! Which nodes a replica would rather run on: those that have its model in memory for it, then those whose own cache had it, by what statuses
//! say. A wish beside what `spec.pod.affinity` says, which no pod waits for. Pure.

use k8s_openapi::api::core::v1::{Affinity, NodeSelectorRequirement, NodeSelectorTerm, PreferredSchedulingTerm};
use stoker_crds::status::ModelStatus;

use crate::{
    revision::revision,
    rollout::prefetch::PrefetchState,
    standby::StandbyPod,
    validate::{CacheVolume, ModelFetch, ValidatedDeployment},
};

/// More nodes with a model than this are not written down, nor preferred: each is a line of every pod.
pub(crate) const NODES_WITH_MODEL_MAX: usize = 16;

/// Of 1 to 100: what somebody wrote into `spec.pod.affinity` with more stands before it.
const WEIGHT: i32 = 50;
/// Of nodes that have it in memory.
const WARM_WEIGHT: i32 = 75;

impl ValidatedDeployment {
    /// The model, if it is kept by nodes in our own cache, which shares it among deployments.
    pub fn kept_by_nodes(&self) -> Option<&ModelFetch> {
        let kept = |fetch: &&ModelFetch| matches!(fetch.cache, CacheVolume::Node(_)) && self.mounted().is_none();
        self.replica.fetch.as_ref().filter(kept)
    }

    /// The same, knowing what the status of others says of their models. Until a commit is known the same source is a good guess.
    pub fn among<'a>(mut self, others: impl IntoIterator<Item = &'a ModelStatus>) -> Self {
        let Some(source) = self.kept_by_nodes().map(|fetch| &fetch.source) else { return self };
        let same = |other: &&ModelStatus| {
            other.source == *source && self.commit.as_ref().is_none_or(|commit| *commit == other.commit)
        };
        self.nodes_of_others = others.into_iter().filter(same).flat_map(|other| &other.nodes).cloned().collect();
        self
    }

    /// The same, knowing which nodes have its model in memory.
    pub fn warm_on(mut self, standbys: &[StandbyPod]) -> Self {
        if standbys.is_empty() {
            return self;
        }
        let revision = revision(&self.replica);
        let is_warm = |pod: &&StandbyPod| pod.fetch.state == PrefetchState::Done && pod.fetch.revision == revision;
        self.warm_nodes = standbys.iter().filter(is_warm).map(|pod| pod.fetch.node.clone()).collect();
        self
    }

    /// Nodes that new replicas prefer: each once, at most sixteen, those of the deployment itself first.
    pub fn preferred_nodes(&self) -> Vec<&str> {
        let mut nodes: Vec<&str> = Vec::new();
        for node in self.nodes_with_model().iter().chain(&self.nodes_of_others).map(String::as_str) {
            if nodes.len() < NODES_WITH_MODEL_MAX && !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        nodes
    }

    /// Bytes of its files, once a replica said so of this very model.
    pub fn model_bytes(&self) -> Option<u64> {
        let fetched = self.fetched.as_ref()?;
        let fetch = self.replica.fetch.as_ref()?;
        let is_it = fetched.source == fetch.source && self.commit.as_ref() == Some(&fetched.commit);
        fetched.bytes.filter(|_| is_it).and_then(|bytes| u64::try_from(bytes).ok())
    }

    /// Nodes whose own cache had this very model when a replica served there.
    pub fn nodes_with_model(&self) -> &[String] {
        let same =
            |fetched: &&ModelStatus| self.kept_by_nodes().is_some() && self.commit.as_ref() == Some(&fetched.commit);
        self.fetched.as_ref().filter(same).map(|fetched| &*fetched.nodes).unwrap_or_default()
    }
}

/// What the deployment asks for, with nodes preferred that have its model.
pub(super) fn affinity(deployment: &ValidatedDeployment) -> Option<Affinity> {
    let (asked, nodes, warm) = (&deployment.replica.affinity, deployment.preferred_nodes(), &deployment.warm_nodes);
    if nodes.is_empty() && warm.is_empty() {
        return asked.clone();
    }
    let cold = nodes.into_iter().filter(|node| warm.iter().all(|warm| warm != node));
    let mut affinity = asked.clone().unwrap_or_default();
    let of_node = affinity.node_affinity.get_or_insert_default();
    let preferred = of_node.preferred_during_scheduling_ignored_during_execution.get_or_insert_default();
    preferred.extend(warm.iter().map(|node| prefer(node, WARM_WEIGHT)));
    preferred.extend(cold.map(|node| prefer(node, WEIGHT)));
    Some(affinity)
}

/// By its name, which a node's labels need not say; a term takes one.
fn prefer(node: &str, weight: i32) -> PreferredSchedulingTerm {
    PreferredSchedulingTerm { weight, preference: is_node(node) }
}

pub(super) fn is_node(node: &str) -> NodeSelectorTerm {
    let is_it = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    NodeSelectorTerm { match_fields: Some(vec![is_it]), match_expressions: None }
}
