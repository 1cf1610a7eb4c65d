//! One replica from its pod and its reading: what kubelet and scheduler wrote becomes one [`Stage`]. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod, PodCondition, PodSpec, PodStatus};
use kube::ResourceExt;
use stoker_crds::conditions;
use stoker_replica::{Intent, Needs, ObservedPod, Reading, Replica, Stage, Trouble};

use crate::{
    desired::{AGENT_CONTAINER, FETCH_CONTAINER, claims, labels},
    release,
};

/// How an agent's last sentence begins.
const AGENT_SAYS: &str = "stoker-agent: ";

/// Reads one pod and joins what is known of its agent.
pub fn observe_replica(pod: &Pod, reading: Reading) -> Replica {
    let observed = ObservedPod {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        revision: pod.labels().get(labels::REVISION).cloned().unwrap_or_default(),
        ordinal: ordinal(&pod.name_any()),
        resource_version: pod.resource_version().unwrap_or_default(),
        created: created(pod),
        stage: stage(pod),
        lost: is_lost(pod),
        gone_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        needs: pod.spec.as_ref().map(needs).unwrap_or_default(),
    };
    Replica { pod: observed, reading, intent: intent_of(pod) }
}

/// The intent that a pod carries.
pub fn intent_of(pod: &Pod) -> Option<Intent> {
    Intent::parse(pod.annotations().get(labels::INTENT)?)
}

fn ordinal(name: &str) -> u32 {
    name.rsplit('-').next().and_then(|digits| digits.parse().ok()).unwrap_or(u32::MAX)
}

fn created(pod: &Pod) -> Timestamp {
    pod.metadata.creation_timestamp.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0)
}

/// True when the pod is deleted because its node does not answer: its kubelet cannot say when it is gone.
fn is_lost(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let target = conditions.into_iter().find(|condition| condition.type_ == "DisruptionTarget");
    target.is_some_and(|target| target.status == "True" && target.reason.as_deref() == Some("DeletionByTaintManager"))
}

fn needs(spec: &PodSpec) -> Needs {
    let requests = spec.containers.iter().filter_map(|container| container.resources.as_ref()?.requests.clone());
    let requests = requests.flatten().map(|(name, quantity)| (name, quantity.0));
    let requests = requests.chain(claims::quantities_of_pod(spec));
    Needs { requests: requests.collect(), node_selector: spec.node_selector.clone().unwrap_or_default() }
}

/// Before that no scheduler looks at it, and nothing is said on the pod itself.
fn lacks_claim(pod: &Pod, status: &PodStatus) -> bool {
    let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    claims.is_some_and(|claims| !claims.is_empty()) && status.resource_claim_statuses.iter().flatten().next().is_none()
}

/// How far the pod is.
fn stage(pod: &Pod) -> Stage {
    if pod.metadata.deletion_timestamp.is_some() {
        return Stage::Leaving;
    }
    let status = pod.status.clone().unwrap_or_default();
    if let Some("Failed" | "Succeeded") = status.phase.as_deref() {
        return finished(pod, &status);
    }
    let condition = |type_: &str| status.conditions.iter().flatten().find(|condition| condition.type_ == type_);
    if let Some(scheduled) = condition("PodScheduled").filter(|scheduled| scheduled.status == "False") {
        return Stage::Unscheduled { since: since(scheduled), trouble: unscheduled(pod, scheduled) };
    }
    let scheduled = condition("PodScheduled").map_or_else(|| created(pod), since);
    let Some(container) = agent(&status) else {
        let why = if lacks_claim(pod, &status) {
            "Kubernetes made no ResourceClaim for it yet; the pod's Events say why, such as a ResourceQuota of devices"
        } else {
            "no kubelet has begun with it"
        };
        let trouble = Trouble::new("PodPending", why);
        return Stage::Preparing { trouble, since: scheduled };
    };
    if let Some(stage) = fetching(&status) {
        return stage;
    }
    if let Some(reason) = preparing(container) {
        let sandbox = condition("PodReadyToStartContainers").is_some_and(|sandbox| sandbox.status == "True");
        let waits_for = if sandbox { "its image or its container" } else { "its volumes or its network" };
        return Stage::Preparing {
            trouble: Trouble::new(reason, format!("{waits_for} is not ready")),
            since: scheduled,
        };
    }
    container_stage(container, condition("Ready"))
}

/// The scheduler's words; of a pod that somebody keeps from it also by which gates.
fn unscheduled(pod: &Pod, scheduled: &PodCondition) -> Trouble {
    let gates = pod.spec.iter().flat_map(|spec| spec.scheduling_gates.iter().flatten());
    let gates: Vec<&str> = gates.map(|gate| gate.name.as_str()).collect();
    let Trouble { reason, message } = trouble_of(scheduled);
    let message = match gates.is_empty() {
        true => message,
        false => format!(
            "{message}: who set the gate {} lets it go, for example Kueue when its queue has room",
            gates.join(", ")
        ),
    };
    Trouble { reason, message }
}

/// Where the pod is while its model is fetched; `None` before and after. How long that takes is the model's and the
/// network's matter, so it is no waiting that becomes overdue.
fn fetching(status: &PodStatus) -> Option<Stage> {
    let fetch = fetcher(status)?;
    let state = fetch.state.clone().unwrap_or_default();
    let before = fetch.last_state.as_ref().and_then(|last| last.terminated.as_ref());
    let failed = |ended: Option<&ContainerStateTerminated>| Some(Stage::Blocked(not_fetched(ended)));
    match (state.waiting, state.terminated, before) {
        (_, Some(ended), _) if ended.exit_code != 0 => failed(Some(&ended)),
        (Some(waiting), _, before) => match waiting.reason.as_deref() {
            Some("CrashLoopBackOff") => failed(before),
            None | Some("ContainerCreating" | "PodInitializing") => None,
            Some(reason) => Some(Stage::Blocked(Trouble::new(reason, waiting.message.unwrap_or_default()))),
        },
        // Between two tries it runs for a moment: still the same trouble.
        (None, None, Some(before)) if before.exit_code != 0 && state.running.is_some() => failed(Some(before)),
        (None, None, _) => state.running.map(|_| Stage::Starting),
        (None, Some(_), _) => None,
    }
}

/// The fetcher's last words say what to change.
pub(super) fn not_fetched(ended: Option<&ContainerStateTerminated>) -> Trouble {
    let message = ended.and_then(|ended| ended.message.as_deref()).unwrap_or_default().trim();
    if let Some(trouble) = release::of_ended(message) {
        return trouble;
    }
    let last = message.lines().last().map(|line| line.trim_start_matches("stoker-agent: "));
    let code = ended.map_or(0, |ended| ended.exit_code);
    let silent = format!("the fetcher ended with exit code {code} and said nothing");
    Trouble::new(conditions::REASON_MODEL_FETCH_FAILED, last.map_or(silent, str::to_owned))
}

/// The container that fetches the model, where there is one.
pub(crate) fn fetcher(status: &PodStatus) -> Option<&ContainerStatus> {
    status.init_container_statuses.iter().flatten().find(|container| container.name == FETCH_CONTAINER)
}

/// The kubelet's word for a container that it has not begun to start.
fn preparing(container: &ContainerStatus) -> Option<&str> {
    let waiting = container.state.as_ref().and_then(|state| state.waiting.as_ref());
    match waiting.map(|waiting| waiting.reason.as_deref()) {
        Some(None) => Some("ContainerCreating"),
        Some(Some(reason @ ("ContainerCreating" | "PodInitializing"))) => Some(reason),
        _ => None,
    }
}

fn finished(pod: &Pod, status: &PodStatus) -> Stage {
    let reason = status.reason.clone().unwrap_or_else(|| "PodFinished".to_owned());
    let ended = agent(status).and_then(|container| container.state.as_ref()?.terminated.as_ref()?.finished_at.as_ref());
    let since = ended.or(status.start_time.as_ref()).map_or_else(|| created(pod), |time| time.0);
    Stage::Finished { trouble: Trouble::new(reason, status.message.clone().unwrap_or_default()), since }
}

/// The container with the agent; others were put beside it.
pub(crate) fn agent(status: &PodStatus) -> Option<&ContainerStatus> {
    status.container_statuses.iter().flatten().find(|container| container.name == AGENT_CONTAINER)
}

fn container_stage(container: &ContainerStatus, ready: Option<&PodCondition>) -> Stage {
    let state = container.state.clone().unwrap_or_default();
    let ended_before = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
    if let Some(waiting) = state.waiting {
        return match waiting.reason.as_deref() {
            Some("CrashLoopBackOff") => Stage::Blocked(crashed(container, ended_before)),
            reason => Stage::Blocked(Trouble::new(reason.unwrap_or_default(), waiting.message.unwrap_or_default())),
        };
    }
    if let Some(terminated) = &state.terminated {
        return Stage::Blocked(crashed(container, Some(terminated)));
    }
    let started_at = state.running.and_then(|running| running.started_at).map_or(Timestamp::UNIX_EPOCH, |time| time.0);
    match ready {
        Some(ready) if ready.status == "True" => Stage::Serving,
        // Ready turned false after this container started: it was true in between.
        Some(ready) if container.started == Some(true) && since(ready) > started_at => {
            Stage::Faltering { since: since(ready), trouble: trouble_of(ready) }
        }
        // Between two crashes the container runs for a moment: still the same trouble.
        _ if container.restart_count > 0 && ended_before.is_some() => Stage::Blocked(crashed(container, ended_before)),
        _ => Stage::Starting,
    }
}

/// The trouble of a container that ended, with its exit code and last words.
fn crashed(container: &ContainerStatus, ended: Option<&ContainerStateTerminated>) -> Trouble {
    let restarts = container.restart_count;
    let last_words = last_words(ended.and_then(|ended| ended.message.as_deref()).unwrap_or_default());
    if let Some(trouble) = release::of_ended(last_words) {
        return trouble;
    }
    let message = match ended {
        None => format!("the agent ended, {restarts} restarts"),
        Some(ended) => format!("the agent ended with {}, {restarts} restarts: {last_words}", exit_code(ended)),
    };
    Trouble::new(release::CRASHES, message.trim_end_matches([':', ' ']))
}

/// With what a container ended: the number, and what it stands for.
pub(crate) fn exit_code(ended: &ContainerStateTerminated) -> String {
    let reason = ended.reason.as_deref().filter(|reason| *reason != "Error");
    // Of one that a signal ended the kubelet says 128 and the signal.
    let meaning = reason.or(match ended.exit_code {
        134 => Some("SIGABRT"),
        137 => Some("SIGKILL, often out of memory"),
        139 => Some("SIGSEGV"),
        143 => Some("SIGTERM"),
        _ => None,
    });
    meaning.map_or_else(
        || format!("exit code {}", ended.exit_code),
        |meaning| format!("exit code {} ({meaning})", ended.exit_code),
    )
}

/// Why it ended, of the end of its log: the sentence that an agent says last, or all of what others say.
pub(crate) fn last_words(message: &str) -> &str {
    let sentence = message.rfind(AGENT_SAYS).map(|at| &message[at + AGENT_SAYS.len()..]);
    sentence.unwrap_or(message).trim()
}

fn trouble_of(condition: &PodCondition) -> Trouble {
    let reason = condition.reason.clone().filter(|reason| !reason.is_empty());
    Trouble::new(
        reason.unwrap_or_else(|| format!("Not{}", condition.type_)),
        condition.message.clone().unwrap_or_default(),
    )
}

fn since(condition: &PodCondition) -> Timestamp {
    condition.last_transition_time.as_ref().map_or(Timestamp::UNIX_EPOCH, |time| time.0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn stage_of(status: Value) -> Stage {
        stage(&serde_json::from_value(json!({"metadata": {"name": "chat-0a-1"}, "status": status})).unwrap())
    }

    fn container(state: Value, more: Value) -> Value {
        let mut status =
            json!({"name": "agent", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
        status.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"phase": "Running", "containerStatuses": [status], "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "containers with unready status: [agent]",
             "lastTransitionTime": "2026-11-21T10:00:00Z"}]})
    }

    #[test]
    fn a_model_that_is_fetched_is_on_its_way_and_one_that_does_not_come_says_why() {
        let stage = |state: Value, more: Value| {
            let mut fetch =
                json!({"name": "fetch", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state});
            fetch.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let mut status = container(json!({"waiting": {"reason": "PodInitializing"}}), json!({}));
            status["initContainerStatuses"] = json!([fetch]);
            stage_of(status)
        };
        let failed = |message: &str| Stage::Blocked(Trouble::new("ModelFetchFailed", message));
        let ended = json!({"exitCode": 1, "message": "1 of 2 GB\nstoker-agent: fetch hf://a/b: 401 from hub\n"});
        let said = failed("fetch hf://a/b: 401 from hub");
        assert_eq!(stage(json!({"running": {}}), json!({})), Stage::Starting);
        assert_eq!(stage(json!({"terminated": ended}), json!({})), said);
        let before = json!({"lastState": {"terminated": ended}});
        assert_eq!(stage(json!({"waiting": {"reason": "CrashLoopBackOff"}}), before.clone()), said);
        assert_eq!(stage(json!({"running": {}}), before), said, "between two tries");
        let secret =
            json!({"waiting": {"reason": "CreateContainerConfigError", "message": "secret \"hub\" not found"}});
        let trouble = Trouble::new("CreateContainerConfigError", "secret \"hub\" not found");
        assert_eq!(stage(secret, json!({})), Stage::Blocked(trouble));
        let fetched = stage(json!({"terminated": {"exitCode": 0}}), json!({}));
        assert!(matches!(fetched, Stage::Preparing { .. }), "{fetched:?}");
    }

    #[test]
    fn the_schedulers_words_are_kept() {
        let stage = stage_of(json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "0/1 nodes are available: 1 Insufficient cpu.",
            "lastTransitionTime": "2026-11-21T10:00:00Z"}]}));
        let trouble = Trouble::new("Unschedulable", "0/1 nodes are available: 1 Insufficient cpu.");
        assert_eq!(stage, Stage::Unscheduled { trouble, since: "2026-11-21T10:00:00Z".parse().unwrap() });
    }

    fn claiming(template: &str, status: Value) -> Pod {
        let claims = json!([{"name": "gpus", "resourceClaimTemplateName": template}]);
        let resources = json!({"requests": {"cpu": "4"}});
        let spec = json!({"containers": [{"name": "agent", "resources": resources}], "resourceClaims": claims});
        serde_json::from_value(json!({"metadata": {"name": "chat-1"}, "spec": spec, "status": status})).unwrap()
    }

    #[test]
    fn a_pod_needs_the_devices_that_its_claim_is_named_after() {
        let needs =
            |template| needs(&claiming(template, json!({})).spec.unwrap()).requests.into_iter().collect::<Vec<_>>();
        let [cpu, device] = [("cpu", "4"), ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", "2")]
            .map(|(name, amount)| (name.to_owned(), amount.to_owned()));
        assert_eq!(needs("chat.2.gpu.nvidia.com"), [cpu.clone(), device]);
        assert_eq!(needs("somebody-s"), [cpu]);
    }

    #[test]
    fn a_pod_whose_claim_was_not_made_says_so() {
        let message = |status| match stage(&claiming("chat.1.gpu", status)) {
            Stage::Preparing { trouble, .. } => trouble.message,
            other => panic!("{other:?}"),
        };
        let made = json!([{"name": "gpus", "resourceClaimName": "chat-1-gpus-x"}]);
        assert!(message(json!({"phase": "Pending"})).starts_with("Kubernetes made no ResourceClaim for it yet"));
        let scheduled = json!([{"type": "PodScheduled", "status": "True"}]);
        let on_its_way = json!({"phase": "Pending", "resourceClaimStatuses": made, "conditions": scheduled});
        assert_eq!(message(on_its_way), "no kubelet has begun with it");
    }

    #[test]
    fn a_gate_that_somebody_set_is_named() {
        let pod = json!({"metadata": {"name": "chat-1"}, "spec": {"containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]},
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
                "message": "Scheduling is blocked due to non-empty scheduling gates"}]}});
        let Stage::Unscheduled { trouble, .. } = stage(&serde_json::from_value(pod).unwrap()) else {
            panic!("not waiting")
        };
        assert_eq!(trouble.reason, "SchedulingGated");
        assert!(
            trouble.message.contains("gates: who set the gate kueue.x-k8s.io/admission lets it go"),
            "{}",
            trouble.message
        );
    }

    #[test]
    fn an_image_that_cannot_be_pulled_blocks() {
        let waiting = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image \"nope\""}});
        let trouble = Trouble::new("ImagePullBackOff", "Back-off pulling image \"nope\"");
        assert_eq!(stage_of(container(waiting, json!({}))), Stage::Blocked(trouble));
    }

    #[test]
    fn a_crash_loop_names_exit_code_and_last_words() {
        let log = "{\"level\":\"INFO\"}\nstoker-agent: the engine stopped: step failed\n";
        assert_eq!(
            (last_words(log), last_words("no such model\n")),
            ("the engine stopped: step failed", "no such model")
        );
        let more = json!({"restartCount": 4, "lastState": {"terminated": {"exitCode": 3, "reason": "Error", "message": "no such model\n"}}});
        let trouble = Trouble::new("CrashLoopBackOff", "the agent ended with exit code 3, 4 restarts: no such model");
        let waiting = json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}});
        assert_eq!(stage_of(container(waiting, more.clone())), Stage::Blocked(trouble.clone()));
        let between_crashes = json!({"running": {}});
        assert_eq!(stage_of(container(between_crashes, more)), Stage::Blocked(trouble));
    }

    #[test]
    fn an_exit_code_says_what_it_stands_for() {
        let said = |ended: serde_json::Value| exit_code(&serde_json::from_value(ended).unwrap());
        assert_eq!(said(json!({"exitCode": 137, "reason": "OOMKilled"})), "exit code 137 (OOMKilled)");
        assert_eq!(said(json!({"exitCode": 137, "reason": "Error"})), "exit code 137 (SIGKILL, often out of memory)");
        assert_eq!(said(json!({"exitCode": 139})), "exit code 139 (SIGSEGV)");
        assert_eq!(said(json!({"exitCode": 1, "reason": "Error"})), "exit code 1");
    }

    #[test]
    fn a_pod_that_was_ready_falters_and_one_that_was_not_starts() {
        // The fixture's pod is unready since 10:00:00.
        let since = |time: &str| json!({"running": {"startedAt": format!("2026-11-21T{time}Z")}});
        assert_eq!(stage_of(container(since("09:59:00"), json!({"started": false}))), Stage::Starting);
        let faltering = stage_of(container(since("09:59:00"), json!({"started": true})));
        assert!(matches!(faltering, Stage::Faltering { .. }), "{faltering:?}");
        // The process listens and loads; it was never ready.
        assert_eq!(stage_of(container(since("10:00:00"), json!({"started": true}))), Stage::Starting);
    }

    #[test]
    fn a_container_beside_the_agent_says_nothing_about_the_replica() {
        let mut status = container(json!({"running": {"startedAt": "2026-11-21T09:59:00Z"}}), json!({"started": true}));
        let beside = json!({"name": "beside", "image": "", "imageID": "", "ready": false, "restartCount": 9,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}}});
        status["containerStatuses"].as_array_mut().unwrap().insert(0, beside);
        assert!(matches!(stage_of(status), Stage::Faltering { .. }));
    }

    #[test]
    fn an_evicted_pod_is_finished() {
        let stage = stage_of(json!({"phase": "Failed", "reason": "Evicted", "message": "low on memory",
            "startTime": "2026-11-21T10:00:00Z"}));
        let since = "2026-11-21T10:00:00Z".parse().unwrap();
        assert_eq!(stage, Stage::Finished { trouble: Trouble::new("Evicted", "low on memory"), since });
    }

    #[test]
    fn a_container_that_is_being_made_says_what_it_waits_for() {
        let creating = |sandbox: &str| {
            let mut status = container(json!({"waiting": {"reason": "ContainerCreating"}}), json!({}));
            let conditions = status["conditions"].as_array_mut().unwrap();
            conditions[0]["lastTransitionTime"] = json!("2026-11-21T09:58:00Z");
            conditions.push(json!({"type": "PodReadyToStartContainers", "status": sandbox}));
            stage_of(status)
        };
        let since = "2026-11-21T09:58:00Z".parse().unwrap();
        for (sandbox, waits_for) in [("False", "its volumes or its network"), ("True", "its image or its container")] {
            let trouble = Trouble::new("ContainerCreating", format!("{waits_for} is not ready"));
            assert_eq!(creating(sandbox), Stage::Preparing { trouble, since });
        }
    }

    #[test]
    fn a_pod_that_is_deleted_for_its_lost_node_is_lost() {
        let lost = |reason: &str| {
            is_lost(
                &serde_json::from_value(json!({"metadata": {"name": "chat-0a-1"}, "status": {"conditions": [
                {"type": "DisruptionTarget", "status": "True", "reason": reason}]}}))
                .unwrap(),
            )
        };
        assert!(lost("DeletionByTaintManager"));
        assert!(!lost("EvictionByEvictionAPI"));
        assert!(!is_lost(&Pod::default()));
    }

    #[test]
    fn the_ordinal_is_the_last_part_of_the_name() {
        assert_eq!(ordinal("chat-1234abcd-7"), 7);
        assert_eq!(ordinal("chat"), u32::MAX);
    }
}
