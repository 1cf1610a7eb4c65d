//! kubectl, its plugin and helm with this cluster's credentials, and with their caches inside the namespaces. Returns text or
//! JSON; never judges it.

use std::{
    ffi::OsString,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stoker_cluster::Identity;

use crate::{Options, control_plane::kubeconfig, namespaces::STATE};

/// The command line tools.
#[derive(Clone, Debug)]
pub(crate) struct Kubectl {
    kubectl: PathBuf,
    helm: PathBuf,
    plugin: PathBuf,
}

impl Kubectl {
    /// The tools that the options name.
    pub(crate) fn new(options: &Options) -> Self {
        Self { kubectl: options.kube_bin.join("kubectl"), helm: options.helm.clone(), plugin: options.plugin.clone() }
    }

    /// Runs kubectl and returns what it printed.
    pub(crate) fn run(&self, args: &[&str]) -> Result<String> {
        read(self.command(args).stdin(Stdio::null()).output().context("start kubectl")?, "kubectl", args)
    }

    /// Runs kubectl and reads its answer as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Result<Value> {
        let text = self.run(&[args, &["-o", "json"]].concat())?;
        serde_json::from_str(&text).with_context(|| format!("kubectl {}: not JSON", args.join(" ")))
    }

    /// Applies a manifest, checked as strictly as the API server can.
    pub(crate) fn apply(&self, manifest: &str) -> Result<()> {
        let args = ["apply", "--server-side", "--validate=strict", "-f", "-"];
        let mut child = self
            .command(&args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("start kubectl")?;
        child.stdin.take().expect("stdin is piped").write_all(manifest.as_bytes()).context("write manifest")?;
        read(child.wait_with_output().context("wait for kubectl")?, "kubectl", &args).map(drop)
    }

    /// Runs `kubectl stoker` as a user does, found on the PATH, and returns what it printed.
    pub(crate) fn stoker(&self, args: &[&str]) -> Result<String> {
        let mut command = self.shell("kubectl");
        command.arg("stoker").args(args).stdin(Stdio::null());
        read(command.output().context("start kubectl")?, "kubectl stoker", args)
    }

    /// Runs helm and returns what it printed.
    pub(crate) fn helm(&self, args: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.helm);
        command.args(args).stdin(Stdio::null()).envs(environment());
        read(command.output().context("start helm")?, "helm", args)
    }

    /// kubectl with its credentials, for callers that stream its output.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.kubectl);
        command.args(args).envs(environment());
        command
    }

    /// A command of the user's choice that finds the tools on its PATH.
    pub(crate) fn shell(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.envs(environment()).env("PATH", self.search_path());
        command
    }

    /// `PATH` with the folders of the tools in front.
    pub(crate) fn search_path(&self) -> OsString {
        let inherited = std::env::var_os("PATH").unwrap_or_default();
        let own =
            [&self.kubectl, &self.helm, &self.plugin].map(|tool| tool.parent().unwrap_or(Path::new("/")).to_owned());
        let folders = own.into_iter().chain(std::env::split_paths(&inherited));
        std::env::join_paths(folders).unwrap_or(inherited)
    }
}

/// The environment that leads both tools to this cluster and keeps their caches off the user's home.
fn environment() -> Vec<(&'static str, OsString)> {
    let home = Path::new(STATE).join("home");
    let below = |name: &str| home.join(name).into_os_string();
    vec![
        ("KUBECONFIG", kubeconfig(Identity::Admin).into_os_string()),
        ("KUBECACHEDIR", below("kube")),
        // `ctr` looks there, so commands in the docs need no address.
        ("CONTAINERD_ADDRESS", Path::new(STATE).join("containerd.sock").into_os_string()),
        ("HELM_CACHE_HOME", below("helm/cache")),
        ("HELM_CONFIG_HOME", below("helm/config")),
        ("HELM_DATA_HOME", below("helm/data")),
    ]
}

fn read(output: Output, tool: &str, args: &[&str]) -> Result<String> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{tool} {}: {}", args.join(" "), stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
