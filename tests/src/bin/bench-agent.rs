//! `bench-agent`: starts the agent on `ember` and measures start, memory, one stream and 64 streams. Figures are appended
//! to a results file in the form of docs/benchmarks.

use std::{
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use futures::future::try_join_all;
use stoker_figures::{self as figures, Figure, Key, Run};
use stoker_loadgen::{
    client::{Ask, Client, Connections, Ending, Form, Options},
    run::Heard,
};

/// Measures the agent on its embedded model, on this machine's CPU.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to.
    #[arg(long, default_value = "docs/benchmarks/results/agent.jsonl")]
    out: PathBuf,
    /// The agent to measure. Default: the one beside this program.
    #[arg(long)]
    agent: Option<PathBuf>,
    /// Samples of each case.
    #[arg(long, default_value_t = 5)]
    samples: usize,
}

const MODEL: &str = "ember";
const STREAMS: usize = 64;
const START_LIMIT: Duration = Duration::from_secs(60);
const ANSWER_LIMIT: Duration = Duration::from_secs(300);

/// A started agent; killed when dropped.
struct Agent {
    child: Child,
    client: Client,
}

impl Agent {
    fn spawn(program: &PathBuf) -> Result<Self> {
        // The port is free a moment before the agent binds it: good enough on a machine that only measures.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let child = Command::new(program)
            .args(["--model", "builtin://ember", "--host", "127.0.0.1", "--port", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let client = Client::new(Options {
            url: format!("http://127.0.0.1:{port}"),
            form: Form::Chat,
            connections: Connections::Kept,
            ending: Ending::AtMaxTokens,
            api_key: None,
        })?;
        Ok(Self { child, client })
    }

    fn rss_mb(&self) -> Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        let kib: f64 = line.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kib * 1024.0 / 1e6)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let program = match &args.agent {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("stoker-agent"),
    };
    let run = Run::start("make bench");
    let mut found = starts(&run, &program, args.samples).await?;
    found.extend(streams(&run, &program, args.samples).await?);
    found.iter().for_each(|figure| println!("{:>16} {:<10} {:.4}", figure.case, figure.metric, figure.value));
    figures::append(&args.out, &found)
}

fn key<'a>(case: &'a str, metric: &'a str) -> Key<'a> {
    Key { model: MODEL, dtype: "bf16", case, metric }
}

/// From exec to the first token, and the memory held right after it.
async fn starts(run: &Run, program: &PathBuf, samples: usize) -> Result<Vec<Figure>> {
    let (mut seconds, mut rss) = (Vec::new(), Vec::new());
    for seed in 0..samples {
        let begun = Instant::now();
        let agent = Agent::spawn(program)?;
        first_token(&agent, seed as u64, begun).await?;
        seconds.push(begun.elapsed().as_secs_f64());
        tokio::time::sleep(Duration::from_secs(1)).await;
        rss.push(agent.rss_mb()?);
    }
    Ok(vec![run.figure(key("start", "seconds"), &seconds), run.figure(key("idle", "rss_mb"), &rss)])
}

async fn first_token(agent: &Agent, seed: u64, begun: Instant) -> Result<()> {
    let ask = Ask { prompt: "Hello".to_owned(), max_tokens: 1, seed };
    loop {
        match heard(agent, &ask).await {
            Ok(_) => return Ok(()),
            Err(error) => ensure!(begun.elapsed() < START_LIMIT, "no first token in {START_LIMIT:?}: {error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// One stream alone, then 64 together. A stream that errs ends the benchmark: 64 streams without an error is the claim.
async fn streams(run: &Run, program: &PathBuf, samples: usize) -> Result<Vec<Figure>> {
    let agent = Agent::spawn(program)?;
    first_token(&agent, 0, Instant::now()).await?;
    let (mut single, mut itl, mut many, mut rss) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..samples {
        let (heard, seconds) = together(&agent, 1).await?;
        single.push(tokens(&heard) / seconds);
        itl.push(heard[0].time_per_token().context("more than one token")?.as_secs_f64() * 1e3);
        let (heard, seconds) = together(&agent, STREAMS).await?;
        many.push(tokens(&heard) / seconds);
        rss.push(agent.rss_mb()?);
    }
    let together = format!("concurrent_{STREAMS}");
    Ok(vec![
        run.figure(key("single_stream", "tok_s"), &single),
        run.figure(key("single_stream", "itl_ms"), &itl),
        run.figure(key(&together, "tok_s"), &many),
        run.figure(key(&together, "rss_mb"), &rss),
    ])
}

/// One streamed answer, timed from its sending.
async fn heard(agent: &Agent, ask: &Ask) -> Result<Heard> {
    let sent = Instant::now();
    let answer = agent.client.ask(MODEL, ask, (sent + ANSWER_LIMIT).into()).await?;
    Ok(Heard::of(&answer, sent))
}

async fn together(agent: &Agent, n: usize) -> Result<(Vec<Heard>, f64)> {
    let asks: Vec<_> = (0..n)
        .map(|idx| Ask { prompt: format!("Count from {idx} to {}.", idx + 40), max_tokens: 128, seed: idx as u64 })
        .collect();
    let begun = Instant::now();
    let heard = try_join_all(asks.iter().map(|ask| heard(agent, ask))).await?;
    Ok((heard, begun.elapsed().as_secs_f64()))
}

fn tokens(heard: &[Heard]) -> f64 {
    heard.iter().map(|heard| f64::from(heard.usage.completion_tokens)).sum()
}
