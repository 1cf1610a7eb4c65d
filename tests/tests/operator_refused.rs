//! What the API server refuses the operator, for a while: by a policy, for a webhook that nobody answers, in a namespace that
//! ends. The deployment says why in the API server's own words, the same is not asked for again and again, and when the
//! reason is gone all goes on.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{sync::LazyLock, thread::sleep, time::Duration};

use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_tests::{
    cluster::run_with_input,
    measured::writes_about,
    operator::{Rig, condition, is_ready, serves},
};

/// Long enough for two busy cores, and for the third pause.
const SOON: Duration = Duration::from_secs(60);
/// How long writes are counted.
const A_WHILE: Duration = Duration::from_secs(4);
/// Events of the object in that time, each of which causes a round.
const NUDGES: u32 = 16;
/// As chart and rig name it.
const OPERATOR: &str = "system:serviceaccount:stoker-system:stoker-operator";

/// Words of the policy.
const FORBIDDEN: &str = "the house rules forbid it";
/// Words of the API server about the webhook.
const UNANSWERED: &str = "failed calling webhook \"pods.broken.example\"";

/// The label by which what is refused to one deployment is allowed to others.
const INSTANCE: &str = "app.kubernetes.io/instance";

/// One cluster for all tests of this file; what is refused is refused to one deployment.
static RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start(Audit::Metadata).unwrap());

fn spec(replicas: u32) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas,
        "drain": {"withdrawSeconds": 0, "deadlineSeconds": 5},
    })
}

/// A policy under which the operator may not do this to pods of a deployment.
fn forbid(rig: &Rig, name: &str, operation: &str) {
    let metadata = json!({"name": format!("no-{name}")});
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": metadata,
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "objectSelector": {"matchLabels": {INSTANCE: name}},
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": [operation], "resources": ["pods"]},
                ],
            },
            "validations": [{
                "expression": format!("request.userInfo.username != '{OPERATOR}'"),
                "message": FORBIDDEN,
            }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": metadata,
        "spec": {"policyName": metadata["name"], "validationActions": ["Deny"]},
    });
    rig.cluster.apply(&policy.to_string()).unwrap();
    rig.cluster.apply(&binding.to_string()).unwrap();
}

fn allow(rig: &Rig, name: &str) {
    let policy = format!("no-{name}");
    rig.cluster.kubectl(&["delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", &policy]);
}

/// A webhook that is asked about every new pod of a deployment and that nobody answers.
fn break_webhook(rig: &Rig, name: &str) {
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let webhook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "broken"},
        "webhooks": [{
            "name": "pods.broken.example", "clientConfig": {"url": "https://127.0.0.1:1/"}, "rules": [rule],
            "objectSelector": {"matchLabels": {INSTANCE: name}},
            "failurePolicy": "Fail", "sideEffects": "None", "admissionReviewVersions": ["v1"], "timeoutSeconds": 1,
        }],
    });
    rig.cluster.apply(&webhook.to_string()).unwrap();
}

/// Waits until the API server refuses the operator a new pod of a deployment in these words: policies and webhooks take a
/// moment to be in force.
fn wait_in_force(rig: &Rig, name: &str, words: &str) {
    let container = json!({"name": "probe", "image": "probe"});
    let metadata = json!({"name": "probe", "labels": {INSTANCE: name}});
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}});
    wait_refused(rig, &["create", "-f", "-"], &pod.to_string(), words);
}

/// Waits until one with the operator's name and all rights may not do this, in these words.
fn wait_refused(rig: &Rig, args: &[&str], input: &str, words: &str) {
    let mut said = String::new();
    rig.wait("it is in force", SOON, |rig| {
        let mut kubectl = rig.cluster.control_plane.kubectl()?;
        // The operator may not read one pod by its name, which kubectl does before it patches.
        kubectl.args(args).args(["--dry-run=server", "--as", OPERATOR, "--as-group", "system:masters"]);
        said = run_with_input(kubectl, input).err().unwrap_or_default();
        Ok(said.contains(words))
    })
    .unwrap_or_else(|error| panic!("{error}\nkubectl said: {said}"));
}

/// Waits until a deployment says that it is degraded because it was refused something, in these words.
fn wait_told(rig: &Rig, name: &str, words: &str) {
    rig.wait(&format!("{name} says: {words}"), SOON, |rig| {
        let told = condition(&rig.get(name)?, "Degraded");
        Ok(told.is_some_and(|(status, reason, message)| {
            status == "True" && reason == "ChildRefused" && message.contains(words)
        }))
    })
    .unwrap();
    rig.wait(&format!("an Event about {name} says: {words}"), SOON, |rig| {
        let events = rig.block_on(rig.api::<Event>().list(&Default::default()))?.items;
        Ok(events.iter().any(|event| {
            let about = event.regarding.as_ref().and_then(|about| about.name.as_deref());
            let note = event.note.as_deref().unwrap_or_default();
            about == Some(name)
                && event.type_.as_deref() == Some("Warning")
                && event.reason.as_deref() == Some("ChildRefused")
                && note.contains(words)
        }))
    })
    .unwrap();
}

/// How often the operator has tried to write something about a deployment, refused writes included.
fn writes(rig: &Rig, name: &str) -> u64 {
    writes_about(&rig.cluster.control_plane, &rig.operator, name).unwrap().len() as u64
}

/// What the operator tries to write in a while in which the object has an event every quarter of a second.
fn writes_in_a_while(rig: &Rig, namespace: &str, name: &str) -> u64 {
    let before = writes(rig, name);
    assert!(before > 0, "the log says what is written");
    for nudge in 0..NUDGES {
        let nudge = format!("nudge={nudge}");
        rig.cluster.kubectl(&["annotate", "--overwrite", "-n", namespace, "infd", name, &nudge]);
        sleep(A_WHILE / NUDGES);
    }
    writes(rig, name) - before
}

/// Whether nothing about a deployment is written for two seconds. The round in which it went may still be at its writes.
fn is_quiet(rig: &Rig, name: &str) -> bool {
    let before = writes(rig, name);
    sleep(Duration::from_secs(2));
    writes(rig, name) == before
}

/// One try of one write at most falls into a while, by pauses of 10 s and more; and a status and an Event that were on their
/// way.
const FEW: u64 = 4;

#[test]
fn a_policy_that_forbids_pods_is_quoted_and_asked_rarely() {
    let rig = &*RIG;
    forbid(rig, "forbidden", "CREATE");
    wait_in_force(rig, "forbidden", FORBIDDEN);
    rig.apply("forbidden", spec(1)).unwrap();
    wait_told(rig, "forbidden", FORBIDDEN);
    let written = writes_in_a_while(rig, "default", "forbidden");
    assert!(written <= FEW, "{written} writes in {A_WHILE:?}");
    allow(rig, "forbidden");
    rig.wait_ready("forbidden", SOON).unwrap();
    rig.delete("forbidden").unwrap();
}

#[test]
fn replicas_that_may_not_be_told_to_leave_go_on_serving_and_leave_when_they_may() {
    let rig = &*RIG;
    rig.apply("kept", spec(2)).unwrap();
    rig.wait_ready("kept", SOON).unwrap();
    forbid(rig, "kept", "UPDATE");
    let pod = rig.pods("kept").unwrap().remove(0).name_any();
    let patch = r#"{"metadata":{"annotations":{"probe":"yes"}}}"#;
    wait_refused(rig, &["patch", "pod", &pod, "--type=merge", "-p", patch], "", FORBIDDEN);
    rig.scale("kept", 1).unwrap();
    wait_told(rig, "kept", FORBIDDEN);
    let written = writes_in_a_while(rig, "default", "kept");
    assert!(written <= FEW, "{written} writes in {A_WHILE:?}");
    assert_eq!(rig.pods("kept").unwrap().iter().filter(|pod| serves(pod)).count(), 2);
    allow(rig, "kept");
    rig.wait("one is left", SOON, |rig| Ok(rig.pods("kept")?.len() == 1 && is_ready(&rig.get("kept")?))).unwrap();
    let (degraded, _, _) = condition(&rig.get("kept").unwrap(), "Degraded").unwrap();
    assert_eq!(degraded, "False");
    rig.delete("kept").unwrap();
}

#[test]
fn a_webhook_that_nobody_answers_is_named_and_asked_rarely() {
    let rig = &*RIG;
    break_webhook(rig, "unanswered");
    wait_in_force(rig, "unanswered", UNANSWERED);
    rig.apply("unanswered", spec(1)).unwrap();
    wait_told(rig, "unanswered", UNANSWERED);
    let written = writes_in_a_while(rig, "default", "unanswered");
    assert!(written <= FEW, "{written} writes in {A_WHILE:?}");
    rig.cluster.kubectl(&["delete", "validatingwebhookconfiguration", "broken"]);
    rig.wait_ready("unanswered", SOON).unwrap();
    rig.delete("unanswered").unwrap();
}

/// Pods go first when a namespace ends. One that cannot go holds the rest up, its deployment included.
#[test]
fn a_namespace_that_ends_gets_no_pod_and_is_left_in_peace() {
    let rig = &*RIG;
    let kubectl = |args: &[&str]| rig.cluster.kubectl(&[args, &["-n", "ending"]].concat());
    rig.cluster.kubectl(&["create", "namespace", "ending"]);
    let deployment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "last", "namespace": "ending"}, "spec": spec(1),
    });
    rig.cluster.apply(&deployment.to_string()).unwrap();
    let said = |type_: &str| {
        let filter = format!("jsonpath={{.status.conditions[?(@.type=='{type_}')]}}");
        rig.cluster.try_kubectl(&["get", "infd", "last", "-n", "ending", "-o", &filter])
    };
    let says = |type_: &str, words: &str| said(type_).is_ok_and(|text| text.contains(words));
    rig.wait("it is ready", SOON, |_| Ok(says("Ready", r#""status":"True""#))).unwrap();
    let pod = kubectl(&["get", "pods", "-o", "name"]);
    kubectl(&["patch", pod.trim(), "--type=merge", "-p", r#"{"metadata":{"finalizers":["example.com/held"]}}"#]);
    rig.cluster.kubectl(&["delete", "namespace", "ending", "--wait=false"]);
    rig.wait("it says so", SOON, |_| Ok(says("Degraded", "because it is being terminated"))).unwrap();
    let written = writes_in_a_while(rig, "ending", "last");
    assert!(written <= FEW, "{written} writes in {A_WHILE:?}");

    kubectl(&["patch", pod.trim(), "--type=merge", "-p", r#"{"metadata":{"finalizers":null}}"#]);
    let gone = |rig: &Rig| rig.cluster.try_kubectl(&["get", "namespace", "ending"]).is_err();
    rig.wait("the namespace is gone", SOON, |rig| Ok(gone(rig))).unwrap();
    let at_its_end = writes(rig, "last");
    rig.wait("nothing is written for a deployment that is gone", SOON, |rig| Ok(is_quiet(rig, "last"))).unwrap();
    let written = writes(rig, "last") - at_its_end;
    assert!(written <= FEW, "{written} writes for a deployment that is gone");
    rig.apply("beside", spec(1)).unwrap();
    rig.wait_ready("beside", SOON).unwrap();
    rig.delete("beside").unwrap();
}
