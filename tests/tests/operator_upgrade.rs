//! An upgrade of the agent's image where no node has room for one more replica: who has a single replica is never without it.
//! The operator waits and says what for, until there is room; only who allows it gives up the old replica first.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, sleep},
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::{Value, json};
use stoker_cluster::{Capacity, ControlPlaneOptions, Controllers, NodeOptions};
use stoker_tests::{
    cluster::{built, http_get},
    operator::{Rig, condition, is_ready, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Longer than a replica without a place is waited for before one is given up that may be.
const LONG: Duration = Duration::from_secs(8);
const NEXT_IMAGE: &str = "stand-in/agent:2";
/// Deployments of one replica, which fill the node.
const NAMES: [&str; 3] = ["one", "two", "three"];

/// A client that asks one deployment after the other, all the time, through its Service.
struct Client {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Asked>,
}

/// What it got.
#[derive(Default)]
struct Asked {
    answered: usize,
    failures: Vec<String>,
}

impl Asked {
    fn expect_no_failure(self, name: &str) {
        println!("{name}: {} answers", self.answered);
        assert!(self.answered > 0 && self.failures.is_empty(), "{name} was without a replica: {:?}", self.failures);
    }
}

impl Client {
    fn start(address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut asked = Asked::default();
            while !until.load(Ordering::SeqCst) {
                match http_get(address, "/stream/0") {
                    Ok(text) if text.contains("done") => asked.answered += 1,
                    other => asked.failures.push(format!("{other:?}")),
                }
                sleep(Duration::from_millis(50));
            }
            asked
        });
        Self { stop, thread }
    }

    fn stop(self) -> Asked {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// One replica that needs a CPU, of which the node has as many as there are deployments.
fn spec(rollout: Value) -> Value {
    json!({
        "model": {"source": "builtin://ember"}, "replicas": 1, "resources": {"cpu": 1}, "rollout": rollout,
        "drain": {"withdrawSeconds": 3, "deadlineSeconds": 30},
    })
}

fn image_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.containers.first()?.image.as_deref()
}

/// True when nobody else than replicas of the next image is there, and they serve.
fn is_upgraded(rig: &Rig, name: &str) -> anyhow::Result<bool> {
    let pods = rig.pods(name)?;
    Ok(is_ready(&rig.get(name)?) && pods.iter().all(|pod| serves(pod) && image_of(pod) == Some(NEXT_IMAGE)))
}

#[test]
fn an_upgrade_on_a_full_cluster_waits_and_leaves_nobody_without_a_replica() {
    let options = ControlPlaneOptions { controllers: Controllers::all(), ..ControlPlaneOptions::default() };
    let capacity = Capacity { cpu: NAMES.len().to_string(), ..Capacity::default() };
    let mut rig = Rig::start_with(options, NodeOptions { capacity, ..NodeOptions::default() }).unwrap();
    rig.cluster.node.add_image(NEXT_IMAGE, built("stand-in-agent"));
    for name in NAMES {
        rig.apply(name, spec(json!({"surgeSeconds": 2}))).unwrap();
    }
    for name in NAMES {
        rig.wait_ready(name, SOON).unwrap();
    }
    let before = NAMES.map(|name| rig.pods(name).unwrap().remove(0).uid());
    let [one, two, three] = NAMES.map(|name| Client::start(rig.cluster.service_address(name)));

    rig.operator.upgrade(NEXT_IMAGE).unwrap();
    for name in NAMES {
        rig.wait(&format!("{name} says what it waits for"), SOON, |rig| {
            let told = condition(&rig.get(name)?, "Degraded");
            Ok(told.is_some_and(|(status, reason, message)| {
                status == "True" && reason == "Unschedulable" && message.contains("make room for one more")
            }))
        })
        .unwrap();
    }
    sleep(LONG);
    for (name, uid) in NAMES.iter().zip(&before) {
        let pods = rig.pods(name).unwrap();
        assert!(pods.iter().any(|pod| pod.uid() == *uid && serves(pod)), "{name} was taken down");
        let available = condition(&rig.get(name).unwrap(), "Available").unwrap();
        assert_eq!(available.0, "True", "{name}: {available:?}");
    }

    // One allows it to give up its replica, and the room is enough for the next.
    three.stop().expect_no_failure("three");
    rig.apply("three", spec(json!({"surgeSeconds": 2, "maxUnavailable": 1}))).unwrap();
    let is_any_upgraded = |rig: &Rig| Ok(NAMES.iter().any(|name| is_upgraded(rig, name).is_ok_and(|is| is)));
    rig.wait("the room is used", SOON, is_any_upgraded).unwrap();

    // Room for one more: whoever takes it leaves as much behind.
    let room = Capacity { cpu: "1".to_owned(), ..Capacity::default() };
    let other = NodeOptions { name: "node-1".to_owned(), node_idx: 1, capacity: room, ..NodeOptions::default() };
    let other = rig.add_node(other).unwrap();
    other.add_image(NEXT_IMAGE, built("stand-in-agent"));
    for name in NAMES {
        rig.wait(&format!("{name} is upgraded"), SOON * 2, |rig| is_upgraded(rig, name)).unwrap();
    }
    one.stop().expect_no_failure("one");
    two.stop().expect_no_failure("two");
}
