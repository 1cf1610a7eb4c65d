//! The PodDisruptionBudget and the NetworkPolicy of a deployment: what they say for a spec, and what a plan does about
//! those that are there.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::{networking::v1::NetworkPolicy, policy::v1::PodDisruptionBudget};
use serde_json::{Value, json};
use stoker_crds::InferenceDeployment;
use stoker_operator::{
    desired::{Desired, desired},
    observe::{Child, Holder, Observed},
    peers::Peers,
    plan::{self, Plan, Upkeep},
    validate::{Defaults, ValidatedDeployment, validate},
};

const OPERATOR: &str = "{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: stoker-system}}, podSelector: {matchLabels: {app.kubernetes.io/name: stoker-operator}}}";

fn yaml(text: &str) -> Value {
    serde_norway::from_str(text).unwrap()
}

fn deployment(more: &str) -> InferenceDeployment {
    let mut spec = json!({"model": {"source": "builtin://ember"}});
    spec.as_object_mut().unwrap().extend(yaml(more).as_object().unwrap().clone());
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
        "metadata": {"name": "chat", "namespace": "team", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    serde_json::from_value(object).unwrap()
}

fn peers(inference: &str) -> Peers {
    serde_json::from_value(yaml(&format!("{{operator: {OPERATOR}, inference: {inference}}}"))).unwrap()
}

fn valid(deployment: &InferenceDeployment, peers: Option<Peers>) -> ValidatedDeployment {
    validate(deployment, &Defaults { agent_image: "agent:1".into(), peers, ..Defaults::default() }).unwrap()
}

/// What a plan does beside these two children, all others being as they should be.
fn planned(
    more: &str,
    peers: Option<Peers>,
    children: impl FnOnce(&Desired) -> (Child<PodDisruptionBudget>, Child<NetworkPolicy>),
) -> Plan {
    let deployment = deployment(more);
    let valid = valid(&deployment, peers);
    let desired = desired(&valid, "");
    let (budget, network_policy) = children(&desired);
    let observed = Observed {
        service: Child::Own(Arc::new(desired.service.clone())),
        config_maps: [&desired.config_map, &desired.keys].map(|map| Child::Own(Arc::new(map.clone()))).into(),
        budget,
        network_policy,
        ..Observed::of(Arc::new(deployment))
    };
    plan::plan(&valid, &desired, &observed, Timestamp::UNIX_EPOCH)
}

fn foreign<K>() -> Child<K> {
    Child::Foreign { name: "chat".into(), holder: Holder::Other }
}

fn own<K>(object: K) -> Child<K> {
    Child::Own(Arc::new(object))
}

#[test]
fn all_replicas_stay_but_one_or_those_that_may_be_missing_and_the_last_may_go() {
    for (spec, least) in [
        ("{}", 0),
        ("replicas: 0", 0),
        ("replicas: 1", 0),
        ("replicas: 2", 1),
        ("replicas: 1000", 999),
        // The number is the operator's own: such a deployment has no spec.replicas.
        ("scaling: {min: 3, max: 8}", 2),
        (r#"{replicas: 10, rollout: {minAvailable: "70%"}}"#, 7),
        (r#"{replicas: 10, rollout: {minAvailable: "6"}}"#, 6),
        ("{replicas: 10, rollout: {maxUnavailable: 1}}", 9),
        (r#"{replicas: 10, rollout: {minAvailable: "100%"}}"#, 9),
    ] {
        let budget = desired(&valid(&deployment(spec), None), "").budget;
        let expected = yaml(&format!(
            "{{minAvailable: {least}, unhealthyPodEvictionPolicy: AlwaysAllow, selector: {{matchLabels: {{app.kubernetes.io/managed-by: stoker, app.kubernetes.io/instance: chat, app.kubernetes.io/component: agent}}}}}}"
        ));
        assert_eq!(serde_json::to_value(budget.spec).unwrap(), expected, "{spec}");
    }
}

#[test]
fn the_budget_goes_with_its_deployment_and_follows_it() {
    let made = desired(&valid(&deployment("replicas: 2"), None), "").budget;
    let owner = &made.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str()), ("InferenceDeployment", "uid-chat"));
    let moves =
        |spec: &str, budget: Child<PodDisruptionBudget>| planned(spec, None, |_| (budget, Child::Absent)).apply_budget;
    assert!(moves("replicas: 2", Child::Absent));
    assert!(!moves("replicas: 2", own(made.clone())));
    assert!(moves("replicas: 3", own(made)));
}

#[test]
fn a_budget_that_somebody_else_made_stands_in_the_place_of_ours() {
    let plan = planned("replicas: 2", None, |_| (foreign(), Child::Absent));
    assert!(!plan.apply_budget && plan.taken.is_empty(), "{plan}");
    assert_eq!(plan.pods.create.len(), 2, "replicas are made all the same");
}

#[test]
fn only_the_operator_and_gateways_reach_the_admin_port() {
    let policy_of = |peers: Peers| {
        let made = desired(&valid(&deployment("{}"), Some(peers)), "").network_policy.unwrap();
        serde_json::to_value(made.spec).unwrap()
    };
    let policy = |inference: &str| policy_of(peers(inference));
    let expected_of = |from: &str, admin: &str| {
        yaml(&format!(
            "{{policyTypes: [Ingress], podSelector: {{matchLabels: {{app.kubernetes.io/managed-by: stoker, app.kubernetes.io/instance: chat, app.kubernetes.io/component: agent}}}}, ingress: [{{{from}ports: [{{port: 8000, protocol: TCP}}]}}, {{from: [{admin}], ports: [{{port: 8001, protocol: TCP}}]}}, {{from: [{{podSelector: {{matchLabels: {{app.kubernetes.io/managed-by: stoker, app.kubernetes.io/component: agent}}}}}}], ports: [{{port: 8002, protocol: TCP}}]}}]}}"
        ))
    };
    let expected = |from: &str| expected_of(from, OPERATOR);
    assert_eq!(policy("[]"), expected(""), "everybody may ask");
    let gateway = "{namespaceSelector: {matchLabels: {team: gateway}}}";
    assert_eq!(policy(&format!("[{gateway}]")), expected(&format!("from: [{gateway}, {OPERATOR}], ")));
    let with_gateways = Peers { gateways: Some(serde_json::from_value(yaml(gateway)).unwrap()), ..peers("[]") };
    assert_eq!(policy_of(with_gateways), expected_of("", &format!("{OPERATOR}, {gateway}")));
    assert_eq!(desired(&valid(&deployment("{}"), None), "").network_policy, None);
}

#[test]
fn a_network_policy_is_made_kept_and_removed_as_the_operator_is_told() {
    let upkeep = |peers: Option<Peers>, there: Child<NetworkPolicy>| {
        let plan = planned("{}", peers, |desired| (own(desired.budget.clone()), there));
        (plan.network_policy, plan.taken.len())
    };
    let made = || desired(&valid(&deployment("{}"), Some(peers("[]"))), "").network_policy.unwrap();
    assert_eq!(upkeep(Some(peers("[]")), Child::Absent), (Upkeep::Apply, 0));
    assert_eq!(upkeep(Some(peers("[]")), own(made())), (Upkeep::Leave, 0));
    assert_eq!(upkeep(Some(peers("[{podSelector: {}}]")), own(made())), (Upkeep::Apply, 0));
    assert_eq!(upkeep(None, own(made())), (Upkeep::Delete, 0));
    assert_eq!(upkeep(None, Child::Absent), (Upkeep::Leave, 0));
    // Asked for and not to be had: said, and nothing is done.
    assert_eq!(upkeep(Some(peers("[]")), foreign()), (Upkeep::Leave, 1));
    assert_eq!(upkeep(None, foreign()), (Upkeep::Leave, 0));
}

#[test]
fn no_policy_is_in_the_revision() {
    let revision = |peers: Option<Peers>| desired(&valid(&deployment("{}"), peers), "").revision;
    assert_eq!(revision(None), revision(Some(peers("[]"))), "switching it rolls nobody");
}
