//! What exists for one deployment, as last read and possibly stale. Only reads.
//!
//! Two sources: the watch caches, good enough to see that nothing is to be done, and the API server itself. A plan that
//! would change anything is made again from a fresh reading, so no decision rests on a stale cache.

#[cfg(test)]
pub(crate) mod fixture;
mod index;
mod leftovers;
mod pod;
mod prefetch;

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Instant,
};

use k8s_openapi::api::{
    core::v1::{ConfigMap, Pod, Service},
    discovery::v1::EndpointSlice,
    networking::v1::NetworkPolicy,
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::ListParams,
    runtime::reflector::{ObjectRef, Store},
};
use serde::de::DeserializeOwned;
use stoker_crds::{InferenceDeployment, description::Description};
use stoker_replica::Replica;

pub(crate) use self::pod::{agent, exit_code, fetcher, last_words};
pub use self::{
    index::PodIndex,
    leftovers::Leftover,
    pod::{intent_of, observe_replica},
    prefetch::{observe_prefetch, observe_standby},
};
use crate::{
    clock::SKEW,
    desired::labels,
    pools::{InferencePool, Pools},
    readings::Readings,
    rollout::prefetch::PrefetchPod,
    standby::StandbyPod,
};

/// Everything that exists for one deployment. Possibly stale.
#[derive(Clone, Debug)]
pub struct Observed {
    /// The deployment itself, with the status last written.
    pub deployment: Arc<InferenceDeployment>,
    /// The replicas in the pods that it controls.
    pub replicas: Vec<Replica>,
    /// Names of pods that carry its labels and that somebody else controls, such as a deleted namesake.
    pub foreign_pods: BTreeSet<String>,
    /// Pods of names that it gives, without the labels that it gives: nobody sees them but who asks for them by name.
    pub strays: Vec<String>,
    /// The Service of its name.
    pub service: Child<Service>,
    /// The EndpointSlices that it controls.
    pub slices: Vec<Arc<EndpointSlice>>,
    /// ConfigMaps that it controls, and those of the revision's name that it does not.
    pub config_maps: Vec<Child<ConfigMap>>,
    /// The PodDisruptionBudget of its name.
    pub budget: Child<PodDisruptionBudget>,
    /// The NetworkPolicy of its name.
    pub network_policy: Child<NetworkPolicy>,
    /// The InferencePool of its name.
    pub pool: Child<InferencePool>,
    /// What its replicas say of their model, by the UID of the pod.
    pub descriptions: HashMap<String, Described>,
    /// Pods that fetch a model ahead, by the watch cache alone: each has one name, so that nothing is done twice.
    pub prefetches: Vec<PrefetchPod>,
    /// Pods that keep a model in a node's memory, in the same way.
    pub standbys: Vec<StandbyPod>,
    /// What a namesake left behind that is gone.
    pub leftovers: Vec<Leftover>,
}

impl Observed {
    /// A deployment of which nothing else is there yet.
    pub fn of(deployment: Arc<InferenceDeployment>) -> Self {
        Self {
            deployment,
            replicas: Vec::new(),
            foreign_pods: BTreeSet::new(),
            strays: Vec::new(),
            service: Child::Absent,
            slices: Vec::new(),
            config_maps: Vec::new(),
            budget: Child::Absent,
            network_policy: Child::Absent,
            pool: Child::Absent,
            descriptions: HashMap::new(),
            prefetches: Vec::new(),
            standbys: Vec::new(),
            leftovers: Vec::new(),
        }
    }
}

/// What a replica says of its model, and where it runs.
#[derive(Clone, Debug, Default)]
pub struct Described {
    /// Name of its node.
    pub node: String,
    /// What it says.
    pub description: Arc<Description>,
}

/// A child by name: ours, or in the way.
#[derive(Clone, Debug, PartialEq)]
pub enum Child<K> {
    /// Nothing of that name.
    Absent,
    /// Controlled by the deployment.
    Own(Arc<K>),
    /// Of that name, but controlled by somebody else.
    Foreign {
        /// Its name.
        name: String,
        /// Who has it.
        holder: Holder,
    },
}

/// Who has something of a name that we need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Holder {
    /// Nobody for long: it is being deleted, as children of a deleted namesake are.
    Leaving,
    /// A namesake that is gone.
    Namesake,
    /// Somebody else.
    Other,
}

impl<K> Child<K> {
    /// It, if it is ours.
    pub fn own(&self) -> Option<&K> {
        match self {
            Self::Own(object) => Some(object),
            Self::Absent | Self::Foreign { .. } => None,
        }
    }
}

/// The watch caches that all reconciliations share.
#[derive(Clone)]
pub struct Caches {
    /// Pods that the operator made.
    pub pods: Store<Pod>,
    /// Which of them a deployment has.
    pub pods_of: PodIndex,
    /// Services that the operator made.
    pub services: Store<Service>,
    /// EndpointSlices that the operator made.
    pub slices: Store<EndpointSlice>,
    /// ConfigMaps that the operator made.
    pub config_maps: Store<ConfigMap>,
    /// PodDisruptionBudgets that the operator made.
    pub budgets: Store<PodDisruptionBudget>,
    /// NetworkPolicies that the operator made.
    pub network_policies: Store<NetworkPolicy>,
    /// InferencePools that the operator made.
    pub pools: Pools,
    /// Pods that fetch models ahead, and those that keep them in memory.
    pub prefetches: Store<Pod>,
}

impl fmt::Debug for Caches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caches").field("pods", &self.pods.len()).finish_non_exhaustive()
    }
}

/// What exists according to the caches.
pub fn observe_cached(deployment: Arc<InferenceDeployment>, caches: &Caches, readings: &Readings) -> Observed {
    let namespace = deployment.namespace().unwrap_or_default();
    let name = deployment.name_any();
    let pods = caches.pods_of.pods(&caches.pods, &namespace, &name, Instant::now());
    let pods = pods.into_iter().filter(|pod| belongs(&**pod, &namespace, &name)).collect();
    let config_maps = caches.config_maps.state().into_iter().filter(|map| belongs(&**map, &namespace, &name)).collect();
    let service = caches.services.get(&ObjectRef::new(&name).within(&namespace));
    let slices = caches.slices.state().into_iter().filter(|slice| belongs(&**slice, &namespace, &name)).collect();
    let budget = caches.budgets.get(&ObjectRef::new(&name).within(&namespace));
    let network_policy = caches.network_policies.get(&ObjectRef::new(&name).within(&namespace));
    let pool = caches.pools.get(&namespace, &name);
    let strays = deployment.status.as_ref().map(|status| status.stray_pods.clone()).unwrap_or_default();
    let ahead = ahead(&deployment, caches);
    let found = Found { pods, service, slices, config_maps, budget, network_policy, pool, strays, ahead };
    assemble(deployment, found, readings)
}

/// What exists according to the API server, now. `None`: the deployment is gone, or another one took its name.
pub async fn observe_live(
    deployment: &InferenceDeployment,
    revision_map: Option<&str>,
    client: &Client,
    caches: &Caches,
    readings: &Readings,
) -> kube::Result<Option<Observed>> {
    let namespace = deployment.namespace().unwrap_or_default();
    let name = deployment.name_any();
    let labelled = labels::selector_of(&name);
    let pods = list::<Pod>(client, &namespace, &labelled);
    let of_slices = labels::slices_selector_of(&name);
    let slices = list::<EndpointSlice>(client, &namespace, &of_slices);
    let services = Api::<Service>::namespaced(client.clone(), &namespace);
    let deployments = Api::<InferenceDeployment>::namespaced(client.clone(), &namespace);
    let config_maps = list::<ConfigMap>(client, &namespace, &labelled);
    let budgets = Api::<PodDisruptionBudget>::namespaced(client.clone(), &namespace);
    let policies = Api::<NetworkPolicy>::namespaced(client.clone(), &namespace);
    let pool = async { if caches.pools.are_listed() { pool(client, &namespace, &name).await } else { Ok(None) } };
    let (fresh, pods, service, slices, mut config_maps, budget, network_policy, pool) = tokio::try_join!(
        deployments.get_opt(&name),
        pods,
        services.get_opt(&name),
        slices,
        config_maps,
        budgets.get_opt(&name),
        policies.get_opt(&name),
        pool
    )?;
    let Some(fresh) = fresh.filter(|fresh| fresh.uid() == deployment.uid()) else { return Ok(None) };
    // A ConfigMap of the name we need may carry none of our labels.
    if let Some(wanted) = revision_map.filter(|wanted| config_maps.iter().all(|map| map.name_any() != **wanted)) {
        let maps = Api::<ConfigMap>::namespaced(client.clone(), &namespace);
        config_maps.extend(maps.get_opt(wanted).await?.map(Arc::new));
    }
    let strays = strays(&fresh, client).await?;
    let (budget, network_policy, pool) = (budget.map(Arc::new), network_policy.map(Arc::new), pool.map(Arc::new));
    let service = service.map(Arc::new);
    let ahead = ahead(&fresh, caches);
    let found = Found { pods, service, slices, config_maps, budget, network_policy, pool, strays, ahead };
    Ok(Some(assemble(Arc::new(fresh), found, readings)))
}

/// The InferencePool of this name; none, if somebody took the whole kind away.
async fn pool(client: &Client, namespace: &str, name: &str) -> kube::Result<Option<InferencePool>> {
    match Api::<InferencePool>::namespaced(client.clone(), namespace).get_opt(name).await {
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(None),
        found => found,
    }
}

/// Of the pods that the status names as strays, those that still are.
async fn strays(deployment: &InferenceDeployment, client: &Client) -> kube::Result<Vec<String>> {
    let named = deployment.status.as_ref().map(|status| status.stray_pods.clone()).unwrap_or_default();
    let pods = Api::<Pod>::namespaced(client.clone(), &deployment.namespace().unwrap_or_default());
    let mut strays = Vec::new();
    for name in named {
        if is_stray(&pods, &name, &deployment.name_any()).await? {
            strays.push(name);
        }
    }
    Ok(strays)
}

/// True when there is a pod of this name and no list of the deployment's pods has it.
pub async fn is_stray(pods: &Api<Pod>, name: &str, deployment: &str) -> kube::Result<bool> {
    // The operator may list pods and needs no right to get one.
    let by_name = ListParams::default().fields(&format!("metadata.name={name}"));
    let found = pods.list_metadata(&by_name).await?;
    Ok(found.items.first().is_some_and(|pod| {
        let labels = pod.labels();
        labels::list_selector(deployment).iter().any(|(key, value)| labels.get(key) != Some(value))
    }))
}

/// Objects found for a deployment, whoever controls them.
struct Found {
    pods: Vec<Arc<Pod>>,
    service: Option<Arc<Service>>,
    slices: Vec<Arc<EndpointSlice>>,
    config_maps: Vec<Arc<ConfigMap>>,
    budget: Option<Arc<PodDisruptionBudget>>,
    network_policy: Option<Arc<NetworkPolicy>>,
    pool: Option<Arc<InferencePool>>,
    strays: Vec<String>,
    /// Pods that bring its model, in the order of their names.
    ahead: Vec<Arc<Pod>>,
}

/// Whoever controls them, or did.
fn ahead(deployment: &InferenceDeployment, caches: &Caches) -> Vec<Arc<Pod>> {
    let uid = deployment.uid().unwrap_or_default();
    let mut pods = caches.prefetches.state();
    pods.retain(|pod| controlled_by(&**pod, &uid) || leftovers::is_left(&**pod, deployment));
    pods.sort_by_cached_key(|pod| pod.name_any());
    pods
}

fn assemble(deployment: Arc<InferenceDeployment>, found: Found, readings: &Readings) -> Observed {
    let uid = deployment.uid().unwrap_or_default();
    let leftovers = found.leftovers(&deployment);
    let (own, foreign): (Vec<_>, Vec<_>) = found.pods.into_iter().partition(|pod| controlled_by(&**pod, &uid));
    let now = readings.now();
    let reading = |pod: &Pod| readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now);
    let describe = |pod: &Arc<Pod>| {
        let uid = pod.uid()?;
        let node = pod.spec.as_ref()?.node_name.clone()?;
        let description = readings.description(&uid)?;
        Some((uid, Described { node, description }))
    };
    let observe = |pod: &Arc<Pod>| observe_replica(pod, reading(pod)).dated_by(now, SKEW);
    let mut replicas: Vec<Replica> = own.iter().map(observe).collect();
    let ahead = found.ahead.iter().filter(|pod| controlled_by(&***pod, &uid));
    let (stay, end): (Vec<_>, Vec<_>) = ahead.partition(|pod| labels::stands_by(pod.labels()));
    let by_place = |Replica { pod, .. }: &Replica| (pod.revision.clone(), pod.ordinal, pod.name.clone());
    replicas.sort_by_cached_key(by_place);
    Observed {
        replicas,
        descriptions: own.iter().filter_map(describe).collect(),
        prefetches: end.into_iter().filter_map(|pod| observe_prefetch(pod)).collect(),
        standbys: stay.into_iter().filter_map(|pod| observe_standby(pod)).collect(),
        foreign_pods: foreign.iter().map(|pod| pod.name_any()).chain(found.strays.iter().cloned()).collect(),
        strays: found.strays,
        service: found.service.map_or(Child::Absent, |service| child(service, &deployment)),
        slices: found.slices.into_iter().filter(|slice| controlled_by(&**slice, &uid)).collect(),
        config_maps: found.config_maps.into_iter().map(|map| child(map, &deployment)).collect(),
        budget: found.budget.map_or(Child::Absent, |budget| child(budget, &deployment)),
        network_policy: found.network_policy.map_or(Child::Absent, |policy| child(policy, &deployment)),
        pool: found.pool.map_or(Child::Absent, |pool| child(pool, &deployment)),
        leftovers,
        deployment,
    }
}

impl Found {
    /// What a namesake of `deployment` left behind, in the order in which it is needed.
    fn leftovers(&self, deployment: &InferenceDeployment) -> Vec<Leftover> {
        let Self { pods, service, slices, config_maps, budget, network_policy, pool, strays: _, ahead } = self;
        let maps = config_maps.iter().filter_map(|map| Leftover::of(&**map, deployment));
        let slices = slices.iter().filter_map(|slice| Leftover::of(&**slice, deployment));
        let one_each = [
            service.as_ref().and_then(|service| Leftover::of(&**service, deployment)),
            budget.as_ref().and_then(|budget| Leftover::of(&**budget, deployment)),
            network_policy.as_ref().and_then(|policy| Leftover::of(&**policy, deployment)),
            pool.as_ref().and_then(|pool| Leftover::of(&**pool, deployment)),
        ];
        let pods = pods.iter().chain(ahead).filter_map(|pod| Leftover::of(&**pod, deployment));
        maps.chain(slices).chain(one_each.into_iter().flatten()).chain(pods).collect()
    }
}

fn child<K: Resource<DynamicType = ()>>(object: Arc<K>, deployment: &InferenceDeployment) -> Child<K> {
    if controlled_by(&*object, deployment.metadata.uid.as_deref().unwrap_or_default()) {
        return Child::Own(object);
    }
    let holder = match &*object {
        leaving if leaving.meta().deletion_timestamp.is_some() => Holder::Leaving,
        left if leftovers::is_left(left, deployment) => Holder::Namesake,
        _ => Holder::Other,
    };
    Child::Foreign { name: object.name_any(), holder }
}

/// Pods by the UID of their controlling owner; those without one are nobody's.
pub fn by_owner(pods: &Store<Pod>) -> HashMap<String, Vec<Arc<Pod>>> {
    let mut by_owner: HashMap<String, Vec<Arc<Pod>>> = HashMap::new();
    for pod in pods.state() {
        let owner = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
        if let Some(uid) = owner.map(|owner| owner.uid.clone()) {
            by_owner.entry(uid).or_default().push(pod);
        }
    }
    by_owner
}

/// True when the object's controlling owner has this UID. A namesake's children are not ours.
fn controlled_by<K: Resource>(object: &K, uid: &str) -> bool {
    object.owner_references().iter().any(|owner| owner.controller == Some(true) && owner.uid == uid)
}

/// True when the labels say that an object was made for the deployment of this name.
fn belongs<K: Resource>(object: &K, namespace: &str, deployment: &str) -> bool {
    let meta = object.meta();
    let instance = meta.labels.as_ref().and_then(|labels| labels.get(labels::INSTANCE));
    meta.namespace.as_deref() == Some(namespace) && instance.is_some_and(|instance| instance == deployment)
}

async fn list<K>(client: &Client, namespace: &str, selector: &str) -> kube::Result<Vec<Arc<K>>>
where
    K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope> + Clone + DeserializeOwned + fmt::Debug,
{
    let found = Api::<K>::namespaced(client.clone(), namespace).list(&ListParams::default().labels(selector)).await?;
    Ok(found.items.into_iter().map(Arc::new).collect())
}
