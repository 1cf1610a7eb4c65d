//! etcd, API server, controller manager and scheduler, as `stoker-cluster` describes them, with what a real node needs.

use std::{
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result};
use stoker_cluster::{Addresses, Credentials, Identity, Servers, flag};

use crate::{
    daemon::Daemon,
    kubectl::Kubectl,
    namespaces::{NODE_IP, STATE},
    wait::{Look, until},
};

/// Addresses of pods.
pub(crate) const POD_RANGE: &str = "10.244.0.0/16";
/// Addresses of Services.
pub(crate) const SERVICE_RANGE: &str = "10.96.0.0/16";
const API_LIMIT: Duration = Duration::from_secs(60);

/// Makes the credentials, starts the four and returns when the API server is ready.
pub(crate) fn start(bin: &Path, kubectl: &Kubectl) -> Result<Vec<Daemon>> {
    let addresses = addresses();
    let credentials = Credentials::create(&credentials_dir(), &addresses).context("write credentials")?;
    let servers = Servers { dir: Path::new(STATE), addresses: &addresses, credentials: &credentials };
    let start = |name, args| Daemon::start(name, Command::new(bin.join(name)).args(args));
    let mut daemons = vec![start("etcd", servers.etcd())?, start("kube-apiserver", api_server(servers))?];
    until(API_LIMIT, "the API server", || {
        daemons.iter_mut().try_for_each(Daemon::check)?;
        Ok(match kubectl.run(&["get", "--raw", "/readyz"]) {
            Ok(_) => Look::Done(()),
            Err(error) => Look::NotYet(error.to_string()),
        })
    })
    .context("start control plane")?;
    daemons.push(start("kube-controller-manager", controller_manager(servers))?);
    daemons.push(start("kube-scheduler", servers.scheduler())?);
    Ok(daemons)
}

fn api_server(servers: Servers<'_>) -> Vec<String> {
    let mut args = servers.api_server();
    args.extend([
        flag("allow-privileged", true),
        flag("authorization-mode", "Node,RBAC"),
        flag("enable-admission-plugins", "NodeRestriction"),
    ]);
    args
}

fn controller_manager(servers: Servers<'_>) -> Vec<String> {
    let mut args = servers.controller_manager();
    args.extend([
        flag("allocate-node-cidrs", true),
        flag("cluster-cidr", POD_RANGE),
        flag("service-cluster-ip-range", &servers.addresses.service_range),
    ]);
    args
}

/// The ports are the usual ones: the network is this run's own, so they are free.
fn addresses() -> Addresses {
    Addresses {
        api: (NODE_IP, 6443).into(),
        etcd_client: (Ipv4Addr::LOCALHOST, 2379).into(),
        etcd_peer: (Ipv4Addr::LOCALHOST, 2380).into(),
        service_range: SERVICE_RANGE.to_owned(),
        first_service: Ipv4Addr::new(10, 96, 0, 1),
    }
}

/// The kubeconfig of `who`.
pub(crate) fn kubeconfig(who: Identity) -> PathBuf {
    who.kubeconfig(&credentials_dir())
}

fn credentials_dir() -> PathBuf {
    Path::new(STATE).join("pki")
}
