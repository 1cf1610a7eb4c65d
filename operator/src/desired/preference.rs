//! Which nodes a replica would rather run on: those whose cache has its model. A wish beside what `spec.pod.affinity` says, which no
//! pod waits for. Pure.

use k8s_openapi::api::core::v1::{Affinity, NodeSelectorRequirement, NodeSelectorTerm, PreferredSchedulingTerm};

/// Of 1 to 100: what somebody wrote into `spec.pod.affinity` with more stands before it.
const WEIGHT: i32 = 50;

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
    let is_it = NodeSelectorRequirement {
        key: "metadata.name".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![node.to_owned()]),
    };
    let preference = NodeSelectorTerm { match_fields: Some(vec![is_it]), match_expressions: None };
    PreferredSchedulingTerm { weight: WEIGHT, preference }
}
