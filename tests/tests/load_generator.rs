//! `stoker-load` as a person runs it, against a real agent: sessions, tools and schemas, several models, a key.

use std::{
    io::Write,
    process::{Command, Output},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use stoker_tests::{agent::AgentProcess, cluster::built};

const KEY: &str = "sk-of-the-load-generator";
/// Two models, sessions of two or three turns behind one beginning, a third of the answers JSON and a third tool calls.
const ARGS: &str = "--step 3s:3 --turns 2..3 --think 100ms --shared-tokens 64 --prompt-tokens 24..48 --max-tokens 96 --schemas 35% \
                    --tools 35% --model a=2 --model b --slo e2e=10m --slo ttft=10m,itl=1ms,e2e=1ms --json";

async fn agent() -> Result<(AgentProcess, tempfile::NamedTempFile)> {
    let mut keys = tempfile::NamedTempFile::new()?;
    writeln!(keys, "{KEY}")?;
    let path = keys.path().to_string_lossy().into_owned();
    let agent = AgentProcess::ready(&["--api-key-file", &path, "--served-name", "a", "--served-name", "b"]).await?;
    Ok((agent, keys))
}

fn stoker_load(key: &str, args: &[&str]) -> Result<Output> {
    let mut command = Command::new(built("stoker-load"));
    Ok(tokio::task::block_in_place(|| command.args(args).env("OPENAI_API_KEY", key).output())?)
}

fn count(of: &Value, at: &str) -> Result<u64> {
    of.pointer(at).and_then(Value::as_u64).with_context(|| format!("no count at {at} in {of}"))
}

/// The group of this sort and name.
fn group<'a>(summary: &'a Value, by: &str, name: &str) -> Result<&'a Value> {
    let groups = summary["groups"].as_array().context("groups")?;
    let found = groups.iter().find(|group| group["by"] == by && group["name"] == name);
    found.with_context(|| format!("no {by} {name} in {summary}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_two_models_get_the_json_and_the_calls_that_they_ask_for() -> Result<()> {
    let (agent, _keys) = agent().await?;
    let dir = tempfile::tempdir()?;
    let html = dir.path().join("load.html").to_string_lossy().into_owned();
    let args: Vec<&str> = ARGS.split_whitespace().chain(["--url", agent.base(), "--html", &html]).collect();
    let output = stoker_load(KEY, &args)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let summary: Value = serde_json::from_slice(&output.stdout)?;

    let planned = count(&summary, "/planned")?;
    ensure!(count(&summary, "/answered")? == planned && planned > 0, "{summary}");
    let of_kind = |kind| count(group(&summary, "kind", kind)?, "/planned");
    let (text, schema, tools) = (of_kind("text")?, of_kind("schema")?, of_kind("tools")?);
    ensure!(text > 0 && schema > 0 && tools > 0 && text + schema + tools == planned, "{summary}");
    let checked = |verdict| count(&summary, &format!("/checked/{verdict}"));
    let (valid, short) = (checked("valid")?, checked("short")?);
    ensure!(
        valid + short == schema + tools && checked("no_call")? + checked("invalid")? == 0 && valid > short,
        "{summary}"
    );
    ensure!(count(&summary, "/goodput/0/count")? == planned && count(&summary, "/goodput/1/count")? == 0, "{summary}");

    let (a, b) = (group(&summary, "model", "a")?, group(&summary, "model", "b")?);
    ensure!(count(a, "/planned")? + count(b, "/planned")? == planned, "{summary}");
    let tokens_a_prompt = |turn| {
        let of = group(&summary, "turn", turn)?;
        Ok::<_, anyhow::Error>(count(of, "/prompt_tokens")? as f64 / count(of, "/planned")? as f64)
    };
    // What is said first is 64 tokens longer, what comes later has it in front all the same, and the answer.
    ensure!(tokens_a_prompt("later")? > tokens_a_prompt("first")? + 24.0, "{summary}");
    let page = std::fs::read_to_string(&html)?;
    for words in [
        "By model, in seconds",
        "By kind",
        "By turn",
        "Milliseconds between pieces of text",
        "JSON and tool calls",
        "<svg",
    ] {
        ensure!(page.contains(words), "the report has no {words}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_let_in_is_told_what_to_give() -> Result<()> {
    let (agent, _keys) = agent().await?;
    for (key, args, words) in [
        (
            "sk-of-nobody",
            &["--model", "a"][..],
            "give a key that the endpoint knows, in OPENAI_API_KEY or by --api-key",
        ),
        (KEY, &["--model", "c"], "look for the model's name in /v1/models"),
    ] {
        let output = stoker_load(key, &[&["--url", agent.base(), "--step", "1s:1"], args].concat())?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && told.contains(words), "{told}");
        ensure!(!told.contains(KEY) && !told.contains("sk-of-nobody"), "no key is shown: {told}");
    }
    Ok(())
}
