//! containerd, kubelet and kube-proxy: one real node.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use stoker_cluster::{Identity, KUBELET_NODE, flag};

use crate::{
    control_plane::{POD_RANGE, kubeconfig},
    daemon::Daemon,
    kubectl::Kubectl,
    namespaces::{NODE_IP, STATE},
    wait::{Look, until},
};

/// The image of a pod's sandbox: a process that sleeps. The recipe `e2e-tools` makes it.
const SANDBOX_IMAGE: &str = "localhost/stoker-e2e-tools:dev";
const CONTAINERD_LIMIT: Duration = Duration::from_secs(20);
const NODE_LIMIT: Duration = Duration::from_secs(60);

/// Starts containerd and gives it the images.
pub(crate) fn start_containerd(bin: &Path, images: &[PathBuf]) -> Result<Daemon> {
    save("cni/10-stoker.conflist", &cni_config())?;
    save("containerd.toml", &containerd_config())?;
    let mut command = Command::new(bin.join("containerd"));
    // It finds its shim there, and what a shim starts where all programs are.
    let path = env::split_paths(&env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    command.arg("--config").arg(state("containerd.toml"));
    command.env("PATH", env::join_paths([vec![bin.to_owned()], path].concat())?);
    let mut containerd = Daemon::start("containerd", &mut command)?;
    until(CONTAINERD_LIMIT, "containerd", || {
        containerd.check()?;
        Ok(ctr(bin, &["version"]).map_or_else(|error| Look::NotYet(error.to_string()), |_| Look::Done(())))
    })?;
    for image in images {
        let file = image.to_str().context("image path is not UTF-8")?;
        ctr(bin, &["images", "import", file]).with_context(|| format!("import {file}"))?;
    }
    Ok(containerd)
}

/// Starts kubelet and kube-proxy and returns when the node is ready.
pub(crate) fn start_kubelet(bin: &Path, cgroup: &str, kubectl: &Kubectl) -> Result<[Daemon; 2]> {
    save("kubelet.yaml", &kubelet_config(cgroup))?;
    let mut daemons =
        [Daemon::start("kubelet", &mut kubelet(bin))?, Daemon::start("kube-proxy", &mut kube_proxy(bin))?];
    until(NODE_LIMIT, "the node", || {
        daemons.iter_mut().try_for_each(Daemon::check)?;
        let conditions = ["get", "nodes", "-o", "jsonpath={.items[*].status.conditions[?(@.type=='Ready')]}"];
        let ready = kubectl.run(&conditions)?;
        Ok(if ready.contains("\"status\":\"True\"") { Look::Done(()) } else { Look::NotYet(ready) })
    })?;
    Ok(daemons)
}

fn kubelet(bin: &Path) -> Command {
    let mut command = Command::new(bin.join("kubelet"));
    command.args([
        flag("config", state("kubelet.yaml").display()),
        flag("kubeconfig", kubeconfig(Identity::Kubelet).display()),
        flag("root-dir", state("kubelet").display()),
        flag("cert-dir", state("kubelet/pki").display()),
        flag("hostname-override", KUBELET_NODE),
        flag("node-ip", NODE_IP),
    ]);
    command
}

/// The conntrack settings are the machine's, not the namespace's: zero leaves them alone.
fn kube_proxy(bin: &Path) -> Command {
    let mut command = Command::new(bin.join("kube-proxy"));
    command.args([
        flag("proxy-mode", "nftables"),
        flag("conntrack-max-per-core", 0),
        flag("conntrack-tcp-timeout-established", 0),
        flag("conntrack-tcp-timeout-close-wait", 0),
        flag("kubeconfig", kubeconfig(Identity::KubeProxy).display()),
        flag("hostname-override", KUBELET_NODE),
        flag("cluster-cidr", POD_RANGE),
    ]);
    command
}

/// Open to anyone who reaches the node: nobody outside these namespaces does. Disk pressure is judged by the memory
/// file system that all of this lives on, so the thresholds are low.
fn kubelet_config(cgroup: &str) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /{cgroup}
failSwapOn: false
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
clusterDNS: [{NODE_IP}]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://{STATE}/containerd.sock
podLogsDir: {STATE}/logs/pods
volumePluginDir: {STATE}/flex-volumes
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard: {{memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%, nodefs.inodesFree: 1%}}
"
    )
}

/// `restrict_oom_score_adj`: without CAP_SYS_RESOURCE, runc cannot give the sandbox the score that CRI asks for, and
/// dies with `can't get final child's PID from pipe`.
fn containerd_config() -> String {
    format!(
        "version = 2
root = '{STATE}/containerd'
state = '{STATE}/containerd-state'
[grpc]
  address = '{STATE}/containerd.sock'
[plugins.'io.containerd.internal.v1.opt']
  path = '{STATE}/containerd-opt'
[plugins.'io.containerd.grpc.v1.cri']
  sandbox_image = '{SANDBOX_IMAGE}'
  restrict_oom_score_adj = true
  [plugins.'io.containerd.grpc.v1.cri'.cni]
    bin_dir = '/usr/lib/cni'
    conf_dir = '{STATE}/cni'
  [plugins.'io.containerd.grpc.v1.cri'.containerd]
    snapshotter = 'overlayfs'
    default_runtime_name = 'runc'
    [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
        SystemdCgroup = false
"
    )
}

fn cni_config() -> String {
    format!(
        r#"{{"cniVersion": "1.0.0", "name": "stoker", "plugins": [
  {{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {{"type": "host-local", "dataDir": "{STATE}/ipam", "ranges": [[{{"subnet": "10.244.0.0/24"}}]],
            "routes": [{{"dst": "0.0.0.0/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}}}]}}
"#
    )
}

/// The digest of an imported image, under which it can be named from then on, as if it had been pulled so.
pub(crate) fn name_by_digest(bin: &Path, repository: &str, tag: &str) -> Result<String> {
    let name = format!("{repository}:{tag}");
    let listed = ctr(bin, &["images", "list", &format!("name=={name}")])?;
    let digest = listed.split_whitespace().find(|word| word.starts_with("sha256:"));
    let by_digest = format!("{repository}@{}", digest.with_context(|| format!("{name} is not imported: {listed}"))?);
    ctr(bin, &["images", "tag", &name, &by_digest])?;
    Ok(by_digest)
}

fn ctr(bin: &Path, args: &[&str]) -> Result<String> {
    let mut ctr = Command::new(bin.join("ctr"));
    let output =
        ctr.arg("--address").arg(state("containerd.sock")).args(["--namespace", "k8s.io"]).args(args).output()?;
    ensure!(output.status.success(), "ctr {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Writes a file of the node's; returns where it is.
pub(crate) fn save(name: &str, text: &str) -> Result<PathBuf> {
    let path = state(name);
    fs::create_dir_all(path.parent().expect("state files have a folder"))?;
    fs::write(&path, text).with_context(|| format!("write {name}"))?;
    Ok(path)
}

fn state(name: &str) -> PathBuf {
    Path::new(STATE).join(name)
}
