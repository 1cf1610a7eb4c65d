//! etcd, API server, controller manager and scheduler with the flags that one real node needs.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    credentials::{API_PORT, kubeconfig, path},
    daemon::Daemon,
    kubectl::Kubectl,
    namespaces::{NODE_IP, STATE},
    wait::{Look, until},
};

/// Addresses of Services.
const SERVICE_RANGE: &str = "10.96.0.0/16";
/// Addresses of pods.
pub(crate) const POD_RANGE: &str = "10.244.0.0/16";
const API_LIMIT: Duration = Duration::from_secs(60);

/// Starts the four and returns when the API server is ready.
pub(crate) fn start(bin: &Path, kubectl: &Kubectl) -> Result<Vec<Daemon>> {
    let mut daemons =
        vec![Daemon::start("etcd", &mut etcd(bin))?, Daemon::start("kube-apiserver", &mut api_server(bin))?];
    until(API_LIMIT, "the API server", || {
        daemons.iter_mut().try_for_each(Daemon::check)?;
        Ok(match kubectl.run(&["get", "--raw", "/readyz"]) {
            Ok(_) => Look::Done(()),
            Err(error) => Look::NotYet(error.to_string()),
        })
    })
    .context("start control plane")?;
    daemons.push(Daemon::start("kube-controller-manager", &mut controller_manager(bin))?);
    daemons.push(Daemon::start("kube-scheduler", &mut scheduler(bin))?);
    Ok(daemons)
}

/// The data is in memory and dies with the run, so waiting for a disk would only cost time.
fn etcd(bin: &Path) -> Command {
    let (client, peer) = ("http://127.0.0.1:2379", "http://127.0.0.1:2380");
    let mut command = Command::new(bin.join("etcd"));
    command
        .arg("--unsafe-no-fsync")
        .args([flag("data-dir", Path::new(STATE).join("etcd"))])
        .args([format!("--listen-client-urls={client}"), format!("--advertise-client-urls={client}")])
        .args([format!("--listen-peer-urls={peer}"), format!("--initial-advertise-peer-urls={peer}")])
        .arg(format!("--initial-cluster=default={peer}"));
    command
}

fn api_server(bin: &Path) -> Command {
    let mut command = Command::new(bin.join("kube-apiserver"));
    command
        .args(["--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--allow-privileged=true"])
        .args(["--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"])
        // Otherwise `kubectl logs` and `exec` ask a name server for the node's name.
        .arg("--kubelet-preferred-address-types=InternalIP")
        .args([format!("--advertise-address={NODE_IP}"), format!("--secure-port={API_PORT}")])
        .args([flag("tls-cert-file", path("apiserver.crt")), flag("tls-private-key-file", path("apiserver.key"))])
        .arg(flag("token-auth-file", path("tokens.csv")))
        .arg("--service-account-issuer=https://kubernetes.default.svc")
        .arg(flag("service-account-key-file", path("service-account.pub")))
        .arg(flag("service-account-signing-key-file", path("service-account.key")))
        .arg(format!("--service-cluster-ip-range={SERVICE_RANGE}"));
    command
}

fn controller_manager(bin: &Path) -> Command {
    let mut command = Command::new(bin.join("kube-controller-manager"));
    command
        .args(["--use-service-account-credentials=true", "--leader-elect=false", "--allocate-node-cidrs=true"])
        .args(["--bind-address=127.0.0.1", "--secure-port=0"])
        // With its own limits, the first pod is bound 5.3 s after the start instead of 0.5 s.
        .args(["--kube-api-qps=500", "--kube-api-burst=1000"])
        .arg(flag("kubeconfig", kubeconfig("kube-controller-manager")))
        .arg(flag("service-account-private-key-file", path("service-account.key")))
        .args([flag("root-ca-file", path("ca.crt")), flag("cluster-signing-cert-file", path("ca.crt"))])
        .arg(flag("cluster-signing-key-file", path("ca.key")))
        .arg(flag("flex-volume-plugin-dir", Path::new(STATE).join("volume-plugins")))
        .args([format!("--cluster-cidr={POD_RANGE}"), format!("--service-cluster-ip-range={SERVICE_RANGE}")]);
    command
}

fn scheduler(bin: &Path) -> Command {
    let mut command = Command::new(bin.join("kube-scheduler"));
    command
        .args(["--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=0"])
        .arg(flag("kubeconfig", kubeconfig("kube-scheduler")));
    command
}

/// `--NAME=PATH`.
pub(crate) fn flag(name: &str, path: PathBuf) -> String {
    format!("--{name}={}", path.display())
}
