//! `bench-memory`: the memory that an agent holds at its peak on CPUs, beside what `kubectl stoker plan` says of its model's description
//! before anything is scheduled. The agent is filled as far as it was planned for: every sequence at its full length, all at once.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use futures::future::try_join_all;
use serde_json::{Value, json};
use stoker_figures::{self as figures, Figure, Key, Run, System};
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
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let run = Run::start("make bench-memory");
    let mut found = Vec::new();
    for model in &args.models {
        let stem = model.with_extension("");
        let path = if model.is_dir() { model } else { &stem };
        let called = path.file_name().context("a model has a name")?.to_string_lossy().into_owned();
        let of = |format: &'static str| Some((called.strip_suffix(format)?.strip_suffix('-')?, format));
        let (name, dtype) = FORMATS.into_iter().find_map(of).context("it is called NAME-FORMAT")?;
        let model = model.to_str().context("a path of text")?;
        let planned = planned_bytes(model)?;
        let peak = peak_bytes(model).await?;
        let percent = 100.0 * (planned as f64 - peak as f64) / peak as f64;
        println!("{name} {dtype}: {planned} planned, {peak} at the peak: {percent:+.1} %");
        let figure = |metric, value| -> Figure {
            run.figure_of(&System::stoker(), Key { model: name, dtype, case: "memory", metric }, &[value])
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

/// Weights, KV cache and workspace, as they are known from the description alone.
fn planned_bytes(model: &str) -> Result<u64> {
    let engine = json!({
        "maxModelLen": TOKENS, "maxNumSeqs": SEQUENCES, "maxBatchedTokens": STEP_TOKENS, "kvCacheTokens": TOKENS * SEQUENCES,
    });
    let manifest = tempfile::NamedTempFile::new()?;
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "measured"},
        "spec": {"model": {"source": format!("file://{model}")}, "engine": engine, "resources": {"memory": "64Gi"}},
    });
    fs::write(manifest.path(), object.to_string())?;
    let mut plan = Command::new(built("kubectl-stoker"));
    let output = plan.args(["plan", "--output", "json", "-f"]).arg(manifest.path()).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let plan: Value = serde_json::from_slice(&output.stdout)?;
    let number = |name: &str| plan[0]["plan"][name].as_u64().with_context(|| format!("the plan says {name}: {plan}"));
    Ok(number("weightsBytes")? + number("workspaceBytes")? + number("kvBytesPerToken")? * number("kvTokens")?)
}

/// What the kernel counted at most, when all sequences have ended.
async fn peak_bytes(model: &str) -> Result<u64> {
    let number = |flag: &str, value: u32| [format!("--{flag}"), value.to_string()];
    let numbers = [
        number("max-model-len", TOKENS),
        number("max-num-seqs", SEQUENCES),
        number("max-batched-tokens", STEP_TOKENS),
        number("kv-cache-tokens", TOKENS * SEQUENCES),
    ];
    let numbers: Vec<&str> = numbers.iter().flatten().map(String::as_str).collect();
    let agent = AgentProcess::ready(&[&["--model", model, "--device", "cpu"], numbers.as_slice()].concat()).await?;
    let models: Value = reqwest::get(agent.url("/v1/models")).await?.json().await?;
    let client = reqwest::Client::new();
    let answers = (0..SEQUENCES).map(|sequence| {
        // From all over the table, whose rows are read into memory when their tokens come.
        let length = TOKENS - COMPLETION_TOKENS;
        let token = |place: u32| (sequence * length + place) * VOCABULARY / (SEQUENCES * length);
        let prompt: Vec<u32> = (0..length).map(token).collect();
        let body = json!({
            "model": models["data"][0]["id"], "prompt": prompt, "max_tokens": COMPLETION_TOKENS, "ignore_eos": true,
        });
        let asked = client.post(agent.url("/v1/completions")).json(&body).send();
        async { anyhow::Ok(asked.await?.error_for_status()?.json::<Value>().await?) }
    });
    for answer in try_join_all(answers).await? {
        let tokens = answer["usage"]["total_tokens"].as_u64().context("it says how many tokens")?;
        ensure!(tokens == u64::from(TOKENS), "{tokens} tokens of {TOKENS}: the cache is not full");
    }
    agent.peak_bytes()
}
