//! Addresses and command lines of a control plane: what etcd, kube-apiserver, kube-controller-manager and kube-scheduler need
//! for any kind of node. Starts nothing; who starts them adds what its own kind of node needs.

use std::{
    fmt::Display,
    net::{Ipv4Addr, SocketAddr},
    path::Path,
};

use crate::credentials::{Credentials, Identity};

/// Where the servers listen and which addresses Services get.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Addresses {
    /// The API server.
    pub api: SocketAddr,
    /// etcd, for the API server.
    pub etcd_client: SocketAddr,
    /// etcd, for other members. There are none, but it insists.
    pub etcd_peer: SocketAddr,
    /// Of Services, such as `10.96.0.0/16`.
    pub service_range: String,
    /// The ClusterIP of the `kubernetes` Service: the first of that range, which the API server's certificate names.
    pub first_service: Ipv4Addr,
}

/// The servers of one control plane, as arguments.
#[derive(Clone, Copy, Debug)]
pub struct Servers<'a> {
    /// Where etcd keeps its data.
    pub dir: &'a Path,
    /// Where they listen.
    pub addresses: &'a Addresses,
    /// Who they are and whom they trust.
    pub credentials: &'a Credentials,
}

impl Servers<'_> {
    /// Arguments of `etcd`.
    pub fn etcd(&self) -> Vec<String> {
        let client = format!("http://{}", self.addresses.etcd_client);
        let peer = format!("http://{}", self.addresses.etcd_peer);
        vec![
            flag("data-dir", self.dir.join("etcd").display()),
            // The data dies with the cluster: what a power cut would lose is of no interest.
            flag("unsafe-no-fsync", true),
            flag("listen-client-urls", &client),
            flag("advertise-client-urls", &client),
            flag("listen-peer-urls", &peer),
            flag("initial-advertise-peer-urls", &peer),
            flag("initial-cluster", format!("default={peer}")),
        ]
    }

    /// Arguments of `kube-apiserver`; the way to authorize is the caller's.
    pub fn api_server(&self) -> Vec<String> {
        let Self { addresses, credentials, .. } = self;
        vec![
            flag("etcd-servers", format!("http://{}", addresses.etcd_client)),
            flag("bind-address", addresses.api.ip()),
            flag("advertise-address", addresses.api.ip()),
            flag("secure-port", addresses.api.port()),
            flag("tls-cert-file", credentials.server_certificate().display()),
            flag("tls-private-key-file", credentials.server_key().display()),
            flag("token-auth-file", credentials.token_file().display()),
            flag("service-account-issuer", "https://kubernetes.default.svc"),
            flag("service-account-key-file", credentials.service_account_public_key().display()),
            flag("service-account-signing-key-file", credentials.service_account_key().display()),
            flag("service-cluster-ip-range", &addresses.service_range),
            // Otherwise `kubectl logs` and `exec` ask a name server for the node's name.
            flag("kubelet-preferred-address-types", "InternalIP"),
        ]
    }

    /// Arguments of `kube-controller-manager`; what it does for nodes is the caller's.
    pub fn controller_manager(&self) -> Vec<String> {
        let credentials = self.credentials;
        vec![
            flag("kubeconfig", credentials.kubeconfig(Identity::ControllerManager).display()),
            flag("use-service-account-credentials", true),
            flag("service-account-private-key-file", credentials.service_account_key().display()),
            flag("root-ca-file", credentials.ca_certificate().display()),
            flag("leader-elect", false),
            flag("secure-port", 0),
            // With the default limits the first pod is bound 5 s after the start, with these 0.5 s.
            flag("kube-api-qps", 500),
            flag("kube-api-burst", 1000),
            flag("flex-volume-plugin-dir", self.dir.join("flex-volumes").display()),
        ]
    }

    /// Arguments of `kube-scheduler`.
    pub fn scheduler(&self) -> Vec<String> {
        let kubeconfig = self.credentials.kubeconfig(Identity::Scheduler);
        vec![flag("kubeconfig", kubeconfig.display()), flag("leader-elect", false), flag("secure-port", 0)]
    }
}

/// `--NAME=VALUE`.
pub fn flag(name: &str, value: impl Display) -> String {
    format!("--{name}={value}")
}
