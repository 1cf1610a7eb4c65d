//! A deployment, nodes and what agents said in; the condition and the numbers out.

use std::{fs, path::Path, sync::Arc};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use stoker_crds::{
    contract::LoadReport,
    description::{Description, MemoryReport},
    devices::Published,
};
use stoker_replica::{Needs, ObservedPod, Reading, Stage};

use super::*;
use crate::devices;

const REVISION: &str = "0a";

fn config(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/goldens/specs/{name}.json"));
    fs::read_to_string(path).unwrap()
}

fn node(name: &str, product: Option<&str>) -> Node {
    let labels = product.map_or(json!({}), |product| json!({"nvidia.com/gpu.product": product}));
    serde_json::from_value(json!({"metadata": {"name": name, "labels": labels},
        "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "16Gi"}}}))
    .unwrap()
}

/// What a replica on a node says.
struct Said {
    node: &'static str,
    stage: Stage,
    description: Description,
}

struct World {
    spec: Value,
    status: Value,
    nodes: Seen<Node>,
    published: Option<Published>,
    said: Vec<Said>,
}

impl World {
    /// An 8B model on a GPU each, of which an agent has told.
    fn of(more: Value, nodes: &[Node]) -> Self {
        let mut spec = json!({"model": {"source": "hf://org/llama"}, "resources": {"gpus": 1}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let fit = json!({"source": "hf://org/llama", "config": config("llama-3.1-8b")});
        let nodes = Seen::All(Arc::new(nodes.to_vec()));
        Self { spec, status: json!({"fit": fit}), nodes, published: None, said: Vec::new() }
    }

    fn look(&self) -> Outlook {
        let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": self.spec,
            "status": self.status, "metadata": {"name": "chat", "namespace": "a", "uid": "u", "generation": 1}});
        let deployment: InferenceDeployment = serde_json::from_value(object).unwrap();
        let replicas: Vec<Replica> = self.said.iter().map(replica).collect();
        let told =
            |said: &Said| Described { node: said.node.to_owned(), description: Arc::new(said.description.clone()) };
        let descriptions = self.said.iter().map(|said| (uid(said), told(said))).collect();
        look(&Scene {
            deployment: &deployment,
            revision: REVISION,
            replicas: &replicas,
            descriptions: &descriptions,
            nodes: &self.nodes,
            devices: &devices::gpus(self.published.as_ref(), &deployment.spec),
        })
    }

    /// What the condition says.
    fn said(&self) -> (Option<bool>, String, String, bool) {
        let Opinion { fits, trouble, is_hopeless } = self.look().opinion;
        (fits, trouble.reason, trouble.message, is_hopeless)
    }
}

fn uid(said: &Said) -> String {
    format!("uid-{}", said.node)
}

fn replica(said: &Said) -> Replica {
    let pod = ObservedPod {
        node: None,
        name: format!("chat-{}", said.node),
        uid: uid(said),
        revision: REVISION.into(),
        ordinal: 0,
        resource_version: String::new(),
        created: Timestamp::UNIX_EPOCH,
        stage: said.stage.clone(),
        lost: false,
        gone_by: None,
        needs: Needs::default(),
    };
    Replica { pod, reading: Reading::of(&LoadReport::idle(100)), intent: None }
}

/// A replica that serves with so much.
fn serving(node: &'static str, device: &str, kv_tokens: u64) -> Said {
    let memory = MemoryReport {
        device: device.into(),
        weights_bytes: 16_060_522_496,
        weights_by_format: [("bf16".to_owned(), 16_060_522_496)].into(),
        workspace_bytes: 1 << 30,
        kv_tokens,
        kv_bytes_per_token: 131_072,
        limit_bytes: 64 << 30,
    };
    Said { node, stage: Stage::Serving, description: Description { config: None, memory: Some(memory) } }
}

#[test]
fn a_model_that_fits_every_node_says_its_numbers_for_the_smallest() {
    let world = World::of(json!({}), &[node("a", Some("NVIDIA-H200")), node("b", Some("NVIDIA-H100-80GB-HBM3"))]);
    let (fits, reason, message, _) = world.said();
    assert_eq!((fits, reason.as_str()), (Some(true), "Fits"));
    assert!(message.starts_with("on 1 x NVIDIA-H100-80GB-HBM3 of 79.6 GiB, the smallest"), "{message}");
    assert!(message.contains("weights of 15.0 GiB") && message.contains("131,072 tokens of context"), "{message}");
    let status = world.look().status;
    assert!(status.planned.is_some_and(|planned| planned.kv_tokens > 300_000) && status.measured.is_none());
}

#[test]
fn a_model_that_fits_no_node_names_the_nearest_change_and_gets_no_pod() {
    let (fits, reason, message, hopeless) = World::of(json!({}), &[node("a", Some("Tesla-T4"))]).said();
    assert_eq!((fits, reason.as_str(), hopeless), (Some(false), "DoesNotFit", true));
    assert!(message.starts_with("not on 1 x Tesla-T4 of 15.0 GiB: weights need "), "{message}");
    assert!(message.contains("; needs 4 GPUs (parallelism.tensor: 4)"), "{message}");
}

#[test]
fn a_model_whose_norms_ranks_would_have_in_parts_is_offered_stages_that_are_enough() {
    let olmo = json!({"fit": {"source": "hf://org/llama", "config": config("olmo2-7b")}});
    let on_t4s = |more| World { status: olmo.clone(), ..World::of(more, &[node("a", Some("Tesla-T4"))]) }.said();
    let (fits, _, message, hopeless) = on_t4s(json!({}));
    assert_eq!((fits, hopeless), (Some(false), true), "{message}");
    assert!(message.contains("; needs 2 stages (parallelism.pipeline: 2)"), "{message}");
    let (fits, _, message, _) = on_t4s(json!({"resources": {}, "parallelism": {"pipeline": 2}}));
    assert_eq!(fits, Some(true), "{message}");
    assert!(message.starts_with("on 2 x Tesla-T4 of 15.0 GiB: weights of "), "{message}");
    let (fits, _, message, hopeless) = on_t4s(json!({"resources": {}, "parallelism": {"tensor": 2}}));
    assert_eq!((fits, hopeless), (Some(false), true), "{message}");
    assert!(message.contains("stages of a pipeline in place of ranks"), "{message}");
    assert!(
        message.contains("needs 2 stages in place of ranks (parallelism.pipeline: 2, without tensor)"),
        "{message}"
    );
}

#[test]
fn what_is_only_a_little_too_large_is_left_to_the_agent_that_sees_the_gpu() {
    let mut at = 100_000;
    let fraction = |at: u32| f64::from(at) / 1_000_000.0;
    let of = |at: u32| {
        World::of(json!({"engine": {"memoryFraction": fraction(at), "maxModelLen": 2048}}), &[node("a", Some("H200"))])
    };
    // Up to where it fits, in steps of a thousandth.
    while of(at).said().0 == Some(false) {
        at += 1_000;
    }
    let (fits, _, message, hopeless) = of(at - 1_000).said();
    assert_eq!((fits, hopeless), (Some(false), false), "{message}");
    assert!(of(60_000).said().3, "nothing of it would");
}

#[test]
fn where_only_some_nodes_are_large_enough_a_selector_is_the_fix() {
    let world = World::of(json!({}), &[node("a", Some("Tesla-T4")), node("b", Some("NVIDIA-H200"))]);
    let (fits, reason, message, hopeless) = world.said();
    assert_eq!((fits, reason.as_str(), hopeless), (Some(false), "FitsSomeNodes", false));
    assert!(
        message.ends_with("or pods on nodes with the label nvidia.com/gpu.product: NVIDIA-H200 (pod.nodeSelector)"),
        "{message}"
    );
    let kept = json!({"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}});
    let world = World::of(kept, &[node("a", Some("Tesla-T4")), node("b", Some("NVIDIA-H200"))]);
    assert_eq!(world.said().0, Some(true), "it is enough");
}

#[test]
fn what_nobody_knows_is_said_to_be_unknown_and_keeps_no_pod_away() {
    let unknown = |world: &World, reason: &str, words: &str| {
        let (fits, found, message, hopeless) = world.said();
        assert_eq!((fits, found.as_str(), hopeless), (None, reason, false), "{message}");
        assert!(message.contains(words), "{message}");
    };
    unknown(&World::of(json!({}), &[]), "NodesUnknown", "has 1 of nvidia.com/gpu: known once there is one");
    unknown(&World::of(json!({}), &[node("a", None)]), "NodesUnknown", "1 of 1 nodes");
    let closed =
        Node { spec: serde_json::from_value(json!({"unschedulable": true})).unwrap(), ..node("a", Some("T4")) };
    unknown(&World::of(json!({}), &[closed]), "NodesUnknown", "no open node");
    let denied = World { nodes: Seen::Denied, ..World::of(json!({}), &[]) };
    unknown(&denied, "NodesUnknown", "may not list nodes");
    let untold = World { status: json!({}), ..World::of(json!({}), &[node("a", Some("T4"))]) };
    unknown(&untold, "ModelUnknown", "its first replica tells");
    let other = World::of(json!({"model": {"source": "hf://org/other"}}), &[node("a", Some("T4"))]);
    unknown(&other, "ModelUnknown", "how large hf://org/other is");
    let strange = json!({"fit": {"source": "hf://org/llama", "config": "{\"architectures\": [\"Strange\"]}"}});
    unknown(&World { status: strange, ..World::of(json!({}), &[]) }, "ModelUnknown", "Strange");
}

#[test]
fn what_a_replica_read_is_kept_and_what_it_loads_may_be_known_before_it_serves() {
    let mut world = World { status: json!({}), ..World::of(json!({}), &[node("a", Some("Tesla-T4"))]) };
    let description = Description { config: Some(config("llama-3.1-8b")), memory: None };
    world.said = vec![Said { node: "a", stage: Stage::Starting, description }];
    let outlook = world.look();
    assert_eq!(outlook.opinion.fits, Some(false));
    world.said.clear();
    world.status = json!({"fit": outlook.status});
    assert_eq!(world.look(), outlook, "it needs no replica to go on knowing");
}

#[test]
fn what_was_planned_is_compared_with_what_a_replica_took() {
    let mut world = World::of(json!({}), &[node("a", Some("NVIDIA-H200"))]);
    let planned = world.look().status.planned.unwrap();
    world.said = vec![serving("a", "cuda:0, NVIDIA H200", planned.kv_tokens as u64 * 100 / 98)];
    let status = world.look().status;
    assert_eq!(status.kv_error_percent, Some(-2.0));
    let measured = status.measured.clone().unwrap();
    assert_eq!((measured.weights_by_format["bf16"], measured.kv_bytes_per_token), (measured.weights_bytes, 131_072));
    assert_eq!(planned.kv_bytes_per_token, 131_072);
    let taken = 16_060_522_496 + (1 << 30);
    let error = 100.0 * (planned.weights_bytes + planned.workspace_bytes - taken) as f64 / taken as f64;
    assert!((status.memory_error_percent.unwrap() - error).abs() < 0.01, "{status:?}");
    // It stands while nobody serves, for this revision and no other.
    world.said.clear();
    world.status = json!({"revision": REVISION, "fit": status});
    assert_eq!(world.look().status, status);
    world.status["revision"] = json!("0b");
    assert_eq!(world.look().status.measured, None);
}

#[test]
fn what_serves_is_believed_before_the_plan_and_tells_what_gpus_a_node_has() {
    let mut world = World::of(json!({}), &[node("a", Some("Tesla-T4"))]);
    world.said = vec![serving("a", "cuda:0, Tesla T4", 4_096)];
    let (fits, _, message, hopeless) = world.said();
    assert_eq!((fits, hopeless), (Some(true), false), "{message}");
    let mut world = World::of(json!({}), &[node("a", None)]);
    world.said = vec![serving("a", "cuda:0, NVIDIA H200", 500_000)];
    let (fits, _, message, _) = world.said();
    assert!(fits == Some(true) && message.starts_with("on 1 x H200 of "), "{message}");
}

#[test]
fn on_cpus_the_pods_limit_counts_and_without_one_the_smallest_machine() {
    let ember = |more: Value| {
        let mut spec = json!({"model": {"source": "builtin://ember"}, "resources": {}});
        spec["resources"] = more;
        World { spec, status: json!({}), ..World::of(json!({}), &[node("a", None)]) }
    };
    let (fits, _, message, _) = ember(json!({})).said();
    assert!(fits == Some(true) && message.starts_with("on CPUs with 16.0 GiB: weights of "), "{message}");
    let (fits, reason, message, hopeless) = ember(json!({"memory": "16Mi"})).said();
    assert_eq!((fits, reason.as_str(), hopeless), (Some(false), "DoesNotFit", false));
    assert!(message.contains("needs resources.memory: "), "{message}");
    let denied = World { nodes: Seen::Denied, ..ember(json!({"memory": "2Gi"})) };
    assert_eq!(denied.said().0, Some(true));
}

#[test]
fn what_no_node_whatever_could_run_gets_no_pod() {
    let world = World::of(json!({"engine": {"maxModelLen": 1_000_000}}), &[node("a", Some("NVIDIA-H200"))]);
    let (fits, _, message, hopeless) = world.said();
    assert_eq!((fits, hopeless), (Some(false), true));
    assert!(message.contains("above the model's own limit of 131072"), "{message}");
}

/// A node without labels that offers so many GPUs through a device plugin.
fn unlabelled(name: &str, gpus: u32) -> Node {
    let offered = json!({"nvidia.com/gpu": gpus.to_string(), "memory": "16Gi"});
    serde_json::from_value(json!({"metadata": {"name": name}, "status": {"allocatable": offered}})).unwrap()
}

/// GPUs of these products and sizes, which their driver publishes on a node, and the class that means them.
fn published(node: &str, gpus: &[(&str, &str)]) -> Published {
    let device = |(place, (product, memory)): (usize, &(&str, &str))| {
        json!({"name": format!("gpu-{place}"), "capacity": {"memory": {"value": memory}},
            "attributes": {"type": {"string": "gpu"}, "productName": {"string": product}}})
    };
    let devices: Vec<Value> = gpus.iter().enumerate().map(device).collect();
    let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
    let slice = json!({"metadata": {"name": node}, "spec": {
        "driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": devices}});
    let selector = json!({"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}});
    let class = json!({"metadata": {"name": "gpu.nvidia.com"}, "spec": {"selectors": [selector]}});
    let one = |object: Value| vec![object];
    Published {
        slices: Arc::new(serde_json::from_value(one(slice).into()).unwrap()),
        claims: Arc::default(),
        classes: Arc::new(serde_json::from_value(one(class).into()).unwrap()),
    }
}

#[test]
fn a_node_without_labels_has_the_gpus_that_their_driver_publishes() {
    let of = |published: Option<Published>| World { published, ..World::of(json!({}), &[unlabelled("a", 1)]) }.said();
    let (fits, reason, ..) = of(None);
    assert_eq!((fits, reason.as_str()), (None, "NodesUnknown"));
    let (fits, _, message, _) = of(Some(published("a", &[("NVIDIA H200", "143771Mi")])));
    assert_eq!(fits, Some(true), "{message}");
    assert!(message.starts_with("on 1 x NVIDIA H200 of 140.4 GiB: weights of "), "{message}");
    let (fits, reason, message, hopeless) = of(Some(published("a", &[("Tesla T4", "15360Mi")])));
    assert_eq!((fits, reason.as_str(), hopeless), (Some(false), "DoesNotFit", true), "{message}");
}

#[test]
fn gpus_of_a_class_are_those_of_nodes_that_no_device_plugin_knows() {
    let claimed = json!({"resources": {"gpus": 2, "deviceClass": "gpu.nvidia.com"}, "parallelism": {"tensor": 2}});
    let of = |published: Option<Published>| {
        World { published, ..World::of(claimed.clone(), &[unlabelled("a", 0), unlabelled("b", 8)]) }.said()
    };
    let h200 = ("NVIDIA H200", "143771Mi");
    let (fits, _, message, _) = of(Some(published("a", &[h200, h200])));
    assert_eq!(fits, Some(true), "{message}");
    assert!(message.starts_with("on 2 x NVIDIA H200 of "), "{message}");
    let (fits, _, message, _) = of(Some(published("a", &[h200])));
    assert_eq!(fits, None, "one is not two, and those of a device plugin are not claimed: {message}");
    assert!(message.contains("has 2 of DeviceClass gpu.nvidia.com: known once there is one"), "{message}");
    let (fits, _, message, _) = of(None);
    assert_eq!(fits, None);
    assert!(message.contains("serves no resource.k8s.io/v1"), "{message}");
}

#[test]
fn a_claim_may_get_the_larger_of_a_node_s_gpus_so_that_a_pod_is_not_hopeless() {
    let claimed = json!({"resources": {"gpus": 1, "deviceClass": "gpu.nvidia.com"}});
    let both = published("a", &[("NVIDIA H200", "143771Mi"), ("Tesla T4", "15360Mi")]);
    let world = World { published: Some(both), ..World::of(claimed, &[unlabelled("a", 0)]) };
    let (fits, reason, message, hopeless) = world.said();
    assert_eq!((fits, reason.as_str(), hopeless), (Some(false), "FitsSomeNodes", false), "{message}");
}
