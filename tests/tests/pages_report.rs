//! Reports of the simulator, the load generator and the bench in a real browser, from files: they stand by themselves.

use std::{path::Path, process::Command};

use anyhow::{Result, ensure};
use stoker_tests::{
    agent::AgentProcess,
    browser::Browser,
    cluster::built,
    looks::{draw_one, looks_well},
};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../");
const FIGURES: &str = "docs/benchmarks/results/cpu.jsonl";
/// A run of these with a peer.
const RUN: &str = "2026-11-23T16:36-18722";

/// Runs a program of ours.
fn run(program: &str, args: &[&str]) -> Result<()> {
    let output = Command::new(built(program)).args(args).output()?;
    ensure!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A report as people find it: nobody is kept out, nothing is cut off, nothing is asked for; a picture where they are wanted.
async fn look(browser: &Browser, test: &str, name: &str, path: &Path) -> Result<()> {
    browser.open(&format!("file://{}", path.display())).await?;
    browser.wait_for("svg").await?;
    let asked = browser.value("performance.getEntriesByType('resource').length").await?;
    ensure!(asked == 0, "{asked} files are asked for");
    looks_well(browser, test).await?;
    draw_one(browser, &format!("report-{name}")).await?;
    ensure!(browser.complaints().is_empty(), "{name} complains");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_stand_by_themselves() -> Result<()> {
    let test = "reports_stand_by_themselves";
    let dir = tempfile::tempdir()?;
    let [out, load, bench] = ["out", "load.html", "bench.html"].map(|name| dir.path().join(name));
    let simulate = ["simulate", "--trace", "step", "--against", "kpa:target=0.7", "--out", &out.to_string_lossy()];
    tokio::task::block_in_place(|| run("kubectl-stoker", &simulate))?;
    let agent = AgentProcess::ready(&[]).await?;
    let html = load.to_string_lossy();
    let load_args = "--step 3s:2,3s:6 --max-tokens 16 --turns 1..2 --tools 30% --slo ttft=1s,itl=100ms";
    let args: Vec<&str> = load_args.split_whitespace().chain(["--url", agent.base(), "--html", &html]).collect();
    tokio::task::block_in_place(|| run("stoker-load", &args))?;
    let (figures, html) = (ROOT.to_owned() + FIGURES, bench.to_string_lossy());
    tokio::task::block_in_place(|| run("stoker-bench", &["report", &figures, "--run", RUN, "--html", &html]))?;

    let Some(browser) = Browser::start(test).await? else { return Ok(()) };
    look(&browser, test, "simulation", &out.join("report.html")).await?;
    ensure!(browser.text("table").await?.contains("kpa"), "the rival stands in the table");
    look(&browser, test, "load", &load).await?;
    ensure!(browser.text("main").await?.contains("Answered a second"), "the summary stands in the report");
    look(&browser, test, "bench", &bench).await?;
    ensure!(browser.text("main").await?.contains("llama.cpp"), "the peer stands beside us");
    Ok(())
}
