//! Budgets on a real control plane: GPUs are lent, given back by drain to who has the higher priority, and refused with who has them.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use stoker_cluster::{Capacity, ControlPlaneOptions, Controllers, Gpus, NodeOptions};
use stoker_crds::{InferenceBudget, InferenceDeployment};
use stoker_tests::operator::{NAMESPACE, Rig, condition, serves};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Long enough for something that should not happen.
const A_WHILE: Duration = Duration::from_secs(6);
/// The other namespace.
const OTHER: &str = "other";

fn applying() -> PatchParams {
    PatchParams { field_validation: Some(kube::api::ValidationDirective::Strict), ..PatchParams::apply("test").force() }
}

fn deployments(rig: &Rig, namespace: &str) -> Api<InferenceDeployment> {
    Api::namespaced(rig.client(), namespace)
}

/// A deployment of one GPU a replica.
fn deploy(rig: &Rig, namespace: &str, name: &str, replicas: u32) {
    let spec = json!({"model": {"source": "builtin://ember"}, "resources": {"gpus": 1}, "replicas": replicas,
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0}, "rollout": {"progressDeadlineSeconds": 30}});
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec});
    rig.block_on(deployments(rig, namespace).patch(name, &applying(), &Patch::Apply(object))).unwrap();
}

fn budget(rig: &Rig, namespace: &str, name: &str, spec: Value) -> kube::Result<InferenceBudget> {
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceBudget", "metadata": {"name": name}, "spec": spec});
    let budgets = Api::<InferenceBudget>::namespaced(rig.client(), namespace);
    rig.block_on(budgets.patch(name, &applying(), &Patch::Apply(object)))
}

fn serving(rig: &Rig, namespace: &str, name: &str) -> Result<usize> {
    let of = ListParams::default().labels(&format!("app.kubernetes.io/instance={name}"));
    let pods = rig.block_on(Api::<Pod>::namespaced(rig.client(), namespace).list(&of))?;
    Ok(pods.items.iter().filter(|pod| serves(pod)).count())
}

/// Waits until so many replicas of a deployment serve, and as many are granted; who has those that are missing.
fn settles(rig: &Rig, namespace: &str, name: &str, replicas: usize) -> Vec<String> {
    let mut blocked_by = Vec::new();
    rig.wait(&format!("{replicas} of {namespace}/{name} serve"), SOON, |rig| {
        let deployment = rig.block_on(deployments(rig, namespace).get(name))?;
        let budget = deployment.status.and_then(|status| status.budget).unwrap_or_default();
        blocked_by = budget.blocked_by;
        Ok(serving(rig, namespace, name)? == replicas && budget.granted as usize == replicas)
    })
    .unwrap();
    blocked_by
}

fn said(rig: &Rig, namespace: &str, name: &str, type_: &str) -> (String, String, String) {
    let deployment = rig.block_on(deployments(rig, namespace).get(name)).unwrap();
    condition(&deployment, type_).unwrap_or_default()
}

fn rig(gpus: u32) -> Rig {
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let capacity = Capacity { gpus: Gpus::Pretended(gpus), ..Capacity::default() };
    let rig = Rig::start_with(options, NodeOptions { capacity, ..NodeOptions::default() }).unwrap();
    let other: Namespace = serde_json::from_value(json!({"metadata": {"name": OTHER}})).unwrap();
    rig.block_on(Api::<Namespace>::all(rig.client()).create(&PostParams::default(), &other)).unwrap();
    rig
}

#[test]
fn gpus_are_lent_and_come_back_to_the_higher_priority_by_drain_and_wait_for_an_equal() {
    let mut rig = rig(4);
    budget(&rig, NAMESPACE, "default", json!({"gpus": 2, "priority": 1})).unwrap();
    budget(&rig, OTHER, "default", json!({"gpus": 2, "borrowing": {}})).unwrap();

    // Nobody uses the first one's: the other namespace has all four.
    deploy(&rig, OTHER, "batch", 4);
    assert!(settles(&rig, OTHER, "batch", 4).is_empty());
    let (granted, reason, message) = said(&rig, OTHER, "batch", "Granted");
    assert_eq!((granted.as_str(), reason.as_str()), ("True", "Granted"), "{message}");

    // It is owed two, and its priority is higher.
    deploy(&rig, NAMESPACE, "chat", 2);
    settles(&rig, NAMESPACE, "chat", 2);
    assert_eq!(settles(&rig, OTHER, "batch", 2), ["default/chat"]);
    let (ready, reason, message) = said(&rig, OTHER, "batch", "Ready");
    assert_eq!((ready.as_str(), reason.as_str()), ("False", "NothingToBorrow"), "{message}");
    assert!(
        message.starts_with("2 of 4 replicas with a GPU each are granted") && message.contains("held by default/chat"),
        "{message}"
    );
    rig.wait("the budget says so", SOON, |rig| {
        let budgets = Api::<InferenceBudget>::namespaced(rig.client(), OTHER);
        let status = rig.block_on(budgets.get("default"))?.status.unwrap_or_default();
        Ok((status.wanted_gpus, status.granted_gpus, status.borrowed_gpus) == (4, 2, 0) && status.waiting == ["batch"])
    })
    .unwrap();

    // Of the same priority it waits for what it lent, and knows who has it; an operator that starts anew says the same.
    budget(&rig, NAMESPACE, "default", json!({"gpus": 2})).unwrap();
    deploy(&rig, NAMESPACE, "chat", 0);
    settles(&rig, OTHER, "batch", 4);
    deploy(&rig, NAMESPACE, "chat", 2);
    rig.wait("it waits", SOON, |rig| Ok(said(rig, NAMESPACE, "chat", "Ready").1 == "BudgetLent")).unwrap();
    rig.operator.restart_with(&[]).unwrap();
    std::thread::sleep(A_WHILE);
    assert_eq!(settles(&rig, NAMESPACE, "chat", 0), ["other/batch"]);
    settles(&rig, OTHER, "batch", 4);

    // As soon as the other one wants less there is room.
    deploy(&rig, OTHER, "batch", 3);
    settles(&rig, NAMESPACE, "chat", 1);
    settles(&rig, OTHER, "batch", 3);
}

#[test]
fn a_grant_that_finds_no_room_goes_to_who_wants_it() {
    // There are fewer GPUs than budgets say, as while a node is repaired.
    let rig = rig(2);
    budget(&rig, NAMESPACE, "default", json!({"gpus": 3})).unwrap();
    budget(&rig, OTHER, "default", json!({"gpus": 0, "borrowing": {}})).unwrap();
    deploy(&rig, NAMESPACE, "chat", 3);
    rig.wait("the third finds no room", SOON, |rig| Ok(said(rig, NAMESPACE, "chat", "Ready").1 == "Unschedulable"))
        .unwrap();
    deploy(&rig, OTHER, "batch", 1);
    rig.wait("all is granted", SOON, |rig| Ok(said(rig, OTHER, "batch", "Granted").1 == "NothingToBorrow")).unwrap();
    // The least that rollout.progressDeadlineSeconds may be.
    assert_eq!(settles(&rig, NAMESPACE, "chat", 2), ["other/batch"]);
    // Each deployment's status is a write of its own.
    rig.wait("the other one has it", SOON, |rig| Ok(said(rig, OTHER, "batch", "Granted").0 == "True")).unwrap();
}

#[test]
fn what_contradicts_itself_is_refused_with_the_field_and_the_fix() {
    let rig = rig(4);
    let refused = |name: &str, spec: Value, words: &[&str]| {
        let answer =
            budget(&rig, NAMESPACE, name, spec.clone()).expect_err(&format!("{spec} was accepted")).to_string();
        words.iter().for_each(|word| assert!(answer.contains(word), "{spec}: no {word:?} in: {answer}"));
    };
    refused("default", json!({"gpus": 0}), &["spec.gpus", "set gpus to at least 1, or borrowing: {}"]);
    refused("second", json!({"gpus": 1}), &["metadata.name", "its name is default"]);
    refused("default", json!({"gpus": 1, "priority": 5000}), &["spec.priority", "1000"]);
    refused("default", json!({"gpus": 1, "priority": "after team-b"}), &["priority"]);
    refused("default", json!({"gpus": 1, "borrowing": {"maxGpus": 0}}), &["spec.borrowing.maxGpus", "1"]);
    refused("default", json!({"gpus": 1, "lending": 3}), &["lending"]);
    budget(&rig, NAMESPACE, "default", json!({"gpus": 0, "borrowing": {"maxGpus": 2}, "priority": -5})).unwrap();

    // Its own is nothing, and nobody lends: no pod is made, and one without GPUs needs no grant.
    deploy(&rig, NAMESPACE, "chat", 2);
    rig.apply("cpu", json!({"model": {"source": "builtin://ember"}})).unwrap();
    rig.wait_ready("cpu", SOON).unwrap();
    rig.wait("it says why there is none", SOON, |rig| Ok(said(rig, NAMESPACE, "chat", "Ready").1 == "NothingToBorrow"))
        .unwrap();
    assert!(rig.pods("chat").unwrap().is_empty());
}
