//! Evictions, as node drains make them, and who may reach replicas, on a real API server with its disruption controller.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::{networking::v1::NetworkPolicy, policy::v1::PodDisruptionBudget},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::{
    ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::{InferenceDeployment, contract::DrainSettings};
use stoker_operator::{
    apply::Apply,
    desired::desired,
    metrics::Metrics,
    observe::{Child, Observed},
    plan::{Plan, Upkeep},
    validate::{Defaults, validate},
};
use stoker_tests::{cluster::run_with_input, operator::Rig};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);

/// One cluster for all tests of this file, one after another: one of them restarts the operator.
static RIG: LazyLock<Mutex<Rig>> = LazyLock::new(|| Mutex::new(Rig::start(Audit::Off).unwrap()));

fn rig() -> MutexGuard<'static, Rig> {
    RIG.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spec(replicas: u32) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas,
        "drain": {"deadlineSeconds": 5, "withdrawSeconds": 0},
    })
}

/// Asks as `kubectl drain` does for one pod; the API server's complaint when it refuses. The typed client would ask again and
/// again.
fn evict(rig: &Rig, pod: &str) -> Result<String, String> {
    let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}});
    let path = format!("/api/v1/namespaces/default/pods/{pod}/eviction");
    let mut kubectl = rig.cluster.control_plane.kubectl().unwrap();
    kubectl.args(["create", "--raw", &path, "-f", "-"]);
    run_with_input(kubectl, &eviction.to_string())
}

/// Waits until the disruption controller has counted for a budget that keeps `least` pods, and allows `allowed` evictions.
fn wait_counted(rig: &Rig, name: &str, least: i32, allowed: i32) {
    rig.wait(&format!("{name} keeps {least} and allows {allowed}"), SOON, |rig| {
        let budget = rig.block_on(rig.api::<PodDisruptionBudget>().get(name))?;
        let (spec, status) = (budget.spec.unwrap_or_default(), budget.status.unwrap_or_default());
        Ok(spec.min_available == Some(IntOrString::Int(least))
            && status.observed_generation == budget.metadata.generation
            && status.disruptions_allowed == Some(allowed))
    })
    .unwrap();
}

fn names(rig: &Rig, deployment: &str) -> Vec<String> {
    rig.pods(deployment).unwrap().iter().map(ResourceExt::name_any).collect()
}

/// Which pods these are: the name of one that went is free for its successor.
fn uids(rig: &Rig, deployment: &str) -> Vec<Option<String>> {
    rig.pods(deployment).unwrap().iter().map(ResourceExt::uid).collect()
}

#[test]
fn evictions_take_one_replica_at_a_time_and_the_last_one_too() {
    let rig = rig();
    rig.apply("chat", spec(3)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    wait_counted(&rig, "chat", 2, 1);
    let (pods, evicted) = (names(&rig, "chat"), uids(&rig, "chat").remove(0));
    // Nothing new can start, so nothing takes the place of the first.
    let node = rig.cluster.kubectl(&["get", "nodes", "-o", "name"]);
    rig.cluster.kubectl(&["cordon", node.trim()]);
    evict(&rig, &pods[0]).unwrap();
    let refused = evict(&rig, &pods[1]).expect_err("a second replica went with the first");
    assert!(refused.contains("violate the pod's disruption budget"), "{refused}");
    rig.cluster.kubectl(&["uncordon", node.trim()]);
    rig.wait("another replica is in its place", SOON, |rig| {
        let now = uids(rig, "chat");
        Ok(now.len() == 3 && !now.contains(&evicted))
    })
    .unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    wait_counted(&rig, "chat", 2, 1);
    evict(&rig, &pods[1]).unwrap();

    rig.apply("chat", spec(1)).unwrap();
    rig.wait("one is left", SOON, |rig| Ok(names(rig, "chat").len() == 1)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    wait_counted(&rig, "chat", 0, 1);
    let last = uids(&rig, "chat");
    evict(&rig, &names(&rig, "chat").remove(0)).expect("a node drain would wait forever");
    rig.wait("its successor is there", SOON, |rig| {
        let now = uids(rig, "chat");
        Ok(now.len() == 1 && now != last)
    })
    .unwrap();

    rig.apply("chat", spec(0)).unwrap();
    rig.wait("none is left", SOON, |rig| Ok(names(rig, "chat").is_empty())).unwrap();
    wait_counted(&rig, "chat", 0, 0);
    rig.delete("chat").unwrap();
    rig.wait("its budget went with it", SOON, |rig| {
        Ok(rig.block_on(rig.api::<PodDisruptionBudget>().get_opt("chat"))?.is_none())
    })
    .unwrap();
}

#[test]
fn a_network_policy_comes_and_goes_as_the_operator_is_told() {
    let mut rig = rig();
    rig.apply("fenced", spec(1)).unwrap();
    rig.wait_ready("fenced", SOON).unwrap();
    let pods = names(&rig, "fenced");
    let there = |rig: &Rig| Ok(rig.block_on(rig.api::<NetworkPolicy>().get_opt("fenced"))?.is_some());
    assert!(!there(&rig).unwrap(), "nobody asked for one");
    let peers = json!({"operator": {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "stoker-operator"}}}});
    rig.operator.restart_with(&["--replica-network-policy", &peers.to_string()]).unwrap();
    rig.wait("the policy is there", SOON, there).unwrap();
    rig.operator.restart_with(&[]).unwrap();
    rig.wait("the policy is gone", SOON, |rig| Ok(!there(rig)?)).unwrap();
    assert_eq!(names(&rig, "fenced"), pods, "neither rolls a replica");
    rig.delete("fenced").unwrap();
}

#[test]
fn what_was_changed_or_made_anew_since_it_was_seen_is_not_removed() {
    let rig = rig();
    // The deployment itself need not be there.
    let deployment: InferenceDeployment = serde_json::from_value(json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec(1),
        "metadata": {"name": "anew", "namespace": "default", "uid": "uid-anew", "generation": 1},
    }))
    .unwrap();
    let desired = desired(
        &validate(&deployment, &Defaults { agent_image: "agent:1".into(), ..Defaults::default() }).unwrap(),
        "",
    );
    let (client, metrics) = (rig.client(), Arc::new(Metrics::new().unwrap()));
    let apply = Apply { client, metrics, namespace: "default".into(), drain: DrainSettings::default() };
    let policies = rig.api::<NetworkPolicy>();
    let policy = serde_json::from_value(json!({"metadata": {"name": "anew"}, "spec": {"podSelector": {}}})).unwrap();
    let make = || rig.block_on(policies.create(&PostParams::default(), &policy)).unwrap();
    let left = |seen: &NetworkPolicy| {
        let plan = Plan { network_policy: Upkeep::Delete, ..Plan::default() };
        let network_policy = Child::Own(Arc::new(seen.clone()));
        let observed = Observed { network_policy, ..Observed::of(Arc::new(deployment.clone())) };
        let applied = rig.block_on(apply.run(&plan, &desired, &observed, Timestamp::now())).unwrap();
        assert_eq!(applied.refusals, []);
        rig.block_on(policies.get_opt("anew")).unwrap().map(|left| left.metadata.uid)
    };
    let seen = make();
    let patch = Patch::Merge(json!({"metadata": {"annotations": {"kept-by": "somebody"}}}));
    let changed = rig.block_on(policies.patch("anew", &PatchParams::default(), &patch)).unwrap();
    assert_eq!(left(&seen), Some(changed.metadata.uid.clone()), "somebody has a use for it");
    rig.block_on(policies.delete("anew", &DeleteParams::default())).unwrap();
    let anew = make();
    assert_eq!(left(&changed), Some(anew.metadata.uid.clone()), "it is another one");
    assert_eq!(left(&anew), None);
}
