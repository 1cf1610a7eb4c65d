//! `bench-memory`: the memory that an agent holds at its peak, on CPUs or on a GPU, beside what `kubectl stoker plan` says of its
//! model's description before anything is scheduled. The agent is filled as far as it was planned for: every sequence at its full
//! length, all at once, one of them with the probabilities of its prompt, which GPUs do not read.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread::{self, JoinHandle},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use futures::future::try_join_all;
use serde_json::{Value, json};
use stoker_figures::{self as figures, Conditions, Figure, Key, Run, System};
use stoker_tests::{agent::AgentProcess, cluster::built};

/// What `stoker-bench checkpoint` and llama.cpp call formats.
const FORMATS: [&str; 6] = ["bf16", "f32", "int4", "fp8-stored", "q8_0", "q4_0"];
/// Tokens that every model here has.
const VOCABULARY: u32 = 32_000;
const SEQUENCES: u32 = 8;
const TOKENS: u32 = 512;
const COMPLETION_TOKENS: u32 = 32;
/// Of a step: prompts are computed in pieces of this size.
const STEP_TOKENS: u32 = 512;

/// Measures memory on this machine.
#[derive(Debug, Parser)]
struct Args {
    /// Models: directories or .gguf files called NAME-FORMAT, as `stoker-bench checkpoint` calls them.
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// File that figures are appended to. Default: they are only printed.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Measure on the first GPU, which is of this kind: H200, as `kubectl stoker plan --gpu` has it. Default: on the CPUs.
    #[arg(long)]
    gpu: Option<String>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let on_gpu = figures::gpus().filter(|_| args.gpu.is_some());
    let (case, command) =
        if on_gpu.is_some() { ("memory_gpu", "make bench-memory-gpu") } else { ("memory", "make bench-memory") };
    let here = Conditions::here(command);
    let run = Run::under(Conditions { machine: on_gpu.unwrap_or(here.machine), ..here });
    let mut found = Vec::new();
    for model in &args.models {
        let stem = model.with_extension("");
        let path = if model.is_dir() { model } else { &stem };
        let called = path.file_name().context("a model has a name")?.to_string_lossy().into_owned();
        let of = |format: &'static str| Some((called.strip_suffix(format)?.strip_suffix('-')?, format));
        let (name, dtype) = FORMATS.into_iter().find_map(of).context("it is called NAME-FORMAT")?;
        let model = model.to_str().context("a path of text")?;
        let gpu = args.gpu.as_deref();
        let planned = planned_bytes(model, gpu)?;
        let peak = if gpu.is_some() { peak_on_gpu(model).await? } else { peak_on_host(model).await? };
        let percent = 100.0 * (planned as f64 - peak as f64) / peak as f64;
        println!("{name} {dtype}: {planned} planned, {peak} at the peak: {percent:+.1} %");
        let figure = |metric, value| -> Figure {
            run.figure_of(&System::stoker(), Key { model: name, dtype, case, metric }, &[value])
        };
        let mb = |bytes: u64| bytes as f64 / 1e6;
        found.extend([
            figure("planned_mb", mb(planned)),
            figure("peak_mb", mb(peak)),
            figure("plan_error_percent", percent),
        ]);
    }
    args.out.map_or(Ok(()), |out| figures::append(&out, &found))
}

/// Weights, KV cache and workspace, and what a GPU's driver takes, as they are known from the description alone.
fn planned_bytes(model: &str, gpu: Option<&str>) -> Result<u64> {
    let engine = json!({
        "maxModelLen": TOKENS, "maxNumSeqs": SEQUENCES, "maxBatchedTokens": STEP_TOKENS, "kvCacheTokens": TOKENS * SEQUENCES,
    });
    let manifest = tempfile::NamedTempFile::new()?;
    let resources = if gpu.is_some() { json!({"gpus": 1}) } else { json!({"memory": "64Gi"}) };
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "measured"},
        "spec": {"model": {"source": format!("file://{model}")}, "engine": engine, "resources": resources},
    });
    fs::write(manifest.path(), object.to_string())?;
    let mut plan = Command::new(built("kubectl-stoker"));
    plan.args(["plan", "--output", "json", "-f"]).arg(manifest.path());
    gpu.map(|kind| plan.args(["--gpu", kind]));
    let output = plan.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout)?;
    let number = |name: &str| plan[0]["plan"][name].as_u64().with_context(|| format!("the plan says {name}: {plan}"));
    let taken = plan[0]["place"]["takenBytes"].as_u64().unwrap_or(0);
    Ok(taken + number("weightsBytes")? + number("workspaceBytes")? + number("kvBytesPerToken")? * number("kvTokens")?)
}

/// What the kernel counted at most, when all sequences have ended.
async fn peak_on_host(model: &str) -> Result<u64> {
    filled(model, "cpu").await?.peak_bytes()
}

/// What the first GPU's driver said at most until all sequences have ended, less what it said before.
async fn peak_on_gpu(model: &str) -> Result<u64> {
    let before = Meter::start()?.stop()?;
    let meter = Meter::start()?;
    let agent = filled(model, "cuda:0").await?;
    let peak = meter.stop()?;
    drop(agent);
    Ok(peak - before)
}

/// Reads the memory in use of the first GPU, every 20 ms.
struct Meter {
    nvidia_smi: Child,
    /// Becomes the most bytes that were read.
    reading: JoinHandle<Result<u64>>,
}

impl Meter {
    fn start() -> Result<Self> {
        let mut nvidia_smi = Command::new("nvidia-smi")
            .args(["--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=20"])
            .stdout(Stdio::piped())
            .spawn()
            .context("nvidia-smi tells a GPU's memory")?;
        let mut lines = BufReader::new(nvidia_smi.stdout.take().context("its output")?).lines();
        let mib = |line: std::io::Result<String>| -> Result<u64> { Ok(line?.trim().parse()?) };
        let first = mib(lines.next().context("nvidia-smi says a number")?)?;
        let reading = thread::spawn(move || {
            let most = lines.try_fold(first, |most, line| anyhow::Ok(most.max(mib(line)?)))?;
            Ok(most << 20)
        });
        Ok(Self { nvidia_smi, reading })
    }

    fn stop(mut self) -> Result<u64> {
        self.nvidia_smi.kill()?;
        self.nvidia_smi.wait()?;
        self.reading.join().ok().context("reading does not panic")?
    }
}

/// An agent all of whose sequences have had their full length.
async fn filled(model: &str, device: &str) -> Result<AgentProcess> {
    let number = |flag: &str, value: u32| [format!("--{flag}"), value.to_string()];
    let numbers = [
        number("max-model-len", TOKENS),
        number("max-num-seqs", SEQUENCES),
        number("max-batched-tokens", STEP_TOKENS),
        number("kv-cache-tokens", TOKENS * SEQUENCES),
    ];
    let numbers: Vec<&str> = numbers.iter().flatten().map(String::as_str).collect();
    let agent = AgentProcess::ready(&[&["--model", model, "--device", device], numbers.as_slice()].concat()).await?;
    let models: Value = reqwest::get(agent.url("/v1/models")).await?.json().await?;
    let client = reqwest::Client::new();
    let answers = (0..SEQUENCES).map(|sequence| {
        // From all over the table, whose rows are read into memory when their tokens come.
        let length = TOKENS - COMPLETION_TOKENS;
        let token = |place: u32| (sequence * length + place) * VOCABULARY / (SEQUENCES * length);
        let prompt: Vec<u32> = (0..length).map(token).collect();
        let body = json!({
            "model": models["data"][0]["id"], "prompt": prompt, "max_tokens": COMPLETION_TOKENS, "ignore_eos": true,
            "prompt_logprobs": (sequence == 0 && device == "cpu").then_some(1),
        });
        let asked = client.post(agent.url("/v1/completions")).json(&body).send();
        async { anyhow::Ok(asked.await?.error_for_status()?.json::<Value>().await?) }
    });
    for answer in try_join_all(answers).await? {
        let tokens = answer["usage"]["total_tokens"].as_u64().context("it says how many tokens")?;
        ensure!(tokens == u64::from(TOKENS), "{tokens} tokens of {TOKENS}: the cache is not full");
    }
    Ok(agent)
}
