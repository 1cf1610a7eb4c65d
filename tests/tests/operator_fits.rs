//! Whether a model fits, on a real control plane: known before a pod is made where it can be, kept once a replica told, and beside
//! what a replica really took.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{fs, path::Path, time::Duration};

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use stoker_cluster::{Audit, Capacity, ControlPlaneOptions, Controllers, Gpus, NodeOptions};
use stoker_crds::status::FitStatus;
use stoker_tests::{
    agent,
    operator::{Rig, condition},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Long enough for a pod that should not be made to be made.
const A_WHILE: Duration = Duration::from_secs(4);
/// The real agent; others of these tests are stand-ins.
const REAL_AGENT: &str = "stoker/agent:1";

fn fit(rig: &Rig, name: &str) -> FitStatus {
    rig.get(name).unwrap().status.and_then(|status| status.fit).unwrap_or_default()
}

/// Waits until `Fits` is as expected; its message.
fn told(rig: &Rig, name: &str, status: &str, reason: &str) -> String {
    let mut told = String::new();
    let what = format!("{name}: Fits is {status}, {reason}");
    rig.wait(&what, SOON, |rig| {
        let (found, why, message) = condition(&rig.get(name)?, "Fits").unwrap_or_default();
        told = message;
        Ok((found.as_str(), why.as_str()) == (status, reason))
    })
    .unwrap();
    told
}

/// Labels the only node.
fn label(rig: &Rig, labels: &Value) {
    let nodes = Api::<Node>::all(rig.client());
    let name = rig.block_on(nodes.list(&ListParams::default())).unwrap().items[0].name_any();
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    rig.block_on(nodes.patch(&name, &PatchParams::default(), &patch)).unwrap();
}

#[test]
fn what_a_replica_on_cpus_took_stands_beside_what_was_planned() {
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(REAL_AGENT, agent::binary().unwrap());
    let engine = json!({"threads": 1, "maxModelLen": 512, "kvCacheTokens": 4096});
    let spec = |replicas| {
        json!({"model": {"source": "builtin://ember"}, "resources": {"memory": "512Mi"}, "engine": engine,
            "replicas": replicas, "pod": {"image": REAL_AGENT}})
    };
    rig.apply("chat", spec(0)).unwrap();
    let message = told(&rig, "chat", "True", "Fits");
    assert!(message.contains("on CPUs with 512.0 MiB: weights of ") && message.contains("512 tokens"), "{message}");
    assert!(fit(&rig, "chat").measured.is_none(), "no replica was made yet");

    rig.apply("chat", spec(1)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    rig.wait("it is measured", SOON, |rig| Ok(fit(rig, "chat").measured.is_some())).unwrap();
    let found = fit(&rig, "chat");
    let measured = found.measured.clone().unwrap();
    assert_eq!((measured.kv_tokens, found.kv_error_percent), (4096, Some(0.0)), "{found:?}");
    assert!(found.memory_error_percent.unwrap().abs() < 3.0, "{found:?}");

    // It stands without a replica, and an operator that starts anew goes on with it.
    rig.apply("chat", spec(0)).unwrap();
    rig.wait("nobody is left", SOON, |rig| Ok(rig.pods("chat")?.is_empty())).unwrap();
    assert_eq!(fit(&rig, "chat"), found);
}

#[test]
fn no_pod_is_made_that_could_only_fail_and_one_is_as_soon_as_a_node_is_large_enough() {
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let capacity = Capacity { gpus: Gpus::Pretended(2), ..Capacity::default() };
    let mut rig = Rig::start_with(options, NodeOptions { capacity, ..NodeOptions::default() }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/specs/llama-3.1-8b.json");
    fs::copy(golden, dir.path().join("config.json")).unwrap();
    let source = format!("file://{}", dir.path().display());
    let spec = |replicas| json!({"model": {"source": source}, "resources": {"gpus": 1}, "replicas": replicas});

    // Nobody knows the model, so its first replica is made; then what it read is known for good.
    rig.apply("chat", spec(1)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    let message = told(&rig, "chat", "Unknown", "NodesUnknown");
    assert!(message.contains("nvidia.com/gpu.product"), "{message}");
    rig.wait("its config is kept", SOON, |rig| Ok(fit(rig, "chat").config.is_some())).unwrap();
    rig.apply("chat", spec(0)).unwrap();
    rig.wait("nobody is left", SOON, |rig| Ok(rig.pods("chat")?.is_empty())).unwrap();

    label(&rig, &json!({"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.memory": "15360"}));
    let message = told(&rig, "chat", "False", "DoesNotFit");
    assert!(
        message.contains("not on 1 x Tesla-T4 of 15.0 GiB: weights need ") && message.contains("; needs "),
        "{message}"
    );
    rig.operator.restart_with(&[]).unwrap();
    rig.apply("chat", spec(2)).unwrap();
    rig.wait("it says why there is no pod", SOON, |rig| {
        let said = ["Ready", "Degraded"].map(|type_| condition(&rig.get("chat").unwrap(), type_).unwrap_or_default());
        let [ready, degraded] = said;
        Ok(ready.0 == "False" && ready.1 == "DoesNotFit" && degraded.0 == "True" && ready.2.contains("needs "))
    })
    .unwrap();
    std::thread::sleep(A_WHILE);
    assert!(rig.pods("chat").unwrap().is_empty(), "a pod was made that could only fail");

    label(&rig, &json!({"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771"}));
    rig.wait_ready("chat", SOON).unwrap();
    let message = told(&rig, "chat", "True", "Fits");
    assert!(message.starts_with("on 1 x NVIDIA-H200 of 140.4 GiB: weights of 15.0 GiB"), "{message}");
}
