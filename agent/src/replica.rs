//! The one replica this process is: its life, its engine once loaded, its open requests. Owns the lifecycle state and
//! carries out the actions that `lifecycle::next` names; decides nothing itself. No lock is held across an await.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use stoker_crds::{
    accounts,
    contract::{AgentPhase, LoadReport, ModelReport, PROTOCOL},
    description::{Description, MemoryReport},
    history::LoadHistory,
    intent::Want,
    kv_events::KvEvents,
};
use stoker_edge::spans::SpanLine;
use stoker_engine::{EngineHandle, EngineLoad, ModelInfo, SamplingParams};
use stoker_fetch::{Shelf, Suppliers};
use stoker_replica::history::Memory;
use tokio::sync::watch;

use crate::{
    accounts::{Account, Accounts},
    admit::{QueueLoad, Refusal, in_service},
    answer::{FormatChoice, Formats},
    chat_template::ChatTemplate,
    config::Settings,
    grammars::Grammars,
    health::{Progress, Unhealthy, check},
    identity::Identity,
    intent::{Receiver, RefusalLog, Refused, Taken, authentic, take},
    kv_log::KvLog,
    lifecycle::{Action, Departure, Event, Purpose, Service, State, next},
    metrics::Metrics,
};

/// This process's replica.
pub struct Replica {
    settings: Settings,
    start_id: String,
    started: Instant,
    started_unix: u64,
    life: Mutex<Life>,
    served: OnceLock<Arc<Served>>,
    metrics: Metrics,
    exit: watch::Sender<Option<u8>>,
    /// It has ended what was open.
    gave_up: AtomicBool,
    identity: OnceLock<Identity>,
    memory: Mutex<Memory>,
    kv_log: Arc<KvLog>,
    accounts: Accounts,
    spans: OnceLock<SpanLine>,
    shelf: OnceLock<Shelf>,
    suppliers: OnceLock<Arc<Suppliers>>,
}

/// A loaded model: the engine and what turns messages into its prompts.
pub struct Served {
    /// The engine.
    pub engine: EngineHandle,
    /// `None` for a model without one.
    pub template: Option<ChatTemplate>,
    /// How its answers are read.
    pub formats: Formats,
    /// What constrains its answers.
    pub grammars: Grammars,
}

/// What changes, behind one lock so that "no request is open" and "none can be opened" are one observation.
struct Life {
    state: State,
    open: usize,
    /// When a request was opened last.
    newest: Option<Instant>,
    load_progress: f64,
    load_moved: Instant,
    /// What is served, if it was fetched.
    model: Option<ModelReport>,
    /// Its `config.json`, once it was read.
    config: Option<String>,
    /// What the log last said about health, so that a hang is reported once and not every tick.
    reported: Result<(), Unhealthy>,
    /// The order taken last.
    taken: Option<Taken>,
    /// Of the report before.
    up_ms: u64,
    refusals: RefusalLog,
}

/// One request that is being answered. Dropping it closes it.
pub struct OpenRequest {
    replica: Arc<Replica>,
}

impl Replica {
    /// A replica at process start.
    pub fn new(settings: Settings) -> Arc<Self> {
        let now = Instant::now();
        let metrics = Metrics::new(&settings.served_names[0]);
        let start_id = format!("{:016x}", rand::random::<u64>());
        let kv_log = Arc::new(KvLog::new(start_id.clone(), metrics.kv_events()));
        Arc::new(Self {
            settings,
            start_id,
            started: now,
            started_unix: unix_time().as_secs(),
            life: Mutex::new(Life {
                state: State::new(),
                open: 0,
                newest: None,
                load_progress: 0.0,
                load_moved: now,
                model: None,
                config: None,
                reported: Ok(()),
                taken: None,
                up_ms: 0,
                refusals: RefusalLog::default(),
            }),
            served: OnceLock::new(),
            metrics,
            exit: watch::Sender::new(None),
            gave_up: AtomicBool::new(false),
            identity: OnceLock::new(),
            memory: Mutex::default(),
            kv_log,
            accounts: Accounts::default(),
            spans: OnceLock::new(),
            shelf: OnceLock::new(),
            suppliers: OnceLock::new(),
        })
    }

    /// What this process runs with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// When the process started, in Unix seconds.
    pub fn started_unix(&self) -> u64 {
        self.started_unix
    }

    /// Writes spans of requests from now on.
    pub fn trace(&self, spans: SpanLine) {
        self.spans.get_or_init(|| spans);
    }

    /// Where spans of requests go, if anywhere.
    pub(crate) fn spans(&self) -> Option<&SpanLine> {
        self.spans.get()
    }

    /// Gives these files from now on to whom the operator gives tickets.
    pub fn offer(&self, shelf: Shelf) {
        self.shelf.get_or_init(|| shelf);
    }

    /// The files that it gives, if its model is of a cache.
    pub(crate) fn shelf(&self) -> Option<&Shelf> {
        self.shelf.get()
    }

    /// Takes the operator's word on who has the model that is fetched.
    pub fn fetch_with(&self, suppliers: Arc<Suppliers>) {
        self.suppliers.get_or_init(|| suppliers);
    }

    /// Where a fetch takes files from, if this process fetches.
    pub(crate) fn suppliers(&self) -> Option<&Arc<Suppliers>> {
        self.suppliers.get()
    }

    /// Its metrics.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Becomes `Some(code)` when the process must end.
    pub fn exit_code(&self) -> watch::Receiver<Option<u8>> {
        self.exit.subscribe()
    }

    /// Whether it was told to leave service.
    pub fn is_leaving(&self) -> bool {
        self.life().state.service != Service::Serving
    }

    /// Opens a request, if the replica takes any.
    pub fn enter(self: &Arc<Self>) -> Result<OpenRequest, Refusal> {
        let mut life = self.life();
        in_service(life.state.phase(), life.load_progress, life.state.error())?;
        life.open += 1;
        life.newest = Some(Instant::now());
        drop(life);
        Ok(OpenRequest { replica: self.clone() })
    }

    /// The loaded model.
    pub fn served(&self) -> Result<Arc<Served>, Refusal> {
        let Some(served) = self.served.get() else {
            let life = self.life();
            // A replica that was drained while loading has no model either, and says that it drains.
            in_service(life.state.phase(), life.load_progress, life.state.error())?;
            return Err(Refusal::Failed("the model is not loaded".to_owned()));
        };
        Ok(served.clone())
    }

    /// Puts the loaded model in service.
    pub fn serve(&self, served: Served) {
        self.identity.get_or_init(|| Identity::of(&served.engine, &self.settings));
        if let Some(news) = served.engine.take_prefix_news() {
            self.kv_log.follow(news);
        }
        if self.served.set(Arc::new(served)).is_err() {
            unreachable!("the model is loaded once");
        }
        self.note_load_progress(1.0);
        self.metrics.loaded(self.started.elapsed());
        self.apply(Event::Loaded);
    }

    /// Ends the engine's thread, if a model was loaded; blocks for a step. A thread that is inside a driver while its libraries go with
    /// the process may crash it.
    pub fn stop_engine(&self) {
        if let Some(served) = self.served.get() {
            served.engine.shutdown();
        }
    }

    /// Loading begins, for the first time or again.
    pub fn begin_to_load(&self) {
        self.note_load_progress(0.0);
    }

    /// Notes how far loading is, 0 to 1.
    pub fn note_load_progress(&self, progress: f32) {
        let mut life = self.life();
        life.load_progress = f64::from(progress);
        life.load_moved = Instant::now();
    }

    /// Notes what was fetched and is served, or how far it is on its way.
    pub fn note_model(&self, model: Option<ModelReport>) {
        self.life().model = model;
    }

    /// Notes the `config.json` of what is to be loaded.
    pub fn note_config(&self, config: Option<String>) {
        self.life().config = config;
    }

    /// Lets an event happen and carries out what follows from it. Returns the phase after it.
    pub fn apply(&self, event: Event) -> AgentPhase {
        let (phase, actions) = self.life().advance(event);
        for action in actions {
            self.act(action);
        }
        phase
    }

    /// Takes an order of the operator and carries out what follows from it; the reading after it, or why it is refused. The
    /// same order again changes nothing.
    pub fn obey(&self, body: &[u8], signature: Option<&str>) -> Result<LoadReport, Refused> {
        let authority = &self.settings.authority;
        let order = authentic(body, signature, &authority.public_keys())?;
        let actions = {
            let mut life = self.life();
            let taken = take(&order, Receiver { taken: life.taken, ..self.receiver() })?;
            if life.taken == Some(taken) {
                Vec::new()
            } else {
                tracing::info!(number = taken.number, want = ?taken.want, before = ?life.taken, "order taken");
                life.taken = Some(taken);
                life.advance(event_of(taken.want)).1
            }
        };
        actions.into_iter().for_each(|action| self.act(action));
        Ok(self.load_report())
    }

    /// Who this process is to who signs something for it.
    pub(crate) fn receiver(&self) -> Receiver<'_> {
        let pod_uid = self.settings.authority.pod_uid.as_deref();
        Receiver { pod_uid, start_id: &self.start_id, up_ms: self.up_ms(), taken: None }
    }

    /// Writes down that an order was refused: who looks for an intruder finds it in the log.
    pub fn note_refused(&self, refused: &Refused) {
        if let Some(not_told) = self.life().refusals.note(refused.code(), Instant::now()) {
            tracing::warn!(code = refused.code(), reason = %refused, not_told, "order refused");
        }
    }

    /// Time passed: moves a drain on, publishes latencies, notices a dead engine.
    pub fn tick(&self) {
        let (open, newest) = {
            let life = self.life();
            (life.open, life.newest)
        };
        self.apply(Event::Tick { now: Instant::now(), open, newest });
        if let Some(served) = self.served.get() {
            let load = served.engine.load();
            self.metrics.observe(&load, &served.engine.take_samples());
            self.metrics.grammars_hold(served.grammars.held_bytes());
            if let Some(reason) = load.stopped {
                self.die(reason);
            }
        }
        self.watch();
    }

    /// Whether the process makes progress.
    pub fn health(&self) -> Result<(), Unhealthy> {
        let life = self.life();
        let progress = Progress {
            stalled_seconds: self.engine_load().map_or(0.0, |load| load.stalled_seconds),
            load_idle_seconds: life.load_moved.elapsed().as_secs_f64(),
        };
        check(&life.state.engine, progress, self.settings.patience)
    }

    /// The engine's own view, once it is loaded.
    pub fn engine_load(&self) -> Option<EngineLoad> {
        self.served.get().map(|served| served.engine.load())
    }

    /// What admission needs to know about the queue.
    pub fn queue_load(&self) -> QueueLoad {
        let load = self.engine_load().unwrap_or_default();
        let max_num_seqs = self.served.get().map_or(0, |served| served.engine.model().max_num_seqs);
        QueueLoad {
            open: load.open_requests,
            limit: max_num_seqs.saturating_add(self.settings.limits.max_waiting),
            waiting_prefill_tokens: load.waiting_prefill_tokens,
            prefill_tokens_per_second: load.prefill_tokens_per_second,
        }
    }

    /// One reading for `/v1/load`.
    pub fn load_report(&self) -> LoadReport {
        let mut life = self.life();
        life.up_ms = self.up_ms().max(life.up_ms + 1);
        let load = self.engine_load().unwrap_or_default();
        LoadReport {
            protocol: PROTOCOL,
            time_ms: unix_time().as_millis() as u64,
            start_id: self.start_id.clone(),
            up_ms: life.up_ms,
            intent: life.taken.map(|taken| taken.number),
            revision: self.settings.revision.clone(),
            phase: life.state.phase(),
            error: life.state.error().map(str::to_owned),
            load_progress: life.load_progress,
            running: load.running,
            waiting: load.waiting,
            waiting_prefill_tokens: load.waiting_prefill_tokens,
            total_blocks: load.total_blocks,
            referenced_blocks: load.referenced_blocks,
            cached_blocks: load.cached_blocks,
            free_blocks: load.free_blocks,
            preemptions: load.preemptions,
            finished: load.finished.total(),
            failed: Some(load.finished.error),
            generated_tokens: Some(load.generation_tokens),
            ttft_p50_seconds: load.ttft_p50_seconds,
            ttft_p95_seconds: load.ttft_p95_seconds,
            itl_p50_seconds: load.itl_p50_seconds,
            itl_p95_seconds: load.itl_p95_seconds,
            prefill_tokens_per_second: load.prefill_tokens_per_second,
            steps: self.served.get().map(|_| load.step_report),
            stalled_seconds: load.stalled_seconds,
            model: life.model.clone(),
        }
    }

    /// What is served, or is to be, and the memory that it took, for `/v1/model`.
    pub fn description(&self) -> Description {
        let memory = self.served.get().map(|served| memory_report(served.engine.model()));
        Description { config: self.life().config.clone(), memory }
    }

    /// Keeps how it is now, for [`history`](Self::history).
    pub fn remember(&self) {
        let now = self.load_report();
        self.memory().note(now);
    }

    /// Its load since it started, a day at most, for `/v1/history`.
    pub fn history(&self) -> LoadHistory {
        let now = self.load_report();
        self.memory().told(&now)
    }

    /// What of its prefix cache is new to a gateway that knows everything up to `after` of a start, for `/v1/kv-events`.
    pub async fn kv_events(&self, start_id: &str, after: u64, wait: Duration) -> KvEvents {
        self.kv_log.told(start_id, after, wait).await
    }

    /// Where what a tenant's requests had goes that no answer tells, of those that this gateway sends; `None`: there are too many.
    pub(crate) fn account(&self, gateway: &str, tenant: &str) -> Option<Account> {
        self.accounts.of(gateway, tenant, Instant::now())
    }

    /// What is on the accounts of a gateway's tenants, for `/v1/accounts`.
    pub fn accounts(&self, gateway: &str) -> accounts::Accounts {
        let (device_micros, tokens) = self.accounts.told(gateway, Instant::now());
        accounts::Accounts { start_id: self.start_id.clone(), device_micros, tokens }
    }

    /// The watchdog: reports a process that stopped making progress, with everything known about its engine. Ending it
    /// is the kubelet's part, which asks `/healthz`.
    fn watch(&self) {
        let health = self.health();
        let before = std::mem::replace(&mut self.life().reported, health.clone());
        match (&before, &health) {
            (Ok(()), Err(unhealthy)) => {
                let (life, engine) = (self.load_report(), self.engine_load());
                tracing::error!(reason = %unhealthy, ?life, ?engine, "no progress: the kubelet will restart this replica");
            }
            (Err(_), Ok(())) => tracing::info!("progress again"),
            (Ok(()), Ok(())) | (Err(_), Err(_)) => {}
        }
    }

    fn die(&self, reason: String) {
        if self.life().state.error().is_none() {
            tracing::error!(reason, "the engine stopped");
            self.apply(Event::Died(reason));
        }
    }

    fn act(&self, action: Action) {
        match action {
            Action::AbortAll(reason) => {
                self.gave_up.store(true, Ordering::Release);
                if let Some(served) = self.served.get() {
                    served.engine.abort_all(&reason);
                }
            }
            // Only the first code counts: a later one would be about the way out.
            Action::Exit(code) => {
                self.exit.send_if_modified(|exit| exit.replace(exit.unwrap_or(code)).is_none());
            }
        }
    }

    /// What it has in common with replicas that may go on with its answers; `None` before it serves.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.get()
    }

    fn up_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        // Every critical section leaves a valid state, so a panic elsewhere does not spoil it.
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn memory_report(model: &ModelInfo) -> MemoryReport {
    let ModelInfo { device, held, memory, .. } = model;
    MemoryReport {
        device: device.clone(),
        weights_bytes: memory.weights_bytes,
        weights_by_format: held.iter().map(|(format, bytes)| ((*format).to_owned(), *bytes)).collect(),
        workspace_bytes: memory.workspace_bytes,
        kv_tokens: memory.kv_tokens(),
        kv_bytes_per_token: memory.kv_bytes_per_token,
        limit_bytes: memory.limit_bytes,
    }
}

fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// What an order means for the life of the replica.
fn event_of(want: Want) -> Event {
    match want {
        Want::Serve => Event::Return,
        Want::Drain(window) => Event::Leave(Departure::new(Purpose::Drain, Instant::now(), window)),
    }
}

impl Life {
    fn advance(&mut self, event: Event) -> (AgentPhase, Vec<Action>) {
        let before = self.state.phase();
        let (state, actions) = next(self.state.clone(), event);
        self.state = state;
        let after = self.state.phase();
        if after != before {
            tracing::info!(from = ?before, to = ?after, open = self.open, "phase");
        }
        (after, actions)
    }
}

impl Served {
    /// A model whose answers are read as chosen, which by default is as its template says.
    pub fn new(engine: EngineHandle, template: Option<ChatTemplate>, choice: FormatChoice) -> Self {
        let formats = Formats {
            calls: choice.calls.resolve(template.as_ref().and_then(ChatTemplate::call_format)),
            reasoning: choice.reasoning.resolve(template.as_ref().and_then(ChatTemplate::reasoning_format)),
        };
        Self { engine, template, formats, grammars: Grammars::default() }
    }

    /// The model's generation config where it has one, else OpenAI's defaults.
    pub fn default_sampling(&self) -> SamplingParams {
        let model = &self.engine.model().defaults;
        let fallback = SamplingParams::default();
        SamplingParams {
            temperature: model.temperature.unwrap_or(fallback.temperature),
            top_p: model.top_p.unwrap_or(fallback.top_p),
            top_k: model.top_k.unwrap_or(fallback.top_k),
            min_p: model.min_p.unwrap_or(fallback.min_p),
            repetition_penalty: model.repetition_penalty.unwrap_or(fallback.repetition_penalty),
            ..fallback
        }
    }
}

/// How a replica ends what is open.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ReplicaEnd {
    /// It leaves; nothing in a request is to blame.
    Left,
    /// Its engine stopped by itself. Nobody knows whether a request is to blame.
    EngineDied,
}

impl OpenRequest {
    /// How the replica has ended all that was open, this one included, if it has.
    pub fn replica_end(&self) -> Option<ReplicaEnd> {
        if self.replica.engine_load().is_some_and(|load| load.stopped.is_some()) {
            return Some(ReplicaEnd::EngineDied);
        }
        self.replica.gave_up.load(Ordering::Acquire).then_some(ReplicaEnd::Left)
    }

    /// Who answers it.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.replica.life().open -= 1;
    }
}
