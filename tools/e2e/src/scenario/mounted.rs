//! A model in an image that the node mounts: its kubelet and its container runtime bring it, and nothing of ours fetches it.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::LIMIT;
use crate::{
    kubectl::Kubectl,
    wait::{Look, until},
};

const NAME: &str = "mounted";
/// Where the recipe `e2e-model` puts the model.
const FOLDER: &str = "/models/ember";

/// Serves a model out of an image.
pub(crate) struct Mounted<'a> {
    kubectl: &'a Kubectl,
    /// `REPOSITORY@sha256:…`.
    image: String,
}

impl<'a> Mounted<'a> {
    /// Of this image.
    pub(crate) fn of(kubectl: &'a Kubectl, image: String) -> Self {
        Self { kubectl, image }
    }

    /// A folder that the image has not is said with those that it has, and the right one is served. Returns how it is delivered.
    pub(crate) fn serve(&self) -> Result<String> {
        self.apply("/models/amber")?;
        self.wait("the wrong folder to be said", |status| {
            let message = condition(status)["message"].as_str().unwrap_or_default();
            condition(status)["reason"] == "ModelLoadFailed"
                && message.contains("models/amber")
                && message.contains("ember")
        })
        .context("a folder that is not there")?;
        self.apply(FOLDER)?;
        let status = self.wait("it to serve", |status| condition(status)["status"] == "True")?;
        let pods = self.kubectl.json(&["get", "pods", "-l", &format!("app.kubernetes.io/instance={NAME}")])?;
        let pods = pods["items"].as_array().context("there are pods")?;
        let serving = pods.iter().find(|pod| mounts(pod, &self.image));
        let serving = serving.with_context(|| format!("no pod mounts {}: {pods:?}", self.image))?;
        ensure!(serving["spec"]["initContainers"].as_array().is_none_or(Vec::is_empty), "somebody fetches: {serving}");
        Ok(status["model"]["delivery"].as_str().unwrap_or_default().to_owned())
    }

    /// Takes it away.
    pub(crate) fn delete(&self) -> Result<()> {
        self.kubectl.run(&["delete", "infd", NAME, "--timeout=150s"]).map(drop)
    }

    fn apply(&self, folder: &str) -> Result<()> {
        self.kubectl.apply(&format!(
            "
apiVersion: stoker.dev/v1alpha1
kind: InferenceDeployment
metadata: {{name: {NAME}, namespace: default}}
spec:
  model: {{source: 'oci://{}#path={folder}'}}
  resources: {{cpu: 200m, memory: 512Mi}}
  drain: {{withdrawSeconds: 0, deadlineSeconds: 5}}
",
            self.image
        ))
    }

    /// The status, once it is as expected.
    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
        until(LIMIT, what, || {
            let object = self.kubectl.json(&["get", "infd", NAME])?;
            let status = &object["status"];
            let current = status["observedGeneration"] == object["metadata"]["generation"];
            Ok(if current && is_so(status) {
                Look::Done(status.clone())
            } else {
                Look::NotYet(condition(status).to_string())
            })
        })
    }
}

/// `Ready`.
fn condition(status: &Value) -> &Value {
    let found = status["conditions"].as_array().into_iter().flatten().find(|condition| condition["type"] == "Ready");
    found.unwrap_or(&Value::Null)
}

/// Whether a pod that serves has a volume of this image.
fn mounts(pod: &Value, image: &str) -> bool {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let ready = pod["status"]["containerStatuses"][0]["ready"] == true;
    ready && volumes.into_iter().any(|volume| volume["image"]["reference"] == image)
}
