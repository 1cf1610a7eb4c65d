//! Which nodes a deployment's replicas may run on, and how many more of them each has room for. Pure.
//!
//! Counts what this operator's own pods ask for. Pods of others are not known here: a node that they fill is taken for free, and the scheduler
//! knows better.

use std::{collections::HashMap, sync::Arc};

use k8s_openapi::{
    api::core::v1::{Node, Pod},
    apimachinery::pkg::api::resource::Quantity,
};
use kube::ResourceExt;
use stoker_crds::{
    InferenceDeploymentSpec,
    devices::Gpus,
    nodes::{GpuName, Placement, is_closed},
    quantity::amount,
};
use stoker_replica::{Replica, Stage};

use super::Spot;
use crate::{validate::ValidatedDeployment, watched::Seen};

/// Taints that say how a node is at the moment begin so.
const STATES: &str = "node.kubernetes.io/";

/// What is known of a deployment and of where it could run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ground<'a> {
    /// The deployment.
    pub(crate) deployment: &'a ValidatedDeployment,
    /// Where it says that its pods may run.
    pub(crate) spec: &'a InferenceDeploymentSpec,
    /// Its replicas.
    pub(crate) replicas: &'a [Replica],
    /// The nodes.
    pub(crate) nodes: &'a Seen<Node>,
    /// The GPUs among what drivers publish.
    pub(crate) devices: &'a Gpus<'a>,
    /// Replicas' pods of all deployments.
    pub(crate) pods: &'a [Arc<Pod>],
}

/// The nodes; or why none can be chosen.
pub(crate) fn spots(ground: &Ground<'_>) -> Result<Vec<Spot>, String> {
    let Some(bytes) = ground.deployment.model_bytes() else {
        return Err("no replica has said yet which model it is and how large".to_owned());
    };
    let nodes = match ground.nodes {
        Seen::All(nodes) => nodes,
        Seen::Denied => {
            let why = "the operator may not list nodes: its chart gives that right where it watches all namespaces";
            return Err(why.to_owned());
        }
        Seen::NotYet => return Err("nodes were not listed yet".to_owned()),
    };
    let placement = Placement::of(ground.spec);
    let admitted = nodes.iter().filter(|node| !is_closed(node) && placement.admits(node));
    let by_node = by_node(ground.pods);
    let known = ground.deployment.preferred_nodes();
    Ok(admitted
        .map(|node| {
            let name = node.name_any();
            let here: Vec<&Replica> = ground.replicas.iter().filter(|replica| is_on(replica, &name)).collect();
            let pods = by_node.get(name.as_str()).map_or(&[][..], Vec::as_slice);
            Spot {
                room: room(node, pods, ground, bytes),
                replicas: here.len(),
                is_starting: here.iter().any(|replica| !replica.serves()),
                has_model: known.contains(&name.as_str()),
                is_troubled: is_troubled(node),
                node: name,
            }
        })
        .collect())
}

fn is_on(replica: &Replica, node: &str) -> bool {
    replica.pod.stage != Stage::Leaving && replica.is_live() && replica.pod.node.as_deref() == Some(node)
}

fn by_node(pods: &[Arc<Pod>]) -> HashMap<&str, Vec<&Pod>> {
    let mut by_node: HashMap<&str, Vec<&Pod>> = HashMap::new();
    for pod in pods.iter().filter(|pod| !has_ended(pod)) {
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            by_node.entry(node).or_default().push(pod);
        }
    }
    by_node
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Something other than a person keeps new pods away.
fn is_troubled(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.into_iter().any(|taint| taint.key.starts_with(STATES) && taint.effect != "PreferNoSchedule")
}

/// Further replicas that fit beside those pods and the model's bytes in memory. Of replicas that ask for nothing one more fits anywhere.
fn room(node: &Node, pods: &[&Pod], ground: &Ground<'_>, bytes: u64) -> u64 {
    let free = |name: &str| {
        let used: f64 = pods.iter().map(|pod| requested(pod, name)).sum();
        let kept = if name == "memory" { bytes as f64 } else { 0.0 };
        allocatable(node, name).map(|all| all - used - kept)
    };
    if free("memory").is_some_and(|free| free < 0.0) {
        return 0;
    }
    // Claims tell who has what a driver gives, whosever pods these are.
    let given = || ground.devices.given(node).map(|count| count.free as f64);
    let is_given = |name: &str| ground.spec.gpu_name() == GpuName::Resource(name);
    let free = |name: &str| free(name).or_else(|| given().filter(|_| is_given(name))).unwrap_or_default();
    let replica = &ground.deployment.replica;
    let asked = replica.resources.iter().filter_map(|(name, Quantity(text))| Some((name, amount(text)?)));
    let fits = asked.filter(|(_, asked)| *asked > 0.0).map(|(name, asked)| free(name) / asked);
    let claimed = replica.device_class.iter().map(|_| given().unwrap_or_default() / f64::from(replica.gpus));
    fits.chain(claimed).map(|fits| fits.max(0.0) as u64).min().unwrap_or(1)
}

fn allocatable(node: &Node, name: &str) -> Option<f64> {
    amount(&node.status.as_ref()?.allocatable.as_ref()?.get(name)?.0)
}

fn requested(pod: &Pod, name: &str) -> f64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref()?.get(name));
    requests.filter_map(|Quantity(text)| amount(text)).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use stoker_crds::{InferenceDeployment, devices::Published};
    use stoker_replica::{ObservedPod, Reading};

    use super::*;
    use crate::{
        devices::gpus,
        observe::fixture::observed_pod,
        validate::{Defaults, ModelDefaults, validate},
    };

    const GIB: i64 = 1 << 30;

    fn deployment(bytes: Option<i64>) -> InferenceDeployment {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": "chat", "namespace": "n", "uid": "u", "generation": 1, "resourceVersion": "1"},
            "spec": {
                "model": {"source": "hf://org/model"}, "resources": {"gpus": 2, "memory": "20Gi"},
                "scaling": {"max": 4, "standby": 2}, "pod": {"nodeSelector": {"pool": "gpu"}},
            },
            "status": {"model": {"source": "hf://org/model", "commit": commit, "bytes": bytes, "nodes": ["b"]}},
        }))
        .unwrap()
    }

    fn node(name: &str, spec: Value) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {"pool": "gpu"}}, "spec": spec,
            "status": {"allocatable": {"nvidia.com/gpu": "8", "memory": "100Gi"}},
        }))
        .unwrap()
    }

    fn pod(node: &str, requests: Value, phase: &str) -> Arc<Pod> {
        let containers = [json!({"name": "agent", "resources": {"requests": requests}})];
        let pod = json!({
            "metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": containers}, "status": {"phase": phase},
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn replica(node: &str, stage: Stage) -> Replica {
        let pod = ObservedPod { node: Some(node.to_owned()), ..observed_pod(stage) };
        Replica { pod, reading: Reading::default(), intent: None }
    }

    fn valid(object: &InferenceDeployment) -> ValidatedDeployment {
        let models = ModelDefaults { node_cache: Some("/models".into()), ..ModelDefaults::default() };
        let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
        validate(object, &defaults).unwrap()
    }

    fn seen(
        bytes: Option<i64>,
        nodes: Seen<Node>,
        pods: &[Arc<Pod>],
        replicas: &[Replica],
    ) -> Result<Vec<Spot>, String> {
        let object = deployment(bytes);
        let (valid, devices) = (valid(&object), Gpus::default());
        spots(&Ground { deployment: &valid, spec: &object.spec, replicas, nodes: &nodes, devices: &devices, pods })
    }

    #[test]
    fn room_is_what_pods_and_the_model_in_memory_leave_on_nodes_that_replicas_may_run_on() {
        let other_pool = Node { metadata: Default::default(), ..node("e", json!({})) };
        let taint = json!({"taints": [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]});
        let nodes = [
            node("a", json!({})),
            node("b", json!({})),
            node("c", taint),
            node("d", json!({"unschedulable": true})),
            other_pool,
        ];
        let five = json!({"nvidia.com/gpu": "5", "memory": "10Gi"});
        let pods = [
            pod("a", five.clone(), "Running"),
            pod("a", five, "Succeeded"),
            pod("b", json!({"nvidia.com/gpu": "2", "memory": "60Gi"}), "Running"),
        ];
        let replicas = [replica("a", Stage::Starting), replica("b", Stage::Serving)];
        let found = seen(Some(16 * GIB), Seen::All(Arc::new(nodes.to_vec())), &pods, &replicas).unwrap();
        let told = |spot: &Spot| {
            (spot.node.clone(), spot.room, spot.replicas, spot.is_starting, spot.has_model, spot.is_troubled)
        };
        let told: Vec<_> = found.iter().map(told).collect();
        let expected = [
            // Three GPUs are left, two a replica.
            ("a".to_owned(), 1, 1, true, false, false),
            // 100 - 60 - 16 GiB are left, 20 a replica.
            ("b".to_owned(), 1, 1, false, true, false),
            ("c".to_owned(), 4, 0, false, false, true),
        ];
        assert_eq!(told, expected);
        let large = seen(Some(101 * GIB), Seen::All(Arc::new(nodes.to_vec())), &[], &[]).unwrap();
        assert!(large.iter().all(|spot| spot.room == 0), "the model itself has no room: {large:?}");
    }

    #[test]
    fn room_on_nodes_of_a_driver_is_what_claims_leave() {
        let slice = |node: &str| {
            let devices = ["0", "1", "2", "3"].map(|name| json!({"name": name}));
            json!({"metadata": {"name": node}, "spec": {"driver": "gpu.nvidia.com", "nodeName": node, "devices": devices,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}}})
        };
        let held = |device: &str| {
            let result = json!({"driver": "gpu.nvidia.com", "pool": "a", "device": device, "request": "gpus"});
            json!({"metadata": {"name": device}, "spec": {}, "status": {"allocation": {"devices": {"results": [result]}}}})
        };
        let selector = json!({"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}});
        let spec = json!({"selectors": [selector], "extendedResourceName": "nvidia.com/gpu"});
        let published = Published {
            slices: Arc::new(serde_json::from_value(json!([slice("a"), slice("b")])).unwrap()),
            claims: Arc::new(serde_json::from_value(json!([held("0")])).unwrap()),
            classes: Arc::new(serde_json::from_value(json!([{"metadata": {"name": "gpu"}, "spec": spec}])).unwrap()),
        };
        let without_plugin = |name: &str| {
            let mut node = node(name, json!({}));
            node.status = serde_json::from_value(json!({"allocatable": {"memory": "100Gi"}})).unwrap();
            node
        };
        let nodes = Seen::All(Arc::new(["a", "b", "c"].map(without_plugin).to_vec()));
        for resources in [json!({"gpus": 2}), json!({"gpus": 2, "deviceClass": "gpu"})] {
            let mut object = deployment(Some(GIB));
            object.spec.resources = serde_json::from_value(resources.clone()).unwrap();
            let devices = gpus(Some(&published), &object.spec).unwrap();
            let (deployment, spec) = (&valid(&object), &object.spec);
            let ground = Ground { deployment, spec, replicas: &[], nodes: &nodes, devices: &devices, pods: &[] };
            let found = spots(&ground).unwrap();
            let rooms: Vec<u64> = found.iter().map(|spot| spot.room).collect();
            assert_eq!(rooms, [1, 2, 0], "{resources}");
        }
    }

    #[test]
    fn without_nodes_or_a_size_nobody_chooses() {
        let why = |bytes, nodes| seen(bytes, nodes, &[], &[]).unwrap_err();
        assert!(why(None, Seen::Denied).starts_with("no replica has said yet"));
        assert!(why(Some(1), Seen::Denied).contains("may not list nodes"));
        assert!(why(Some(1), Seen::NotYet).contains("not listed yet"));
    }
}
