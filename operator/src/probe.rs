//! Reads every agent's `/v1/load` at the agent's own pace, and tells it what is written on its pod until it says that it
//! knows. Never blocks a reconciliation.
//!
//! Orders are a matter of levels: what the pod says and what the agent echoes differ, so it is told, at the pace of readings,
//! whoever wrote it and whatever was lost before. Only the leader tells; one that was late is refused by its number.
//!
//! Who is asked when is [`Pace`]'s, what an answer is worth is the judge's; here is only what asks.

use std::{sync::Arc, time::Duration};

use hyper::StatusCode;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use stoker_crds::{InferenceDeployment, contract::LoadReport};
use stoker_replica::{Answer, Intent, Sight};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tracing::{debug, info, warn};

use crate::{
    agent_client::{AgentClient, AgentError},
    desired::labels,
    holders::{self, Party},
    keys::Keyring,
    lease::Leadership,
    metrics::Metrics,
    observe::{agent, fetcher, intent_of},
    pace::{Candidate, Pace, TICK_MS},
    readings::{Moment, Readings, millis},
    vitals::Vitals,
};

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
    /// Bytes a second that a replica gives of its model to those that fetch it; 0: none are named to them.
    pub give_bytes_per_second: u64,
    /// Where readings go.
    pub readings: Readings,
    /// Whose deployment to look at again. Bounded: when it is full, the next reading asks again.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
    /// Counts readings.
    pub metrics: Arc<Metrics>,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

/// A question that came to its end.
struct Ended {
    uid: String,
    answered: bool,
}

impl Probe {
    /// Reads agents until the receiver of changes is gone.
    pub async fn run(self) {
        let probe = Arc::new(self);
        let (mut pace, mut reads) = (Pace::default(), JoinSet::new());
        let mut ticks = interval(Duration::from_millis(TICK_MS));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !probe.changed.is_closed() {
            tokio::select! {
                _ = ticks.tick() => {
                    probe.vitals.beat("probe");
                    probe.begin(&mut pace, &mut reads);
                }
                Some(ended) = reads.join_next() => {
                    let Ended { uid, answered } = ended.expect("a reading does not panic");
                    pace.ended(&uid, answered);
                }
            }
        }
    }

    /// Begins to ask who is due.
    fn begin(self: &Arc<Self>, pace: &mut Pace, reads: &mut JoinSet<Ended>) {
        let pods = self.pods.state();
        let running: Vec<_> = pods.iter().filter_map(|pod| candidate(pod).zip(Some(pod))).collect();
        self.readings.keep_only(&pods.iter().filter_map(|pod| pod.metadata.uid.as_deref()).collect());
        let candidates: Vec<Candidate<'_>> = running.iter().map(|(candidate, _)| *candidate).collect();
        let places = pace.begin(&candidates, millis(self.readings.now()));
        for place in places {
            match Target::of(running[place].1) {
                Some(target) => _ = reads.spawn(self.clone().read(target)),
                None => pace.ended(candidates[place].uid, true),
            }
        }
        // Who does not answer is asked seldom when many do not; that its reading is old must not wait for that.
        for target in running.iter().filter(|(agent, _)| pace.missed(agent.uid)).filter_map(|(_, pod)| Target::of(pod))
        {
            self.tell_rounds(&target);
        }
    }

    async fn read(self: Arc<Self>, target: Target) -> Ended {
        let answer = match self.agents.load(&target.ip).await {
            Ok(report) => Ok(self.tell(&target, report).await),
            failed => failed,
        };
        let answer = match answer {
            Ok(report) => Ok(self.tell_holders(&target, report).await),
            failed => failed,
        };
        let heard = match &answer {
            Ok(report) => Answer::Report(report),
            Err(error) => heard(error),
        };
        let kind = self.readings.hear(&target.uid, heard, &target.revision, self.readings.now());
        self.metrics.probe_reads.with_label_values(&[kind]).inc();
        if let Ok(report) = &answer {
            self.learn(&target, Moment::of(report)).await;
        }
        self.tell_rounds(&target);
        Ended { answered: !matches!(heard, Answer::Silence), uid: target.uid }
    }

    /// Asks once what is served, and again when a process begins to load or to serve. Who cannot say is not asked again.
    async fn learn(&self, target: &Target, moment: Moment) {
        if !self.readings.is_new(&target.uid, &moment) {
            return;
        }
        match self.agents.description(&target.ip).await {
            Err(AgentError::Timeout(_) | AgentError::Refused | AgentError::Connection(_)) => {}
            told => self.readings.describe(&target.uid, moment, told.unwrap_or_default()),
        }
    }

    /// Asks for a round if it would see something new. A full channel, or a closed one: not told, so it is news again.
    fn tell_rounds(&self, target: &Target) {
        let Some(news) = self.readings.news(&target.uid, self.readings.now()) else { return };
        if self.changed.try_send(target.deployment.clone()).is_ok() {
            self.readings.told(&target.uid, news);
        }
    }

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

impl Probe {
    /// Tells one that fetches a model who has it, if it was told otherwise; its reading after that.
    async fn tell_holders(&self, target: &Target, report: LoadReport) -> LoadReport {
        let fetches = report.model.as_ref().is_some_and(|model| model.fetch.is_some() && model.holders.is_some());
        if !fetches || !self.leadership.holds() {
            return report;
        }
        let Some(fetcher) = target.party(report.clone()) else { return report };
        let parties = match self.give_bytes_per_second {
            0 => Vec::new(),
            _ => self.parties(&fetcher.namespace),
        };
        let givers = holders::holders(&fetcher, &parties);
        if !holders::is_news(&fetcher, &givers) {
            return report;
        }
        let word = holders::word(&fetcher, &givers, self.give_bytes_per_second, &self.keyring);
        let (pod, names) = (&target.pod, givers.iter().map(|giver| giver.pod.as_str()).collect::<Vec<_>>().join(" "));
        match self.agents.tell_holders(&target.ip, word).await {
            Ok(after) => {
                info!(pod, holders = names, "told who has its model");
                after
            }
            Err(error) => {
                debug!(pod, %error, "not told who has its model, will be told again");
                report
            }
        }
    }

    /// Pods of a namespace whose processes were heard a moment ago.
    fn parties(&self, namespace: &str) -> Vec<Party> {
        let now = self.readings.now();
        let party = |pod: &Arc<Pod>| {
            let is_here =
                pod.namespace().is_some_and(|of| of == namespace) && pod.metadata.deletion_timestamp.is_none();
            let target = is_here.then(|| Target::of(pod)).flatten()?;
            let reading = self.readings.at(&target.uid, now);
            match reading.sight() {
                Sight::Fresh(report) => target.party(report.clone()),
                Sight::Unread | Sight::Stale { .. } | Sight::Absurd(_) | Sight::Missing => None,
            }
        };
        self.pods.state().iter().filter_map(party).collect()
    }
}

/// What it means for a reading that there is no report.
fn heard(error: &AgentError) -> Answer<'static> {
    match error {
        AgentError::NoAdminPort | AgentError::Status { status: StatusCode::NOT_FOUND, .. } => Answer::OlderAgent,
        AgentError::Body(_) | AgentError::Status { .. } => Answer::NotAReport,
        AgentError::Timeout(_) | AgentError::Refused | AgentError::Connection(_) | AgentError::Prompts(_) => {
            Answer::Silence
        }
    }
}

/// The agent of a pod, or what fetches its model, if it runs.
fn candidate(pod: &Pod) -> Option<Candidate<'_>> {
    let status = pod.status.as_ref()?;
    let running = |container: &&ContainerStatus| container.state.as_ref().is_some_and(|state| state.running.is_some());
    let container = [agent(status), fetcher(status)].into_iter().flatten().find(running)?;
    let draining = intent_of(pod).is_some_and(|intent| intent.drain_since().is_some());
    Some(Candidate { uid: pod.metadata.uid.as_deref()?, moving: draining || !container.ready })
}

/// An agent to read.
struct Target {
    pod: String,
    uid: String,
    ip: String,
    revision: String,
    deployment: ObjectRef<InferenceDeployment>,
    intent: Option<Intent>,
}

impl Target {
    /// The same with what it said.
    fn party(&self, report: LoadReport) -> Option<Party> {
        let namespace = self.deployment.namespace.clone()?;
        Some(Party { namespace, pod: self.pod.clone(), uid: self.uid.clone(), ip: self.ip.parse().ok()?, report })
    }

    fn of(pod: &Pod) -> Option<Self> {
        Some(Self {
            pod: pod.name_any(),
            uid: pod.uid()?,
            ip: pod.status.as_ref()?.pod_ip.clone()?,
            revision: pod.labels().get(labels::REVISION)?.clone(),
            deployment: ObjectRef::new(pod.labels().get(labels::INSTANCE)?).within(&pod.namespace()?),
            intent: intent_of(pod),
        })
    }
}
