//! `kubectl stoker`: why a deployment has the replicas it has, and what other settings would have done. Reads only.

mod cluster;
mod dashboard;
mod explain;
mod operator;
mod records;
mod settings;
mod simulate;
mod status;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Looks at InferenceDeployments, explains their scaling and tries other settings.
#[derive(Debug, Parser)]
#[command(name = "kubectl-stoker", bin_name = "kubectl stoker", version)]
struct Cli {
    #[command(subcommand)]
    word: Word,
}

#[derive(Debug, Subcommand)]
enum Word {
    /// One deployment on one screen: replicas, KV, preemptions, the last decision, conditions.
    Status(status::Status),
    /// Why that many replicas? Explains scaling decisions from their records and makes each one again.
    Explain(explain::Explain),
    /// The operator's pages in a browser: all deployments, and why each has the replicas it has.
    Dashboard(dashboard::Dashboard),
    /// Runs the deciding function on a trace in virtual time, beside other autoscalers if you like.
    Simulate(simulate::Simulate),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    match Cli::parse().word {
        Word::Status(args) => status::status(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Explain(args) => explain::explain(&args).await,
        Word::Dashboard(args) => dashboard::dashboard(&args).await.map(|()| ExitCode::SUCCESS),
        Word::Simulate(args) => simulate::simulate(&args).map(|()| ExitCode::SUCCESS),
    }
}
