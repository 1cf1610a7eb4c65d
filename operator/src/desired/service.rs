//! The Service: one address for all replicas of a deployment, of every revision. It selects them, and one of its own
//! [`slices`](super::slices) leads it elsewhere. Pure.

use k8s_openapi::{
    api::core::v1::{Service, ServicePort, ServiceSpec},
    apimachinery::pkg::{apis::meta::v1::ObjectMeta, util::intstr::IntOrString},
};
use stoker_crds::contract::{AGENT_PORT, AGENT_PORT_NAME};

use super::{labels, owner};
use crate::validate::Identity;

pub(super) fn service(identity: &Identity) -> Service {
    Service {
        metadata: ObjectMeta {
            name: Some(identity.name.clone()),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::child(&identity.name)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        spec: Some(ServiceSpec {
            selector: Some(labels::selector(&identity.name)),
            ports: Some(vec![port()]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn port() -> ServicePort {
    ServicePort {
        name: Some(AGENT_PORT_NAME.to_owned()),
        port: AGENT_PORT.into(),
        protocol: Some("TCP".to_owned()),
        target_port: Some(IntOrString::String(AGENT_PORT_NAME.to_owned())),
        ..ServicePort::default()
    }
}
