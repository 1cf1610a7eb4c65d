//! GPUs of a cluster: kinds by the labels that device plugins set, and what is free of them. Deciding is pure; asking is not.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt, api::ListParams};
use stoker_crds::quantity::amount;
use stoker_fit::gpu::Card;

use crate::cluster::Cluster;

/// What NVIDIA's device plugin calls a GPU.
pub(super) const GPU_RESOURCE: &str = "nvidia.com/gpu";
const PRODUCT: &str = "nvidia.com/gpu.product";
const MEMORY: &str = "nvidia.com/gpu.memory";

/// Nodes with GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GpuKind {
    /// The GPU.
    pub(super) card: Card,
    /// Its name, as the nodes' labels say it.
    pub(super) product: String,
    /// Such nodes.
    pub(super) nodes: usize,
    /// GPUs that no pod asked for, on all of them.
    pub(super) free: u64,
    /// Replicas that have room there now.
    pub(super) room_for: u64,
}

/// The kinds of GPUs that the cluster has; `gpus` are those of a replica.
pub(super) async fn kinds(cluster: &Cluster, resource: &str, gpus: u32) -> Result<Vec<GpuKind>> {
    let all = ListParams::default();
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let nodes =
        nodes.list(&all).await.context("list nodes: that needs the right to, else say the GPU with --gpu")?.items;
    let pods: Api<Pod> = Api::all(cluster.client.clone());
    let running = all.fields("status.phase!=Succeeded,status.phase!=Failed");
    let pods = pods
        .list(&running)
        .await
        .context("list pods of all namespaces: that needs the right to, else say the GPU with --gpu")?
        .items;
    Ok(kinds_of(&nodes, &pods, resource, gpus))
}

fn kinds_of(nodes: &[Node], pods: &[Pod], resource: &str, gpus: u32) -> Vec<GpuKind> {
    let mut kinds: BTreeMap<String, GpuKind> = BTreeMap::new();
    for node in nodes {
        let Some(allocatable) = allocatable(node, resource) else { continue };
        let Some((product, card)) = card_of(node) else { continue };
        let on_node = pods
            .iter()
            .filter(|pod| pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(&node.name_any()));
        let free = allocatable.saturating_sub(on_node.map(|pod| requested(pod, resource)).sum());
        let free = if is_closed(node) { 0 } else { free };
        let kind = kinds.entry(product.clone()).or_insert(GpuKind { card, product, nodes: 0, free: 0, room_for: 0 });
        kind.nodes += 1;
        kind.free += free;
        kind.room_for += free / u64::from(gpus.max(1));
    }
    kinds.into_values().collect()
}

fn allocatable(node: &Node, resource: &str) -> Option<u64> {
    let quantity = node.status.as_ref()?.allocatable.as_ref()?.get(resource)?;
    amount(&quantity.0).map(|count| count as u64).filter(|count| *count > 0)
}

fn is_closed(node: &Node) -> bool {
    node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or(false)
}

/// By the product's name; its memory, if that is said too, is believed before ours.
fn card_of(node: &Node) -> Option<(String, Card)> {
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
        let kinds = kinds_of(&nodes, &[pod("a", 3), pod("b", 8)], GPU_RESOURCE, 2);
        assert_eq!(kinds.len(), 2, "{kinds:?}");
        let h100 = kinds.iter().find(|kind| kind.product.contains("H100")).unwrap();
        assert_eq!((h100.nodes, h100.free, h100.room_for), (3, 5, 2));
        let other = kinds.iter().find(|kind| kind.product.contains("24000")).unwrap();
        assert_eq!((other.card.memory_mib, other.free, other.room_for), (24_000, 1, 0));
    }
}
