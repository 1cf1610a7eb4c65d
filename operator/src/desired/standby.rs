//! A pod that keeps a model in a node's memory for replicas to come. Pure.
//!
//! It fetches the model as one does that fetches ahead of a roll, and stays. It asks for as much memory as the model has bytes, so that they are
//! accounted for, and for nothing else; it carries none of the labels that replicas have and none of the user's.

use k8s_openapi::{
    api::core::v1::{Container, HTTPGetAction, Pod, PodSpec, Probe, ResourceRequirements},
    apimachinery::pkg::{api::resource::Quantity, apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use stoker_crds::contract::{ADMIN_PORT, ADMIN_PORT_NAME};

use super::{fetch, labels, owner, pod, prefetch::GRACE_SECONDS};
use crate::validate::ValidatedDeployment;

/// Of the process beside the model.
const PROCESS_BYTES: u64 = 64 << 20;
/// Seconds between two questions whether the model is in memory, and to answer: a busy node is no cold one.
const PROBE_SECONDS: i32 = 2;
const ANSWER_SECONDS: i32 = 5;

/// The pod without a node; `None` where nodes do not keep the model, and while nobody knows how large it is.
pub(super) fn template(deployment: &ValidatedDeployment, revision: &str) -> Option<Pod> {
    let (fetch, bytes) = (deployment.kept_by_nodes()?, deployment.model_bytes()?);
    let (identity, inputs) = (&deployment.identity, &deployment.replica);
    let ahead = fetch::ahead(inputs, fetch, deployment.commit.as_deref());
    let container = Container {
        args: Some(ahead.args.into_iter().flatten().chain(["--keep-resident".to_owned()]).collect()),
        ports: Some(vec![pod::port(ADMIN_PORT_NAME, ADMIN_PORT)]),
        resources: Some(ResourceRequirements {
            requests: Some([("memory".to_owned(), Quantity((bytes + PROCESS_BYTES).to_string()))].into()),
            ..ResourceRequirements::default()
        }),
        readiness_probe: Some(is_in_memory()),
        ..ahead
    };
    let spec = PodSpec {
        containers: vec![container],
        volumes: Some(fetch::volumes_ahead(inputs, fetch)),
        termination_grace_period_seconds: Some(GRACE_SECONDS),
        tolerations: Some(pod::tolerations_beside_gpus(inputs)),
        ..pod::surroundings(inputs)
    };
    let metadata = ObjectMeta {
        namespace: Some(identity.namespace.clone()),
        labels: Some(labels::standby(&identity.name, revision)),
        annotations: Some(inputs.annotations.clone()),
        owner_references: Some(vec![owner(identity)]),
        ..ObjectMeta::default()
    };
    Some(Pod { metadata, spec: Some(spec), status: None })
}

fn is_in_memory() -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some("/readyz".to_owned()),
            port: IntOrString::String(ADMIN_PORT_NAME.to_owned()),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(PROBE_SECONDS),
        timeout_seconds: Some(ANSWER_SECONDS),
        ..Probe::default()
    }
}
