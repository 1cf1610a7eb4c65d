//! What pages look at: one look at all deployments for everybody who asks within two seconds, and the load of the last day. Nobody
//! asks, nobody looks, but for a sample every ten seconds.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::{events::Event, reflector::Store},
};
use stoker_crds::InferenceDeployment;
use stoker_pages::{
    deployment::{Deployment, DeploymentQuery},
    fleet::Fleet,
};
use stoker_replica::Replica;
use tokio::sync::Semaphore;

use super::{
    deployment,
    history::{Ring, SAMPLE_EVERY_MS, Sample},
    summary::summary,
    told::Diary,
};
use crate::{
    observe::observe_replica,
    readings::{Readings, millis},
    scaling::Ledger,
    vitals::Vitals,
};

/// How long a look holds: agents are read every two seconds.
const LOOK_HOLDS: Duration = Duration::from_millis(1900);
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
    rings: Mutex<HashMap<String, Ring>>,
    diary: Diary,
    pub(super) streams: Arc<Semaphore>,
}

/// Everything at a moment.
pub(super) struct Look {
    pub(super) fleet: Fleet,
    /// The object and the pods of each row.
    of: HashMap<(String, String), (Arc<InferenceDeployment>, Vec<Arc<Pod>>, usize)>,
}

impl Default for Board {
    fn default() -> Self {
        let inner = Inner {
            sources: RwLock::default(),
            newest: Mutex::default(),
            rings: Mutex::default(),
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
    /// Takes a sample every ten seconds, for as long as it runs. From its beginning on there is something to see.
    pub async fn keep(self, sources: Sources, vitals: Vitals) {
        let since = sources.readings.now();
        *self.inner.sources.write().unwrap_or_else(PoisonError::into_inner) = Some((sources, since));
        let mut samples = tokio::time::interval(Duration::from_millis(SAMPLE_EVERY_MS));
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
        let mut rings = lock(&self.inner.rings);
        let uids: HashSet<String> = look.of.values().filter_map(|(object, ..)| object.uid()).collect();
        rings.retain(|uid, _| uids.contains(uid));
        for (object, _, place) in look.of.values() {
            let row = &look.fleet.all[*place];
            let sample = Sample::of(&row.replicas, &row.load, look.fleet.now_ms);
            rings.entry(object.uid().unwrap_or_default()).or_default().push(sample);
        }
        drop(rings);
        self.inner.diary.keep_only(&uids);
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

    /// One deployment; `None` as for [`look`](Self::look), then if there is no such one.
    pub(super) fn deployment(&self, key: &(String, String), query: &DeploymentQuery) -> Option<Option<Deployment>> {
        let look = self.look()?;
        let Some((object, pods, place)) = look.of.get(key) else { return Some(None) };
        let sources = self.inner.sources.read().unwrap_or_else(PoisonError::into_inner);
        let (sources, leads_since) = sources.as_ref()?;
        let uid = object.uid().unwrap_or_default();
        let now_ms = look.fleet.now_ms;
        let history = lock(&self.inner.rings).get(&uid).map(|ring| ring.over(query.range, now_ms));
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
    let mut by_owner: HashMap<String, Vec<Arc<Pod>>> = HashMap::new();
    for pod in sources.pods.state() {
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
        if let Some(owner) = owner.map(|owner| owner.uid.clone()) {
            by_owner.entry(owner).or_default().push(pod);
        }
    }
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
