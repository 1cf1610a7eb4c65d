//! A deployment's life on a real API server with real scheduling and garbage collection: ready, scaled, rolled, drained,
//! blocked, deleted. Agents are stand-ins; the operator is the real process with the chart's rights.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeSet,
    future::ready,
    process::{Child, Command, Stdio},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
    thread::sleep,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::InferenceDeployment;
use stoker_tests::{
    measured,
    operator::{Rig, condition, get, intent_of, is_ready, revision_of, serves},
};

/// Long enough for two busy cores.
const SOON: Duration = Duration::from_secs(40);
/// The garbage collector, on two busy cores.
const GONE: Duration = Duration::from_secs(90);

/// One cluster for all tests of this file; each has names of its own in it.
static RIG: LazyLock<RwLock<Rig>> = LazyLock::new(|| RwLock::new(Rig::start(Audit::Metadata).unwrap()));

/// The cluster beside other tests.
fn rig() -> RwLockReadGuard<'static, Rig> {
    RIG.read().unwrap_or_else(PoisonError::into_inner)
}

/// The cluster for a test that others would notice.
fn alone() -> RwLockWriteGuard<'static, Rig> {
    let mut rig = RIG.write().unwrap_or_else(PoisonError::into_inner);
    rig.operator.restart().unwrap();
    rig
}

/// A spec whose replicas leave fast.
fn spec(replicas: i32, more: Value) -> Value {
    let mut spec = json!({
        "model": {"source": "builtin://ember"}, "replicas": replicas, "drain": {"withdrawSeconds": 1, "deadlineSeconds": 60},
    });
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

/// A change that rolls pods and nothing else.
fn annotated(value: &str) -> Value {
    json!({"pod": {"annotations": {"change": value}}})
}

fn gone(rig: &Rig, name: &str) {
    rig.wait("everything is gone", GONE, |rig| Ok(rig.children(name)? == 0)).unwrap();
}

fn delete(rig: &Rig, name: &str) {
    rig.delete(name).unwrap();
    gone(rig, name);
}

fn names(pods: &[Pod]) -> BTreeSet<String> {
    pods.iter().map(ResourceExt::name_any).collect()
}

fn serving(pods: &[Pod]) -> usize {
    pods.iter().filter(|pod| serves(pod)).count()
}

fn address(pod: &Pod) -> String {
    format!("{}:8000", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap())
}

/// A stream that a client holds open until it is finished.
fn hold(address: &str) -> Child {
    hold_for(address, 600)
}

fn hold_for(address: &str, seconds: u64) -> Child {
    let url = format!("http://{address}/stream/{seconds}");
    Command::new("curl").args(["-sSN", "--max-time", "300", &url]).stdout(Stdio::piped()).spawn().unwrap()
}

/// Lets the streams of a replica come to their end.
fn finish(pod: &Pod) {
    post(&format!("http://{}/finish", address(pod)));
}

/// Every reason of its progress that a deployment's status gives from now on. Some are over within a round: who asks now and then misses them.
fn reasons(rig: &Rig, name: &str) -> Arc<Mutex<BTreeSet<String>>> {
    let told = Arc::<Mutex<BTreeSet<String>>>::default();
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let changes = watcher(rig.api::<InferenceDeployment>(), config).default_backoff().applied_objects();
    let all = Arc::clone(&told);
    let listened = changes.for_each(move |change| {
        let reason = change.ok().and_then(|deployment| condition(&deployment, "Progressing"));
        lock(&all).extend(reason.map(|(_, reason, _)| reason));
        ready(())
    });
    rig.spawn(listened);
    told
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last line of a stream.
fn end_of(stream: Child) -> String {
    let output = stream.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().last().unwrap_or_default().to_owned()
}

#[test]
fn a_deployment_becomes_ready_and_its_status_says_what_there_is() {
    let rig = rig();
    rig.apply("smallest", json!({"model": {"source": "builtin://ember"}})).unwrap();
    rig.wait_ready("smallest", SOON).unwrap();
    let status = rig.get("smallest").unwrap().status.unwrap();
    assert_eq!((status.replicas, status.ready_replicas, status.updated_replicas), (1, 1, 1));
    assert_eq!(status.ready_of_wanted, "1/1");
    assert_eq!(status.url, "http://smallest.default.svc:8000/v1");
    let pods = rig.pods("smallest").unwrap();
    assert_eq!(names(&pods), BTreeSet::from([format!("smallest-{}-0", status.revision)]));
    let maps = rig.config_maps("smallest").unwrap();
    assert_eq!(maps.len(), 1);
    assert_eq!(maps[0].name_any(), format!("smallest-{}", status.revision));
    assert_eq!(maps[0].immutable, Some(true));
    rig.wait("KV cache is measured", SOON, |rig| {
        Ok(rig
            .get("smallest")?
            .status
            .and_then(|status| status.capacity)
            .is_some_and(|capacity| capacity.kv_tokens == 16_000))
    })
    .unwrap();
    delete(&rig, "smallest");
}

/// What the operator wrote about a deployment and its children so far.
fn writes_about(rig: &Rig, name: &str) -> Vec<String> {
    measured::writes_about(&rig.cluster.control_plane, &rig.operator, name).unwrap()
}

#[test]
fn a_settled_deployment_causes_no_writes() {
    let rig = rig();
    rig.apply("settled", spec(2, json!({}))).unwrap();
    rig.wait_ready("settled", SOON).unwrap();
    sleep(Duration::from_secs(4));
    let (before, version) = (writes_about(&rig, "settled"), rig.get("settled").unwrap().resource_version());
    assert!(!before.is_empty());
    // The same object again, and time for five rounds of readings.
    rig.apply("settled", spec(2, json!({}))).unwrap();
    sleep(Duration::from_secs(10));
    assert_eq!(writes_about(&rig, "settled"), before);
    assert_eq!(rig.get("settled").unwrap().resource_version(), version);
    delete(&rig, "settled");
}

#[test]
fn scaling_goes_up_and_down_and_to_zero() {
    let rig = rig();
    rig.apply("scaled", spec(1, json!({}))).unwrap();
    rig.wait_ready("scaled", SOON).unwrap();
    rig.scale("scaled", 3).unwrap();
    rig.wait("three serve", SOON, |rig| Ok(serving(&rig.pods("scaled")?) == 3)).unwrap();
    rig.scale("scaled", 0).unwrap();
    rig.wait("no pod is left", SOON, |rig| Ok(rig.pods("scaled")?.is_empty())).unwrap();
    rig.wait_ready("scaled", SOON).unwrap();
    let (_, reason, _) = condition(&rig.get("scaled").unwrap(), "Ready").unwrap();
    assert_eq!(reason, "ScaledToZero");
    delete(&rig, "scaled");
}

#[test]
fn the_idle_replica_goes_and_the_busy_ones_stream_ends_by_itself() {
    let rig = rig();
    rig.apply("idle", spec(2, json!({}))).unwrap();
    rig.wait_ready("idle", SOON).unwrap();
    let pods = rig.pods("idle").unwrap();
    // The one with the higher ordinal would go otherwise.
    let busy = pods.iter().max_by_key(|pod| pod.name_any()).unwrap();
    let stream = hold(&address(busy));
    // When it is read the second time, the first reading is known.
    let readings = format!("http://{}/busy-readings", address(busy));
    rig.wait("it is known who is busy", SOON, |_| Ok(get(&readings)?.parse::<u32>()? >= 2)).unwrap();
    rig.scale("idle", 1).unwrap();
    rig.wait("one pod is left", SOON, |rig| Ok(rig.pods("idle")?.len() == 1)).unwrap();
    assert_eq!(names(&rig.pods("idle").unwrap()), BTreeSet::from([busy.name_any()]));
    finish(busy);
    assert_eq!(end_of(stream), "done");
    delete(&rig, "idle");
}

#[test]
fn a_busy_replica_is_drained_before_it_is_deleted() {
    let rig = rig();
    rig.apply("drained", spec(1, json!({}))).unwrap();
    rig.wait_ready("drained", SOON).unwrap();
    let pod = rig.pods("drained").unwrap().remove(0);
    let stream = hold(&address(&pod));
    sleep(Duration::from_secs(1));
    rig.scale("drained", 0).unwrap();
    rig.wait("it drains", SOON, |rig| {
        Ok(rig.pods("drained")?.iter().all(|pod| intent_of(pod).is_some_and(|(_, drains)| drains)))
    })
    .unwrap();
    sleep(Duration::from_secs(3));
    let pods = rig.pods("drained").unwrap();
    assert_eq!(pods.len(), 1);
    assert!(pods.iter().all(|pod| pod.metadata.deletion_timestamp.is_none()), "deleted while streaming");
    finish(&pod);
    assert_eq!(end_of(stream), "done");
    rig.wait("it is deleted", SOON, |rig| Ok(rig.pods("drained")?.is_empty())).unwrap();
    delete(&rig, "drained");
}

#[test]
fn demand_that_returns_takes_the_draining_replica_back() {
    let rig = rig();
    rig.apply("back", spec(2, json!({}))).unwrap();
    rig.wait_ready("back", SOON).unwrap();
    let pods = rig.pods("back").unwrap();
    let streams: Vec<Child> = pods.iter().map(|pod| hold(&address(pod))).collect();
    sleep(Duration::from_secs(1));
    rig.scale("back", 1).unwrap();
    rig.wait("one drains", SOON, |rig| Ok(serving(&rig.pods("back")?) == 1)).unwrap();
    rig.scale("back", 2).unwrap();
    rig.wait("both serve again", SOON, |rig| Ok(serving(&rig.pods("back")?) == 2)).unwrap();
    assert_eq!(names(&rig.pods("back").unwrap()), names(&pods), "a new pod was made");
    rig.wait_ready("back", SOON).unwrap();
    pods.iter().for_each(finish);
    for stream in streams {
        assert_eq!(end_of(stream), "done");
    }
    delete(&rig, "back");
}

/// The number of the last order that the agent in the pod took.
fn echoed(pod: &Pod) -> Option<u64> {
    let ip = pod.status.as_ref().unwrap().pod_ip.clone().unwrap();
    let load: Value = serde_json::from_str(&get(&format!("http://{ip}:8001/v1/load")).unwrap()).unwrap();
    load["intent"].as_u64()
}

fn post(url: &str) {
    assert!(Command::new("curl").args(["-sS", "--max-time", "5", "-X", "POST", url]).status().unwrap().success());
}

#[test]
fn an_order_that_was_not_heard_is_given_again_and_a_lost_one_is_replaced() {
    let rig = rig();
    rig.apply("ordered", spec(2, json!({}))).unwrap();
    rig.wait_ready("ordered", SOON).unwrap();
    let pods = rig.pods("ordered").unwrap();
    let streams: Vec<Child> = pods.iter().map(|pod| hold(&address(pod))).collect();
    for pod in &pods {
        post(&format!("http://{}/lie/deaf", address(pod)));
    }
    rig.scale("ordered", 1).unwrap();
    rig.wait("one is to drain", SOON, |rig| {
        Ok(rig.pods("ordered")?.iter().filter_map(intent_of).any(|intent| intent == (1, true)))
    })
    .unwrap();
    rig.scale("ordered", 2).unwrap();
    rig.wait("it is to serve again", SOON, |rig| {
        Ok(rig.pods("ordered")?.iter().filter_map(intent_of).any(|intent| intent == (2, false)))
    })
    .unwrap();
    for pod in &pods {
        post(&format!("http://{}/lie/none", address(pod)));
    }
    rig.wait("the order arrives", SOON, |rig| Ok(rig.pods("ordered")?.iter().any(|pod| echoed(pod) == Some(2))))
        .unwrap();
    rig.wait("both serve", SOON, |rig| Ok(serving(&rig.pods("ordered")?) == 2)).unwrap();
    assert_eq!(names(&rig.pods("ordered").unwrap()), names(&pods), "a new pod was made");

    // Somebody takes the annotation away: the operator counts on from what the agent says.
    let victim = rig.pods("ordered").unwrap().into_iter().find(|pod| intent_of(pod).is_some()).unwrap();
    let strip = json!({"metadata": {"annotations": {"stoker.dev/intent": null}}});
    let patch = kube::api::Patch::Merge(strip);
    rig.block_on(rig.api::<Pod>().patch(&victim.name_any(), &Default::default(), &patch)).unwrap();
    rig.wait("it is written again", SOON, |rig| {
        let pods = rig.pods("ordered")?;
        let pod = pods.iter().find(|pod| pod.uid() == victim.uid());
        Ok(pod.is_some_and(|pod| intent_of(pod) == Some((3, false)) && echoed(pod) == Some(3)))
    })
    .unwrap();
    pods.iter().for_each(finish);
    for stream in streams {
        assert_eq!(end_of(stream), "done");
    }
    delete(&rig, "ordered");
}

#[test]
fn a_replica_that_takes_no_orders_is_drained_by_the_kubelet() {
    let rig = rig();
    rig.apply("deaf", spec(1, json!({}))).unwrap();
    rig.wait_ready("deaf", SOON).unwrap();
    let pod = rig.pods("deaf").unwrap().remove(0);
    let stream = hold(&address(&pod));
    post(&format!("http://{}/lie/deaf", address(&pod)));
    rig.scale("deaf", 0).unwrap();
    let is_deleted = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    rig.wait("it is deleted", SOON * 2, |rig| Ok(rig.pods("deaf")?.iter().all(is_deleted))).unwrap();
    sleep(Duration::from_secs(1));
    assert_eq!(rig.pods("deaf").unwrap().len(), 1, "ended while streaming");
    finish(&pod);
    assert_eq!(end_of(stream), "done");
    rig.wait("it has ended", SOON, |rig| Ok(rig.pods("deaf")?.is_empty())).unwrap();
    delete(&rig, "deaf");
}

#[test]
fn a_change_rolls_one_pod_at_a_time_without_serving_fewer() {
    let rig = rig();
    rig.apply("rolled", spec(3, annotated("a"))).unwrap();
    rig.wait_ready("rolled", SOON).unwrap();
    let before = rig.get("rolled").unwrap().status.unwrap().revision;
    let service = rig.service("rolled").unwrap().spec.unwrap().cluster_ip.unwrap();
    let stream = hold_for(&format!("{service}:8000"), 10);
    let mut change = annotated("b");
    change["rollout"] = json!({"keepRevisions": 0});
    rig.apply("rolled", spec(3, change)).unwrap();
    let (mut fewest, mut most) = (usize::MAX, 0);
    rig.wait("the change is rolled out", SOON * 2, |rig| {
        let pods = rig.pods("rolled")?;
        let staying = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).count();
        (fewest, most) = (fewest.min(serving(&pods)), most.max(staying));
        let deployment = rig.get("rolled")?;
        Ok(is_ready(&deployment) && pods.iter().all(|pod| revision_of(pod) != before))
    })
    .unwrap();
    assert!(fewest >= 3, "only {fewest} served");
    assert!(most <= 4, "{most} pods at a time");
    assert_eq!(end_of(stream), "done");
    rig.wait("the old configuration is gone", SOON, |rig| Ok(rig.config_maps("rolled")?.len() == 1)).unwrap();
    delete(&rig, "rolled");
}

#[test]
fn a_bad_change_stops_at_its_first_pod_and_the_way_back_is_free() {
    let rig = rig();
    rig.apply("bad", spec(2, json!({}))).unwrap();
    rig.wait_ready("bad", SOON).unwrap();
    let good = names(&rig.pods("bad").unwrap());
    let bad = json!({"model": {"source": "file:///stand-in/load-fails"}});
    rig.apply("bad", spec(2, bad)).unwrap();
    rig.wait("the reason is told", SOON, |rig| {
        Ok(condition(&rig.get("bad")?, "Ready").is_some_and(|(_, reason, _)| reason == "ModelLoadFailed"))
    })
    .unwrap();
    sleep(Duration::from_secs(3));
    let pods = rig.pods("bad").unwrap();
    assert_eq!((pods.len(), serving(&pods)), (3, 2));
    rig.apply("bad", spec(2, json!({}))).unwrap();
    rig.wait_ready("bad", SOON).unwrap();
    assert_eq!(names(&rig.pods("bad").unwrap().into_iter().filter(serves).collect::<Vec<_>>()), good);
    delete(&rig, "bad");
}

/// Applies a spec that cannot serve and returns reason and message of `Ready` once it is not a passing one.
fn blocked(rig: &Rig, name: &str, more: Value) -> (String, String) {
    rig.apply(name, spec(1, more)).unwrap();
    let mut told = (String::new(), String::new());
    rig.wait("it is degraded", SOON, |rig| {
        let deployment = rig.get(name)?;
        let (_, reason, message) = condition(&deployment, "Ready").unwrap_or_default();
        told = (reason, message);
        Ok(condition(&deployment, "Degraded").is_some_and(|(status, _, _)| status == "True"))
    })
    .unwrap();
    delete(rig, name);
    told
}

#[test]
fn the_reason_is_the_schedulers_when_no_node_has_room() {
    let (reason, message) = blocked(&rig(), "too-large", json!({"resources": {"cpu": 1000}}));
    assert_eq!(reason, "Unschedulable");
    assert!(message.contains("Insufficient cpu"), "{message}");
}

#[test]
fn a_replica_without_a_gpu_to_have_says_so() {
    let (reason, message) = blocked(&rig(), "gpuless", json!({"resources": {"gpus": 1}}));
    assert_eq!(reason, "Unschedulable");
    assert!(message.contains("Insufficient nvidia.com/gpu"), "{message}");
}

#[test]
fn the_reason_is_the_kubelets_when_the_image_is_missing() {
    let (reason, message) = blocked(&rig(), "imageless", json!({"pod": {"image": "nowhere.example/agent:9"}}));
    assert!(["ErrImagePull", "ImagePullBackOff"].contains(&reason.as_str()), "{reason}");
    assert!(message.contains("nowhere.example/agent:9"), "{message}");
}

#[test]
fn the_reason_is_the_agents_when_the_model_cannot_be_loaded() {
    let (reason, message) = blocked(&rig(), "weightless", json!({"model": {"source": "file:///stand-in/load-fails"}}));
    assert_eq!(reason, "ModelLoadFailed");
    assert!(message.contains("open /stand-in/load-fails/config.json: no such file"), "{message}");
}

#[test]
fn the_reason_has_exit_code_and_last_words_when_the_agent_crashes() {
    let (reason, message) = blocked(&rig(), "crashing", json!({"model": {"source": "file:///stand-in/crashes"}}));
    assert_eq!(reason, "CrashLoopBackOff");
    assert!(message.contains("exit code 3") && message.contains("told to crash"), "{message}");
}

#[test]
fn a_service_of_somebody_else_is_left_alone_and_named() {
    let rig = rig();
    let service =
        json!({"metadata": {"name": "taken"}, "spec": {"selector": {"app": "other"}, "ports": [{"port": 1}]}});
    let service = serde_json::from_value(service).unwrap();
    let services = rig.api::<k8s_openapi::api::core::v1::Service>();
    rig.block_on(services.create(&Default::default(), &service)).unwrap();
    rig.apply("taken", spec(1, json!({}))).unwrap();
    rig.wait("it says so", SOON, |rig| {
        let told = condition(&rig.get("taken")?, "Ready");
        Ok(told.is_some_and(|(_, reason, message)| reason == "NameTaken" && message.contains("Service taken")))
    })
    .unwrap();
    assert_eq!(rig.service("taken").unwrap().spec.unwrap().selector.unwrap()["app"], "other");
    assert!(rig.pods("taken").unwrap().is_empty());
    rig.block_on(services.delete("taken", &Default::default())).unwrap();
    rig.wait_ready("taken", SOON).unwrap();
    delete(&rig, "taken");
}

#[test]
fn what_others_change_in_the_service_is_put_right_and_what_they_add_stays() {
    let rig = rig();
    rig.apply("edited", spec(1, json!({}))).unwrap();
    rig.wait_ready("edited", SOON).unwrap();
    let services = rig.api::<k8s_openapi::api::core::v1::Service>();
    let edit = json!({"metadata": {"annotations": {"note": "theirs"}}, "spec": {"selector": {"app.kubernetes.io/instance": "other"}}});
    let patch = kube::api::Patch::Merge(edit);
    rig.block_on(services.patch("edited", &Default::default(), &patch)).unwrap();
    rig.wait("the selector is right again", SOON, |rig| {
        Ok(rig.service("edited")?.spec.unwrap_or_default().selector.unwrap_or_default()["app.kubernetes.io/instance"]
            == "edited")
    })
    .unwrap();
    assert_eq!(rig.service("edited").unwrap().annotations()["note"], "theirs");
    delete(&rig, "edited");
}

#[test]
fn a_deleted_pod_is_replaced() {
    let rig = rig();
    rig.apply("replaced", spec(2, json!({}))).unwrap();
    rig.wait_ready("replaced", SOON).unwrap();
    let victim = rig.pods("replaced").unwrap().remove(0);
    rig.delete_pod(&victim.name_any()).unwrap();
    rig.wait("another one serves", SOON, |rig| {
        let pods = rig.pods("replaced")?;
        Ok(serving(&pods) == 2 && pods.iter().all(|pod| pod.uid() != victim.uid()))
    })
    .unwrap();
    delete(&rig, "replaced");
}

#[test]
fn delete_leaves_nothing_even_when_the_operator_is_down() {
    let mut rig = alone();
    rig.apply("orphan", spec(2, json!({}))).unwrap();
    rig.wait_ready("orphan", SOON).unwrap();
    rig.operator.kill().unwrap();
    rig.delete("orphan").unwrap();
    let outcome = rig.wait("everything is gone", GONE, |rig| Ok(rig.children("orphan")? == 0));
    // Others need it, however this ended.
    rig.operator.restart().unwrap();
    outcome.unwrap();
}

#[test]
fn a_namesake_created_at_once_starts_anew() {
    let rig = rig();
    rig.apply("again", spec(1, json!({}))).unwrap();
    rig.wait_ready("again", SOON).unwrap();
    let first = rig.pods("again").unwrap().remove(0);
    rig.delete("again").unwrap();
    rig.apply("again", spec(1, json!({}))).unwrap();
    rig.wait_ready("again", SOON).unwrap();
    assert!(rig.pods("again").unwrap().iter().filter(|pod| serves(pod)).all(|pod| pod.uid() != first.uid()));
    delete(&rig, "again");
}

#[test]
fn a_change_without_room_for_a_surplus_pod_replaces_in_place() {
    let rig = rig();
    // The node has 64 CPUs: one such pod fits, two do not.
    let rollout = json!({"maxUnavailable": 1, "surgeSeconds": 5});
    let large = |change: &str| json!({"resources": {"cpu": 40}, "pod": {"annotations": {"change": change}}, "rollout": rollout});
    rig.apply("large", spec(1, large("a"))).unwrap();
    rig.wait_ready("large", SOON).unwrap();
    let before = rig.get("large").unwrap().status.unwrap().revision;
    // It keeps the old replica for as long as this has to be seen.
    let pod = rig.pods("large").unwrap().remove(0);
    let stream = hold(&address(&pod));
    let told = reasons(&rig, "large");
    rig.apply("large", spec(1, large("b"))).unwrap();
    rig.wait("it is replaced in place", SOON, |_| Ok(lock(&told).contains("ReplacingInPlace"))).unwrap();
    finish(&pod);
    assert_eq!(end_of(stream), "done");
    rig.wait("the change is rolled out", SOON * 2, |rig| {
        let deployment = rig.get("large")?;
        Ok(is_ready(&deployment) && deployment.status.is_some_and(|status| status.revision != before))
    })
    .unwrap();
    delete(&rig, "large");
}

#[test]
fn a_quota_that_refuses_a_pod_is_quoted() {
    let rig = alone();
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}});
    let quotas = rig.api::<k8s_openapi::api::core::v1::ResourceQuota>();
    rig.block_on(quotas.create(&Default::default(), &serde_json::from_value(quota).unwrap())).unwrap();
    rig.wait("the quota is in force", SOON, |rig| {
        let quota = rig.block_on(rig.api::<k8s_openapi::api::core::v1::ResourceQuota>().get("none"))?;
        Ok(quota.status.and_then(|status| status.hard).is_some())
    })
    .unwrap();
    rig.apply("refused", spec(1, json!({}))).unwrap();
    rig.wait("it is quoted", SOON, |rig| {
        let told = condition(&rig.get("refused")?, "Ready");
        Ok(told.is_some_and(|(_, reason, message)| reason == "ChildRefused" && message.contains("exceeded quota")))
    })
    .unwrap();
    rig.block_on(quotas.delete("none", &Default::default())).unwrap();
    rig.wait_ready("refused", SOON).unwrap();
    delete(&rig, "refused");
}

#[test]
fn events_tell_what_was_done_to_which_pod_and_each_says_its_own() {
    let rig = rig();
    let mut serving = Vec::new();
    for tokens in [512, 1024] {
        rig.apply("told", spec(1, json!({"engine": {"maxModelLen": tokens}}))).unwrap();
        rig.wait_ready("told", SOON).unwrap();
        let revision = rig.get("told").unwrap().status.unwrap().revision;
        serving.push(format!("1 of 1 replica serves revision {revision}"));
    }
    let pod = rig.pods("told").unwrap().remove(0).name_any();
    rig.scale("told", 0).unwrap();
    rig.wait("no pod is left", SOON, |rig| Ok(rig.pods("told")?.is_empty())).unwrap();
    rig.wait("all is told", SOON, |rig| {
        let events = rig.block_on(rig.api::<k8s_openapi::api::events::v1::Event>().list(&Default::default()))?.items;
        let ours = events
            .iter()
            .filter(|event| event.regarding.as_ref().is_some_and(|about| about.name.as_deref() == Some("told")));
        let told: BTreeSet<(String, String)> = ours
            .map(|event| (event.reason.clone().unwrap_or_default(), event.note.clone().unwrap_or_default()))
            .collect();
        let of_pod = |reason: &str, note: String| told.contains(&(reason.to_owned(), note));
        Ok(of_pod("Created", format!("pod {pod}"))
            && of_pod("Draining", format!("pod {pod}"))
            && of_pod("Deleted", format!("pod {pod} (drained)"))
            && serving.iter().all(|note| of_pod("Serving", note.clone())))
    })
    .unwrap();
    delete(&rig, "told");
}

#[test]
fn streams_that_outlast_the_deadline_are_ended_by_the_agent() {
    let rig = rig();
    let short = json!({"drain": {"withdrawSeconds": 0, "deadlineSeconds": 2}});
    rig.apply("cut", spec(1, short)).unwrap();
    rig.wait_ready("cut", SOON).unwrap();
    let stream = hold(&address(&rig.pods("cut").unwrap().remove(0)));
    sleep(Duration::from_secs(1));
    rig.scale("cut", 0).unwrap();
    assert_eq!(end_of(stream), "cut");
    rig.wait("no pod is left", SOON, |rig| Ok(rig.pods("cut")?.is_empty())).unwrap();
    delete(&rig, "cut");
}

#[test]
fn weights_on_a_claim_are_mounted_where_the_agent_looks() {
    let rig = rig();
    let disk = tempfile::tempdir().unwrap();
    std::fs::create_dir(disk.path().join("chat")).unwrap();
    let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "weights"}, "spec": {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadOnlyMany"], "hostPath": {"path": disk.path()}, "storageClassName": "none"}});
    let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights"}, "spec": {
        "resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadOnlyMany"], "storageClassName": "none"}});
    rig.cluster.apply(&volume.to_string()).unwrap();
    rig.cluster.apply(&claim.to_string()).unwrap();
    rig.apply("claimed", spec(1, json!({"model": {"source": "pvc://weights/chat"}}))).unwrap();
    rig.wait_ready("claimed", SOON).unwrap();
    delete(&rig, "claimed");
    let (reason, message) = blocked(&rig, "misplaced", json!({"model": {"source": "pvc://weights/nowhere"}}));
    assert_eq!(reason, "ModelLoadFailed");
    assert!(message.contains("/nowhere/config.json"), "{message}");
}
