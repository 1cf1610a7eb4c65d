//! EndpointSlices that lead a deployment's Service to gateways, which are in another namespace: no selector reaches them there. Pure.

use k8s_openapi::{
    api::discovery::v1::{EndpointPort, EndpointSlice},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use stoker_crds::contract::AGENT_PORT_NAME;

use super::{labels, owner};
use crate::{gateways::Front, validate::Identity};

/// One for each kind of address that gateways have.
pub(super) fn slices(identity: &Identity, front: &Front) -> Vec<EndpointSlice> {
    let port = EndpointPort {
        // The Service's port of this name leads there.
        name: Some(AGENT_PORT_NAME.to_owned()),
        port: Some(front.port.into()),
        protocol: Some("TCP".to_owned()),
        ..EndpointPort::default()
    };
    let slice = |(kind, endpoints): &(String, _)| EndpointSlice {
        metadata: ObjectMeta {
            name: Some(format!("{}-gateway-{}", identity.name, kind.to_lowercase())),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::slice(&identity.name)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        address_type: kind.clone(),
        endpoints: Some(Clone::clone(endpoints)),
        ports: Some(vec![port.clone()]),
    };
    front.places.iter().map(slice).collect()
}
