//! Events: what changed, for `kubectl describe`. One Event for each kind of change in a round; a settled round has none.
//!
//! What to say is pure; publishing is best effort and never fails a round. State belongs in conditions, not here.

use kube::runtime::events::{Event, EventType};
use stoker_crds::{
    conditions::{DEGRADED, READY},
    status::InferenceDeploymentStatus,
};

use crate::apply::Applied;

/// Longest note: the API server refuses more than 1 kB.
const NOTE_CHARS: usize = 900;

/// What a round is worth telling.
pub fn events_of(
    applied: &Applied,
    before: Option<&InferenceDeploymentStatus>,
    after: &InferenceDeploymentStatus,
) -> Vec<Event> {
    let Applied { created, draining, undrained, deleted, refusals: _ } = applied;
    let deleted: Vec<String> = deleted.iter().map(|(pod, why)| format!("{pod} ({})", why.as_str())).collect();
    let pods = [
        ("Created", "CreatePod", created),
        ("Draining", "DrainPod", draining),
        ("TakenBack", "UndrainPod", undrained),
        ("Deleted", "DeletePod", &deleted),
    ];
    let pods = pods.into_iter().filter(|(_, _, names)| !names.is_empty());
    let pods = pods.map(|(reason, action, names)| event(EventType::Normal, reason, action, &names.join(", ")));
    pods.chain(turned(before, after)).collect()
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

fn event(type_: EventType, reason: &str, action: &str, note: &str) -> Event {
    Event {
        type_,
        reason: reason.to_owned(),
        note: Some(note.chars().take(NOTE_CHARS).collect()),
        action: action.to_owned(),
        secondary: None,
    }
}
