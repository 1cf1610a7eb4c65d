//! What the operator watches: caches that rounds and all that goes on beside them read, and the events that ask for rounds.

use std::{sync::Arc, time::Instant};

use anyhow::Context as _;
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        core::v1::{ConfigMap, Container, Node, Pod, PodSpec, Service},
        discovery::v1::EndpointSlice,
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
    },
};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::{
        Controller, WatchStreamExt,
        reflector::{self, Store, store::Writer},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use stoker_crds::InferenceDeployment;
use tokio::sync::Notify;

use super::Options;
use crate::{
    budgets::{self, Grants},
    clock::Clock,
    desired::labels,
    devices::Devices,
    gateways::Gateways,
    intake, nodes,
    observe::{Caches, PodIndex},
    pause::WatchPauses,
    pools::{InferencePool, Pools},
    watched::Watched,
};

/// What is known of it.
pub(super) struct Watches {
    pub caches: Caches,
    pub deployments: Store<InferenceDeployment>,
    /// Told once, when all deployments are known.
    pub listed: Arc<Notify>,
    /// Where Services lead, if they lead to gateways.
    pub gateways: Option<Gateways>,
    pub nodes: Watched<Node>,
    pub devices: Devices,
    pub grants: Grants,
}

/// Objects as they are made, changed and deleted.
type Touched<K> = BoxStream<'static, watcher::Result<K>>;

/// What asks for rounds. Caches are filled as it is read.
pub(super) struct Events {
    deployments: Touched<InferenceDeployment>,
    pods: Touched<Pod>,
    prefetches: Touched<Pod>,
    services: Touched<Service>,
    slices: Touched<EndpointSlice>,
    config_maps: Touched<ConfigMap>,
    budgets: Touched<PodDisruptionBudget>,
    network_policies: Touched<NetworkPolicy>,
    pools: Touched<InferencePool>,
    /// Of what any deployment may rest on.
    everybody: Vec<BoxStream<'static, ()>>,
}

impl Watches {
    /// Begins to watch. Nodes, devices and budgets are listed for a while before this returns, the rest as events are read.
    pub(super) async fn begin(client: &Client, options: &Options, clock: Clock) -> anyhow::Result<(Self, Events)> {
        let scope = options.namespace.as_deref();
        let pods_of = PodIndex::default();
        let noted = pods_of.clone();
        let (pods, pod_events) = cached::<Pod>(client, scope, move |pod| {
            slim(pod);
            noted.note(pod, Instant::now());
        });
        let (prefetches, prefetch_events) = cached_of::<Pod>(client, scope, &labels::prefetch_selector(), slim);
        let (services, service_events) = cached::<Service>(client, scope, strip);
        let made = labels::slices_selector();
        let (slices, slice_events) = cached_of::<EndpointSlice>(client, scope, &made, strip);
        let (config_maps, config_map_events) = cached::<ConfigMap>(client, scope, strip);
        let (budgets, budget_events) = cached::<PodDisruptionBudget>(client, scope, strip);
        let (network_policies, network_policy_events) = cached::<NetworkPolicy>(client, scope, strip);
        let (gateways, gateways_changed) = watched_gateways(client, options).await?;
        let (pools, pool_events, pools_listed) = Pools::watch(client.clone(), scope, options.pools);
        let (nodes, nodes_changed) = Watched::watch(Api::all(client.clone()), nodes::slim).await;
        let (devices, devices_changed) = Devices::watch(client).await;
        let (given, given_changed) = Watched::watch(api(client, scope), budgets::slim).await;
        let (deployments, deployment_events, listed) = listed_deployments(client, scope, clock);
        let watches = Self {
            caches: Caches {
                pods,
                pods_of,
                services,
                slices,
                config_maps,
                budgets,
                network_policies,
                pools,
                prefetches,
            },
            deployments,
            listed,
            gateways,
            nodes,
            devices,
            grants: Grants::of_budgets(given),
        };
        let events = Events {
            deployments: deployment_events,
            pods: pod_events,
            prefetches: prefetch_events,
            services: service_events,
            slices: slice_events,
            config_maps: config_map_events,
            budgets: budget_events,
            network_policies: network_policy_events,
            pools: pool_events.boxed(),
            everybody: vec![
                gateways_changed,
                pools_listed.boxed(),
                nodes_changed.boxed(),
                devices_changed.boxed(),
                given_changed.boxed(),
            ],
        };
        Ok((watches, events))
    }
}

impl Events {
    /// A controller whose rounds they ask for.
    pub(super) fn controller(self, deployments: Store<InferenceDeployment>) -> Controller<InferenceDeployment> {
        Controller::for_stream(self.deployments, deployments)
            .owns_stream(self.pods)
            .owns_stream(self.prefetches)
            .owns_stream(self.services)
            .owns_stream(self.slices)
            .owns_stream(self.config_maps)
            .owns_stream(self.budgets)
            .owns_stream(self.network_policies)
            .owns_stream(self.pools)
            .reconcile_all_on(stream::select_all(self.everybody))
    }
}

async fn watched_gateways(
    client: &Client,
    options: &Options,
) -> anyhow::Result<(Option<Gateways>, BoxStream<'static, ()>)> {
    let Some(service) = &options.gateways else { return Ok((None, stream::pending().boxed())) };
    let watched = Gateways::watch(client.clone(), service, options.namespace.as_deref()).await;
    let (gateways, changed) = watched.context("read which ports of gateways are given")?;
    Ok((Some(gateways), changed.boxed()))
}

fn listed_deployments(
    client: &Client,
    scope: Option<&str>,
    clock: Clock,
) -> (Store<InferenceDeployment>, Touched<InferenceDeployment>, Arc<Notify>) {
    let (deployments, writer) = reflector::store();
    let listed = Arc::new(Notify::new());
    let all_listed = Arc::clone(&listed);
    let events = intake::readable(api(client, scope), client.clone(), clock)
        .modify(strip)
        .reflect(writer)
        .inspect_ok(move |event| {
            if matches!(event, watcher::Event::InitDone) {
                all_listed.notify_one();
            }
        })
        .applied_objects();
    (deployments, events.boxed(), listed)
}

/// A cache of what the operator made, and the events that fill it.
fn cached<K>(client: &Client, scope: Option<&str>, trim: impl Fn(&mut K) + Send + 'static) -> (Store<K>, Touched<K>)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
    K: std::fmt::Debug + Send + Sync + 'static,
{
    cached_of(client, scope, &labels::managed_selector(), trim)
}

/// The same of what this selects.
fn cached_of<K>(
    client: &Client,
    scope: Option<&str>,
    selector: &str,
    trim: impl Fn(&mut K) + Send + 'static,
) -> (Store<K>, Touched<K>)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned,
    K: std::fmt::Debug + Send + Sync + 'static,
{
    let writer = Writer::<K>::default();
    let store = writer.as_reader();
    let config = watcher::Config::default().labels(selector);
    let events = watcher(api::<K>(client, scope), config).backoff(WatchPauses::default());
    (store, events.modify(trim).reflect(writer).touched_objects().boxed())
}

fn api<K>(client: &Client, scope: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match scope {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Bookkeeping of the API server that nobody here reads is most of an object's size.
fn strip<K: Resource>(object: &mut K) {
    object.managed_fields_mut().clear();
}

/// What the caches keep of a pod. Its volumes, probes and variables are most of the rest, and ours anyway.
fn slim(pod: &mut Pod) {
    strip(pod);
    let Some(spec) = pod.spec.take() else { return };
    let containers = spec.containers.into_iter();
    pod.spec = Some(PodSpec {
        node_name: spec.node_name,
        node_selector: spec.node_selector,
        resource_claims: spec.resource_claims,
        scheduling_gates: spec.scheduling_gates,
        containers: containers
            .map(|container| Container { name: container.name, resources: container.resources, ..Container::default() })
            .collect(),
        ..PodSpec::default()
    });
}
