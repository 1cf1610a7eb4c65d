//! GPUs of Dynamic Resource Allocation on a real control plane: Kubernetes' own controller makes claims, its own scheduler allocates devices
//! of slices that stand where a driver would have written them.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{collections::BTreeSet, time::Duration};

use k8s_openapi::api::{
    core::v1::{Node, Pod},
    resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ListParams, PostParams},
};
use serde_json::{Value, json};
use stoker_cluster::{ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::{
    cluster::built,
    operator::{NAMESPACE, Rig, condition, is_ready, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Long enough for a status that should not move to move.
const A_WHILE: Duration = Duration::from_secs(4);
const NEXT_IMAGE: &str = "stand-in/agent:2";
const CLASS: &str = "gpu.nvidia.com";

fn rig() -> Rig {
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    Rig::start_with(options, NodeOptions::default()).unwrap()
}

/// As the driver's chart makes it; pods may ask for it by the name of a device plugin's resource, too.
fn make_class(rig: &Rig) {
    let expression = "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'";
    let spec = json!({"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": "nvidia.com/gpu"});
    let class: DeviceClass = serde_json::from_value(json!({"metadata": {"name": CLASS}, "spec": spec})).unwrap();
    rig.block_on(Api::all(rig.client()).create(&PostParams::default(), &class)).unwrap();
}

/// So many GPUs on the only node, in place of those that were published before.
fn publish(rig: &Rig, gpus: usize, product: &str, memory: &str) {
    let nodes = Api::<Node>::all(rig.client());
    let node = rig.block_on(nodes.list(&ListParams::default())).unwrap().items[0].name_any();
    let device = |place: usize| {
        json!({"name": format!("gpu-{place}"), "capacity": {"memory": {"value": memory}},
            "attributes": {"type": {"string": "gpu"}, "productName": {"string": product}}})
    };
    let devices: Vec<Value> = (0..gpus).map(device).collect();
    let pool = json!({"name": node, "generation": 1, "resourceSliceCount": 1});
    let spec = json!({"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": devices});
    let slice: ResourceSlice = serde_json::from_value(json!({"metadata": {"name": "gpus"}, "spec": spec})).unwrap();
    let slices = Api::<ResourceSlice>::all(rig.client());
    _ = rig.block_on(slices.delete("gpus", &DeleteParams::default()));
    rig.block_on(slices.create(&PostParams::default(), &slice)).unwrap();
}

fn claimed(replicas: u32) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas, "resources": {"gpus": 1, "deviceClass": CLASS},
        "rollout": {"maxUnavailable": 1, "surgeSeconds": 2}, "drain": {"withdrawSeconds": 1, "deadlineSeconds": 20},
    })
}

/// Devices that pods hold.
fn held(rig: &Rig) -> BTreeSet<String> {
    let claims = Api::<ResourceClaim>::namespaced(rig.client(), NAMESPACE);
    let claims = rig.block_on(claims.list(&ListParams::default())).unwrap().items;
    let results = claims.into_iter().filter_map(|claim| claim.status?.allocation?.devices?.results);
    results.flatten().map(|result| result.device).collect()
}

/// Waits until a condition is as expected; its message.
fn told(rig: &Rig, type_: &str, status: &str, reason: &str) -> String {
    let mut told = String::new();
    rig.wait(&format!("{type_} is {status}, {reason}"), SOON, |rig| {
        let (found, why, message) = condition(&rig.get("chat")?, type_).unwrap_or_default();
        told = format!("{why}: {message}");
        Ok((found.as_str(), why.as_str()) == (status, reason))
    })
    .unwrap_or_else(|error| panic!("{error:#}, but {told}"));
    told
}

fn image_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.containers.first()?.image.as_deref()
}

#[test]
fn replicas_claim_devices_of_a_class_and_old_ones_make_room_for_new_ones() {
    let mut rig = rig();
    rig.cluster.node.add_image(NEXT_IMAGE, built("stand-in-agent"));
    rig.apply("chat", claimed(2)).unwrap();
    let message = told(&rig, "Fits", "Unknown", "NodesUnknown");
    assert!(message.contains("the cluster has no DeviceClass gpu.nvidia.com"), "{message}");
    make_class(&rig);
    publish(&rig, 2, "NVIDIA H200", "143771Mi");
    rig.wait_ready("chat", SOON).unwrap();
    assert_eq!(held(&rig).len(), 2);
    let message = told(&rig, "Fits", "True", "Fits");
    assert!(message.contains("on 1 x NVIDIA H200 of 140.4 GiB"), "{message}");

    // The third has no device left.
    rig.apply("chat", claimed(3)).unwrap();
    let message = told(&rig, "Degraded", "True", "Unschedulable");
    assert!(message.contains("cannot allocate all claims"), "{message}");
    rig.apply("chat", claimed(2)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    // Nor have those of a next revision, until old ones go for them.
    rig.operator.upgrade(NEXT_IMAGE).unwrap();
    rig.wait("both are of the next image", SOON * 2, |rig| {
        let pods = rig.pods("chat")?;
        let is_new = |pod: &Pod| serves(pod) && image_of(pod) == Some(NEXT_IMAGE);
        Ok(pods.len() == 2 && pods.iter().all(is_new) && is_ready(&rig.get("chat")?))
    })
    .unwrap();
    assert_eq!(held(&rig).len(), 2);

    let templates = Api::<ResourceClaimTemplate>::namespaced(rig.client(), NAMESPACE);
    let names = || {
        let all = rig.block_on(templates.list(&ListParams::default())).unwrap().items;
        all.iter().map(ResourceExt::name_any).collect::<Vec<_>>()
    };
    assert_eq!(names(), ["chat.1.gpu.nvidia.com"], "one for all revisions");
    rig.delete("chat").unwrap();
    rig.wait("claims and template go with the deployment", SOON, |rig| Ok(held(rig).is_empty() && names().is_empty()))
        .unwrap();
}

#[test]
fn a_class_gives_what_pods_ask_of_a_device_plugin() {
    let rig = rig();
    make_class(&rig);
    publish(&rig, 1, "Tesla T4", "16Mi");
    let spec = json!({"model": {"source": "builtin://ember"}, "replicas": 1, "resources": {"gpus": 1}});
    rig.apply("chat", spec).unwrap();
    let message = told(&rig, "Fits", "False", "DoesNotFit");
    assert!(message.contains("not on 1 x Tesla T4 of 16.0 MiB"), "{message}");
    // Its driver says something else, and with that there is room for the model.
    publish(&rig, 1, "NVIDIA H200", "143771Mi");
    told(&rig, "Fits", "True", "Fits");
    rig.wait_ready("chat", SOON).unwrap();
    assert_eq!(held(&rig), BTreeSet::from(["gpu-0".to_owned()]), "its scheduler made the claim");
}

#[test]
fn where_the_cluster_has_no_such_api_all_goes_on_and_a_class_is_refused_with_the_fix() {
    let options =
        ControlPlaneOptions { without: vec!["resource.k8s.io/v1".to_owned()], ..ControlPlaneOptions::default() };
    let rig = Rig::start_with(options, NodeOptions::default()).unwrap();
    rig.apply("plain", json!({"model": {"source": "builtin://ember"}, "replicas": 1})).unwrap();
    rig.wait("a pod is made", SOON, |rig| Ok(rig.pods("plain")?.len() == 1)).unwrap();
    rig.apply("chat", claimed(1)).unwrap();
    let message = told(&rig, "Ready", "False", "ChildRefused");
    assert!(message.contains("ResourceClaimTemplate chat.1.gpu.nvidia.com"), "{message}");
    assert!(message.contains("Kubernetes 1.34") && message.contains("remove resources.deviceClass"), "{message}");
    let message = told(&rig, "Fits", "Unknown", "NodesUnknown");
    assert!(message.contains("serves no resource.k8s.io/v1"), "{message}");
    std::thread::sleep(A_WHILE);
    assert!(rig.pods("chat").unwrap().is_empty());
}
