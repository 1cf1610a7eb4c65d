//! The operator's process: arguments, logs, client, Lease, HTTP, controller; stops them in order.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, bail};
use clap::Parser;
use hyper::header::{HeaderValue, USER_AGENT};
use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use stoker_operator::{
    allow::{AllowList, Allowed},
    controller,
    endpoints::Published,
    fence::Fence,
    gateways::ServiceName,
    image_volumes::ImageVolumes,
    keys::{KeyStore, Keyring, KeysError},
    lease::{Elector, Leadership, LeaseOptions},
    metrics::Metrics,
    pages::{self, Board},
    peers::Peers,
    pools::{FailureMode, PoolOptions},
    scaling::Ledger,
    server,
    telemetry::{self, LogFormat},
    validate::{Defaults, ModelDefaults},
    vitals::Vitals,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};
use tracing::{error, info, warn};

/// Between two tries to read the keys.
const KEYS_PAUSE: Duration = Duration::from_secs(1);

/// Turns InferenceDeployments into agent pods.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    /// Image of the agent for deployments that name none.
    #[arg(long, env = "STOKER_AGENT_IMAGE")]
    agent_image: String,
    /// Leave user and group ids of pods to the platform, where a deployment names none.
    #[arg(long, env = "STOKER_PLATFORM_IDS")]
    platform_ids: bool,
    /// Image that deployments may name, `*` for any characters; may be repeated. Default: all.
    #[arg(long, value_name = "PATTERN")]
    allow_image: Vec<String>,
    /// ServiceAccount that deployments may name, `*` for any characters; may be repeated. Default: all.
    #[arg(long, value_name = "PATTERN")]
    allow_service_account: Vec<String>,
    /// Make a NetworkPolicy for each deployment's replicas: JSON of peers as in a NetworkPolicy, `operator` and `gateways` for
    /// the admin port and a list `inference` for clients (empty: everybody). Default: none, and those made before are removed.
    #[arg(long, value_name = "JSON", value_parser = peers)]
    replica_network_policy: Option<Peers>,
    /// Lead Services of deployments to the gateways behind this Service, as soon as one of them is ready. Default: they lead to
    /// replicas, and what led them to gateways is removed.
    #[arg(long, env = "STOKER_GATEWAY_SERVICE", value_name = "NAMESPACE/NAME")]
    gateway_service: Option<ServiceName>,
    /// Make an InferencePool (inference.networking.k8s.io/v1) for each deployment, in clusters that have the kind, for Gateways that ask
    /// those gateways which replica is next; they run with --endpoint-picker. This is what a Gateway does while none answers. Default: none is made, and those
    /// that were are deleted.
    #[arg(long, env = "STOKER_INFERENCE_POOLS", value_name = "FAILURE_MODE", requires = "gateway_service")]
    inference_pools: Option<FailureMode>,
    /// Between two looks whether the cluster has that kind, as long as it has not.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    inference_pools_look_seconds: u64,
    /// URL of a mirror that models of hubs (hf://) are fetched from. Default: the hub itself, as agents know it.
    #[arg(long, value_name = "URL")]
    hub_endpoint: Option<String>,
    /// Directory of every node that keeps fetched models; it must be there and belong to the agents' user. Default: each pod
    /// keeps its own.
    #[arg(long, value_name = "PATH")]
    model_cache: Option<String>,
    /// Bytes that such a directory may hold. Default: what its disk has.
    #[arg(long, value_name = "BYTES", requires = "model_cache")]
    model_cache_limit: Option<u64>,
    /// Whether images that are models (oci://REGISTRY/REPOSITORY@sha256:DIGEST#path=FOLDER) are mounted by the cluster: auto, where its API
    /// server and all nodes that pods may land on do that by their releases; always; never.
    #[arg(long, value_enum, value_name = "RULE", default_value = "auto")]
    image_volumes: ImageVolumes,
    /// Bytes a second that a replica gives, at most and to all together, of its model to replicas of its namespace that fetch the same one.
    /// 0: models come from their source alone.
    #[arg(long, value_name = "BYTES", default_value_t = 500_000_000)]
    replica_weights_bytes_per_second: u64,
    /// URL of a collector (OTLP over HTTP) that agents send spans of requests to, where a deployment's pod.env does not say. A change of
    /// it is another revision of every deployment. Default: none.
    #[arg(long, value_name = "URL")]
    agent_otlp_endpoint: Option<String>,
    /// Watch this namespace only. Default: all namespaces.
    #[arg(long, env = "STOKER_NAMESPACE")]
    namespace: Option<String>,
    /// Address of /metrics, /healthz, /readyz, /v1/scaling and /v1/endpoints.
    #[arg(long, env = "STOKER_LISTEN", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// Address of pages for people: the fleet, each deployment, why it has that many replicas. Default: no pages.
    #[arg(long, env = "STOKER_PAGES_ADDRESS", value_name = "ADDRESS")]
    pages_address: Option<SocketAddr>,
    /// Kubeconfig file. Default: $KUBECONFIG, then ~/.kube/config, then the pod's service account.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// Lead without a Lease: only if no second operator can run.
    #[arg(long)]
    no_leader_election: bool,
    /// Namespace of the Lease and of the keys.
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    lease_namespace: String,
    /// Name of the Lease.
    #[arg(long, default_value = "stoker-operator")]
    lease_name: String,
    /// Name of the Secret with the key that orders to agents are signed with, beside the Lease. Made if it is missing.
    #[arg(long, default_value = "stoker-operator-keys")]
    keys_secret: String,
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
    let identity = args.identity.clone().unwrap_or_else(default_identity);
    let config = config(args.kubeconfig.as_deref(), &identity).await?;
    let metrics = Arc::new(Metrics::new().context("register metrics")?);
    let stop = stop_on_signal()?;

    let for_lease = Client::try_from(config.clone()).context("make a client")?;
    let mut elector = (!args.no_leader_election).then(|| {
        let (namespace, name) = (args.lease_namespace.clone(), args.lease_name.clone());
        Elector::new(for_lease, LeaseOptions { namespace, name, identity: identity.clone() })
    });
    let leadership = elector.as_ref().map_or_else(Leadership::always, Elector::leadership);
    let client = ClientBuilder::try_from(config).context("make a client")?;
    let client = client.with_layer(&Fence(leadership.clone())).build();
    let listener = TcpListener::bind(args.listen).await.with_context(|| format!("listen on {}", args.listen))?;
    let shared = controller::Shared {
        leadership,
        metrics,
        ledger: Ledger::default(),
        endpoints: Published::default(),
        fleet: Arc::default(),
        board: args.pages_address.map(|_| Board::default()),
        vitals: Vitals::default(),
    };
    let server = tokio::spawn(server::serve(listener, shared.clone()));
    let pages = match (args.pages_address, &shared.board) {
        (Some(address), Some(board)) => {
            let listener =
                TcpListener::bind(address).await.with_context(|| format!("listen on {address} for pages"))?;
            Some(tokio::spawn(pages::serve(listener, board.clone(), shared.leadership.clone())))
        }
        _ => None,
    };
    info!(listen = %args.listen, version = env!("CARGO_PKG_VERSION"), "operator started");

    let defaults = Defaults {
        agent_image: args.agent_image,
        platform_ids: args.platform_ids,
        allowed: Allowed {
            images: AllowList::new(args.allow_image),
            service_accounts: AllowList::new(args.allow_service_account),
        },
        peers: args.replica_network_policy,
        models: ModelDefaults {
            endpoint: args.hub_endpoint,
            node_cache: args.model_cache,
            node_cache_limit: args.model_cache_limit,
            image_volumes: args.image_volumes,
            give_bytes_per_second: args.replica_weights_bytes_per_second,
        },
        otlp_endpoint: args.agent_otlp_endpoint,
    };
    let options = controller::Options {
        namespace: args.namespace,
        defaults,
        gateways: args.gateway_service,
        pools: PoolOptions {
            failure_mode: args.inference_pools,
            look_again: Duration::from_secs(args.inference_pools_look_seconds),
        },
        identity,
    };
    let store = KeyStore::new(client.clone(), &args.lease_namespace, &args.keys_secret);
    let rounds = async |stop: watch::Receiver<bool>| {
        let keyring = tokio::select! {
            keyring = open(&store) => keyring?,
            () = stopped(stop.clone()) => return Ok(()),
        };
        controller::run(client, options, shared, (store, keyring), stopped(stop)).await
    };
    let outcome = match &mut elector {
        Some(elector) => lead(elector, stop, rounds).await,
        None => rounds(stop).await,
    };
    server.abort();
    if let Some(pages) = pages {
        pages.abort();
    }
    outcome
}

/// Waits to lead, runs rounds while leading, and lets go in the end. Losing the Lease is an error: start anew.
async fn lead(
    elector: &mut Elector,
    stop: watch::Receiver<bool>,
    rounds: impl AsyncFnOnce(watch::Receiver<bool>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    tokio::select! {
        () = elector.acquire() => {}
        () = stopped(stop.clone()) => return Ok(()),
    }
    let outcome = tokio::select! {
        outcome = rounds(stop) => outcome,
        () = elector.keep() => {
            error!("another operator holds the lease");
            bail!("lost the lease");
        }
    };
    info!("stopped, releasing the lease");
    elector.release().await;
    outcome
}

/// Reads the keys; waits for an API server that is away, and gives up where waiting does not help.
async fn open(store: &KeyStore) -> anyhow::Result<Keyring> {
    loop {
        match store.read().await {
            Ok(keys) => return Ok(Keyring::new(keys)),
            Err(KeysError::Api { source: kube::Error::Api(answer), secret }) if answer.code == 403 => {
                bail!(
                    "read or make the Secret {secret}: {}: give the operator's account the chart's rights",
                    answer.message
                )
            }
            Err(error @ KeysError::Api { .. }) => {
                warn!(%error, "no keys yet");
                tokio::time::sleep(KEYS_PAUSE).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// How the API server is reached. Its audit log names this process.
async fn config(kubeconfig: Option<&std::path::Path>, identity: &str) -> anyhow::Result<Config> {
    let mut config = match kubeconfig {
        None => Config::infer().await.context("find the API server")?,
        Some(path) => {
            let file = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.context("read the kubeconfig")?
        }
    };
    let agent = format!("stoker-operator/{} ({identity})", env!("CARGO_PKG_VERSION"));
    config.headers.push((USER_AGENT, HeaderValue::try_from(agent).context("--identity")?));
    Ok(config)
}

fn peers(json: &str) -> Result<Peers, serde_json::Error> {
    serde_json::from_str(json)
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
