//! A client inside the pod network: a pod with `curl`, asking through the Service's address.

use std::{
    io,
    process::{Output, Stdio},
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::{kubectl::Kubectl, transcript::Transcript};

const POD: &str = "client";
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
/// Streams held through a roll: with two replicas, each holds some of them when its turn comes.
const N_STREAMS: usize = 6;
/// Long enough to last through the withdrawal of every replica, short enough for the model's context of 2048 tokens.
const N_TOKENS: u64 = 1800;

/// The client pod and the address it asks.
pub(crate) struct Client<'a> {
    kubectl: &'a Kubectl,
    url: String,
}

/// Streams that are being received, each read by a thread of its own: an unread pipe would hold the server up.
pub(crate) struct Streams(Vec<JoinHandle<io::Result<Output>>>);

impl<'a> Client<'a> {
    /// Starts the pod.
    pub(crate) fn start(kubectl: &'a Kubectl, url: String) -> Result<Self> {
        kubectl.apply(MANIFEST)?;
        kubectl.run(&["wait", "pod", POD, "--for=condition=Ready", "--timeout=60s"])?;
        Ok(Self { kubectl, url })
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

    /// Opens streams that take long.
    pub(crate) fn hold_streams(&self) -> Result<Streams> {
        let body = json!({
            "model": "chat", "stream": true, "max_tokens": N_TOKENS, "ignore_eos": true,
            "stream_options": {"include_usage": true},
            "messages": [{"role": "user", "content": "Count as far as you can."}],
        });
        let args = self.curl(&body.to_string());
        let open = |_| {
            let child = self.kubectl.command(&as_strs(&args)).stdout(Stdio::piped()).stdin(Stdio::null()).spawn()?;
            Ok(thread::spawn(|| child.wait_with_output()))
        };
        Ok(Streams((0..N_STREAMS).map(open).collect::<io::Result<_>>().context("start kubectl exec")?))
    }

    /// No buffer, and no failure on an HTTP error: its body says more.
    fn curl(&self, body: &str) -> Vec<String> {
        let url = format!("{}/v1/chat/completions", self.url);
        let curl = ["exec", POD, "--", "curl", "--silent", "--show-error", "--no-buffer", "--max-time", "170"];
        let request = ["--header", "Content-Type: application/json", "--data", body, &url];
        curl.into_iter().chain(request).map(str::to_owned).collect()
    }
}

impl Streams {
    /// Waits for every stream to end and checks that each is whole; returns how many there were.
    pub(crate) fn finish(self) -> Result<usize> {
        let n_streams = self.0.len();
        for (idx, reader) in self.0.into_iter().enumerate() {
            let output = reader.join().expect("the reader does not panic").context("read kubectl exec")?;
            let transcript = Transcript::parse(&String::from_utf8_lossy(&output.stdout));
            transcript.and_then(|t| t.check_whole(N_TOKENS)).with_context(|| format!("stream {idx}"))?;
        }
        Ok(n_streams)
    }
}

fn as_strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}
