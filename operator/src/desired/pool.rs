//! The InferencePool: the same replicas as the Service selects, and who picks one of them. A pool names a Service of its own namespace, and
//! that of the deployment leads to gateways there, at the port that is the deployment's alone. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use stoker_crds::contract::AGENT_PORT;

use super::{labels, owner};
use crate::{
    pools::{EndpointPickerRef, FailureMode, InferencePool, InferencePoolSpec, PoolPort, PoolSelector},
    validate::Identity,
};

pub(super) fn pool(identity: &Identity, failure_mode: FailureMode) -> InferencePool {
    let port = PoolPort { number: AGENT_PORT };
    let spec = InferencePoolSpec {
        selector: PoolSelector { match_labels: labels::selector(&identity.name) },
        target_ports: vec![port],
        endpoint_picker_ref: Some(EndpointPickerRef {
            name: identity.name.clone(),
            port: Some(port),
            failure_mode: Some(failure_mode),
        }),
    };
    let mut pool = InferencePool::new(&identity.name, spec);
    *pool.meta_mut() = ObjectMeta {
        name: Some(identity.name.clone()),
        namespace: Some(identity.namespace.clone()),
        labels: Some(labels::child(&identity.name)),
        owner_references: Some(vec![owner(identity)]),
        ..ObjectMeta::default()
    };
    pool
}
