//! The screen: what is known of a deployment, as aligned text. Pure.

use std::fmt::Write as _;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_crds::{
    InferenceDeployment, InferenceDeploymentSpec, InferenceDeploymentStatus,
    description::in_shares,
    scaling_status::{DecisionStatus, ScalingStatus},
    status::{BudgetStatus, FitStatus, ModelStatus, ReplicaMemory},
};
use stoker_fit::plan::{gib, grouped};
use stoker_scaling::held_requests_words;

use crate::explain::ago;

/// What the screen is made from.
pub(super) struct Facts {
    pub(super) deployment: InferenceDeployment,
    pub(super) pods: Vec<Pod>,
    pub(super) now: Timestamp,
}

/// The whole screen.
pub(super) fn screen(facts: &Facts) -> String {
    let Facts { deployment, pods, now } = facts;
    let absent = InferenceDeploymentStatus::default();
    let status = deployment.status.as_ref().unwrap_or(&absent);
    let mut text = String::new();
    let mut line = |label: &str, words: String| {
        let _ = writeln!(text, "{label:<12} {words}");
    };
    line("deployment", title(deployment, status, *now));
    line("model", model(&deployment.spec));
    if let Some(model) = &status.model {
        line("commit", fetched(model));
    }
    line("replicas", replicas(status));
    line("kv", kv(status, *now));
    line("preemptions", preemptions(status, *now));
    line("memory", status.fit.as_ref().map_or_else(|| "unknown".to_owned(), memory));
    if let Some(held) = status.fit.as_ref().and_then(formats) {
        line("formats", held);
    }
    line("scaling", status.scaling.as_ref().map_or_else(|| "off: spec.replicas rules".to_owned(), scaling));
    line("last", last(status, *now));
    if let Some(standby) = &status.standby {
        line("standby", standby.message.clone());
    }
    if let Some(budget) = &status.budget {
        line("budget", granted(budget));
    }
    if let Some(generation) = unseen_generation(deployment, status) {
        line("stale", format!("generation {generation} of the spec was not looked at yet"));
    }
    text + "\n" + &conditions(status, *now) + "\n" + &replicas_table(pods, *now)
}

/// The same for programs.
pub(super) fn json(facts: &Facts) -> Value {
    let Facts { deployment, pods, now: _ } = facts;
    let pod = |pod: &Pod| {
        let status = pod.status.as_ref();
        let ready = status
            .into_iter()
            .flat_map(|status| status.conditions.iter().flatten())
            .any(|condition| condition.type_ == "Ready" && condition.status == "True");
        json!({
            "name": pod.name_any(), "node": pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref()),
            "phase": status.and_then(|status| status.phase.as_ref()), "ready": ready,
        })
    };
    json!({
        "name": deployment.name_any(), "namespace": deployment.namespace(), "model": deployment.spec.model.source,
        "status": deployment.status, "pods": pods.iter().map(pod).collect::<Vec<_>>(),
    })
}

fn title(deployment: &InferenceDeployment, status: &InferenceDeploymentStatus, now: Timestamp) -> String {
    let namespace = deployment.namespace().unwrap_or_default();
    let age = deployment.metadata.creation_timestamp.as_ref().map_or_else(String::new, |made| ago(made.0, now));
    let [revision, url] = [&status.revision, &status.url].map(|text| if text.is_empty() { "none yet" } else { text });
    format!("{namespace}/{}, {age} old, revision {revision}, {url}", deployment.name_any())
}

fn model(spec: &InferenceDeploymentSpec) -> String {
    let source = &spec.model.source;
    match spec.gpus() {
        0 => format!("{source}, on CPUs"),
        1 => format!("{source}, on a GPU each"),
        gpus => format!("{source}, on {gpus} GPUs each"),
    }
}

fn fetched(model: &ModelStatus) -> String {
    let ModelStatus { source: _, commit, bytes: _, nodes, delivery } = model;
    let kept = if nodes.is_empty() { String::new() } else { format!(", kept by {}", nodes.join(", ")) };
    let how = delivery.as_ref().map_or_else(String::new, |how| format!("; new replicas have it {how}"));
    format!("{commit}{kept}{how}")
}

fn replicas(status: &InferenceDeploymentStatus) -> String {
    let serving = if status.ready_of_wanted.is_empty() { "?/?" } else { &status.ready_of_wanted };
    let mut words = format!("{serving} serve, {} of this revision, {} pods", status.updated_replicas, status.replicas);
    if let Some(startup) = &status.startup {
        let _ = write!(words, "; {} is {:?}", startup.pod, startup.phase);
    }
    words
}

/// The operator reads it all the time and writes it when it has moved: an old number is one that stands, not a stale one.
fn kv(status: &InferenceDeploymentStatus, now: Timestamp) -> String {
    let Some(capacity) = &status.capacity else { return "unknown: no serving replica was read".to_owned() };
    let stands = ago(capacity.observed_at.0, now);
    format!("{} % of {} tokens, about that for {stands}", capacity.kv_used_percent, capacity.kv_tokens)
}

fn preemptions(status: &InferenceDeploymentStatus, now: Timestamp) -> String {
    match &status.capacity {
        None => "unknown".to_owned(),
        Some(capacity) if capacity.preemptions_per_minute == 0 => "none".to_owned(),
        Some(capacity) => {
            let noted = ago(capacity.observed_at.0, now);
            format!("{} in a minute when noted {noted} ago, and some since", capacity.preemptions_per_minute)
        }
    }
}

/// Of one replica: as planned, as it turned out, and how far apart that is.
fn memory(fit: &FitStatus) -> String {
    let words = |memory: &ReplicaMemory| {
        let bytes = memory.weights_bytes.saturating_add(memory.workspace_bytes);
        format!("{} and {} tokens of KV", gib(bytes.unsigned_abs()), grouped(memory.kv_tokens.unsigned_abs()))
    };
    let percent = |error: Option<f64>| error.map_or_else(|| "?".to_owned(), |error| format!("{error:+.1} %"));
    match (&fit.planned, &fit.measured) {
        (None, None) => "unknown: see Fits".to_owned(),
        (Some(planned), None) => format!("{} planned, on {}", words(planned), fit.place),
        (None, Some(measured)) => format!("{} taken, on {}", words(measured), fit.place),
        (Some(_), Some(measured)) => {
            let [memory, kv] = [fit.memory_error_percent, fit.kv_error_percent].map(percent);
            format!("{} taken, on {}; the plan was {memory} and {kv} off", words(measured), fit.place)
        }
    }
}

/// The formats of its numbers; `None` before an agent has said it.
fn formats(fit: &FitStatus) -> Option<String> {
    let measured = fit.measured.as_ref().filter(|measured| !measured.weights_by_format.is_empty())?;
    let weights = in_shares(measured.weights_by_format.iter().map(|(format, bytes)| (format, bytes.unsigned_abs())));
    Some(format!("weights in {weights}; {} bytes of KV a token", grouped(measured.kv_bytes_per_token.unsigned_abs())))
}

fn scaling(status: &ScalingStatus) -> String {
    let ScalingStatus { mode, desired, coverage, held, .. } = status;
    let fresh = if coverage.is_empty() { "no reading yet".to_owned() } else { format!("{coverage} readings fresh") };
    let held = match u32::try_from(*held).unwrap_or_default() {
        0 => String::new(),
        held => format!(", {} until one serves", held_requests_words(held)),
    };
    format!("{mode:?}, {desired} wanted, {fresh}{held}").to_lowercase()
}

fn granted(budget: &BudgetStatus) -> String {
    let BudgetStatus { wanted, granted, blocked_by } = budget;
    let held = if blocked_by.is_empty() { String::new() } else { format!(", blocked by {}", blocked_by.join(", ")) };
    format!("{granted} of {wanted} replicas granted{held}")
}

fn last(status: &InferenceDeploymentStatus, now: Timestamp) -> String {
    let last = status.scaling.as_ref().and_then(|scaling| scaling.last.as_ref());
    last.map_or_else(|| "no decision yet".to_owned(), |last| short(last, now))
}

fn short(decision: &DecisionStatus, now: Timestamp) -> String {
    let DecisionStatus { at, from, to, pressure_percent, cause, bound, .. } = decision;
    let change = if from == to { format!("stays at {to}") } else { format!("{from} -> {to}") };
    format!("{} ago: {change}, pressure {pressure_percent} % from {cause}, bound by {bound}", ago(at.0, now))
}

fn unseen_generation(deployment: &InferenceDeployment, status: &InferenceDeploymentStatus) -> Option<i64> {
    deployment.metadata.generation.filter(|generation| status.observed_generation != Some(*generation))
}

fn conditions(status: &InferenceDeploymentStatus, now: Timestamp) -> String {
    let header = ["CONDITION", "STATUS", "FOR", "REASON", "MESSAGE"].map(str::to_owned);
    let rows = status.conditions.iter().map(|condition| {
        let since = condition.last_transition_time.0;
        let [name, state] = [&condition.type_, &condition.status].map(Clone::clone);
        [name, state, ago(since, now), condition.reason.clone(), condition.message.clone()]
    });
    table(header, rows.collect())
}

fn replicas_table(pods: &[Pod], now: Timestamp) -> String {
    let header = ["POD", "READY", "STATE", "RESTARTS", "AGE"].map(str::to_owned);
    let rows = pods.iter().map(|pod| {
        let age = pod.creation_timestamp().map_or_else(String::new, |made| ago(made.0, now));
        [pod.name_any(), is_ready(pod).to_owned(), state(pod), restarts(pod).to_string(), age]
    });
    table(header, rows.collect())
}

fn is_ready(pod: &Pod) -> &'static str {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_ready = conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    if is_ready { "yes" } else { "no" }
}

/// Why a pod does not run, or its phase.
fn state(pod: &Pod) -> String {
    if pod.metadata.deletion_timestamp.is_some() {
        return "Terminating".to_owned();
    }
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let mut states = containers.filter_map(|container| container.state.as_ref());
    let waiting = states.find_map(|ContainerState { waiting, .. }| waiting.as_ref()?.reason.clone());
    let phase = || pod.status.as_ref().and_then(|status| status.phase.clone());
    waiting.or_else(phase).unwrap_or_else(|| "Unknown".to_owned())
}

fn restarts(pod: &Pod) -> i32 {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    containers.map(|container| container.restart_count).sum()
}

/// Columns as wide as their widest cell, two spaces apart; the last one as it is.
fn table<const N: usize>(header: [String; N], rows: Vec<[String; N]>) -> String {
    let all: Vec<_> = std::iter::once(header).chain(rows).collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    all.iter().fold(String::new(), |mut text, row| {
        let cells: Vec<_> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NOW: &str = "2026-01-31T12:01:00Z";

    fn seen(status: Value, pods: Value) -> String {
        let deployment = serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": "chat", "namespace": "team", "generation": 2, "creationTimestamp": "2026-01-31T11:00:00Z"},
            "spec": {"model": {"source": "builtin://ember"}, "scaling": {"max": 8}}, "status": status,
        }));
        let facts = Facts {
            deployment: deployment.unwrap(),
            pods: serde_json::from_value(pods).unwrap(),
            now: NOW.parse().unwrap(),
        };
        screen(&facts)
    }

    fn status() -> Value {
        json!({
            "observedGeneration": 2, "replicas": 3, "readyReplicas": 2, "updatedReplicas": 2, "readyOfWanted": "2/3",
            "revision": "3f2a", "url": "http://chat.team:8000",
            "capacity": {"kvTokens": 32768, "kvUsedPercent": 41, "preemptionsPerMinute": 3, "observedAt": "2026-01-31T12:00:48Z"},
            "fit": {"source": "builtin://ember", "place": "1 x H100",
                "planned": {"weightsBytes": 16_106_127_360_i64, "workspaceBytes": 1_181_116_006, "kvTokens": 385_351},
                "measured": {"weightsBytes": 16_106_127_360_i64, "workspaceBytes": 1_073_741_824, "kvTokens": 393_216,
                    "weightsByFormat": {"bf16": 3_060_164_198_i64, "fp8": 13_045_963_162_i64}, "kvBytesPerToken": 65_536},
                "memoryErrorPercent": 0.63, "kvErrorPercent": -2.0},
            "budget": {"wanted": 3, "granted": 2, "blockedBy": ["b/batch"]},
            "startup": {"pod": "chat-3f2a-2", "phase": "Loading"},
            "scaling": {"mode": "native", "desired": 3, "coverage": "2/2", "last": {
                "at": "2026-01-31T12:00:20Z", "from": 2, "to": 3, "pressurePercent": 126, "cause": "arrivals",
                "bound": "nothing", "coverage": "2/2"}},
            "conditions": [{"type": "Ready", "status": "False", "reason": "Starting", "message": "2 of 3 serve",
                "lastTransitionTime": "2026-01-31T12:00:30Z", "observedGeneration": 2}],
        })
    }

    #[test]
    fn the_screen_says_what_the_status_says() {
        let pods = json!([{"metadata": {"name": "chat-3f2a-2", "creationTimestamp": "2026-01-31T12:00:25Z"}, "status":
            {"phase": "Pending", "containerStatuses": [{"name": "agent", "image": "", "imageID": "", "ready": false,
             "restartCount": 1, "state": {"waiting": {"reason": "ImagePullBackOff"}}}]}}]);
        let text = seen(status(), pods);
        for words in [
            "deployment   team/chat, 61m old, revision 3f2a, http://chat.team:8000\n",
            "replicas     2/3 serve, 2 of this revision, 3 pods; chat-3f2a-2 is Loading\n",
            "kv           41 % of 32768 tokens, about that for 12s\n",
            "preemptions  3 in a minute when noted 12s ago, and some since\n",
            "memory       16.0 GiB and 393,216 tokens of KV taken, on 1 x H100; the plan was +0.6 % and -2.0 % off\n",
            "formats      weights in fp8 81 %, bf16 19 %; 65,536 bytes of KV a token\n",
            "scaling      native, 3 wanted, 2/2 readings fresh\n",
            "budget       2 of 3 replicas granted, blocked by b/batch\n",
            "last         40s ago: 2 -> 3, pressure 126 % from arrivals, bound by nothing\n",
            "Ready      False   30s  Starting  2 of 3 serve\n",
            "chat-3f2a-2  no     ImagePullBackOff  1         35s\n",
        ] {
            assert!(text.contains(words), "no {words:?} in:\n{text}");
        }
        assert!(!text.contains("stale") && !text.contains("commit"), "{text}");
    }

    #[test]
    fn a_model_that_was_fetched_is_named_with_the_nodes_that_have_it() {
        let said = |nodes: &[&str]| {
            let mut fetched = status();
            fetched["model"] = json!({"source": "hf://a/b", "commit": "0a".repeat(20), "nodes": nodes});
            seen(fetched, json!([])).lines().find(|line| line.starts_with("commit")).map(str::to_owned).unwrap()
        };
        let commit = "0a".repeat(20);
        assert_eq!(said(&[]), format!("commit       {commit}"));
        assert_eq!(said(&["a", "b"]), format!("commit       {commit}, kept by a, b"));
    }

    #[test]
    fn who_waits_for_the_first_replica_is_counted() {
        let mut asleep = status();
        asleep["scaling"]["desired"] = json!(1);
        asleep["scaling"]["coverage"] = json!("0/0");
        asleep["scaling"]["held"] = json!(3);
        let text = seen(asleep, json!([]));
        let words = "scaling      native, 1 wanted, 0/0 readings fresh, 3 requests held until one serves\n";
        assert!(text.contains(words), "{text}");
    }

    #[test]
    fn what_a_replica_computes_on_stands_beside_its_model() {
        let said = |more: Value| {
            let mut spec = json!({"model": {"source": "pvc://w"}});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            model(&serde_json::from_value(spec).unwrap())
        };
        assert_eq!(said(json!({})), "pvc://w, on CPUs");
        assert_eq!(said(json!({"resources": {"gpus": 1}})), "pvc://w, on a GPU each");
        assert_eq!(said(json!({"parallelism": {"tensor": 2}})), "pvc://w, on 2 GPUs each");
        assert_eq!(said(json!({"parallelism": {"tensor": 4}, "resources": {"gpus": 4}})), "pvc://w, on 4 GPUs each");
        assert_eq!(said(json!({"parallelism": {"pipeline": 3}})), "pvc://w, on 3 GPUs each");
        assert_eq!(said(json!({"parallelism": {"tensor": 2, "pipeline": 3}})), "pvc://w, on 6 GPUs each");
    }

    #[test]
    fn numbers_that_did_not_move_are_not_called_old() {
        let mut quiet = status();
        quiet["capacity"]["observedAt"] = json!("2026-01-31T11:30:00Z");
        quiet["capacity"]["preemptionsPerMinute"] = json!(0);
        let text = seen(quiet, json!([]));
        assert!(text.contains("kv           41 % of 32768 tokens, about that for 31m\n"), "{text}");
        assert!(text.contains("preemptions  none\n"), "{text}");
    }

    #[test]
    fn what_was_not_looked_at_yet_is_said() {
        let text = seen(Value::Null, json!([]));
        assert!(text.contains("stale        generation 2 of the spec was not looked at yet"), "{text}");
        assert!(text.contains("last         no decision yet"), "{text}");
        assert!(text.contains("?/? serve"), "{text}");
    }
}
