//! `stoker-load`: arguments, the run, the summary. Progress goes to stderr, the summary to stdout.

mod progress;

use std::{fs, num::NonZeroUsize, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::{Args, Parser};
use serde::Serialize;
use stoker_loadgen::{
    client::{Client, Connections, Ending, Form, Options, Sampling},
    report::report,
    run::{Plan, Wish, run},
    summary::{Summary, Targets},
};
use stoker_workload::{Lengths, Request, Sizes, Steps, Trace};
use tokio::sync::mpsc;

/// Sends load to an OpenAI-compatible endpoint and measures what its users would feel.
///
/// The loop is open: requests leave when they were planned, as those of people do, whether or not earlier ones were
/// answered. Latencies count from the planned moment, so a server that stalls shows the stall in full.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    /// The endpoint, with or without /v1.
    #[arg(long, env = "STOKER_LOAD_URL")]
    url: String,
    /// Model to ask. Default: the first one that the endpoint lists.
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    load: Load,
    #[command(flatten)]
    asking: Asking,
    #[command(flatten)]
    good: Good,
    /// Print the summary as one JSON object.
    #[arg(long)]
    json: bool,
    /// Write a report with the course of latencies for a browser into this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  One request per second for half a minute, then eight for a minute:
    stoker-load --url http://localhost:8000 --step 30s:1,60s:8

  Long prompts of real variety, and how many users get a first token within half a second:
    stoker-load --url http://localhost:8000 --step 5m:2 --prompt-tokens lognormal:900:0.8 --ttft-ms 500

  The requests of a trace, for scripts:
    stoker-load --url http://localhost:8000 --trace monday.jsonl --json

A trace has one request a line, seconds from its beginning:
  {\"arrived\": 0.5, \"promptTokens\": 900, \"completionTokens\": 200}
It is the form that `kubectl stoker simulate --trace` reads, as are the Azure LLM traces of 2023 and 2024, BurstGPT
(CSV) and Mooncake (JSON) as published.

Words of the summary: ttft, to the first text; itl, between pieces of text; e2e, to the last text; goodput, answers that
met --ttft-ms and --itl-ms (the mean per token), of all planned. Percentiles are values that occurred. Ctrl-C stops
sending and waits for what is in flight; a second one does not wait. The exit status is 1 if nothing was answered.";

/// When requests leave, and how long they are.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
struct Load {
    /// Poisson arrivals with a rate that changes in steps: DURATION:RATE, several with commas. Requests per second.
    #[arg(long = "step", value_name = "STEPS", required_unless_present = "trace", conflicts_with = "trace")]
    steps: Option<Steps>,
    /// A file of requests instead.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Tokens of a prompt: 200, 100..400 or lognormal:MEDIAN:SIGMA.
    #[arg(long, default_value = "lognormal:200:0.6", value_name = "LENGTHS", conflicts_with = "trace")]
    prompt_tokens: Lengths,
    /// Completion tokens at most, in the same words.
    #[arg(long, default_value = "lognormal:100:0.6", value_name = "LENGTHS", conflicts_with = "trace")]
    max_tokens: Lengths,
    /// Seed of arrivals, lengths, prompts and sampling.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// How requests are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
struct Asking {
    /// Which endpoint.
    #[arg(long, value_enum, default_value = "chat")]
    form: Form,
    /// Whether each request connects anew (a Service spreads connections over replicas) or uses a kept connection.
    #[arg(long, value_enum, default_value = "fresh")]
    connections: Connections,
    /// Ask for exactly --max-tokens, by `ignore_eos`: vLLM and Stoker know it, others refuse it.
    #[arg(long)]
    ignore_eos: bool,
    /// Bearer token.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Longest time from the planned moment to the end of an answer.
    #[arg(long, default_value = "120s", value_parser = duration)]
    timeout: Duration,
    /// Requests in flight at most; one above it is counted as not sent rather than delayed.
    #[arg(long, default_value_t = NonZeroUsize::new(1000).expect("not zero"))]
    in_flight_max: NonZeroUsize,
}

/// What makes an answer good.
#[derive(Debug, Args)]
#[command(next_help_heading = "Goodput")]
struct Good {
    /// Target of the time to first token, in milliseconds.
    #[arg(long)]
    ttft_ms: Option<f64>,
    /// Target of the mean time per token after the first, in milliseconds.
    #[arg(long)]
    itl_ms: Option<f64>,
}

/// The summary and what it is of.
#[derive(Serialize)]
struct Report<'a> {
    url: &'a str,
    model: &'a str,
    #[serde(flatten)]
    summary: &'a Summary,
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = stoker_workload::seconds(text).ok_or("write a number and ms, s, m or h, such as 90s")?;
    Ok(Duration::from_secs_f64(seconds))
}

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let requests = requests(&cli.load)?;
    let client = Client::new(options(&cli))?;
    let model = match &cli.model {
        Some(model) => model.clone(),
        None => client.first_model().await?,
    };
    let plan = Plan {
        requests,
        token_count: client.token_count(&model).await?,
        model: model.clone(),
        seed: cli.load.seed,
        timeout: cli.asking.timeout,
        in_flight_max: cli.asking.in_flight_max.get(),
    };
    let mut line = progress::Line::new();
    let (outcomes, elapsed) = run(&client, plan, wishes(), |progress| line.show(progress)).await;
    line.end();
    let summary = Summary::of(&outcomes, elapsed, Targets { ttft_ms: cli.good.ttft_ms, itl_ms: cli.good.itl_ms });
    print(&cli, &Report { url: client.base(), model: &model, summary: &summary })?;
    if let Some(path) = &cli.html {
        let text = report(&format!("Load on {model} at {}", client.base()), &summary, &outcomes);
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(if summary.answered > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn requests(load: &Load) -> Result<Vec<Request>> {
    if let Some(path) = &load.trace {
        let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
        let read = Trace::read("trace", &text).with_context(|| format!("read {}", path.display()))?;
        read.tell(|told| eprintln!("{told}"));
        return Ok(read.trace.requests);
    }
    let steps = load.steps.as_ref().context("give --step or --trace")?;
    let requests = steps.requests(Sizes { prompt: load.prompt_tokens, completion: load.max_tokens }, load.seed);
    anyhow::ensure!(!requests.is_empty(), "no request falls into {steps}: make it longer, or raise the rate");
    Ok(requests)
}

fn options(cli: &Cli) -> Options {
    Options {
        url: cli.url.clone(),
        form: cli.asking.form,
        connections: cli.asking.connections,
        ending: if cli.asking.ignore_eos { Ending::AtMaxTokens } else { Ending::Natural },
        sampling: Sampling::OfModel,
        api_key: cli.asking.api_key.clone(),
    }
}

/// The first Ctrl-C finishes, the second abandons.
fn wishes() -> mpsc::Receiver<Wish> {
    let (wish, wishes) = mpsc::channel(1);
    tokio::spawn(async move {
        let mut next = Wish::Finish;
        while tokio::signal::ctrl_c().await.is_ok() {
            if wish.send(next).await.is_err() {
                return;
            }
            next = Wish::Abandon;
        }
    });
    wishes
}

fn print(cli: &Cli, report: &Report<'_>) -> Result<()> {
    if cli.json {
        println!("{}", serde_json::to_string(report)?);
    } else {
        println!("{} at {}\n{}", report.model, report.url, report.summary);
    }
    Ok(())
}
