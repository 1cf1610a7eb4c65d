//! Replicas on several GPUs, as far as a cluster without any can show: a real scheduler counts the GPUs that a node says it has, and a
//! real agent that finds none says so in `Ready`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use serde_json::{Value, json};
use stoker_cluster::{Capacity, ControlPlaneOptions, Controllers, Gpus, NodeOptions};
use stoker_tests::{
    agent,
    operator::{Rig, condition},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// The real agent; others of these tests are stand-ins.
const REAL_AGENT: &str = "stoker/agent:1";

/// A replica that so many GPUs share. Where the machine has GPUs, it sees none of them.
fn shared_by(n_gpus: u32) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "parallelism": {"tensor": n_gpus},
        "pod": {"image": REAL_AGENT, "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "-1"}]},
    })
}

/// Waits until `Ready` has that reason; its message.
fn told(rig: &Rig, name: &str, expected: &str) -> String {
    let mut told = String::new();
    rig.wait(&format!("{name} says {expected}"), SOON, |rig| {
        let (_, reason, message) = condition(&rig.get(name)?, "Ready").unwrap_or_default();
        told = message;
        Ok(reason == expected)
    })
    .unwrap();
    told
}

#[test]
fn a_replica_gets_all_its_gpus_of_one_node_and_says_what_is_missing_on_them() {
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let capacity = Capacity { gpus: Gpus::Pretended(2), ..Capacity::default() };
    let rig = Rig::start_with(options, NodeOptions { capacity, ..NodeOptions::default() }).unwrap();
    rig.cluster.node.add_image(REAL_AGENT, agent::binary().unwrap());

    rig.apply("four", shared_by(4)).unwrap();
    let message = told(&rig, "four", "Unschedulable");
    assert!(message.contains("Insufficient nvidia.com/gpu"), "{message}");

    rig.apply("two", shared_by(2)).unwrap();
    let message = told(&rig, "two", "ModelLoadFailed");
    assert!(message.contains("load builtin://ember with parallelism.tensor 2: GPU: "), "{message}");
    let pod = rig.pods("two").unwrap().remove(0);
    let limits = pod.spec.unwrap().containers[0].resources.clone().unwrap().limits.unwrap();
    assert_eq!(limits["nvidia.com/gpu"].0, "2");
}
