//! The inside of the namespaces: mounts and network, so that the fixed paths and names that kubelet, containerd and
//! CNI use are this run's own. Nothing here is visible outside.

use std::{ffi::CStr, fs, net::Ipv4Addr, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};

/// Everything a run writes is below this folder, in memory: `/run` is a file system of the namespaces.
pub(crate) const STATE: &str = "/run/stoker";
/// The node's address. The network has no way out, so every run can use the same.
pub(crate) const NODE_IP: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);

/// Settings that the kubelet writes and that no namespace separates: it gets files of its own instead.
const GLOBAL_SYSCTLS: [&str; 3] = ["vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops"];

/// Makes the mounts and the network.
pub(crate) fn prepare() -> Result<()> {
    prepare_mounts().context("prepare mounts")?;
    prepare_network().context("prepare network")
}

fn prepare_mounts() -> Result<()> {
    mount("tmpfs", "/run", "tmpfs", MountFlags::empty(), c"mode=0755").context("mount /run")?;
    for directory in ["var-upper", "var-work", "sysctl", "logs"] {
        fs::create_dir_all(Path::new(STATE).join(directory))?;
    }
    // /var stays readable and its fixed paths (kubelet, cni, log) become writable, without a trace outside.
    let overlay: &CStr = c"lowerdir=/var,upperdir=/run/stoker/var-upper,workdir=/run/stoker/var-work";
    mount("overlay", "/var", "overlay", MountFlags::empty(), overlay).context("mount /var")?;
    for sysctl in GLOBAL_SYSCTLS {
        shadow_sysctl(sysctl).with_context(|| format!("shadow {sysctl}"))?;
    }
    // The kubelet hands mounts of its own on to containers, so they must propagate inside; unshare made all private.
    mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC).context("share mounts")
}

fn shadow_sysctl(name: &str) -> Result<()> {
    let (real, shadow) =
        (Path::new("/proc/sys").join(name), Path::new(STATE).join("sysctl").join(name.replace('/', ".")));
    fs::write(&shadow, fs::read(&real)?)?;
    Ok(mount_bind(&shadow, &real)?)
}

/// A veth pair with both ends here: an address of the node that is not loopback, which the API server's endpoint and
/// the kubelet insist on, and a default route, which kube-proxy's rules need to be asked at all.
fn prepare_network() -> Result<()> {
    run("sysctl", &["-qw", "net.ipv4.ip_forward=1"])?;
    run("ip", &["link", "set", "lo", "up"])?;
    run("ip", &["link", "add", "node0", "type", "veth", "peer", "name", "node1"])?;
    run("ip", &["addr", "add", &format!("{NODE_IP}/24"), "dev", "node0"])?;
    run("ip", &["link", "set", "node1", "up"])?;
    run("ip", &["link", "set", "node0", "up"])?;
    run("ip", &["route", "add", "default", "dev", "node0"])
}

fn run(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(program).args(args).output().with_context(|| format!("start {program}"))?;
    let words = args.join(" ");
    ensure!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
