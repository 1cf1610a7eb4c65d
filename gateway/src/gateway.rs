//! What all requests share: the fleet, the prefix index, the retry budget, connections to replicas. Takes in what the operator says,
//! and makes choices with [`stoker_routing::route`].

use std::{
    collections::{HashMap, HashSet},
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::http::{Request, Response};
use bytes::Bytes;
use stoker_crds::{
    endpoints::{EndpointState, Endpoints},
    in_flight::SentPrompt,
};
use stoker_edge::{cors::AllowedOrigin, spans::SpanLine};
use stoker_routing::{Ask, Capacity, Choice, PrefixIndex, ReplicaView, Rules, Sent, Source, route, scores};
use tokio::sync::{Notify, Semaphore, broadcast, futures::Notified, watch};

use crate::{
    asked::Asked,
    budget::RetryBudget,
    explain::Foreseen,
    fleet::{Deployment, Fleet, Member, Registry, Version},
    in_flight,
    line::Bounds,
    metrics::Metrics,
    oidc::Issuers,
    quota::{Exceeded, Quota},
    tenants::{Tenant, Tenants},
    turns::Turns,
    upstream::{ReplicaBody, SendError, Upstream},
};

/// What an operator of the gateway may set.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Largest body of a request.
    pub body_bytes_max: usize,
    /// Beginnings of prompts that are remembered.
    pub prefixes_max: usize,
    /// For the head of an answer that is not streamed: as long as its generation may take.
    pub answer_timeout: Duration,
    /// A replica that does not answer for so long has stalled: its answers go on elsewhere.
    pub stall: Duration,
    /// Bytes of requests that are kept while their answers are streamed, so that these can go on elsewhere.
    pub kept_bytes_max: u64,
    /// For finding a replica that goes on with an answer.
    pub resume: Duration,
    /// A request waits no longer for a replica, or for room at one.
    pub hold: Duration,
    /// What may wait so for each deployment.
    pub line: Bounds,
    /// Whether other proxies may ask where requests go.
    pub picks_endpoints: bool,
    /// Whose pages may ask from a browser.
    pub allowed_origins: Vec<AllowedOrigin>,
    /// Constants of the choice.
    pub rules: Rules,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            body_bytes_max: stoker_edge::body::MAX_BYTES,
            prefixes_max: 1 << 20,
            answer_timeout: Duration::from_secs(600),
            stall: Duration::from_secs(3),
            kept_bytes_max: 256 << 20,
            resume: Duration::from_secs(30),
            hold: Duration::from_secs(45),
            line: Bounds { requests: 1024, bytes: 64 << 20 },
            picks_endpoints: false,
            allowed_origins: Vec::new(),
            rules: Rules::default(),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Gateway {
    /// What was set.
    pub settings: Settings,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Requests that wait for their turn.
    pub turns: Turns,
    /// What it calls itself before other gateways.
    pub id: String,
    /// Streams of what it has on replicas that may be read at the same time.
    pub(crate) tellings: Arc<Semaphore>,
    in_flight_changed: Arc<Notify>,
    /// Prompts that it sends, for other gateways.
    sent: broadcast::Sender<SentPrompt>,
    upstream: Upstream,
    spans: OnceLock<SpanLine>,
    fleet: watch::Sender<Arc<Fleet>>,
    registry: Mutex<Registry>,
    index: Mutex<PrefixIndex>,
    budget: Mutex<RetryBudget>,
    begun: Instant,
    /// Bytes of requests that are kept while their answers are streamed.
    kept_bytes: AtomicU64,
    leaves: watch::Sender<bool>,
    /// Who may ask; `None`: everybody.
    tenants: watch::Sender<Option<Admission>>,
    /// Names of tenants that are not in the file.
    named_by_tokens: Mutex<HashSet<String>>,
    /// What tenants have used, by their names: they keep it when the file changes.
    quotas: Mutex<HashMap<String, Quota>>,
}

/// Each is a name in metrics and an account of its limits for as long as the process lives.
const NAMED_BY_TOKENS_MAX: usize = 10_000;

/// Prompts that are kept for who tells them, a line a millisecond.
const SENT_KEPT: usize = 1024;

/// Who may ask, and whose tokens say who asks.
#[derive(Clone, Debug)]
pub struct Admission {
    /// As the file says.
    pub tenants: Arc<Tenants>,
    /// Their keys.
    pub issuers: Arc<Issuers>,
}

/// A choice and what it was made of.
pub struct Routed<'a> {
    /// Who was chosen.
    pub member: &'a Member,
    /// Of whom.
    pub deployment: &'a Deployment,
    /// Why.
    pub choice: Choice,
}

/// What each replica that may be chosen can hold, by its slot.
struct Capacities(Vec<Capacity>);

impl Capacities {
    fn of(members: &[&Member], views: &[ReplicaView]) -> Self {
        let n_slots = members.iter().map(|member| member.slot + 1).max().unwrap_or_default();
        let mut capacities = vec![Capacity::default(); n_slots as usize];
        for (member, view) in members.iter().zip(views) {
            let waiting_tokens = view.load.prefill_tokens;
            capacities[member.slot as usize] = Capacity { kv_blocks: member.kv_blocks(), waiting_tokens };
        }
        Self(capacities)
    }

    /// Nothing where it may not be chosen.
    fn of_slot(&self, slot: u32) -> Capacity {
        self.0.get(slot as usize).copied().unwrap_or_default()
    }
}

impl Gateway {
    /// One that has heard of nobody yet.
    pub fn new(settings: Settings) -> prometheus::Result<Arc<Self>> {
        let (line, prefixes_max) = (settings.line, settings.prefixes_max);
        let in_flight_changed = Arc::new(Notify::new());
        Ok(Arc::new(Self {
            settings,
            metrics: Arc::new(Metrics::new()?),
            turns: Turns::bounded(line),
            id: format!("{:016x}", rand::random::<u64>()),
            tellings: Arc::new(Semaphore::new(in_flight::READERS_MAX)),
            upstream: Upstream::default(),
            spans: OnceLock::new(),
            fleet: watch::Sender::default(),
            registry: Mutex::new(Registry::telling(Arc::clone(&in_flight_changed))),
            in_flight_changed,
            sent: broadcast::Sender::new(SENT_KEPT),
            index: Mutex::new(PrefixIndex::bounded(prefixes_max)),
            budget: Mutex::default(),
            begun: Instant::now(),
            kept_bytes: AtomicU64::new(0),
            leaves: watch::Sender::default(),
            tenants: watch::Sender::default(),
            named_by_tokens: Mutex::default(),
            quotas: Mutex::default(),
        }))
    }

    /// Milliseconds since it began.
    pub fn now_ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }

    /// Writes spans of requests from now on.
    pub fn trace(&self, spans: SpanLine) {
        self.spans.get_or_init(|| spans);
    }

    /// Where spans of requests go, if anywhere.
    pub fn spans(&self) -> Option<&SpanLine> {
        self.spans.get()
    }

    /// What is known now.
    pub fn fleet(&self) -> Arc<Fleet> {
        self.fleet.borrow().clone()
    }

    /// What is known from now on.
    pub fn fleets(&self) -> watch::Receiver<Arc<Fleet>> {
        self.fleet.subscribe()
    }

    /// The last document that was taken in.
    pub fn version(&self) -> Option<Version> {
        self.fleet().version.clone()
    }

    /// Takes in a document of the operator.
    pub fn learn(&self, endpoints: Endpoints) {
        let change = lock(&self.registry).after(&self.fleet(), endpoints, self.now_ms());
        self.turns.keep_only(&change.fleet);
        // First: who hears a replica looks whose slot it is, and what it heard of the one before is forgotten with it.
        self.fleet.send_replace(Arc::new(change.fleet));
        for slot in change.forgotten {
            lock(&self.index).forget(slot);
        }
    }

    /// Chooses a replica of a deployment that was not tried before, and remembers that it will hold the prompt.
    pub fn choose<'a>(&self, deployment: &'a Deployment, asked: &Asked, tried: &[u32]) -> Option<Routed<'a>> {
        let Asked { chain, session, request, .. } = asked;
        let begun = Instant::now();
        let now_ms = self.now_ms();
        let (members, views) = deployment.candidates(now_ms, tried);
        let capacities = Capacities::of(&members, &views);
        let mut index = lock(&self.index);
        let matches = index.matches(chain, now_ms, |slot| capacities.of_slot(slot));
        let ask = Ask { chain, session: *session, request: *request, now_ms };
        let choice = route(&ask, &views, &matches, &self.settings.rules)?;
        let member = members[choice.place];
        let sent = Sent::of(chain, choice.matched);
        index.note_sent(&sent, member.slot, now_ms);
        drop(index);
        self.tell_sent(member, sent);
        self.metrics.route_seconds.observe(begun.elapsed().as_secs_f64());
        let host = deployment.host();
        self.metrics.routes.with_label_values(&[host.as_str(), choice.reason.word()]).inc();
        if let Some(source) = choice.source {
            self.metrics.prefix.with_label_values(&[host.as_str(), source.word()]).inc();
        }
        let count = |kind, tokens: u32| {
            self.metrics.prompt_tokens.with_label_values(&[host.as_str(), kind]).inc_by(tokens.into())
        };
        count("cached", choice.terms.cached_tokens);
        count("uncached", choice.terms.uncached_tokens);
        Some(Routed { member, deployment, choice })
    }

    fn tell_sent(&self, member: &Member, Sent { names, new_bytes }: Sent) {
        if self.sent.receiver_count() > 0 {
            // Whoever listened may have left meanwhile.
            let _ = self.sent.send(SentPrompt { uid: member.uid.clone(), names, new_bytes });
        }
    }

    /// Prompts that it sends after this.
    pub(crate) fn sent(&self) -> broadcast::Receiver<SentPrompt> {
        self.sent.subscribe()
    }

    /// Which replica a request would go to now, and what the choice sees of all. Remembers and counts nothing.
    pub fn foresee<'a>(&self, deployment: &'a Deployment, asked: &Asked) -> Foreseen<'a> {
        let Asked { chain, session, request, .. } = asked;
        let now_ms = self.now_ms();
        let (members, views) = deployment.candidates(now_ms, &[]);
        let capacities = Capacities::of(&members, &views);
        let matches = lock(&self.index).matches(chain, now_ms, |slot| capacities.of_slot(slot));
        let (ask, rules) = (Ask { chain, session: *session, request: *request, now_ms }, &self.settings.rules);
        let scores = scores(&ask, &views, &matches, rules);
        let choice = route(&ask, &views, &matches, rules);
        Foreseen { deployment, members, views, scores, choice }
    }

    /// Who holds which beginnings of prompts. Every request waits for it: not to be kept.
    pub(crate) fn index(&self) -> MutexGuard<'_, PrefixIndex> {
        lock(&self.index)
    }

    /// Sends a request to a replica.
    pub async fn send(&self, request: Request<Bytes>) -> Result<Response<ReplicaBody>, SendError> {
        self.upstream.send(request).await
    }

    /// A request came: it earns a part of a retry.
    pub fn earn_retry(&self) {
        lock(&self.budget).earn();
    }

    /// Whether a request may be sent again.
    pub fn spend_retry(&self) -> bool {
        let may = lock(&self.budget).spend();
        if !may {
            self.metrics.retries_refused.inc();
        }
        may
    }

    /// Whether so many bytes more may be kept.
    pub fn keep(&self, n_bytes: u64) -> bool {
        let fits = |kept: u64| Some(kept + n_bytes).filter(|kept| *kept <= self.settings.kept_bytes_max);
        self.kept_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    /// They are not any more.
    pub fn keep_no_more(&self, n_bytes: u64) {
        self.kept_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
    }

    /// Who may ask; `None`: everybody.
    pub fn admission(&self) -> Option<Admission> {
        self.tenants.borrow().clone()
    }

    /// From now on only these may ask, and files that they name are in this folder; whether that is new.
    pub fn learn_tenants(&self, tenants: Tenants, folder: &Path) -> bool {
        self.tenants.send_if_modified(|known| {
            let is_new = known.as_ref().is_none_or(|known| *known.tenants != tenants);
            let same = known.take().map(|known| known.issuers).filter(|issuers| issuers.are(tenants.issuers(), folder));
            let issuers = same.unwrap_or_else(|| Arc::new(Issuers::follow(tenants.issuers(), folder, &self.metrics)));
            *known = Some(Admission { tenants: Arc::new(tenants), issuers });
            is_new
        })
    }

    /// Whether there is an account for a tenant that is not in the file, or room for one.
    pub fn has_account(&self, name: &str) -> bool {
        let mut names = lock(&self.named_by_tokens);
        names.contains(name) || names.len() < NAMED_BY_TOKENS_MAX && names.insert(name.to_owned())
    }

    /// A tenant's request of about so many prompt tokens begins, if its limits let it.
    pub fn begin_of(&self, tenant: &Tenant, prompt_tokens: u32) -> Result<(), Exceeded> {
        let now_ms = self.now_ms();
        let mut quotas = lock(&self.quotas);
        let begun = quotas.entry(tenant.name.clone()).or_default().begin(&tenant.limits, prompt_tokens, now_ms);
        if let Err(exceeded) = &begun {
            self.metrics.tenant_limited.with_label_values(&[tenant.name.as_str(), exceeded.limit]).inc();
        }
        begun
    }

    /// It ended, and had so many tokens more than was thought.
    pub fn end_of(&self, tenant: &Tenant, tokens_more: i64) {
        if let Some(quota) = lock(&self.quotas).get_mut(&tenant.name) {
            quota.end(tokens_more);
        }
    }

    /// Requests of a tenant that were answered before they were done had so many tokens.
    pub fn owed_by(&self, tenant: &str, tokens: u64) {
        if let Some(quota) = lock(&self.quotas).get_mut(tenant) {
            quota.owe(i64::try_from(tokens).unwrap_or(i64::MAX));
        }
    }

    /// What ends when what it has on any replica changes after this.
    pub fn in_flight_changes(&self) -> Notified<'_> {
        self.in_flight_changed.notified()
    }

    /// From now on it is not ready.
    pub fn leave(&self) {
        self.leaves.send_replace(true);
    }

    /// Whether it leaves.
    pub fn leaves(&self) -> bool {
        *self.leaves.borrow()
    }

    /// Waits until it leaves.
    pub async fn leaving(&self) {
        // It does not end before this.
        let _ = self.leaves.subscribe().wait_for(|leaves| *leaves).await;
    }

    /// Whether requests should come here.
    pub fn is_ready(&self) -> bool {
        !self.leaves() && self.fleet().version.is_some()
    }

    /// Metrics as text, with what is counted only when somebody looks.
    pub fn render_metrics(&self) -> prometheus::Result<String> {
        let (fleet, now_ms) = (self.fleet(), self.now_ms());
        for source in Source::ALL {
            self.metrics.prefixes.with_label_values(&[source.word()]).set(lock(&self.index).len(source) as i64);
        }
        self.metrics.kept_bytes.set(self.kept_bytes.load(Ordering::Relaxed) as i64);
        self.turns.count(self, &self.metrics);
        self.metrics.replicas.reset();
        self.metrics.broken.reset();
        self.metrics.circuit_open.reset();
        self.metrics.heard.reset();
        for deployment in fleet.deployments() {
            let host = deployment.host();
            for state in EndpointState::ALL {
                let count = deployment.count(state) as i64;
                self.metrics.replicas.with_label_values(&[host.as_str(), state.word()]).set(count);
            }
            let broken: Vec<_> = deployment.members.iter().filter(|member| member.is_broken(now_ms)).collect();
            self.metrics.broken.with_label_values(&[&host]).set(broken.len() as i64);
            for member in broken {
                self.metrics.circuit_open.with_label_values(&[&host, &member.pod]).set(1);
            }
            let heard = deployment.members.iter().filter(|member| lock(&self.index).is_heard(member.slot)).count();
            self.metrics.heard.with_label_values(&[&host]).set(heard as i64);
        }
        self.metrics.render()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
