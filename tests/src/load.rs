//! A client that streams completions and notes when each token came. Sends load; judges nothing.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use serde_json::{Value, json};

/// One streamed completion to ask for.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The user's message.
    pub content: String,
    /// Completion tokens; end tokens are ignored, so that every run does the same work.
    pub max_tokens: u32,
    /// Makes the text repeatable.
    pub seed: u64,
}

/// What one streamed completion showed.
#[derive(Clone, Debug)]
pub struct Heard {
    /// From sending to the first token.
    pub ttft: Duration,
    /// From sending to the last token.
    pub e2e: Duration,
    /// Completion tokens by the server's own count.
    pub completion_tokens: u32,
}

impl Heard {
    /// Mean seconds between tokens after the first.
    pub fn itl_seconds(&self) -> f64 {
        (self.e2e - self.ttft).as_secs_f64() / f64::from(self.completion_tokens.saturating_sub(1).max(1))
    }
}

/// Streams one chat completion from the server at `base` to its end.
pub async fn stream_chat(client: &reqwest::Client, base: &str, model: &str, ask: &Ask) -> Result<Heard> {
    let body = json!({
        "model": model, "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true, "temperature": 0,
        "max_tokens": ask.max_tokens, "seed": ask.seed, "messages": [{"role": "user", "content": ask.content}],
    });
    let sent = Instant::now();
    let response = client.post(format!("{base}/v1/chat/completions")).json(&body).send().await.context("send")?;
    ensure!(response.status().is_success(), "answered {}: {}", response.status(), response.text().await?);
    listen(response, sent).await
}

async fn listen(response: reqwest::Response, sent: Instant) -> Result<Heard> {
    let (mut ttft, mut last, mut completion_tokens, mut done) = (None, sent, None, false);
    let mut bytes = response.bytes_stream();
    let mut pending = Vec::new();
    while let Some(chunk) = bytes.next().await {
        pending.extend_from_slice(&chunk.context("the stream was cut")?);
        while let Some(end) = pending.windows(2).position(|pair| pair == b"\n\n") {
            let frame = String::from_utf8(pending.drain(..end + 2).collect()).context("a frame is not UTF-8")?;
            let Some(data) = frame.trim().strip_prefix("data: ") else { continue };
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let event: Value = serde_json::from_str(data).with_context(|| format!("not JSON: {data}"))?;
            ensure!(event.get("error").is_none(), "error event: {data}");
            if event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()) {
                last = Instant::now();
                ttft.get_or_insert(last - sent);
            }
            completion_tokens = event["usage"]["completion_tokens"].as_u64().or(completion_tokens);
        }
    }
    ensure!(done, "the stream ended without [DONE]");
    Ok(Heard {
        ttft: ttft.context("no token came")?,
        e2e: last - sent,
        completion_tokens: u32::try_from(completion_tokens.context("no usage came")?)?,
    })
}
