//! InferencePools on a real API server: made for each deployment where the cluster has the kind, kept as they should be, gone with their
//! deployment or when nobody asks for pools any more; and nothing is missed where it has not.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use serde_json::{Value, json};
use stoker_cluster::{Audit, established};
use stoker_tests::operator::Rig;

const SOON: Duration = Duration::from_secs(120);
const POOLS: [&str; 4] = ["--gateway-service", "stoker-system/gateway", "--inference-pools", "FailClose"];
const KIND: &str = "inferencepools.inference.networking.k8s.io";

/// The published group, names and required fields, and nothing else of it.
fn crd() -> String {
    let port = json!({"type": "object", "required": ["number"], "properties": {
        "number": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 65535}}});
    let picker = json!({
        "type": "object", "required": ["name"],
        "properties": {
            "group": {"type": "string", "default": ""}, "kind": {"type": "string", "default": "Service", "minLength": 1},
            "name": {"type": "string", "minLength": 1}, "port": port,
            "failureMode": {"type": "string", "default": "FailClose", "enum": ["FailOpen", "FailClose"]},
        },
        "x-kubernetes-validations": [{"rule": "self.kind != 'Service' || has(self.port)", "message": "port is required"}],
    });
    let spec = json!({
        "type": "object", "required": ["selector", "targetPorts", "endpointPickerRef"],
        "properties": {
            "selector": {"type": "object", "required": ["matchLabels"], "properties": {
                "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}}},
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": port},
            "endpointPickerRef": picker,
        },
    });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": KIND, "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
        "spec": {
            "group": "inference.networking.k8s.io", "scope": "Namespaced",
            "names": {"kind": "InferencePool", "listKind": "InferencePoolList", "plural": "inferencepools", "singular": "inferencepool"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}}, "schema": {
                "openAPIV3Schema": {"type": "object", "required": ["spec"], "properties": {
                    "spec": spec,
                    "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}}}],
        },
    })
    .to_string()
}

struct Town(Rig);

impl Town {
    fn spec(&self, replicas: u32) {
        self.0.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": replicas})).unwrap();
    }

    fn pools(&self) -> Vec<Value> {
        let text = self.0.cluster.kubectl(&["get", KIND, "--all-namespaces", "-o", "json"]);
        serde_json::from_str::<Value>(&text).unwrap()["items"].as_array().cloned().unwrap()
    }

    fn wait_pools(&self, what: &str, are: impl Fn(&[Value]) -> bool) {
        self.0.wait(what, SOON, |_| Ok(are(&self.pools()))).unwrap();
    }

    fn wait_ready(&self) {
        self.0.cluster.kubectl(&["wait", "--for=condition=Ready", "infd/chat", "--timeout=120s"]);
    }
}

#[test]
fn each_deployment_has_a_pool_where_the_kind_is_and_it_is_kept() {
    let mut town = Town(Rig::start(Audit::Off).unwrap());
    town.0.cluster.apply(&crd()).unwrap();
    established(&town.0.cluster.control_plane, KIND).unwrap();
    town.spec(1);
    town.wait_ready();
    assert!(town.pools().is_empty(), "nobody asked for pools");

    town.0.operator.restart_with(&POOLS).unwrap();
    town.wait_pools("a pool", |pools| pools.len() == 1);
    let pool = town.pools().remove(0);
    let deployment = town.0.get("chat").unwrap();
    let owner = &pool["metadata"]["ownerReferences"][0];
    assert_eq!(
        (owner["kind"].as_str(), owner["uid"].as_str()),
        (Some("InferenceDeployment"), deployment.metadata.uid.as_deref())
    );
    assert_eq!(pool["metadata"]["name"], "chat");
    assert_eq!(pool["spec"]["targetPorts"], json!([{"number": 8000}]));
    let picker =
        json!({"group": "", "kind": "Service", "name": "chat", "port": {"number": 8000}, "failureMode": "FailClose"});
    assert_eq!(pool["spec"]["endpointPickerRef"], picker);
    let service = serde_json::to_value(town.0.service("chat").unwrap()).unwrap();
    assert_eq!(service["spec"]["ports"][0]["port"], 8000, "what it names is there");
    // It selects the replicas.
    let labels = pool["spec"]["selector"]["matchLabels"].as_object().unwrap();
    let query: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={}", value.as_str().unwrap())).collect();
    let pods = town.0.cluster.kubectl(&["get", "pods", "-l", &query.join(","), "-o", "name"]);
    assert_eq!(pods.lines().count(), 1, "{pods}");

    // Its status is the Gateway's, and is left alone; what somebody else changes of its spec is put right.
    let status = r#"{"status":{"parents":[{"parentRef":{"name":"front"}}]}}"#;
    town.0.cluster.kubectl(&["patch", KIND, "chat", "--subresource=status", "--type=merge", "-p", status]);
    let wrong = r#"{"spec":{"endpointPickerRef":{"name":"other"},"targetPorts":[{"number":9}]}}"#;
    town.0.cluster.kubectl(&["patch", KIND, "chat", "--type=merge", "-p", wrong]);
    town.wait_pools("it is put right", |pools| pools[0]["spec"] == pool["spec"]);
    assert_eq!(town.pools()[0]["status"]["parents"][0]["parentRef"]["name"], "front");
    town.0.cluster.kubectl(&["delete", KIND, "chat"]);
    town.wait_pools("it is made again", |pools| pools.len() == 1);

    town.0.operator.restart_with(&[&POOLS[..3], &["FailOpen"]].concat()).unwrap();
    town.wait_pools("the mode is told", |pools| pools[0]["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen");
    let version = town.pools()[0]["metadata"]["resourceVersion"].clone();
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(town.pools()[0]["metadata"]["resourceVersion"], version, "nothing is left to write");

    let foreign = json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": "theirs", "namespace": "default"}, "spec": pool["spec"],
    });
    town.0.cluster.apply(&foreign.to_string()).unwrap();
    town.0.operator.restart_with(&POOLS[..2]).unwrap();
    town.wait_pools("it goes where none are asked for", |pools| pools.len() == 1);
    assert_eq!(town.pools()[0]["metadata"]["name"], "theirs", "what somebody else made stays");
    town.0.cluster.kubectl(&["delete", KIND, "theirs"]);

    town.0.operator.restart_with(&POOLS).unwrap();
    town.wait_pools("it is there again", |pools| pools.len() == 1);
    town.0.delete("chat").unwrap();
    town.wait_pools("it goes with its deployment", <[Value]>::is_empty);
}

#[test]
fn without_the_kind_nothing_is_missed_and_pools_come_with_it() {
    let mut town = Town(Rig::start(Audit::Off).unwrap());
    town.0.operator.restart_with(&[&POOLS[..], &["--inference-pools-look-seconds", "2"]].concat()).unwrap();
    town.spec(1);
    town.wait_ready();
    town.spec(2);
    town.0
        .wait("two replicas", SOON, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 2)))
        .unwrap();
    town.0.cluster.apply(&crd()).unwrap();
    established(&town.0.cluster.control_plane, KIND).unwrap();
    town.wait_pools("a pool, once there is its kind", |pools| pools.len() == 1);
    // And without it again, rounds go on.
    town.0.cluster.kubectl(&["delete", "crd", KIND]);
    town.spec(1);
    town.0
        .wait("one replica", SOON, |rig| Ok(rig.get("chat")?.status.is_some_and(|status| status.ready_replicas == 1)))
        .unwrap();
}
