//! Looks at canaries: what agents say of their requests, from the readings that there are anyway, and what a canary and an older replica
//! answer to the same prompts. Never blocks a round: it leaves what it found for the next one, and asks for that if it is new.
//!
//! Each pair of replicas is asked once, within a minute, by one question each; one that did not answer is asked again at the next look.
//! Decides nothing.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use hyper::StatusCode;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};
use stoker_crds::{
    InferenceDeployment,
    contract::LoadReport,
    status::{CanaryPhase, RolloutStatus},
};
use stoker_replica::Replica;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tracing::{debug, info};

use super::{
    Canary, Findings,
    drift::drift,
    gate::{Compared, Finding},
    traffic::Sample,
};
use crate::{
    agent_client::{AgentClient, AgentError, inference_address},
    lease::Leadership,
    observe::{by_owner, observe_replica},
    readings::Readings,
    vitals::Vitals,
};

/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// For so long the medians of agents are also of the prompts that they were asked here, several at once.
const OWN_REQUESTS: SignedDuration = SignedDuration::from_secs(60);
/// Pairs of replicas that are asked at the same time.
const PAIRS_MAX: usize = 4;

/// Looks at canaries for as long as it runs.
#[derive(Debug)]
pub struct Examiner {
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their pods.
    pub pods: Store<Pod>,
    /// What agents said.
    pub readings: Readings,
    /// Asks agents.
    pub agents: AgentClient,
    /// Only who decides needs to know.
    pub leadership: Leadership,
    /// Where it is left.
    pub findings: Findings,
    /// Whose deployment to look at again. Bounded: when it is full, the next look asks again.
    pub changed: mpsc::Sender<ObjectRef<InferenceDeployment>>,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

/// What is remembered between looks.
#[derive(Default)]
struct Memory {
    /// What each agent said last, by the UID of its pod.
    reports: HashMap<String, LoadReport>,
    /// UIDs of deployments whose replicas are being asked.
    asked: HashSet<String>,
    /// What came of it, by deployment.
    answers: HashMap<String, Answered>,
}

/// What came of asking two replicas.
struct Answered {
    canary_uid: String,
    compared: Compared,
    at: Timestamp,
}

/// The replicas of a deployment that has a canary.
struct Scene {
    uid: String,
    deployment: ObjectRef<InferenceDeployment>,
    canary: Replica,
    older: Vec<Replica>,
    texts: Option<Vec<String>>,
}

/// Two replicas, and what they are asked.
struct Pair {
    deployment: String,
    canary_uid: String,
    canary_address: String,
    older_address: String,
    texts: Vec<String>,
}

impl Examiner {
    /// Looks until the receiver of changes is gone.
    pub async fn run(self) {
        let (mut memory, mut questions) = (Memory::default(), JoinSet::new());
        let mut ticks = interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.changed.is_closed() {
            tokio::select! {
                _ = ticks.tick() => {
                    self.vitals.beat("canary");
                    if self.leadership.holds() {
                        self.look(&mut memory, &mut questions);
                    }
                }
                Some(answer) = questions.join_next() => {
                    let (deployment, canary_uid, compared) = answer.expect("a question does not panic");
                    memory.asked.remove(&deployment);
                    let at = self.readings.now();
                    memory.answers.insert(deployment, Answered { canary_uid, compared, at });
                }
            }
        }
    }

    fn look(&self, memory: &mut Memory, questions: &mut JoinSet<(String, String, Compared)>) {
        let scenes = self.scenes(self.readings.now());
        let uids: HashSet<String> = scenes.iter().map(|scene| scene.uid.clone()).collect();
        self.findings.keep_only(&uids);
        memory.answers.retain(|uid, _| uids.contains(uid));
        let mut reports = HashMap::new();
        for scene in &scenes {
            let finding = self.finding(scene, memory, &mut reports);
            if let Some(pair) = self.to_ask(scene, &finding.prompts, memory) {
                memory.asked.insert(scene.uid.clone());
                questions.spawn(pair.ask(self.agents.clone()));
            }
            if self.findings.note(&scene.uid, finding) {
                // A full channel, or a closed one: the next look asks again if anything moves, and a round comes anyway.
                _ = self.changed.try_send(scene.deployment.clone());
            }
        }
        memory.reports = reports;
    }

    /// Deployments whose canary serves.
    fn scenes(&self, now: Timestamp) -> Vec<Scene> {
        let on_trial: Vec<_> =
            self.deployments.state().into_iter().filter(|deployment| rollout_of(deployment).is_some()).collect();
        if on_trial.is_empty() {
            return Vec::new();
        }
        let pods = by_owner(&self.pods);
        let replica = |pod: &Arc<Pod>| {
            let reading = self.readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now);
            observe_replica(pod, reading)
        };
        let scene = |deployment: &Arc<InferenceDeployment>| {
            let own = pods.get(&deployment.uid()?)?;
            Scene::of(deployment, own.iter().map(replica).filter(Replica::serves).collect())
        };
        on_trial.iter().filter_map(scene).collect()
    }

    /// What is known by now.
    fn finding(&self, scene: &Scene, memory: &Memory, reports: &mut HashMap<String, LoadReport>) -> Finding {
        let pod_uid = scene.canary.pod.uid.clone();
        let before = self.findings.of(Some(&scene.uid)).filter(|before| before.pod_uid == pod_uid);
        let mut finding = before.unwrap_or_else(|| Finding { pod_uid: pod_uid.clone(), ..Finding::default() });
        let answered = memory.answers.get(&scene.uid).filter(|answered| answered.canary_uid == pod_uid);
        finding.prompts = match answered {
            Some(answered) => answered.compared.clone(),
            None if scene.older.is_empty() => Compared::Not("no older replica serves".to_owned()),
            None => finding.prompts,
        };
        let is_timed = scene.texts.is_none()
            || answered.is_some_and(|answered| self.readings.now().duration_since(answered.at) > OWN_REQUESTS);
        for replica in scene.older.iter().chain([&scene.canary]) {
            let Some(report) = replica.reading.report() else { continue };
            let tally = if replica.pod.uid == pod_uid { &mut finding.canary } else { &mut finding.older };
            let sample = Sample::between(memory.reports.get(&replica.pod.uid), report);
            tally.note(if is_timed { sample } else { sample.untimed() });
            reports.insert(replica.pod.uid.clone(), report.clone());
        }
        finding
    }

    /// Who is asked, unless that was answered or is on its way.
    fn to_ask(&self, scene: &Scene, compared: &Compared, memory: &Memory) -> Option<Pair> {
        let is_due = !matches!(compared, Compared::By(_)) && !memory.asked.contains(&scene.uid);
        let texts = scene.texts.clone().filter(|_| is_due && memory.asked.len() < PAIRS_MAX)?;
        let address = |replica: &Replica| {
            let pod =
                self.pods.get(&ObjectRef::new(&replica.pod.name).within(scene.deployment.namespace.as_deref()?))?;
            Some(inference_address(pod.status.as_ref()?.pod_ip.as_deref()?))
        };
        Some(Pair {
            deployment: scene.uid.clone(),
            canary_uid: scene.canary.pod.uid.clone(),
            canary_address: address(&scene.canary)?,
            older_address: scene.older.iter().find_map(address)?,
            texts,
        })
    }
}

/// The revisions of a deployment whose canary is not over.
fn rollout_of(deployment: &InferenceDeployment) -> Option<&RolloutStatus> {
    let rollout = deployment.status.as_ref()?.rollout.as_ref()?;
    let is_on_trial = rollout.canary.as_ref().is_some_and(|canary| canary.phase != CanaryPhase::Passed);
    Some(rollout).filter(|rollout| is_on_trial && rollout.rolled_back.is_none())
}

impl Scene {
    fn of(deployment: &InferenceDeployment, serving: Vec<Replica>) -> Option<Self> {
        let (status, tried) = (deployment.status.as_ref()?, rollout_of(deployment)?.canary.as_ref()?);
        let spec = deployment.spec.rollout.as_ref()?.canary.as_ref()?;
        let (canaries, others): (Vec<_>, Vec<_>) =
            serving.into_iter().partition(|replica| replica.pod.revision == tried.revision);
        Some(Self {
            uid: deployment.uid()?,
            deployment: ObjectRef::from_obj(deployment),
            canary: canaries.into_iter().next()?,
            older: others.into_iter().filter(|replica| replica.pod.revision == status.revision).collect(),
            texts: Canary::of(spec).gate.prompts.map(|gate| gate.texts),
        })
    }
}

impl Pair {
    async fn ask(self, agents: AgentClient) -> (String, String, Compared) {
        let asked = tokio::join!(
            agents.continuations(&self.older_address, &self.texts),
            agents.continuations(&self.canary_address, &self.texts)
        );
        let compared = match asked {
            (Ok(older), Ok(canary)) => match drift(&older, &canary) {
                Some(drift) => {
                    info!(deployment = self.deployment, ?drift, "answers to the same prompts compared");
                    Compared::By(drift)
                }
                None => Compared::Not("no token came back".to_owned()),
            },
            (Ok(_), Err(error @ AgentError::Status { status: StatusCode::INTERNAL_SERVER_ERROR, .. })) => {
                Compared::Failed(error.to_string())
            }
            (Err(error), _) | (_, Err(error)) => self.unanswered(&error),
        };
        (self.deployment, self.canary_uid, compared)
    }

    fn unanswered(&self, error: &AgentError) -> Compared {
        debug!(deployment = self.deployment, %error, "prompts were not answered");
        let hint = match error {
            AgentError::Status { status, .. } if status.as_u16() == 401 => {
                " (agents that ask for keys are not asked: compare traffic alone)"
            }
            _ => "",
        };
        Compared::Not(format!("{error}{hint}"))
    }
}
