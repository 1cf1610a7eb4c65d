//! `stoker-gateway`: arguments, log, listen, follow the operator, serve until SIGTERM.

use std::{io::IsTerminal, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use stoker_gateway::{args::Args, feed, gateway::Gateway, server};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stoker-gateway: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<()> {
    start_log(&args.log).context("log filter")?;
    let gateway = Gateway::new(args.settings()).context("register metrics")?;
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("listen on {}", args.listen))?;
    tracing::info!(address = %listener.local_addr()?, operator = %args.operator, "listening");
    tokio::spawn(feed::follow(gateway.clone(), args.operator.clone()));
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    server::serve(listener, gateway, args.leaving(), stop).await;
    Ok(())
}

/// Text for a person at a terminal, one JSON object a line for a log collector.
fn start_log(filter: &str) -> anyhow::Result<()> {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_new(filter)?)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    if std::io::stderr().is_terminal() {
        builder.init()
    } else {
        builder.json().flatten_event(true).init()
    }
    Ok(())
}
