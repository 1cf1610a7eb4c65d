//! What is asked of the demo's deployments: a load, and one answer at a time.

use std::{
    io::{self, BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use super::demo;

/// Tokens of an answer under load.
pub(super) const LOAD_TOKENS: u32 = 900;

pub(super) fn load_words(url: &str, step: &str) -> Vec<String> {
    let words = ["--url", url, "--step", step, "--prompt-tokens", "40..60", "--ignore-eos", "--max-tokens"];
    words.into_iter().map(str::to_owned).chain([LOAD_TOKENS.to_string()]).collect()
}

/// A load whose summary is wanted.
pub(super) struct Load(Child);

impl Load {
    pub(super) fn start(program: &Path, words: &[String]) -> anyhow::Result<Self> {
        println!("$ stoker-load {}", words.join(" "));
        let mut command = Command::new(program);
        command.args(words).arg("--json").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        Ok(Self(command.spawn().with_context(|| format!("start {}", program.display()))?))
    }

    pub(super) fn summary(self) -> anyhow::Result<Value> {
        let output = self.0.wait_with_output().context("wait for the load")?;
        serde_json::from_slice(&output.stdout).context("read the load's summary")
    }
}

pub(super) fn failed(summary: &Value) -> u64 {
    let number = |field: &str| summary[field].as_u64().unwrap_or(0);
    number("planned") - number("answered")
}

/// How long an answer as those of the load takes alone.
pub(super) fn seconds_of_one(url: &str) -> anyhow::Result<f64> {
    let body = json!({"prompt": "One", "max_tokens": LOAD_TOKENS, "ignore_eos": true});
    let begun = Instant::now();
    curl(&format!("{url}/v1/completions"), &body)?;
    Ok(begun.elapsed().as_secs_f64())
}

pub(super) fn curl(endpoint: &str, body: &Value) -> anyhow::Result<Value> {
    let words = ["-sS", "--fail-with-body", "--max-time", "60", endpoint, "-H", "content-type: application/json", "-d"];
    let output = Command::new("curl").args(words).arg(body.to_string()).output().context("run curl")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "{endpoint}: {said}{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_str(&said).with_context(|| format!("read {said}"))
}

/// A greedy answer of the load's length, streamed, to one of many questions; what came of it when it was cut.
pub(super) fn streamed(url: &str, deployment: &str, question: usize) -> anyhow::Result<String> {
    let messages = json!([{"role": "user", "content": format!("What is {question} plus {question}?")}]);
    let body = json!({
        "model": deployment, "stream": true, "temperature": 0, "max_tokens": LOAD_TOKENS, "ignore_eos": true, "messages": messages,
    });
    let mut curl = Command::new("curl");
    curl.args(["-sN", &format!("{url}/v1/chat/completions"), "-H", "content-type: application/json", "-d"]);
    let mut curl = curl.arg(body.to_string()).stdout(Stdio::piped()).spawn().context("run curl")?;
    let lines = BufReader::new(curl.stdout.take().expect("stdout is piped")).lines();
    let (_, text) = demo::print_answer(lines, &mut io::sink())?;
    curl.wait().context("wait for curl")?;
    Ok(text)
}
