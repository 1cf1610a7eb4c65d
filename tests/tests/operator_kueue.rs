//! A fleet in a queue of Kueue's: it has the GPUs that the queue gives, waits for more and says so, changes within them, and gives way.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{thread::sleep, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::{Capacity, Gpus, NodeOptions};
use stoker_tests::{
    kueue::{self, Kueue},
    operator::{Rig, condition, is_ready, revision_of, serves},
    skip::skip,
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(90);
/// Long enough for a fleet that should not move to move.
const A_WHILE: Duration = Duration::from_secs(4);

fn chat(replicas: u32, change: &str) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas, "resources": {"gpus": 1},
        "rollout": {"maxUnavailable": 1, "surgeSeconds": 2}, "drain": {"withdrawSeconds": 1, "deadlineSeconds": 20},
        "pod": {"labels": {"kueue.x-k8s.io/queue-name": "serving"}, "annotations": {"change": change}},
    })
}

/// Somebody else's pod, which comes first in the queue.
fn urgent() -> String {
    let container = json!({"name": "job", "image": "stand-in/agent:1", "resources": {"limits": {"nvidia.com/gpu": 1}}});
    let labels = json!({"kueue.x-k8s.io/queue-name": "serving", "kueue.x-k8s.io/priority-class": "urgent"});
    let metadata = json!({"name": "urgent", "labels": labels});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}).to_string()
}

fn serving(pods: &[Pod]) -> usize {
    pods.iter().filter(|pod| serves(pod)).count()
}

fn names(pods: &[Pod]) -> Vec<String> {
    let mut names: Vec<String> = pods.iter().map(ResourceExt::name_any).collect();
    names.sort();
    names
}

/// Waits until one replica waits for the queue and so many serve, and sees that nothing is done about it.
fn waits_for_the_queue(rig: &Rig, n_serving: usize) {
    let is_told = |rig: &Rig| {
        let (status, reason, message) = condition(&rig.get("chat")?, "Ready").unwrap_or_default();
        let says = status == "False" && reason == "SchedulingGated" && message.contains("kueue.x-k8s.io/admission");
        let pods = rig.pods("chat")?;
        anyhow::Ok(says && serving(&pods) == n_serving && pods.len() == n_serving + 1)
    };
    rig.wait("a replica waits and says for what", SOON, is_told).unwrap();
    let before = names(&rig.pods("chat").unwrap());
    sleep(A_WHILE);
    assert_eq!(names(&rig.pods("chat").unwrap()), before, "who waits is left to the queue");
}

#[test]
fn a_fleet_lives_within_what_a_queue_gives_it() {
    if let Err(reason) = kueue::program() {
        return skip("a_fleet_lives_within_what_a_queue_gives_it", &format!("{reason:#}"));
    }
    let capacity = Capacity { gpus: Gpus::Pretended(8), ..Capacity::default() };
    let rig = Rig::start_own(NodeOptions { capacity, ..NodeOptions::default() }).unwrap();
    let kueue = Kueue::start(&rig.cluster, 2).unwrap();

    rig.apply("chat", chat(3, "a")).unwrap();
    waits_for_the_queue(&rig, 2);
    kueue.resize(&rig.cluster, 3).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    let injected = |pod: &Pod| pod.spec.as_ref().unwrap().node_selector.is_some();
    assert!(rig.pods("chat").unwrap().iter().all(injected), "Kueue says which nodes: it is who let them in");

    // The queue is full: a change goes by in the places that there are.
    let old = revision_of(&rig.pods("chat").unwrap()[0]);
    rig.apply("chat", chat(3, "b")).unwrap();
    let mut fewest = usize::MAX;
    rig.wait("all three are of the next revision", SOON * 2, |rig| {
        let pods = rig.pods("chat")?;
        fewest = fewest.min(serving(&pods));
        Ok(pods.len() == 3
            && pods.iter().all(|pod| serves(pod) && revision_of(pod) != old)
            && is_ready(&rig.get("chat")?))
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", kueue.log()));
    assert!(fewest >= 2, "{fewest} served, where one may be missing");

    // Somebody who comes first takes a place, and gives it back.
    rig.cluster.apply(&urgent()).unwrap();
    waits_for_the_queue(&rig, 2);
    assert!(rig.cluster.get("pod", "urgent").unwrap()["spec"]["nodeName"].is_string(), "{}", kueue.log());
    rig.cluster.kubectl(&["delete", "pod", "urgent"]);
    rig.wait_ready("chat", SOON).unwrap();

    rig.delete("chat").unwrap();
    rig.wait("its pods are gone, and their places", SOON, |rig| {
        let workloads = rig.cluster.kubectl(&["get", "workloads.kueue.x-k8s.io", "-o", "name"]);
        Ok(rig.pods("chat")?.is_empty() && workloads.is_empty())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", kueue.log()));
}
