//! `stoker-agent fetch`: brings a model from a hub, a bucket, a registry or a web server into a cache of this node, says how far it is, and lets
//! a link lead to it. Serves no request and loads nothing. In a pod it answers the operator on the admin port, as the agent does after it.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context;
use stoker_crds::{
    contract::{ADMIN_PORT, FetchReport, HoldersReport, ModelReport},
    intent::POD_UID_VARIABLE,
};
use stoker_edge::connections::{self, ADMIN_LIMITS};
use stoker_fetch::{
    Access, Fetched, Order, Progress, Source, Suppliers, WebLogin, cache, fetch, progress::Snapshot, source::is_commit,
    suppliers::Told as Holders,
};

use crate::{config::Settings, http, intent::Authority, keep::keep, replica::Replica, shutdown};

/// What a process says that SIGTERM ended: 128 and the signal, as a shell does.
const TERMINATED: i32 = 143;
/// What a reader of `--help` may want to try.
const HELP: &str = "\
Examples:
  stoker-agent fetch hf://Qwen/Qwen2.5-0.5B-Instruct --cache ~/.cache/stoker-models
  AWS_REGION=eu-west-1 stoker-agent fetch s3://models/llama-3.1-8b --cache ~/.cache/stoker-models
  stoker-agent fetch oci://registry.example/models/llama-3.1-8b:v1 --cache ~/.cache/stoker-models
  stoker-agent fetch https://files.example/models/chat-q8_0.gguf --cache ~/.cache/stoker-models

Buckets are asked as AWS's own tools ask: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, a service account's role
(AWS_ROLE_ARN, AWS_WEB_IDENTITY_TOKEN_FILE) or EKS Pod Identity; AWS_REGION; AWS_ENDPOINT_URL for servers that speak as S3 does. Without
any of the first they are asked without saying who asks.

Registries are asked with the login of a config.json of Docker's: the text in DOCKER_AUTH_CONFIG, else the file in $DOCKER_CONFIG or
~/.docker. Helpers that keep logins elsewhere are not asked. Without a login they are asked without one.

Web servers are asked with STOKER_SOURCE_TOKEN, else with STOKER_SOURCE_USERNAME and STOKER_SOURCE_PASSWORD; SSL_CERT_FILE names
certificates to trust.";
/// Between two lines where nobody sits.
const LINE_PAUSE: Duration = Duration::from_secs(5);
/// Between two looks at how far it is: the speed is computed from them.
const LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Threads that write what comes: a disk that stalls one of them stalls no other.
const THREADS: usize = 4;

/// What to fetch, from where to where.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = HELP)]
pub struct FetchArgs {
    /// The model: hf://ORG/MODEL[/FILE.gguf][@REVISION], s3://BUCKET/PREFIX[/FILE.gguf],
    /// oci://REGISTRY/REPOSITORY[:TAG|@sha256:DIGEST] or https://HOST/PATH[#sha256=HASH], a folder, a .gguf file or a tar.
    model: Source,

    /// Directory that models are kept in: shared by all that fetch on a node, safe against being killed.
    #[arg(long, value_name = "DIR")]
    cache: PathBuf,

    /// Link that is to lead to the model's directory. If it leads to one already, or if the operator was told one that it was to lead
    /// to, that commit is taken again. Its directory is made if it is not there.
    #[arg(long, value_name = "PATH")]
    link: Option<PathBuf>,

    /// The hub, or a mirror that speaks as it does.
    #[arg(long, env = "HF_ENDPOINT", value_name = "URL", default_value = "https://huggingface.co")]
    endpoint: String,

    /// The hub's token with read access; a variable, so that it is in no list of processes.
    #[arg(long, env = "HF_TOKEN", hide_env_values = true, default_value = "")]
    token: String,

    /// Logins to registries, as the text of a config.json of Docker's; a variable for the same reason.
    #[arg(long, env = "DOCKER_AUTH_CONFIG", hide_env_values = true, default_value = "", value_name = "JSON")]
    registry_login: String,

    /// Token for a web server; a variable for the same reason, and so are the two below.
    #[arg(long, env = "STOKER_SOURCE_TOKEN", hide_env_values = true, default_value = "", value_name = "TOKEN")]
    source_token: String,

    /// Name for a web server that wants one with a password.
    #[arg(long, env = "STOKER_SOURCE_USERNAME", hide_env_values = true, default_value = "", value_name = "NAME")]
    source_username: String,

    /// Its password.
    #[arg(long, env = "STOKER_SOURCE_PASSWORD", hide_env_values = true, default_value = "", value_name = "PASSWORD")]
    source_password: String,

    /// What token, keys or login are called in messages.
    #[arg(long, value_name = "NAME")]
    token_name: Option<String>,

    /// Commit that others took already, whatever the source is now: of a registry the manifest's SHA-256, of a bucket what an
    /// earlier fetch said.
    #[arg(long, value_name = "SHA", value_parser = commit)]
    commit: Option<String>,

    /// Bytes that the cache may hold: what was used least recently goes, what is used never. Default: what the disk holds.
    #[arg(long, value_name = "BYTES")]
    cache_limit: Option<u64>,

    /// Requests at the same time.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    connections: u8,

    /// Once the model is there: keep its files in this node's memory until SIGTERM, so that a replica which starts here reads no disk.
    /// `/readyz` on the admin port answers 200 when all of them are. It ends with an error when a file of it is removed.
    #[arg(long, conflicts_with = "config")]
    keep_resident: bool,

    /// The agent's configuration file. With it the operator is told how far the fetch is.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// File with the public keys of the operators whose orders are taken.
    #[arg(long, value_name = "FILE", requires = "config")]
    operator_keys: Option<PathBuf>,

    /// Seconds to wait for the operator's word on who has the model before its source is asked for bytes, where others took the commit already.
    #[arg(long, env = "STOKER_HOLDERS_WAIT_SECONDS", value_name = "SECONDS", default_value_t = 10)]
    word_seconds: u16,

    /// UID of the pod that this process runs in.
    #[arg(long, env = POD_UID_VARIABLE, value_name = "UID", hide_env_values = true)]
    pod_uid: Option<String>,

    /// Address that the operator asks, or whoever asks whether the model is in memory.
    #[arg(long, env = "STOKER_HOST", default_value = "0.0.0.0")]
    host: IpAddr,

    /// Port that the operator asks.
    #[arg(long, default_value_t = ADMIN_PORT)]
    admin_port: u16,
}

fn commit(text: &str) -> Result<String, String> {
    if is_commit(text) { Ok(text.to_owned()) } else { Err("a commit has 40 or 64 hexadecimal digits".to_owned()) }
}

/// Fetches; the exit code.
pub fn run(args: &FetchArgs) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    let (progress, begun) = (Arc::new(Progress::default()), Instant::now());
    if let Some(dir) = args.link.as_deref().and_then(Path::parent) {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    }
    let suppliers = Arc::new(suppliers(args, begun)?);
    let fetched = runtime.block_on(async {
        tokio::spawn(end_on_sigterm());
        let replica = replica(args)?;
        replica.iter().for_each(|replica| replica.fetch_with(suppliers.clone()));
        if let Some(replica) = &replica {
            answer_operator(args, replica.clone()).await?;
        }
        let told = replica.map(|replica| Told { replica, noted: args.link.as_deref().map(noted_commit) });
        let lines = tokio::spawn(show(args.model.to_string(), progress.clone(), told));
        let fetched = fetch(Order { suppliers, ..order(args) }, progress.clone()).await;
        lines.abort();
        say_notices(&args.model.to_string(), &progress);
        fetched.with_context(|| format!("fetch {}", args.model))
    });
    let ended = fetched.and_then(|fetched| {
        let dir = lead_to(args, &fetched, &progress.at(Instant::now()), begun.elapsed())?;
        if args.keep_resident {
            runtime.block_on(keep(args.model.to_string(), &dir, (args.host, args.admin_port)))
        } else {
            Ok(0)
        }
    });
    // Files that are being hashed when another one failed are of no use any more.
    runtime.shutdown_background();
    ended
}

/// Lets the link lead to what was fetched, and says how it came and where it is.
fn lead_to(args: &FetchArgs, fetched: &Fetched, snapshot: &Snapshot, took: Duration) -> anyhow::Result<PathBuf> {
    let Fetched { dir, commit } = fetched;
    let dir = fs::canonicalize(dir).with_context(|| format!("find {}", dir.display()))?;
    if let Some(link) = &args.link {
        cache::point(link, &dir)?;
    }
    let (bytes_total, given) = (snapshot.bytes_total, snapshot.given());
    let (gb, seconds) = (bytes_total as f64 / 1e9, took.as_secs_f64());
    let how =
        if bytes_total == 0 { "found".to_owned() } else { format!("fetched {gb:.2} GB in {seconds:.1} s{given}") };
    eprintln!("{}: {how}, commit {commit}", args.model);
    println!("{}", dir.display());
    Ok(dir)
}

fn order(args: &FetchArgs) -> Order {
    let FetchArgs { model, cache, link, commit, cache_limit, connections, .. } = args.clone();
    Order {
        source: model,
        access: access(args),
        commit: commit.or_else(|| commit_before(link.as_deref()?)),
        cache,
        limit: cache_limit,
        connections: connections.into(),
        suppliers: Arc::default(),
    }
}

/// Who may give files beside the source, where an operator can say that.
fn suppliers(args: &FetchArgs, begun: Instant) -> anyhow::Result<Suppliers> {
    if args.operator_keys.is_none() {
        return Ok(Suppliers::default());
    }
    // Who listens on one address is known by it.
    let address = Some(args.host).filter(|host| !host.is_unspecified());
    let waits_until = begun + Duration::from_secs(args.word_seconds.into());
    Suppliers::awaiting(waits_until, address).context("HTTP client for replicas")
}

fn access(args: &FetchArgs) -> Access {
    let said = |text: &str| Some(text.trim().to_owned()).filter(|text| !text.is_empty());
    Access {
        endpoint: args.endpoint.clone(),
        token: said(&args.token),
        aws: std::env::vars().filter(|(name, _)| name.starts_with("AWS_")).collect(),
        docker_config: said(&args.registry_login).or_else(docker_config),
        web: WebLogin {
            token: args.source_token.clone(),
            username: args.source_username.clone(),
            password: args.source_password.clone(),
        },
        secret_name: args.token_name.clone(),
    }
}

/// What Docker keeps for this user.
fn docker_config() -> Option<String> {
    let of_user = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".docker"));
    let dir = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from).or_else(of_user)?;
    fs::read_to_string(dir.join("config.json")).ok()
}

/// What the link leads to since before, or was to lead to: who starts again serves the same bytes.
fn commit_before(link: &Path) -> Option<String> {
    let linked = || cache::commit_of(&fs::read_link(link).ok()?).map(str::to_owned);
    let noted = || fs::read_to_string(noted_commit(link)).ok().filter(|commit| is_commit(commit));
    linked().or_else(noted)
}

/// Where the commit is that the operator was told, and tells other replicas: what a source turns out to be when this container starts
/// again counts no more.
fn noted_commit(link: &Path) -> PathBuf {
    link.with_added_extension("commit")
}

/// The first process of a container is not ended by a signal that it does not hear.
async fn end_on_sigterm() {
    use tokio::signal::unix::{SignalKind, signal};
    if let Ok(mut terminated) = signal(SignalKind::terminate()) {
        terminated.recv().await;
        std::process::exit(TERMINATED);
    }
}

/// What the operator asks about: a replica that loads, whatever comes after this process.
fn replica(args: &FetchArgs) -> anyhow::Result<Option<Arc<Replica>>> {
    let Some(config) = &args.config else { return Ok(None) };
    let authority = Authority { pod_uid: args.pod_uid.clone(), keys: args.operator_keys.clone() };
    Ok(Some(Replica::new(Settings::of_operator(config, authority)?)))
}

async fn answer_operator(args: &FetchArgs, replica: Arc<Replica>) -> anyhow::Result<()> {
    let (host, port) = (args.host, args.admin_port);
    let listener = tokio::net::TcpListener::bind((host, port)).await;
    let listener = listener.with_context(|| format!("listen on {host}:{port}"))?;
    tokio::spawn(shutdown::tick(replica.clone()));
    tokio::spawn(connections::serve(
        listener,
        http::admin_router(replica),
        ADMIN_LIMITS,
        || {},
        std::future::pending(),
    ));
    Ok(())
}

/// Who is told how far it is.
struct Told {
    replica: Arc<Replica>,
    /// Where the commit is kept before anybody is told.
    noted: Option<PathBuf>,
}

impl Told {
    fn tell(&self, snapshot: &Snapshot) {
        let Snapshot { commit, bytes_done, bytes_total, bytes_per_second, bytes_given } = snapshot.clone();
        // Who cannot note it tells nobody: another replica would get what this one may not get again.
        let commit = commit.filter(|commit| self.noted.as_ref().is_none_or(|path| note(path, commit).is_ok()));
        let fetch = Some(FetchReport { bytes_done, bytes_total, bytes_per_second, bytes_from_replicas: bytes_given });
        let holders = self.replica.suppliers().and_then(|suppliers| suppliers.told(Instant::now()));
        let holders = holders.map(|Holders { names, asks }| HoldersReport { told: names, asks });
        self.replica.note_model(commit.map(|commit| ModelReport { commit, bytes: 0, fetch, holders }));
        // Progress or not, it goes on or gives up by itself: it does not hang.
        self.replica.note_load_progress(0.0);
    }
}

/// Whole or not at all.
fn note(path: &Path, commit: &str) -> io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|noted| noted == commit) {
        return Ok(());
    }
    let made = path.with_added_extension("new");
    fs::write(&made, commit).and_then(|()| fs::rename(&made, path))
}

/// What went otherwise than it should.
fn say_notices(label: &str, progress: &Progress) {
    // A reader that went away is no reason to stop.
    progress.take_notices().iter().for_each(|notice| _ = writeln!(io::stderr(), "{label}: {notice}"));
}

/// One line on a terminal that is written over; elsewhere one every few seconds.
async fn show(label: String, progress: Arc<Progress>, told: Option<Told>) {
    let terminal = io::stderr().is_terminal();
    let mut said = Instant::now();
    loop {
        tokio::time::sleep(LOOK_PAUSE).await;
        let now = Instant::now();
        let snapshot = progress.at(now);
        if let Some(told) = &told {
            told.tell(&snapshot);
        }
        say_notices(&label, &progress);
        let line = snapshot.line();
        // A reader that went away is no reason to stop.
        if terminal {
            let _ = write!(io::stderr(), "\r\x1b[K{label}: {line}");
        } else if now.duration_since(said) >= LINE_PAUSE {
            let _ = writeln!(io::stderr(), "{label}: {line}");
            said = now;
        }
    }
}
