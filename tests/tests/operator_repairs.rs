//! What the operator does about pods that are not as it made them, on a real API server: pods that a node refuses again and
//! again, and pods whose labels somebody took.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeSet,
    sync::LazyLock,
    thread::sleep,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use stoker_cluster::Audit;
use stoker_tests::operator::{Rig, condition, serves};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(40);
/// The second failure's successor waits for 10 s, the third's for 20 s.
const REFUSED_FOR: Duration = Duration::from_secs(15);

/// One cluster for all tests of this file; each has a deployment of its own.
static RIG: LazyLock<Rig> = LazyLock::new(|| Rig::start(Audit::Off).unwrap());

/// What a kubelet says that cannot give a pod its device.
fn refuse(rig: &Rig, pod: &str) {
    let status =
        json!({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices present"});
    let patch = Patch::Merge(json!({"status": status}));
    // The operator may have deleted it meanwhile.
    _ = rig.block_on(rig.api::<Pod>().patch_status(pod, &PatchParams::default(), &patch));
}

#[test]
fn pods_that_a_node_refuses_at_once_are_made_again_with_pauses_and_the_status_says_why() {
    let rig = &*RIG;
    let pod = json!({"nodeSelector": {"nobody": "has-this-label"}});
    rig.apply("refused", json!({"model": {"source": "builtin://ember"}, "pod": pod})).unwrap();
    let (mut refused, mut told, begun) = (BTreeSet::new(), None, Instant::now());
    while begun.elapsed() < REFUSED_FOR {
        for pod in rig.pods("refused").unwrap() {
            if refused.insert(pod.uid()) {
                refuse(rig, &pod.name_any());
            }
        }
        let now = condition(&rig.get("refused").unwrap(), "Degraded").filter(|(_, reason, _)| reason == "PodsFail");
        told = told.or(now);
        sleep(Duration::from_millis(100));
    }
    // At once, at once, after 10 s; one that came in the last moment.
    assert!((2..=4).contains(&refused.len()), "{} pods were made", refused.len());
    let (value, _, message) = told.expect("the status says that pods fail");
    assert_eq!(value, "True");
    assert!(message.contains("UnexpectedAdmissionError: no healthy devices present"), "{message}");
    rig.delete("refused").unwrap();
}

#[test]
fn a_pod_whose_labels_were_taken_is_named_and_replaced_under_another_name() {
    let rig = &*RIG;
    let drain = json!({"withdrawSeconds": 0, "deadlineSeconds": 5});
    let spec = |replicas| json!({"model": {"source": "builtin://ember"}, "replicas": replicas, "drain": drain});
    rig.apply("robbed", spec(1)).unwrap();
    rig.wait_ready("robbed", SOON).unwrap();
    let robbed = rig.pods("robbed").unwrap().remove(0).name_any();
    let labels = json!({"app.kubernetes.io/managed-by": null, "app.kubernetes.io/instance": null});
    let patch = Patch::Merge(json!({"metadata": {"labels": labels}}));
    rig.block_on(rig.api::<Pod>().patch(&robbed, &PatchParams::default(), &patch)).unwrap();

    rig.wait("another one serves and the first is named", SOON, |rig| {
        let (pods, deployment) = (rig.pods("robbed")?, rig.get("robbed")?);
        let told = condition(&deployment, "Degraded").unwrap_or_default();
        let named = deployment.status.is_some_and(|status| status.stray_pods == [robbed.clone()]);
        let said = told.0 == "True" && told.1 == "StrayPod" && told.2.contains(&robbed);
        Ok(named && said && pods.len() == 1 && serves(&pods[0]) && pods[0].name_any() != robbed)
    })
    .unwrap();
    rig.wait_ready("robbed", SOON).unwrap();

    rig.delete_pod(&robbed).unwrap();
    rig.wait("it is gone", SOON, |rig| Ok(rig.block_on(rig.api::<Pod>().get_opt(&robbed))?.is_none())).unwrap();
    // No event tells the operator; any other round sees it.
    rig.apply("robbed", spec(2)).unwrap();
    rig.wait("it is forgotten", SOON, |rig| {
        let deployment = rig.get("robbed")?;
        let fine = condition(&deployment, "Degraded").is_some_and(|(value, ..)| value == "False");
        Ok(fine && deployment.status.is_some_and(|status| status.stray_pods.is_empty() && status.ready_replicas == 2))
    })
    .unwrap();
    rig.delete("robbed").unwrap();
}
