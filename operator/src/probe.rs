//! Reads every agent's `/v1/load`, keeps the last reading of each pod, and tells an agent what is written on its pod until
//! it says that it knows. Never blocks a reconciliation.
//!
//! Orders are a matter of levels: what the pod says and what the agent echoes differ, so it is told, at the pace of readings,
//! whoever wrote it and whatever was lost before. Only the leader tells; one that was late is refused by its number.
//!
//! A reading says in its type how far it can be trusted. Reconciliations are asked for only when a reading changes what
//! a plan or a status would say, so that quiet agents cause no work.

mod preemptions;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use stoker_crds::{
    InferenceDeployment,
    contract::{AgentPhase, LoadReport},
};
use tokio::sync::mpsc;
use tracing::{info, warn};

use self::preemptions::Preemptions;
use crate::{
    agent_client::{AgentClient, AgentError},
    desired::labels,
    intent::Intent,
    keys::Keyring,
    lease::Leadership,
    metrics::Metrics,
    observe::agent,
    vitals::Vitals,
};

/// How often a settled agent is read.
const READ_EVERY: Duration = Duration::from_secs(2);
/// How often an agent that drains or starts is read.
const READ_MOVING_EVERY: Duration = Duration::from_millis(500);
/// Age beyond which a reading says nothing about now.
const STALE_AFTER: Duration = Duration::from_secs(10);
/// How early a reading may be: ticks never fall exactly on a pause.
const TICK_SLACK: Duration = Duration::from_millis(50);
/// Agents read at the same time: sockets open at most, and a few dead agents do not hold up the others.
const CONCURRENT_READS: usize = 64;
/// Requests in one agent beyond which a reading is taken for nonsense.
const ABSURD_REQUESTS: u32 = 10_000_000;

/// What is known of an agent's load.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Load {
    /// Read a moment ago.
    Fresh(LoadReport),
    /// The last reading is too old to decide on.
    Stale {
        /// Its age in seconds.
        age_seconds: u64,
    },
    /// The agent answered with numbers that cannot be.
    Absurd(String),
    /// The agent did not answer.
    Missing(String),
    /// Not asked yet.
    #[default]
    Unread,
}

impl Load {
    /// The report, if it can be trusted.
    pub fn report(&self) -> Option<&LoadReport> {
        match self {
            Self::Fresh(report) => Some(report),
            Self::Stale { .. } | Self::Absurd(_) | Self::Missing(_) | Self::Unread => None,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Fresh(_) => "fresh",
            Self::Stale { .. } => "stale",
            Self::Absurd(_) => "absurd",
            Self::Missing(_) => "missing",
            Self::Unread => "unread",
        }
    }
}

/// An agent's last answer as it came, for the load window, which judges it by its own rules.
#[derive(Clone, Debug)]
pub struct Heard {
    /// The report, or what came instead.
    pub answer: Result<LoadReport, Unheard>,
    /// When it came, Unix time in milliseconds.
    pub at_ms: u64,
}

/// What an agent gave instead of a report.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Unheard {
    /// Something else: HTML, an error status, half a body.
    NotAReport,
    /// Nothing in time.
    Silence,
}

impl Heard {
    fn new(answer: &Result<LoadReport, AgentError>, now: Timestamp) -> Self {
        let answer = match answer {
            Ok(report) => Ok(report.clone()),
            Err(AgentError::Body(_) | AgentError::Status { .. }) => Err(Unheard::NotAReport),
            Err(AgentError::Timeout | AgentError::Connection(_)) => Err(Unheard::Silence),
        };
        Self { answer, at_ms: u64::try_from(now.as_millisecond()).unwrap_or_default() }
    }
}

/// The last reading of each pod, by UID. Shared: the probe writes, observations read.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    by_pod: Arc<RwLock<HashMap<String, Reading>>>,
}

/// The last report of an agent, and what went wrong since.
#[derive(Clone, Debug, Default)]
struct Reading {
    report: Option<(LoadReport, Instant)>,
    trouble: Option<Load>,
    heard: Option<Heard>,
    preemptions: Preemptions,
    asked: Option<Instant>,
    /// Why the agent took no order when it was last given one.
    refusal: Option<String>,
    /// What a reconciliation was last asked for; readings age between answers, too.
    told: Signature,
}

impl Reading {
    /// One lost answer says nothing yet: the report before it stands until it is stale.
    fn view(&self, now: Instant) -> Load {
        let age = self.report.as_ref().map(|(_, read)| now.duration_since(*read));
        match (&self.report, age, &self.trouble) {
            (Some((report, _)), Some(age), _) if age <= STALE_AFTER => Load::Fresh(report.clone()),
            (_, _, Some(trouble)) => trouble.clone(),
            (_, Some(age), None) => Load::Stale { age_seconds: age.as_secs() },
            (_, None, None) => Load::Unread,
        }
    }

    fn take_in(&mut self, load: Load, now: Instant) {
        self.asked = Some(now);
        match load {
            Load::Fresh(report) => {
                self.preemptions.take(&report, now);
                (self.report, self.trouble) = (Some((report, now)), None);
            }
            Load::Absurd(_) => (self.report, self.trouble) = (None, Some(load)),
            Load::Missing(_) | Load::Stale { .. } | Load::Unread => self.trouble = Some(load),
        }
    }
}

impl Readings {
    /// What is known of the pod with this UID.
    pub fn of(&self, pod_uid: &str) -> Load {
        let by_pod = self.by_pod.read().unwrap_or_else(PoisonError::into_inner);
        by_pod.get(pod_uid).map_or(Load::Unread, |reading| reading.view(Instant::now()))
    }

    /// Preemptions in the agent of this pod within the last minute.
    pub fn preemptions(&self, pod_uid: &str) -> u64 {
        let by_pod = self.by_pod.read().unwrap_or_else(PoisonError::into_inner);
        by_pod.get(pod_uid).map_or(0, |reading| reading.preemptions.last_minute())
    }

    /// What the agent of this pod last answered.
    pub fn heard(&self, pod_uid: &str) -> Option<Heard> {
        self.by_pod.read().unwrap_or_else(PoisonError::into_inner).get(pod_uid)?.heard.clone()
    }

    /// Keeps an answer as it came.
    pub fn hear(&self, pod_uid: &str, heard: Heard) {
        let mut by_pod = self.by_pod.write().unwrap_or_else(PoisonError::into_inner);
        by_pod.entry(pod_uid.to_owned()).or_default().heard = Some(heard);
    }

    /// Keeps a reading; true when it changes what a plan or a status would say.
    fn record(&self, pod_uid: &str, load: Load, now: Instant) -> bool {
        let mut by_pod = self.by_pod.write().unwrap_or_else(PoisonError::into_inner);
        let reading = by_pod.entry(pod_uid.to_owned()).or_default();
        reading.take_in(load, now);
        let preempts = reading.preemptions.last_minute() > 0;
        let told = Signature { preempts, ..signature(&reading.view(now)) };
        told != std::mem::replace(&mut reading.told, told.clone())
    }

    /// Keeps what came of an order; true when that is news.
    fn note_order(&self, pod_uid: &str, refusal: Option<String>) -> bool {
        let mut by_pod = self.by_pod.write().unwrap_or_else(PoisonError::into_inner);
        let reading = by_pod.entry(pod_uid.to_owned()).or_default();
        let news = reading.refusal != refusal || refusal.is_none();
        reading.refusal = refusal;
        news
    }

    fn last_asked(&self, pod_uid: &str) -> Option<Instant> {
        self.by_pod.read().unwrap_or_else(PoisonError::into_inner).get(pod_uid)?.asked
    }

    fn keep_only(&self, pod_uids: &HashSet<String>) {
        self.by_pod.write().unwrap_or_else(PoisonError::into_inner).retain(|uid, _| pod_uids.contains(uid));
    }
}

/// The part of a reading that plans and statuses depend on.
#[derive(Clone, Debug, Default, PartialEq)]
struct Signature {
    kind: &'static str,
    phase: Option<AgentPhase>,
    error: Option<String>,
    intent: Option<u64>,
    kv_twentieths: u64,
    preempts: bool,
}

fn signature(load: &Load) -> Signature {
    let kind = load.kind();
    let Some(report) = load.report() else { return Signature { kind, ..Signature::default() } };
    let kv_twentieths = u64::from(report.referenced_blocks) * 20 / u64::from(report.total_blocks.max(1));
    Signature {
        kind,
        phase: Some(report.phase),
        error: report.error.clone(),
        intent: report.intent,
        kv_twentieths,
        preempts: false,
    }
}

/// Reads agents for as long as it runs.
#[derive(Debug)]
pub struct Probe {
    /// The pods to read.
    pub pods: Store<Pod>,
    /// How to ask.
    pub agents: AgentClient,
    /// What orders are signed with.
    pub keyring: Keyring,
    /// Whether we may give orders.
    pub leadership: Leadership,
    /// Where readings go.
    pub readings: Readings,
    /// Whose deployment to look at again. Bounded: the probe waits when it is full, nobody else.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
    /// Counts readings.
    pub metrics: Arc<Metrics>,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

impl Probe {
    /// Reads agents until the receiver of changes is gone.
    pub async fn run(self) {
        let mut ticks = tokio::time::interval(READ_MOVING_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !self.changed.is_closed() {
            ticks.tick().await;
            self.vitals.beat("probe");
            self.round().await;
        }
    }

    /// Reads the agents that are due.
    async fn round(&self) {
        let pods = self.pods.state();
        self.readings.keep_only(&pods.iter().filter_map(|pod| pod.uid()).collect());
        let due = pods.iter().filter_map(|pod| self.due(pod));
        stream::iter(due).for_each_concurrent(CONCURRENT_READS, |target| self.read(target)).await;
    }

    /// The pod as a target, if its agent runs and was not asked a moment ago.
    fn due(&self, pod: &Pod) -> Option<Target> {
        let target = Target::of(pod)?;
        let pause = if target.moving { READ_MOVING_EVERY } else { READ_EVERY };
        let rested = self.readings.last_asked(&target.uid).is_none_or(|asked| asked.elapsed() + TICK_SLACK >= pause);
        rested.then_some(target)
    }

    async fn read(&self, target: Target) {
        let answer = match self.agents.load(&target.ip).await {
            Ok(report) => Ok(self.tell(&target, report).await),
            failed => failed,
        };
        self.readings.hear(&target.uid, Heard::new(&answer, Timestamp::now()));
        let load = judge(answer, &target.revision);
        self.metrics.probe_reads.with_label_values(&[load.kind()]).inc();
        if self.readings.record(&target.uid, load, Instant::now()) {
            // A closed channel means that the operator stops.
            let _ = self.changed.send(target.deployment).await;
        }
    }
}

impl Probe {
    /// Tells the agent what is written on its pod if it does not know; its reading after that.
    async fn tell(&self, target: &Target, report: LoadReport) -> LoadReport {
        let Some(intent) = target.intent.filter(|intent| !intent.is_known_to(&report)) else { return report };
        if !self.leadership.holds() {
            return report;
        }
        let order = self.keyring.sign(&intent.order(&target.uid, &report));
        let told = self.agents.order(&target.ip, order).await;
        let refusal = told.as_ref().err().map(ToString::to_string);
        let (pod, number, news) = (&target.pod, intent.number, self.readings.note_order(&target.uid, refusal));
        match told {
            Ok(after) => {
                info!(pod, number, want = ?intent.want, "agent took the order");
                after
            }
            Err(error) => {
                if news {
                    warn!(pod, number, %error, "agent took no order, will be told again");
                }
                report
            }
        }
    }
}

/// An agent to read.
struct Target {
    pod: String,
    uid: String,
    ip: String,
    revision: String,
    deployment: ObjectRef<InferenceDeployment>,
    intent: Option<Intent>,
    /// Draining or starting: its phase is about to change.
    moving: bool,
}

impl Target {
    fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let container = agent(status)?;
        container.state.as_ref()?.running.as_ref()?;
        let intent = Intent::of(pod);
        let draining = intent.is_some_and(|intent| intent.drain_since().is_some());
        Some(Self {
            pod: pod.name_any(),
            uid: pod.uid()?,
            ip: status.pod_ip.clone()?,
            revision: pod.labels().get(labels::REVISION)?.clone(),
            deployment: ObjectRef::new(pod.labels().get(labels::INSTANCE)?).within(&pod.namespace()?),
            intent,
            moving: draining || !container.ready,
        })
    }
}

/// Sorts an answer into what can be trusted and what cannot.
fn judge(answer: Result<LoadReport, AgentError>, revision: &str) -> Load {
    match answer {
        Err(error @ (AgentError::Body(_) | AgentError::Status { .. })) => Load::Absurd(error.to_string()),
        Err(error) => Load::Missing(error.to_string()),
        Ok(report) => match absurdity(&report, revision) {
            Some(why) => Load::Absurd(why),
            None => Load::Fresh(report),
        },
    }
}

/// Why a report cannot be true.
fn absurdity(report: &LoadReport, revision: &str) -> Option<String> {
    let blocks = [report.referenced_blocks, report.cached_blocks, report.free_blocks];
    let sum: u64 = blocks.into_iter().map(u64::from).sum();
    let rates = [report.ttft_p95_seconds, report.itl_p95_seconds, report.prefill_tokens_per_second];
    let numbers = rates.into_iter().flatten().chain([report.load_progress, report.stalled_seconds]);
    if report.revision != revision {
        Some(format!("agent runs revision {:?}, its pod is of {revision:?}", report.revision))
    } else if sum != u64::from(report.total_blocks) {
        Some(format!("referenced + cached + free blocks are {sum}, total is {}", report.total_blocks))
    } else if report.running.max(report.waiting) > ABSURD_REQUESTS {
        Some(format!("{} running and {} waiting requests", report.running, report.waiting))
    } else if numbers.into_iter().any(|number| !number.is_finite() || number < 0.0) {
        Some("a time or rate is negative or not a number".to_owned())
    } else {
        None
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn report() -> LoadReport {
        serde_json::from_value(serde_json::json!({
            "timeMs": 1, "startId": "a", "upMs": 1, "intent": null, "revision": "0a", "phase": "ready", "error": null, "loadProgress": 1.0,
            "running": 2, "waiting": 0, "waitingPrefillTokens": 0, "totalBlocks": 100, "referencedBlocks": 10,
            "cachedBlocks": 20, "freeBlocks": 70, "preemptions": 0, "finished": 0, "ttftP95Seconds": null,
            "itlP95Seconds": null, "prefillTokensPerSecond": null, "stalledSeconds": 0.0
        }))
        .unwrap()
    }

    #[test]
    fn a_report_that_adds_up_is_fresh() {
        assert_eq!(judge(Ok(report()), "0a"), Load::Fresh(report()));
    }

    #[test]
    fn reports_that_cannot_be_true_are_absurd() {
        let lies = [
            LoadReport { free_blocks: 71, ..report() },
            LoadReport { running: u32::MAX, ..report() },
            LoadReport { stalled_seconds: f64::NAN, ..report() },
            LoadReport { itl_p95_seconds: Some(-1.0), ..report() },
            LoadReport { revision: "0b".into(), ..report() },
        ];
        for lie in lies {
            let load = judge(Ok(lie), "0a");
            assert!(matches!(load, Load::Absurd(_)), "{load:?}");
        }
    }

    #[test]
    fn a_report_outlives_lost_answers_until_it_is_stale() {
        let (readings, start) = (Readings::default(), Instant::now());
        let lost = || Load::Missing("connection refused".into());
        assert!(readings.record("pod", Load::Fresh(report()), start));
        assert!(!readings.record("pod", Load::Fresh(report()), start + Duration::from_secs(2)));
        assert!(!readings.record("pod", lost(), start + Duration::from_secs(4)));
        assert!(readings.record("pod", lost(), start + STALE_AFTER + Duration::from_secs(3)));
    }

    #[test]
    fn a_reading_asks_for_a_reconciliation_only_when_it_matters() {
        let (readings, now) = (Readings::default(), Instant::now());
        readings.record("pod", Load::Fresh(report()), now);
        assert!(!readings.record("pod", Load::Fresh(LoadReport { running: 3, finished: 9, ..report() }), now));
        assert!(readings.record("pod", Load::Fresh(LoadReport { phase: AgentPhase::Empty, ..report() }), now));
    }
}
