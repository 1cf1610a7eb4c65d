//! The Helm chart: in, with more switched on, and out again.

use std::path::Path;

use anyhow::{Context, Result};

use super::LIMIT;
use crate::{
    kubectl::Kubectl,
    wait::{Look, until},
};

const NAMESPACE: &str = "stoker-system";
const RELEASE: &str = "stoker";
/// Images are imported, there is no registry to ask.
const VALUES: [&str; 5] = [
    "image.repository=localhost/stoker-operator",
    "image.tag=dev",
    "image.pullPolicy=Never",
    "agent.image.repository=localhost/stoker-agent",
    "agent.image.tag=dev",
];
/// Two of them, which hear from each other.
const GATEWAY: &str =
    r#"gateway={"enabled": true, "replicas": 2, "image": {"repository": "localhost/stoker-gateway", "tag": "dev"}}"#;
/// The strictest namespaces there are: a pod that is not restricted would be refused.
const NAMESPACES: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: stoker-system, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: Namespace
metadata: {name: default, labels: {pod-security.kubernetes.io/enforce: restricted}}
";

/// Installs the chart and waits until the operator is ready.
pub(crate) fn install(kubectl: &Kubectl, chart: &Path) -> Result<()> {
    kubectl.apply(NAMESPACES)?;
    helm(kubectl, "install", chart, &[])
}

/// Switches gateways on, and with them the policies of the operator, of gateways and of replicas. These let in a namespace,
/// beside whom Stoker's own parts need.
pub(crate) fn guard(kubectl: &Kubectl, chart: &Path, named: &str) -> Result<()> {
    let from = format!(r#"[{{"namespaceSelector": {{"matchLabels": {{"kubernetes.io/metadata.name": "{named}"}}}}}}]"#);
    let own = format!(r#"networkPolicy={{"enabled": true, "from": {from}}}"#);
    let replicas = format!(r#"agent.networkPolicy={{"enabled": true, "inferenceFrom": {from}}}"#);
    helm(kubectl, "upgrade", chart, &[GATEWAY, &own, &replicas])
}

/// Switches the policies off; gateways stay.
pub(crate) fn unguard(kubectl: &Kubectl, chart: &Path) -> Result<()> {
    helm(kubectl, "upgrade", chart, &[GATEWAY])
}

fn helm(kubectl: &Kubectl, word: &str, chart: &Path, more: &[&str]) -> Result<()> {
    let chart = chart.to_str().context("chart path is not UTF-8")?;
    let values = VALUES.join(",");
    let args = [word, RELEASE, chart, "--namespace", NAMESPACE, "--wait", "--timeout", "120s", "--set", &values];
    let more: Vec<&str> = more.iter().flat_map(|value| ["--set-json", value]).collect();
    kubectl.helm(&[&args[..], &more].concat()).map(drop)
}

/// Uninstalls it. The CRD stays, as Helm leaves it and as `docs/install.md` says: deleting it deletes every deployment.
pub(crate) fn uninstall(kubectl: &Kubectl) -> Result<()> {
    kubectl.helm(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "60s"])?;
    let kinds = "deployments,pods,services,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings";
    // Helm waits for what it made; the pods are the Deployment's and go a moment later.
    until(LIMIT, "the chart's objects to be gone", || {
        let left = kubectl.run(&["get", kinds, "-A", "-l", "app.kubernetes.io/instance=stoker", "-o", "name"])?;
        Ok(if left.trim().is_empty() { Look::Done(()) } else { Look::NotYet(left.replace('\n', " ")) })
    })?;
    kubectl.run(&["get", "crd", "inferencedeployments.stoker.dev"]).map(drop).context("the CRD is to stay")
}
