//! Agents of another release than the operator. Those that run are rolled as others are, and no stream is cut; those that an `image` asks
//! for and that do not come to serve are named. What is said of them does not change back and forth.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs::{self, Permissions},
    future::ready,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::sleep,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{
    api::core::v1::{ConfigMap, Container, Pod, Probe},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::{
    ResourceExt,
    api::PostParams,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::{InferenceDeployment, contract::AGENT_PORT_NAME};
use stoker_operator::{
    desired::desired,
    validate::{Defaults, validate},
};
use stoker_tests::{
    cluster::built,
    operator::{Rig, condition, is_ready, revision_of, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(60);
/// Some rounds of readings, and a restart or two.
const A_WHILE: Duration = Duration::from_secs(12);
/// Seconds of a client's stream: longer than an agent that does not obey is waited for.
const STREAM_SECONDS: u64 = 40;

/// Stand-ins of other releases: image and arguments.
const BEFORE_ORDERS: (&str, &str) = ("stand-in/agent:before-orders", "--release before-orders");
const BEFORE_LIVENESS: (&str, &str) = ("stand-in/agent:before-liveness", "--release before-liveness");
const TO_COME: (&str, &str) = ("stand-in/agent:to-come", "--release to-come");
/// It ends over an argument.
const BEFORE_KEYS: (&str, &str) = ("stand-in/agent:before-keys", "--told-by-operators-of-now");

fn add_images(rig: &Rig, dir: &Path) {
    for (image, arguments) in [BEFORE_ORDERS, BEFORE_LIVENESS, TO_COME, BEFORE_KEYS] {
        let path = dir.join(image.replace(['/', ':'], "-"));
        fs::write(&path, format!("#!/bin/sh\nexec {} {arguments} \"$@\"\n", built("stand-in-agent").display()))
            .unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        rig.cluster.node.add_image(image, path);
    }
}

fn spec(more: Value) -> Value {
    let mut spec = json!({
        "model": {"source": "builtin://ember"}, "replicas": 2, "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

/// The replicas that an operator of before made of this image: asked for their life where clients come in, and told nothing of keys.
fn made_before(rig: &Rig, name: &str, image: &str) {
    let defaults = Defaults { agent_image: image.to_owned(), ..Defaults::default() };
    let desired = desired(&validate(&rig.get(name).unwrap(), &defaults).unwrap(), "");
    rig.block_on(rig.api::<ConfigMap>().create(&PostParams::default(), &desired.config_map)).unwrap();
    for ordinal in 0..2 {
        let mut pod = desired.pod(ordinal);
        let spec = pod.spec.as_mut().unwrap();
        spec.volumes.as_mut().unwrap().retain(|volume| volume.name != "keys");
        as_before(&mut spec.containers[0]);
        rig.block_on(rig.api::<Pod>().create(&PostParams::default(), &pod)).unwrap();
    }
}

fn as_before(container: &mut Container) {
    container.args.as_mut().unwrap().truncate(2);
    container.volume_mounts.as_mut().unwrap().retain(|mount| mount.name != "keys");
    let ask_public_port = |probe: &mut Probe| {
        probe.http_get.as_mut().unwrap().port = IntOrString::String(AGENT_PORT_NAME.to_owned());
    };
    [&mut container.startup_probe, &mut container.liveness_probe].into_iter().flatten().for_each(ask_public_port);
}

/// What a condition says, each time that it says something else: its status and its reason.
type Told = Arc<Mutex<Vec<String>>>;

fn listen(rig: &Rig, name: &str, type_: &'static str) -> Told {
    let told = Told::default();
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let changes = watcher(rig.api::<InferenceDeployment>(), config).default_backoff().applied_objects();
    let all = Arc::clone(&told);
    let listened = changes.for_each(move |change| {
        let now = change.ok().and_then(|deployment| condition(&deployment, type_));
        let now = now.map(|(status, reason, _)| format!("{status} {reason}"));
        let mut all = lock(&all);
        if now.is_some() && now.as_ref() != all.last() {
            all.extend(now);
        }
        ready(())
    });
    rig.spawn(listened);
    told
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a condition says this.
fn wait_told(rig: &Rig, name: &str, type_: &str, [status, reason, words]: [&str; 3]) {
    rig.wait(&format!("{name} says {type_} {status} {reason}: {words}"), SOON, |rig| {
        let told = condition(&rig.get(name)?, type_);
        Ok(told.is_some_and(|told| told.0 == status && told.1 == reason && told.2.contains(words)))
    })
    .unwrap();
}

fn serving(rig: &Rig, name: &str) -> anyhow::Result<usize> {
    Ok(rig.pods(name)?.iter().filter(|pod| serves(pod)).count())
}

#[test]
fn agents_of_before_that_run_are_named_and_rolled_and_their_streams_end_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let mut rig = Rig::start(Audit::Off).unwrap();
    add_images(&rig, dir.path());
    rig.operator.kill().unwrap();
    // Those that cannot be read, and those that can.
    let names = ["unread", "read"];
    for (name, (image, _)) in names.iter().zip([BEFORE_ORDERS, BEFORE_LIVENESS]) {
        rig.apply(name, spec(json!({}))).unwrap();
        made_before(&rig, name, image);
    }
    for name in names {
        rig.wait("those of before serve", SOON, |rig| Ok(serving(rig, name)? == 2)).unwrap();
    }
    let before = names.map(|name| rig.pods(name).unwrap());
    // The youngest goes first.
    let busy = before[0].last().unwrap();
    let url = format!("http://{}:8000/stream/{STREAM_SECONDS}", busy.status.as_ref().unwrap().pod_ip.as_ref().unwrap());
    let mut stream =
        Command::new("curl").args(["-sSN", "--max-time", "120", &url]).stdout(Stdio::piped()).spawn().unwrap();
    let [ready_told, degraded_told] = ["Ready", "Degraded"].map(|type_| listen(&rig, "unread", type_));
    let read_told = listen(&rig, "read", "Degraded");

    rig.operator.restart().unwrap();
    wait_told(&rig, "unread", "Degraded", ["True", "OlderAgent", "cannot be read"]);
    rig.wait("the busy one is left to its kubelet", SOON, |rig| {
        let pods = rig.pods("unread")?;
        Ok(pods.iter().any(|pod| pod.uid() == busy.uid() && pod.metadata.deletion_timestamp.is_some()))
    })
    .unwrap();
    assert!(stream.try_wait().unwrap().is_none(), "its stream went on for too short a time to be cut");
    let mut fewest = usize::MAX;
    for (name, before) in names.iter().zip(&before) {
        rig.wait("all are of now", SOON * 2, |rig| {
            fewest = fewest.min(serving(rig, name)?);
            let pods = rig.pods(name)?;
            let is_before = |pod: &Pod| revision_of(pod) == revision_of(&before[0]);
            Ok(is_ready(&rig.get(name)?) && pods.len() == 2 && !pods.iter().any(is_before))
        })
        .unwrap();
    }
    assert!(fewest >= 2, "{fewest} served");
    let output = String::from_utf8(stream.wait_with_output().unwrap().stdout).unwrap();
    assert_eq!(output.lines().last(), Some("done"), "a stream was cut");
    wait_told(&rig, "unread", "Degraded", ["False", "AsExpected", ""]);
    // Nothing is said of agents before they are asked.
    let told = lock(&degraded_told).clone();
    let told: Vec<&str> = told.iter().map(String::as_str).skip_while(|told| *told == "False AsExpected").collect();
    assert_eq!(told, ["True OlderAgent", "False AsExpected"]);
    assert_eq!(lock(&ready_told).iter().filter(|told| told.starts_with("True")).count(), 1, "{ready_told:?}");
    assert_eq!(*lock(&read_told), ["False AsExpected"].as_slice(), "nothing is wrong with one that is read and obeys");
}

#[test]
fn an_image_of_another_release_is_named_for_as_long_as_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let rig = Rig::start(Audit::Off).unwrap();
    add_images(&rig, dir.path());
    let asked = [
        ("mute", BEFORE_ORDERS, "cannot be read"),
        ("sick", BEFORE_LIVENESS, "does not come to serve"),
        ("deaf", BEFORE_KEYS, "unexpected argument '--told-by-operators-of-now'"),
    ];
    let with_image = |image: &str| spec(json!({"replicas": 1, "pod": {"image": image}}));
    let told = asked.map(|(name, (image, _), _)| {
        rig.apply(name, with_image(image)).unwrap();
        listen(&rig, name, "Ready")
    });
    rig.apply("newer", with_image(TO_COME.0)).unwrap();
    for (name, _, words) in asked {
        wait_told(&rig, name, "Ready", ["False", "OlderAgent", words]);
        wait_told(
            &rig,
            name,
            "Degraded",
            ["True", "OlderAgent", "let pod.image name an agent of the operator's release"],
        );
    }
    // It serves; only what it says is not believed.
    wait_told(&rig, "newer", "Degraded", ["True", "NewerAgent", "upgrade the operator"]);
    rig.wait_ready("newer", SOON).unwrap();

    // A kubelet that has no answer starts them again.
    for name in ["mute", "sick"] {
        let pod = rig.pods(name).unwrap().remove(0);
        rig.cluster.node.kill_pod("default", &pod.name_any()).unwrap();
    }
    sleep(A_WHILE);
    for (told, (name, ..)) in told.iter().zip(asked) {
        let told = lock(told).clone();
        let named = told.iter().position(|told| told == "False OlderAgent");
        assert_eq!(named, Some(told.len() - 1), "{name} said other things after it was named: {told:?}");
    }

    for name in ["mute", "sick", "deaf", "newer"] {
        rig.apply(name, spec(json!({"replicas": 1}))).unwrap();
    }
    for name in ["mute", "sick", "deaf", "newer"] {
        rig.wait_ready(name, SOON).unwrap();
        wait_told(&rig, name, "Degraded", ["False", "AsExpected", ""]);
    }
}
