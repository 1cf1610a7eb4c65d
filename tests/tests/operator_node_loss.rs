//! A node falls silent: its replicas are given up after a while and replaced on another node.

use std::time::Duration;

use serde_json::json;
use stoker_cluster::{ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::operator::{Rig, serves};

const SOON: Duration = Duration::from_secs(40);
/// 12 s until the node counts as lost, 30 s of patience of the pods, and a slow machine.
const REPLACED_WITHIN: Duration = Duration::from_secs(120);
const NODE_GRACE: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_secs(3);

#[test]
fn replicas_of_a_lost_node_are_replaced_on_another() {
    let node = |name: &str, node_idx| NodeOptions {
        name: name.to_owned(),
        node_idx,
        heartbeat: HEARTBEAT,
        ..NodeOptions::default()
    };
    let controllers = Controllers::All { node_grace: NODE_GRACE };
    let options = ControlPlaneOptions { controllers, ..ControlPlaneOptions::default() };
    let rig = Rig::start_with(options, node("node-0", 0)).unwrap();
    let drain = json!({"withdrawSeconds": 0, "deadlineSeconds": 5});
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 2, "drain": drain})).unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    let _other = rig.add_node(node("node-1", 1)).unwrap();
    rig.cluster.node.fall_silent();
    rig.wait("two serve on the other node", REPLACED_WITHIN, |rig| {
        let pods = rig.pods("chat")?;
        let there = |node: Option<&str>| node == Some("node-1");
        let moved = pods
            .iter()
            .filter(|pod| serves(pod) && there(pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref())));
        Ok(moved.count() == 2)
    })
    .unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    // Pods that nobody can stop do not count; when the node speaks again they go.
    assert_eq!(rig.pods("chat").unwrap().len(), 4);
    rig.cluster.node.speak();
    rig.wait("the lost ones are gone", REPLACED_WITHIN, |rig| Ok(rig.pods("chat")?.len() == 2)).unwrap();
}
