//! How far a pod is that fetches a model ahead, or keeps it in memory. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use kube::ResourceExt;

use super::pod::not_fetched;
use crate::{
    desired::labels,
    rollout::prefetch::{PrefetchPod, PrefetchState},
    standby::StandbyPod,
};

/// Reads such a pod; `None`, if it does not say for which node it is.
pub fn observe_prefetch(pod: &Pod) -> Option<PrefetchPod> {
    Some(PrefetchPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        revision: pod.labels().get(labels::REVISION)?.clone(),
        node: pod.annotations().get(labels::PREFETCH_NODE)?.clone(),
        state: pod.status.as_ref().map_or(PrefetchState::Fetching { trouble: None }, state),
        is_leaving: pod.metadata.deletion_timestamp.is_some(),
    })
}

/// Reads a pod that stands by: it is done once it is ready, for as long as it is.
pub fn observe_standby(pod: &Pod) -> Option<StandbyPod> {
    let fetch = observe_prefetch(pod)?;
    let is_ready = |container: &ContainerStatus| container.ready;
    let has_it = pod.status.as_ref().is_some_and(|status| status.container_statuses.iter().flatten().any(is_ready));
    let state = if has_it { PrefetchState::Done } else { fetch.state };
    Some(StandbyPod { fetch: PrefetchPod { state, ..fetch }, created: pod.creation_timestamp()?.0 })
}

fn state(status: &PodStatus) -> PrefetchState {
    let container = status.container_statuses.iter().flatten().next();
    match status.phase.as_deref() {
        Some("Succeeded") => PrefetchState::Done,
        Some("Failed") => {
            let words = [&status.reason, &status.message].into_iter().flatten().cloned().collect::<Vec<_>>().join(": ");
            PrefetchState::Failed { trouble: if words.is_empty() { "its pod failed".to_owned() } else { words } }
        }
        _ => PrefetchState::Fetching { trouble: container.and_then(trouble).or_else(|| unscheduled(status)) },
    }
}

/// What a container met when it ran before, or what keeps it from running.
fn trouble(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref();
    let before = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
    let ended = state.and_then(|state| state.terminated.as_ref()).or(before).filter(|ended| ended.exit_code != 0);
    let waiting = state.and_then(|state| state.waiting.as_ref());
    let waits = waiting.filter(|waiting| !matches!(waiting.reason.as_deref(), None | Some("ContainerCreating")));
    match (ended, waits) {
        (Some(ended), _) => Some(not_fetched(Some(ended)).message),
        (None, Some(waiting)) => waiting.message.clone().or_else(|| waiting.reason.clone()),
        (None, None) => None,
    }
}

fn unscheduled(status: &PodStatus) -> Option<String> {
    let scheduled = status.conditions.iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    scheduled.filter(|scheduled| scheduled.status == "False")?.message.clone()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state_of(status: Value) -> PrefetchState {
        let pod = json!({"metadata": {"name": "chat-0a-prefetch-1", "labels": {"stoker.dev/revision": "0a"},
            "annotations": {"stoker.dev/prefetch-node": "node-0"}}, "status": status});
        let seen = observe_prefetch(&serde_json::from_value(pod).unwrap()).unwrap();
        assert_eq!((seen.revision.as_str(), seen.node.as_str(), seen.is_leaving), ("0a", "node-0", false));
        seen.state
    }

    fn container(state: Value, last: Value) -> Value {
        json!({"phase": "Running", "containerStatuses": [{"name": "fetch", "image": "", "imageID": "", "ready": false,
            "restartCount": 0, "state": state, "lastState": last}]})
    }

    #[test]
    fn a_pod_says_how_far_its_fetch_is_and_what_it_met() {
        let fetching = |trouble: Option<&str>| PrefetchState::Fetching { trouble: trouble.map(str::to_owned) };
        let ended = json!({"terminated": {"exitCode": 1, "message": "fetch hf://a/b\nstoker-agent: 401 from the hub"}});
        let back_off = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}});
        let no_image = json!({"waiting": {"reason": "ErrImagePull", "message": "not found"}});
        let table = [
            (json!({"phase": "Pending"}), fetching(None)),
            (container(json!({"running": {}}), json!({})), fetching(None)),
            (container(json!({"waiting": {"reason": "ContainerCreating"}}), json!({})), fetching(None)),
            (container(back_off, ended.clone()), fetching(Some("401 from the hub"))),
            (container(json!({"running": {}}), ended.clone()), fetching(Some("401 from the hub"))),
            (container(ended, json!({})), fetching(Some("401 from the hub"))),
            (container(no_image, json!({})), fetching(Some("not found"))),
            (
                json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "Too many pods"}]}),
                fetching(Some("Too many pods")),
            ),
            (json!({"phase": "Succeeded"}), PrefetchState::Done),
            (
                json!({"phase": "Failed", "reason": "DeadlineExceeded"}),
                PrefetchState::Failed { trouble: "DeadlineExceeded".to_owned() },
            ),
        ];
        for (status, state) in table {
            assert_eq!(state_of(status.clone()), state, "{status}");
        }
    }

    #[test]
    fn one_that_stands_by_is_done_for_as_long_as_it_is_ready() {
        let seen = |ready: bool, restarts: Value| {
            let pod = json!({"metadata": {"name": "chat-0a-standby-1", "creationTimestamp": "2026-11-26T10:00:00Z",
                "labels": {"stoker.dev/revision": "0a"}, "annotations": {"stoker.dev/prefetch-node": "node-0"}},
                "status": {"phase": "Running", "containerStatuses": [{"name": "fetch", "image": "", "imageID": "",
                    "ready": ready, "restartCount": 0, "state": {"running": {}}, "lastState": restarts}]}});
            observe_standby(&serde_json::from_value(pod).unwrap()).unwrap().fetch.state
        };
        let gone = json!({"terminated": {"exitCode": 1, "message": "stoker-agent: /models/blobs/1 is gone"}});
        assert_eq!(seen(true, json!({})), PrefetchState::Done);
        assert_eq!(seen(false, json!({})), PrefetchState::Fetching { trouble: None });
        let trouble = Some("/models/blobs/1 is gone".to_owned());
        assert_eq!(seen(false, gone), PrefetchState::Fetching { trouble });
    }

    #[test]
    fn a_pod_that_names_no_node_is_nothing_to_go_by() {
        assert_eq!(observe_prefetch(&Pod::default()), None);
    }
}
