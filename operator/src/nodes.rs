//! The cluster's nodes, as far as it matters for where a model fits: labels, taints, what they have of each resource, whether they
//! are closed, and what runs pods there.

use k8s_openapi::{
    api::core::v1::{Node, NodeSpec, NodeStatus, NodeSystemInfo},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

/// All of it that is looked at.
pub fn slim(node: Node) -> Node {
    let Node { metadata, spec, status } = node;
    let spec = spec.unwrap_or_default();
    Node {
        metadata: ObjectMeta { name: metadata.name, labels: metadata.labels, ..ObjectMeta::default() },
        spec: Some(NodeSpec { taints: spec.taints, unschedulable: spec.unschedulable, ..NodeSpec::default() }),
        status: Some(NodeStatus {
            node_info: status.as_ref().and_then(|status| status.node_info.as_ref()).map(versions),
            allocatable: status.and_then(|status| status.allocatable),
            ..NodeStatus::default()
        }),
    }
}

/// A kernel or a boot is no news.
fn versions(info: &NodeSystemInfo) -> NodeSystemInfo {
    NodeSystemInfo {
        kubelet_version: info.kubelet_version.clone(),
        container_runtime_version: info.container_runtime_version.clone(),
        ..NodeSystemInfo::default()
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;
    use crate::watched::Known;

    fn node(name: &str, status: Value) -> Node {
        let object =
            json!({"metadata": {"name": name, "resourceVersion": "7", "labels": {"a": "b"}}, "status": status});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_heartbeat_is_no_news_and_another_amount_of_something_is() {
        let mut known = Known::default();
        let mut take = |event| known.take(event, slim);
        let heard = |at: &str, gpus: &str| {
            json!({"allocatable": {"nvidia.com/gpu": gpus}, "conditions": [
                {"type": "Ready", "status": "True", "lastHeartbeatTime": at}]})
        };
        let first = heard("2026-11-26T10:00:00Z", "8");
        assert!(!take(Event::Init) && !take(Event::InitApply(node("a", first))));
        assert!(take(Event::InitDone));
        assert!(!take(Event::Apply(node("a", heard("2026-11-26T10:00:10Z", "8")))));
        assert!(take(Event::Apply(node("a", heard("2026-11-26T10:00:20Z", "7")))));
        assert!(take(Event::Delete(node("a", json!({})))) && known.objects.is_empty());
    }
}
