//! A client inside the pod network: a pod with `curl`, asking through the Service's address.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use super::streams::Streams;
use crate::{
    kubectl::Kubectl,
    transcript::Transcript,
    wait::{self, Look},
};

const POD: &str = "client";
/// The longest the node may take to route the Service once a replica is Ready: kube-proxy gathers changes for a second.
const ROUTE_LIMIT: Duration = Duration::from_secs(10);
/// A pod that the strictest namespace admits, as a user's client would have to be.
const MANIFEST: &str = "
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: default}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: curl
    image: localhost/stoker-e2e-tools:dev
    imagePullPolicy: Never
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}
";
/// The client pod and the address it asks.
pub(crate) struct Client<'a> {
    kubectl: &'a Kubectl,
    url: String,
}

impl<'a> Client<'a> {
    /// Starts the pod.
    pub(crate) fn start(kubectl: &'a Kubectl, url: String) -> Result<Self> {
        kubectl.apply(MANIFEST)?;
        kubectl.run(&["wait", "pod", POD, "--for=condition=Ready", "--timeout=60s"])?;
        Ok(Self { kubectl, url })
    }

    /// Waits until the node routes the Service. `Ready` speaks of replicas; kube-proxy follows about a second later.
    pub(crate) fn wait_routed(&self) -> Result<()> {
        let url = format!("{}/readyz", self.url);
        let args = ["exec", POD, "--", "curl", "--silent", "--show-error", "--fail", "--max-time", "2", &url];
        wait::until(ROUTE_LIMIT, "the Service's address to answer", || {
            Ok(self.kubectl.run(&args).map_or_else(|error| Look::NotYet(format!("{error:#}")), |_| Look::Done(())))
        })
    }

    /// Streams one short answer.
    pub(crate) fn ask(&self, question: &str) -> Result<Transcript> {
        let body = json!({
            "model": "chat", "stream": true, "max_tokens": 32,
            "messages": [{"role": "user", "content": question}],
        });
        let args = self.curl(&body.to_string());
        let transcript = Transcript::parse(&self.kubectl.run(&as_strs(&args))?)?;
        ensure!(transcript.done, "cut before [DONE]: {:?}", transcript.text);
        Ok(transcript)
    }

    /// Opens streams of `n_tokens` tokens each, and returns when each has begun.
    pub(crate) fn hold_streams(&self, n_streams: usize, n_tokens: u64) -> Result<Streams> {
        let body = json!({
            "model": "chat", "stream": true, "max_tokens": n_tokens, "ignore_eos": true,
            "stream_options": {"include_usage": true},
            "messages": [{"role": "user", "content": "Count as far as you can."}],
        });
        let args = self.curl(&body.to_string());
        Streams::open(n_streams, n_tokens, || self.kubectl.command(&as_strs(&args)))
    }

    /// No buffer, and no failure on an HTTP error: its body says more.
    fn curl(&self, body: &str) -> Vec<String> {
        let url = format!("{}/v1/chat/completions", self.url);
        let curl = ["exec", POD, "--", "curl", "--silent", "--show-error", "--no-buffer", "--max-time", "600"];
        let request = ["--header", "Content-Type: application/json", "--data", body, &url];
        curl.into_iter().chain(request).map(str::to_owned).collect()
    }
}

fn as_strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}
