//! Scaling on a real API server with the real operator: who decides the number, what the status says, and that an operator
//! killed at any moment goes on without a jump. Agents are stand-ins; each stream they hold references ten of their 1000
//! KV blocks.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    process::{Child, Command, Stdio},
    sync::LazyLock,
    thread::sleep,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::scaling_status::ScalingStatus;
use stoker_scaling::Replay;
use stoker_tests::operator::{Rig, condition, serves};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);

/// Decisions until as many replicas are wanted as the load needs: ten seconds, one each two, where they are not late.
const ROUNDS: usize = 5;
/// Longer than all windows of [`spec`] one after another: what would go down has gone.
const WATCHED: Duration = Duration::from_secs(24);
/// Longer than any test: such streams end when they are told to.
const LONG_SECONDS: u64 = 600;

/// One cluster for all tests of this file but the one that kills its operator; each has deployments of its own.
static RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start(Audit::Off).unwrap());

/// Five streams fill a replica to its target; windows are short enough for a test.
fn spec(scaling: Value, more: Value) -> Value {
    let mut merged = json!({
        "max": 3, "targets": {"kv": 0.05},
        "behavior": {"stableWindowSeconds": 6, "panicWindowSeconds": 2, "downStabilizationSeconds": 4},
    });
    merged.as_object_mut().unwrap().extend(scaling.as_object().unwrap().clone());
    let drain = json!({"withdrawSeconds": 1, "deadlineSeconds": 60});
    let mut spec = json!({"model": {"source": "builtin://ember"}, "drain": drain, "scaling": merged});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

/// Streams that clients hold open to one pod.
struct Streams(Vec<Child>);

impl Streams {
    fn hold(pod: &Pod, count: usize, seconds: u64) -> Self {
        let url = format!("http://{}:8000/stream/{seconds}", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap());
        let one = || Command::new("curl").args(["-sSN", "--max-time", "300", &url]).stdout(Stdio::piped()).spawn();
        Self((0..count).map(|_| one().unwrap()).collect())
    }

    /// Lets all of a replica come to their end; the last line of each.
    fn finish(self, pod: &Pod) -> Vec<String> {
        let url = format!("http://{}:8000/finish", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap());
        assert!(Command::new("curl").args(["-sS", "-X", "POST", &url]).status().unwrap().success());
        self.ends()
    }

    /// The last line of each.
    fn ends(self) -> Vec<String> {
        let end = |stream: Child| {
            let output = stream.wait_with_output().unwrap();
            String::from_utf8(output.stdout).unwrap().lines().last().unwrap_or_default().to_owned()
        };
        self.0.into_iter().map(end).collect()
    }
}

fn section(rig: &Rig, name: &str) -> ScalingStatus {
    rig.get(name).unwrap().status.and_then(|status| status.scaling).unwrap()
}

fn desired(rig: &Rig, name: &str) -> i32 {
    section(rig, name).desired
}

fn serving(rig: &Rig, name: &str) -> usize {
    rig.pods(name).unwrap().iter().filter(|pod| serves(pod)).count()
}

fn delete(rig: &Rig, name: &str) {
    rig.delete(name).unwrap();
}

#[test]
fn load_brings_replicas_and_its_end_takes_them_back_without_cutting_a_stream() {
    let rig = &*RIG;
    rig.apply("native", spec(json!({}), json!({}))).unwrap();
    rig.wait_ready("native", SOON).unwrap();
    let streams = Streams::hold(&rig.pods("native").unwrap()[0], 12, 25);
    rig.wait("three serve", SOON, |rig| Ok(serving(rig, "native") == 3)).unwrap();
    let records = rig.operator.records("native", 0).unwrap();
    let pressed = records.iter().position(|record| record.decision.pressure > 1.0).unwrap();
    let reached = records.iter().position(|record| record.decision.desired == 3).unwrap();
    assert!(reached - pressed <= ROUNDS, "{} rounds from pressure to three replicas", reached - pressed);

    rig.wait("one is left", SOON * 2, |rig| Ok(rig.pods("native")?.len() == 1)).unwrap();
    assert!(streams.ends().iter().all(|end| end == "done"));
    let path: Vec<i32> = section(rig, "native").decisions.iter().map(|decision| decision.to).collect();
    let peak = path.iter().position(|to| *to == 3).unwrap();
    assert!(path[..=peak].is_sorted() && path[peak..].iter().rev().is_sorted(), "{path:?}");
    let records = rig.operator.records("native", 0).unwrap();
    assert!(records.iter().all(|record| record.replay() == Replay::Identical));
    let of_it = ["--field-selector", "involvedObject.name=native"];
    let words = ["-o", "jsonpath={range .items[*]}{.reason}: {.message}{\"\\n\"}{end}"];
    let events = rig.cluster.kubectl(&[&["get", "events"][..], &of_it, &words].concat());
    assert!(events.contains("Scaled: 1 -> ") && events.contains(" -> 3 replicas: pressure "), "{events}");
    delete(rig, "native");
}

#[test]
fn an_idle_deployment_that_scales_causes_no_writes() {
    let rig = &*RIG;
    rig.apply("quiet", spec(json!({}), json!({}))).unwrap();
    rig.wait_ready("quiet", SOON).unwrap();
    sleep(Duration::from_secs(8));
    let version = rig.get("quiet").unwrap().resource_version();
    sleep(Duration::from_secs(14));
    assert_eq!(rig.get("quiet").unwrap().resource_version(), version);
    let status = serde_json::to_string(&rig.get("quiet").unwrap().status).unwrap();
    assert!(status.len() < 8 * 1024, "{} bytes", status.len());
    delete(rig, "quiet");
}

#[test]
fn external_and_advisory_leave_the_number_alone_and_say_so() {
    let rig = &*RIG;
    rig.apply("advised", spec(json!({"mode": "advisory"}), json!({"replicas": 1}))).unwrap();
    rig.apply("handed", spec(json!({"mode": "external"}), json!({"replicas": 1}))).unwrap();
    rig.wait_ready("advised", SOON).unwrap();
    rig.wait_ready("handed", SOON).unwrap();
    let streams = Streams::hold(&rig.pods("advised").unwrap()[0], 12, 12);
    rig.wait("three are advised", SOON, |rig| Ok(section(rig, "advised").last.is_some_and(|last| last.to == 3)))
        .unwrap();
    assert_eq!((desired(rig, "advised"), rig.pods("advised").unwrap().len()), (1, 1));
    let (value, reason, message) = condition(&rig.get("advised").unwrap(), "Scaling").unwrap();
    assert_eq!((value.as_str(), reason.as_str()), ("False", "Advisory"));
    assert!(message.contains("spec.replicas stands"), "{message}");
    assert!(streams.ends().iter().all(|end| end == "done"));

    rig.scale("handed", 2).unwrap();
    rig.wait("two serve", SOON, |rig| Ok(serving(rig, "handed") == 2)).unwrap();
    let (value, reason, _) = condition(&rig.get("handed").unwrap(), "Scaling").unwrap();
    assert_eq!((value.as_str(), reason.as_str()), ("False", "External"));
    assert!(condition(&rig.get("handed").unwrap(), "MetricsHealthy").is_none());
    assert!(rig.operator.records("handed", 0).is_err());
    // Handed back, the operator goes on with the number there is.
    let native = json!({"spec": {"replicas": null, "scaling": {"mode": "native", "min": 2}}}).to_string();
    rig.cluster.kubectl(&["patch", "infd", "handed", "--type=merge", "-p", &native]);
    rig.wait("the operator decides", SOON, |rig| Ok(section(rig, "handed").last.is_some())).unwrap();
    assert_eq!(desired(rig, "handed"), 2);
    delete(rig, "advised");
    delete(rig, "handed");
}

#[test]
fn a_person_scales_a_deployment_that_never_named_a_number() {
    let rig = &*RIG;
    rig.apply("unsaid", spec(json!({"mode": "external"}), json!({}))).unwrap();
    rig.wait_ready("unsaid", SOON).unwrap();
    assert_eq!(rig.pods("unsaid").unwrap().len(), 1);
    rig.cluster.kubectl(&["scale", "infd", "unsaid", "--replicas=3"]);
    rig.wait("three serve", SOON, |rig| Ok(serving(rig, "unsaid") == 3)).unwrap();
    rig.scale("unsaid", 2).unwrap();
    rig.wait("two are left", SOON, |rig| Ok(rig.pods("unsaid")?.len() == 2)).unwrap();
    assert_eq!(desired(rig, "unsaid"), 2);
    delete(rig, "unsaid");
}

/// An HPA that acts without any metric: it keeps its minimum.
fn hpa(name: &str, min: u32, max: u32) -> String {
    let target = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "name": name});
    let cpu = json!({"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}});
    json!({
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": name},
        "spec": {"scaleTargetRef": target, "minReplicas": min, "maxReplicas": max, "metrics": [cpu]},
    })
    .to_string()
}

/// Status and reason of the condition in which an HPA says whether it can scale.
fn able_to_scale(rig: &Rig, name: &str) -> String {
    let path = "jsonpath={.status.conditions[?(@.type==\"AbleToScale\")]['status','reason']}";
    rig.cluster.try_kubectl(&["get", "hpa", name, "-o", path]).unwrap_or_default()
}

fn manifest(name: &str, spec: &Value) -> String {
    let kind = "InferenceDeployment";
    json!({"apiVersion": "stoker.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}).to_string()
}

#[test]
fn an_hpa_takes_a_deployment_that_never_named_a_number_and_a_plain_apply_takes_it_back() {
    let rig = &*RIG;
    rig.cluster.apply(&manifest("lent", &spec(json!({"mode": "external"}), json!({})))).unwrap();
    rig.wait_ready("lent", SOON).unwrap();
    rig.wait("there is a number", SOON, |rig| Ok(rig.get("lent")?.spec.replicas == Some(1))).unwrap();
    rig.cluster.apply(&hpa("lent", 2, 3)).unwrap();
    rig.wait("the HPA's minimum serves", SOON, |rig| Ok(serving(rig, "lent") == 2)).unwrap();
    assert_eq!(rig.get("lent").unwrap().spec.replicas, Some(2));
    assert!(able_to_scale(rig, "lent").starts_with("True"), "{}", able_to_scale(rig, "lent"));

    // The number is the HPA's; neither manifest ever names one.
    rig.cluster.apply(&manifest("lent", &spec(json!({"min": 2}), json!({})))).unwrap();
    rig.wait("the operator decides", SOON, |rig| Ok(section(rig, "lent").last.is_some())).unwrap();
    rig.wait("the number is gone", SOON, |rig| Ok(rig.get("lent")?.spec.replicas.is_none())).unwrap();
    assert_eq!((desired(rig, "lent"), rig.pods("lent").unwrap().len()), (2, 2));
    rig.wait("the HPA says that it can do nothing", SOON, |rig| Ok(able_to_scale(rig, "lent").starts_with("False")))
        .unwrap();
    rig.wait_ready("lent", SOON).unwrap();
    let version = rig.get("lent").unwrap().metadata.generation;
    rig.cluster.apply(&manifest("lent", &spec(json!({"min": 2}), json!({})))).unwrap();
    assert_eq!(rig.get("lent").unwrap().metadata.generation, version, "applied again, nothing changes");
    rig.cluster.kubectl(&["delete", "hpa", "lent"]);
    delete(rig, "lent");
}

#[test]
fn an_operator_killed_at_any_moment_goes_on_without_a_jump() {
    let mut rig = Rig::start(Audit::Off).unwrap();
    rig.apply("killed", spec(json!({}), json!({}))).unwrap();
    rig.wait_ready("killed", SOON).unwrap();
    let loaded = rig.pods("killed").unwrap().remove(0);
    let streams = Streams::hold(&loaded, 12, LONG_SECONDS);
    let mut path = vec![1];
    // Before the decision, between decision and pods, while pods start, and settled.
    for pause_ms in [700, 3_300, 2_100, 5_900, 1_300, 4_700] {
        let until = Instant::now() + Duration::from_millis(pause_ms);
        while Instant::now() < until {
            path.push(desired(&rig, "killed"));
            sleep(Duration::from_millis(50));
        }
        rig.operator.kill().unwrap();
        sleep(Duration::from_millis(300));
        rig.operator.restart().unwrap();
    }
    rig.wait("three serve", SOON, |rig| {
        path.push(desired(rig, "killed"));
        Ok(serving(rig, "killed") == 3)
    })
    .unwrap();
    let until = Instant::now() + WATCHED;
    while Instant::now() < until {
        path.push(desired(&rig, "killed"));
        assert!(rig.pods("killed").unwrap().len() <= 3);
        sleep(Duration::from_millis(200));
    }
    path.dedup();
    assert!(path.is_sorted() && path.last() == Some(&3), "{path:?}");
    assert!(streams.finish(&loaded).iter().all(|end| end == "done"));
    rig.wait("one is left", SOON * 2, |rig| Ok(rig.pods("killed")?.len() == 1)).unwrap();
    delete(&rig, "killed");
}
