//! A control plane that goes from one user to the next: what the first one left is gone, what it changed is as before, and controllers work
//! for the second one as for the first.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    thread::sleep,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use stoker_cluster::{ControlPlane, established};
use stoker_tests::cluster::{lendable, run_with_input, wait_for};

/// All kinds are listed by kubectl again and again, beside controllers that other tests keep busy.
const RESTORED_WITHIN: Duration = Duration::from_secs(180);
/// Between looks.
const LOOK: Duration = Duration::from_millis(200);
/// Written by servers and controllers at any time, for nobody.
const TRANSIENT: [&str; 3] = ["events", "leases", "componentstatuses"];

fn kubectl(plane: &ControlPlane, args: &[&str], input: &str) -> String {
    let mut command: Command = plane.kubectl().unwrap();
    command.args(args);
    run_with_input(command, input).unwrap_or_else(|complaint| panic!("kubectl {}: {complaint}", args.join(" ")))
}

/// Everything that the API server lists, by kind, namespace and name, without what differs each time that it is written.
fn objects(plane: &ControlPlane) -> BTreeMap<String, Value> {
    let kinds = kubectl(plane, &["api-resources", "--verbs=list", "-o", "name"], "");
    let is_kept = |kind: &&str| !TRANSIENT.contains(&kind.split('.').next().unwrap_or_default());
    let kinds: Vec<&str> = kinds.lines().filter(is_kept).collect();
    let listed = kubectl(plane, &["get", &kinds.join(","), "--all-namespaces", "-o", "json"], "");
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let objects = listed["items"].as_array().unwrap().iter().cloned().map(|mut object| {
        let metadata = &mut object["metadata"];
        metadata["resourceVersion"].take();
        let name = format!("{} {}/{}", object["kind"], object["metadata"]["namespace"], object["metadata"]["name"]);
        (name, object)
    });
    objects.collect()
}

/// Waits until the API server lists what it listed `before`; says what differs when patience ends.
fn wait_until_as_before(plane: &ControlPlane, before: &BTreeMap<String, Value>) {
    let begun = Instant::now();
    loop {
        let now = objects(plane);
        let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
        let differing = names.into_iter().filter(|name| before.get(*name) != now.get(*name));
        let differing: Vec<_> = differing.map(|name| (name, before.get(name), now.get(name))).collect();
        if differing.is_empty() {
            return;
        }
        assert!(begun.elapsed() < RESTORED_WITHIN, "name, as it was, as it is: {differing:#?}");
        sleep(LOOK);
    }
}

/// Somebody who leaves much behind, some of it behind finalizers, and spoils what was there.
fn use_carelessly(plane: &ControlPlane) {
    let kind = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "kilns.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "kilns", "singular": "kiln", "kind": "Kiln", "listKind": "KilnList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object"}}}],
        },
    });
    kubectl(plane, &["apply", "-f", "-"], &kind.to_string());
    established(plane, "kilns.example.com").unwrap();
    kubectl(plane, &["create", "namespace", "stoker-system"], "");
    let objects = [
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["example.com/never"]}}),
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-0"}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}, "spec": {"ports": [{"port": 80}]}}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "lonely"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}),
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "operator", "namespace": "stoker-system"}}),
        json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"},
            "spec": {"model": {"source": "builtin://ember"}},
        }),
    ];
    kubectl(plane, &["apply", "-f", "-"], &json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string());
    kubectl(
        plane,
        &["create", "-f", "-"],
        &json!({"apiVersion": "example.com/v1", "kind": "Kiln", "metadata": {"name": "hot"}}).to_string(),
    );
    kubectl(plane, &["delete", "clusterrole", "view"], "");
    kubectl(plane, &["label", "namespace", "default", "spoilt=yes"], "");
    kubectl(plane, &["annotate", "crd", "inferencedeployments.stoker.dev", "spoilt=yes"], "");
}

#[test]
fn the_next_one_finds_it_as_new() {
    let mut owner = ControlPlane::start(lendable()).unwrap();
    let mut baseline = owner.baseline().unwrap();
    let before = objects(&owner);
    for _ in 0..2 {
        let borrowed = ControlPlane::borrow(&owner.lease()).unwrap();
        use_carelessly(&borrowed);
        wait_for("the controllers make what belongs to a namespace", || {
            kubectl(&borrowed, &["get", "serviceaccounts", "-n", "stoker-system"], "").contains("default").then_some(())
        });
        drop(borrowed);
        assert_ne!(objects(&owner), before);
        owner.restore(&mut baseline).unwrap();
        wait_until_as_before(&owner, &before);
        let lease = ["get", "leases", "-n", "stoker-system", "-o", "name"];
        assert_eq!(kubectl(&owner, &lease, ""), "", "an operator that begins waits for nobody");
    }
}
