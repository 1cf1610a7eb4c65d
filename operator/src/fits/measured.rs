//! What a replica that serves took, beside what was planned for the place where it is. Pure.

use std::collections::BTreeMap;

use stoker_crds::{
    description::MemoryReport,
    status::{FitStatus, ReplicaMemory},
};
use stoker_fit::plan::{Asked, Fit, Model, Place, gib, plan};

use super::{Scene, before, candidates::card, of_revision};
use crate::watched::Seen;

/// The numbers of a status.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Numbers {
    pub(super) place: String,
    pub(super) planned: Option<ReplicaMemory>,
    pub(super) measured: Option<ReplicaMemory>,
    pub(super) memory_error_percent: Option<f64>,
    pub(super) kv_error_percent: Option<f64>,
}

impl Numbers {
    /// Before anything was measured.
    pub(super) fn planned(planned: Option<(String, Fit)>) -> Self {
        let Some((place, fit)) = planned else { return Self::default() };
        Self { place, planned: Some(of_plan(&fit)), ..Self::default() }
    }
}

/// Of a replica that serves; while none does, what was measured of this revision stands.
pub(super) fn numbers(scene: &Scene<'_>, model: &Model, asked: &Asked) -> Option<Numbers> {
    let mut serving = of_revision(scene).filter(|(replica, _)| replica.serves());
    let found = serving.find_map(|(_, told)| Some((told.node.as_str(), told.description.memory.as_ref()?)));
    match found {
        Some((node, memory)) => Some(compared(scene, model, asked, (node, memory))),
        None => kept(scene),
    }
}

fn kept(scene: &Scene<'_>) -> Option<Numbers> {
    let same = scene.deployment.status.as_ref().is_some_and(|status| status.revision == scene.revision);
    let before = before(scene).filter(|before| same && before.measured.is_some())?;
    let FitStatus { source: _, config: _, place, planned, measured, memory_error_percent, kv_error_percent } =
        before.clone();
    Some(Numbers { place, planned, measured, memory_error_percent, kv_error_percent })
}

fn compared(scene: &Scene<'_>, model: &Model, asked: &Asked, (node, memory): (&str, &MemoryReport)) -> Numbers {
    let (label, place) = place(scene, node, memory);
    let planned = place.and_then(|place| plan(model, asked, place).ok()).map(|fit| of_plan(&fit));
    let measured = ReplicaMemory {
        weights_bytes: whole(memory.weights_bytes),
        weights_by_format: memory
            .weights_by_format
            .iter()
            .map(|(format, bytes)| (format.clone(), whole(*bytes)))
            .collect(),
        workspace_bytes: whole(memory.workspace_bytes),
        kv_tokens: whole(memory.kv_tokens),
        kv_bytes_per_token: whole(memory.kv_bytes_per_token),
    };
    let taken = |memory: &ReplicaMemory| memory.weights_bytes + memory.workspace_bytes;
    let error =
        |of: &dyn Fn(&ReplicaMemory) -> i64| planned.as_ref().and_then(|planned| percent(of(planned), of(&measured)));
    Numbers {
        place: label,
        memory_error_percent: error(&taken),
        kv_error_percent: error(&|memory| memory.kv_tokens),
        planned,
        measured: Some(measured),
    }
}

/// Where it is; nothing to plan for where the kind of its GPUs is not known. What a process on CPUs may take it says itself.
fn place(scene: &Scene<'_>, node: &str, memory: &MemoryReport) -> (String, Option<Place>) {
    let gpus = scene.deployment.spec.gpus();
    if gpus == 0 {
        let limit_bytes = memory.limit_bytes;
        return (format!("CPUs with {}", gib(limit_bytes)), Some(Place::Host { limit_bytes }));
    }
    let Seen::All(nodes) = scene.nodes else { return (memory.device.clone(), None) };
    let found = nodes.iter().find(|found| found.metadata.name.as_deref() == Some(node));
    match found.and_then(|node| card(node, scene)) {
        Some((product, card)) => (format!("{gpus} x {product} of {}", gib(card.total_bytes())), Some(Place::Gpu(card))),
        None => (memory.device.clone(), None),
    }
}

fn of_plan(fit: &Fit) -> ReplicaMemory {
    ReplicaMemory {
        weights_bytes: whole(fit.memory.weights_bytes),
        weights_by_format: BTreeMap::new(),
        workspace_bytes: whole(fit.memory.workspace_bytes),
        kv_tokens: whole(fit.memory.kv_tokens()),
        kv_bytes_per_token: whole(fit.memory.kv_bytes_per_token),
    }
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// How much more than what was found, to a hundredth of a percent.
fn percent(planned: i64, found: i64) -> Option<f64> {
    let share = (planned - found) as f64 / (found > 0).then_some(found as f64)?;
    Some((share * 10_000.0).round() / 100.0)
}
