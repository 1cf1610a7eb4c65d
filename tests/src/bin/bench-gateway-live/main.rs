//! `bench-gateway-live`: what clients of real replicas see through the gateway. Agents with ember on this machine's cores: one is killed, or
//! stands still, under many streams; a tenant asks for ten times its share beside others; prompts that share beginnings, by the gateway and by
//! others' rules.

mod fairness;
mod loss;
mod routes;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use stoker_figures::{self as figures, Figure, Key, Run, System};

use loss::Loss;
use routes::Kind;

/// Measures what clients of real replicas see through the gateway.
#[derive(Debug, Parser)]
struct Args {
    /// File that figures are appended to. Default: none is written.
    #[arg(long)]
    out: Option<PathBuf>,
    /// What is measured. Default: all of it.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Part::ALL)]
    parts: Vec<Part>,
    /// Replicas.
    #[arg(long, default_value_t = 4)]
    replicas: usize,
    /// Streams under which one of them is lost.
    #[arg(long, default_value_t = 200)]
    streams: u64,
    /// Completion tokens of each of them: they must last until then.
    #[arg(long, default_value_t = 200)]
    stream_tokens: u32,
    /// Times that everything is done.
    #[arg(long, default_value_t = 5)]
    times: u64,
    /// Seconds of each load.
    #[arg(long, default_value_t = 40)]
    seconds: u64,
    /// How many sessions begin where rules of routing are compared, beside what is usual.
    #[arg(long, default_value_t = 1.0)]
    pace: f64,
    /// What is asked there.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Agents])]
    kinds: Vec<Kind>,
    /// Argument of every replica, such as `--agent-arg=--threads=3` where there are more cores than two, which no replica should have all of.
    #[arg(long = "agent-arg", allow_hyphen_values = true)]
    agent_args: Vec<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
enum Part {
    Kill,
    Freeze,
    Fairness,
    Routes,
}

impl Part {
    const ALL: [Self; 4] = [Self::Kill, Self::Freeze, Self::Fairness, Self::Routes];
}

struct Bench {
    run: Run,
    args: Args,
    found: Vec<Figure>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let mut bench = Bench { run: Run::start("make bench-gateway-live"), args, found: Vec::new() };
    for part in bench.args.parts.clone() {
        match part {
            Part::Kill => bench.lose(Loss::Killed).await?,
            Part::Freeze => bench.lose(Loss::Frozen).await?,
            Part::Fairness => bench.fairness().await?,
            Part::Routes => bench.routes().await?,
        }
    }
    match &bench.args.out {
        Some(out) => figures::append(out, &bench.found),
        None => Ok(()),
    }
}

impl Bench {
    /// Arguments of every agent, and these.
    fn agent_args<'a>(&'a self, others: &[&'a str]) -> Vec<&'a str> {
        self.args.agent_args.iter().map(String::as_str).chain(others.iter().copied()).collect()
    }

    fn note(&mut self, system: &System, case: &str, metric: &str, samples: &[f64]) {
        let figure = self.run.figure_of(system, Key { model: "ember", dtype: "bf16", case, metric }, samples);
        println!("{case} {}: {metric} {:.3} ({:.3} to {:.3})", system.name, figure.value, figure.min, figure.max);
        self.found.push(figure);
    }
}

fn percentile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}
