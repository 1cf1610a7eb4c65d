//! Events: what changed, for `kubectl describe`. A bounded number in a round; a settled round has none.
//!
//! What to say is pure; publishing is best effort and never fails a round. State belongs in conditions, not here.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType};
use stoker_crds::{
    conditions::{DEGRADED, READY},
    scaling::ScalingMode,
    scaling_status::DecisionStatus,
    status::{CanaryPhase, InferenceDeploymentStatus},
};

use crate::{apply::Applied, rollout::Why};

/// Longest note: the API server refuses more than 1 kB.
const NOTE_CHARS: usize = 900;
/// Pods told of in one round at most, of each kind of change.
const PODS_TOLD: usize = 10;

/// What a round is worth telling about a deployment of `namespace`.
pub fn events_of(
    namespace: &str,
    applied: &Applied,
    before: Option<&InferenceDeploymentStatus>,
    after: &InferenceDeploymentStatus,
) -> Vec<Event> {
    let Applied {
        created,
        draining,
        undrained,
        deleted,
        prefetching,
        standing_by,
        prefetch_refused: _,
        standby_refused: _,
        strays: _,
        refusals: _,
    } = applied;
    let of_pods = |reason: &'static str, action: &'static str, pods: &[String]| -> Vec<Event> {
        pods.iter().take(PODS_TOLD).map(|pod| pod_event(namespace, pod, Change { reason, action, why: None })).collect()
    };
    let deleted = deleted.iter().take(PODS_TOLD).map(|(pod, why)| {
        pod_event(namespace, pod, Change { reason: "Deleted", action: "DeletePod", why: Some(*why) })
    });
    let pods = [
        of_pods("Created", "CreatePod", created),
        of_pods("Draining", "DrainPod", draining),
        of_pods("TakenBack", "UndrainPod", undrained),
        of_pods("Prefetching", "CreatePod", prefetching),
        of_pods("StandingBy", "CreatePod", standing_by),
        deleted.collect(),
    ];
    let conditions = turned(before, after);
    pods.into_iter().flatten().chain(conditions).chain(tried(before, after)).chain(scaled(before, after)).collect()
}

/// Said where a condition would stand if the status could be written.
pub fn old_crd() -> Event {
    let note = "The installed CRD is older than the operator, so the status cannot be written and the number of replicas stays: apply \
                the CRD of this release, charts/stoker/crds/inferencedeployments.yaml (Helm does not upgrade CRDs).";
    Event {
        type_: EventType::Warning,
        reason: "CrdTooOld".to_owned(),
        note: Some(note.to_owned()),
        action: "WriteStatus".to_owned(),
        secondary: None,
    }
}

/// What was done to a pod.
struct Change {
    reason: &'static str,
    action: &'static str,
    why: Option<Why>,
}

/// An Event about the deployment that names the pod as related, so that repetitions are counted by pod.
fn pod_event(namespace: &str, pod: &str, change: Change) -> Event {
    let note = change.why.map_or_else(|| format!("pod {pod}"), |why| format!("pod {pod} ({})", why.as_str()));
    let related = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.to_owned()),
        namespace: Some(namespace.to_owned()),
        ..ObjectReference::default()
    };
    Event { secondary: Some(related), ..event(EventType::Normal, change.reason, change.action, &note) }
}

/// Conditions that turned: the deployment became ready, or something blocks it.
fn turned(
    before: Option<&InferenceDeploymentStatus>,
    after: &InferenceDeploymentStatus,
) -> impl Iterator<Item = Event> {
    let cases = [(READY, EventType::Normal, "BecomeReady"), (DEGRADED, EventType::Warning, "Degrade")];
    cases.into_iter().filter_map(move |(type_, event_type, action)| {
        let now = after.conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True")?;
        let was = before.iter().flat_map(|status| &status.conditions).find(|condition| condition.type_ == type_);
        let same = was.is_some_and(|was| was.status == now.status && was.reason == now.reason);
        (!same).then(|| event(event_type, &now.reason, action, &now.message))
    })
}

/// A canary begins to be compared, or passed. One that failed is told of by its condition.
fn tried(before: Option<&InferenceDeploymentStatus>, after: &InferenceDeploymentStatus) -> Option<Event> {
    let canary = after.rollout.as_ref()?.canary.as_ref()?;
    let was = before.and_then(|status| status.rollout.as_ref()).and_then(|rollout| rollout.canary.as_ref());
    let is_same = was.is_some_and(|was| (&was.revision, was.phase) == (&canary.revision, canary.phase));
    let (reason, action) = match canary.phase {
        _ if is_same => return None,
        CanaryPhase::Analysing => ("CanaryServes", "Analyse"),
        CanaryPhase::Passed => ("CanaryPassed", "GoOn"),
        CanaryPhase::Starting | CanaryPhase::Failed => return None,
    };
    Some(event(EventType::Normal, reason, action, &format!("revision {}: {}", canary.revision, canary.message)))
}

/// A decision that changed the number, acted on or only advised.
fn scaled(before: Option<&InferenceDeploymentStatus>, after: &InferenceDeploymentStatus) -> Option<Event> {
    let scaling = after.scaling.as_ref()?;
    let newest = scaling.decisions.last()?;
    let told = before.and_then(|status| status.scaling.as_ref()).and_then(|before| before.decisions.last());
    if told == Some(newest) {
        return None;
    }
    let DecisionStatus { from, to, pressure_percent, cause, bound, coverage, .. } = newest;
    let note = format!(
        "{from} -> {to} replicas: pressure {pressure_percent} % from {cause}, bound by {bound}, {coverage} replicas fresh"
    );
    let (reason, action) = match scaling.mode {
        ScalingMode::Native => ("Scaled", "Scale"),
        ScalingMode::Advisory | ScalingMode::External => ("ScalingAdvised", "Advise"),
    };
    Some(event(EventType::Normal, reason, action, &note))
}

fn event(type_: EventType, reason: &str, action: &str, note: &str) -> Event {
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note.chars().take(NOTE_CHARS).collect()),
        action: action.to_owned(),
        secondary: None,
    }
}
