//! A second node's replica gets the model from the first one's: operator, real agents and a hub on loopback, on a real control plane.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Api;
use serde_json::{Value, json};
use stoker_cluster::{ControlPlaneOptions, Controllers, NodeOptions};
use stoker_crds::{InferenceDeployment, holders::WEIGHTS_PORT};
use stoker_tests::{
    cluster::built,
    hub::{Asked, Commit, Hub, Repository},
    operator::{Rig, is_ready},
};

/// A busy machine fetches, loads and probes in this time.
const LIMIT: Duration = Duration::from_secs(180);
/// The image with the real agent.
const IMAGE: &str = "real/agent:1";
const MODEL: &str = "tests/ember";

fn ember() -> Result<Commit> {
    Commit::of_directory(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"))
}

/// Each pod keeps its own cache. A machine that is busy may take long to say who has the model.
fn spec(replicas: u32) -> Value {
    json!({
        "model": {"source": format!("hf://{MODEL}")},
        "engine": {"threads": 1, "maxModelLen": 256, "kvCacheTokens": 1024},
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0},
        "replicas": replicas,
        "pod": {"image": IMAGE, "env": [{"name": "STOKER_HOLDERS_WAIT_SECONDS", "value": "90"}]},
    })
}

/// Requests for bytes of files: to the store, or to the hub for small ones.
fn of_files(asked: &[Asked]) -> Vec<&Asked> {
    asked.iter().filter(|asked| asked.store || asked.what.contains("/resolve/")).collect()
}

fn curl(url: &str, more: &[&str]) -> Result<String> {
    let output = Command::new("curl").args(["-sS", "--max-time", "30", url]).args(more).output().context("run curl")?;
    ensure!(output.status.success(), "{url}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn ip(pod: &Pod) -> Result<String> {
    pod.status.as_ref().and_then(|status| status.pod_ip.clone()).context("it has an address")
}

/// Bytes that a replica gave.
fn given(ip: &str) -> Result<f64> {
    let metrics = curl(&format!("http://{ip}:8000/metrics"), &[])?;
    let line = metrics.lines().find(|line| line.starts_with("stoker_weights_given_bytes_total"));
    Ok(line.and_then(|line| line.rsplit(' ').next()).context("it is counted")?.parse()?)
}

#[test]
fn a_replica_on_another_node_gets_the_model_from_a_replica_and_none_of_it_from_the_source() -> Result<()> {
    let hub = Hub::start(vec![Repository::public(MODEL, ember()?)])?;
    let node = |name: &str, node_idx| NodeOptions { name: name.to_owned(), node_idx, ..NodeOptions::default() };
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let mut rig = Rig::start_with(options, node("node-0", 0))?;
    rig.cluster.node.add_image(IMAGE, built("stoker-agent"));
    rig.operator.restart_with(&["--hub-endpoint", &hub.endpoint()])?;
    rig.apply("chat", spec(1))?;
    rig.wait_ready("chat", LIMIT)?;
    ensure!(!of_files(&hub.take_asked()).is_empty(), "the first one got it from the hub");
    let holder = ip(&rig.pods("chat")?[0])?;
    ensure!(given(&holder)? == 0.0, "nobody asked yet");

    let other = rig.add_node(node("node-1", 1))?;
    other.add_image(IMAGE, built("stoker-agent"));
    rig.cluster.kubectl(&["cordon", "node-0"]);
    rig.apply("chat", spec(2))?;
    rig.wait("both serve", LIMIT, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 2)))?;
    let nodes = rig.pods("chat")?.into_iter().filter_map(|pod| pod.spec?.node_name).collect::<Vec<_>>();
    ensure!(nodes.contains(&"node-1".to_owned()), "{nodes:?}");
    let asked = hub.take_asked();
    ensure!(of_files(&asked).is_empty(), "files were fetched from the hub: {asked:?}");
    ensure!(asked.iter().any(|asked| asked.what.contains("/tree/")), "what files must be is the hub's word: {asked:?}");
    let weights = std::fs::metadata(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember/model.safetensors"))?;
    let from_holder = given(&holder)?;
    ensure!(from_holder >= weights.len() as f64, "{from_holder} bytes");

    // Nobody else gets them: not without a ticket, and the operator gives none to another namespace.
    let blob = format!("http://{holder}:{WEIGHTS_PORT}/v1/blobs/sha256-{}", "0".repeat(64));
    let refused = curl(&blob, &["-H", "range: bytes=0-0"])?;
    ensure!(refused.contains("ticket_missing"), "{refused}");
    let others: Namespace = serde_json::from_value(json!({"metadata": {"name": "others"}}))?;
    rig.block_on(Api::<Namespace>::all(rig.client()).create(&Default::default(), &others))?;
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "theirs"}, "spec": spec(2),
    });
    let theirs = Api::<InferenceDeployment>::namespaced(rig.client(), "others");
    rig.block_on(theirs.create(&Default::default(), &serde_json::from_value(object)?))?;
    rig.wait("the other namespace's serve", LIMIT, |rig| Ok(is_ready(&rig.block_on(theirs.get("theirs"))?)))?;
    ensure!(!of_files(&hub.take_asked()).is_empty(), "the other namespace's came from the hub");
    ensure!(given(&holder)? == from_holder, "a replica of another namespace was given files");
    Ok(())
}
