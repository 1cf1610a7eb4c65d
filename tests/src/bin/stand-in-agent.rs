//! `stand-in-agent`: an agent without an engine, for tests of the operator. It takes the same configuration, gives the
//! same answers to `/healthz` and `/readyz` on its public port and to `/healthz`, `/v1/load`, `/v1/model`, `/v1/history` and `/v1/intent` on its admin port,
//! and streams ticks instead of tokens. Whose orders it takes and what it remembers is the real agent's code.
//!
//! The model's source says how it behaves: `file:///stand-in/load-fails`, `file:///stand-in/crashes`,
//! `file:///stand-in/loads-seconds/N`; of `file:///stand-in/drifts/N` the log-probabilities are so many hundredths of a nat lower, and
//! `file:///stand-in/slower/N` takes so many times as long to a first token; a directory that is not there fails too, anything else loads at once.
//! `POST /v1/completions` continues prompts with tokens that depend on the prompt alone, and their log-probabilities.
//! `GET /stream/SECONDS` holds a stream open, until `POST /finish` at the latest; `POST /lie/KIND` makes `/v1/load` lie from then on: `html`, `nan`,
//! `negative`, `repeated` (what it said at that moment), `revision`, `clock` (ten years ahead, all else true), `other`
//! (as the agent of another pod would), `falling` (the more it does the less its steps cost), `endless` (a cost that is no number),
//! `forgets` (work counted before is gone); `untold` says nothing of steps, as older agents; or answer badly: `late`, `slow` (its body in pieces), `cut` (in the middle); any other
//! kind tells the truth again. `deaf` takes no orders from then on. `GET /busy-readings` says how often its load was read
//! while it streamed. `--release` makes it one of before or to come, as far as an operator notices.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc, Mutex as StdMutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{self, State},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_LENGTH, RETRY_AFTER},
    },
    response::{Html, IntoResponse, Response},
    routing::{get, post, put},
};
use clap::{Parser, ValueEnum};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use stoker_agent::intent::{Authority, Receiver, Taken, authentic, take};
use stoker_cost::{Spent, StepCost, StepReport, StepWork};
use stoker_crds::{
    contract::{ADMIN_PORT, AGENT_PORT, AgentConfig, AgentPhase, DrainSettings, LoadReport, PROTOCOL},
    description::{DESCRIPTION_PATH, Description},
    history::{HISTORY_PATH, LoadHistory},
    intent::{INTENT_PATH, POD_UID_VARIABLE, SIGNATURE_HEADER, Want},
};
use stoker_replica::history::{Memory, SAMPLE_EVERY};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::Mutex,
    time::sleep,
};

const TOTAL_BLOCKS: u32 = 1000;
const BLOCKS_PER_STREAM: u32 = 10;
const TICK: Duration = Duration::from_millis(100);
/// What a stream that ticks is taken to have generated.
const TOKENS_PER_TICK: u64 = 4;
/// What it says that streams wait: longer the more of them there are, as in an engine.
const TTFT_SECONDS: Latency = Latency { alone: 0.08, per_stream: 0.02 };
const ITL_SECONDS: Latency = Latency { alone: 0.012, per_stream: 0.001 };
/// What it says that its steps cost: the same.
const COST: StepCost = StepCost {
    step_seconds: ITL_SECONDS.alone,
    decode_seconds: ITL_SECONDS.per_stream,
    context_token_seconds: 0.0,
    prefill_token_seconds: 0.0,
    prefill_pair_seconds: 0.0,
};
/// Tokens that it is taken to have computed before it was ready, as engines do.
const WARM_UP_TOKENS: f64 = 16.0;
/// Of the 95th percentile, in medians.
const TAIL: f64 = 1.6;
/// A reading may take a second.
const LATE: Duration = Duration::from_millis(1500);
const CRASH_CODE: u8 = 3;
const TEN_YEARS_MS: u64 = 10 * 365 * 86_400_000;

#[derive(Debug, Parser)]
struct Args {
    /// Configuration written by the operator.
    #[arg(long)]
    config: PathBuf,
    /// Public keys of the operators whose orders are taken.
    #[arg(long)]
    operator_keys: Option<PathBuf>,
    #[arg(long, env = POD_UID_VARIABLE)]
    pod_uid: Option<String>,
    #[arg(long, env = "STOKER_HOST", default_value = "0.0.0.0")]
    host: String,
    #[arg(long, value_enum, default_value_t)]
    release: Release,
}

/// Of which release it is.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
enum Release {
    /// It has no admin port.
    BeforeOrders,
    /// Its admin port does not say whether it lives.
    BeforeLiveness,
    #[default]
    Now,
    ToCome,
}

impl Release {
    fn protocol(self) -> u32 {
        match self {
            Self::BeforeOrders | Self::BeforeLiveness => 0,
            Self::Now => PROTOCOL,
            Self::ToCome => PROTOCOL + 1,
        }
    }
}

/// A median in seconds.
struct Latency {
    alone: f64,
    per_stream: f64,
}

impl Latency {
    /// Among so many streams; without any nothing was measured.
    fn among(&self, running: u32) -> Option<f64> {
        (running > 0).then(|| self.alone + self.per_stream * f64::from(running))
    }
}

/// How the model behaves.
enum Behaviour {
    Loads(Duration),
    LoadFails(String),
    Crashes,
}

impl Behaviour {
    fn of(source: &str) -> Self {
        let parts: Vec<&str> = source.trim_start_matches('/').split('/').collect();
        match parts[..] {
            ["stand-in", "load-fails"] => Self::LoadFails(format!("open {source}/config.json: no such file")),
            ["stand-in", "crashes"] => Self::Crashes,
            ["stand-in", "drifts" | "slower", _] => Self::Loads(Duration::ZERO),
            ["stand-in", "loads-seconds", seconds] => Self::Loads(Duration::from_secs(seconds.parse().unwrap_or(0))),
            _ if source.starts_with('/') && !Path::new(source).is_dir() => {
                Self::LoadFails(format!("open {source}/config.json: no such file"))
            }
            _ => Self::Loads(Duration::ZERO),
        }
    }
}

/// The number behind a word in the model's source.
fn number_of(source: &str, word: &str) -> Option<f64> {
    source.split_once(&format!("/stand-in/{word}/"))?.1.parse().ok()
}

struct Agent {
    release: Release,
    config: AgentConfig,
    /// How much less likely it finds every token than others do.
    drift: f64,
    /// How many times as long as others it takes to a first token.
    slowness: f64,
    loads: Duration,
    error: Option<String>,
    started: Instant,
    start_id: String,
    authority: Authority,
    taken: Mutex<Option<Taken>>,
    drain: Mutex<Option<Drain>>,
    running: AtomicU32,
    finished: AtomicU32,
    /// What streams ticked so far, as tokens.
    generated: AtomicU64,
    /// Work that streams were.
    spent: StdMutex<Spent>,
    /// How often streams were told to end well.
    finishes: AtomicU32,
    busy_readings: AtomicU32,
    lie: Mutex<String>,
    /// What is repeated by who repeats itself.
    said: Mutex<Option<LoadReport>>,
    memory: Mutex<Memory>,
}

#[derive(Clone, Copy)]
struct Drain {
    since: Instant,
    settings: DrainSettings,
}

type Shared = Arc<Agent>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run(&Args::parse()).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("stand-in-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<ExitCode> {
    let text = std::fs::read(&args.config).with_context(|| format!("read {}", args.config.display()))?;
    let config: AgentConfig = serde_json::from_slice(&text).context("parse the configuration")?;
    let (loads, error) = match Behaviour::of(&config.model.source) {
        Behaviour::Loads(time) => (time, None),
        Behaviour::LoadFails(why) => (Duration::ZERO, Some(why)),
        Behaviour::Crashes => {
            eprintln!("stand-in-agent: told to crash");
            return Ok(ExitCode::from(CRASH_CODE));
        }
    };
    let agent = Arc::new(Agent {
        drift: number_of(&config.model.source, "drifts").unwrap_or(0.0) / 100.0,
        slowness: number_of(&config.model.source, "slower").unwrap_or(1.0),
        release: args.release,
        config,
        loads,
        error,
        started: Instant::now(),
        start_id: std::process::id().to_string(),
        authority: Authority { pod_uid: args.pod_uid.clone(), keys: args.operator_keys.clone() },
        taken: Mutex::default(),
        drain: Mutex::default(),
        running: AtomicU32::new(0),
        finished: AtomicU32::new(0),
        generated: AtomicU64::new(0),
        spent: StdMutex::new(Spent { prefill_tokens: WARM_UP_TOKENS, ..Spent::default() }),
        finishes: AtomicU32::new(0),
        busy_readings: AtomicU32::new(0),
        lie: Mutex::default(),
        said: Mutex::default(),
        memory: Mutex::default(),
    });
    tokio::spawn(remember(agent.clone()));
    let admin = match args.release {
        Release::BeforeOrders => None,
        _ => Some(TcpListener::bind((args.host.as_str(), ADMIN_PORT)).await.context("listen")?),
    };
    let listener = TcpListener::bind((args.host.as_str(), AGENT_PORT)).await.context("listen")?;
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        served = async { axum::serve(listener, routes(agent.clone())).await } => served?,
        served = serve_admin(admin, agent.clone()) => served?,
        () = async { terminate.recv().await; agent.drained().await } => {}
    }
    Ok(ExitCode::SUCCESS)
}

async fn serve_admin(listener: Option<TcpListener>, agent: Shared) -> std::io::Result<()> {
    match listener {
        Some(listener) => axum::serve(listener, admin_routes(agent)).await,
        None => std::future::pending().await,
    }
}

fn routes(agent: Shared) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/stream/{seconds}", get(open_stream))
        .route("/finish", post(finish))
        .route("/v1/completions", post(completions))
        .route("/busy-readings", get(busy_readings))
        .route("/lie/{kind}", post(lie))
        .with_state(agent)
}

fn admin_routes(agent: Shared) -> Router {
    let liveness = match agent.release {
        Release::BeforeLiveness => Router::new(),
        _ => Router::new().route("/healthz", get(|| async { "ok" })),
    };
    liveness
        .route("/v1/load", get(load))
        .route(HISTORY_PATH, get(history))
        .route(DESCRIPTION_PATH, get(description))
        .route(INTENT_PATH, put(intent))
        .with_state(agent)
}

impl Agent {
    async fn phase(&self) -> AgentPhase {
        if self.error.is_some() {
            return AgentPhase::Failed;
        }
        let Some(drain) = *self.drain.lock().await else {
            return if self.started.elapsed() < self.loads { AgentPhase::Loading } else { AgentPhase::Ready };
        };
        if drain.since.elapsed() < Duration::from_secs(drain.settings.withdraw_seconds.into()) {
            AgentPhase::Withdrawing
        } else if self.running.load(Ordering::SeqCst) > 0 {
            AgentPhase::Draining
        } else {
            AgentPhase::Empty
        }
    }

    /// True once streams are to be cut.
    async fn past_deadline(&self) -> bool {
        self.drain.lock().await.is_some_and(|drain| {
            let seconds = drain.settings.withdraw_seconds + drain.settings.deadline_seconds;
            drain.since.elapsed() > Duration::from_secs(seconds.into())
        })
    }

    /// What it says of its steps: like an engine, nothing of their costs before it did any.
    fn steps(&self) -> StepReport {
        let spent = *self.spent.lock().unwrap_or_else(PoisonError::into_inner);
        StepReport { cost: (spent.decodes > 0.0).then_some(COST), error: 0.0, spent }
    }

    fn spend(&self, of: impl FnOnce(&mut Spent)) {
        of(&mut self.spent.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Drains as on SIGTERM; returns when empty.
    async fn drained(&self) {
        self.drain.lock().await.get_or_insert(Drain { since: Instant::now(), settings: self.config.drain });
        while !matches!(self.phase().await, AgentPhase::Empty | AgentPhase::Failed) {
            sleep(TICK / 4).await;
        }
    }
}

async fn readyz(State(agent): State<Shared>) -> (StatusCode, String) {
    let phase = agent.phase().await;
    let status = if phase == AgentPhase::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{phase:?}"))
}

async fn lie(State(agent): State<Shared>, extract::Path(kind): extract::Path<String>) {
    *agent.said.lock().await = Some(report(&agent).await);
    *agent.lie.lock().await = kind;
}

async fn finish(State(agent): State<Shared>) {
    agent.finishes.fetch_add(1, Ordering::SeqCst);
}

async fn busy_readings(State(agent): State<Shared>) -> String {
    agent.busy_readings.load(Ordering::SeqCst).to_string()
}

async fn remember(agent: Shared) {
    loop {
        let now = report(&agent).await;
        agent.memory.lock().await.note(now);
        sleep(SAMPLE_EVERY).await;
    }
}

async fn history(State(agent): State<Shared>) -> Json<LoadHistory> {
    let now = report(&agent).await;
    Json(agent.memory.lock().await.told(&now))
}

/// Of its model it knows what any agent reads first. It takes no memory that it could tell of.
async fn description(State(agent): State<Shared>) -> Json<Description> {
    let config = std::fs::read_to_string(Path::new(&agent.config.model.source).join("config.json")).ok();
    Json(Description { config, memory: None })
}

async fn load(State(agent): State<Shared>) -> Response {
    let truth = report(&agent).await;
    agent.busy_readings.fetch_add(truth.running.min(1), Ordering::SeqCst);
    let lie = agent.lie.lock().await.clone();
    match lie.as_str() {
        "html" => Html("<html><body>502 Bad Gateway</body></html>").into_response(),
        // JSON has no NaN: what writes one anyway writes no JSON.
        "nan" => {
            let text = serde_json::to_string(&truth).unwrap_or_default();
            text.replace("\"stalledSeconds\":0.0", "\"stalledSeconds\":NaN").into_response()
        }
        "negative" => Json(LoadReport { stalled_seconds: -1.0, ..truth }).into_response(),
        "falling" => {
            let cost = Some(StepCost { decode_seconds: -ITL_SECONDS.per_stream, ..COST });
            Json(LoadReport { steps: Some(StepReport { cost, ..agent.steps() }), ..truth }).into_response()
        }
        "endless" => {
            let steps = StepReport { cost: Some(COST), ..agent.steps() };
            let text = serde_json::to_string(&LoadReport { steps: Some(steps), ..truth }).unwrap_or_default();
            text.replace("\"decodeSeconds\":0.001", "\"decodeSeconds\":1e999").into_response()
        }
        "forgets" => {
            let steps = StepReport { spent: Spent::default(), ..agent.steps() };
            Json(LoadReport { steps: Some(steps), ..truth }).into_response()
        }
        "untold" => Json(LoadReport { steps: None, ..truth }).into_response(),
        "repeated" => Json(agent.said.lock().await.clone().unwrap_or(truth)).into_response(),
        "clock" => Json(LoadReport { time_ms: truth.time_ms + TEN_YEARS_MS, ..truth }).into_response(),
        "revision" => Json(LoadReport { revision: "ffffffff".to_owned(), ..truth }).into_response(),
        "other" => {
            let start_id = format!("other than {}", truth.start_id);
            Json(LoadReport { start_id, up_ms: 7 * 86_400_000, intent: None, running: 3, ..truth }).into_response()
        }
        "late" => {
            sleep(LATE).await;
            Json(truth).into_response()
        }
        "slow" | "cut" => in_pieces(&truth, lie == "cut"),
        _ => Json(truth).into_response(),
    }
}

/// An answer that takes longer than anybody waits, or ends in the middle.
fn in_pieces(truth: &LoadReport, cut: bool) -> Response {
    let text = serde_json::to_string(truth).unwrap_or_default();
    let length = text.len();
    let pieces = stream::iter(text.into_bytes().into_iter().enumerate()).then(move |(place, byte)| async move {
        match cut {
            true if place == length / 2 => Err(std::io::Error::other("cut")),
            true => Ok(vec![byte]),
            false => {
                sleep(TICK).await;
                Ok(vec![byte])
            }
        }
    });
    ([(CONTENT_LENGTH, length.to_string())], Body::from_stream(pieces)).into_response()
}

async fn report(agent: &Agent) -> LoadReport {
    let running = agent.running.load(Ordering::SeqCst);
    let referenced = (running * BLOCKS_PER_STREAM).min(TOTAL_BLOCKS);
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    LoadReport {
        protocol: agent.release.protocol(),
        time_ms: u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX),
        start_id: agent.start_id.clone(),
        up_ms: up_ms(agent),
        intent: agent.taken.lock().await.map(|taken| taken.number),
        revision: agent.config.revision.clone(),
        phase: agent.phase().await,
        error: agent.error.clone(),
        running,
        referenced_blocks: referenced,
        free_blocks: TOTAL_BLOCKS - referenced,
        finished: agent.finished.load(Ordering::SeqCst).into(),
        generated_tokens: Some(agent.generated.load(Ordering::SeqCst)),
        failed: Some(0),
        ttft_p50_seconds: TTFT_SECONDS.among(running).map(|median| median * agent.slowness),
        ttft_p95_seconds: TTFT_SECONDS.among(running).map(|median| median * TAIL),
        itl_p50_seconds: ITL_SECONDS.among(running),
        itl_p95_seconds: ITL_SECONDS.among(running).map(|median| median * TAIL),
        steps: Some(agent.steps()),
        ..LoadReport::idle(TOTAL_BLOCKS)
    }
}

fn up_ms(agent: &Agent) -> u64 {
    u64::try_from(agent.started.elapsed().as_millis()).unwrap_or(u64::MAX)
}

async fn intent(State(agent): State<Shared>, headers: HeaderMap, body: Bytes) -> Response {
    if agent.lie.lock().await.as_str() == "deaf" {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let signature = headers.get(SIGNATURE_HEADER).and_then(|value| value.to_str().ok());
    let mut before = agent.taken.lock().await;
    let receiver = Receiver {
        pod_uid: agent.authority.pod_uid.as_deref(),
        start_id: &agent.start_id,
        up_ms: up_ms(&agent),
        taken: *before,
    };
    let order = authentic(&body, signature, &agent.authority.public_keys());
    match order.and_then(|order| take(&order, receiver)) {
        Err(refused) => return (StatusCode::FORBIDDEN, refused.to_string()).into_response(),
        Ok(taken) => *before = Some(taken),
    }
    match before.as_ref().map(|taken| taken.want) {
        Some(Want::Drain(settings)) => {
            agent.drain.lock().await.get_or_insert(Drain { since: Instant::now(), settings });
        }
        Some(Want::Serve) | None => *agent.drain.lock().await = None,
    }
    drop(before);
    Json(report(&agent).await).into_response()
}

/// What it makes of each prompt: tokens that depend on prompt and place, each as likely as in every other stand-in that does not drift.
async fn completions(State(agent): State<Shared>, Json(asked): Json<Value>) -> Json<Value> {
    let texts = asked["prompt"].as_array().cloned().unwrap_or_else(|| vec![asked["prompt"].clone()]);
    let n_tokens = asked["max_tokens"].as_u64().unwrap_or(16);
    let choice = |(index, text): (usize, &Value)| {
        let seed = text.as_str().unwrap_or_default().bytes().map(u64::from).sum::<u64>();
        let tokens: Vec<String> =
            (0..n_tokens).map(|place| format!("token_id:{}", (seed + place * 7) % 1000)).collect();
        let logprob = -0.5 - agent.drift;
        let likeliest: Vec<Value> = tokens.iter().map(|token| json!({token: logprob, "token_id:0": -4.0})).collect();
        let logprobs = vec![logprob; tokens.len()];
        json!({"index": index, "text": "", "finish_reason": "length", "logprobs": {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": likeliest,
        }})
    };
    let choices: Vec<Value> = texts.iter().enumerate().map(choice).collect();
    agent.finished.fetch_add(u32::try_from(choices.len()).unwrap_or(u32::MAX), Ordering::SeqCst);
    Json(json!({"object": "text_completion", "model": agent.config.model.served_names[0], "choices": choices}))
}

/// Ticks for the asked time, then `done`; `cut` when the drain deadline ends it.
async fn open_stream(State(agent): State<Shared>, extract::Path(seconds): extract::Path<u64>) -> Response {
    if !matches!(agent.phase().await, AgentPhase::Ready | AgentPhase::Withdrawing) {
        return (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, "1")], "draining").into_response();
    }
    let until = Instant::now() + Duration::from_secs(seconds);
    let finishes = agent.finishes.load(Ordering::SeqCst);
    let ticks = stream::unfold(Some(Held::new(agent)), move |held| async move {
        let mut held = held?;
        sleep(TICK).await;
        if held.agent.past_deadline().await {
            Some((Ok::<_, std::convert::Infallible>("cut\n"), None))
        } else if Instant::now() < until && held.agent.finishes.load(Ordering::SeqCst) == finishes {
            held.tick();
            Some((Ok("tick\n"), Some(held)))
        } else {
            Some((Ok("done\n"), None))
        }
    });
    Body::from_stream(ticks).into_response()
}

/// A stream counts as running for as long as this lives.
struct Held {
    agent: Shared,
    tokens: u64,
}

impl Held {
    fn new(agent: Shared) -> Self {
        agent.running.fetch_add(1, Ordering::SeqCst);
        Self { agent, tokens: 0 }
    }

    fn tick(&mut self) {
        self.tokens += TOKENS_PER_TICK;
        self.agent.generated.fetch_add(TOKENS_PER_TICK, Ordering::SeqCst);
        self.agent.spend(|spent| spent.step(StepWork::answer(TOKENS_PER_TICK as f64, 0.0)));
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.agent.spend(|spent| spent.request(COST.work_seconds(StepWork::answer(self.tokens as f64, 0.0))));
        self.agent.running.fetch_sub(1, Ordering::SeqCst);
        self.agent.finished.fetch_add(1, Ordering::SeqCst);
    }
}
