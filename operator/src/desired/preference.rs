//! Which nodes a replica would rather run on: those whose own cache had its model, by what statuses say. A wish beside what
//! `spec.pod.affinity` says, which no pod waits for. Pure.

use k8s_openapi::api::core::v1::{Affinity, NodeSelectorRequirement, NodeSelectorTerm, PreferredSchedulingTerm};
use stoker_crds::status::ModelStatus;

use crate::validate::{CacheVolume, ModelFetch, ValidatedDeployment};

/// More nodes with a model than this are not written down, nor preferred: each is a line of every pod.
pub(crate) const NODES_WITH_MODEL_MAX: usize = 16;

/// Of 1 to 100: what somebody wrote into `spec.pod.affinity` with more stands before it.
const WEIGHT: i32 = 50;

impl ValidatedDeployment {
    /// The model, if it is kept by nodes, which share it among deployments.
    pub fn kept_by_nodes(&self) -> Option<&ModelFetch> {
        self.replica.fetch.as_ref().filter(|fetch| matches!(fetch.cache, CacheVolume::Node(_)))
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

    /// Nodes whose own cache had this very model when a replica served there.
    pub fn nodes_with_model(&self) -> &[String] {
        let same =
            |fetched: &&ModelStatus| self.kept_by_nodes().is_some() && self.commit.as_ref() == Some(&fetched.commit);
        self.fetched.as_ref().filter(same).map(|fetched| &*fetched.nodes).unwrap_or_default()
    }
}

/// What was asked for, with `nodes` preferred.
pub(super) fn affinity(asked: Option<&Affinity>, nodes: &[&str]) -> Option<Affinity> {
    if nodes.is_empty() {
        return asked.cloned();
    }
    let mut affinity = asked.cloned().unwrap_or_default();
    let of_node = affinity.node_affinity.get_or_insert_default();
    let preferred = of_node.preferred_during_scheduling_ignored_during_execution.get_or_insert_default();
    preferred.extend(nodes.iter().map(|node| prefer(node)));
    Some(affinity)
}

/// By its name, which a node's labels need not say; a term takes one.
fn prefer(node: &str) -> PreferredSchedulingTerm {
    PreferredSchedulingTerm { weight: WEIGHT, preference: is_node(node) }
}

pub(super) fn is_node(node: &str) -> NodeSelectorTerm {
    let is_it = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    NodeSelectorTerm { match_fields: Some(vec![is_it]), match_expressions: None }
}
