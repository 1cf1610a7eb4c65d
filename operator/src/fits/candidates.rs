//! Where a replica could run: kinds of GPUs, or the memory of machines. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use stoker_crds::{
    fit::host_bytes,
    nodes::{MEMORY, PRODUCT, Placement, allocatable, cards_on, gpus_on, is_closed},
};
use stoker_fit::{
    gpu::Card,
    plan::{Place, gib},
};

use super::{Scene, of_revision};
use crate::watched::Seen;

/// Nodes of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    /// What they have, in words.
    pub(super) label: String,
    /// The product that their labels name, if they do.
    pub(super) product: Option<String>,
    /// The same for the arithmetic.
    pub(super) place: Place,
    /// Such nodes; 0 where it does not matter which.
    pub(super) nodes: usize,
    /// A replica of the revision serves there.
    pub(super) is_proven: bool,
}

/// All kinds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Field {
    /// At least one.
    Known(Vec<Candidate>),
    /// Why nobody can tell.
    Unknown(String),
}

/// Where the replicas of a deployment could run.
pub(super) fn field(scene: &Scene<'_>) -> Field {
    let spec = &scene.deployment.spec;
    let limit_bytes = host_bytes(spec);
    let nodes = match (scene.nodes, limit_bytes) {
        (Seen::All(nodes), _) => nodes,
        (_, Some(limit_bytes)) if spec.gpus() == 0 => return Field::Known(vec![on_cpus(limit_bytes, scene)]),
        (Seen::Denied, _) => {
            return Field::Unknown(
                "the operator may not list nodes (its chart gives that right where it watches all namespaces), so it does not know \
                 what its pods may land on"
                    .to_owned(),
            );
        }
        (Seen::NotYet, _) => return Field::Unknown("nodes were not listed yet".to_owned()),
    };
    let placement = Placement::of(spec);
    let open = nodes.iter().filter(|node| !is_closed(node) && placement.admits(node));
    match (spec.gpus(), scene.devices) {
        (0, _) => hosts(open, limit_bytes, scene),
        (_, Err(why)) => Field::Unknown(why.clone()),
        (gpus, Ok(devices)) => {
            let enough = |node: &&Node| gpus_on(node, placement.gpus, devices).is_some_and(|n| n >= u64::from(gpus));
            kinds(open.filter(enough).collect(), &placement, scene)
        }
    }
}

/// A pod that limits no memory may take what the smallest of the nodes has.
fn hosts<'a>(nodes: impl Iterator<Item = &'a Node>, limit_bytes: Option<u64>, scene: &Scene<'_>) -> Field {
    let bytes = nodes.map(|node| limit_bytes.or_else(|| allocatable(node, "memory")));
    match bytes.min_by_key(|bytes| bytes.unwrap_or(u64::MAX)) {
        None => Field::Unknown("there is no open node that its pods may land on: known once there is one".to_owned()),
        Some(None) => Field::Unknown("its nodes do not say what memory they have".to_owned()),
        Some(Some(bytes)) => Field::Known(vec![on_cpus(bytes, scene)]),
    }
}

fn on_cpus(limit_bytes: u64, scene: &Scene<'_>) -> Candidate {
    let is_proven = of_revision(scene).any(|(replica, _)| replica.serves());
    let label = format!("CPUs with {}", gib(limit_bytes));
    Candidate { label, product: None, place: Place::Host { limit_bytes }, nodes: 0, is_proven }
}

fn kinds(nodes: Vec<&Node>, placement: &Placement<'_>, scene: &Scene<'_>) -> Field {
    let gpus = scene.deployment.spec.gpus();
    if nodes.is_empty() {
        let name = placement.gpus;
        return Field::Unknown(format!(
            "no open node that its pods may land on has {gpus} of {name}: known once there is one"
        ));
    }
    let mut kinds: BTreeMap<(String, u64), Candidate> = BTreeMap::new();
    let mut untold = 0;
    for node in &nodes {
        let cards = cards(node, scene);
        untold += usize::from(cards.is_empty());
        let proves = of_revision(scene).any(|(replica, told)| told.node == node.name_any() && replica.serves());
        for (product, card) in cards {
            // Partitions of a GPU have its name.
            let kind = kinds.entry((product.clone(), card.memory_mib)).or_insert_with(|| Candidate {
                label: format!("{gpus} x {product} of {}", gib(card.total_bytes())),
                product: node.labels().get(PRODUCT).cloned(),
                place: Place::Gpu(card),
                nodes: 0,
                is_proven: false,
            });
            kind.nodes += 1;
            kind.is_proven |= proves;
        }
    }
    match untold {
        0 => Field::Known(kinds.into_values().collect()),
        untold => Field::Unknown(format!(
            "{untold} of {} nodes that its pods may land on do not say by the labels {PRODUCT} and {MEMORY} what GPUs they have, nor do \
             ResourceSlices",
            nodes.len()
        )),
    }
}

/// The kind of the node's GPUs, where they are of one.
pub(super) fn card(node: &Node, scene: &Scene<'_>) -> Option<(String, Card)> {
    let mut cards = cards(node, scene);
    cards.pop().filter(|_| cards.is_empty())
}

/// As the node's labels or its driver say, else by what an agent there found.
fn cards(node: &Node, scene: &Scene<'_>) -> Vec<(String, Card)> {
    let devices = scene.devices.as_ref().ok();
    let said = devices.and_then(|devices| cards_on(node, scene.deployment.spec.gpu_name(), devices));
    let found = || {
        let name = node.name_any();
        let told = scene.descriptions.values().filter(|told| told.node == name);
        let mut found = told.filter_map(|told| Card::named(&told.description.memory.as_ref()?.device));
        found.next().map(|card| vec![(card.name.to_owned(), card)])
    };
    said.or_else(found).unwrap_or_default()
}
