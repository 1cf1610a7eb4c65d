//! What gateways are told: every deployment's replicas, from the caches and the readings that rounds look at, too.
//!
//! A document is made while somebody asks for it, and numbered when it says something new. Talks to nobody.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, runtime::reflector::Store};
use stoker_crds::{
    InferenceDeployment,
    contract::{ADMIN_PORT, AGENT_PORT, AgentPhase},
    endpoints::{DeploymentEndpoints, EndpointLoad, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
};
use stoker_replica::{Replica, Stage};
use tokio::sync::{Notify, watch};

use crate::{
    agent_client::address,
    canary::weight_of,
    gateways::Gateways,
    observe::{by_owner, observe_replica},
    readings::Readings,
    validate::replicas_wanted,
    vitals::Vitals,
};

/// Between two looks. Agents are read every two seconds, and who drains is known as soon as it is decided.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Without a question for so long there is no gateway.
const ASKED_WITHIN: Duration = Duration::from_secs(60);

/// The newest document, for who asks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Published {
    /// Nothing while nobody asks: what nobody keeps true is not shown.
    newest: watch::Sender<Option<Arc<Endpoints>>>,
    asked: Arc<Mutex<Option<Instant>>>,
    number: Arc<AtomicU64>,
}

impl Default for Published {
    fn default() -> Self {
        Self { newest: watch::Sender::new(None), asked: Arc::default(), number: Arc::default() }
    }
}

impl Published {
    /// The newest document as soon as it is another than this number of this source, or after the wait as it is; `None`: there is none.
    pub async fn other_than(&self, source: &str, number: u64, wait: Duration) -> Option<Arc<Endpoints>> {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let mut newest = self.newest.subscribe();
        let is_other = |document: &Option<Arc<Endpoints>>| {
            document.as_ref().is_some_and(|document| document.source != source || document.number != number)
        };
        // Neither end of the wait nor of the sender changes what there is.
        let _ = tokio::time::timeout(wait, newest.wait_for(is_other)).await;
        newest.borrow().clone()
    }

    fn is_asked(&self, now: Instant) -> bool {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASKED_WITHIN)
    }

    /// Publishes what there is, if it is new.
    fn publish(&self, source: &str, (gateways, deployments): (Vec<String>, Vec<DeploymentEndpoints>)) {
        self.newest.send_if_modified(|newest| {
            let is_same = |newest: &Endpoints| newest.deployments == deployments && newest.gateways == gateways;
            if newest.as_deref().is_some_and(is_same) {
                return false;
            }
            let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
            *newest = Some(Arc::new(Endpoints { source: source.to_owned(), number, gateways, deployments }));
            true
        });
    }

    fn withdraw(&self) {
        self.newest.send_if_modified(|newest| newest.take().is_some());
    }
}

/// Makes documents for as long as it runs.
#[derive(Debug)]
pub struct Publisher {
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their pods.
    pub pods: Store<Pod>,
    /// What agents said.
    pub readings: Readings,
    /// Told once all deployments were listed. The store itself wakes one waiter only, and that is the controller.
    pub listed: Arc<Notify>,
    /// Gateways that have a port for each deployment, if there are any.
    pub gateways: Option<Gateways>,
    /// Where documents go.
    pub published: Published,
    /// Who numbers them.
    pub source: String,
    /// Where it shows that it goes on.
    pub vitals: Vitals,
}

impl Publisher {
    /// Makes documents. An empty cache is no empty cluster: waits for the first lists.
    pub async fn run(self) {
        self.listed.notified().await;
        if self.pods.wait_until_ready().await.is_err() {
            return;
        }
        let mut looks = tokio::time::interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            self.vitals.beat("endpoints");
            match self.published.is_asked(Instant::now()) {
                true => {
                    let deployments = self.look(self.readings.now());
                    self.published.publish(&self.source, (self.addresses_of_gateways(), deployments));
                }
                false => self.published.withdraw(),
            }
        }
    }

    fn addresses_of_gateways(&self) -> Vec<String> {
        let ips = self.gateways.as_ref().map(Gateways::ips).unwrap_or_default();
        let mut addresses: Vec<String> = ips.iter().map(|ip| address(ip, ADMIN_PORT)).collect();
        addresses.sort_unstable();
        addresses
    }

    fn look(&self, now: Timestamp) -> Vec<DeploymentEndpoints> {
        let pods = by_owner(&self.pods);
        let replica = |pod: &Arc<Pod>| {
            let reading = self.readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now);
            endpoint(pod, &observe_replica(pod, reading))
        };
        let of = |deployment: &Arc<InferenceDeployment>| {
            let own = pods.get(&deployment.uid().unwrap_or_default()).map(Vec::as_slice).unwrap_or_default();
            let port = self.gateways.as_ref().and_then(|gateways| gateways.port(&deployment.uid()?));
            DeploymentEndpoints { port, ..deployment_endpoints(deployment, own.iter().map(replica).collect()) }
        };
        if let Some(gateways) = &self.gateways {
            gateways.keep_only(|| self.deployments.state().iter().filter_map(|deployment| deployment.uid()).collect());
        }
        let mut all: Vec<_> = self.deployments.state().iter().map(of).collect();
        all.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        all
    }
}

fn deployment_endpoints(deployment: &InferenceDeployment, mut replicas: Vec<ReplicaEndpoint>) -> DeploymentEndpoints {
    let name = deployment.name_any();
    replicas.sort_by(|a, b| a.pod.cmp(&b.pod));
    weigh(deployment, &mut replicas);
    DeploymentEndpoints {
        namespace: deployment.namespace().unwrap_or_default(),
        models: deployment.spec.model.served_names.clone().unwrap_or_else(|| vec![name.clone()]),
        name,
        replicas_wanted: replicas_wanted(deployment),
        port: None,
        replicas,
    }
}

/// A canary gets its part of the deployment's requests.
fn weigh(deployment: &InferenceDeployment, replicas: &mut [ReplicaEndpoint]) {
    let serving: Vec<String> = replicas
        .iter()
        .filter(|replica| replica.state == EndpointState::Serving)
        .map(|replica| replica.revision.clone())
        .collect();
    for replica in replicas {
        let n_others = serving.iter().filter(|revision| **revision != replica.revision).count();
        replica.weight = weight_of(deployment, &replica.revision, n_others);
    }
}

fn endpoint(pod: &Pod, replica: &Replica) -> ReplicaEndpoint {
    let ip = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref());
    let at = |port: u16| ip.map(|ip| address(ip, port));
    ReplicaEndpoint {
        pod: replica.pod.name.clone(),
        uid: replica.pod.uid.clone(),
        address: at(AGENT_PORT),
        events: at(ADMIN_PORT),
        revision: replica.pod.revision.clone(),
        weight: WHOLE_WEIGHT,
        state: state(replica),
        load: replica.reading.report().map(EndpointLoad::from),
    }
}

/// What an agent said a moment ago counts more than what its kubelet shows, which is slower.
pub(crate) fn state(replica: &Replica) -> EndpointState {
    if replica.serves() {
        return EndpointState::Serving;
    }
    let said = replica.reading.report().map(|report| report.phase);
    match (&replica.pod.stage, said) {
        (Stage::Finished { .. }, _) => EndpointState::Unready,
        (Stage::Leaving, _) => EndpointState::Draining,
        _ if replica.drain_since().is_some() => EndpointState::Draining,
        (Stage::Faltering { .. } | Stage::Serving, Some(phase)) => EndpointState::of(phase),
        (Stage::Faltering { .. } | Stage::Serving, None) => EndpointState::Unready,
        (_, Some(phase)) if phase != AgentPhase::Ready => EndpointState::of(phase),
        (Stage::Unscheduled { .. } | Stage::Preparing { .. } | Stage::Blocked(_) | Stage::Starting, _) => {
            EndpointState::Starting
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::{
        contract::{DrainSettings, LoadReport},
        intent::Want,
    };
    use stoker_replica::{Intent, Reading, Trouble};

    use super::*;
    use crate::observe::fixture::observed_pod;

    fn replica(stage: Stage, phase: Option<AgentPhase>) -> Replica {
        let pod = observed_pod(stage);
        let reading = phase.map(|phase| Reading::of(&LoadReport { phase, ..LoadReport::idle(10) }));
        Replica { pod, reading: reading.unwrap_or_else(Reading::missing), intent: None }
    }

    #[test]
    fn who_takes_requests() {
        use AgentPhase::{Draining, Failed, Loading, Ready, Withdrawing};
        let (since, trouble) = (Timestamp::UNIX_EPOCH, Trouble::default);
        let faltering = || Stage::Faltering { trouble: trouble(), since };
        for (stage, phase, expected) in [
            (Stage::Serving, Some(Ready), EndpointState::Serving),
            (Stage::Serving, None, EndpointState::Serving),
            (Stage::Serving, Some(Withdrawing), EndpointState::Draining),
            (Stage::Serving, Some(Draining), EndpointState::Draining),
            (Stage::Serving, Some(Failed), EndpointState::Unready),
            (faltering(), Some(Ready), EndpointState::Serving),
            (faltering(), None, EndpointState::Unready),
            (Stage::Starting, Some(Ready), EndpointState::Starting),
            (Stage::Starting, Some(Loading), EndpointState::Starting),
            (Stage::Preparing { trouble: trouble(), since }, None, EndpointState::Starting),
            (Stage::Leaving, Some(Ready), EndpointState::Draining),
            (Stage::Finished { trouble: trouble(), since }, None, EndpointState::Unready),
        ] {
            let replica = replica(stage, phase);
            assert_eq!(state(&replica), expected, "{:?} {phase:?}", replica.pod.stage);
        }
        let drain = Intent { number: 3, want: Want::Drain(DrainSettings::default()), since };
        let told = Replica { intent: Some(drain), ..replica(Stage::Serving, Some(Ready)) };
        assert_eq!(state(&told), EndpointState::Draining, "written, and not told yet");
    }

    #[tokio::test]
    async fn who_knows_the_newest_waits_and_who_does_not_is_answered_at_once() {
        let published = Published::default();
        let at_once = Duration::ZERO;
        assert_eq!(published.other_than("", 0, at_once).await, None);
        let chat = DeploymentEndpoints { name: "chat".into(), ..DeploymentEndpoints::default() };
        published.publish("o", (vec![], vec![chat.clone()]));
        published.publish("o", (vec![], vec![chat.clone()]));
        let first = published.other_than("", 0, Duration::from_secs(60)).await.unwrap();
        assert_eq!((first.number, published.other_than("o", 1, at_once).await.unwrap().number), (1, 1));
        let waits = published.other_than("o", 1, Duration::from_secs(60));
        let (second, ()) = tokio::join!(waits, async { published.publish("o", (vec![], vec![])) });
        assert_eq!(second.unwrap().number, 2);
        assert_eq!(published.other_than("another", 2, Duration::from_secs(60)).await.unwrap().number, 2);
        published.withdraw();
        assert_eq!(published.other_than("o", 1, at_once).await, None, "nobody keeps it true");
        published.publish("o", (vec![], vec![]));
        assert_eq!(published.other_than("o", 2, Duration::from_secs(60)).await.unwrap().number, 3);
        published.publish("o", (vec!["10.0.0.1:10000".into()], vec![]));
        assert_eq!(published.other_than("o", 3, at_once).await.unwrap().gateways.len(), 1, "another gateway is news");
    }
}
