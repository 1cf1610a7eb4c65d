//! The operator as a local process, with the chart's CRD installed and exactly the rights that the chart grants it.
//! Reads the chart's files as text; renders no template.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    component::{Component, ComponentSpec},
    control_plane::ControlPlane,
    credentials::Identity,
    error::ClusterError,
    gateway,
};

pub(crate) const NAMESPACE: &str = "stoker-system";
const NAME: &str = "stoker-operator";
const HTTP_PORT: u16 = 8080;
const PAGES_PORT: u16 = 8081;
/// How often kubectl is asked again about a definition that nobody has looked at: half a minute.
const UNSEEN_MAX: usize = 300;

/// Which operator to run.
#[derive(Clone, Debug)]
pub struct OperatorOptions {
    /// The program.
    pub binary: PathBuf,
    /// The folder `charts/stoker` of the source tree.
    pub chart: PathBuf,
    /// The image that pods get when their deployment names none.
    pub agent_image: String,
    /// Lead Services to a [`GatewayProcess`](crate::GatewayProcess), as soon as there is one.
    pub gateway: bool,
}

/// A running operator. Dropping it kills it.
#[derive(Debug)]
pub struct OperatorProcess {
    component: Component,
    url: String,
    pages_url: String,
}

impl OperatorProcess {
    /// Installs CRD and rights, then starts the operator.
    pub fn start(control_plane: &ControlPlane, options: &OperatorOptions) -> Result<Self, ClusterError> {
        for crd in ["inferencedeployments", "inferencebudgets"] {
            apply(control_plane, &read(&options.chart.join(format!("crds/{crd}.yaml")))?)?;
        }
        established(control_plane, "inferencedeployments.stoker.dev")?;
        apply(control_plane, &rights(&read(&options.chart.join("templates/_helpers.tpl"))?)?)?;
        let listen = format!("{}:{HTTP_PORT}", control_plane.slot().home());
        let pages = format!("{}:{PAGES_PORT}", control_plane.slot().home());
        let mut args = vec![
            format!("--kubeconfig={}", control_plane.kubeconfig_of(Identity::Operator).display()),
            format!("--agent-image={}", options.agent_image),
            format!("--lease-namespace={NAMESPACE}"),
            format!("--listen={listen}"),
            format!("--pages-address={pages}"),
        ];
        args.extend(options.gateway.then(|| format!("--gateway-service={}", gateway::service())));
        let spec = ComponentSpec {
            name: NAME,
            program: options.binary.clone(),
            args,
            env: Vec::new(),
            log: control_plane.log_path(NAME),
        };
        let component = Component::start(spec, control_plane.keeper())?;
        Ok(Self { component, url: format!("http://{listen}"), pages_url: format!("http://{pages}") })
    }

    /// URL of its HTTP: metrics, and the records of scaling decisions.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// URL of its pages for people.
    pub fn pages_url(&self) -> &str {
        &self.pages_url
    }

    /// Starts the operator again when it has ended; it ends by itself when it loses its lease. Says whether it had.
    pub fn revive(&mut self) -> Result<bool, ClusterError> {
        let ended = self.component.has_exited();
        if ended {
            self.component.restart()?;
        }
        Ok(ended)
    }

    /// A fault: SIGKILL.
    pub fn kill(&mut self) {
        self.component.kill();
    }
}

/// Namespace, ClusterRole with the chart's rules, and the right to its own lease and keys.
fn rights(helpers: &str) -> Result<String, ClusterError> {
    let rules = rules(helpers)
        .ok_or_else(|| ClusterError::Chart("templates/_helpers.tpl defines no stoker.rules".to_owned()))?;
    let rules: Value =
        serde_norway::from_str(rules).map_err(|error| ClusterError::Chart(format!("stoker.rules: {error}")))?;
    let own = json!([
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "create"]},
    ]);
    let rbac = "rbac.authorization.k8s.io";
    let version = format!("{rbac}/v1");
    let subjects = json!([{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}]);
    let reference = |kind: &str| json!({"apiGroup": rbac, "kind": kind, "name": NAME});
    let items = json!([
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": NAME}, "rules": rules},
        {"apiVersion": version, "kind": "ClusterRoleBinding", "metadata": {"name": NAME}, "roleRef": reference("ClusterRole"), "subjects": subjects},
        {"apiVersion": version, "kind": "Role", "metadata": {"name": NAME, "namespace": NAMESPACE}, "rules": own},
        {"apiVersion": version, "kind": "RoleBinding", "metadata": {"name": NAME, "namespace": NAMESPACE}, "roleRef": reference("Role"), "subjects": subjects},
    ]);
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())
}

/// The chart keeps the rules as plain YAML between a define and its end.
fn rules(helpers: &str) -> Option<&str> {
    let (_, rest) = helpers.split_once("{{- define \"stoker.rules\" -}}")?;
    rest.split_once("{{- end }}").map(|(rules, _)| rules)
}

fn read(path: &Path) -> Result<String, ClusterError> {
    fs::read_to_string(path).map_err(ClusterError::file("read", path))
}

/// Waits until objects of a kind can be written, by the name of its definition. kubectl gives up on one that the API server has not
/// looked at yet, whose conditions are null: it is asked again.
pub fn established(control_plane: &ControlPlane, crd: &str) -> Result<(), ClusterError> {
    let args = ["wait", "--for=condition=Established", "--timeout=60s", "crd", crd];
    let is_unseen = |complaint: &str| complaint.contains(".status.conditions accessor error");
    for _ in 0..UNSEEN_MAX {
        match kubectl(control_plane, &args, None) {
            Err(ClusterError::Kubectl { complaint, .. }) if is_unseen(&complaint) => sleep(Duration::from_millis(100)),
            ended => return ended,
        }
    }
    kubectl(control_plane, &args, None)
}

pub(crate) fn apply(control_plane: &ControlPlane, manifest: &str) -> Result<(), ClusterError> {
    kubectl(control_plane, &["apply", "--server-side", "-f", "-"], Some(manifest))
}

fn kubectl(control_plane: &ControlPlane, args: &[&str], input: Option<&str>) -> Result<(), ClusterError> {
    let failed = || ClusterError::process("run", "kubectl");
    let mut command: Command = control_plane.kubectl()?;
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed())?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    stdin.write_all(input.unwrap_or_default().as_bytes()).map_err(failed())?;
    drop(stdin);
    let output = child.wait_with_output().map_err(failed())?;
    if output.status.success() {
        return Ok(());
    }
    Err(ClusterError::Kubectl {
        args: args.join(" "),
        complaint: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_operator_gets_the_rules_of_the_chart_and_its_own_lease() {
        let helpers = include_str!("../../../charts/stoker/templates/_helpers.tpl");
        let list: Value = serde_json::from_str(&rights(helpers).unwrap()).unwrap();
        let granted: Vec<&str> = list["items"][1]["rules"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|rule| rule["resources"][0].as_str())
            .collect();
        assert!(granted.contains(&"inferencedeployments") && granted.contains(&"pods"), "{granted:?}");
        for own in ["leases", "secrets"] {
            assert!(!granted.contains(&own), "{own} are granted in one namespace only");
        }
    }

    #[test]
    fn a_chart_without_rules_is_refused() {
        assert!(rights("").unwrap_err().to_string().contains("stoker.rules"));
    }
}
