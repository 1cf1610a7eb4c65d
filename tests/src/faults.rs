//! A proxy between the operator and the real API server that fails what a script says, by seed, and watches over every
//! write that passes.
//!
//! The operator speaks plain HTTP to it; it speaks to the API server with the operator's own rights. Users go past it.

use std::{
    collections::{HashMap, VecDeque},
    fs, io,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::Result;
use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use http_body_util::BodyExt;
use jiff::Timestamp;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    Client, ResourceExt,
    api::ListParams,
    client::Body as KubeBody,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_cluster::{ControlPlane, Identity};
use stoker_crds::{InferenceDeployment, intent::Want};
use stoker_operator::{
    desired::labels,
    observe,
    rollout::{UNREACHABLE_PATIENCE, deadline},
};
use stoker_replica::Intent;
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};

use crate::{
    cluster::is_running,
    operator::{client_of, serves},
    witness::{self, Witness},
};

/// What goes wrong, by the rows of docs/faults.md.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The operator is killed when one of its writes was made and not answered.
    CrashAfterWrite,
    /// The operator is killed before it writes a status.
    CrashBeforeStatus,
    /// A list shows the cluster as it was some lists ago, when the operator starts.
    StaleList,
    /// Events are left out; later the watch must be begun anew.
    MissedEvent,
    /// Events come twice, and in another order.
    RepeatedEvent,
    /// Requests are refused with 409, 429, 500 and 503.
    Refused,
    /// Writes are made and their answers lost; answers come late, or half.
    LostAnswer,
    /// The API server is gone for seconds, again and again.
    Gone,
    /// Writes of one kind of object are forbidden for seconds: a quota, a policy or a right that is taken away.
    Denied,
    /// Two operators, of which one is frozen, now and then for longer than its Lease lasts.
    Paused,
    /// The operator's wall clock is set, ahead and back.
    Clock,
    /// Between operator and API server all is well; users change, take out and put back any field, give values that may not be and fields
    /// that there are none of.
    Fields,
    /// The CRD is replaced by an older one, now and then one that knows not all that is stored, and by the present one again.
    Crd,
    /// Between operator and API server all is well; the node takes no more pods, or falls silent, now and then for so long that it counts as lost.
    Node,
    /// The same; agents lie, freeze, and answer badly.
    Agents,
}

/// What is done with one request.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Verdict {
    Pass,
    Refuse(u16),
    Late(Duration),
    /// The connection ends, and so do all watches.
    Away,
    /// It is passed on, and the connection ends without an answer.
    Lose,
    /// Half of the answer comes.
    Half,
    KillBefore,
    KillAfter,
    Stale,
}

/// The proxy. It ends when it is dropped.
pub struct FaultProxy {
    shared: Arc<Shared>,
    kubeconfig: PathBuf,
    _runtime: Runtime,
}

struct Shared {
    upstream: Client,
    /// With all rights: what an operator may not look at is looked at all the same.
    observer: Client,
    script: Mutex<Script>,
    /// Process of the operator that is to be killed. Held while it is being killed, so that nobody takes it for alive meanwhile.
    victim: Mutex<u32>,
    /// Raised when every watch is to end.
    watches_end: watch::Sender<u32>,
    seen: Mutex<Seen>,
    witness: Mutex<Witness>,
    /// How soon the operator hears what happens; of the faults so far the one that lasts.
    heard_within: Mutex<Option<Duration>>,
}

/// What goes wrong next.
struct Script {
    fault: Fault,
    random: StdRng,
    /// Writes until the operator is killed.
    writes_to_live: u32,
    /// Answers to lists, by path, the oldest first.
    lists: HashMap<String, Vec<Bytes>>,
    outage: Outage,
}

/// What is away for seconds, and then there for seconds.
struct Outage {
    is_on: bool,
    turns: Instant,
    /// Of which kind of objects writes are forbidden.
    of: &'static str,
}

/// What passed.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Writes, those of the Lease left out.
    pub writes: u64,
    /// Requests or events that something was done to.
    pub faults: u64,
    /// What no write may do.
    pub violations: Vec<String>,
}

const LISTS_REMEMBERED: usize = 4;
/// Kinds of which an API server refuses to write some.
const DENIED: [&str; 4] = ["pods", "services", "configmaps", "inferencedeployments"];
/// The Lease, as the chart names it.
const LEASE: (&str, &str) = ("stoker-system", "stoker-operator");
const BODY_BYTES_MAX: usize = 16 << 20;
/// How long a generation is waited for that was asked for already.
const WITNESS_PATIENCE: Duration = Duration::from_secs(2);

impl Fault {
    /// How soon an operator hears what happens to objects; `None`: it may never.
    fn heard_within(self) -> Option<Duration> {
        match self {
            Self::MissedEvent | Self::RepeatedEvent | Self::StaleList => None,
            // Until it goes on, or until its watches are whole again.
            Self::Paused | Self::Gone | Self::Refused | Self::LostAnswer | Self::Crd => Some(Duration::from_secs(20)),
            _ => Some(Duration::from_secs(10)),
        }
    }
}

impl FaultProxy {
    /// Starts a proxy in front of this control plane.
    pub fn start(control_plane: &ControlPlane, seed: u64) -> Result<Self> {
        let runtime = Runtime::new()?;
        let upstream = runtime.block_on(client_of(&control_plane.kubeconfig_of(Identity::Operator)))?;
        let observer = runtime.block_on(client_of(&control_plane.kubeconfig_path()))?;
        let script = Script {
            fault: Fault::None,
            random: StdRng::seed_from_u64(seed),
            writes_to_live: 0,
            lists: HashMap::new(),
            outage: Outage { is_on: false, turns: Instant::now(), of: DENIED[0] },
        };
        let shared = Arc::new(Shared {
            upstream,
            observer,
            script: Mutex::new(script),
            victim: Mutex::new(0),
            watches_end: watch::Sender::new(0),
            seen: Mutex::default(),
            witness: Mutex::default(),
            heard_within: Mutex::new(Fault::None.heard_within()),
        });
        runtime.spawn(hear_pods(shared.clone()));
        runtime.spawn(hear_deployments(shared.clone()));
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let address = listener.local_addr()?;
        let app = Router::new().fallback(pass).with_state(shared.clone());
        runtime.spawn(async move { axum::serve(listener, app).await });
        let kubeconfig = control_plane.dir().join(format!("kubeconfig-{}", address.port()));
        fs::write(&kubeconfig, kubeconfig_of(address).to_string())?;
        Ok(Self { shared, kubeconfig, _runtime: runtime })
    }

    /// The file that leads the operator here.
    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.clone()
    }

    /// From now on this goes wrong, and this process is the operator.
    pub fn begin(&self, fault: Fault, operator: u32) {
        *lock(&self.shared.victim) = operator;
        *lock(&self.shared.heard_within) = fault.heard_within();
        let mut script = lock(&self.shared.script);
        script.fault = fault;
        script.writes_to_live = script.random.random_range(1..12);
        script.outage.is_on = false;
    }

    /// True when this process is the one that is killed next.
    pub fn aims_at(&self, operator: u32) -> bool {
        *lock(&self.shared.victim) == operator
    }

    /// Nothing goes wrong any more. Watches begin anew: what they missed, they missed.
    pub fn end(&self) {
        *lock(&self.shared.victim) = 0;
        lock(&self.shared.script).fault = Fault::None;
        self.shared.watches_end.send_modify(|count| *count += 1);
    }

    /// Something else than this proxy did something wrong.
    pub fn note_fault(&self) {
        lock(&self.shared.seen).faults += 1;
    }

    /// What passed so far.
    pub fn seen(&self) -> Seen {
        lock(&self.shared.seen).clone()
    }
}

fn kubeconfig_of(address: SocketAddr) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "faults",
        "clusters": [{"name": "faults", "cluster": {"server": format!("http://{address}")}}],
        "contexts": [{"name": "faults", "context": {"cluster": "faults", "user": "nobody"}}],
        "users": [{"name": "nobody", "user": {}}],
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    writes: bool,
    of_lease: bool,
    of_status: bool,
    watches: bool,
    lists: bool,
}

impl Kind {
    fn of(method: &Method, path: &str, query: &str) -> Self {
        let reads = method == Method::GET;
        let watches = query.contains("watch=true");
        let last = path.rsplit('/').next().unwrap_or_default();
        let lists = ["pods", "services", "configmaps", "inferencedeployments"].contains(&last);
        Self {
            writes: !reads,
            of_lease: path.contains("/leases"),
            of_status: !reads && last == "status",
            watches,
            lists: reads && lists && !watches,
        }
    }
}

impl Outage {
    /// Whether it is away now: up to six seconds, and then there for as many.
    fn is_on(&mut self, random: &mut StdRng) -> bool {
        let now = Instant::now();
        if now >= self.turns {
            self.is_on = !self.is_on;
            self.turns = now + Duration::from_millis(random.random_range(200..6000));
            self.of = DENIED[random.random_range(0..DENIED.len())];
        }
        self.is_on
    }
}

impl Script {
    fn judge(&mut self, kind: Kind, path: &str) -> Verdict {
        let write = kind.writes && !kind.of_lease;
        match self.fault {
            Fault::CrashAfterWrite if write => self.countdown(Verdict::KillAfter),
            Fault::CrashBeforeStatus if kind.of_status => self.countdown(Verdict::KillBefore),
            // Its caches are filled by lists that follow a kill; an operator does not list often otherwise.
            Fault::StaleList if kind.lists && self.random.random_bool(0.5) => Verdict::Stale,
            Fault::StaleList if write => self.countdown(Verdict::KillAfter),
            Fault::Refused if !kind.of_lease && self.random.random_bool(0.25) => {
                let codes = if kind.writes { &[409, 429, 500, 503][..] } else { &[429, 500, 503] };
                Verdict::Refuse(codes[self.random.random_range(0..codes.len())])
            }
            Fault::Gone if self.outage.is_on(&mut self.random) => Verdict::Away,
            Fault::Denied
                if write
                    && self.outage.is_on(&mut self.random)
                    && path.split('/').any(|part| part == self.outage.of) =>
            {
                Verdict::Refuse(403)
            }
            Fault::LostAnswer if !kind.watches && !kind.of_lease => match self.random.random_range(0..8) {
                0 if kind.writes => Verdict::Lose,
                1 => Verdict::Half,
                2 => Verdict::Late(Duration::from_millis(self.random.random_range(50..800))),
                _ => Verdict::Pass,
            },
            _ => Verdict::Pass,
        }
    }

    fn countdown(&mut self, verdict: Verdict) -> Verdict {
        self.writes_to_live = self.writes_to_live.saturating_sub(1);
        if self.writes_to_live > 0 {
            return Verdict::Pass;
        }
        // The next one's time; it is a new process.
        self.writes_to_live = self.random.random_range(1..12);
        verdict
    }

    /// What becomes of one event of a watch.
    fn judge_event(&mut self) -> EventVerdict {
        match self.fault {
            Fault::MissedEvent if self.random.random_bool(0.3) => EventVerdict::Drop,
            Fault::MissedEvent if self.random.random_bool(0.1) => EventVerdict::Expire,
            Fault::RepeatedEvent if self.random.random_bool(0.3) => EventVerdict::Twice,
            Fault::RepeatedEvent if self.random.random_bool(0.3) => EventVerdict::Later,
            _ => EventVerdict::Pass,
        }
    }

    /// An older answer to the same list, and the present one is remembered.
    fn older(&mut self, key: &str, present: &Bytes) -> Bytes {
        let known = self.lists.entry(key.to_owned()).or_default();
        known.push(present.clone());
        if known.len() > LISTS_REMEMBERED {
            known.remove(0);
        }
        let place = self.random.random_range(0..known.len());
        known[place].clone()
    }
}

/// What becomes of one event.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EventVerdict {
    Pass,
    Drop,
    Twice,
    /// Behind the next one.
    Later,
    /// The watch ends: what comes after is too old to be told.
    Expire,
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    match shared.pass(request).await {
        Ok(response) => response,
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}")).into_response(),
    }
}

impl Shared {
    async fn pass(self: Arc<Self>, request: Request) -> Result<Response> {
        let (parts, body) = request.into_parts();
        let body = to_bytes(body, BODY_BYTES_MAX).await?;
        let path = parts.uri.path();
        let kind = Kind::of(&parts.method, path, parts.uri.query().unwrap_or_default());
        let verdict = lock(&self.script).judge(kind, path);
        if !matches!(verdict, Verdict::Pass) {
            lock(&self.seen).faults += 1;
        }
        match verdict {
            Verdict::Refuse(code) => return Ok(refusal(code)),
            Verdict::Late(wait) => tokio::time::sleep(wait).await,
            Verdict::KillBefore => {
                self.kill();
                return Ok(cut());
            }
            Verdict::Away => {
                self.watches_end.send_modify(|count| *count += 1);
                return Ok(cut());
            }
            _ => {}
        }
        if kind.writes && !kind.of_lease {
            lock(&self.seen).writes += 1;
            self.watch_over(&parts.method, path, &body).await;
            if kind.of_status {
                self.watch_over_status(path, &body).await;
            }
            self.watch_over_leader(&parts).await;
        }
        let answer = self.upstream.send(upstream(&parts, body)?).await?;
        if kind.watches {
            return Ok(self.watched(answer));
        }
        let (head, body) = answer.into_parts();
        let mut body = body.collect().await?.to_bytes();
        if kind.lists {
            let older = lock(&self.script).older(&parts.uri.to_string(), &body);
            body = if verdict == Verdict::Stale { older } else { body };
        }
        match verdict {
            Verdict::KillAfter => self.kill(),
            Verdict::Lose => {}
            Verdict::Half => return Ok(answer_of(&head, broken(body.slice(..body.len() / 2)))),
            _ => return Ok(answer_of(&head, Body::from(body))),
        }
        Ok(cut())
    }

    fn kill(&self) {
        let mut victim = lock(&self.victim);
        let pid = std::mem::take(&mut *victim);
        if pid != 0 {
            // It may have ended by itself.
            let _ = Command::new("kill").args(["-s", "KILL", &pid.to_string()]).status();
            while is_running(pid) {
                sleep(Duration::from_millis(5));
            }
        }
    }

    /// What no write may do, whatever went wrong before it.
    async fn watch_over(&self, method: &Method, path: &str, body: &Bytes) {
        let Some(name) = path.strip_suffix('/').unwrap_or(path).split("/pods/").nth(1) else { return };
        let words: Value = serde_json::from_slice(body).unwrap_or_default();
        let version = match *method {
            Method::DELETE => &words["preconditions"]["resourceVersion"],
            Method::PATCH => &words["metadata"]["resourceVersion"],
            _ => return,
        };
        let Some(version) = version.as_str() else {
            return self.violation(format!("{method} of {name} is not bound to a version"));
        };
        let pod = match kube::Api::<Pod>::default_namespaced(self.observer.clone()).get_opt(name).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return,
            Err(error) => return self.violation(format!("{method} of {name} is not watched over: {error}")),
        };
        if pod.resource_version().as_deref() != Some(version) {
            // Refused by the API server.
            return;
        }
        let wrong = match *method {
            Method::DELETE => wrong_deletion(&pod, Timestamp::now()),
            _ => wrong_intent(&pod, &words),
        };
        let takes_away = *method == Method::DELETE || drains(&words);
        let wrong = if takes_away { wrong.or(self.wrong_departure(&pod).await) } else { wrong };
        if let Some(wrong) = wrong {
            self.violation(format!("{method} of {name}: {wrong}"));
        }
    }

    /// Replicas leave one by one, so that enough of them serve.
    async fn wrong_departure(&self, pod: &Pod) -> Option<String> {
        let heard_within = (*lock(&self.heard_within))?;
        let deployment = pod.labels().get(labels::INSTANCE)?;
        let pods = kube::Api::<Pod>::default_namespaced(self.observer.clone());
        let of_deployment = ListParams::default().labels(&format!("{}={deployment}", labels::INSTANCE));
        let deployments = kube::Api::<InferenceDeployment>::default_namespaced(self.observer.clone());
        let (others, deployment) = match (pods.list(&of_deployment).await, deployments.get_opt(deployment).await) {
            (Ok(others), Ok(Some(deployment))) => (others, deployment),
            (Ok(_), Ok(None)) => return None,
            (Err(error), _) | (_, Err(error)) => return Some(format!("not watched over: {error}")),
        };
        if !self.has_heard_of(&deployment).await {
            return None;
        }
        let (mut witness, now) = (lock(&self.witness), Instant::now());
        others.iter().for_each(|other| witness.hear_pod(other, now));
        witness.wrong_departure(pod, heard_within, now)
    }

    /// The witness hears of each generation, and may be a moment late.
    async fn has_heard_of(&self, deployment: &InferenceDeployment) -> bool {
        let asked = Instant::now();
        loop {
            if lock(&self.witness).generation(&deployment.uid().unwrap_or_default()) >= deployment.metadata.generation {
                return true;
            }
            if asked.elapsed() > WITNESS_PATIENCE {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Who is called ready is so for all to see: of its present generation, and served by no other revision.
    async fn watch_over_status(&self, path: &str, body: &Bytes) {
        let words: Value = serde_json::from_slice(body).unwrap_or_default();
        let (status, metadata) = (&words["status"], &words["metadata"]);
        let Some(name) = path.strip_suffix("/status").and_then(|path| path.rsplit('/').next()) else { return };
        let deployments = kube::Api::<InferenceDeployment>::default_namespaced(self.observer.clone());
        if !witness::is_ready(status) {
            return;
        }
        // Under an older CRD it may not be read, nor written.
        let Ok(deployment) = deployments.get(name).await else { return };
        let Some(version) = metadata["resourceVersion"].as_str() else {
            return self.violation(format!("{name} is called ready, bound to no version"));
        };
        if deployment.resource_version().as_deref() != Some(version) {
            // Refused by the API server.
            return;
        }
        let (uid, revision) = (deployment.uid().unwrap_or_default(), status["revision"].as_str().unwrap_or_default());
        let of_pods = (*lock(&self.heard_within))
            .and_then(|heard_within| lock(&self.witness).wrong_ready(&uid, revision, heard_within, Instant::now()));
        let wrong = witness::wrong_generation(status, deployment.metadata.generation).or(of_pods);
        if let Some(wrong) = wrong {
            self.violation(format!("{name} is called ready: {wrong}"));
        }
    }

    /// Of two operators only the one that holds the Lease writes. Events say what has been.
    async fn watch_over_leader(&self, parts: &Parts) {
        let path = parts.uri.path();
        if lock(&self.script).fault != Fault::Paused || path.contains("/events") {
            return;
        }
        let leases = kube::Api::<Lease>::namespaced(self.observer.clone(), LEASE.0);
        let Ok(lease) = leases.get(LEASE.1).await else { return };
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        let writer = parts.headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
        if !writer.contains(&format!("({holder})")) {
            self.violation(format!("{} {path} by {writer}, while {holder:?} leads", parts.method));
        }
    }

    fn violation(&self, what: String) {
        lock(&self.seen).violations.push(what);
    }

    /// The events of a watch, with what goes wrong with them.
    fn watched(self: Arc<Self>, answer: axum::http::Response<KubeBody>) -> Response {
        let (head, body) = answer.into_parts();
        let chunks = body.into_data_stream().map(|chunk| chunk.map_err(io::Error::other));
        let mut ends = self.watches_end.subscribe();
        ends.mark_unchanged();
        let over = async move {
            // Nobody raises it any more: the watch goes on.
            if ends.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let events =
            Events { shared: self, chunks: Box::pin(chunks), rest: Vec::new(), ready: VecDeque::new(), later: None };
        let told = stream::unfold(events, |mut events| async { Some((events.next().await?, events)) });
        let begin_anew = stream::once(async { Ok(expired()) });
        answer_of(&head, Body::from_stream(told.take_until(over).chain(begin_anew)))
    }
}

async fn hear_pods(shared: Arc<Shared>) {
    let pods = watcher(kube::Api::<Pod>::default_namespaced(shared.observer.clone()), watcher::Config::default());
    let heard = pods.default_backoff().for_each(|event| {
        let (mut witness, now) = (lock(&shared.witness), Instant::now());
        match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => witness.hear_pod(&pod, now),
            Ok(Event::Delete(pod)) => witness.hear_gone(&pod, now),
            Ok(Event::Init | Event::InitDone) | Err(_) => {}
        }
        std::future::ready(())
    });
    heard.await;
}

async fn hear_deployments(shared: Arc<Shared>) {
    let deployments = kube::Api::<InferenceDeployment>::default_namespaced(shared.observer.clone());
    let heard = watcher(deployments, watcher::Config::default()).default_backoff().for_each(|event| {
        if let Ok(Event::Apply(deployment) | Event::InitApply(deployment)) = event {
            lock(&shared.witness).hear_deployment(&deployment, Instant::now());
        }
        std::future::ready(())
    });
    heard.await;
}

/// The event that says: what you missed is told no more, list again.
fn expired() -> Bytes {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired",
        "message": "too old resource version", "code": 410});
    format!("{}\n", json!({"type": "ERROR", "object": status})).into()
}

/// A watch on its way.
struct Events {
    shared: Arc<Shared>,
    chunks: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>,
    /// The beginning of a line.
    rest: Vec<u8>,
    /// What is to be told.
    ready: VecDeque<Option<Bytes>>,
    /// Told behind the next one.
    later: Option<Bytes>,
}

impl Events {
    /// The next line; `None` when the watch ends.
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return line.map(Ok);
            }
            match self.chunks.next().await? {
                Ok(chunk) => self.rest.extend_from_slice(&chunk),
                Err(error) => return Some(Err(error)),
            }
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = Bytes::from(self.rest.drain(..=end).collect::<Vec<u8>>());
                self.take(line);
            }
        }
    }

    fn take(&mut self, line: Bytes) {
        let verdict = lock(&self.shared.script).judge_event();
        if verdict != EventVerdict::Pass {
            lock(&self.shared.seen).faults += 1;
        }
        match verdict {
            EventVerdict::Drop => {}
            EventVerdict::Later => {
                let before = self.later.replace(line);
                self.ready.extend(before.map(Some));
            }
            EventVerdict::Expire => self.ready.extend([Some(expired()), None]),
            EventVerdict::Pass | EventVerdict::Twice => {
                let times = if verdict == EventVerdict::Twice { 2 } else { 1 };
                self.ready.extend(std::iter::repeat_n(Some(line), times));
                self.ready.extend(self.later.take().map(Some));
            }
        }
    }
}

fn wrong_deletion(pod: &Pod, now: Timestamp) -> Option<String> {
    if !serves(pod) {
        return None;
    }
    match observe::intent_of(pod) {
        Some(Intent { want: Want::Drain(drain), since, .. }) => {
            // Its agent cannot be empty while it is ready: it may go at its deadline, or before it if it does not obey.
            let may_go = deadline(&drain, since).min(since + UNREACHABLE_PATIENCE);
            (now < may_go).then(|| format!("it still serves, {:#} before it may go", may_go - now))
        }
        _ => Some("it serves and was never told to drain".to_owned()),
    }
}

/// The intent that these words put on a pod.
fn intent_in(words: &Value) -> Option<Intent> {
    Intent::parse(words["metadata"]["annotations"][labels::INTENT].as_str()?)
}

fn drains(words: &Value) -> bool {
    intent_in(words).is_some_and(|intent| intent.drain_since().is_some())
}

fn wrong_intent(pod: &Pod, words: &Value) -> Option<String> {
    let (before, after) = (observe::intent_of(pod)?, intent_in(words)?);
    (after.number <= before.number).then(|| format!("number {} after {}", after.number, before.number))
}

fn upstream(parts: &Parts, body: Bytes) -> Result<axum::http::Request<KubeBody>> {
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut request = axum::http::Request::builder().method(&parts.method).uri(target).body(KubeBody::from(body))?;
    for name in [header::ACCEPT, header::CONTENT_TYPE] {
        if let Some(value) = parts.headers.get(&name) {
            request.headers_mut().insert(name, value.clone());
        }
    }
    Ok(request)
}

fn answer_of(head: &axum::http::response::Parts, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    if let Some(value) = head.headers.get(header::CONTENT_TYPE) {
        response.headers_mut().insert(header::CONTENT_TYPE, value.clone());
    }
    response
}

fn refusal(code: u16) -> Response {
    let reason = match code {
        403 => "Forbidden",
        409 => "Conflict",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
        "message": "the script says so"});
    let code = StatusCode::from_u16(code).expect("codes are written above");
    (code, [(header::CONTENT_TYPE, "application/json"), (header::RETRY_AFTER, "1")], status.to_string()).into_response()
}

/// The connection ends without an answer.
fn cut() -> Response {
    Response::new(broken(Bytes::new()))
}

fn broken(beginning: Bytes) -> Body {
    let cut = Err(io::Error::other("the connection is cut"));
    Body::from_stream(stream::iter([Ok(beginning), cut]))
}
