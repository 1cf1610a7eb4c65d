//! Claims, from deployments and their pods; budgets, from their objects. Pure.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use stoker_crds::{
    InferenceBudget, InferenceDeployment,
    conditions::{READY, REASON_REFUSED},
    scaling::ScalingMode,
};
use stoker_replica::{Reading, Replica, Stage};

use super::grants::{Budget, Claim};
use crate::{
    observe::observe_replica,
    validate::{progress_deadline, replicas_wanted},
};

/// The budget of an object.
pub fn budget_of(object: &InferenceBudget) -> Budget {
    let borrowing = object.spec.borrowing.as_ref();
    Budget {
        namespace: object.namespace().unwrap_or_default(),
        gpus: object.spec.gpus.into(),
        priority: object.spec.priority.unwrap_or_default(),
        borrows: borrowing.map_or(0, |borrowing| borrowing.max_gpus.map_or(u64::MAX, u64::from)),
    }
}

/// What a deployment claims, by its pods and by what it was granted before, if anything was.
pub(super) fn claim<'a>(
    deployment: &InferenceDeployment,
    pods: impl Iterator<Item = &'a Pod>,
    before: Option<u32>,
    now: Timestamp,
) -> Claim {
    let wanted = if deployment.metadata.deletion_timestamp.is_some() { 0 } else { replicas_wanted(deployment) };
    let deadline = progress_deadline(deployment.spec.rollout.as_ref());
    let replicas: Vec<Replica> = pods.map(|pod| observe_replica(pod, Reading::default())).collect();
    let count = |is: &dyn Fn(&Replica) -> bool| replicas.iter().filter(|replica| is(replica)).count() as u32;
    let running = count(&holds);
    let missing = wanted.saturating_sub(running);
    // Surplus pods of a rollout wait for the room of those that they replace: nobody is missing for that.
    let without_room = missing.min(count(&|replica| is_stuck(replica, deadline, now)));
    // What the API server refuses, as for a quota, has no pod to wait with.
    let stuck = if is_refused(deployment) { missing } else { without_room };
    let scaling = deployment.spec.scaling.as_ref();
    Claim {
        namespace: deployment.namespace().unwrap_or_default(),
        name: deployment.name_any(),
        gpus: deployment.spec.gpus().into(),
        min: scaling.filter(|scaling| scaling.mode == ScalingMode::Native).map_or(wanted, |scaling| scaling.min),
        wanted,
        held: before.unwrap_or(running),
        stuck,
    }
}

/// Whether a pod has GPUs that it will not have for long: who waits for room may get these.
pub(super) fn leaves(pod: &Pod) -> bool {
    let replica = observe_replica(pod, Reading::default());
    let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    has_node
        && !replica.pod.lost
        && (replica.pod.stage == Stage::Leaving || (replica.is_live() && replica.drain_since().is_some()))
}

fn holds(replica: &Replica) -> bool {
    let waits = matches!(replica.pod.stage, Stage::Unscheduled { .. });
    replica.is_live() && replica.drain_since().is_none() && !waits
}

/// A pod whose scheduling somebody gates waits for that, and is not stuck.
fn is_stuck(replica: &Replica, deadline: SignedDuration, now: Timestamp) -> bool {
    let Stage::Unscheduled { trouble, since } = &replica.pod.stage else { return false };
    trouble.reason == "Unschedulable" && replica.drain_since().is_none() && now.duration_since(*since) >= deadline
}

fn is_refused(deployment: &InferenceDeployment) -> bool {
    let mut conditions = deployment.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| condition.type_ == READY && condition.reason == REASON_REFUSED)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NOW: &str = "2026-11-26T10:20:00Z";

    fn deployment(more: Value, status: Value) -> InferenceDeployment {
        let mut spec = json!({"model": {"source": "builtin://ember"}, "resources": {"gpus": 2}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
            "metadata": {"name": "chat", "namespace": "a"}, "status": status}))
        .unwrap()
    }

    /// A pod that waits with this reason since ten, or one that has a node.
    fn pod(waits: Option<&str>, more: Value) -> Pod {
        let mut metadata = json!({"name": "chat-0a-0", "creationTimestamp": "2026-11-26T10:00:00Z"});
        metadata.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let scheduled = json!({"type": "PodScheduled", "status": if waits.is_some() { "False" } else { "True" }, "reason": waits,
            "lastTransitionTime": "2026-11-26T10:00:00Z"});
        let node = waits.is_none().then_some("n");
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": [], "nodeName": node},
            "status": {"phase": "Pending", "conditions": [scheduled]}}))
        .unwrap()
    }

    fn claimed(deployment: &InferenceDeployment, pods: &[Pod], before: Option<u32>) -> Claim {
        claim(deployment, pods.iter(), before, NOW.parse().unwrap())
    }

    #[test]
    fn what_is_wanted_is_what_is_asked_for_or_what_scaling_decided() {
        let fixed = claimed(&deployment(json!({"replicas": 3}), Value::Null), &[], None);
        assert_eq!((fixed.gpus, fixed.wanted, fixed.min, fixed.held), (2, 3, 3, 0));
        let status = json!({"scaling": {"mode": "native", "desired": 5}});
        let scaled = claimed(&deployment(json!({"scaling": {"min": 2, "max": 8}}), status), &[], Some(3));
        assert_eq!((scaled.wanted, scaled.min, scaled.held), (5, 2, 3));
    }

    #[test]
    fn what_found_no_room_for_long_enough_is_stuck_and_what_is_gated_is_not() {
        let asked = |seconds: u32| {
            deployment(json!({"replicas": 3, "rollout": {"progressDeadlineSeconds": seconds}}), Value::Null)
        };
        let pods =
            [pod(None, json!({})), pod(Some("Unschedulable"), json!({})), pod(Some("SchedulingGated"), json!({}))];
        let soon = claimed(&asked(3600), &pods, None);
        assert_eq!((soon.held, soon.stuck, soon.kept()), (1, 0, 1), "where nothing was granted, what runs is held");
        let late = claimed(&asked(600), &pods, Some(3));
        assert_eq!((late.held, late.stuck, late.kept()), (3, 1, 2));
        let rolling = claimed(&deployment(json!({"replicas": 1}), Value::Null), &pods[..2], Some(1));
        assert_eq!(
            (rolling.stuck, rolling.kept()),
            (0, 1),
            "a surplus pod that waits takes nothing from those that serve"
        );
        let refused = json!({"conditions": [{"type": "Ready", "status": "False", "reason": "ChildRefused", "message": "exceeded quota",
            "lastTransitionTime": NOW}]});
        let refused = claimed(&deployment(json!({"replicas": 3}), refused), &pods[..1], Some(3));
        assert_eq!((refused.stuck, refused.kept()), (2, 1), "a quota lets no pod wait");
    }

    #[test]
    fn who_leaves_still_has_gpus() {
        let gone = json!({"deletionTimestamp": NOW});
        assert!(!leaves(&pod(None, json!({}))) && leaves(&pod(None, gone.clone())));
        assert!(!leaves(&pod(Some("Unschedulable"), gone)), "it never had any");
    }
}
