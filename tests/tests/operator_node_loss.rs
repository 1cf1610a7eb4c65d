//! A node falls silent: its replicas are given up after a while and replaced on another node, and a gateway's streams go on there.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use stoker_cluster::{Capacity, ControlPlaneOptions, Controllers, NodeOptions};
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent,
    gateway::GatewayProcess,
    operator::{NAMESPACE, Rig, serves},
    resumes::{Case, cases},
};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(40);
/// 12 s until the node counts as lost, 30 s of patience of the pods, and a slow machine.
const REPLACED_WITHIN: Duration = Duration::from_secs(120);
const NODE_GRACE: Duration = Duration::from_secs(12);
const HEARTBEAT: Duration = Duration::from_secs(3);

const IMAGE: &str = "real/agent:1";
/// Of a stream. A busy machine needs a second or more for them.
const STREAM_TOKENS: u32 = 250;

fn node(node_idx: usize, cpu: &str) -> NodeOptions {
    let capacity = Capacity { cpu: cpu.to_owned(), ..Capacity::default() };
    NodeOptions { name: format!("node-{node_idx}"), node_idx, heartbeat: HEARTBEAT, capacity, ..NodeOptions::default() }
}

/// A cluster that gives up a node within seconds, and its first node.
fn rig(cpu: &str) -> Rig {
    let controllers = Controllers::All { node_grace: NODE_GRACE };
    let options = ControlPlaneOptions { controllers, ..ControlPlaneOptions::default() };
    Rig::start_with(options, node(0, cpu)).unwrap()
}

fn is_on(pod: &Pod, node: &str) -> bool {
    pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) == Some(node)
}

fn wait_for_two_on(rig: &Rig, node: &str) {
    rig.wait("two serve on the other node", REPLACED_WITHIN, |rig| {
        Ok(rig.pods("chat")?.iter().filter(|pod| serves(pod) && is_on(pod, node)).count() == 2)
    })
    .unwrap();
}

#[test]
fn replicas_of_a_lost_node_are_replaced_on_another() {
    let rig = rig("4");
    let drain = json!({"withdrawSeconds": 0, "deadlineSeconds": 5});
    rig.apply("chat", json!({"model": {"source": "builtin://ember"}, "replicas": 2, "drain": drain})).unwrap();
    rig.wait_ready("chat", SOON).unwrap();

    let _other = rig.add_node(node(1, "4")).unwrap();
    rig.cluster.node.fall_silent();
    wait_for_two_on(&rig, "node-1");
    rig.wait_ready("chat", SOON).unwrap();

    // Pods that nobody can stop do not count; when the node speaks again they go.
    assert_eq!(rig.pods("chat").unwrap().len(), 4);
    rig.cluster.node.speak();
    rig.wait("the lost ones are gone", REPLACED_WITHIN, |rig| Ok(rig.pods("chat")?.len() == 2)).unwrap();
}

/// The machine hangs with all that runs on it: nobody is told, and its connections stay open.
#[test]
fn streams_of_a_lost_node_go_on_on_another() {
    // One replica takes all of it, so that the second goes elsewhere.
    let rig = rig("1");
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    let gateway = GatewayProcess::start(&rig.operator.url(), &[]).unwrap();
    let spec = json!({
        "model": {"source": "builtin://ember", "servedNames": ["ember"]}, "replicas": 1, "resources": {"cpu": 1},
        "pod": {"image": IMAGE}, "engine": {"threads": 1}, "drain": {"withdrawSeconds": 0, "deadlineSeconds": 5},
    });
    rig.apply("chat", spec).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    let other = rig.add_node(node(1, "3")).unwrap();
    other.add_image(IMAGE, agent::binary().unwrap());
    rig.scale("chat", 2).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 2)).unwrap();

    let cases: Vec<Case> = (1..=2).flat_map(|seed| cases(seed, STREAM_TOKENS)).collect();
    let undisturbed = try_join_all(cases.iter().map(|case| case.ask(gateway.base(), || {})));
    let expected = rig.block_on(undisturbed).unwrap();
    let n_begun = Arc::new(AtomicUsize::new(0));
    let begin = |case: &Case| {
        let (case, base, n_begun) = (case.clone(), gateway.base().to_owned(), n_begun.clone());
        rig.spawn(async move { case.ask(&base, || _ = n_begun.fetch_add(1, Ordering::Relaxed)).await })
    };
    let streams: Vec<_> = cases.iter().map(begin).collect();
    let deadline = Instant::now() + SOON;
    while n_begun.load(Ordering::Relaxed) < cases.len() / 2 {
        assert!(Instant::now() < deadline, "they do not begin\n{}", gateway.log());
        sleep(Duration::from_millis(2));
    }
    let pods = rig.pods("chat").unwrap();
    let lost = pods.iter().find(|pod| is_on(pod, "node-0")).unwrap().name_any();
    rig.cluster.node.freeze_pod(NAMESPACE, &lost).unwrap();
    rig.cluster.node.fall_silent();

    for ((stream, case), expected) in streams.into_iter().zip(&cases).zip(&expected) {
        let said = rig.block_on(async { timeout(REPLACED_WITHIN, stream).await });
        let said = said.unwrap_or_else(|_| panic!("{} does not end\n{}", case.name, gateway.log())).unwrap();
        let said = said.unwrap_or_else(|error| panic!("{}: {error:#}\n{}", case.name, gateway.log()));
        assert_eq!(&said, expected, "{}", case.name);
    }
    let resumed = gateway.access_line(|line| line["resumes"].as_u64() > Some(0));
    rig.block_on(resumed).expect("a stream of the lost replica's was met");
    wait_for_two_on(&rig, "node-1");
}
