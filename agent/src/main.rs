//! `stoker-agent`: arguments to settings, listen, load, serve, drain, exit code. Knows no request and no model.

use std::{
    net::{IpAddr, SocketAddr},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow};
use axum::{Router, serve::ListenerExt};
use clap::Parser;
use stoker_agent::{
    args::{Args, Command},
    config::{Settings, model_files},
    fetch,
    http::{
        self,
        access::{self, ApiKeys},
        giving,
    },
    replica::Replica,
    shutdown, startup,
    wording::in_words_of,
};
use stoker_edge::{
    allocator,
    connections::{self, ADMIN_LIMITS, Limits},
    cors,
    spans::SpanLine,
    telemetry,
};
use stoker_engine::{
    exec::cuda::{Finding, survey},
    ops::Isa,
};
use tokio::{net::TcpListener, sync::watch};

/// Once empty, connections get this long to close before the process ends without them.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// How long the engine's last step may take before the process ends without it.
const STEP_GRACE: Duration = Duration::from_secs(5);
/// Long texts being tokenized at once; more wait.
const MAX_BLOCKING_THREADS: usize = 8;

fn main() -> ExitCode {
    let args = Args::parse();
    let ended = match &args.command {
        Some(Command::Doctor) => doctor(&args),
        Some(Command::Describe { model }) => describe(model),
        Some(Command::Fetch(args)) => fetch::run(args),
        None => run(&args),
    };
    match ended {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("stoker-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Says what CPUs compute with, and what is there for computing on a GPU.
fn doctor(args: &Args) -> anyhow::Result<u8> {
    println!("{}", Finding { part: "CPU", found: cpu(args.cpu_isa.as_deref()) });
    let findings = survey();
    findings.iter().for_each(|finding| println!("{finding}"));
    let all_found = findings.iter().all(|finding| finding.found.is_ok());
    println!("{}", if all_found { "models run on GPU 0" } else { "models run on the CPUs" });
    Ok(u8::from(!all_found))
}

/// The instructions that the CPUs compute with, and those that they could be asked for.
fn cpu(asked: Option<&str>) -> Result<String, String> {
    let isa = asked.map(Isa::named).transpose().map_err(|error| format!("{error}; taken: {}", Isa::best()))?;
    let here = Isa::available().into_iter().map(Isa::name).collect::<Vec<_>>().join(", ");
    Ok(format!("{}, of {here}", isa.unwrap_or_else(Isa::best)))
}

/// Says what a model is made of.
fn describe(source: &str) -> anyhow::Result<u8> {
    print!("{}", stoker_engine::model::describe(&model_files(source)?)?);
    Ok(0)
}

fn run(args: &Args) -> anyhow::Result<u8> {
    telemetry::init(&args.log).context("log filter")?;
    allocator::use_one_heap();
    let settings = args.settings().map_err(|error| anyhow!(in_words_of(args.started_by(), &error.to_string())))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(http_threads())
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .enable_all()
        .build()?;
    let code = runtime.block_on(serve(args, settings));
    // Loading cannot be cancelled; what still runs ends with the process.
    runtime.shutdown_background();
    code
}

/// HTTP work is small next to the engine's: a second thread only so that one slow handler stops no other.
fn http_threads() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get).clamp(2, 4)
}

async fn serve(args: &Args, settings: Settings) -> anyhow::Result<u8> {
    // In this order: who finds the public port alone knows that it is no agent of this release.
    let admin_listener = listen(args.host, args.admin_port())?;
    let listener = listen(args.host, args.port)?;
    let (address, admin) = (listener.local_addr()?, admin_listener.local_addr()?);
    tracing::info!(%address, %admin, source = settings.source, revision = settings.revision, "listening");

    let replica = Replica::new(settings);
    if let Some(endpoint) = &args.otlp_endpoint {
        let (service, dropped) = ("stoker-agent".to_owned(), replica.metrics().spans_dropped());
        replica.trace(SpanLine::open(endpoint, service, dropped).context("--otlp-endpoint")?);
    }
    let exit = replica.exit_code();
    let ended_replica = Arc::clone(&replica);
    let mut leaving = exit.clone();
    tokio::spawn(shutdown::watch_signals(replica.clone()));
    tokio::spawn(shutdown::tick(replica.clone()));
    tokio::spawn(shutdown::remember(replica.clone()));
    tokio::spawn(allocator::give_back_after_storms());
    let public = guarded(args, http::router(replica.clone(), args.playground.routes()))?;
    let mut server = tokio::spawn(serve_http(listener, public, Limits::default(), exit.clone()));
    tokio::spawn(serve_http(admin_listener, http::admin_router(replica.clone()), ADMIN_LIMITS, exit.clone()));
    give_weights(args, &replica).await;
    let loading = load(replica, address);

    let code = tokio::select! {
        error = loading => return Err(error),
        ended = &mut server => {
            ended?;
            // It ends because the exit code is there, and may be seen to have ended before the code is seen.
            exit.borrow().context("the HTTP server ended by itself")?
        }
        code = leaving.wait_for(Option::is_some) => {
            let code = code?.expect("waited for it");
            // An answer that was being written when the last request closed still reaches its client.
            let _ = tokio::time::timeout(CLOSE_GRACE, &mut server).await;
            code
        }
    };
    if let Err(reason) = ended_replica.health() {
        // The end of the log is what a kubelet keeps of a process that failed; people read it in `Ready`.
        eprintln!("stoker-agent: {reason}");
    }
    let engine_stops = tokio::task::spawn_blocking(move || ended_replica.stop_engine());
    let _ = tokio::time::timeout(STEP_GRACE, engine_stops).await;
    Ok(code)
}

/// Gives files of the model to replicas elsewhere. Whatever keeps it from that keeps no request from an answer.
async fn give_weights(args: &Args, replica: &Arc<Replica>) {
    let Some(port) = args.weights_port() else { return };
    let given = listen(args.host, port).and_then(|listener| {
        let weights = listener.local_addr()?;
        giving::start(listener, replica.clone(), replica.exit_code())?;
        Ok(weights)
    });
    match given {
        Ok(weights) => tracing::info!(%weights, "files of a model that was fetched are given for tickets"),
        Err(error) => tracing::warn!(error = format!("{error:#}"), "files of the model are given to nobody"),
    }
}

/// The public port's endpoints for whom they are meant.
fn guarded(args: &Args, router: Router) -> anyhow::Result<Router> {
    let keys = args.api_key_file.as_deref().map(ApiKeys::read).transpose()?.unwrap_or_default();
    let root = match &args.root_path {
        Some(written) => Some(access::root_path(written).with_context(|| format!("--root-path {written} is no path"))?),
        None => None,
    };
    // Browsers ask whether they may ask before they send a key.
    Ok(cors::shared(access::guarded(router, keys, root.as_deref()), &args.allowed_origins))
}

fn listen(host: IpAddr, port: u16) -> anyhow::Result<TcpListener> {
    connections::listen(SocketAddr::new(host, port)).with_context(|| format!("listen on {host}:{port}"))
}

async fn serve_http(listener: TcpListener, router: Router, limits: Limits, mut exit: watch::Receiver<Option<u8>>) {
    // Without this the kernel holds a token back for up to 40 ms to fill a packet.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
    });
    let ended = async move {
        // The sender lives in the replica, which outlives this server.
        let _ = exit.wait_for(Option::is_some).await;
    };
    connections::serve(listener, router, limits, allocator::note_connection, ended).await;
}

/// Loads in the background. Returns only if the process must end because of it.
async fn load(replica: Arc<Replica>, address: SocketAddr) -> anyhow::Error {
    let (report, outcome) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new().name("load".to_owned());
    let spawned = thread.spawn(move || {
        // No receiver means that the process is ending for another reason.
        let _ = report.send(startup::load_until_served(&replica, address));
    });
    if let Err(error) = spawned {
        return error.into();
    }
    match outcome.await {
        Ok(Ok(())) => std::future::pending().await,
        Ok(Err(error)) => error,
        Err(_) => anyhow::anyhow!("loading panicked"),
    }
}
