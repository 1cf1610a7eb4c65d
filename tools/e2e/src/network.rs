//! The node's network beside kube-proxy: CoreDNS, by which pods find Services by name, and kube-router, which enforces
//! NetworkPolicies and does nothing else. Both are the node's own processes and no pods, as the control plane is.

use std::{path::Path, process::Command};

use anyhow::Result;
use stoker_cluster::{Identity, KUBELET_NODE, flag};

use crate::{
    control_plane::{SERVICE_RANGE, kubeconfig},
    daemon::Daemon,
    namespaces::NODE_IP,
    node::save,
};

/// Starts CoreDNS, which the kubelet names to pods.
pub(crate) fn start_dns(coredns: &Path) -> Result<Daemon> {
    let corefile = save("Corefile", &corefile(&kubeconfig(Identity::Admin)))?;
    Daemon::start("coredns", Command::new(coredns).arg("-conf").arg(corefile))
}

/// Starts kube-router on a node that the API server knows.
pub(crate) fn start_firewall(kube_router: &Path) -> Result<Daemon> {
    Daemon::start("kube-router", Command::new(kube_router).args(firewall()))
}

/// Names of the cluster and no others: there is no way out to ask for them.
fn corefile(kubeconfig: &Path) -> String {
    format!(
        ".:53 {{
  bind {NODE_IP}
  errors
  kubernetes cluster.local {{
    kubeconfig {}
  }}
}}
",
        kubeconfig.display()
    )
}

/// Its firewall alone: the bridge is the network, and kube-proxy brings Services.
fn firewall() -> Vec<String> {
    vec![
        flag("run-firewall", true),
        flag("run-router", false),
        flag("run-service-proxy", false),
        flag("service-cluster-ip-range", SERVICE_RANGE),
        flag("kubeconfig", kubeconfig(Identity::Admin).display()),
        flag("hostname-override", KUBELET_NODE),
        flag("health-port", 0),
    ]
}
