//! The command line: what can be asked for, in words that teach, and what means nothing together.

use std::{num::NonZeroUsize, path::PathBuf, str::FromStr, time::Duration};

use anyhow::{Result, ensure};
use clap::{Args, Parser};
use stoker_loadgen::{
    client::{Connections, Form},
    shape::ToolChoice,
    slo::Slo,
};
use stoker_workload::{Lengths, Steps};

/// Sends load to an OpenAI-compatible endpoint and measures what its users would feel.
///
/// The loop is open: requests leave when they were planned, as those of people do, whether or not earlier ones were
/// answered. Latencies count from the planned moment, so a server that stalls shows the stall in full.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// The endpoint, with or without /v1.
    #[arg(long, env = "STOKER_LOAD_URL")]
    pub(crate) url: String,
    /// Model to ask; several, each with its weight, share the sessions. Default: the first one that the endpoint lists.
    #[arg(long = "model", value_name = "NAME[=WEIGHT]")]
    pub(crate) models: Vec<Weighted>,
    #[command(flatten)]
    pub(crate) load: Load,
    #[command(flatten)]
    pub(crate) sessions: Sessions,
    #[command(flatten)]
    pub(crate) answers: Answers,
    #[command(flatten)]
    pub(crate) asking: Asking,
    #[command(flatten)]
    pub(crate) good: Good,
    /// Print the summary as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a report with the course of latencies for a browser into this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  One request per second for half a minute, then eight for a minute:
    stoker-load --url http://localhost:8000 --step 30s:1,60s:8

  Long prompts of real variety, and how many users get a first token within half a second:
    stoker-load --url http://localhost:8000 --step 5m:2 --prompt-tokens lognormal:900:0.8 --slo ttft=500ms

  Chats of two to six turns behind one system prompt, with some ten seconds to think; two levels of service; a page to look at:
    stoker-load --url http://localhost:8000 --step 5m:1 --turns 2..6 --think 10s --shared-tokens 800 \\
      --slo ttft=1s,itl=50ms --slo e2e=20s --html chats.html

  Three quarters of the load on one model, the rest on another; a tenth of the answers are tool calls, a fifth JSON:
    OPENAI_API_KEY=... stoker-load --url https://gateway.example --model large=3 --model small \\
      --step 2m:4 --tools 10% --schemas 20%

  The requests of a trace, for scripts:
    stoker-load --url http://localhost:8000 --trace monday.jsonl --json

A trace has one request a line, seconds from its beginning:
  {\"arrived\": 0.5, \"promptTokens\": 900, \"completionTokens\": 200}
It is the form that `kubectl stoker simulate --trace` reads, as are the Azure LLM traces of 2023 and 2024, BurstGPT
(CSV) and Mooncake (JSON) as published.

Words of the summary: ttft, to the first text; itl, between pieces of text; e2e, to the last text; goodput, answers that
met all bounds of a --slo (itl is the mean per token there) and were what was asked for, of all planned; checked, what JSON
and tool calls turned out to be. Percentiles are values that occurred. Ctrl-C stops sending and waits for what is in flight; a
second one does not wait. The exit status is 1 if nothing was answered.";

/// When requests leave, and how long they are.
#[derive(Debug, Args)]
#[command(next_help_heading = "Load")]
pub(crate) struct Load {
    /// Poisson arrivals with a rate that changes in steps: DURATION:RATE, several with commas. Sessions per second; a session is one
    /// request unless --turns says more.
    #[arg(long = "step", value_name = "STEPS", required_unless_present = "trace", conflicts_with = "trace")]
    pub(crate) steps: Option<Steps>,
    /// A file of requests instead.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Tokens of a prompt, in later turns of what is new: 200, 100..400 or lognormal:MEDIAN:SIGMA.
    #[arg(long, default_value = "lognormal:200:0.6", value_name = "LENGTHS", conflicts_with = "trace")]
    pub(crate) prompt_tokens: Lengths,
    /// Completion tokens at most, in the same words.
    #[arg(long, default_value = "lognormal:100:0.6", value_name = "LENGTHS", conflicts_with = "trace")]
    pub(crate) max_tokens: Lengths,
    /// Seed of arrivals, lengths, prompts and sampling.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// What users do after their first answer, and what they have in common.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sessions")]
pub(crate) struct Sessions {
    /// Turns of a session, in the words of --prompt-tokens. Each sends all that was said before, the model's own answers too; a turn that
    /// fails ends its session.
    #[arg(long, default_value = "1", value_name = "LENGTHS", conflicts_with = "trace")]
    pub(crate) turns: Lengths,
    /// Mean time from an answer to the next turn; single times are exponential.
    #[arg(long, default_value = "0s", value_parser = duration)]
    pub(crate) think: Duration,
    /// Tokens in front of each session's first prompt that are the same in all, as a system prompt is.
    #[arg(long, default_value_t = 0, value_name = "TOKENS", conflicts_with = "trace")]
    pub(crate) shared_tokens: u32,
}

/// What some answers have to be. They are checked and counted; a wrong one is not good.
#[derive(Debug, Args)]
#[command(next_help_heading = "JSON and tools")]
pub(crate) struct Answers {
    /// Part of requests that ask for JSON of a schema (`response_format`, strict), such as 20%.
    #[arg(long, default_value = "0%", value_name = "SHARE", value_parser = share)]
    pub(crate) schemas: f64,
    /// A JSON Schema for these; several are drawn from. Default: three small ones.
    #[arg(long = "schema-file", value_name = "FILE")]
    pub(crate) schema_files: Vec<PathBuf>,
    /// Part of requests that offer tools.
    #[arg(long, default_value = "0%", value_name = "SHARE", value_parser = share)]
    pub(crate) tools: f64,
    /// A JSON list of tools, as requests have it. Default: two small ones.
    #[arg(long, value_name = "FILE")]
    pub(crate) tools_file: Option<PathBuf>,
    /// Whether a tool has to be called.
    #[arg(long, value_enum, default_value = "required")]
    pub(crate) tool_choice: ToolChoice,
}

/// How requests are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Requests")]
pub(crate) struct Asking {
    /// Which endpoint.
    #[arg(long, value_enum, default_value = "chat")]
    pub(crate) form: Form,
    /// Whether each request connects anew (a Service spreads connections over replicas) or uses a kept connection.
    #[arg(long, value_enum, default_value = "fresh")]
    pub(crate) connections: Connections,
    /// Ask for exactly --max-tokens, by `ignore_eos`: vLLM and Stoker know it, others refuse it.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Bearer token.
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Longest time from the planned moment to the end of an answer.
    #[arg(long, default_value = "120s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Requests in flight at most; one above it is counted as not sent rather than delayed.
    #[arg(long, default_value_t = NonZeroUsize::new(1000).expect("not zero"))]
    pub(crate) in_flight_max: NonZeroUsize,
}

/// What makes an answer good.
#[derive(Debug, Args)]
#[command(next_help_heading = "Goodput")]
pub(crate) struct Good {
    /// Bounds that a good answer keeps, all of them: ttft, itl and e2e, such as ttft=500ms,itl=40ms. Several are counted one by one.
    #[arg(long = "slo", value_name = "BOUNDS")]
    pub(crate) slos: Vec<Slo>,
}

/// A model and how often it is asked, in relation to the others.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Weighted {
    pub(crate) name: String,
    pub(crate) weight: f64,
}

impl FromStr for Weighted {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (name, weight) = text.rsplit_once('=').unwrap_or((text, "1"));
        let weight = weight.parse().ok().filter(|weight: &f64| *weight > 0.0 && weight.is_finite());
        match (name, weight) {
            ("", _) | (_, None) => Err("write a name, or a name and a weight above 0, such as chat=3".to_owned()),
            (name, Some(weight)) => Ok(Self { name: name.to_owned(), weight }),
        }
    }
}

impl Cli {
    /// What clap cannot say: options that mean nothing together.
    pub(crate) fn check(&self) -> Result<()> {
        let Answers { schemas, tools, .. } = self.answers;
        ensure!(schemas + tools <= 1.0, "--schemas and --tools are more than all requests together: lower one");
        let is_free = schemas + tools == 0.0;
        ensure!(
            is_free || !self.asking.ignore_eos,
            "--ignore-eos has no end for JSON and tool calls: leave it out, or --schemas and --tools"
        );
        ensure!(is_free || self.asking.form == Form::Chat, "--schemas and --tools need --form chat");
        let is_single = self.sessions.turns == Lengths::Fixed(1);
        ensure!(is_single || self.asking.form == Form::Chat, "--turns needs --form chat");
        let mut names: Vec<_> = self.models.iter().map(|model| &model.name).collect();
        names.sort_unstable();
        let twice = names.windows(2).find(|pair| pair[0] == pair[1]);
        ensure!(
            twice.is_none(),
            "--model {} is given twice: give it once, with the sum as its weight",
            twice.map_or("", |pair| pair[0])
        );
        Ok(())
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = stoker_workload::seconds(text).ok_or("write a number and ms, s, m or h, such as 90s")?;
    Ok(Duration::from_secs_f64(seconds))
}

fn share(text: &str) -> Result<f64, String> {
    let percent: Option<f64> = text.strip_suffix('%').and_then(|percent| percent.parse().ok());
    let share = percent.filter(|percent| (0.0..=100.0).contains(percent)).map(|percent| percent / 100.0);
    share.ok_or_else(|| "write a percentage from 0% to 100%, such as 20%".to_owned())
}
