//! A pod that brings a model into a node's cache while a replica of another model still serves there. Pure.
//!
//! It asks for nothing of the node, so that it runs where nothing is left: no GPU, no CPU, no memory by right. It carries none of the labels that
//! replicas have and none of the user's: no Service, budget, queue or count takes it for one.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Affinity, NodeAffinity, NodeSelector, Pod, PodSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use sha2::{Digest, Sha256};

use super::{fetch, labels, owner, pod, preference};
use crate::validate::ValidatedDeployment;

/// A fetch goes on while it comes further and gives up by itself; this is for one that does neither.
const SECONDS_MAX: i64 = 4 * 3600;
/// Between SIGTERM, which ends a fetch at once, and SIGKILL.
pub(super) const GRACE_SECONDS: i64 = 5;
/// Of the hash of a node's name, in that of its pod.
const NODE_BYTES: usize = 4;

/// The pod without a node; `None` where nodes do not keep the model.
pub(super) fn template(deployment: &ValidatedDeployment, revision: &str) -> Option<Pod> {
    let fetch = deployment.kept_by_nodes()?;
    let (identity, inputs) = (&deployment.identity, &deployment.replica);
    let spec = PodSpec {
        containers: vec![fetch::ahead(inputs, fetch, deployment.commit.as_deref())],
        volumes: Some(fetch::volumes_ahead(inputs, fetch)),
        // A source that does not answer now, or a Secret that is put right, may do later.
        restart_policy: Some("OnFailure".to_owned()),
        active_deadline_seconds: Some(SECONDS_MAX),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        tolerations: Some(pod::tolerations_beside_gpus(inputs)),
        ..pod::surroundings(inputs)
    };
    let metadata = ObjectMeta {
        namespace: Some(identity.namespace.clone()),
        labels: Some(labels::prefetch(&identity.name, revision)),
        annotations: Some(inputs.annotations.clone()),
        owner_references: Some(vec![owner(identity)]),
        ..ObjectMeta::default()
    };
    Some(Pod { metadata, spec: Some(spec), status: None })
}

/// The same, or one that stands by, for this node. Its name says which, so that it is not made twice.
pub(super) fn on(template: &Pod, prefix: &str, node: &str) -> Pod {
    let mut pod = template.clone();
    let digest: String = Sha256::digest(node).iter().take(NODE_BYTES).map(|byte| format!("{byte:02x}")).collect();
    pod.metadata.name = Some(format!("{prefix}-{digest}"));
    let annotations: &mut BTreeMap<String, String> = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(labels::PREFETCH_NODE.to_owned(), node.to_owned());
    let required = NodeSelector { node_selector_terms: vec![preference::is_node(node)] };
    let affinity =
        NodeAffinity { required_during_scheduling_ignored_during_execution: Some(required), ..NodeAffinity::default() };
    if let Some(spec) = &mut pod.spec {
        spec.affinity = Some(Affinity { node_affinity: Some(affinity), ..Affinity::default() });
    }
    pod
}
