//! `kubectl stoker` as kubectl runs it, on a real API server with a recorded status and an operator that answers recorded
//! decisions.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, Uri},
    routing::get,
};
use serde_json::{Value, json};
use stoker_cluster::{ControlPlane, ControlPlaneOptions};
use stoker_tests::cluster::{built, run_with_input, wait_for};
use tokio::runtime::Runtime;

const ALL_DECIDED: &str = "All 500 recorded decisions made again: the same, bit for bit.";

/// An API server with the CRD, and a folder for files.
struct Stage {
    control_plane: ControlPlane,
    dir: tempfile::TempDir,
}

impl Stage {
    fn set() -> Self {
        let stage = Self {
            control_plane: ControlPlane::start(ControlPlaneOptions::default()).unwrap(),
            dir: tempfile::tempdir().unwrap(),
        };
        stage.apply(&serde_json::to_value(stoker_crds::crd::crd()).unwrap());
        wait_for("the CRD is served", || stage.kubectl(&["get", "infd"], "").ok());
        stage
    }

    fn kubectl(&self, args: &[&str], input: &str) -> Result<String, String> {
        let mut command = self.control_plane.kubectl().unwrap();
        command.args(args);
        run_with_input(command, input)
    }

    fn apply(&self, object: &Value) {
        self.kubectl(&["apply", "-f", "-"], &object.to_string()).unwrap();
    }

    /// A deployment with this status.
    fn deployment(&self, spec: Value, status: &Value) {
        let kind = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment"});
        let mut object = kind;
        object["metadata"] = json!({"name": "chat"});
        object["spec"] = spec;
        self.apply(&object);
        let patch = json!({ "status": status }).to_string();
        self.kubectl(&["patch", "infd", "chat", "--subresource=status", "--type=merge", "-p", &patch], "").unwrap();
    }

    /// `kubectl stoker ARGS`, found by kubectl as any plugin is.
    fn stoker(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let plugins = built("kubectl-stoker").parent().unwrap().to_owned();
        let path = std::env::join_paths([plugins, PathBuf::from("/usr/bin"), PathBuf::from("/bin")]).unwrap();
        let mut command = self.control_plane.kubectl().unwrap();
        command.arg("stoker").args(args).env("PATH", path).env_remove("STOKER_OPERATOR_URL").current_dir(&self.dir);
        command
    }

    /// Its output; everything it said when it failed.
    fn said(&self, args: &[&str]) -> String {
        let output = self.stoker(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn refused(&self, args: &[&str]) -> String {
        let output = self.stoker(args);
        assert!(!output.status.success(), "{args:?}: {}", text(&output.stdout));
        text(&output.stderr)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scaled() -> Value {
    json!({"model": {"source": "builtin://ember"}, "scaling": {"max": 24}})
}

/// Records of a simulated load step, a line each.
fn recorded(stage: &Stage) -> Vec<String> {
    stage.said(&["simulate", "--trace", "step", "--record", "step.jsonl"]);
    fs::read_to_string(stage.dir.path().join("step.jsonl")).unwrap().lines().map(str::to_owned).collect()
}

/// The first words about a record in which the number grew.
fn growth(line: &str) -> Option<String> {
    let record: Value = serde_json::from_str(line).unwrap();
    let [previous, desired] = ["previous", "desired"].map(|field| record["decision"][field].as_u64().unwrap());
    (desired > previous).then(|| format!("{previous} -> {desired} replicas: pressure "))
}

/// What an operator answers: the lines after a time, or what it says of a deployment that it does not know.
struct StandIn {
    url: String,
    lines: Arc<Mutex<Vec<String>>>,
    _runtime: Runtime,
}

impl StandIn {
    fn answering(lines: &[String]) -> Self {
        let runtime = Runtime::new().unwrap();
        let lines = Arc::new(Mutex::new(lines.to_vec()));
        let routes = Router::new()
            .route("/v1/scaling/default/chat", get(records))
            .route("/v1/scaling/{namespace}/{name}", get(|| async { (StatusCode::NOT_FOUND, "nothing is decided\n") }))
            .with_state(Arc::clone(&lines));
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        runtime.spawn(async move { axum::serve(listener, routes).await });
        Self { url, lines, _runtime: runtime }
    }

    fn add(&self, line: &str) {
        self.lines.lock().unwrap().push(line.to_owned());
    }
}

async fn records(State(lines): State<Arc<Mutex<Vec<String>>>>, uri: Uri) -> String {
    let after = uri.query().unwrap().strip_prefix("after=").unwrap().parse().unwrap();
    let made =
        |line: &str| serde_json::from_str::<Value>(line).map_or(u64::MAX, |record| record["atMs"].as_u64().unwrap());
    lines.lock().unwrap().iter().filter(|line| made(line) > after).map(|line| format!("{line}\n")).collect()
}

#[test]
fn status_is_one_screen_from_the_api_server_alone() {
    let stage = Stage::set();
    assert!(
        stage.refused(&["status", "chat"]).contains("no InferenceDeployment chat in namespace default; there is: none")
    );
    let status = json!({
        "observedGeneration": 1, "replicas": 3, "readyReplicas": 3, "updatedReplicas": 3, "readyOfWanted": "3/3",
        "revision": "3f2a", "url": "http://chat.default:8000",
        "capacity": {"kvTokens": 32768, "kvUsedPercent": 41, "preemptionsPerMinute": 3, "observedAt": "2026-01-31T12:00:48Z"},
        "scaling": {"mode": "native", "desired": 3, "coverage": "3/3", "last": {"at": "2026-01-31T12:00:20Z", "from": 2,
            "to": 3, "pressurePercent": 126, "cause": "arrivals", "bound": "nothing", "coverage": "3/3"}},
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "message": "3 of 3 serve",
            "lastTransitionTime": "2026-01-31T12:00:30Z", "observedGeneration": 1}],
    });
    stage.deployment(scaled(), &status);
    let screen = stage.said(&["status", "chat"]);
    for words in [
        "replicas     3/3 serve",
        "kv           41 % of 32768 tokens",
        "scaling      native, 3 wanted, 3/3 readings fresh",
        "2 -> 3, pressure 126 % from arrivals, bound by nothing",
        "preemptions  3 in a minute",
        "3 of 3 serve",
    ] {
        assert!(screen.contains(words), "no {words:?} in:\n{screen}");
    }
    assert!(screen.lines().count() < 25 && stage.refused(&["status", "other"]).contains("there is: chat"), "{screen}");
}

#[test]
fn explain_shows_keeps_and_repeats_what_the_operator_decided() {
    let stage = Stage::set();
    let condition = |type_: &str, reason: &str, message: &str| {
        json!({"type": type_, "status": "False", "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-31T12:00:30Z"})
    };
    let conditions = [
        condition("Granted", "BudgetSpent", "3 of 4 replicas: the namespace has what it may have"),
        condition("Fits", "FitsSomeNodes", "not on 1 x Tesla-T4"),
    ];
    let budget = json!({"wanted": 4, "granted": 3, "blockedBy": ["default/other"]});
    stage.deployment(scaled(), &json!({"replicas": 3, "budget": budget, "conditions": conditions}));
    let lines = recorded(&stage);
    let operator = StandIn::answering(&lines[..500]);
    let explain = |args: &[&str]| stage.said(&[&["explain", "chat", "--operator", &operator.url], args].concat());
    let last = explain(&[]);
    assert!(
        last.contains("\n* work  ") && last.contains("\n  bound  ") && last.ends_with(&format!("{ALL_DECIDED}\n")),
        "{last}"
    );
    for words in [
        "  granted     no, BudgetSpent: 3 of 4 replicas: the namespace has what it may have\n",
        "  fits        no, FitsSomeNodes: not on 1 x Tesla-T4\n",
    ] {
        assert!(last.contains(words), "no {words:?} in:\n{last}");
    }
    let limits: Value = serde_json::from_str(&explain(&["--output", "json"])).unwrap();
    assert_eq!((&limits["limits"]["budget"]["granted"], &limits["reproduced"]), (&json!(3), &json!(true)));
    let changes = explain(&["--changes"]);
    assert!(!changes.contains("BudgetSpent"), "that is of now: {changes}");
    let grew = lines[..500].iter().find_map(|line| growth(line)).expect("the step takes more replicas");
    assert!(changes.contains(&grew) && changes.contains(ALL_DECIDED), "{changes}");
    // 900 s of virtual time after its beginning the load steps up.
    let at = explain(&["--at", "1970-01-01T00:30:00Z"]);
    assert!(at.starts_with("1970-01-01T00:30:00Z\n") || at.starts_with("1970-01-01T00:29:5"), "{at}");
    explain(&["--record", "kept.jsonl"]);
    explain(&["--record", "kept.jsonl"]);
    let kept = fs::read_to_string(stage.dir.path().join("kept.jsonl")).unwrap();
    assert!(kept.lines().eq(lines[..500].iter()), "each record once, in order");
    assert!(stage.said(&["simulate", "--trace", "kept.jsonl"]).contains("requests in 17 minutes"));
}

#[test]
fn watch_shows_and_keeps_decisions_as_they_are_made() {
    let stage = Stage::set();
    stage.deployment(scaled(), &json!({"replicas": 4}));
    let lines = recorded(&stage);
    let operator = StandIn::answering(&lines[..3]);
    let mut command =
        stage.command(&["explain", "chat", "--operator", &operator.url, "--watch", "--record", "live.jsonl"]);
    let mut watching = command.stdout(Stdio::null()).spawn().unwrap();
    let kept = |n: usize| {
        let text = fs::read_to_string(stage.dir.path().join("live.jsonl")).unwrap_or_default();
        (text.lines().count() == n).then_some(())
    };
    wait_for("what was there is kept", || kept(3));
    operator.add(&lines[3]);
    wait_for("the next decision is kept", || kept(4));
    operator.add(&lines[4].replacen("\"desired\":4", "\"desired\":5", 1));
    let ended = wait_for("an altered decision ends it", || watching.try_wait().unwrap());
    assert_eq!(ended.code(), Some(1));
}

#[test]
fn what_cannot_be_explained_says_why_and_what_to_do() {
    let stage = Stage::set();
    stage.deployment(json!({"model": {"source": "builtin://ember"}}), &json!({"replicas": 1}));
    assert!(stage.refused(&["explain", "chat"]).contains("chat has no spec.scaling"));
    stage.deployment(scaled(), &json!({"replicas": 1}));
    assert!(stage.refused(&["explain", "chat"]).contains("--operator-namespace and --operator-lease"));
    let lease = |holder: &str| {
        json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "op", "namespace": "default"},
            "spec": {"holderIdentity": holder}})
    };
    let by_lease = ["explain", "chat", "--operator-namespace", "default", "--operator-lease", "op"];
    stage.apply(&lease(""));
    assert!(stage.refused(&by_lease).contains("nobody holds Lease op"));
    stage.apply(&lease("laptop-17"));
    assert!(stage.refused(&by_lease).contains("laptop-17 leads, and is no pod of default: it runs elsewhere"));
    let silent = StandIn::answering(&[]);
    assert!(stage.refused(&["explain", "chat", "--operator", &silent.url]).contains("holds no decision"));
    let page = StandIn::answering(&["<html>".to_owned()]);
    let words = stage.refused(&["explain", "chat", "--operator", &page.url]);
    assert!(words.contains("answer line 1") && words.contains("not a decision record"), "{words}");
    let missing = ["explain", "chat", "-n", "elsewhere", "--operator", &silent.url];
    assert!(stage.refused(&missing).contains("no InferenceDeployment chat in namespace elsewhere"));
    assert!(stage.refused(&["explain", "chat", "--operator", "ftp://x"]).contains("is no URL"));
}

/// Fields of a published config.json.
fn published(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("goldens/specs/{name}.json"))
}

fn manifest(dir: &std::path::Path, spec: &Value) -> String {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat"}, "spec": spec
    });
    let path = dir.join("chat.yaml");
    fs::write(&path, object.to_string()).unwrap();
    path.display().to_string()
}

/// The plugin by itself, with no cluster to ask.
fn offline(args: &[&str]) -> Output {
    Command::new(built("kubectl-stoker")).args(args).env("KUBECONFIG", "/dev/null").env_remove("HOME").output().unwrap()
}

#[test]
fn a_plan_needs_no_cluster_and_what_it_advises_is_enough() {
    let dir = tempfile::tempdir().unwrap();
    let config = published("llama-3.1-8b").display().to_string();
    let plan = |spec: &Value, gpu: &str| {
        let file = manifest(dir.path(), spec);
        offline(&["plan", "-f", &file, "--config", &config, "--gpu", gpu, "--output", "json"])
    };
    let said = |output: &Output| {
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
    };
    let mut spec = json!({"model": {"source": "hf://meta-llama/Llama-3.1-8B"}, "resources": {"gpus": 1}});

    let fits = plan(&spec, "H200");
    assert!(fits.status.success());
    assert_eq!(said(&fits)[0]["plan"]["parameters"], 8_030_261_248_u64);
    assert_eq!(said(&fits)[0]["plan"]["kvBytesPerToken"], 131_072);

    let refused = plan(&spec, "L4");
    assert_eq!(refused.status.code(), Some(1));
    let remedies = said(&refused)[0]["plan"]["remedies"].as_array().unwrap().clone();
    let context = remedies.iter().find_map(|remedy| remedy.as_str()?.split("maxModelLen: ").nth(1)).unwrap();
    spec["engine"] = json!({"maxModelLen": context.trim_end_matches(')').parse::<u32>().unwrap()});
    assert!(plan(&spec, "L4").status.success(), "the context that was advised");
    spec.as_object_mut().unwrap().remove("engine");
    spec["resources"] = json!({});
    spec["parallelism"] = json!({"tensor": 2});
    assert!(plan(&spec, "L4").status.success(), "the GPUs that were advised");

    let file = manifest(dir.path(), &spec);
    let unknown = offline(&["plan", "-f", &file, "--gpu", "H200"]);
    assert!(text(&unknown.stderr).contains("give its config.json with --config"), "{}", text(&unknown.stderr));
    let unknown = offline(&["plan", "-f", &file, "--config", &config, "--gpu", "Voodoo"]);
    assert!(text(&unknown.stderr).contains("take one of T4"), "{}", text(&unknown.stderr));
}

#[test]
fn a_plan_offers_stages_where_ranks_cannot_share_the_model_and_they_are_enough() {
    let dir = tempfile::tempdir().unwrap();
    let config = published("olmo2-7b").display().to_string();
    let plan = |parallelism: Value| {
        let spec = json!({"model": {"source": "hf://allenai/OLMo-2-1124-7B"}, "parallelism": parallelism});
        let file = manifest(dir.path(), &spec);
        offline(&["plan", "-f", &file, "--config", &config, "--gpu", "T4"])
    };
    let refused = plan(json!({}));
    assert_eq!(refused.status.code(), Some(1));
    let said = text(&refused.stdout);
    assert!(said.contains("1 x T4") && said.contains("2 stages (parallelism.pipeline: 2)"), "{said}");
    let fits = plan(json!({"pipeline": 2}));
    let said = text(&fits.stdout);
    assert!(fits.status.success() && said.contains("2 x T4"), "{said}");
    let refused = plan(json!({"tensor": 2}));
    let said = text(&refused.stdout);
    assert!(said.contains("2 x T4") && said.contains("stages of a pipeline in place of ranks"), "{said}");
}

#[test]
fn a_plan_against_a_cluster_counts_the_gpus_of_its_nodes() {
    let stage = Stage::set();
    let labels = json!({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.memory": "81559"});
    stage.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-0", "labels": labels}}));
    let gpus =
        json!({"status": {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}}).to_string();
    stage.kubectl(&["patch", "node", "gpu-0", "--subresource=status", "--type=merge", "-p", &gpus], "").unwrap();
    let spec = json!({"model": {"source": "hf://meta-llama/Llama-3.1-8B"}, "parallelism": {"tensor": 2}});
    let file = manifest(stage.dir.path(), &spec);
    let config = published("llama-3.1-8b").display().to_string();
    let said = stage.said(&["plan", "-f", &file, "--config", &config]);
    assert!(
        said.contains("2 x NVIDIA-H100-80GB-HBM3, 79.6 GiB each (1 nodes, 8 GPUs free, room for 4 replicas now)"),
        "{said}"
    );
    assert!(said.contains("131,072 tokens of context"), "{said}");
}

#[test]
fn a_plan_against_a_cluster_counts_devices_that_no_claim_holds() {
    let stage = Stage::set();
    let kind = |kind: &str, name: &str| json!({"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}, "spec": {}});
    stage.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "dra-0"}}));
    let device = |place: u32| {
        json!({"name": format!("gpu-{place}"), "capacity": {"memory": {"value": "143771Mi"}},
            "attributes": {"productName": {"string": "NVIDIA H200"}}})
    };
    let devices = [0, 1, 2, 3].map(device);
    let mut slice = kind("ResourceSlice", "dra-0");
    slice["spec"] = json!({"driver": "gpu.nvidia.com", "nodeName": "dra-0", "devices": devices,
        "pool": {"name": "dra-0", "generation": 1, "resourceSliceCount": 1}});
    stage.apply(&slice);
    let mut class = kind("DeviceClass", "gpu.nvidia.com");
    class["spec"]["selectors"] = json!([{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]);
    stage.apply(&class);
    let mut claim = kind("ResourceClaim", "taken");
    claim["spec"]["devices"]["requests"] = json!([{"name": "gpus", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]);
    stage.apply(&claim);
    let spec = json!({"model": {"source": "hf://meta-llama/Llama-3.1-8B"}, "parallelism": {"tensor": 2},
        "resources": {"deviceClass": "gpu.nvidia.com"}});
    let file = manifest(stage.dir.path(), &spec);
    let config = published("llama-3.1-8b").display().to_string();
    let said = || stage.said(&["plan", "-f", &file, "--config", &config]);
    let all = said();
    assert!(all.contains("2 x NVIDIA H200, 140.4 GiB each (1 nodes, 4 GPUs free, room for 2 replicas now)"), "{all}");
    let results = json!([{"driver": "gpu.nvidia.com", "pool": "dra-0", "device": "gpu-1", "request": "gpus"}]);
    let status = json!({"status": {"allocation": {"devices": {"results": results}}}}).to_string();
    let patch = ["patch", "resourceclaim", "taken", "--subresource=status", "--type=merge", "-p", &status];
    stage.kubectl(&patch, "").unwrap();
    let less = said();
    assert!(less.contains("(1 nodes, 3 GPUs free, room for 1 replicas now)"), "{less}");
}
