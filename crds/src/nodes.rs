//! What a cluster's nodes have for a replica: kinds of GPUs by the labels that device plugins set or by what drivers publish, what is free of
//! them, and which nodes its pods may run on at all. Pure; who asks the API server is elsewhere.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::api::core::v1::{Affinity, Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration};
use kube::ResourceExt;
use stoker_fit::gpu::Card;

use crate::{
    InferenceDeploymentSpec,
    devices::{GpuCount, Gpus},
    quantity::amount,
};

/// What NVIDIA's device plugin calls a GPU.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
/// What Kubernetes calls the devices of a class where they are counted as a resource: this and the name of the class.
pub(crate) const RESOURCE_OF_CLASS: &str = "deviceclass.resource.kubernetes.io/";
/// Label with a GPU's product.
pub const PRODUCT: &str = "nvidia.com/gpu.product";
/// Taints that say how a node is at the moment (closed, not ready, short of memory), and not whom it is for.
const STATES: &str = "node.kubernetes.io/";
/// Label with a GPU's memory in MiB.
pub const MEMORY: &str = "nvidia.com/gpu.memory";

/// What a pod asks for GPUs by.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GpuName<'a> {
    /// An extended resource.
    Resource(&'a str),
    /// A DeviceClass.
    Class(&'a str),
}

impl Default for GpuName<'_> {
    fn default() -> Self {
        Self::Resource(GPU_RESOURCE)
    }
}

impl GpuName<'_> {
    /// The resource that they are counted as.
    pub fn counted_as(&self) -> String {
        match self {
            Self::Resource(name) => (*name).to_owned(),
            Self::Class(name) => format!("{RESOURCE_OF_CLASS}{name}"),
        }
    }
}

impl fmt::Display for GpuName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Resource(name) => f.write_str(name),
            Self::Class(name) => write!(f, "DeviceClass {name}"),
        }
    }
}

/// Nodes with GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuKind {
    /// The GPU.
    pub card: Card,
    /// Its name, as the nodes' labels say it.
    pub product: String,
    /// Such nodes.
    pub nodes: usize,
    /// GPUs that no pod asked for, on all of them.
    pub free: u64,
    /// Replicas that have room there now.
    pub room_for: u64,
}

/// Which nodes a replica's pods may run on.
#[derive(Clone, Debug, Default)]
pub struct Placement<'a> {
    /// What its pods ask for GPUs by.
    pub gpus: GpuName<'a>,
    selector: BTreeMap<String, String>,
    tolerations: Vec<Toleration>,
    affinity: Option<Affinity>,
}

impl<'a> Placement<'a> {
    /// As a spec says.
    pub fn of(spec: &'a InferenceDeploymentSpec) -> Self {
        let pod = spec.pod.clone().unwrap_or_default();
        Self {
            gpus: spec.gpu_name(),
            selector: pod.node_selector,
            tolerations: pod.tolerations,
            affinity: pod.affinity,
        }
    }

    /// Whether the scheduler would look at the node at all: its labels are those that are asked for, and no taint keeps such pods
    /// away. Whether it is closed for a while, and what is free there, is another matter.
    pub fn admits(&self, node: &Node) -> bool {
        let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
        let has = |(label, value): (&String, &String)| node.labels().get(label) == Some(value);
        self.selector.iter().all(has) && self.likes(node) && taints.into_iter().all(|taint| self.tolerates(taint))
    }

    fn likes(&self, node: &Node) -> bool {
        let of_node = self.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required = of_node.and_then(|of_node| of_node.required_during_scheduling_ignored_during_execution.as_ref());
        required.is_none_or(|required| required.node_selector_terms.iter().any(|term| meets(node, term)))
    }

    /// Clusters give pods that ask for an extended resource the toleration of a taint of that name themselves.
    fn tolerates(&self, taint: &Taint) -> bool {
        let is_soft = !matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        is_soft
            || self.gpus == GpuName::Resource(&taint.key)
            || taint.key.starts_with(STATES)
            || self.tolerations.iter().any(|toleration| covers(toleration, taint))
    }
}

fn covers(toleration: &Toleration, taint: &Taint) -> bool {
    let exists = toleration.operator.as_deref() == Some("Exists");
    let key = match toleration.key.as_deref() {
        None | Some("") => exists,
        Some(key) => key == taint.key,
    };
    let value = exists || toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    let effect = toleration.effect.as_deref().is_none_or(|effect| effect.is_empty() || effect == taint.effect);
    key && value && effect
}

/// A term without any requirement matches nothing, as the scheduler has it.
pub(crate) fn meets(node: &Node, term: &NodeSelectorTerm) -> bool {
    let requirements = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let of_field = |requirement: &NodeSelectorRequirement| {
        requirement.key == "metadata.name" && holds(Some(&node.name_any()), requirement)
    };
    !(requirements.is_empty() && fields.is_empty())
        && requirements.iter().all(|requirement| holds(node.labels().get(&requirement.key), requirement))
        && fields.iter().all(of_field)
}

fn holds(label: Option<&String>, requirement: &NodeSelectorRequirement) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_in = label.is_some_and(|label| values.contains(label));
    let number = |text: &String| text.parse::<i64>().ok();
    let numbers = || label.and_then(number).zip(values.first().and_then(number));
    match requirement.operator.as_str() {
        "In" => is_in,
        "NotIn" => !is_in,
        "Exists" => label.is_some(),
        "DoesNotExist" => label.is_none(),
        "Gt" => numbers().is_some_and(|(label, bound)| label > bound),
        "Lt" => numbers().is_some_and(|(label, bound)| label < bound),
        _ => false,
    }
}

/// The kinds of GPUs of the nodes that such pods may run on; `gpus` are those of a replica, `devices` those that drivers publish.
pub fn kinds_of(
    nodes: &[Node],
    pods: &[Pod],
    placement: &Placement<'_>,
    gpus: u32,
    mut devices: Gpus<'_>,
) -> Vec<GpuKind> {
    let mut kinds: BTreeMap<String, GpuKind> = BTreeMap::new();
    for node in nodes.iter().filter(|node| placement.admits(node)) {
        let found = plugged(node, pods, placement.gpus).or_else(|| devices.given(node));
        // Of several kinds that a claim may get any of, the smallest.
        let card = cards_on(node, placement.gpus, &devices).and_then(|cards| cards.into_iter().next());
        devices.leave_out(node);
        let (Some(found), Some((product, card))) = (found, card) else { continue };
        let free = if is_closed(node) { 0 } else { found.free };
        let kind = kinds.entry(product.clone()).or_insert(GpuKind { card, product, nodes: 0, free: 0, room_for: 0 });
        kind.nodes += 1;
        kind.free += free;
        kind.room_for += free / u64::from(gpus.max(1));
    }
    kinds.into_values().collect()
}

/// GPUs that the node's device plugin offers to such pods.
fn plugged(node: &Node, pods: &[Pod], asked: GpuName<'_>) -> Option<GpuCount> {
    let GpuName::Resource(resource) = asked else { return None };
    let all = allocatable(node, resource)?;
    let name = node.name_any();
    let on_node =
        pods.iter().filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.as_ref() == Some(&name)));
    let used: u64 = on_node.map(|pod| requested(pod, resource)).sum();
    Some(GpuCount { all, free: all.saturating_sub(used) })
}

/// GPUs of the node that pods may have together by asking for them so; `None`: none.
pub fn gpus_on(node: &Node, asked: GpuName<'_>, devices: &Gpus<'_>) -> Option<u64> {
    plugged(node, &[], asked).or_else(|| devices.given(node)).map(|count| count.all)
}

/// The kinds of these, the one with the least memory first; `None` where nobody says. Labels are about whole GPUs, and a driver may give
/// parts of them: what it gives it has to describe itself.
pub fn cards_on(node: &Node, asked: GpuName<'_>, devices: &Gpus<'_>) -> Option<Vec<(String, Card)>> {
    let is_plugged = plugged(node, &[], asked).is_some();
    let labelled = card_of(node).filter(|_| is_plugged).map(|card| vec![card]);
    labelled.or_else(|| devices.cards(node))
}

/// So many of a resource may be asked of the node by pods together; `None` if it has none of it.
pub fn allocatable(node: &Node, resource: &str) -> Option<u64> {
    let quantity = node.status.as_ref()?.allocatable.as_ref()?.get(resource)?;
    amount(&quantity.0).map(|count| count as u64).filter(|count| *count > 0)
}

/// Whether somebody closed the node for new pods.
pub fn is_closed(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

/// The kind of a node's GPUs by its labels: by the product's name; its memory, if that is said too, is believed before ours.
fn card_of(node: &Node) -> Option<(String, Card)> {
    let label = |name: &str| node.labels().get(name);
    let memory_mib = label(MEMORY).and_then(|text| text.parse::<u64>().ok());
    card_by(label(PRODUCT).map(String::as_str), memory_mib)
}

pub(crate) fn card_by(product: Option<&str>, memory_mib: Option<u64>) -> Option<(String, Card)> {
    let card = match (product.and_then(Card::named), memory_mib) {
        (Some(card), Some(memory_mib)) => Card { memory_mib, ..card },
        (Some(card), None) => card,
        (None, memory_mib) => Card::of_memory(memory_mib?),
    };
    Some((product.map_or_else(|| format!("GPU of {} MiB", card.memory_mib), str::to_owned), card))
}

fn requested(pod: &Pod, resource: &str) -> u64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref()?.get(resource));
    requests.filter_map(|quantity| amount(&quantity.0)).map(|count| count as u64).sum()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::devices::{Published, gpus};

    fn node(name: &str, labels: Value, gpus: u32) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": gpus.to_string()}}
        }))
        .unwrap()
    }

    fn pod(node: &str, gpus: u32) -> Pod {
        let resources = json!({"requests": {"nvidia.com/gpu": gpus.to_string()}});
        serde_json::from_value(json!({
            "metadata": {"name": "p"}, "spec": {"nodeName": node, "containers": [{"name": "c", "resources": resources}]}
        }))
        .unwrap()
    }

    /// Whether pods with this `spec.pod` may run on a node with these labels and taints.
    fn admitted(pod: Value, labels: Value, taints: Value) -> bool {
        let spec = json!({"model": {"source": "builtin://ember"}, "pod": pod});
        let spec: InferenceDeploymentSpec = serde_json::from_value(spec).unwrap();
        let node = Node { spec: serde_json::from_value(json!({"taints": taints})).unwrap(), ..node("a", labels, 1) };
        Placement::of(&spec).admits(&node)
    }

    #[test]
    fn nodes_that_the_scheduler_would_not_look_at_do_not_count() {
        let labels = || json!({"gpu": "h100", "zone": "a", "cores": "64"});
        let on = |pod: Value| admitted(pod, labels(), json!([]));
        assert!(on(json!({})) && on(json!({"nodeSelector": {"gpu": "h100"}})));
        assert!(!on(json!({"nodeSelector": {"gpu": "h200"}})));
        let asks = |terms: Value| {
            let required = json!({"nodeSelectorTerms": [{"matchExpressions": terms}]});
            on(json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}))
        };
        let asked = |key, operator, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        assert!(asks(json!([asked("gpu", "In", &["h100", "h200"]), asked("cores", "Gt", &["32"])])));
        assert!(!asks(json!([asked("gpu", "NotIn", &["h100"])])) && !asks(json!([asked("spot", "Exists", &[])])));
        assert!(asks(json!([asked("spot", "DoesNotExist", &[])])) && !asks(json!([asked("cores", "Lt", &["64"])])));
        assert!(!asks(json!([])), "a term that asks for nothing matches nothing");
    }

    #[test]
    fn taints_keep_away_who_does_not_tolerate_them() {
        let on = |pod: Value, taint: Value| admitted(pod, json!({}), json!([taint]));
        let team = || json!({"key": "team", "value": "a", "effect": "NoSchedule"});
        assert!(!on(json!({}), team()));
        let tolerating = |toleration: Value| on(json!({"tolerations": [toleration]}), team());
        assert!(tolerating(json!({"key": "team", "operator": "Exists"})) && tolerating(json!({"operator": "Exists"})));
        assert!(tolerating(json!({"key": "team", "value": "a", "effect": "NoSchedule"})));
        assert!(
            !tolerating(json!({"key": "team", "value": "b"}))
                && !tolerating(json!({"key": "other", "operator": "Exists"}))
        );
        assert!(
            on(json!({}), json!({"key": GPU_RESOURCE, "effect": "NoSchedule"})),
            "clusters tolerate it for the pod"
        );
        assert!(on(json!({}), json!({"key": "busy", "effect": "PreferNoSchedule"})));
        assert!(
            on(json!({}), json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"})),
            "it will be again"
        );
    }

    #[test]
    fn gpus_are_counted_by_kind_less_what_pods_asked_for() {
        let h100 = json!({PRODUCT: "NVIDIA-H100-80GB-HBM3", MEMORY: "81559"});
        let closed: Node = Node {
            spec: serde_json::from_value(json!({"unschedulable": true})).unwrap(),
            ..node("c", h100.clone(), 8)
        };
        let nodes = [
            node("a", h100.clone(), 8),
            node("b", h100, 8),
            closed,
            node("d", json!({MEMORY: "24000"}), 1),
            node("e", json!({}), 0),
        ];
        let kinds = kinds_of(&nodes, &[pod("a", 3), pod("b", 8)], &Placement::default(), 2, Gpus::default());
        assert_eq!(kinds.len(), 2, "{kinds:?}");
        let h100 = kinds.iter().find(|kind| kind.product.contains("H100")).unwrap();
        assert_eq!((h100.nodes, h100.free, h100.room_for), (3, 5, 2));
        let other = kinds.iter().find(|kind| kind.product.contains("24000")).unwrap();
        assert_eq!((other.card.memory_mib, other.free, other.room_for), (24_000, 1, 0));
    }

    /// GPUs of 40 GiB: one of `a`, which a claim holds, one of `b`, and one that every node reaches.
    fn published() -> Published {
        let device = |name: &str| json!({"name": name, "capacity": {"memory": {"value": "40Gi"}}});
        let slice = |pool: &str, more: Value| {
            let mut spec = json!({"driver": "d", "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
                "devices": [device("0")]});
            spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            json!({"metadata": {"name": pool}, "spec": spec})
        };
        let own = |node: &str| slice(node, json!({"nodeName": node}));
        let slices = json!([own("a"), own("b"), slice("far", json!({"allNodes": true}))]);
        let result = json!({"driver": "d", "pool": "a", "device": "0", "request": "gpus"});
        let status = json!({"allocation": {"devices": {"results": [result]}}});
        let claims = json!([{"metadata": {"name": "c"}, "spec": {}, "status": status}]);
        let class = json!({"metadata": {"name": "part"}, "spec": {"extendedResourceName": GPU_RESOURCE}});
        Published {
            slices: Arc::new(serde_json::from_value(slices).unwrap()),
            claims: Arc::new(serde_json::from_value(claims).unwrap()),
            classes: Arc::new(serde_json::from_value(json!([class])).unwrap()),
        }
    }

    #[test]
    fn gpus_of_a_driver_are_counted_where_no_device_plugin_offers_any_and_what_several_nodes_reach_once() {
        let published = published();
        let h100 = || json!({PRODUCT: "NVIDIA-H100-80GB-HBM3", MEMORY: "81559"});
        let nodes = [node("a", h100(), 0), node("b", h100(), 0), node("c", h100(), 8)];
        for asked in [GpuName::default(), GpuName::Class("part")] {
            let placement = Placement { gpus: asked, ..Placement::default() };
            let kinds = kinds_of(&nodes, &[pod("a", 5)], &placement, 1, gpus(Some(&published), asked).unwrap());
            let counts: Vec<_> = kinds.iter().map(|kind| (kind.card.memory_mib, kind.nodes, kind.free)).collect();
            // Labels are not believed of what a driver gives. Who asks for a class gets nothing of a device plugin's.
            let of_driver = (40_960, 2, 2);
            match asked {
                GpuName::Resource(_) => assert_eq!(counts, [of_driver, (81_559, 1, 8)]),
                GpuName::Class(_) => assert_eq!(counts, [of_driver]),
            }
        }
    }
}
