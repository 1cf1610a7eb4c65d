//! The operator's process: arguments, logs, client, Lease, HTTP, controller; stops them in order.

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::{Context, bail};
use clap::Parser;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use stoker_operator::{
    controller,
    lease::{Elector, Leadership, LeaseOptions},
    metrics::Metrics,
    scaling::Ledger,
    server,
    telemetry::{self, LogFormat},
    validate::Defaults,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tracing::{error, info};

/// Turns InferenceDeployments into agent pods.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    /// Image of the agent for deployments that name none.
    #[arg(long, env = "STOKER_AGENT_IMAGE")]
    agent_image: String,
    /// Watch this namespace only. Default: all namespaces.
    #[arg(long, env = "STOKER_NAMESPACE")]
    namespace: Option<String>,
    /// Address of /metrics, /healthz, /readyz and /v1/scaling.
    #[arg(long, env = "STOKER_LISTEN", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// Kubeconfig file. Default: $KUBECONFIG, then ~/.kube/config, then the pod's service account.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Lead without a Lease: only if no second operator can run.
    #[arg(long)]
    no_leader_election: bool,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    lease_namespace: String,
    /// Name of the Lease.
    #[arg(long, default_value = "stoker-operator")]
    lease_name: String,
    /// Name of this process in Lease and Events. Default: made from host name and process id.
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Form of log lines.
    #[arg(long, value_enum, default_value = "text")]
    log_format: LogFormat,
}

#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    telemetry::start(args.log_format);
    let client = client(args.kubeconfig.as_deref()).await?;
    let metrics = Arc::new(Metrics::new().context("register metrics")?);
    let stop = stop_on_signal()?;
    let identity = args.identity.clone().unwrap_or_else(default_identity);

    let mut elector = (!args.no_leader_election).then(|| {
        let (namespace, name) = (args.lease_namespace.clone(), args.lease_name.clone());
        Elector::new(client.clone(), LeaseOptions { namespace, name, identity: identity.clone() })
    });
    let leadership = elector.as_ref().map_or_else(Leadership::always, Elector::leadership);
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("listen on {}", args.listen))?;
    let shared = controller::Shared { leadership, metrics, ledger: Ledger::default() };
    let server = tokio::spawn(server::serve(listener, shared.clone()));
    info!(listen = %args.listen, version = env!("CARGO_PKG_VERSION"), "operator started");

    let options = controller::Options {
        namespace: args.namespace,
        defaults: Defaults { agent_image: args.agent_image },
        identity,
    };
    let rounds = |stop| controller::run(client, options, shared, stopped(stop));
    let outcome = match &mut elector {
        Some(elector) => lead(elector, stop, rounds).await,
        None => {
            rounds(stop).await;
            Ok(())
        }
    };
    server.abort();
    outcome
}

/// Waits to lead, runs rounds while leading, and lets go in the end. Losing the Lease is an error: start anew.
async fn lead<Rounds: Future<Output = ()>>(
    elector: &mut Elector,
    stop: watch::Receiver<bool>,
    rounds: impl FnOnce(watch::Receiver<bool>) -> Rounds,
) -> anyhow::Result<()> {
    tokio::select! {
        () = elector.acquire() => {}
        () = stopped(stop.clone()) => return Ok(()),
    }
    tokio::select! {
        () = rounds(stop) => {}
        () = elector.keep() => {
            error!("another operator holds the lease");
            bail!("lost the lease");
        }
    }
    info!("stopped, releasing the lease");
    elector.release().await;
    Ok(())
}

async fn client(kubeconfig: Option<&std::path::Path>) -> anyhow::Result<Client> {
    let config = match kubeconfig {
        None => Config::infer().await.context("find the API server")?,
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.context("read the kubeconfig")?
        }
    };
    Client::try_from(config).context("make a client")
}

/// Turns true on SIGTERM or SIGINT.
fn stop_on_signal() -> anyhow::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate()).context("watch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("watch SIGINT")?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        // Nobody listens any more when the operator stops by itself.
        let _ = sender.send(true);
    });
    Ok(receiver)
}

/// Resolves when the operator is to stop.
async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the signal task is gone: stop as well.
    let _ = stop.wait_for(|stop| *stop).await;
}

fn default_identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}
