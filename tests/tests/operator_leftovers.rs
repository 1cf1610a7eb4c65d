//! A deployment is made anew and Kubernetes overlooks what the one of before had, as its garbage collector does around a CRD that is
//! replaced: the new one takes it over, on a real API server whose garbage collector does nothing.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::api::{
    core::v1::{ConfigMap, Pod, Service},
    policy::v1::PodDisruptionBudget,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde_json::json;
use stoker_cluster::{ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::operator::{NAMESPACE, Rig, condition, serves};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(40);
/// Behind half a minute of patience.
const TAKEN_OVER: Duration = Duration::from_secs(80);

fn rig() -> Rig {
    let idle = vec!["garbage-collector-controller".to_owned()];
    let options = ControlPlaneOptions { controllers: Controllers::all(), idle, ..ControlPlaneOptions::default() };
    Rig::start_with(options, NodeOptions::default()).unwrap()
}

/// UIDs of what carries the deployment's name, and of those that own it.
fn owned<K: Resource<DynamicType = ()>>(rig: &Rig) -> (BTreeSet<String>, BTreeSet<String>) {
    let of_it = ListParams::default().labels("app.kubernetes.io/instance=again");
    let kind = ApiResource::erase::<K>(&());
    let api = Api::<DynamicObject>::namespaced_with(rig.client(), NAMESPACE, &kind);
    let objects = rig.block_on(api.list(&of_it)).unwrap().items;
    let owners = objects.iter().flat_map(|object| object.owner_references().iter().map(|owner| owner.uid.clone()));
    (objects.iter().filter_map(ResourceExt::uid).collect(), owners.collect())
}

#[test]
fn what_a_namesake_left_is_taken_over_with_its_address_and_its_replicas() {
    let rig = rig();
    let spec = json!({"model": {"source": "builtin://ember"}, "replicas": 2});
    rig.apply("again", spec.clone()).unwrap();
    rig.wait_ready("again", SOON).unwrap();
    let (first, address) = (rig.get("again").unwrap().uid(), rig.service("again").unwrap().spec.unwrap().cluster_ip);
    let (pods, owners) = owned::<Pod>(&rig);
    assert_eq!((pods.len(), owners), (2, first.clone().into_iter().collect()));
    rig.delete("again").unwrap();
    // The next second: whose an object is that was made in the same one nobody could tell.
    std::thread::sleep(Duration::from_millis(1100));
    rig.apply("again", spec.clone()).unwrap();
    let second = rig.get("again").unwrap().uid();
    assert_ne!(first, second);
    rig.wait("it says what it waits for", SOON, |rig| {
        let told = condition(&rig.get("again")?, "Ready");
        Ok(told.is_some_and(|(_, reason, message)| {
            reason == "NameTaken" && message.contains("of a deleted namesake") && message.contains("taken over")
        }))
    })
    .unwrap();
    assert_eq!(owned::<Pod>(&rig).0, pods, "none was made beside them");
    rig.ends_as_asked("again", &spec, TAKEN_OVER).unwrap();
    let second: BTreeSet<String> = second.into_iter().collect();
    assert_eq!(owned::<Pod>(&rig), (pods, second.clone()), "the same replicas, with what they had loaded");
    assert!(rig.pods("again").unwrap().iter().all(serves));
    assert_eq!(rig.service("again").unwrap().spec.unwrap().cluster_ip, address, "clients know it");
    for (kind, owners) in [
        ("Service", owned::<Service>(&rig).1),
        ("ConfigMap", owned::<ConfigMap>(&rig).1),
        ("PodDisruptionBudget", owned::<PodDisruptionBudget>(&rig).1),
    ] {
        assert_eq!(owners, second, "{kind}");
    }
}
