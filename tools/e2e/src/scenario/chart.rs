//! The Helm chart: in and out again.

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
    let chart = chart.to_str().context("chart path is not UTF-8")?;
    let place = ["--namespace", NAMESPACE, "--wait", "--timeout", "120s"];
    kubectl.helm(&[&["install", RELEASE, chart, "--set", &VALUES.join(",")], &place[..]].concat()).map(drop)
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
