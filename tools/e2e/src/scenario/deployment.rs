//! The `InferenceDeployment` of the walk: what is done to it, and what must be seen in the cluster afterwards.

use std::{collections::BTreeSet, time::Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::LIMIT;
use crate::{
    kubectl::Kubectl,
    wait::{Look, until},
};

const NAME: &str = "chat";
/// The labels by which the operator knows the objects of a deployment.
const SELECTOR: &str = "app.kubernetes.io/managed-by=stoker,app.kubernetes.io/instance=chat";
/// Little CPU, so that a stream outlasts the start of the replica that is to take over, on a fast machine too: both take
/// CPU time, the stream several times as much. The drain is as patient as by default, for a slow and busy machine.
const MANIFEST: &str = "
apiVersion: stoker.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: chat, namespace: default}
spec:
  model: {source: builtin://ember}
  replicas: 2
  resources: {cpu: 200m, memory: 512Mi}
";

/// A roll that went through.
pub(crate) struct Roll {
    /// How often `meanwhile` was called.
    pub(crate) n_calls: usize,
    /// When the first new replica was seen serving, and so the first old one began to leave.
    pub(crate) first_leaves: Instant,
}

/// The deployment in the cluster.
pub(crate) struct Deployment<'a> {
    kubectl: &'a Kubectl,
}

impl<'a> Deployment<'a> {
    /// The one deployment of the walk.
    pub(crate) fn new(kubectl: &'a Kubectl) -> Self {
        Self { kubectl }
    }

    /// Creates it with two replicas.
    pub(crate) fn apply(&self) -> Result<()> {
        self.kubectl.apply(MANIFEST)
    }

    /// Waits until the status says ready, for this generation, with exactly so many replicas.
    pub(crate) fn wait_ready(&self, n_replicas: u64) -> Result<()> {
        until(LIMIT, &format!("{n_replicas} ready replicas"), || Ok(judge(&self.get()?, n_replicas)))
    }

    /// The address of its Service inside the cluster.
    pub(crate) fn url(&self) -> Result<String> {
        let service = self.kubectl.json(&["get", "service", NAME])?;
        let (address, port) = (&service["spec"]["clusterIP"], &service["spec"]["ports"][0]["port"]);
        match (address.as_str(), port.as_u64()) {
            (Some(address), Some(port)) => Ok(format!("http://{address}:{port}")),
            _ => bail!("the Service has no address: {}", service["spec"]),
        }
    }

    /// Changes a setting that every replica must be replaced for.
    pub(crate) fn change_engine(&self) -> Result<()> {
        self.patch("{\"spec\": {\"engine\": {\"maxNumSeqs\": 32}}}")
    }

    /// Waits until every pod is of the new revision and ready, calling `meanwhile` again and again. Two replicas must be
    /// ready at every look.
    pub(crate) fn wait_rolled(&self, mut meanwhile: impl FnMut() -> Result<()>) -> Result<Roll> {
        let (started, mut n_calls, mut first_leaves) = (Instant::now(), 0, None);
        loop {
            meanwhile()?;
            n_calls += 1;
            let object = self.get()?;
            let count = |name: &str| object["status"][name].as_u64().unwrap_or(0);
            ensure!(count("readyReplicas") >= 2, "{} replicas ready during the roll", count("readyReplicas"));
            if first_leaves.is_none() && is_current(&object) && count("updatedReplicas") > 0 {
                first_leaves = Some(Instant::now());
            }
            match (judge(&object, 2), first_leaves) {
                (Look::Done(()), Some(first_leaves)) => return Ok(Roll { n_calls, first_leaves }),
                (Look::Done(()), None) => bail!("ready with no replica of the new revision"),
                (Look::NotYet(missing), _) => ensure!(started.elapsed() < LIMIT, "not rolled: {missing}"),
            }
        }
    }

    /// Scales through the scale subresource, as `kubectl scale` and autoscalers do, and waits.
    pub(crate) fn scale(&self, n_replicas: u64) -> Result<()> {
        self.kubectl.run(&["scale", "infd", NAME, &format!("--replicas={n_replicas}")])?;
        self.wait_ready(n_replicas)
    }

    /// Gives the number of replicas to the operator, and waits until it is explained by way of a forwarded port. Returns
    /// the answer's first line.
    pub(crate) fn explain_scaling(&self) -> Result<String> {
        self.patch("{\"spec\": {\"replicas\": null, \"scaling\": {\"max\": 3}}}")?;
        until(LIMIT, "a decision that is explained", || {
            let said = match self.kubectl.stoker(&["explain", NAME]) {
                Ok(said) => said,
                Err(error) => return Ok(Look::NotYet(format!("{error:#}"))),
            };
            let repeated = said.trim_end().ends_with("the same, bit for bit.");
            let decision = said.lines().find(|line| line.contains("replica")).filter(|_| repeated);
            Ok(decision.map_or_else(|| Look::NotYet(said.clone()), |line| Look::Done(line.to_owned())))
        })
    }

    /// What all replicas logged, by `kubectl stoker logs`: lines of each, oldest first. Returns how many.
    pub(crate) fn logs(&self) -> Result<usize> {
        let said = self.kubectl.stoker(&["logs", NAME, "--output", "json"])?;
        let lines = said.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        let words = |name: &str| lines.iter().filter_map(|line| line[name].as_str()).collect::<Vec<_>>();
        let (pods, times) = (words("pod").into_iter().collect::<BTreeSet<_>>(), words("time"));
        ensure!(
            pods.len() == 2 && times.len() == lines.len() && times.is_sorted(),
            "of two replicas, in order: {said}"
        );
        ensure!(
            lines.iter().any(|line| line["line"].as_str().is_some_and(|line| line.starts_with("serving chat "))),
            "{said}"
        );
        Ok(lines.len())
    }

    /// Deletes it and waits until nothing that belonged to it is left.
    pub(crate) fn delete(&self) -> Result<()> {
        self.kubectl.run(&["delete", "infd", NAME, "--timeout=150s"])?;
        until(LIMIT, "everything to be gone", || {
            let kinds = "infd,pods,services,configmaps,endpointslices";
            let left = self.kubectl.run(&["get", kinds, "-l", SELECTOR, "-o", "name"])?;
            Ok(if left.trim().is_empty() { Look::Done(()) } else { Look::NotYet(left.replace('\n', " ")) })
        })
    }

    fn get(&self) -> Result<Value> {
        self.kubectl.json(&["get", "infd", NAME])
    }

    fn patch(&self, patch: &str) -> Result<()> {
        self.kubectl.run(&["patch", "infd", NAME, "--type=merge", "-p", patch]).map(drop)
    }
}

/// Whether the status is about this very generation.
fn is_current(object: &Value) -> bool {
    object["status"]["observedGeneration"] == object["metadata"]["generation"]
}

/// Whether the status says that this very generation is served by `n_replicas`, and if not, what it says instead.
fn judge(object: &Value, n_replicas: u64) -> Look<()> {
    let status = &object["status"];
    let ready = status["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "Ready");
    let Some(ready) = ready else { return Look::NotYet("it has no Ready condition yet".to_owned()) };
    let current = is_current(object) && ready["observedGeneration"] == object["metadata"]["generation"];
    let counts = [&status["replicas"], &status["readyReplicas"]].iter().all(|n| n.as_u64() == Some(n_replicas));
    if current && counts && ready["status"] == "True" {
        return Look::Done(());
    }
    Look::NotYet(format!(
        "replicas {}, ready {}, Ready is {} ({}: {}), current generation: {current}",
        status["replicas"], status["readyReplicas"], ready["status"], ready["reason"], ready["message"]
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(observed: u64, status: &str, n_ready: u64) -> Value {
        json!({
            "metadata": {"generation": 2},
            "status": {
                "replicas": 2, "readyReplicas": n_ready, "observedGeneration": observed,
                "conditions": [{"type": "Ready", "status": status, "observedGeneration": observed, "reason": "R", "message": "M"}],
            },
        })
    }

    #[test]
    fn only_the_current_generation_with_all_replicas_is_ready() {
        assert!(matches!(judge(&object(2, "True", 2), 2), Look::Done(())));
        for stale in [object(1, "True", 2), object(2, "False", 2), object(2, "True", 1), json!({"metadata": {}})] {
            assert!(matches!(judge(&stale, 2), Look::NotYet(_)));
        }
    }
}
