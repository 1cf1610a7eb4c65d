//! A client inside the pod network: asks through the Service's address.

use std::{process::Command, time::Duration};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{pod::Pod, streams::Streams};
use crate::{
    transcript::Transcript,
    wait::{self, Look},
};

/// The longest the node may take to route the Service once a replica is Ready: kube-proxy gathers changes for a second.
const ROUTE_LIMIT: Duration = Duration::from_secs(10);

/// Its pod and the address it asks.
pub(crate) struct Client<'a> {
    pod: Pod<'a>,
    url: String,
}

impl<'a> Client<'a> {
    /// Asks this address from this pod.
    pub(crate) fn new(pod: Pod<'a>, url: String) -> Self {
        Self { pod, url }
    }

    /// Waits until the node routes the Service. `Ready` speaks of replicas; kube-proxy follows about a second later.
    pub(crate) fn wait_routed(&self) -> Result<()> {
        let url = format!("{}/readyz", self.url);
        wait::until(ROUTE_LIMIT, "the Service's address to answer", || {
            let answer = self.pod.curl(&["--fail", "--max-time", "2", &url]);
            Ok(answer.map_or_else(|error| Look::NotYet(format!("{error:#}")), |_| Look::Done(())))
        })
    }

    /// Streams one short answer.
    pub(crate) fn ask(&self, question: &str) -> Result<Transcript> {
        let body = json!({
            "model": "chat", "stream": true, "max_tokens": 32,
            "messages": [{"role": "user", "content": question}],
        });
        let transcript = self.request(&body, |args| self.pod.curl(args).and_then(|body| Transcript::parse(&body)))?;
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
        let command = || -> Command { self.request(&body, |args| self.pod.command(args)) };
        Streams::open(n_streams, n_tokens, command)
    }

    fn request<T>(&self, body: &Value, curl: impl FnOnce(&[&str]) -> T) -> T {
        let url = format!("{}/v1/chat/completions", self.url);
        curl(&["--max-time", "600", "--header", "Content-Type: application/json", "--data", &body.to_string(), &url])
    }
}
