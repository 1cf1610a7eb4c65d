//! GPUs as drivers of Dynamic Resource Allocation publish them: which of them a pod means, which nodes reach them, what memory they have,
//! and which of them no claim holds. Pure; who asks the API server is elsewhere.
//!
//! Counted is what the scheduler could allocate: of each pool the newest generation, once all its slices are there, without devices whose
//! taints keep claims away, and of devices that share counters so many as these are enough for. A device that several claims may share is held
//! as soon as one has a part of it: a replica computes on whole GPUs.

mod class;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use k8s_openapi::api::{
    core::v1::{Node, NodeSelector},
    resource::v1::{Device, DeviceClass, ResourceClaim, ResourceSlice},
};
use kube::ResourceExt;
use stoker_fit::gpu::Card;

use self::class::Meant;
use crate::{
    nodes::{GPU_RESOURCE, GpuName, RESOURCE_OF_CLASS, card_by, meets},
    quantity::amount,
};

/// What a cluster says of its devices, all of it. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// Devices.
    pub slices: Arc<Vec<ResourceSlice>>,
    /// Who holds them.
    pub claims: Arc<Vec<ResourceClaim>>,
    /// What they may be asked for by.
    pub classes: Arc<Vec<DeviceClass>>,
}

/// The GPUs that pods of a deployment mean.
#[derive(Debug, Default)]
pub struct Gpus<'a> {
    /// By the only node that reaches them.
    local: BTreeMap<&'a str, Vec<Pool<'a>>>,
    shared: Vec<Pool<'a>>,
    /// Pods get them for what they ask. Else a device plugin gives them, and the driver's slices only describe them.
    are_given: bool,
}

/// GPUs of one node.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct GpuCount {
    /// That pods may have, together.
    pub all: u64,
    /// That nobody has.
    pub free: u64,
}

/// The GPUs that pods get, or that are described, by this name; or why nobody can tell which they are. `None`: it is not known what is
/// published, which what a device plugin offers does not need.
pub fn gpus<'a>(published: Option<&'a Published>, asked: GpuName<'_>) -> Result<Gpus<'a>, String> {
    match (published, asked) {
        (Some(published), asked) => published.gpus(asked),
        (None, GpuName::Resource(_)) => Ok(Gpus::default()),
        (None, GpuName::Class(class)) => Err(format!(
            "it is not known what DeviceClass {class} has: the cluster serves no resource.k8s.io/v1, or there is no right to list its \
             resourceslices, resourceclaims and deviceclasses"
        )),
    }
}

impl Published {
    /// The class of a resource that is not read here counts as none: a device plugin may offer it as well.
    fn gpus(&self, asked: GpuName<'_>) -> Result<Gpus<'_>, String> {
        match asked {
            GpuName::Class(name) => {
                let class = self.class(name).ok_or_else(|| format!("the cluster has no DeviceClass {name}"))?;
                let meant = Meant::by(class).map_err(|expression| {
                    format!("DeviceClass {name} selects devices by {expression:?}, which is not read here")
                })?;
                Ok(Gpus { are_given: true, ..self.all_of(&meant) })
            }
            GpuName::Resource(resource) => Ok(match self.class_of(resource).map(Meant::by) {
                Some(Ok(meant)) => Gpus { are_given: true, ..self.all_of(&meant) },
                None if resource == GPU_RESOURCE => self.all_of(&Meant::nvidia()),
                Some(Err(_)) | None => Gpus::default(),
            }),
        }
    }

    fn class(&self, name: &str) -> Option<&DeviceClass> {
        self.classes.iter().find(|class| class.metadata.name.as_deref() == Some(name))
    }

    /// Of several classes for a resource the scheduler takes the one that was made last, of these the first by name.
    fn class_of(&self, resource: &str) -> Option<&DeviceClass> {
        if let Some(name) = resource.strip_prefix(RESOURCE_OF_CLASS) {
            return self.class(name);
        }
        let offers = |class: &&DeviceClass| class.spec.extended_resource_name.as_deref() == Some(resource);
        let made = |class: &DeviceClass| class.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let mut classes: Vec<_> = self.classes.iter().filter(offers).collect();
        classes.sort_by_key(|class| class.name_any());
        classes.into_iter().rev().max_by_key(|class| made(class))
    }

    fn all_of(&self, meant: &Meant) -> Gpus<'_> {
        let held = held(&self.claims);
        let mut gpus = Gpus::default();
        let pools = pools(&self.slices).map(|slices| Pool::of(&slices, meant, &held));
        for pool in pools.filter(|pool| !pool.gpus.is_empty()) {
            match pool.home() {
                Some(node) => gpus.local.entry(node).or_default().push(pool),
                None => gpus.shared.push(pool),
            }
        }
        gpus
    }
}

impl<'a> Gpus<'a> {
    /// GPUs that the node gives pods; `None`: none.
    pub fn given(&self, node: &Node) -> Option<GpuCount> {
        let pools = self.pools(node).filter(|_| self.are_given);
        let count = pools.map(|pool| pool.count(node)).fold(GpuCount::default(), |all, of_pool| GpuCount {
            all: all.all + of_pool.all,
            free: all.free + of_pool.free,
        });
        (count.all > 0).then_some(count)
    }

    /// The kinds of the node's GPUs, the one with the least memory first: a claim may get any. `None`: one does not say, or there is none.
    pub fn cards(&self, node: &Node) -> Option<Vec<(String, Card)>> {
        let reached = self.pools(node).flat_map(|pool| pool.gpus.iter().filter(|gpu| gpu.reaches(node)));
        let kinds: BTreeSet<_> = reached.map(Gpu::kind).collect();
        let cards = kinds.into_iter().map(|(product, memory_mib)| card_by(product, memory_mib));
        let mut cards: Vec<_> = cards.collect::<Option<_>>()?;
        cards.sort_by_key(|(_, card)| card.memory_mib);
        (!cards.is_empty()).then_some(cards)
    }

    /// The same without those that the node reaches, so that what several reach is counted once.
    pub fn leave_out(&mut self, node: &Node) {
        self.local.remove(node.name_any().as_str());
        for pool in &mut self.shared {
            pool.gpus.retain(|gpu| !gpu.reaches(node));
        }
    }

    fn pools(&self, node: &Node) -> impl Iterator<Item = &Pool<'a>> {
        let local = node.metadata.name.as_deref().and_then(|name| self.local.get(name));
        local.into_iter().flatten().chain(&self.shared)
    }
}

/// Driver, pool and name of a device.
type DeviceId<'a> = (&'a str, &'a str, &'a str);

/// Devices that claims hold. Whoever only looks at one (`adminAccess`) takes it from nobody.
fn held(claims: &[ResourceClaim]) -> HashSet<DeviceId<'_>> {
    let devices = claims.iter().filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref());
    let results = devices.flat_map(|devices| devices.results.iter().flatten());
    let held = results.filter(|result| result.admin_access != Some(true));
    held.map(|result| (result.driver.as_str(), result.pool.as_str(), result.device.as_str())).collect()
}

/// The slices of every pool that may be allocated from.
fn pools(slices: &[ResourceSlice]) -> impl Iterator<Item = Vec<&ResourceSlice>> {
    let mut pools: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        pools.entry((&slice.spec.driver, &slice.spec.pool.name)).or_default().push(slice);
    }
    pools.into_values().filter_map(newest_if_whole)
}

/// While a driver writes a pool anew some of its slices are old and some are not there yet. Two devices of one name are its mistake.
fn newest_if_whole(mut slices: Vec<&ResourceSlice>) -> Option<Vec<&ResourceSlice>> {
    let newest = slices.iter().map(|slice| slice.spec.pool.generation).max()?;
    slices.retain(|slice| slice.spec.pool.generation == newest);
    let is_whole = slices.iter().all(|slice| slice.spec.pool.resource_slice_count == slices.len() as i64);
    let mut names = BTreeSet::new();
    let are_distinct = devices(&slices).all(|(_, device)| names.insert(&device.name));
    (is_whole && are_distinct).then_some(slices)
}

fn devices<'a>(slices: &[&'a ResourceSlice]) -> impl Iterator<Item = (&'a ResourceSlice, &'a Device)> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten().map(|device| (*slice, device)))
}

/// What is left of counters, by set and name.
type Counters<'a> = BTreeMap<(&'a str, &'a str), f64>;

/// The GPUs of a pool.
#[derive(Debug)]
struct Pool<'a> {
    gpus: Vec<Gpu<'a>>,
    /// What they share.
    counters: Counters<'a>,
    /// The same less what claims hold, of whatever devices.
    left: Counters<'a>,
}

#[derive(Debug)]
struct Gpu<'a> {
    device: &'a Device,
    slice: &'a ResourceSlice,
    is_held: bool,
}

impl<'a> Pool<'a> {
    fn of(slices: &[&'a ResourceSlice], meant: &Meant, held: &HashSet<DeviceId<'_>>) -> Self {
        let is_held = |slice: &ResourceSlice, device: &Device| {
            held.contains(&(slice.spec.driver.as_str(), slice.spec.pool.name.as_str(), device.name.as_str()))
        };
        let counters = counters(slices);
        let mut left = counters.clone();
        for (_, device) in devices(slices).filter(|(slice, device)| is_held(slice, device)) {
            consumed(device).for_each(|(counter, amount)| *left.entry(counter).or_default() -= amount);
        }
        let gpus = devices(slices)
            .filter(|(slice, device)| meant.includes(&slice.spec.driver, device) && !keeps_away(device))
            .map(|(slice, device)| Gpu { device, slice, is_held: is_held(slice, device) });
        Self { gpus: gpus.collect(), counters, left }
    }

    /// The node that all of it is on.
    fn home(&self) -> Option<&'a str> {
        let node = self.gpus.first()?.slice.spec.node_name.as_deref()?;
        self.gpus.iter().all(|gpu| gpu.slice.spec.node_name.as_deref() == Some(node)).then_some(node)
    }

    fn count(&self, node: &Node) -> GpuCount {
        let reached = || self.gpus.iter().filter(|gpu| gpu.reaches(node));
        GpuCount {
            all: together(reached(), &self.counters),
            free: together(reached().filter(|gpu| !gpu.is_held), &self.left),
        }
    }
}

impl<'a> Gpu<'a> {
    fn reaches(&self, node: &Node) -> bool {
        let (device, slice) = (self.device, &self.slice.spec);
        match slice.per_device_node_selection {
            Some(true) => is_at(node, device.node_name.as_deref(), device.all_nodes, device.node_selector.as_ref()),
            Some(false) | None => {
                is_at(node, slice.node_name.as_deref(), slice.all_nodes, slice.node_selector.as_ref())
            }
        }
    }

    /// Product, and memory in MiB, by the words of NVIDIA's driver.
    fn kind(&self) -> (Option<&'a str>, Option<u64>) {
        let attributes = self.device.attributes.as_ref();
        let product = attributes.and_then(|attributes| attributes.get("productName")?.string.as_deref());
        let mut capacities = self.device.capacity.iter().flatten();
        let memory = capacities.find(|(name, _)| name.rsplit('/').next() == Some("memory"));
        let bytes = memory.and_then(|(_, memory)| amount(&memory.value.0)).filter(|bytes| *bytes > 0.0);
        (product, bytes.map(|bytes| bytes as u64 >> 20))
    }
}

fn is_at(node: &Node, name: Option<&str>, all: Option<bool>, selector: Option<&NodeSelector>) -> bool {
    match (name, selector) {
        (Some(name), _) if !name.is_empty() => node.metadata.name.as_deref() == Some(name),
        _ if all == Some(true) => true,
        (_, Some(selector)) => selector.node_selector_terms.iter().any(|term| meets(node, term)),
        (_, None) => false,
    }
}

/// Claims of replicas tolerate no taint of a device.
fn keeps_away(device: &Device) -> bool {
    device.taints.iter().flatten().any(|taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute"))
}

fn counters<'a>(slices: &[&'a ResourceSlice]) -> Counters<'a> {
    let sets = slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten());
    let counters = sets.flat_map(|set| set.counters.iter().map(move |(name, counter)| (set, name, counter)));
    let value = |text: &str| amount(text).unwrap_or_default();
    counters.map(|(set, name, counter)| ((set.name.as_str(), name.as_str()), value(&counter.value.0))).collect()
}

/// What a device takes of counters; of what cannot be read there is never enough.
fn consumed(device: &Device) -> impl Iterator<Item = ((&str, &str), f64)> {
    let sets = device.consumes_counters.iter().flatten();
    let counters = sets.flat_map(|set| set.counters.iter().map(move |(name, counter)| (set, name, counter)));
    counters.map(|(set, name, counter)| {
        ((set.counter_set.as_str(), name.as_str()), amount(&counter.value.0).unwrap_or(f64::INFINITY))
    })
}

/// How many of them pods may have together, tried in the order in which they are published, as the scheduler does.
fn together<'g, 'a: 'g>(gpus: impl Iterator<Item = &'g Gpu<'a>>, counters: &Counters<'a>) -> u64 {
    let mut left = counters.clone();
    gpus.filter(|gpu| take(&mut left, gpu.device)).count() as u64
}

/// Whether there is enough for the device, which then has it.
fn take<'a>(left: &mut Counters<'a>, device: &'a Device) -> bool {
    let is_enough = consumed(device).all(|(counter, amount)| left.get(&counter).is_some_and(|left| *left >= amount));
    if is_enough {
        consumed(device).for_each(|(counter, amount)| *left.entry(counter).or_default() -= amount);
    }
    is_enough
}
