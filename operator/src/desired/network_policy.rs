//! The NetworkPolicy of replicas, where whoever runs the operator asks for it: its admin port for the operator and
//! gateways alone, files of the model for replicas of the namespace, inference for everybody or for those it names, and for the operator, which
//! compares answers of a canary. Pure.

use k8s_openapi::{
    api::networking::v1::{
        NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
    },
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};
use stoker_crds::{
    contract::{ADMIN_PORT, AGENT_PORT},
    holders::WEIGHTS_PORT,
};

use super::{labels, owner};
use crate::{peers::Peers, validate::Identity};

pub(super) fn network_policy(identity: &Identity, peers: &Peers) -> NetworkPolicy {
    let name = &identity.name;
    let of_admin = std::iter::once(&peers.operator).chain(&peers.gateways);
    let clients = peers.inference.iter().chain([&peers.operator]);
    let everybody_if_empty = (!peers.inference.is_empty()).then(|| clients.cloned().collect());
    NetworkPolicy {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::child(name)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector {
                match_labels: Some(labels::selector(name)),
                ..LabelSelector::default()
            }),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![
                NetworkPolicyIngressRule { from: everybody_if_empty, ports: Some(vec![port(AGENT_PORT)]) },
                NetworkPolicyIngressRule {
                    from: Some(of_admin.cloned().collect()),
                    ports: Some(vec![port(ADMIN_PORT)]),
                },
                NetworkPolicyIngressRule {
                    from: Some(vec![replicas_of_the_namespace()]),
                    ports: Some(vec![port(WEIGHTS_PORT)]),
                },
            ]),
            egress: None,
        }),
    }
}

/// Whoever they serve: several deployments may have one model.
fn replicas_of_the_namespace() -> NetworkPolicyPeer {
    let selector = LabelSelector { match_labels: Some(labels::any_replica()), ..LabelSelector::default() };
    NetworkPolicyPeer { pod_selector: Some(selector), ..NetworkPolicyPeer::default() }
}

fn port(number: u16) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::Int(number.into())),
        protocol: Some("TCP".to_owned()),
        ..NetworkPolicyPort::default()
    }
}
