//! kubectl on a running cluster, with the few questions that the demos ask.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde_json::Value;

use super::state::{Files, State};

const READY_TIMEOUT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// See the module.
pub(super) struct Kubectl<'a> {
    state: &'a State,
    files: Files,
}

impl<'a> Kubectl<'a> {
    /// For the cluster in `dir`.
    pub(super) fn of(state: &'a State, dir: &Path) -> Self {
        Self { state, files: Files::at(dir) }
    }

    pub(super) fn run(&self, args: &[&str]) -> anyhow::Result<String> {
        self.run_with(args, "")
    }

    /// Makes an object, or changes it to this.
    pub(super) fn apply(&self, object: &Value) -> anyhow::Result<()> {
        self.run_with(&["apply", "-f", "-"], &object.to_string()).map(drop)
    }

    fn run_with(&self, args: &[&str], input: &str) -> anyhow::Result<String> {
        let mut command = Command::new(self.state.binaries.join("kubectl"));
        command
            .env("KUBECONFIG", &self.state.kubeconfig)
            .env("KUBECACHEDIR", self.files.cluster_dir().join("kubectl-cache"));
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("run kubectl")?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        stdin.write_all(input.as_bytes()).context("write to kubectl")?;
        drop(stdin);
        let output = child.wait_with_output().context("run kubectl")?;
        if !output.status.success() {
            bail!("kubectl {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(super) fn get(&self, kind: &str, name: &str) -> anyhow::Result<Value> {
        let text = self.run(&["get", kind, name, "-o", "json"])?;
        serde_json::from_str(&text).with_context(|| format!("read {kind} {name}"))
    }

    pub(super) fn wait_until_ready(&self, name: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            let deployment = self.get("inferencedeployment", name)?;
            if is_ready(&deployment) {
                return Ok(());
            }
            if Instant::now() >= deadline {
                bail!(
                    "{name} is not ready after {} s: {}",
                    READY_TIMEOUT.as_secs(),
                    deployment["status"]["conditions"]
                );
            }
            sleep(POLL_INTERVAL);
        }
    }

    /// Where the deployment's Service listens.
    pub(super) fn service_url(&self, name: &str) -> anyhow::Result<String> {
        let service = self.get("service", name)?;
        let address = service["spec"]["clusterIP"].as_str().context("the Service has no address")?;
        Ok(format!("http://{address}:{}", service["spec"]["ports"][0]["port"]))
    }
}

/// `Ready` counts only for the generation that is there now.
fn is_ready(deployment: &Value) -> bool {
    let conditions = deployment["status"]["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    let generation = &deployment["metadata"]["generation"];
    conditions.iter().any(|condition| {
        condition["type"] == "Ready" && condition["status"] == "True" && condition["observedGeneration"] == *generation
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ready_for_an_older_generation_is_not_ready() {
        let deployment = |observed: u32| json!({"metadata": {"generation": 2}, "status": {"conditions": [{"type": "Ready", "status": "True", "observedGeneration": observed}]}});
        assert!(is_ready(&deployment(2)));
        assert!(!is_ready(&deployment(1)));
    }
}
