//! A pod's status from what its containers do, worded as a kubelet words it. Pure.

use std::net::Ipv4Addr;

use jiff::Timestamp;
use k8s_openapi::{
    api::core::v1::{
        Container, ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStateWaiting,
        ContainerStatus, HostIP, Pod, PodCondition, PodIP, PodStatus,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};

use super::view::{ContainerPhase, ContainerView, Ended};

/// What a status is computed from, beside the pod.
#[derive(Clone, Debug)]
pub(crate) struct PodFacts<'a> {
    pub(crate) host: Ipv4Addr,
    pub(crate) address: Ipv4Addr,
    pub(crate) node: &'a str,
    pub(crate) started_at: Timestamp,
    /// In the order of `spec.initContainers`.
    pub(crate) init_views: &'a [ContainerView],
    /// In the order of `spec.containers`.
    pub(crate) views: &'a [ContainerView],
    pub(crate) now: Timestamp,
}

/// The status to write for `pod`. Conditions that others own (scheduler, readiness gates) are kept.
pub(crate) fn status_of(pod: &Pod, facts: &PodFacts) -> PodStatus {
    let phase = phase(pod, facts);
    let init = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_deref()).unwrap_or_default();
    let main = pod.spec.as_ref().map(|spec| spec.containers.as_slice()).unwrap_or_default();
    let init_statuses = container_statuses(pod, facts, (init, facts.init_views));
    PodStatus {
        conditions: Some(conditions(pod, facts, phase)),
        container_statuses: Some(container_statuses(pod, facts, (main, facts.views))),
        init_container_statuses: Some(init_statuses).filter(|statuses| !statuses.is_empty()),
        host_ip: Some(facts.host.to_string()),
        host_ips: Some(vec![HostIP { ip: facts.host.to_string() }]),
        observed_generation: pod.metadata.generation,
        phase: Some(phase.to_owned()),
        pod_ip: Some(facts.address.to_string()),
        pod_ips: Some(vec![PodIP { ip: facts.address.to_string() }]),
        start_time: Some(Time(facts.started_at)),
        ..Default::default()
    }
}

fn phase(pod: &Pod, facts: &PodFacts) -> &'static str {
    let views = facts.views;
    let never = pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()) == Some("Never");
    let gave_up = |view: &ContainerView| matches!(view.state, ContainerPhase::Terminated(_)) && !view.succeeded();
    if never && facts.init_views.iter().any(gave_up) {
        return "Failed";
    }
    let restarts = pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always") == "Always";
    let ended = |view: &ContainerView| match &view.state {
        ContainerPhase::Terminated(ended) => Some(ended.exit_code),
        ContainerPhase::Waiting { .. } | ContainerPhase::Running { .. } => None,
    };
    let deleting = pod.metadata.deletion_timestamp.is_some();
    match views.iter().map(ended).collect::<Option<Vec<i32>>>() {
        Some(codes) if (!restarts || deleting) && codes.iter().all(|&code| code == 0) => "Succeeded",
        // Who is started again on failure has not failed in between.
        Some(_) if never || deleting => "Failed",
        _ if views.iter().all(ContainerView::has_run) => "Running",
        _ => "Pending",
    }
}

/// Why a condition is false: reason and message.
type Problem = (&'static str, String);

fn conditions(pod: &Pod, facts: &PodFacts, phase: &str) -> Vec<PodCondition> {
    let containers = unready_containers(pod, facts, phase);
    let ready = containers.clone().or_else(|| missing_gate(pod));
    let owned = [
        ("PodReadyToStartContainers", None),
        ("Initialized", uninitialized(pod, facts)),
        ("ContainersReady", containers),
        ("Ready", ready),
    ];
    let is_owned = |condition: &PodCondition| owned.iter().any(|(name, _)| *name == condition.type_);
    let mut conditions: Vec<PodCondition> =
        existing(pod).iter().filter(|condition| !is_owned(condition)).cloned().collect();
    conditions.extend(owned.iter().map(|(name, problem)| condition(pod, name, problem.as_ref(), facts.now)));
    conditions
}

fn uninitialized(pod: &Pod, facts: &PodFacts) -> Option<Problem> {
    let names = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let unfinished = names.zip(facts.init_views).filter(|(_, view)| !view.succeeded());
    let names: Vec<&str> = unfinished.map(|(container, _)| container.name.as_str()).collect();
    let message = || format!("containers with incomplete status: [{}]", names.join(" "));
    (!names.is_empty()).then(|| ("ContainersNotInitialized", message()))
}

fn unready_containers(pod: &Pod, facts: &PodFacts, phase: &str) -> Option<Problem> {
    let names = container_names(pod);
    let unready: Vec<&str> =
        names.iter().zip(facts.views).filter(|(_, view)| !view.ready).map(|(name, _)| *name).collect();
    match phase {
        _ if unready.is_empty() => None,
        "Succeeded" | "Failed" => Some(("PodCompleted", String::new())),
        _ => Some(("ContainersNotReady", format!("containers with unready status: [{}]", unready.join(" ")))),
    }
}

fn missing_gate(pod: &Pod) -> Option<Problem> {
    let gate = readiness_gates(pod).find(|gate| !is_true(pod, gate))?;
    Some(("ReadinessGatesNotReady", format!("the pod's readiness gate \"{gate}\" is not true")))
}

fn condition(pod: &Pod, name: &str, problem: Option<&Problem>, now: Timestamp) -> PodCondition {
    let status = if problem.is_none() { "True" } else { "False" };
    let before = existing(pod).iter().find(|condition| condition.type_ == name && condition.status == status);
    PodCondition {
        type_: name.to_owned(),
        status: status.to_owned(),
        reason: problem.map(|(reason, _)| (*reason).to_owned()),
        message: problem.map(|(_, message)| message.clone()).filter(|message| !message.is_empty()),
        last_transition_time: before.and_then(|condition| condition.last_transition_time.clone()).or(Some(Time(now))),
        observed_generation: pod.metadata.generation,
        ..Default::default()
    }
}

fn existing(pod: &Pod) -> &[PodCondition] {
    pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default()
}

/// Whether `pod` says that it is ready.
pub(crate) fn is_ready(pod: &Pod) -> bool {
    pod.status.as_ref().is_some_and(says_ready)
}

/// Whether `status` says so.
pub(crate) fn says_ready(status: &PodStatus) -> bool {
    status.conditions.iter().flatten().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn is_true(pod: &Pod, condition_type: &str) -> bool {
    existing(pod).iter().any(|condition| condition.type_ == condition_type && condition.status == "True")
}

fn readiness_gates(pod: &Pod) -> impl Iterator<Item = &str> {
    let gates = pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_ref());
    gates.into_iter().flatten().map(|gate| gate.condition_type.as_str())
}

fn container_names(pod: &Pod) -> Vec<&str> {
    pod.spec.iter().flat_map(|spec| &spec.containers).map(|container| container.name.as_str()).collect()
}

fn container_statuses(
    pod: &Pod,
    facts: &PodFacts,
    (containers, views): (&[Container], &[ContainerView]),
) -> Vec<ContainerStatus> {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    containers
        .iter()
        .zip(views)
        .map(|(container, view)| {
            let image = container.image.clone().unwrap_or_default();
            ContainerStatus {
                name: container.name.clone(),
                container_id: view.has_run().then(|| format!("process://{uid}/{}/{}", container.name, view.restarts)),
                image_id: if view.has_run() { format!("process://{}/{image}", facts.node) } else { String::new() },
                image,
                ready: view.ready,
                started: Some(view.started),
                restart_count: view.restarts,
                state: Some(state(&view.state)),
                last_state: Some(
                    view.last
                        .as_ref()
                        .map(|ended| ContainerState { terminated: Some(terminated(ended)), ..Default::default() })
                        .unwrap_or_default(),
                ),
                ..Default::default()
            }
        })
        .collect()
}

fn state(phase: &ContainerPhase) -> ContainerState {
    match phase {
        ContainerPhase::Waiting { reason, message } => {
            let message = Some(message.clone()).filter(|message| !message.is_empty());
            ContainerState {
                waiting: Some(ContainerStateWaiting { reason: Some((*reason).to_owned()), message }),
                ..Default::default()
            }
        }
        ContainerPhase::Running { since } => ContainerState {
            running: Some(ContainerStateRunning { started_at: Some(Time(*since)) }),
            ..Default::default()
        },
        ContainerPhase::Terminated(ended) => {
            ContainerState { terminated: Some(terminated(ended)), ..Default::default() }
        }
    }
}

fn terminated(ended: &Ended) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: ended.exit_code,
        reason: Some(ended.reason.to_owned()),
        message: Some(ended.message.clone()).filter(|message| !message.is_empty()),
        started_at: Some(Time(ended.started_at)),
        finished_at: Some(Time(ended.finished_at)),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(extra: Value) -> Pod {
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "i"}]}});
        for (key, value) in extra.as_object().unwrap() {
            let target = pod.as_object_mut().unwrap().entry(key).or_insert(json!({}));
            target.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        }
        serde_json::from_value(pod).unwrap()
    }

    fn status(pod: &Pod, view: ContainerView) -> PodStatus {
        let second = |second| Timestamp::from_second(second).unwrap();
        let facts = PodFacts {
            host: Ipv4Addr::new(127, 77, 0, 1),
            address: Ipv4Addr::new(127, 77, 0, 2),
            node: "n",
            started_at: second(1),
            init_views: &[],
            views: &[view],
            now: second(9),
        };
        status_of(pod, &facts)
    }

    fn running() -> ContainerView {
        let state = ContainerPhase::Running { since: Timestamp::UNIX_EPOCH };
        ContainerView { state, last: None, restarts: 0, started: true, ready: true }
    }

    fn ended(exit_code: i32) -> Ended {
        Ended {
            exit_code,
            reason: "Error",
            message: "boom".to_owned(),
            started_at: Timestamp::UNIX_EPOCH,
            finished_at: Timestamp::UNIX_EPOCH,
        }
    }

    fn condition_of<'a>(status: &'a PodStatus, name: &str) -> &'a PodCondition {
        status.conditions.as_ref().unwrap().iter().find(|condition| condition.type_ == name).unwrap()
    }

    #[test]
    fn a_pod_whose_container_is_ready_is_ready() {
        let status = status(&pod(json!({})), running());
        assert_eq!(
            (status.phase.as_deref(), condition_of(&status, "Ready").status.as_str()),
            (Some("Running"), "True")
        );
    }

    #[test]
    fn a_pod_waits_for_its_init_containers_and_fails_with_them_if_it_never_restarts() {
        let of = |policy: &str, init: ContainerView| {
            let pod =
                pod(json!({"spec": {"restartPolicy": policy, "initContainers": [{"name": "first", "image": "i"}]}}));
            let facts = PodFacts {
                host: Ipv4Addr::LOCALHOST,
                address: Ipv4Addr::LOCALHOST,
                node: "n",
                started_at: Timestamp::UNIX_EPOCH,
                init_views: &[init],
                views: &[ContainerView::initializing()],
                now: Timestamp::UNIX_EPOCH,
            };
            status_of(&pod, &facts)
        };
        let failed = ContainerView { state: ContainerPhase::Terminated(ended(1)), ready: false, ..running() };
        let waits = of("Always", running());
        assert_eq!(waits.phase.as_deref(), Some("Pending"));
        let initialized = condition_of(&waits, "Initialized");
        assert_eq!(initialized.message.as_deref(), Some("containers with incomplete status: [first]"));
        let init = &waits.init_container_statuses.as_ref().unwrap()[0];
        assert!(init.name == "first" && init.state.as_ref().unwrap().running.is_some());
        assert_eq!(of("Always", failed.clone()).phase.as_deref(), Some("Pending"));
        assert_eq!(of("Never", failed).phase.as_deref(), Some("Failed"));
    }

    #[test]
    fn a_missing_readiness_gate_is_named_and_keeps_only_the_pod_unready() {
        let status = status(&pod(json!({"spec": {"readinessGates": [{"conditionType": "x.dev/ok"}]}})), running());
        assert_eq!(condition_of(&status, "ContainersReady").status, "True");
        let ready = condition_of(&status, "Ready");
        assert_eq!((ready.status.as_str(), ready.reason.as_deref()), ("False", Some("ReadinessGatesNotReady")));
    }

    #[test]
    fn conditions_of_others_and_old_transition_times_stay() {
        let before = json!({"status": {"conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:05Z"}]}});
        let status = status(&pod(before), running());
        assert_eq!(condition_of(&status, "PodScheduled").status, "True");
        let ready = condition_of(&status, "Ready");
        assert_eq!(ready.last_transition_time.as_ref().unwrap().0.as_second(), 5);
    }

    #[test]
    fn a_crash_loop_is_running_and_shows_how_it_ended_last() {
        let state = ContainerPhase::Waiting { reason: "CrashLoopBackOff", message: "back-off 10s".to_owned() };
        let view = ContainerView { state, last: Some(ended(3)), restarts: 2, started: false, ready: false };
        let status = status(&pod(json!({})), view);
        let container = &status.container_statuses.as_ref().unwrap()[0];
        assert_eq!(status.phase.as_deref(), Some("Running"));
        assert_eq!(
            container.state.as_ref().unwrap().waiting.as_ref().unwrap().reason.as_deref(),
            Some("CrashLoopBackOff")
        );
        let last = container.last_state.as_ref().unwrap().terminated.as_ref().unwrap();
        assert_eq!((last.exit_code, last.message.as_deref()), (3, Some("boom")));
    }

    #[test]
    fn a_pod_that_never_restarts_ends_as_its_exit_code_says() {
        let view = |code| ContainerView { state: ContainerPhase::Terminated(ended(code)), ready: false, ..running() };
        let never = pod(json!({"spec": {"restartPolicy": "Never"}}));
        assert_eq!(status(&never, view(0)).phase.as_deref(), Some("Succeeded"));
        assert_eq!(status(&never, view(1)).phase.as_deref(), Some("Failed"));
        assert_eq!(status(&pod(json!({})), view(1)).phase.as_deref(), Some("Running"));
        let on_failure = pod(json!({"spec": {"restartPolicy": "OnFailure"}}));
        assert_eq!(
            [0, 1].map(|code| status(&on_failure, view(code)).phase),
            ["Succeeded", "Running"].map(|phase| Some(phase.to_owned()))
        );
    }
}
