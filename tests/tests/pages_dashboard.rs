//! `kubectl stoker dashboard` on a real API server, to an operator in a pod: with the caller's own rights, or with words that say what
//! is missing.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use stoker_cluster::{Audit, Identity};
use stoker_tests::{
    cluster::{built, run_with_input},
    operator::{Rig, get},
};

const SOON: Duration = Duration::from_secs(60);
/// Namespace of operators.
const HOME: &str = "stoker-system";
const OPERATOR: &str = "operator-0";
/// What docs/pages.md says that a caller needs. API servers of before 1.35 ask for `get` where younger ones ask for `create`.
const RIGHTS: [(&str, &str, &str); 4] = [
    ("coordination.k8s.io", "leases", "get"),
    ("", "pods", "get"),
    ("", "pods/portforward", "get"),
    ("", "pods/portforward", "create"),
];

/// A dashboard that is open; it ends when this is dropped.
struct Dashboard {
    process: Child,
    url: String,
}

impl Dashboard {
    fn open(mut command: Command) -> Result<Self> {
        let mut process = command.stdout(Stdio::piped()).spawn()?;
        let mut url = String::new();
        BufReader::new(process.stdout.take().context("stdout is a pipe")?).read_line(&mut url)?;
        Ok(Self { process, url: url.trim().to_owned() })
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn kubectl(rig: &Rig, args: &[&str], input: &str) -> String {
    let mut command = rig.cluster.control_plane.kubectl().unwrap();
    command.args(args);
    run_with_input(command, input).unwrap()
}

fn dashboard(rig: &Rig, args: &[&str]) -> Command {
    let mut command = Command::new(built("kubectl-stoker"));
    command.args(["dashboard", "--no-open"]).args(args).env_remove("STOKER_PAGES_URL");
    command.env("KUBECONFIG", rig.cluster.control_plane.kubeconfig_path());
    command
}

/// What it says when it cannot be opened.
fn refused(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(!status.success(), "{}", String::from_utf8_lossy(&stdout));
    assert!(stdout.is_empty(), "no address is printed that leads nowhere: {}", String::from_utf8_lossy(&stdout));
    String::from_utf8_lossy(&stderr).into_owned()
}

/// A kubeconfig of somebody who has these rights where operators are.
fn somebody(rig: &Rig, name: &str, rights: &[(&str, &str, &str)]) -> Result<PathBuf> {
    let rules: Vec<Value> = rights
        .iter()
        .map(|(group, resource, verb)| json!({"apiGroups": [group], "resources": [resource], "verbs": [verb]}))
        .collect();
    let rbac =
        |kind: &str| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": name}});
    let (mut role, mut binding) = (rbac("Role"), rbac("RoleBinding"));
    role["rules"] = json!(rules);
    binding["roleRef"] = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
    binding["subjects"] = json!([{"kind": "ServiceAccount", "name": name, "namespace": HOME}]);
    kubectl(rig, &["create", "serviceaccount", name, "-n", HOME], "");
    for object in [role, binding] {
        kubectl(rig, &["apply", "-n", HOME, "-f", "-"], &object.to_string());
    }
    let token = kubectl(rig, &["create", "token", name, "-n", HOME], "");
    let admin = fs::read_to_string(rig.cluster.control_plane.kubeconfig_path())?;
    let path = rig.cluster.control_plane.dir().join(format!("{name}.kubeconfig"));
    fs::write(&path, admin.replace(rig.cluster.control_plane.token(), token.trim()))?;
    Ok(path)
}

/// A pod of this name and image, with these arguments and ports.
fn pod(name: &str, image: &str, args: &[&str], ports: Value) -> String {
    let container = json!({
        "name": "operator", "image": image, "args": args, "ports": ports,
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    });
    let spec = json!({"containers": [container], "automountServiceAccountToken": false});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": HOME}, "spec": spec}).to_string()
}

/// An operator in a pod that leads, in the place of the rig's own.
fn operator_in_a_pod(rig: &mut Rig) -> Result<()> {
    rig.operator.kill()?;
    kubectl(rig, &["delete", "lease", "stoker-operator", "-n", HOME], "");
    rig.cluster.node.add_image("operator", built("stoker-operator"));
    let kubeconfig = rig.cluster.control_plane.kubeconfig_of(Identity::Operator);
    let kubeconfig = kubeconfig.to_str().context("a path")?;
    let more = ["--listen=$(POD_IP):8080", "--pages-address=$(POD_IP):8081"];
    let args = [
        &["--kubeconfig", kubeconfig, "--agent-image=a", "--lease-namespace", HOME, "--identity", OPERATOR],
        &more[..],
    ];
    kubectl(
        rig,
        &["apply", "-f", "-"],
        &pod(OPERATOR, "operator", &args.concat(), json!([{"name": "pages", "containerPort": 8081}])),
    );
    rig.wait("the operator in the pod leads", SOON, |rig| Ok(holder(rig) == OPERATOR))?;
    Ok(())
}

fn holder(rig: &Rig) -> String {
    kubectl(rig, &["get", "lease", "-n", HOME, "-o", "jsonpath={.items[*].spec.holderIdentity}"], "")
}

#[test]
fn the_dashboard_is_opened_with_the_callers_own_rights_or_what_is_missing_is_said() -> Result<()> {
    let mut rig = Rig::start(Audit::Off)?;
    rig.wait("the operator leads", SOON, |rig| Ok(holder(rig) == rig.operator.identity()))?;
    let says = refused(dashboard(&rig, &[]));
    assert!(says.contains("is no pod of stoker-system: it runs elsewhere, so give its URL with --pages"), "{says}");
    let says = refused(dashboard(&rig, &["--operator-lease", "other"]));
    assert!(says.contains("no Lease other in stoker-system"), "{says}");
    let says = refused(dashboard(&rig, &["--pages", "file:///etc/passwd"]));
    assert!(says.contains("is no URL such as http://localhost:8081"), "{says}");

    operator_in_a_pod(&mut rig)?;
    let viewer = somebody(&rig, "viewer", &RIGHTS)?;
    let by = |kubeconfig: &Path, args: &[&str]| {
        let mut command = dashboard(&rig, args);
        command.env("KUBECONFIG", kubeconfig);
        command
    };
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port().to_string();
    let says = refused(by(&viewer, &["--port", &port]));
    assert!(
        says.contains(&format!("listen on port {port} of this machine")) && says.contains("Address already in use"),
        "{says}"
    );
    drop(taken);

    let open = Dashboard::open(by(&viewer, &["--port", &port]))?;
    assert_eq!(open.url, format!("http://127.0.0.1:{port}/"));
    assert!(get(&open.url)?.contains("No InferenceDeployment yet"));
    let events = Command::new("curl").args(["-sN", "--max-time", "5", &format!("{}events", open.url)]).output()?;
    assert!(String::from_utf8_lossy(&events.stdout).contains("event: build"), "changes come through it, too");
    // The operator restarts: the address stays.
    rig.cluster.node.kill_pod(HOME, OPERATOR)?;
    rig.wait("its successor is shown", SOON, |_| Ok(get(&open.url).is_ok_and(|page| page.contains("Deployments"))))?;

    let nobody = somebody(&rig, "nobody", &[])?;
    let says = refused(by(&nobody, &[]));
    assert!(says.contains("read Lease stoker-operator in stoker-system") && says.contains("forbidden"), "{says}");
    let reader = somebody(&rig, "reader", &RIGHTS[..2])?;
    let says = refused(by(&reader, &[]));
    assert!(says.contains("forward port 8081 of operator-0"), "{says}");

    kubectl(&rig, &["apply", "-f", "-"], &pod("bare", "operator", &["--version"], json!([])));
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "bare", "namespace": HOME},
        "spec": {"holderIdentity": "bare"}});
    kubectl(&rig, &["apply", "-f", "-"], &lease.to_string());
    let says = refused(by(&viewer, &["--operator-lease", "bare"]));
    assert!(says.contains("serves no pages: set the chart's pages.enabled"), "{says}");
    kubectl(
        &rig,
        &["patch", "lease", "bare", "-n", HOME, "--type=merge", "-p", r#"{"spec": {"holderIdentity": ""}}"#],
        "",
    );
    let says = refused(by(&viewer, &["--operator-lease", "bare"]));
    assert!(says.contains("nobody holds Lease bare in stoker-system: no operator leads now"), "{says}");
    Ok(())
}
