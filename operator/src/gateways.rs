//! Gateways that Services lead to: where they are, as the EndpointSlices of their own Service say, and which of their ports is
//! which deployment's. Writes nothing.
//!
//! What comes through a deployment's Service may name nobody: short host names and addresses are the same in all namespaces. So each
//! deployment has a port of its own on every gateway. Which one, its EndpointSlices remember: whoever leads next goes on with them.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    str::FromStr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::{sync::mpsc, time::timeout};
use tracing::warn;

use crate::{desired::labels, pause::WatchPauses};

/// Gateways listen on these: below the ports that kernels give to outgoing connections.
const FIRST_PORT: u16 = 10_000;
const N_PORTS: u16 = 20_000;

/// Rounds begin after that.
const FIRST_LIST_WITHIN: Duration = Duration::from_secs(20);

/// A Service, as `NAMESPACE/NAME`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ServiceName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err("NAMESPACE/NAME of a Service".to_owned()),
        }
    }
}

/// Where a deployment's Service leads: to this port of these gateways.
#[derive(Clone, Debug, PartialEq)]
pub struct Front {
    /// The deployment's own port.
    pub port: u16,
    /// Gateways by their kind of address, as in an EndpointSlice.
    pub places: Vec<(String, Vec<Endpoint>)>,
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gateways {
    slices: Store<EndpointSlice>,
    ports: Arc<Mutex<Ports>>,
}

impl Gateways {
    /// Begins to watch the gateways behind a Service, and reads which ports are given already, in this namespace or all. The stream
    /// has an item whenever gateways change.
    pub async fn watch(
        client: Client,
        service: &ServiceName,
        scope: Option<&str>,
    ) -> kube::Result<(Self, impl Stream<Item = ()> + Send + use<>)> {
        let slices = Api::<EndpointSlice>::namespaced(client.clone(), &service.namespace);
        let config = watcher::Config::default().labels(&format!("{}={}", labels::SERVICE, service.name));
        let (store, writer) = reflector::store();
        let watched = watcher(slices, config).backoff(WatchPauses::default()).reflect(writer).touched_objects();
        let (changed, mut changes) = mpsc::channel(1);
        tokio::spawn(watched.for_each(move |outcome| {
            match outcome {
                // One that waits already says the same.
                Ok(_) => _ = changed.try_send(()),
                Err(error) => warn!(%error, "watch gateways"),
            }
            std::future::ready(())
        }));
        let mut ports = Ports::default();
        for slice in own_slices(client, scope).await? {
            if let Some((uid, port)) = recorded(&slice) {
                ports.record(uid, port);
            }
        }
        // Without them Services lead to replicas, which is what they do without gateways anyway.
        if timeout(FIRST_LIST_WITHIN, store.wait_until_ready()).await.is_err() {
            warn!(?service, "no list of gateways yet: Services lead to replicas");
        }
        let gateways = Self { slices: store, ports: Arc::new(Mutex::new(ports)) };
        Ok((gateways, futures::stream::poll_fn(move |context| changes.poll_recv(context))))
    }

    /// Where the Service of the deployment with this UID leads; `None`: no gateway is ready, so to its replicas.
    pub fn front(&self, uid: &str) -> Option<Front> {
        let slices = self.slices.state();
        let port = self.port(uid)?;
        any_ready(&slices).then(|| Front { port, places: places(&slices) })
    }

    /// Where gateways are, by IP; those that are not ready too: who leaves may have requests in line.
    pub fn ips(&self) -> HashSet<String> {
        let places = places(&self.slices.state());
        let all = places.iter().flat_map(|(_, endpoints)| endpoints);
        all.filter_map(|endpoint| endpoint.addresses.first().cloned()).collect()
    }

    /// Whether the Service of the deployment with this UID leads to gateways.
    pub fn leads(&self, uid: &str) -> bool {
        any_ready(&self.slices.state()) && self.port(uid).is_some()
    }

    /// The port of gateways that is the deployment's with this UID; `None`: all are given.
    pub fn port(&self, uid: &str) -> Option<u16> {
        self.ports().of(uid)
    }

    /// Takes ports back from all but these. They are looked up while none is given: a deployment that has just come keeps its own.
    pub fn keep_only(&self, uids: impl FnOnce() -> HashSet<String>) {
        let mut ports = self.ports();
        let uids = uids();
        ports.keep_only(&uids);
    }

    fn ports(&self) -> MutexGuard<'_, Ports> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn any_ready(slices: &[Arc<EndpointSlice>]) -> bool {
    slices.iter().flat_map(|slice| slice.endpoints.iter().flatten()).any(is_ready)
}

fn is_ready(endpoint: &Endpoint) -> bool {
    endpoint.conditions.as_ref().is_none_or(|are| are.ready != Some(false))
}

/// The slices that the operator wrote.
async fn own_slices(client: Client, scope: Option<&str>) -> kube::Result<Vec<EndpointSlice>> {
    let all = scope.map_or_else(|| Api::all(client.clone()), |namespace| Api::namespaced(client.clone(), namespace));
    Ok(all.list(&ListParams::default().labels(&labels::slices_selector())).await?.items)
}

/// Whose slice it is, and to which port it leads.
fn recorded(slice: &EndpointSlice) -> Option<(String, u16)> {
    let owner = slice.meta().owner_references.iter().flatten().find(|owner| owner.controller == Some(true))?;
    let port = slice.ports.iter().flatten().find_map(|port| port.port)?;
    Some((owner.uid.clone(), u16::try_from(port).ok()?))
}

/// Gateways by their kind of address, always in the same order.
fn places(slices: &[Arc<EndpointSlice>]) -> Vec<(String, Vec<Endpoint>)> {
    let mut kinds: Vec<&String> = slices.iter().map(|slice| &slice.address_type).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let of_kind = |kind: &String| {
        let of = slices.iter().filter(|slice| slice.address_type == *kind);
        let mut endpoints: Vec<Endpoint> = of.flat_map(|slice| slice.endpoints.iter().flatten()).map(copied).collect();
        endpoints.sort_by(|a, b| a.addresses.cmp(&b.addresses));
        endpoints.dedup_by(|a, b| a.addresses == b.addresses);
        (kind.clone(), endpoints)
    };
    kinds.into_iter().map(of_kind).filter(|(_, endpoints)| !endpoints.is_empty()).collect()
}

/// What of a gateway's endpoint holds in any namespace.
fn copied(endpoint: &Endpoint) -> Endpoint {
    Endpoint {
        addresses: endpoint.addresses.clone(),
        conditions: endpoint.conditions.clone(),
        node_name: endpoint.node_name.clone(),
        zone: endpoint.zone.clone(),
        ..Endpoint::default()
    }
}

/// Which port is whose.
#[derive(Debug, Default)]
struct Ports {
    of: HashMap<String, u16>,
    given: HashSet<u16>,
}

impl Ports {
    /// It has this one already, unless another one has.
    fn record(&mut self, uid: String, port: u16) {
        if !self.of.contains_key(&uid) && self.given.insert(port) {
            self.of.insert(uid, port);
        }
    }

    /// Its port. Where it begins to look for a free one depends on its UID: a port that was another's is not given again soon.
    fn of(&mut self, uid: &str) -> Option<u16> {
        if let Some(port) = self.of.get(uid) {
            return Some(*port);
        }
        let mut hasher = DefaultHasher::new();
        uid.hash(&mut hasher);
        let start = (hasher.finish() % u64::from(N_PORTS)) as u16;
        let port =
            (0..N_PORTS).map(|at| FIRST_PORT + (start + at) % N_PORTS).find(|port| !self.given.contains(port))?;
        self.record(uid.to_owned(), port);
        Some(port)
    }

    fn keep_only(&mut self, uids: &HashSet<String>) {
        self.of.retain(|uid, _| uids.contains(uid));
        self.given = self.of.values().copied().collect();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(kind: &str, endpoints: Value) -> Arc<EndpointSlice> {
        Arc::new(serde_json::from_value(json!({"addressType": kind, "endpoints": endpoints, "metadata": {}})).unwrap())
    }

    #[test]
    fn ports_are_given_once_kept_and_remembered() {
        let mut ports = Ports::default();
        let all: HashSet<u16> = (0..1000).filter_map(|number| ports.of(&number.to_string())).collect();
        assert_eq!(all.len(), 1000);
        assert!(all.iter().all(|port| (FIRST_PORT..FIRST_PORT + N_PORTS).contains(port)));
        let seventh = ports.of("7").unwrap();
        ports.keep_only(&HashSet::from(["7".to_owned()]));
        assert_eq!((ports.of("7"), ports.given.len()), (Some(seventh), 1));

        let mut next = Ports::default();
        next.record("a".into(), seventh);
        next.record("b".into(), seventh);
        assert_eq!(next.of("a"), Some(seventh));
        assert!(next.of("7").is_some_and(|port| port != seventh), "it is another's by now");
        assert!(next.of("b").is_some_and(|port| port != seventh));
    }

    #[test]
    fn where_all_ports_are_given_nobody_gets_one() {
        let mut ports = Ports::default();
        for number in 0..N_PORTS {
            assert!(ports.of(&number.to_string()).is_some());
        }
        assert_eq!(ports.of("one more"), None);
    }

    #[test]
    fn gateways_are_copied_in_one_order_without_what_is_their_own_namespace_s() {
        let pod = json!({"kind": "Pod", "namespace": "stoker-system", "name": "gateway-0"});
        let first = json!({"addresses": ["10.0.0.9"], "conditions": {"ready": true}, "zone": "a", "targetRef": pod});
        let second = json!({"addresses": ["10.0.0.4"], "conditions": {"ready": false}});
        let one = places(&[slice("IPv4", json!([first, second])), slice("IPv6", json!([]))]);
        let other = places(&[slice("IPv4", json!([second])), slice("IPv4", json!([first, second]))]);
        assert_eq!(one, other);
        let [(kind, endpoints)] = one.as_slice() else { panic!("{one:?}") };
        assert_eq!((kind.as_str(), endpoints.len()), ("IPv4", 2));
        assert_eq!((endpoints[1].zone.as_deref(), &endpoints[1].target_ref), (Some("a"), &None));
    }

    #[test]
    fn a_service_is_named_with_its_namespace() {
        let name: ServiceName = "stoker-system/stoker-gateway".parse().unwrap();
        assert_eq!((name.namespace.as_str(), name.name.as_str()), ("stoker-system", "stoker-gateway"));
        for wrong in ["", "gateway", "/gateway", "a/", "a/b/c"] {
            assert!(wrong.parse::<ServiceName>().is_err(), "{wrong}");
        }
    }
}
