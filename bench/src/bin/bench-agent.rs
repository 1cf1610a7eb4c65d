//! `bench-agent`: the agent as its first user meets it, on the model inside it and through the chat API: start, memory, one
//! stream and 64 streams. `stoker-bench` measures engines on shapes and beside peers; this is what HTTP, template and text
//! leave of it. Figures are appended to a results file in the form of docs/benchmarks.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;
use stoker_bench::agent::{Agent, AgentOptions};
use stoker_figures::{self as figures, Figure, Key, Run};
use stoker_loadgen::{
    client::{Ask, Form, Prompt, Sampling},
    run::AnswerTiming,
    shape::Shape,
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
const COMPLETION_TOKENS: u32 = 128;

fn main() -> Result<()> {
    let args = Args::parse();
    let program = match &args.agent {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("stoker-agent"),
    };
    let model = "builtin://ember".into();
    let agent = AgentOptions { program, model, flags: Vec::new(), form: Form::Chat, sampling: Sampling::OfModel };
    let run = Run::start("make bench");
    let mut found = starts(&run, &agent, args.samples)?;
    found.extend(streams(&run, &agent, args.samples)?);
    found.iter().for_each(|figure| println!("{:>16} {:<10} {:.4}", figure.case, figure.metric, figure.value));
    figures::append(&args.out, &found)
}

fn key<'a>(case: &'a str, metric: &'a str) -> Key<'a> {
    Key { model: MODEL, dtype: "bf16", case, metric }
}

/// From exec to the first token, and the memory held right after it.
fn starts(run: &Run, options: &AgentOptions, samples: usize) -> Result<Vec<Figure>> {
    let (mut seconds, mut rss) = (Vec::new(), Vec::new());
    for _ in 0..samples {
        let mut agent = Agent::spawn(options)?;
        seconds.push(agent.first_token(hello())?);
        rss.push(agent.settled()?.all_mb);
    }
    Ok(vec![run.figure(key("start", "seconds"), &seconds), run.figure(key("idle", "rss_mb"), &rss)])
}

/// One stream alone, then 64 together. A stream that errs ends the benchmark: 64 streams without an error is the claim.
fn streams(run: &Run, options: &AgentOptions, samples: usize) -> Result<Vec<Figure>> {
    let mut agent = Agent::spawn(options)?;
    agent.first_token(hello())?;
    let (mut single, mut itl, mut many, mut rss) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..samples {
        let (timings, seconds) = agent.together(&asks(1))?;
        single.push(tokens(&timings) / seconds);
        itl.push(timings[0].time_per_token().context("more than one token")?.as_secs_f64() * 1e3);
        let (timings, seconds) = agent.together(&asks(STREAMS))?;
        many.push(tokens(&timings) / seconds);
        rss.push(agent.resident()?.all_mb);
    }
    let together = format!("concurrent_{STREAMS}");
    Ok(vec![
        run.figure(key("single_stream", "tok_s"), &single),
        run.figure(key("single_stream", "itl_ms"), &itl),
        run.figure(key(&together, "tok_s"), &many),
        run.figure(key(&together, "rss_mb"), &rss),
    ])
}

fn hello() -> Prompt {
    Prompt::Text("Hello".to_owned())
}

fn asks(n: usize) -> Vec<Ask> {
    let ask = |idx| Ask {
        prompt: Prompt::Text(format!("Count from {idx} to {}.", idx + 40)),
        max_tokens: COMPLETION_TOKENS,
        seed: idx as u64,
        shape: Shape::Text,
    };
    (0..n).map(ask).collect()
}

fn tokens(timings: &[AnswerTiming]) -> f64 {
    timings.iter().map(|timing| f64::from(timing.usage.completion_tokens)).sum()
}
