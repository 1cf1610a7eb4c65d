//! Several replicas replaced at a time, on a real API server and a scheduler that counts GPUs: as many as may be missing, and no stream is cut.
//! How whole fleets do is in docs/rollouts.md, by virtual time.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::{Audit, Capacity, ControlPlaneOptions, Controllers, Gpus, NodeOptions};
use stoker_tests::operator::{Rig, intent_of, is_ready, revision_of, serves};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(120);
const REPLICAS: usize = 6;

/// What was seen while a fleet changed.
#[derive(Debug)]
struct Seen {
    fewest_serving: usize,
    most_draining: usize,
    most_pods: usize,
}

/// Six replicas with a GPU each; `change` makes another revision of them.
fn spec(change: &str, rollout: Value) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": REPLICAS, "resources": {"gpus": 1}, "rollout": rollout,
        "drain": {"withdrawSeconds": 0, "deadlineSeconds": 300}, "pod": {"annotations": {"change": change}},
    })
}

/// A cluster with as many GPUs as replicas.
fn full_cluster() -> Rig {
    let options =
        ControlPlaneOptions { controllers: Controllers::all(), audit: Audit::Off, ..ControlPlaneOptions::default() };
    let capacity = Capacity { gpus: Gpus::Pretended(REPLICAS as u32), ..Capacity::default() };
    Rig::start_with(options, NodeOptions { capacity, ..NodeOptions::default() }).unwrap()
}

fn url(pod: &Pod, path: &str) -> String {
    format!("http://{}:8000{path}", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap())
}

/// A stream that a client holds until its replica is told to finish it.
fn hold(pod: &Pod) -> Child {
    let url = url(pod, "/stream/600");
    Command::new("curl").args(["-sSN", "--max-time", "300", &url]).stdout(Stdio::piped()).spawn().unwrap()
}

fn finish(pod: &Pod) {
    let status = Command::new("curl").args(["-sS", "-o", "/dev/null", "-X", "POST", &url(pod, "/finish")]).status();
    assert!(status.unwrap().success(), "{} takes no request", pod.name_any());
}

fn drains(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && intent_of(pod).is_some_and(|(_, drains)| drains)
}

/// Every replica has a stream, which ends only when two drain at a time, or no more could: the first goes alone until its successor serves.
fn change(rig: &Rig, spec: Value) -> Seen {
    let old = rig.get("fleet").unwrap().status.unwrap().revision;
    let before = rig.pods("fleet").unwrap();
    let streams: Vec<Child> = before.iter().map(hold).collect();
    rig.apply("fleet", spec).unwrap();
    let mut seen = Seen { fewest_serving: REPLICAS, most_draining: 0, most_pods: 0 };
    let mut finished = Vec::new();
    let look = |rig: &Rig| -> Result<bool> {
        let pods = rig.pods("fleet")?;
        let is_old = |pod: &&Pod| revision_of(pod) == old;
        let draining: Vec<&Pod> = pods.iter().filter(|pod| drains(pod)).collect();
        let serving = pods.iter().filter(|pod| serves(pod) && !drains(pod)).count();
        seen.fewest_serving = seen.fewest_serving.min(serving);
        seen.most_draining = seen.most_draining.max(draining.len());
        seen.most_pods = seen.most_pods.max(pods.len());
        let is_proven = pods.iter().any(|pod| !is_old(&pod) && serves(pod));
        let staying = pods.iter().filter(is_old).filter(|pod| !drains(pod) && serves(pod)).count();
        let holding = draining.iter().filter(|pod| !finished.contains(&pod.uid())).count();
        if holding > 1 || !is_proven || staying == 0 {
            draining.iter().filter(|pod| !finished.contains(&pod.uid())).for_each(|pod| finish(pod));
            finished = draining.iter().map(|pod| pod.uid()).collect();
        }
        Ok(is_ready(&rig.get("fleet")?) && pods.len() == REPLICAS && !pods.iter().any(|pod| revision_of(pod) == old))
    };
    rig.wait("the change is rolled out", SOON, look).unwrap();
    for stream in streams {
        let output = stream.wait_with_output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).trim_end().ends_with("done"), "a stream was cut: {output:?}");
    }
    seen
}

#[test]
fn as_many_replicas_as_may_be_missing_are_replaced_at_a_time_and_no_stream_is_cut() {
    let rig = full_cluster();
    rig.apply("fleet", spec("a", json!({}))).unwrap();
    rig.wait_ready("fleet", SOON).unwrap();

    let seen = change(&rig, spec("b", json!({"minAvailable": "60%", "maxSurge": 2, "surgeSeconds": 1})));
    assert_eq!((seen.fewest_serving, seen.most_draining), (4, 2), "60 % of six are four: {seen:?}");
    assert!(seen.most_pods > REPLICAS, "new ones wait for the room of old ones: {seen:?}");

    let seen = change(&rig, spec("c", json!({"maxUnavailable": 2, "maxSurge": 0})));
    assert_eq!((seen.fewest_serving, seen.most_draining), (4, 2), "{seen:?}");
    assert_eq!(seen.most_pods, REPLICAS, "there is never one too many");
}
