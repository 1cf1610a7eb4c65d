//! What pages look at: one look at all deployments for everybody who asks within two seconds, and the load of the last day. Nobody
//! asks, nobody looks, but for a sample every ten seconds. What was before this operator led comes from the agents, once.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::{
        events::Event,
        reflector::{ObjectRef, Store},
    },
};
use stoker_crds::{InferenceDeployment, history::LoadHistory};
use stoker_pages::{
    deployment::{Deployment, DeploymentQuery, History},
    fleet::Fleet,
};
use stoker_replica::{
    Replica,
    history::{Ring, SAMPLE_EVERY, reaches_back},
};
use tokio::sync::Semaphore;

use super::{
    deployment, history,
    recall::{Witness, ask, witnesses},
    summary::summary,
    told::Diary,
};
use crate::{
    agent_client::AgentClient,
    observe::{by_owner, observe_replica},
    readings::{Readings, millis},
    scaling::Ledger,
    vitals::Vitals,
};

/// How long a look holds: agents are read every two seconds.
const LOOK_HOLDS: Duration = Duration::from_millis(1900);
/// Looks for agents that were not read yet, a sample apart: a replica that serves is read within two minutes or has other troubles.
const RECALL_ROUNDS: u32 = 12;
/// Pages that are open at the same time; more are refused, and ask again.
pub(super) const STREAMS: usize = 256;

/// What is looked at, while this operator leads.
#[derive(Clone)]
pub struct Sources {
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their pods.
    pub pods: Store<Pod>,
    /// What agents said.
    pub readings: Readings,
    /// What was decided.
    pub ledger: Ledger,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Board {
    inner: Arc<Inner>,
}

struct Inner {
    sources: RwLock<Option<(Sources, Timestamp)>>,
    newest: Mutex<Option<(Instant, Arc<Look>)>>,
    pasts: Mutex<HashMap<String, Past>>,
    diary: Diary,
    pub(super) streams: Arc<Semaphore>,
}

/// The load of a deployment until now.
#[derive(Debug, Default)]
struct Past {
    ring: Ring,
    /// Replicas that told what was before this operator led.
    n_witnesses: usize,
}

/// The object, its pods, and the place of its row.
type Seen = (Arc<InferenceDeployment>, Vec<Arc<Pod>>, usize);

/// Everything at a moment.
pub(super) struct Look {
    pub(super) fleet: Fleet,
    /// The object and the pods of each row.
    of: HashMap<(String, String), Seen>,
}

impl Default for Board {
    fn default() -> Self {
        let inner = Inner {
            sources: RwLock::default(),
            newest: Mutex::default(),
            pasts: Mutex::default(),
            diary: Diary::default(),
            streams: Arc::new(Semaphore::new(STREAMS)),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Board").finish_non_exhaustive()
    }
}

impl Board {
    /// Takes a sample every ten seconds, for as long as it runs, and asks agents once for what was before. From its
    /// beginning on there is something to see.
    pub async fn keep(self, sources: Sources, agents: AgentClient, vitals: Vitals) {
        let since = sources.readings.now();
        *self.inner.sources.write().unwrap_or_else(PoisonError::into_inner) = Some((sources, since));
        tokio::join!(self.take_samples(vitals), self.recall(agents));
    }

    async fn take_samples(&self, vitals: Vitals) {
        let mut samples = tokio::time::interval(SAMPLE_EVERY);
        samples.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            samples.tick().await;
            vitals.beat("pages");
            self.sample();
        }
    }

    /// An Event was published.
    pub fn told(&self, deployment: &InferenceDeployment, event: &Event, now: Timestamp) {
        self.inner.diary.note(&deployment.uid().unwrap_or_default(), event, now);
    }

    fn sample(&self) {
        let Some(look) = self.look() else { return };
        let mut pasts = lock(&self.inner.pasts);
        let uids: HashSet<String> = look.of.values().filter_map(|(object, ..)| object.uid()).collect();
        pasts.retain(|uid, _| uids.contains(uid));
        for (object, _, place) in look.of.values() {
            let row = &look.fleet.all[*place];
            let sample = history::sample(&row.replicas, &row.load, look.fleet.now_ms);
            pasts.entry(object.uid().unwrap_or_default()).or_default().ring.push(sample);
        }
        drop(pasts);
        self.inner.diary.keep_only(&uids);
    }

    /// Asks as soon as every agent of a deployment that serves was read, which they are every two seconds; what is left after a while as far
    /// as it can be asked. One deployment after the other: a new leader has more to do.
    async fn recall(&self, agents: AgentClient) {
        let mut asked: HashSet<String> = HashSet::new();
        for rounds_left in (0..RECALL_ROUNDS).rev() {
            tokio::time::sleep(SAMPLE_EVERY).await;
            for (uid, witnesses, n_serving) in self.witnesses() {
                if (witnesses.len() < n_serving && rounds_left > 0) || !asked.insert(uid.clone()) {
                    continue;
                }
                self.remember(uid, &ask(&agents, witnesses).await);
            }
        }
    }

    fn remember(&self, uid: String, told: &[LoadHistory]) {
        let Some((now, since)) = self.now_and_since() else { return };
        // Where nothing was sampled yet, since there was nothing to see then, what is remembered comes first.
        let mut pasts = lock(&self.inner.pasts);
        let past = pasts.entry(uid).or_default();
        past.ring.recall(told, now);
        past.n_witnesses = told.iter().filter(|one| reaches_back(one, now - since)).count();
    }

    /// Of each deployment, with how many of its replicas serve.
    fn witnesses(&self) -> Vec<(String, Vec<Witness>, usize)> {
        let (look, sources) = (self.look(), self.inner.sources.read().unwrap_or_else(PoisonError::into_inner));
        let Some((look, (sources, _))) = look.zip(sources.as_ref()) else { return Vec::new() };
        let now = sources.readings.now();
        let of = |(object, pods, _): &Seen| {
            let replicas = replicas(pods, &sources.readings, now);
            let n_serving = replicas.iter().filter(|replica| replica.serves()).count();
            Some((object.uid()?, witnesses(pods, &replicas), n_serving))
        };
        look.of.values().filter_map(of).collect()
    }

    /// As samples count time, which never goes back.
    fn now_and_since(&self) -> Option<(u32, u32)> {
        let sources = self.inner.sources.read().unwrap_or_else(PoisonError::into_inner);
        let seconds = |at: Timestamp| history::seconds(millis(at));
        sources.as_ref().map(|(sources, since)| (seconds(sources.readings.now()), seconds(*since)))
    }

    /// Everything as it is, or was a moment ago; `None` before this operator leads and has listed what there is.
    pub(super) fn look(&self) -> Option<Arc<Look>> {
        let sources = self.inner.sources.read().unwrap_or_else(PoisonError::into_inner);
        let (sources, _) = sources.as_ref()?;
        // Held while looking: who asks meanwhile gets the same look, and does not look, too.
        let mut newest = lock(&self.inner.newest);
        if let Some((_, look)) = newest.as_ref().filter(|(at, _)| at.elapsed() < LOOK_HOLDS) {
            return Some(look.clone());
        }
        let look = Arc::new(look(sources, sources.readings.now()));
        *newest = Some((Instant::now(), look.clone()));
        Some(look)
    }

    /// A look in which a deployment that there is can be found, also when it was made a moment ago.
    fn look_for(&self, key: &(String, String)) -> Option<Arc<Look>> {
        let look = self.look()?;
        let is_new = !look.of.contains_key(key) && {
            let sources = self.inner.sources.read().unwrap_or_else(PoisonError::into_inner);
            let object = ObjectRef::new(&key.1).within(&key.0);
            sources.as_ref().is_some_and(|(sources, _)| sources.deployments.get(&object).is_some())
        };
        if !is_new {
            return Some(look);
        }
        lock(&self.inner.newest).take();
        self.look()
    }

    /// One deployment; `None` as for [`look`](Self::look), then if there is no such one.
    pub(super) fn deployment(&self, key: &(String, String), query: &DeploymentQuery) -> Option<Option<Deployment>> {
        let look = self.look_for(key)?;
        let Some((object, pods, place)) = look.of.get(key) else { return Some(None) };
        let sources = self.inner.sources.read().unwrap_or_else(PoisonError::into_inner);
        let (sources, leads_since) = sources.as_ref()?;
        let uid = object.uid().unwrap_or_default();
        let now_ms = look.fleet.now_ms;
        let history = lock(&self.inner.pasts).get(&uid).map(|past| {
            let (points, step_ms) = history::over(&past.ring, query.range, now_ms);
            History { points, step_ms, n_witnesses: past.n_witnesses }
        });
        let scene = deployment::Scene {
            object,
            summary: &look.fleet.all[*place],
            pods,
            replicas: replicas(pods, &sources.readings, sources.readings.now()),
            ledger: &sources.ledger,
            history: history.unwrap_or_default(),
            events: self.inner.diary.of(&uid),
            leads_since_ms: millis(*leads_since),
            now_ms,
        };
        Some(Some(deployment::view(scene, query)))
    }

    pub(super) fn streams(&self) -> Arc<Semaphore> {
        self.inner.streams.clone()
    }
}

fn look(sources: &Sources, now: Timestamp) -> Look {
    let mut by_owner = by_owner(&sources.pods);
    let mut look = Look { fleet: Fleet { all: Vec::new(), now_ms: millis(now) }, of: HashMap::new() };
    for object in sources.deployments.state() {
        let pods = object.uid().and_then(|uid| by_owner.remove(&uid)).unwrap_or_default();
        let row = summary(&object, &replicas(&pods, &sources.readings, now));
        let key = (row.namespace.clone(), row.name.clone());
        look.of.insert(key, (object, pods, look.fleet.all.len()));
        look.fleet.all.push(row);
    }
    look
}

fn replicas(pods: &[Arc<Pod>], readings: &Readings, now: Timestamp) -> Vec<Replica> {
    let reading = |pod: &Pod| readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now);
    pods.iter().map(|pod| observe_replica(pod, reading(pod))).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
