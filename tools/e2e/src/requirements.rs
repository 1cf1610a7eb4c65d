//! What the machine must offer. Decides only whether a run makes sense here; installs nothing.

use std::{env, path::Path, process::Command};

/// Programs of the system that a run starts, and the Debian packages that hold them.
const PROGRAMS: [(&str, &str); 7] = [
    ("runc", "runc"),
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("ipset", "ipset"),
    ("ip", "iproute2"),
    ("unshare", "util-linux"),
    ("sysctl", "procps"),
];
const CNI_PLUGINS: &str = "/usr/lib/cni/bridge";
/// What a node does to its network: pods on a bridge, kube-proxy's tables, and kube-router's rules, which must see what goes
/// over the bridge from pod to pod.
const NETWORK: &str = "ip link add a0 type veth peer name a1 && ip link add b0 type bridge && nft list tables \
    && ipset create s hash:ip && iptables -A FORWARD -m set --match-set s src -m physdev --physdev-is-bridged -j REJECT \
    && test \"$(cat /proc/sys/net/bridge/bridge-nf-call-iptables)\" = 1";

/// The reason why a run cannot work on this machine, if there is one.
pub(crate) fn why_not_here() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("a node of its own needs root (namespaces, cgroups, overlay mounts)".to_owned());
    }
    missing_programs().or_else(missing_kernel_features)
}

fn missing_programs() -> Option<String> {
    let absent = PROGRAMS.iter().filter(|(program, _)| !on_path(program)).map(|&(_, package)| package);
    let plugins = (!Path::new(CNI_PLUGINS).exists()).then_some("containernetworking-plugins");
    let mut packages: Vec<&str> = absent.chain(plugins).collect();
    packages.dedup();
    (!packages.is_empty()).then(|| format!("missing packages: apt-get install {}", packages.join(" ")))
}

fn missing_kernel_features() -> Option<String> {
    let made = Command::new("unshare")
        .args(["--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--mount-proc"])
        .args(["--", "sh", "-c", NETWORK])
        .output();
    match made {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!("the kernel lacks something: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

fn on_path(program: &str) -> bool {
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}
