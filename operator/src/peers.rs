//! Who may reach replicas, as whoever runs the operator says it and as a NetworkPolicy takes it. Nothing here decides.

use k8s_openapi::api::networking::v1::NetworkPolicyPeer;
use serde::Deserialize;

/// Who may reach replicas.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Peers {
    /// The operator's pods: the admin port.
    pub operator: NetworkPolicyPeer,
    /// Gateways: the admin port, too, where replicas tell what their prefix caches hold.
    #[serde(default)]
    pub gateways: Option<NetworkPolicyPeer>,
    /// Clients: the inference port. Empty: everybody.
    #[serde(default)]
    pub inference: Vec<NetworkPolicyPeer>,
}
