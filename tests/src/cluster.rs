//! A cluster for tests: control plane, Service proxy and one process node, with the few words a test needs to drive them.
//! Everything stops when the value is dropped, and also when the test process is killed.
//!
//! Starting a control plane takes as much of a core as half of the tests that use one. So the suite has some that go from test to test, each
//! as new (`lend-control-plane`), and a test that asks for such a one, and leaves its servers alone, may be given it.

use std::{
    env,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use stoker_cluster::{
    BackoffLimits, ClusterError, ControlPlane, ControlPlaneOptions, Controllers, NodeOptions, ProcessNode, ServiceProxy,
};

use crate::operator::kinds;

/// Generous for two busy cores; what is waited for usually takes a second.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What the suite gives to a test: words by which it [borrows](ControlPlane::borrow) a control plane.
const LEASE: &str = "STOKER_TEST_CONTROL_PLANE";

/// The one that the suite lends: all controllers, and our kinds.
pub fn lendable() -> ControlPlaneOptions {
    ControlPlaneOptions { controllers: Controllers::all(), kinds: kinds(), ..ControlPlaneOptions::default() }
}

/// One that is lent if it is as asked for, and nobody in this process had it yet; else one of its own.
fn lent_or_new(options: ControlPlaneOptions) -> Result<ControlPlane, ClusterError> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    match env::var(LEASE) {
        Ok(lease) if options == lendable() && !IS_TAKEN.swap(true, Ordering::Relaxed) => ControlPlane::borrow(&lease),
        _ => ControlPlane::start(options),
    }
}

/// A whole cluster. Fields drop in order: what uses the API server goes first.
pub struct TestCluster {
    /// Runs the pods.
    pub node: ProcessNode,
    /// Makes Services reachable.
    pub proxy: ServiceProxy,
    /// etcd, API server, controllers.
    pub control_plane: ControlPlane,
}

impl TestCluster {
    /// Starts everything, with back-offs short enough for a test.
    pub fn start(node: NodeOptions) -> Self {
        Self::start_with(ControlPlaneOptions { controllers: Controllers::all(), ..Default::default() }, node)
    }

    /// The same with other control plane options.
    pub fn start_with(options: ControlPlaneOptions, node: NodeOptions) -> Self {
        Self::try_start(options, node).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same with servers of its own, for who stops them or reads what they wrote.
    pub fn start_own(options: ControlPlaneOptions, node: NodeOptions) -> Result<Self, ClusterError> {
        Self::on(ControlPlane::start(options)?, node)
    }

    fn try_start(options: ControlPlaneOptions, node: NodeOptions) -> Result<Self, ClusterError> {
        Self::on(lent_or_new(options)?, node)
    }

    fn on(control_plane: ControlPlane, node: NodeOptions) -> Result<Self, ClusterError> {
        let proxy = ServiceProxy::start(&control_plane)?;
        let backoff = BackoffLimits { base: Duration::from_secs(2), longest: Duration::from_secs(5) };
        let node = ProcessNode::start(&control_plane, NodeOptions { backoff, ..node })?;
        Ok(Self { node, proxy, control_plane })
    }

    /// Output of `kubectl ARGS`; a panic with its complaint when it fails.
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.try_kubectl(args).unwrap_or_else(|complaint| panic!("kubectl {}: {complaint}", args.join(" ")))
    }

    /// Output of `kubectl ARGS`, or its complaint.
    pub fn try_kubectl(&self, args: &[&str]) -> Result<String, String> {
        let mut command = self.control_plane.kubectl().map_err(|error| error.to_string())?;
        command.args(args);
        run_with_input(command, "")
    }

    /// `kubectl apply` of a manifest, checked strictly.
    pub fn apply(&self, manifest: &str) -> Result<String, String> {
        let mut command = self.control_plane.kubectl().map_err(|error| error.to_string())?;
        command.args(["apply", "--validate=strict", "-f", "-"]);
        run_with_input(command, manifest)
    }

    /// One object as JSON; `None` when it does not exist or the API server is away.
    pub fn get(&self, kind: &str, name: &str) -> Option<Value> {
        let json = self.try_kubectl(&["get", kind, name, "-o", "json"]).ok()?;
        serde_json::from_str(&json).ok()
    }

    /// Whether the pod says that it is ready.
    pub fn is_ready(&self, pod: &str) -> bool {
        let pod = self.get("pod", pod).unwrap_or_default();
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
    }

    /// ClusterIP and port of a Service's first port.
    pub fn service_address(&self, name: &str) -> SocketAddr {
        let service = self.get("service", name).expect("the Service exists");
        let address = format!(
            "{}:{}",
            service["spec"]["clusterIP"].as_str().unwrap_or_default(),
            service["spec"]["ports"][0]["port"]
        );
        address.parse().expect("the Service has an address")
    }
}

/// Output of `command`, given `input`; its complaint when it fails.
pub fn run_with_input(mut command: Command, input: &str) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    // A program that fails early does not read its input: its complaint says more than our broken pipe.
    let _unread = child.stdin.take().expect("stdin is piped").write_all(input.as_bytes());
    let output = child.wait_with_output().map_err(failed)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Waits until `look` finds something; a panic that names `what` when patience ends.
pub fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_at_most(PATIENCE, what, look)
}

/// [`wait_for`] with another patience.
pub fn wait_at_most<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        let looked = Instant::now();
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < patience, "not seen within {} s: {what}", patience.as_secs());
        sleep(Waited { look: looked.elapsed(), in_all: begun.elapsed() }.pause(Duration::from_millis(100)));
    }
}

/// Of a wait that is not over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited {
    /// What the last look took.
    pub(crate) look: Duration,
    /// Since it began.
    pub(crate) in_all: Duration,
}

impl Waited {
    /// So long a wait may go on unseen after its end.
    const LATE_MAX: Duration = Duration::from_millis(300);

    /// How long to wait until the next look, `least` at least. Many tests wait at once, and a look may be a process: none of them takes more
    /// than a third of a core. What takes long is seen a tenth later than it could be: that takes a seventh off what tests of the operator
    /// cost.
    pub(crate) fn pause(self, least: Duration) -> Duration {
        least.max(self.look * 2).max((self.in_all / 10).min(Self::LATE_MAX))
    }
}

/// The body of `GET http://ADDRESS/PATH` with status 200; the status or the failure otherwise.
pub fn http_get(address: SocketAddr, path: &str) -> Result<String, String> {
    let failed = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5)).map_err(failed)?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    if head.starts_with("HTTP/1.1 200") {
        Ok(body.to_owned())
    } else {
        Err(head.lines().next().unwrap_or_default().to_owned())
    }
}

/// A program of this workspace, built beside the running test; a panic with the command that builds it.
pub fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("this program has a path");
    // A test lies in `target/PROFILE/deps`, a program in `target/PROFILE`.
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("no {name} near {}; build it with: cargo build --bin {name}", own.display()))
}

/// A program that `tools/kube/build.sh` built, or how to build it.
pub fn of_go(name: &str) -> Result<PathBuf> {
    let build = concat!(env!("CARGO_MANIFEST_DIR"), "/../tools/kube/build.sh");
    let output = Command::new(build).args(["--where", name]).output().context("tools/kube/build.sh")?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    ensure!(path.is_file(), "no {name}; build it with: tools/kube/build.sh {name}");
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_looked_at_less_often() {
        let pause = |look, in_all| {
            let waited = Waited { look: Duration::from_millis(look), in_all: Duration::from_millis(in_all) };
            waited.pause(Duration::from_millis(50)).as_millis()
        };
        assert_eq!(pause(5, 20), 50, "at first as often as may be");
        assert_eq!(pause(5, 2_000), 200, "a tenth of the wait");
        assert_eq!(pause(5, 60_000), 300, "never much later");
        assert_eq!(pause(400, 60_000), 800, "a third of a core");
    }
}
