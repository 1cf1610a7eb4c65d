//! An agent process on a model, and the completions that are streamed from it over HTTP. Measures time and memory from
//! outside the process; knows no case.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::{StreamExt, future::try_join_all};
use serde_json::{Value, json};
use stoker_engine::{EngineLimits, TokenId};
use tokio::runtime::Runtime;

use crate::in_process::Setup;

const NAME: &str = "bench";
/// A checkpoint of 16 GB that is not in the page cache takes a while.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Between two attempts to reach an agent that starts: what a start is measured to.
const POLL: Duration = Duration::from_millis(2);
/// The last frames of a stream, usage among them, fit this many bytes.
const TAIL_BYTES: usize = 2048;

/// A started agent; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    program: PathBuf,
    model: PathBuf,
    url: String,
    client: reqwest::Client,
    runtime: Runtime,
    begun: Instant,
}

impl Agent {
    /// Starts `program` on a model; it may not listen yet.
    pub fn spawn(program: &Path, setup: &Setup) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // The port is free a moment before the agent binds it: good enough on a machine that only measures.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let begun = Instant::now();
        let child = Command::new(program)
            .args(["--host", "127.0.0.1", "--port", &port, "--log", "error", "--served-name", NAME, "--model"])
            .arg(&setup.model)
            .args(["--device", &setup.device.to_string()])
            .args(flags(&setup.limits))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("start {} (build stoker-agent, or name it with --agent)", program.display()))?;
        let url = format!("http://127.0.0.1:{port}/v1/completions");
        // As the system names a file that is mapped.
        let model = setup.model.canonicalize().context("the model's path")?;
        let (program, client) = (program.to_owned(), reqwest::Client::new());
        Ok(Self { child, program, model, url, client, runtime, begun })
    }

    /// Seconds from exec until it has answered `prompt` with one token.
    pub fn first_token(&mut self, prompt: &[TokenId]) -> Result<f64> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before its first token", self.program.display());
            }
            let answered = self.runtime.block_on(stream(&self.client, &self.url, prompt, 1));
            match answered {
                Ok(()) => return Ok(self.begun.elapsed().as_secs_f64()),
                Err(error) => ensure!(
                    self.begun.elapsed() < START_LIMIT,
                    "no first token within {} s: {error:#}",
                    START_LIMIT.as_secs()
                ),
            }
            std::thread::sleep(POLL);
        }
    }

    /// Seconds from sending the first of `prompts` until the last has been answered to its end.
    pub fn together(&self, prompts: &[Vec<TokenId>], completion_tokens: u32) -> Result<f64> {
        let begun = Instant::now();
        let streams = prompts.iter().map(|prompt| stream(&self.client, &self.url, prompt, completion_tokens));
        self.runtime.block_on(try_join_all(streams))?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// Resident memory of the process.
    pub fn resident(&self) -> Result<Resident> {
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", self.child.id())).context("read smaps")?;
        Resident::of_maps(&maps, &self.model.display().to_string())
    }
}

/// Resident memory of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Resident {
    /// All of it, in MB.
    pub all_mb: f64,
    /// The model's files as they are mapped, in MB: weights that were not copied.
    pub mapped_model_mb: f64,
}

impl Resident {
    /// From Linux's list of a process's mappings, where `model` is the path of the model's directory or file.
    fn of_maps(maps: &str, model: &str) -> Result<Self> {
        let (mut found, mut is_model) = (Self::default(), false);
        for line in maps.lines() {
            match line.split_once(':') {
                Some(("Rss", size)) => {
                    let kib: f64 = size.trim().trim_end_matches(" kB").parse().with_context(|| line.to_owned())?;
                    let mb = kib * 1024.0 / 1e6;
                    found.all_mb += mb;
                    found.mapped_model_mb += if is_model { mb } else { 0.0 };
                }
                // Fields are words before a colon; what else has one is the line that begins a mapping.
                Some((words, _)) if words.contains(' ') => is_model = line.contains(model),
                _ => {}
            }
        }
        ensure!(found.all_mb > 0.0, "no Rss in smaps");
        Ok(found)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended by itself, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn flags(limits: &EngineLimits) -> Vec<String> {
    let given = |flag: &str, value: Option<u64>| value.map(|value| format!("--{flag}={value}"));
    let flags = [
        given("max-model-len", limits.max_model_len.map(u64::from)),
        given("max-num-seqs", limits.max_num_seqs.map(u64::from)),
        given("max-batched-tokens", limits.max_batched_tokens.map(u64::from)),
        given("max-waiting", Some(limits.max_waiting.into())),
        given("kv-cache-tokens", limits.kv_cache_tokens.map(u64::from)),
        given("threads", limits.threads.map(|threads| threads as u64)),
        limits.batch_invariant.then(|| "--batch-invariant=true".to_owned()),
    ];
    flags.into_iter().flatten().collect()
}

/// Streams one completion to its end and checks that it was as long as asked. Frames are not taken apart on the way: the
/// client must not be what is measured.
async fn stream(client: &reqwest::Client, url: &str, prompt: &[TokenId], completion_tokens: u32) -> Result<()> {
    let body = json!({
        "model": NAME, "prompt": prompt, "max_tokens": completion_tokens, "ignore_eos": true, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let response = client.post(url).json(&body).send().await.context("send")?;
    ensure!(response.status().is_success(), "answered {}: {}", response.status(), response.text().await?);
    let mut pieces = response.bytes_stream();
    let mut tail = Vec::new();
    while let Some(piece) = pieces.next().await {
        tail.extend_from_slice(&piece.context("read the stream")?);
        tail.drain(..tail.len().saturating_sub(TAIL_BYTES));
    }
    let found = completion_tokens_of(&String::from_utf8_lossy(&tail))?;
    ensure!(found == completion_tokens, "a stream ended after {found} of {completion_tokens} tokens");
    Ok(())
}

/// The usage at the end of a stream.
fn completion_tokens_of(tail: &str) -> Result<u32> {
    let mut frames = tail.split("\n\n").map(|frame| frame.trim_start_matches("data: ")).collect::<Vec<_>>();
    frames.retain(|frame| !frame.trim().is_empty());
    ensure!(frames.pop() == Some("[DONE]"), "the stream ended without [DONE]: {tail}");
    let usage: Value = serde_json::from_str(frames.pop().context("a frame with the usage")?)?;
    let tokens = usage["usage"]["completion_tokens"].as_u64().with_context(|| format!("no usage in {usage}"))?;
    Ok(u32::try_from(tokens)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_weights_are_told_from_other_memory() {
        let maps = "7f00-7f10 r--s 00000000 fe:00 12    /models/m/model.safetensors\nSize: 64 kB\nRss:      2000 kB\n\
                    VmFlags: rd mr\n7f10-7f20 rw-p 00000000 00:00 0 \nRss:       500 kB\n";
        let found = Resident::of_maps(maps, "/models/m").unwrap();
        assert_eq!(found, Resident { all_mb: 2.56, mapped_model_mb: 2.048 });
        assert!(Resident::of_maps("", "/models/m").is_err());
    }

    #[test]
    fn the_length_of_a_stream_is_in_its_last_frame() {
        let tail = "{\"cut\": \"off\"}\n\ndata: {\"usage\":{\"completion_tokens\":256}}\n\ndata: [DONE]\n\n";
        assert_eq!(completion_tokens_of(tail).unwrap(), 256);
    }

    #[test]
    fn a_stream_that_breaks_off_is_no_answer() {
        assert!(completion_tokens_of("data: {\"usage\":{\"completion_tokens\":256}}\n\n").is_err());
        assert!(completion_tokens_of("data: {\"error\":{}}\n\ndata: [DONE]\n\n").is_err());
        assert!(completion_tokens_of("").is_err());
    }
}
