//! Makes Services reachable: listens on every ClusterIP and port and forwards connections to the ready pods behind them,
//! one after the other. Reads pods instead of EndpointSlices of selected pods, which refuse loopback addresses; other slices of a
//! Service lead where they say, and addresses that are written as names (`addressType: FQDN`) may be of the loopback.
//!
//! Services, pods and slices are followed one by one, so for a moment they may say that a Service leads nowhere when it never
//! did. kube-proxy reads slices alone, and writes its rules once a second: here a Service leads nowhere when it has for that long.
//!
//! Like kube-proxy it works on connections: one that is open stays with its pod, also when the pod leaves the Service;
//! and a Service without ready pods refuses connections. TCP only; Services without a selector, headless ones and node
//! ports are left out.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::{
    core::v1::{Pod, Service, ServicePort},
    discovery::v1::{Endpoint, EndpointPort, EndpointSlice},
};
use kube::{
    Api, Client, ResourceExt,
    runtime::{WatchStreamExt, reflector, reflector::Store, watcher},
};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    blocking::{SteadyRetry, enter, start_runtime},
    control_plane::{ControlPlane, client_of},
    credentials::Identity,
    error::ClusterError,
    node::{is_ready, port_number},
};

/// Between two tries to listen on an address that is taken.
const LISTEN_RETRY: Duration = Duration::from_secs(1);
/// For so long a Service leads where it did before it leads nowhere: kube-proxy's `--iptables-min-sync-period`.
const HOLD: Duration = Duration::from_secs(1);

/// Where each Service port leads: from the address clients use to the pods that are ready.
type Routes = BTreeMap<SocketAddr, Vec<SocketAddr>>;

/// A running proxy. Dropping it closes every connection through it.
pub struct ServiceProxy {
    runtime: Option<Runtime>,
}

impl ServiceProxy {
    /// Begins to proxy every Service of the cluster.
    pub fn start(control_plane: &ControlPlane) -> Result<Self, ClusterError> {
        let runtime = start_runtime("service-proxy")?;
        let client = enter(&runtime, async { client_of(control_plane.config_of(Identity::Node).await?) })?;
        runtime.spawn(follow(client));
        Ok(Self { runtime: Some(runtime) })
    }
}

impl Drop for ServiceProxy {
    fn drop(&mut self) {
        // In the background, because a runtime may not be waited for inside another one.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn follow(client: Client) {
    let changed = Arc::new(Notify::new());
    let services = mirror::<Service>(&client, &changed);
    let pods = mirror::<Pod>(&client, &changed);
    let slices = mirror::<EndpointSlice>(&client, &changed);
    let mut fronts = HashMap::new();
    loop {
        // Without news, what was held may be due.
        let _ = timeout(HOLD, changed.notified()).await;
        steer(&mut fronts, routes(&services.state(), &pods.state(), &slices.state()));
    }
}

/// A local copy of all objects of one kind, and a note whenever it changes.
fn mirror<K>(client: &Client, changed: &Arc<Notify>) -> Store<K>
where
    K: kube::Resource<DynamicType = ()> + Clone + std::fmt::Debug + Send + Sync + serde::de::DeserializeOwned + 'static,
{
    let (reader, writer) = reflector::store();
    let stream =
        watcher(Api::<K>::all(client.clone()), watcher::Config::default()).backoff(SteadyRetry).reflect(writer);
    let changed = Arc::clone(changed);
    tokio::spawn(stream.for_each(move |_| {
        changed.notify_one();
        std::future::ready(())
    }));
    reader
}

fn routes(services: &[Arc<Service>], pods: &[Arc<Pod>], slices: &[Arc<EndpointSlice>]) -> Routes {
    let mut routes = Routes::new();
    for service in services {
        let Some(spec) = &service.spec else { continue };
        let Some(address) = spec.cluster_ip.as_deref().and_then(|ip| ip.parse::<IpAddr>().ok()) else { continue };
        let Some(selector) = spec.selector.as_ref().filter(|selector| !selector.is_empty()) else { continue };
        let even_unready = spec.publish_not_ready_addresses == Some(true);
        let backs: Vec<&Pod> = pods
            .iter()
            .map(Arc::as_ref)
            .filter(|pod| {
                pod.namespace() == service.namespace()
                    && selector.iter().all(|(key, value)| pod.labels().get(key) == Some(value))
            })
            .filter(|pod| pod.metadata.deletion_timestamp.is_none() && (even_unready || is_ready(pod)))
            .collect();
        for port in spec.ports.iter().flatten().filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP") {
            let Ok(number) = u16::try_from(port.port) else { continue };
            let selected = backs.iter().filter_map(|pod| target(pod, port));
            let led = slices.iter().filter(|slice| is_of(slice, service)).flat_map(|slice| targets(slice, port));
            routes.insert(SocketAddr::new(address, number), selected.chain(led).collect());
        }
    }
    routes
}

/// Where `port` of a Service leads in `pod`.
fn target(pod: &Pod, port: &ServicePort) -> Option<SocketAddr> {
    let address: IpAddr = pod.status.as_ref()?.pod_ip.as_deref()?.parse().ok()?;
    let number = match &port.target_port {
        None => u16::try_from(port.port).ok()?,
        Some(target) => {
            pod.spec.as_ref()?.containers.iter().find_map(|container| port_number(target, container).ok())?
        }
    };
    Some(SocketAddr::new(address, number))
}

fn is_of(slice: &EndpointSlice, service: &Service) -> bool {
    let name = slice.labels().get("kubernetes.io/service-name");
    slice.namespace() == service.namespace() && name == service.metadata.name.as_ref()
}

/// Where `port` of a Service leads by a slice.
fn targets(slice: &EndpointSlice, port: &ServicePort) -> Vec<SocketAddr> {
    let of_name =
        |there: &&EndpointPort| there.name.as_deref().unwrap_or_default() == port.name.as_deref().unwrap_or_default();
    let there = slice.ports.iter().flatten().find(of_name).and_then(|there| u16::try_from(there.port?).ok());
    let is_ready = |endpoint: &&Endpoint| endpoint.conditions.as_ref().is_none_or(|are| are.ready != Some(false));
    let ready = slice.endpoints.iter().flatten().filter(is_ready);
    let addresses = ready.filter_map(|endpoint| endpoint.addresses.first()?.parse::<IpAddr>().ok());
    addresses.filter_map(|address| Some(SocketAddr::new(address, there?))).collect()
}

/// One address that clients use.
struct Front {
    backs: watch::Sender<Vec<SocketAddr>>,
    /// Since when it should lead nowhere.
    nowhere: Option<Instant>,
    listener: JoinHandle<()>,
}

impl Front {
    /// Leads there from now on, or soon.
    fn lead(&mut self, backs: Vec<SocketAddr>, now: Instant) {
        let since = backs.is_empty().then(|| self.nowhere.unwrap_or(now));
        self.nowhere = since;
        if since.is_some_and(|since| now.duration_since(since) < HOLD) {
            return;
        }
        self.backs.send_if_modified(|current| {
            let is_new = *current != backs;
            *current = backs;
            is_new
        });
    }
}

fn steer(fronts: &mut HashMap<SocketAddr, Front>, routes: Routes) {
    fronts.retain(|address, front| {
        let wanted = routes.contains_key(address);
        if !wanted {
            front.listener.abort();
        }
        wanted
    });
    for (address, backs) in routes {
        let front = fronts.entry(address).or_insert_with(|| {
            let (backs, changes) = watch::channel(Vec::new());
            Front { backs, nowhere: None, listener: tokio::spawn(serve(address, changes)) }
        });
        front.lead(backs, Instant::now());
    }
}

/// Listens while there is anywhere to forward to.
async fn serve(address: SocketAddr, mut backs: watch::Receiver<Vec<SocketAddr>>) {
    let turn = AtomicUsize::new(0);
    let current = backs.clone();
    while backs.wait_for(|backs| !backs.is_empty()).await.is_ok() {
        match TcpListener::bind(address).await {
            Ok(listener) => tokio::select! {
                () = accept(&listener, &current, &turn) => {}
                _ = backs.wait_for(Vec::is_empty) => {}
            },
            Err(error) => {
                tracing::warn!(%address, %error, "cannot listen for a Service; ports below 1024 need root");
                sleep(LISTEN_RETRY).await;
            }
        }
    }
}

async fn accept(listener: &TcpListener, backs: &watch::Receiver<Vec<SocketAddr>>, turn: &AtomicUsize) {
    loop {
        // An error here is about one client, or about too many of them; the listener itself is fine.
        let Ok((client, _)) = listener.accept().await else {
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        if let Some(back) = next(&backs.borrow(), turn) {
            tokio::spawn(forward(client, back));
        }
    }
}

fn next(backs: &[SocketAddr], turn: &AtomicUsize) -> Option<SocketAddr> {
    let turn = turn.fetch_add(1, Ordering::Relaxed);
    backs.get(turn.checked_rem(backs.len())?).copied()
}

/// Copies both ways until one side has had enough. A pod that cannot be reached closes the client's connection, as a
/// packet filter would.
async fn forward(mut client: TcpStream, back: SocketAddr) {
    let connected = TcpStream::connect(back).await;
    let copied = async {
        let mut server = connected?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        copy_bidirectional(&mut client, &mut server).await
    };
    if let Err(error) = copied.await {
        tracing::debug!(%back, %error, "a connection ended");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(address: &str, ready: &str, extra: Value) -> Arc<Pod> {
        let mut pod = json!({
            "metadata": {"namespace": "n", "name": address, "labels": {"app": "a"}},
            "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 8000}]}]},
            "status": {"podIP": address, "conditions": [{"type": "Ready", "status": ready}]}});
        pod["metadata"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn service(extra: Value) -> Arc<Service> {
        let mut service = json!({
            "metadata": {"namespace": "n", "name": "s"},
            "spec": {"clusterIP": "127.96.0.9", "selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": "http"}]}});
        service["spec"].as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        Arc::new(serde_json::from_value(service).unwrap())
    }

    fn check(service: Arc<Service>, pods: &[Arc<Pod>], expected: &[(&str, &[&str])]) {
        let expected: Routes = expected
            .iter()
            .map(|(front, backs)| (front.parse().unwrap(), backs.iter().map(|back| back.parse().unwrap()).collect()))
            .collect();
        assert_eq!(routes(&[service], pods, &[]), expected);
    }

    #[test]
    fn slices_of_a_service_lead_where_they_say() {
        let slice = |of: &str, port: &str, endpoints: Value| {
            Arc::new(
                serde_json::from_value::<EndpointSlice>(json!({
                "metadata": {"namespace": "n", "name": "x", "labels": {"kubernetes.io/service-name": of}},
                "addressType": "FQDN", "ports": [{"name": port, "port": 10_007}], "endpoints": endpoints}))
                .unwrap(),
            )
        };
        let ready = json!([{"addresses": ["127.77.0.9"]}]);
        let unready =
            json!([{"addresses": ["127.77.0.8"], "conditions": {"ready": false}}, {"addresses": ["not.an.address"]}]);
        let slices = [
            slice("s", "http", ready.clone()),
            slice("s", "http", unready),
            slice("s", "other", ready.clone()),
            slice("another", "http", ready),
        ];
        let service = service(json!({"selector": {"app": "nobody"}, "ports": [{"name": "http", "port": 80}]}));
        let led = routes(&[service], &[pod("127.77.0.2", "True", json!({}))], &slices);
        assert_eq!(led.into_values().flatten().collect::<Vec<_>>(), ["127.77.0.9:10007".parse().unwrap()]);
    }

    #[test]
    fn connections_go_to_ready_pods_that_stay() {
        let pods = [
            pod("127.77.0.2", "True", json!({})),
            pod("127.77.0.3", "False", json!({})),
            pod("127.77.0.4", "True", json!({"deletionTimestamp": "2026-01-01T00:00:00Z"})),
            pod("127.77.0.5", "True", json!({"namespace": "other"})),
            pod("127.77.0.6", "True", json!({"labels": {"app": "b"}})),
        ];
        check(service(json!({})), &pods, &[("127.96.0.9:80", &["127.77.0.2:8000"])]);
    }

    #[test]
    fn a_service_without_ready_pods_has_a_route_to_nowhere() {
        check(service(json!({})), &[], &[("127.96.0.9:80", &[])]);
    }

    #[test]
    fn headless_services_and_those_without_selector_are_left_out() {
        check(service(json!({"clusterIP": "None"})), &[], &[]);
        check(service(json!({"selector": {}})), &[], &[]);
    }

    #[tokio::test]
    async fn a_front_leads_elsewhere_at_once_and_nowhere_only_after_a_while() {
        let (backs, led) = watch::channel(Vec::new());
        let mut front = Front { backs, nowhere: None, listener: tokio::spawn(async {}) };
        let [pod, gateway] = ["127.0.0.1:1", "127.0.0.1:2"].map(|back| vec![back.parse::<SocketAddr>().unwrap()]);
        let begun = Instant::now();
        for (at, backs, expected) in [
            (Duration::ZERO, &pod, &pod),
            (Duration::ZERO, &vec![], &pod),
            (HOLD / 2, &gateway, &gateway),
            (HOLD, &vec![], &gateway),
            (2 * HOLD - Duration::from_millis(1), &vec![], &gateway),
            (2 * HOLD, &vec![], &vec![]),
            (3 * HOLD, &pod, &pod),
        ] {
            front.lead(backs.clone(), begun + at);
            assert_eq!(*led.borrow(), *expected, "{at:?}");
        }
    }

    #[test]
    fn turns_go_round() {
        let backs: Vec<SocketAddr> = ["127.0.0.1:1", "127.0.0.1:2"].map(|back| back.parse().unwrap()).into();
        let turn = AtomicUsize::new(0);
        let ports: Vec<u16> = (0..4).map(|_| next(&backs, &turn).unwrap().port()).collect();
        assert_eq!(ports, [1, 2, 1, 2]);
        assert_eq!(next(&[], &turn), None);
    }
}
