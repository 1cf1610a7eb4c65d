//! `stoker-gateway`: arguments, log, listen, follow the operator, serve until SIGTERM.

use std::{net::SocketAddr, process::ExitCode};

use anyhow::Context;
use clap::Parser;
use stoker_edge::{allocator, connections, spans::SpanLine, telemetry};
use stoker_gateway::{
    accounts, args::Args, feed, gateway::Gateway, keys, kv_feed, peers, server, server::Listeners, tls::Tls, watch,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};

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

fn run(args: &Args) -> anyhow::Result<()> {
    telemetry::init(&args.log).context("log filter")?;
    // Before there are threads.
    allocator::use_one_heap();
    tokio::runtime::Runtime::new().context("start a runtime")?.block_on(serve(args))
}

async fn serve(args: &Args) -> anyhow::Result<()> {
    let gateway = Gateway::new(args.settings()).context("register metrics")?;
    if let Some(endpoint) = &args.otlp_endpoint {
        let dropped = gateway.metrics.spans_dropped.clone();
        gateway.trace(SpanLine::open(endpoint, "stoker-gateway".to_owned(), dropped).context("--otlp-endpoint")?);
    }
    if let Some(path) = &args.tenants {
        gateway.learn_tenants(keys::read(path)?, keys::folder(path));
        tokio::spawn(keys::follow(gateway.clone(), path.clone()));
    }
    let tls = args.tls_files().map(Tls::read).transpose()?;
    if let Some(tls) = &tls {
        tokio::spawn(tls.clone().follow());
    }
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let (clients, admin) = (listen(args.listen)?, listen(args.admin_listen())?);
    tracing::info!(address = %clients.local_addr()?, admin = %admin.local_addr()?, operator = %args.operator, "listening");
    tokio::spawn(feed::follow(gateway.clone(), args.operator.clone()));
    tokio::spawn(kv_feed::follow(gateway.clone()));
    tokio::spawn(peers::follow(gateway.clone()));
    tokio::spawn(accounts::follow(gateway.clone()));
    tokio::spawn(watch::watch(gateway.clone()));
    tokio::spawn(allocator::give_back_after_storms());
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let listeners = Listeners { clients, tls, admin };
    server::serve(listeners, gateway, args.playground.routes(), args.leaving(), stop).await;
    Ok(())
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    connections::listen(address).with_context(|| format!("listen on {address}"))
}
