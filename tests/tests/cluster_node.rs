//! The process node and the Service proxy on a real control plane: pods run, are probed, restarted and stopped as a
//! kubelet would, and nothing survives a killed test.

use std::{
    env,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use stoker_cluster::{ControlPlaneOptions, Controllers, ImageMap, NodeOptions, is_running};
use stoker_tests::cluster::{TestCluster, http_get, wait_for};

/// One cluster for all tests of this file: each takes names of its own. It ends with the process.
fn cluster() -> &'static TestCluster {
    static CLUSTER: OnceLock<TestCluster> = OnceLock::new();
    CLUSTER.get_or_init(start_cluster)
}

fn start_cluster() -> TestCluster {
    TestCluster::start(node_options())
}

fn node_options() -> NodeOptions {
    let mut images = ImageMap::default();
    images.insert("stand-in", env!("CARGO_BIN_EXE_stand-in"));
    NodeOptions { images, ..Default::default() }
}

/// A pod of the stand-in with probes, and a Service of the same name before it.
fn manifest(name: &str, container: Value) -> String {
    // A process needs a moment until it listens; only readiness may say at once that it does not.
    let probe = |path: &str, failures: u32| json!({"httpGet": {"path": path, "port": "http"}, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": failures});
    let mut base = json!({
        "name": "main", "image": "stand-in:1", "ports": [{"name": "http", "containerPort": 8000}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "readinessProbe": probe("/readyz", 1), "livenessProbe": probe("/healthz", 5)});
    base.as_object_mut().expect("an object").extend(container.as_object().expect("an object").clone());
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [base], "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 20}});
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]}});
    json!({"apiVersion": "v1", "kind": "List", "items": [service, pod]}).to_string()
}

fn run(name: &str, container: Value) -> &'static TestCluster {
    let cluster = cluster();
    cluster.apply(&manifest(name, container)).expect("the manifest is accepted");
    cluster
}

fn run_until_served(name: &str, container: Value) -> &'static TestCluster {
    let cluster = run(name, container);
    wait_for("an answer through the Service", || http_get(cluster.service_address(name), "/healthz").ok());
    cluster
}

fn container_status(cluster: &TestCluster, pod: &str) -> Value {
    cluster.get("pod", pod).map(|pod| pod["status"]["containerStatuses"][0].clone()).unwrap_or_default()
}

#[test]
fn a_pod_becomes_ready_and_answers_through_its_service() {
    let cluster = run_until_served("served", json!({}));
    assert!(cluster.is_ready("served"));
    let pod = cluster.get("pod", "served").unwrap();
    assert_eq!(pod["status"]["phase"], "Running");
    assert_eq!(pod["spec"]["nodeName"], "node-0");
    let pid: u32 = http_get(cluster.service_address("served"), "/whoami").unwrap().parse().unwrap();
    assert_eq!(cluster.node.pids_of("default", "served"), [pid]);
}

#[test]
fn a_config_map_and_the_downward_api_reach_the_process() {
    cluster().apply(r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"told"},"data":{"a.json":"{\"dir\":\"/etc/told\"}"}}"#).unwrap();
    let container = json!({
        "args": ["--config", "/etc/told/a.json", "--name=$(POD)"],
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/told"}]});
    let mut manifest: Value = serde_json::from_str(&manifest("told", container)).unwrap();
    manifest["items"][1]["spec"]["volumes"] = json!([{"name": "config", "configMap": {"name": "told"}}]);
    cluster().apply(&manifest.to_string()).unwrap();
    let address = cluster().service_address("told");
    let args = wait_for("an answer", || http_get(address, "/args").ok());
    let (config, name) = args.strip_prefix("--config ").unwrap().split_once(' ').unwrap();
    assert_eq!(name, "--name=told");
    let text: Value = serde_json::from_str(&http_get(address, &format!("/file{config}")).unwrap()).unwrap();
    assert!(config.starts_with(text["dir"].as_str().unwrap()), "{config} is not in {text}");
}

#[test]
fn an_unready_pod_leaves_its_service_but_keeps_its_open_connections() {
    let cluster = run_until_served("leaving", json!({}));
    let address = cluster.service_address("leaving");
    let held = thread::spawn(move || http_get(address, "/hold/6"));
    thread::sleep(Duration::from_millis(500));
    http_get(address, "/unready").unwrap();
    wait_for("connections are refused", || http_get(address, "/healthz").err());
    assert_eq!(held.join().unwrap().unwrap().lines().count(), 6);
    assert!(!cluster.is_ready("leaving"));
    let status = container_status(cluster, "leaving");
    assert_eq!(status["restartCount"], 0, "{status}\n{}", cluster.kubectl(&["get", "events"]));
}

#[test]
fn a_crash_is_restarted_and_shows_code_and_last_words() {
    let cluster = run_until_served("crashing", json!({}));
    let _cut_off = http_get(cluster.service_address("crashing"), "/crash/7");
    let status = wait_for("one restart", || {
        Some(container_status(cluster, "crashing")).filter(|status| status["restartCount"] == 1)
    });
    let last = &status["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 7);
    assert!(last["message"].as_str().unwrap().ends_with("crashing with 7"), "{last}");
    wait_for("ready again", || cluster.is_ready("crashing").then_some(()));
}

#[test]
fn a_crash_loop_backs_off() {
    let cluster = run("looping", json!({"args": ["--crash", "3"]}));
    let status = wait_for("CrashLoopBackOff", || {
        Some(container_status(cluster, "looping"))
            .filter(|status| status["state"]["waiting"]["reason"] == "CrashLoopBackOff")
    });
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 3);
    assert!(status["state"]["waiting"]["message"].as_str().unwrap().starts_with("back-off"), "{status}");
}

#[test]
fn a_failing_liveness_probe_restarts_the_container() {
    let cluster = run_until_served("sick", json!({}));
    http_get(cluster.service_address("sick"), "/sicken").unwrap();
    wait_for("one restart", || Some(container_status(cluster, "sick")).filter(|status| status["restartCount"] == 1));
    wait_for("ready again", || cluster.is_ready("sick").then_some(()));
}

#[test]
fn an_unknown_image_is_a_failed_pull_until_the_image_is_there() {
    let cluster = run("unknown", json!({"image": "nobody/knows:1"}));
    let status = wait_for("ImagePullBackOff", || {
        Some(container_status(cluster, "unknown"))
            .filter(|status| status["state"]["waiting"]["reason"] == "ImagePullBackOff")
    });
    assert!(status["state"]["waiting"]["message"].as_str().unwrap().contains("nobody/knows:1"), "{status}");
    cluster.node.add_image("nobody/knows", env!("CARGO_BIN_EXE_stand-in"));
    wait_for("ready", || cluster.is_ready("unknown").then_some(()));
}

#[test]
fn a_frozen_pod_is_deleted_when_its_grace_ends() {
    let cluster = run_until_served("frozen", json!({"livenessProbe": null}));
    let pid = cluster.node.pids_of("default", "frozen")[0];
    cluster.node.freeze_pod("default", "frozen").unwrap();
    let begun = Instant::now();
    cluster.kubectl(&["delete", "pod", "frozen", "--grace-period=3"]);
    assert!(begun.elapsed() >= Duration::from_secs(3), "the grace period was cut");
    assert!(!is_running(pid));
    assert!(cluster.get("pod", "frozen").is_none());
}

#[test]
fn a_pod_that_is_removed_by_force_leaves_no_process() {
    let cluster = run_until_served("forced", json!({}));
    let pid = cluster.node.pids_of("default", "forced")[0];
    cluster.kubectl(&["delete", "pod", "forced", "--force", "--grace-period=0"]);
    wait_for("the process is gone", || (!is_running(pid)).then_some(()));
}

#[test]
fn logs_of_this_run_and_the_one_before_can_be_read() {
    let cluster = run_until_served("talking", json!({}));
    let _cut_off = http_get(cluster.service_address("talking"), "/crash/5");
    wait_for("one restart", || Some(container_status(cluster, "talking")).filter(|status| status["restartCount"] == 1));
    let before = cluster.kubectl(&["logs", "talking", "--previous", "--tail=1"]);
    assert_eq!(before, "crashing with 5\n");
    let now =
        wait_for("a line of the new run", || Some(cluster.kubectl(&["logs", "talking"])).filter(|log| !log.is_empty()));
    assert!(now.starts_with("listening on") && !now.contains("crashing"), "{now}");
}

#[test]
fn a_claim_that_is_bound_to_a_local_folder_is_mounted() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("weights"), "seven").unwrap();
    let capacity = json!({"storage": "1Gi"});
    let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "models"},
         "spec": {"capacity": capacity, "accessModes": ["ReadOnlyMany"], "storageClassName": "", "hostPath": {"path": folder.path()}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"},
         "spec": {"resources": {"requests": capacity}, "accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": "models"}}]});
    cluster().apply(&objects.to_string()).unwrap();
    let container = json!({"args": ["/models/weights"], "volumeMounts": [{"name": "models", "mountPath": "/models"}]});
    let mut manifest: Value = serde_json::from_str(&manifest("claiming", container)).unwrap();
    manifest["items"][1]["spec"]["volumes"] =
        json!([{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]);
    cluster().apply(&manifest.to_string()).unwrap();
    let address = cluster().service_address("claiming");
    let path = wait_for("an answer", || http_get(address, "/args").ok());
    assert_eq!(http_get(address, &format!("/file{path}")).unwrap(), "seven");
}

#[test]
fn what_the_node_cannot_do_is_refused_in_the_status() {
    let cluster = run("refused", json!({"envFrom": [{"configMapRef": {"name": "any"}}]}));
    let status = wait_for("a refusal", || {
        Some(container_status(cluster, "refused"))
            .filter(|status| status["state"]["waiting"]["reason"] == "CreateContainerConfigError")
    });
    assert!(status["state"]["waiting"]["message"].as_str().unwrap().contains("envFrom"), "{status}");
}

/// Has a cluster of its own, with little patience for silence.
#[test]
fn a_silent_node_is_marked_its_pods_go_on_and_all_is_well_when_it_speaks_again() {
    let options = ControlPlaneOptions {
        controllers: Controllers::All { node_grace: Duration::from_secs(5) },
        ..Default::default()
    };
    let cluster = TestCluster::start_with(options, NodeOptions { heartbeat: Duration::from_secs(1), ..node_options() });
    cluster.apply(&manifest("lonely", json!({}))).unwrap();
    let address = cluster.service_address("lonely");
    wait_for("an answer", || http_get(address, "/healthz").ok());
    let pid = cluster.node.pids_of("default", "lonely");
    cluster.node.fall_silent();
    wait_for("the pod is marked as not ready", || (!cluster.is_ready("lonely")).then_some(()));
    cluster.node.speak();
    wait_for("the pod is ready again", || cluster.is_ready("lonely").then_some(()));
    assert_eq!(cluster.node.pids_of("default", "lonely"), pid, "the process was not restarted");
    // A controller that missed news itself may say so of a node that was never silent.
    let lost = json!({"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}).to_string();
    let condition = ["-o", "jsonpath={.status.conditions[?(@.type=='Ready')].status}"];
    let told =
        cluster.kubectl(&[&["patch", "node", "node-0", "--subresource=status", "-p", &lost], &condition[..]].concat());
    assert_eq!(told, "Unknown");
    wait_for("the node says that it is ready", || {
        (cluster.kubectl(&[&["get", "node", "node-0"], &condition[..]].concat()) == "True").then_some(())
    });
}

/// Has a cluster of its own: the others must not notice.
#[test]
fn pods_outlive_the_api_server_and_their_status_catches_up() {
    let mut cluster = start_cluster();
    cluster.apply(&manifest("outliving", json!({}))).unwrap();
    let address = cluster.service_address("outliving");
    wait_for("an answer", || http_get(address, "/healthz").ok());
    cluster.control_plane.kill_apiserver();
    let _cut_off = http_get(address, "/crash/4");
    wait_for("an answer without an API server", || http_get(address, "/healthz").ok());
    cluster.control_plane.restart_apiserver().unwrap();
    let status = wait_for("the restart is told", || {
        Some(container_status(&cluster, "outliving")).filter(|status| status["restartCount"] == 1)
    });
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 4);
}

/// Not a test: the process that the next test kills. It tells the pid of every process and the folder.
#[test]
#[ignore = "a part of a_killed_test_leaves_no_process_and_no_folder"]
fn victim() {
    let cluster = start_cluster();
    cluster.apply(&manifest("orphan", json!({}))).unwrap();
    let pods = wait_for("the pod's process", || {
        Some(cluster.node.pids_of("default", "orphan")).filter(|pids| !pids.is_empty())
    });
    let pids: Vec<u32> = cluster.control_plane.pids().into_iter().map(|(_, pid)| pid).chain(pods).collect();
    println!("\nVICTIM {}", json!({"pids": pids, "dir": cluster.control_plane.dir()}));
    thread::sleep(Duration::from_secs(600));
}

#[test]
fn a_killed_test_leaves_no_process_and_no_folder() {
    let mut victim = Command::new(env::current_exe().unwrap())
        .args(["--exact", "cluster_node::victim", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines();
    let told = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("VICTIM ").map(str::to_owned)).unwrap();
    let told: Value = serde_json::from_str(&told).unwrap();
    let pids: Vec<u32> = serde_json::from_value(told["pids"].clone()).unwrap();
    assert_eq!(pids.len(), 5, "{told}");
    // A process that is just becoming the pod's program has no command line for a moment.
    wait_for("every process runs", || pids.iter().all(|&pid| is_running(pid)).then_some(()));
    victim.kill().unwrap();
    victim.wait().unwrap();
    wait_for("every process is gone", || pids.iter().all(|&pid| !is_running(pid)).then_some(()));
    let dir = std::path::PathBuf::from(told["dir"].as_str().unwrap());
    wait_for("the folder is gone", || (!dir.exists()).then_some(()));
}
