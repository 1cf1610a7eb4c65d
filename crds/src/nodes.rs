//! What a cluster's nodes have for a replica: kinds of GPUs by the labels that device plugins set, what is free of them, and which
//! nodes its pods may run on at all. Pure; who asks the API server is elsewhere.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Node, NodeSelectorRequirement, NodeSelectorTerm, Pod, Taint, Toleration};
use kube::ResourceExt;
use stoker_fit::gpu::Card;

use crate::{InferenceDeploymentSpec, quantity::amount};

/// What NVIDIA's device plugin calls a GPU.
pub const GPU_RESOURCE: &str = "nvidia.com/gpu";
/// Label with a GPU's product.
pub const PRODUCT: &str = "nvidia.com/gpu.product";
/// Taints that say how a node is at the moment (closed, not ready, short of memory), and not whom it is for.
const STATES: &str = "node.kubernetes.io/";
/// Label with a GPU's memory in MiB.
pub const MEMORY: &str = "nvidia.com/gpu.memory";

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
    /// What a GPU is called there.
    pub resource: &'a str,
    selector: BTreeMap<String, String>,
    tolerations: Vec<Toleration>,
    affinity: Option<Affinity>,
}

impl<'a> Placement<'a> {
    /// As a spec says.
    pub fn of(spec: &'a InferenceDeploymentSpec) -> Self {
        let resource = spec.resources.as_ref().and_then(|resources| resources.gpu_resource.as_deref());
        let pod = spec.pod.clone().unwrap_or_default();
        Self {
            resource: resource.unwrap_or(GPU_RESOURCE),
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

    /// Clusters give pods that ask for GPUs the toleration of a taint of that name themselves.
    fn tolerates(&self, taint: &Taint) -> bool {
        let is_soft = !matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        is_soft
            || taint.key == self.resource
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
fn meets(node: &Node, term: &NodeSelectorTerm) -> bool {
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

/// The kinds of GPUs of the nodes that such pods may run on; `gpus` are those of a replica.
pub fn kinds_of(nodes: &[Node], pods: &[Pod], placement: &Placement<'_>, gpus: u32) -> Vec<GpuKind> {
    let mut kinds: BTreeMap<String, GpuKind> = BTreeMap::new();
    for node in nodes.iter().filter(|node| placement.admits(node)) {
        let Some(allocatable) = allocatable(node, placement.resource) else { continue };
        let Some((product, card)) = card_of(node) else { continue };
        let on_node = pods
            .iter()
            .filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&node.name_any()));
        let free = allocatable.saturating_sub(on_node.map(|pod| requested(pod, placement.resource)).sum());
        let free = if is_closed(node) { 0 } else { free };
        let kind = kinds.entry(product.clone()).or_insert(GpuKind { card, product, nodes: 0, free: 0, room_for: 0 });
        kind.nodes += 1;
        kind.free += free;
        kind.room_for += free / u64::from(gpus.max(1));
    }
    kinds.into_values().collect()
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

/// The kind of a node's GPUs: by the product's name; its memory, if that is said too, is believed before ours.
pub fn card_of(node: &Node) -> Option<(String, Card)> {
    let label = |name: &str| node.labels().get(name);
    let memory_mib = label(MEMORY).and_then(|text| text.parse::<u64>().ok());
    let product = label(PRODUCT);
    let named = product.and_then(|product| Card::named(product));
    let card = match (named, memory_mib) {
        (Some(card), Some(memory_mib)) => Card { memory_mib, ..card },
        (Some(card), None) => card,
        (None, memory_mib) => Card::of_memory(memory_mib?),
    };
    Some((product.cloned().unwrap_or_else(|| format!("GPU of {} MiB", card.memory_mib)), card))
}

fn requested(pod: &Pod, resource: &str) -> u64 {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let requests = containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref()?.get(resource));
    requests.filter_map(|quantity| amount(&quantity.0)).map(|count| count as u64).sum()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

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

    fn anywhere() -> Placement<'static> {
        Placement { resource: GPU_RESOURCE, ..Placement::default() }
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
        let kinds = kinds_of(&nodes, &[pod("a", 3), pod("b", 8)], &anywhere(), 2);
        assert_eq!(kinds.len(), 2, "{kinds:?}");
        let h100 = kinds.iter().find(|kind| kind.product.contains("H100")).unwrap();
        assert_eq!((h100.nodes, h100.free, h100.room_for), (3, 5, 2));
        let other = kinds.iter().find(|kind| kind.product.contains("24000")).unwrap();
        assert_eq!((other.card.memory_mib, other.free, other.room_for), (24_000, 1, 0));
    }
}
