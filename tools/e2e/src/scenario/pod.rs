//! A pod with `curl`: somebody inside the pod network. Asks and returns what came; judges nothing.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::kubectl::Kubectl;

/// A pod that stays until the namespaces end.
#[derive(Clone, Copy)]
pub(crate) struct Pod<'a> {
    kubectl: &'a Kubectl,
    namespace: &'static str,
    name: &'static str,
}

impl<'a> Pod<'a> {
    /// Starts it, and its namespace where there is none; returns when it runs.
    pub(crate) fn start(kubectl: &'a Kubectl, namespace: &'static str, name: &'static str) -> Result<Self> {
        kubectl.apply(&manifest(namespace, name))?;
        kubectl.run(&["--namespace", namespace, "wait", "pod", name, "--for=condition=Ready", "--timeout=60s"])?;
        Ok(Self { kubectl, namespace, name })
    }

    /// `curl` in it, for callers that stream its output. No buffer, and no failure on an HTTP error: its body says more.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let exec = ["--namespace", self.namespace, "exec", self.name, "--"];
        let curl = ["curl", "--silent", "--show-error", "--no-buffer"];
        self.kubectl.command(&[&exec[..], &curl, args].concat())
    }

    /// What `curl` printed.
    pub(crate) fn curl(&self, args: &[&str]) -> Result<String> {
        let output = self.command(args).stdin(Stdio::null()).output().context("start kubectl")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{self}: curl {}: {}", args.join(" "), stderr.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Which of `urls` answer at all, whatever they say.
    pub(crate) fn reaches(&self, urls: &[String]) -> Result<Vec<bool>> {
        let sink = ["--max-time", "3", "--connect-timeout", "2", "--write-out", "%{http_code}\n"];
        let asked = urls.iter().flat_map(|url| ["--output", "/dev/null", url.as_str()]);
        let args: Vec<&str> = sink.into_iter().chain(asked).collect();
        // curl's own success is that of the last one alone.
        let output = self.command(&args).stdin(Stdio::null()).output().context("start kubectl")?;
        let codes = String::from_utf8_lossy(&output.stdout).lines().map(|code| code != "000").collect::<Vec<_>>();
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(codes.len() == urls.len(), "{self}: {} answers to {} questions: {stderr}", codes.len(), urls.len());
        Ok(codes)
    }
}

impl std::fmt::Display for Pod<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The strictest namespaces there are: a pod that is not restricted would be refused. So is this one, as a user's client
/// would have to be.
fn manifest(namespace: &str, name: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}, labels: {{pod-security.kubernetes.io/enforce: restricted}}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {namespace}}}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  securityContext: {{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: curl
    image: localhost/stoker-e2e-tools:dev
    imagePullPolicy: Never
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}, readOnlyRootFilesystem: true}}
"
    )
}
