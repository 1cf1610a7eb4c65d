//! The whole cluster, started step by step. Ends with the namespaces.

use std::{
    process::{ExitCode, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use stoker_cluster::Identity;

use crate::{Options, control_plane, daemon::Daemon, kubectl::Kubectl, network, node, stages::Stages};

/// A control plane and one node.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// The way to talk to it.
    pub(crate) kubectl: Kubectl,
    _daemons: Vec<Daemon>,
}

impl Cluster {
    /// Starts everything and returns when the node is ready.
    pub(crate) fn start(options: &Options, cgroup: &str, stages: &mut Stages) -> Result<Self> {
        let kubectl = Kubectl::new(options);
        let mut daemons = control_plane::start(&options.kube_bin, &kubectl)?;
        stages.done("control plane ready");
        daemons.push(node::start_containerd(&options.containerd_bin, &options.images).context("start containerd")?);
        stages.done(format_args!("containerd ready, {} images imported", options.images.len()));
        daemons.push(network::start_dns(&options.coredns)?);
        daemons.extend(node::start_kubelet(&options.kube_bin, cgroup, &kubectl).context("start node")?);
        daemons.push(network::start_firewall(&options.kube_router)?);
        stages.done("node ready");
        Ok(Self { kubectl, _daemons: daemons })
    }

    /// Keeps the cluster until the outer process goes away.
    pub(crate) fn keep(&self) -> Result<ExitCode> {
        let kubeconfig = control_plane::kubeconfig(Identity::Admin);
        println!("\nThe node runs until Ctrl-C. Enter it from another terminal, as root:");
        println!("  nsenter --target $(pgrep -nf '^[^ ]*stoker-e2e --stage inside') --mount --net --pid \\");
        println!("    env KUBECONFIG={} PATH=\"{}\" bash", kubeconfig.display(), self.kubectl.search_path().display());
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }

    /// Runs one command with the tools on its PATH.
    pub(crate) fn exec(&self, command: &[String]) -> Result<ExitCode> {
        let (program, args) = command.split_first().context("no command")?;
        let status = self.kubectl.shell(program).args(args).stdin(Stdio::null()).status();
        let code = status.with_context(|| format!("start {program}"))?.code().unwrap_or(1);
        Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
    }
}
