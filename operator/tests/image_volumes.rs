//! Models in images that the cluster mounts: where it does, why not elsewhere, and what pods are made then.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use stoker_crds::{InferenceDeployment, devices::Published};
use stoker_operator::{
    desired::{Desired, desired},
    devices,
    image_volumes::{Delivery, Ground, ImageVolumes, Release},
    validate::{Defaults, ModelDefaults, ValidatedDeployment, validate},
    watched::Seen,
};

const FOLDER: &str = "#path=/models/chat";

fn image(rest: &str) -> String {
    format!("oci://registry.example:5000/team/chat{rest}")
}

fn by_digest() -> String {
    image(&format!("@sha256:{}{FOLDER}", digest()))
}

fn digest() -> String {
    "0a".repeat(32)
}

fn node(name: &str, kubelet: &str, runtime: &str) -> Value {
    let info = json!({
        "kubeletVersion": kubelet, "containerRuntimeVersion": runtime, "architecture": "", "bootID": "", "kernelVersion": "",
        "kubeProxyVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
    });
    json!({"metadata": {"name": name}, "status": {"nodeInfo": info, "allocatable": {"nvidia.com/gpu": "1"}}})
}

fn able(name: &str) -> Value {
    node(name, "v1.36.4", "containerd://2.1.0")
}

/// What is decided on.
struct Case {
    spec: Value,
    rule: ImageVolumes,
    server: &'static str,
    nodes: Seen<Node>,
    published: Option<Published>,
    cache: Option<String>,
}

impl Case {
    /// Where nothing speaks against mounting.
    fn of(source: &str) -> Self {
        let spec = json!({"model": {"source": source}, "resources": {"gpus": 1}});
        let (rule, server) = (ImageVolumes::Auto, "v1.35.0");
        Self { spec, rule, server, nodes: seen(&[able("a"), able("b")]), published: None, cache: None }
    }

    fn on(nodes: &[Value]) -> Self {
        Self { nodes: seen(nodes), ..Self::of(&by_digest()) }
    }

    fn with(path: &str, value: Value) -> Self {
        let mut case = Self::of(&by_digest());
        *case.spec.pointer_mut("").unwrap() = merged(case.spec.clone(), path, value);
        case
    }

    fn valid(&self) -> ValidatedDeployment {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": self.spec,
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1},
        });
        let object: InferenceDeployment = serde_json::from_value(object).unwrap();
        let models = ModelDefaults { node_cache: self.cache.clone(), ..ModelDefaults::default() };
        let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
        let (server, spec) = (Release::parse(self.server), &object.spec);
        let devices = devices::gpus(self.published.as_ref(), spec);
        let ground = Ground { rule: self.rule, server, nodes: &self.nodes, devices: devices.as_ref().ok(), spec };
        validate(&object, &defaults).unwrap().delivered_on(&ground)
    }

    fn delivery(&self) -> String {
        self.valid().delivery.map_or_else(String::new, |delivery| delivery.to_string())
    }

    fn made(&self) -> Desired {
        desired(&self.valid(), "")
    }
}

fn seen(nodes: &[Value]) -> Seen<Node> {
    Seen::All(Arc::new(nodes.iter().map(|node| serde_json::from_value(node.clone()).unwrap()).collect()))
}

/// The object with this field of one of its own.
fn merged(mut object: Value, path: &str, value: Value) -> Value {
    let (parent, field) = path.split_once('.').unwrap();
    object[parent][field] = value;
    object
}

#[test]
fn an_image_by_digest_and_folder_is_mounted_where_api_server_and_nodes_do_that() {
    let mounted = "mounted by the node";
    assert_eq!(Case::of(&by_digest()).delivery(), mounted);
    assert_eq!(Case::on(&[node("a", "v1.35.0+k3s1", "cri-o://1.33.0"), able("b")]).delivery(), mounted);
    assert_eq!(Case::on(&[node("a", "v1.35.2-gke.1", "containerd://2.2.0-rc.1")]).delivery(), mounted);
    assert_eq!(Case { cache: Some("/srv/models".into()), ..Case::of(&by_digest()) }.delivery(), mounted);
    // Other nodes are nothing to it.
    let mut cpus_only = node("old", "v1.30.0", "containerd://1.7.0");
    cpus_only["status"]["allocatable"] = json!({"cpu": "4"});
    assert_eq!(Case::on(&[cpus_only, able("b")]).delivery(), mounted);
    let mut tainted = node("old", "v1.30.0", "containerd://1.7.0");
    tainted["spec"] = json!({"taints": [{"key": "team", "value": "b", "effect": "NoSchedule"}]});
    assert_eq!(Case::on(&[tainted, able("b")]).delivery(), mounted);
    // Whoever says always has looked.
    for nodes in [Seen::Denied, Seen::NotYet, seen(&[node("a", "v1.33.0", "other://1")])] {
        let case = Case { rule: ImageVolumes::Always, server: "v1.33.1", nodes, ..Case::of(&by_digest()) };
        assert_eq!(case.delivery(), mounted);
    }
}

/// Kubelets of nodes whose GPUs no device plugin offers.
#[test]
fn nodes_whose_gpus_a_driver_gives_are_those_that_have_to_mount() {
    let bare = |mut node: Value| {
        node["status"]["allocatable"] = json!({"cpu": "4"});
        node
    };
    let nodes = [bare(able("a")), bare(node("old", "v1.30.0", "containerd://1.7.0"))];
    let slice = json!({"metadata": {"name": "a"}, "spec": {"driver": "gpu.nvidia.com", "nodeName": "a",
        "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "gpu-0"}]}});
    let selector = json!({"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}});
    let spec = json!({"selectors": [selector], "extendedResourceName": "nvidia.com/gpu"});
    let published = Published {
        slices: Arc::new(serde_json::from_value(json!([slice])).unwrap()),
        claims: Arc::default(),
        classes: Arc::new(serde_json::from_value(json!([{"metadata": {"name": "gpu"}, "spec": spec}])).unwrap()),
    };
    let claimed = json!({"gpus": 1, "deviceClass": "gpu"});
    for resources in [json!({"gpus": 1}), claimed.clone()] {
        let mut case = Case { published: Some(published.clone()), ..Case::on(&nodes) };
        case.spec["resources"] = resources;
        assert_eq!(case.delivery(), "mounted by the node");
    }
    // Where nobody knows what the class has it may be on any of them.
    let mut case = Case::on(&nodes);
    case.spec["resources"] = claimed;
    assert!(case.delivery().contains("node old runs kubelet v1.30.0"), "{}", case.delivery());
}

#[test]
fn an_image_that_is_not_mounted_says_what_would_make_it_so() {
    let refused = |case: Case, words: &[&str]| {
        let said = case.delivery();
        assert!(said.starts_with("fetched: "), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "{word} is not in: {said}"));
    };
    let of = || Case::of(&by_digest());
    refused(Case::of(&image(&format!(":v1{FOLDER}"))), &["names a tag", "name its digest"]);
    refused(Case { rule: ImageVolumes::Never, ..of() }, &["models.imageVolumes: never"]);
    refused(Case { server: "v1.34.9", ..of() }, &["Kubernetes 1.34", "on from 1.35", "models.imageVolumes: always"]);
    refused(Case { server: "", ..of() }, &["does not say its release"]);
    refused(Case { nodes: Seen::Denied, ..of() }, &["may not list nodes", "models.imageVolumes: always"]);
    refused(Case { nodes: Seen::NotYet, ..of() }, &["not listed yet"]);
    refused(Case::on(&[]), &["no node yet"]);
    refused(
        Case::on(&[able("a"), node("b", "v1.34.1", "containerd://2.1.0")]),
        &["node b runs kubelet v1.34.1", "1.35"],
    );
    refused(
        Case::on(&[able("a"), node("b", "v1.36.0", "containerd://1.7.27")]),
        &["node b runs containerd 1.7.27", "2.1"],
    );
    refused(Case::on(&[node("b", "v1.36.0", "cri-o://1.32.9")]), &["node b runs cri-o 1.32.9", "1.33"]);
    refused(Case::on(&[node("b", "v1.36.0", "docker://29.0")]), &["node b runs docker://29.0", "nobody here knows"]);
    refused(
        Case::on(&[json!({"metadata": {"name": "b"}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}})]),
        &["unknown release"],
    );
    let mut closed = node("b", "v1.30.0", "containerd://1.7.27");
    closed["spec"] = json!({"unschedulable": true});
    refused(Case::on(&[able("a"), closed]), &["node b runs kubelet v1.30.0"]);
    let old = |name| node(name, "v1.30.0", "containerd://1.7.27");
    refused(Case::on(&[old("a"), old("b"), old("c")]), &["node a runs", "so do 2 other nodes"]);
    let keyed = json!({"name": "pull", "key": "config"});
    refused(
        Case::with("model.tokenSecret", keyed),
        &["model.tokenSecret.key is config", "kubernetes.io/dockerconfigjson"],
    );
    refused(Case::with("model.cache", json!({"sizeLimit": "20Gi"})), &["model.cache", "remove it"]);
    let stands_by = Case { cache: Some("/srv/models".into()), ..Case::with("scaling.standby", json!(1)) };
    refused(Case { spec: merged(stands_by.spec.clone(), "scaling.max", json!(2)), ..stands_by }, &["scaling.standby"]);
    // Always is no word on what a tag is, or on where a claim's model is.
    let tagged = Case { rule: ImageVolumes::Always, ..Case::of(&image(FOLDER)) };
    refused(tagged, &["names a tag"]);
}

#[test]
fn where_nobody_says_the_folder_of_an_image_there_is_nothing_to_say() {
    let whole = image(&format!("@sha256:{}", digest()));
    for source in [whole.as_str(), "hf://org/model", "builtin://ember", "pvc://models/chat"] {
        assert_eq!(Case::of(source).delivery(), "", "{source}");
    }
}

fn spec_of(pod: &Pod) -> Value {
    serde_json::to_value(&pod.spec).unwrap()
}

fn named<'a>(list: &'a Value, field: &str, name: &str) -> &'a Value {
    list.as_array().unwrap().iter().find(|item| item[field] == name).unwrap_or(&Value::Null)
}

#[test]
fn a_pod_mounts_the_image_read_only_by_its_digest_with_the_source_s_secret() {
    let tagged = image(&format!(":v1@sha256:{}{FOLDER}", digest()));
    let mut case = Case::of(&tagged);
    case.spec["model"]["tokenSecret"] = json!({"name": "pull"});
    case.spec["pod"] = json!({"imagePullSecrets": [{"name": "own"}]});
    let spec = spec_of(&case.made().pod(0));
    let reference = format!("registry.example:5000/team/chat@sha256:{}", digest());
    let image = json!({"reference": reference, "pullPolicy": "IfNotPresent"});
    assert_eq!(named(&spec["volumes"], "name", "model")["image"], image);
    let agent = &spec["containers"][0];
    let mount = named(&agent["volumeMounts"], "name", "model");
    assert_eq!(mount, &json!({"name": "model", "mountPath": "/run/stoker/model/current", "readOnly": true}));
    assert_eq!(spec["imagePullSecrets"], json!([{"name": "own"}, {"name": "pull"}]));
    assert_eq!(spec["initContainers"], Value::Null, "nothing is fetched");
    assert_eq!(named(&spec["volumes"], "name", "model-cache"), &Value::Null);

    case.spec["pod"] = json!({"imagePullSecrets": [{"name": "pull"}]});
    assert_eq!(spec_of(&case.made().pod(0))["imagePullSecrets"], json!([{"name": "pull"}]), "once");
}

#[test]
fn mounted_or_fetched_the_agent_serves_the_same_path_of_the_same_revision() {
    let on_nodes = |rule| Case { rule, cache: Some("/srv/models".into()), ..Case::of(&by_digest()) };
    let [mounted, fetched] = [ImageVolumes::Auto, ImageVolumes::Never].map(|rule| on_nodes(rule).made());
    assert_eq!(mounted.revision, fetched.revision, "a cluster that learns it rolls nothing");
    assert_eq!(mounted.config_map.data, fetched.config_map.data);
    let settings = serde_json::to_string(&mounted.config_map.data).unwrap();
    assert!(settings.contains("/run/stoker/model/current/models/chat"), "{settings}");
    let fetcher = spec_of(&fetched.pod(0))["initContainers"][0].clone();
    let said: Vec<&str> = fetcher["args"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(said.join(" ").starts_with(&format!("fetch {} ", by_digest())), "{said:?}");
    assert!(said.join(" ").contains("--link /run/stoker/model/current/models/chat"), "{said:?}");
    // Nobody fills our cache with what a node keeps as an image.
    assert!(fetched.prefetch(&fetched.revision, "a").is_some());
    assert_eq!(mounted.prefetch(&mounted.revision, "a"), None);
    let awaits = |source: &str| Case::of(source).valid().awaits_commit();
    assert!(!awaits(&by_digest()) && awaits(&image(&format!(":v1{FOLDER}"))));
    assert!(matches!(on_nodes(ImageVolumes::Never).valid().delivery, Some(Delivery::Fetched(_))));
}
