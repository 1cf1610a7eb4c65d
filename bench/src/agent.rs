//! An agent process, and the completions that are streamed from it over HTTP. Measures time and memory from outside the
//! process; knows no case.

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use stoker_engine::EngineLimits;
use stoker_loadgen::{
    client::{Ask, Client, Connections, Ending, Form, Options, Prompt, Sampling},
    run::AnswerTiming,
    shape::Shape,
};
use tokio::runtime::Runtime;

use crate::in_process::Setup;

/// What the agent calls its model.
const NAME: &str = "bench";
/// A checkpoint of 16 GB that is not in the page cache takes a while.
const START_LIMIT: Duration = Duration::from_secs(180);
/// No answer takes longer: above it, something is broken.
const ANSWER_LIMIT: Duration = Duration::from_secs(600);
/// Between two attempts to reach an agent that starts: what a start is measured to.
const POLL: Duration = Duration::from_millis(2);
/// An agent that has answered settles for this long before its memory is read.
const SETTLE: Duration = Duration::from_secs(1);

/// How an agent is started and asked.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// The program.
    pub program: PathBuf,
    /// What it serves: a path, or a URL such as `builtin://ember`.
    pub model: PathBuf,
    /// Its other flags.
    pub flags: Vec<String>,
    /// What of the API is asked.
    pub form: Form,
    /// How it draws tokens.
    pub sampling: Sampling,
}

impl AgentOptions {
    /// An agent that does what an engine of `setup` would: greedy completions of tokens.
    pub fn of(program: &Path, setup: &Setup) -> Self {
        let mut flags = limit_flags(&setup.limits);
        flags.push(format!("--device={}", setup.device));
        let (program, model) = (program.to_owned(), setup.model.clone());
        Self { program, model, flags, form: Form::Completions, sampling: Sampling::Greedy }
    }
}

/// A started agent; killed when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    program: PathBuf,
    model: PathBuf,
    client: Client,
    runtime: Runtime,
    begun: Instant,
}

impl Agent {
    /// Starts it; it may not listen yet.
    pub fn spawn(options: &AgentOptions) -> Result<Self> {
        let AgentOptions { program, model, flags, form, sampling } = options;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // The port is free a moment before the agent binds it: good enough on a machine that only measures.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
        let client = Client::new(Options {
            url: format!("http://127.0.0.1:{port}"),
            form: *form,
            connections: Connections::Kept,
            ending: Ending::AtMaxTokens,
            sampling: *sampling,
            api_key: None,
        })?;
        let begun = Instant::now();
        let child = Command::new(program)
            .args([
                "--host",
                "127.0.0.1",
                "--port",
                &port,
                "--admin-port",
                "0",
                "--log",
                "error",
                "--served-name",
                NAME,
                "--model",
            ])
            .arg(model)
            .args(flags)
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("start {} (build stoker-agent, or name it with --agent)", program.display()))?;
        // As the system names a file that is mapped; what is no path is mapped from nowhere.
        let model = model.canonicalize().unwrap_or_else(|_| model.clone());
        Ok(Self { child, program: program.clone(), model, client, runtime, begun })
    }

    /// Seconds from exec until it has answered `prompt` with one token.
    pub fn first_token(&mut self, prompt: Prompt) -> Result<f64> {
        let ask = Ask { prompt, max_tokens: 1, seed: 0, shape: Shape::Text };
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status} before its first token", self.program.display());
            }
            match self.runtime.block_on(timing(&self.client, &ask)) {
                Ok(_) => return Ok(self.begun.elapsed().as_secs_f64()),
                Err(error) => ensure!(
                    self.begun.elapsed() < START_LIMIT,
                    "no first token within {} s: {error:#}",
                    START_LIMIT.as_secs()
                ),
            }
            std::thread::sleep(POLL);
        }
    }

    /// All answers, asked for at once, and the seconds from sending the first until the last has come to its end.
    pub fn together(&self, asks: &[Ask]) -> Result<(Vec<AnswerTiming>, f64)> {
        let begun = Instant::now();
        let timings = self.runtime.block_on(try_join_all(asks.iter().map(|ask| timing(&self.client, ask))))?;
        Ok((timings, begun.elapsed().as_secs_f64()))
    }

    /// Resident memory of the process.
    pub fn resident(&self) -> Result<Resident> {
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", self.child.id())).context("read smaps")?;
        Resident::of_maps(&maps, &self.model.display().to_string())
    }

    /// The same, when the process has settled after its last answer.
    pub fn settled(&self) -> Result<Resident> {
        std::thread::sleep(SETTLE);
        self.resident()
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

fn limit_flags(limits: &EngineLimits) -> Vec<String> {
    let given = |flag: &str, value: Option<u64>| value.map(|value| format!("--{flag}={value}"));
    let flags = [
        given("max-model-len", limits.max_model_len.map(u64::from)),
        given("max-num-seqs", limits.max_num_seqs.map(u64::from)),
        given("max-batched-tokens", limits.max_batched_tokens.map(u64::from)),
        given("max-waiting", Some(limits.max_waiting.into())),
        given("kv-cache-tokens", limits.kv_cache_tokens.map(u64::from)),
        given("threads", limits.threads.map(|threads| threads as u64)),
        limits.isa.map(|isa| format!("--cpu-isa={isa}")),
        limits.batch_invariant.then(|| "--batch-invariant=true".to_owned()),
        limits.quantization.map(|kind| format!("--quantization={}", kind.name())),
        limits.kv_cache_dtype.map(|kind| format!("--kv-cache-dtype={}", kind.name())),
        (limits.tensor_parallel > 1).then(|| format!("--tensor-parallel={}", limits.tensor_parallel)),
        (limits.pipeline_parallel > 1).then(|| format!("--pipeline-parallel={}", limits.pipeline_parallel)),
    ];
    flags.into_iter().flatten().collect()
}

/// One answer, which must be as long as asked: one that did less work would make the figure a lie.
async fn timing(client: &Client, ask: &Ask) -> Result<AnswerTiming> {
    let sent = Instant::now();
    let timing = AnswerTiming::of(&client.ask(NAME, ask, (sent + ANSWER_LIMIT).into()).await?, sent);
    let found = timing.usage.completion_tokens;
    ensure!(found == ask.max_tokens, "a stream ended after {found} of {} tokens", ask.max_tokens);
    Ok(timing)
}

#[cfg(test)]
mod tests {
    use stoker_engine::{KvCacheDtype, Quantization};

    use super::*;

    #[test]
    fn an_agent_is_told_what_figures_say_of_the_engine() {
        let quantised = EngineLimits {
            quantization: Some(Quantization::Fp8),
            kv_cache_dtype: Some(KvCacheDtype::Fp8),
            tensor_parallel: 2,
            pipeline_parallel: 2,
            batch_invariant: true,
            ..EngineLimits::default()
        };
        let flags = limit_flags(&quantised);
        for flag in [
            "--quantization=fp8",
            "--kv-cache-dtype=fp8",
            "--tensor-parallel=2",
            "--pipeline-parallel=2",
            "--batch-invariant=true",
        ] {
            assert!(flags.iter().any(|given| given == flag), "{flag}: {flags:?}");
        }
        assert_eq!(limit_flags(&EngineLimits::default()).len(), 1, "nothing but how many may wait");
    }

    #[test]
    fn mapped_weights_are_told_from_other_memory() {
        let maps = "7f00-7f10 r--s 00000000 fe:00 12    /models/m/model.safetensors\nSize: 64 kB\nRss:      2000 kB\n\
                    VmFlags: rd mr\n7f10-7f20 rw-p 00000000 00:00 0 \nRss:       500 kB\n";
        let found = Resident::of_maps(maps, "/models/m").unwrap();
        assert_eq!(found, Resident { all_mb: 2.56, mapped_model_mb: 2.048 });
        assert!(Resident::of_maps("", "/models/m").is_err());
    }
}
