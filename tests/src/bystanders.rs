//! Who uses an agent properly while others abuse it: clients that stream, and a kubelet that asks how it is. Fails where an
//! answer is not whole or a probe is not answered well.

use std::{
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use reqwest::{Client, StatusCode};
use serde_json::json;

use crate::{agent::AgentProcess, process::choose_crypto};

/// Tokens of a stream.
const TOKENS: u64 = 200;
/// A kubelet waits a second by default. How long it took is told, and for who asks to judge: a machine may be busy.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
const PROBE_PERIOD: Duration = Duration::from_millis(100);

/// One whole completion, streamed; its text.
async fn completion(http: &Client, base: &str) -> Result<String> {
    let body = json!({
        "prompt": "Once upon a time", "stream": true, "ignore_eos": true, "max_tokens": TOKENS, "seed": 1,
        "stream_options": {"include_usage": true},
    });
    let answer = http.post(format!("{base}/v1/completions")).json(&body).send().await?;
    let status = answer.status();
    let text = answer.text().await.context("a stream was cut")?;
    ensure!(status == StatusCode::OK, "refused with {status}: {text}");
    let said = format!("\"completion_tokens\":{TOKENS}");
    ensure!(text.contains(&said) && text.trim_end().ends_with("data: [DONE]"), "a stream ended early: {text}");
    let chunks = text.lines().filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok());
    Ok(chunks.filter_map(|chunk: serde_json::Value| Some(chunk["choices"][0]["text"].as_str()?.to_owned())).collect())
}

/// Streams one completion after another until the end; how many. Each says what the first one said.
pub async fn stream(base: &str, end: Instant) -> Result<u64> {
    let (http, mut first, mut whole) = (Client::new(), None, 0);
    while Instant::now() < end {
        let text = completion(&http, base).await?;
        ensure!(first.get_or_insert_with(|| text.clone()) == &text, "another answer to the same question: {text}");
        whole += 1;
    }
    Ok(whole)
}

/// What a kubelet saw.
pub struct Probes {
    /// Milliseconds of each answer, the longest last.
    pub millis: Vec<f64>,
}

impl Probes {
    /// Asks where a kubelet does, ten times a second and on a new connection each time, until the end: on a thread of its own,
    /// so that what else this process does is not taken for the agent's slowness.
    pub fn ask(agent: &AgentProcess, end: Instant) -> JoinHandle<Result<Self>> {
        let urls = [agent.admin_url("/healthz"), agent.url("/readyz")];
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(ask(&urls, end))
        })
    }

    /// Milliseconds that so large a share of all answers took at most.
    pub fn quantile(&self, share: f64) -> f64 {
        let index = (self.millis.len() as f64 * share) as usize;
        self.millis[index.min(self.millis.len() - 1)]
    }
}

async fn ask(urls: &[String], end: Instant) -> Result<Probes> {
    choose_crypto();
    let http = Client::builder().pool_max_idle_per_host(0).timeout(PROBE_TIMEOUT).build()?;
    let mut millis = Vec::new();
    for url in urls.iter().cycle() {
        let asked = Instant::now();
        let answer = http.get(url).send().await.with_context(|| format!("probe {} of {url}", millis.len()))?;
        ensure!(answer.status() == StatusCode::OK, "{url}: {}", answer.text().await?);
        millis.push(asked.elapsed().as_secs_f64() * 1e3);
        if Instant::now() > end {
            break;
        }
        tokio::time::sleep(PROBE_PERIOD.saturating_sub(asked.elapsed())).await;
    }
    millis.sort_by(f64::total_cmp);
    Ok(Probes { millis })
}
