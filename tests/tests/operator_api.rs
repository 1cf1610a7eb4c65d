//! What a user may write, asked of a real API server: bad objects are refused with a message that names field and fix.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod pods;

use std::{
    sync::{LazyLock, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use axum::http::Request;
use kube::Client;
use serde_json::{Value, json};
use stoker_cluster::{ControlPlane, ControlPlaneOptions, established};
use stoker_tests::operator::client_of;
use tokio::runtime::Runtime;

const OBJECTS: &str = "/apis/stoker.dev/v1alpha1/namespaces/default/inferencedeployments";

/// One API server for all tests of this file.
static API: LazyLock<Mutex<ControlPlane>> = LazyLock::new(|| {
    let api = ControlPlane::start(ControlPlaneOptions::default()).unwrap();
    let crd = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/stoker/crds/inferencedeployments.yaml");
    run(&api, &["apply", "-f", crd], None).unwrap();
    established(&api, "inferencedeployments.stoker.dev").unwrap();
    Mutex::new(api)
});

fn kubectl(args: &[&str], input: Option<Value>) -> Result<String, String> {
    let api = API.lock().unwrap_or_else(PoisonError::into_inner);
    run(&api, args, input)
}

fn run(api: &ControlPlane, args: &[&str], input: Option<Value>) -> Result<String, String> {
    let mut command = api.kubectl().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), input.unwrap_or_default().to_string()).unwrap();
    let output = command.args(args).stdin(file.reopen().unwrap()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// To ask without kubectl: what a user may write the API server says, and a process for each question took three quarters of all that these
/// tests take of a core.
static CLIENT: LazyLock<(Runtime, Client)> = LazyLock::new(|| {
    let kubeconfig = API.lock().unwrap_or_else(PoisonError::into_inner).kubeconfig_path();
    let runtime = Runtime::new().unwrap();
    let client = runtime.block_on(client_of(&kubeconfig)).unwrap();
    (runtime, client)
});

/// What the API server answers to who asks whether it would store this, as `kubectl create --dry-run=server` does.
fn create_as(name: &str, spec: &Value) -> Result<String, String> {
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec});
    let (runtime, client) = &*CLIENT;
    let request = Request::post(format!("{OBJECTS}?dryRun=All&fieldValidation=Strict"));
    let request = request.header("content-type", "application/json").body(object.to_string().into_bytes()).unwrap();
    runtime.block_on(client.request_text(request)).map_err(|error| match error {
        kube::Error::Api(status) => status.message.clone(),
        error => panic!("{error}"),
    })
}

/// The smallest object with more fields.
fn ember_with(more: Value) -> Value {
    let mut spec = json!({"model": {"source": "builtin://ember"}});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    spec
}

#[track_caller]
fn refused(spec: Value, words: &[&str]) {
    let answer = create_as("chat", &spec).expect_err(&format!("{spec} was accepted"));
    for word in words {
        assert!(answer.contains(word), "{spec}: no {word:?} in: {answer}");
    }
}

#[track_caller]
fn accepted(spec: Value) {
    let answer = create_as("chat", &spec);
    assert!(answer.is_ok(), "{spec}: {answer:?}");
}

#[test]
fn a_rollout_that_could_replace_nothing_or_says_two_things_is_refused() {
    let rollout = |rollout: Value| ember_with(json!({"rollout": rollout}));
    accepted(rollout(json!({"minAvailable": "90%", "maxSurge": 0})));
    accepted(rollout(json!({"maxUnavailable": 2, "maxSurge": "0%"})));
    accepted(rollout(json!({"minAvailable": 3, "maxSurge": "25%"})));
    refused(
        rollout(json!({"minAvailable": 3, "maxUnavailable": 1})),
        &["rollout.minAvailable and rollout.maxUnavailable"],
    );
    refused(rollout(json!({"maxSurge": 0})), &["rollout.maxSurge is 0", "raise maxSurge"]);
    refused(rollout(json!({"maxSurge": "0%", "maxUnavailable": 0})), &["rollout.maxSurge is 0"]);
    let canary = json!({"analysis": {"prompts": {}}});
    let tried = json!({"maxSurge": 0, "maxUnavailable": 1, "canary": canary});
    refused(rollout(tried), &["raise maxSurge or remove canary"]);
    for wrong in [json!("101%"), json!(1001), json!(-1), json!("some"), json!("5 %")] {
        refused(rollout(json!({"minAvailable": wrong})), &["rollout.minAvailable: a number of replicas"]);
        refused(rollout(json!({"maxSurge": wrong})), &["rollout.maxSurge: a number of replicas"]);
    }
}

#[test]
fn the_smallest_object_is_accepted() {
    accepted(ember_with(json!({})));
}

#[test]
fn every_field_of_the_whole_object_is_accepted() {
    accepted(json!({
        "model": {"source": "pvc://weights/llama/8b", "servedNames": ["llama", "meta/llama-3.1:8b"]},
        "resources": {"cpu": "1500m", "memory": "8Gi", "gpus": 8, "gpuResource": "nvidia.com/gpu"},
        "parallelism": {"tensor": 4, "pipeline": 2},
        "engine": {"maxModelLen": 4096, "maxNumSeqs": 32, "maxBatchedTokens": 256, "kvCacheTokens": 65536, "maxWaiting": 64, "threads": 2, "memoryFraction": 0.5, "prefixCaching": false, "batchInvariant": true, "quantization": "fp8", "kvCacheDtype": "fp8"},
        "replicas": 3,
        "drain": {"deadlineSeconds": 60, "withdrawSeconds": 0},
        "pod": {
            "image": "registry.example/agent:1", "imagePullPolicy": "IfNotPresent", "imagePullSecrets": [{"name": "pull"}],
            "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "labels": {"team": "a"}, "annotations": {"note": "b"}, "serviceAccountName": "default", "priorityClassName": "high"
        }
    }));
    accepted(ember_with(json!({"pod": pods::placed_and_added()})));
    accepted(ember_with(json!({"scaling": {
        "min": 2, "max": 8, "mode": "native",
        "targets": {"kv": 0.7, "slowdown": 3, "queueSeconds": 0.5, "preemptionsPerMinute": 1.5, "ttftMs": 1500, "itlMs": 50},
        "prices": {"lateAnswer": 0, "replicaHour": 12.5},
        "behavior": {
            "stableWindowSeconds": 30, "panicWindowSeconds": 4, "downPressure": 0.8, "downStabilizationSeconds": 60,
            "spareReplicas": 1,
            "up": {"replicas": 2, "percent": 100}, "down": {"replicas": 1, "percent": 0}, "quorum": {"up": 0.5, "down": 1}
        }
    }})));
    accepted(ember_with(json!({"resources": {"cpu": 2, "memory": 8_589_934_592_u64}, "replicas": 0})));
    accepted(json!({"model": {"source": "file:///models/chat"}}));
    let cache = || json!({"claimName": "models", "sizeLimit": "200Gi"});
    accepted(
        json!({"model": {"source": "hf://Qwen/Qwen2.5-0.5B-Instruct", "tokenSecret": {"name": "hub", "key": "read"}, "cache": cache()}}),
    );
    accepted(
        json!({"model": {"source": "hf://Qwen/Qwen2.5-0.5B-Instruct-GGUF/q8/model-q8_0.gguf@refs/pr/3", "tokenSecret": {"name": "hub"}}}),
    );
    let digest = "0a".repeat(32);
    for source in ["s3://models", "s3://my.models_1/a%20b/", "s3://models/llama-3.1-8b", "s3://models/@x/q8.gguf"] {
        accepted(json!({"model": {"source": source, "tokenSecret": {"name": "s3"}, "cache": cache()}}));
    }
    for rest in ["", ":v1.0_a", &format!("@sha256:{digest}"), &format!(":v1@sha256:{digest}")] {
        let source = format!("oci://registry.example:5000/team/llama-3.1_8b{rest}");
        accepted(
            json!({"model": {"source": source, "tokenSecret": {"name": "pull", "key": ".dockerconfigjson"}, "cache": cache()}}),
        );
        for folder in ["/", "models", "/models/llama-3.1_8b/", &format!("/{}/", "a".repeat(128))] {
            accepted(json!({"model": {"source": format!("{source}#path={folder}")}}));
        }
    }
}

#[test]
fn a_web_server_is_named_by_https_and_its_login_is_none_of_the_url() {
    let hash = "0a".repeat(32);
    for rest in ["", "/", "/models/chat/", "/a%20b/@x", ":8443/q8.gguf?sig=a%2Fb&v=1", "/chat.tar.gz"] {
        let source = |end: &str| json!({"source": format!("https://files.example{rest}{end}"), "tokenSecret": {"name": "files"}});
        accepted(json!({"model": source("")}));
        accepted(json!({"model": source(&format!("#sha256={hash}"))}));
    }
    for wrong in [
        "",
        "/m",
        "user:word@files.example/m",
        "files.example/a b",
        "files.example/m#main",
        "files.example/m#sha256=0a",
    ] {
        refused(json!({"model": {"source": format!("https://{wrong}")}}), &["model.source: use https://HOST/PATH"]);
    }
    refused(json!({"model": {"source": "https://files.example/m/?v=1"}}), &["a folder takes no ?QUERY"]);
    refused(json!({"model": {"source": "https://files.example/../m"}}), &["'..' parts"]);
}

#[test]
fn a_wrong_source_names_the_right_ones() {
    let source = |source: &str| json!({"model": {"source": source}});
    refused(
        source("http://example/model"),
        &[
            "model.source",
            "builtin://NAME",
            "s3://BUCKET/PREFIX",
            "oci://REGISTRY/REPOSITORY:TAG",
            "https://HOST/PATH",
            "pvc://CLAIM/PATH",
            "file:///PATH",
        ],
    );
    refused(source("ember"), &["model.source: unknown scheme"]);
    refused(source("builtin://"), &["for example builtin://ember"]);
    refused(source("file://relative/path"), &["file:///PATH with an absolute directory"]);
    refused(source("pvc://Weights/x"), &["CLAIM is a PersistentVolumeClaim of this namespace"]);
    for wrong in ["hf://Qwen", "hf://Qwen/", "hf://a/b/c", "hf://a/b/c.bin", "hf://a/b@", "hf://a b/c"] {
        refused(source(wrong), &["model.source: use hf://ORG/MODEL"]);
    }
    refused(source("hf://a/../b"), &["'..' parts"]);
    for wrong in
        ["s3://", "s3:///a", "s3://ab", "s3://models//x", "s3://models/a b", "s3://models/a?b", "s3://-models/x"]
    {
        refused(source(wrong), &["model.source: use s3://BUCKET/PREFIX"]);
    }
    refused(source("s3://models/../x"), &["'..' parts"]);
    for wrong in [
        "r.example",
        "r.example/",
        "r.example/Team/m",
        "r.example/m:",
        "r.example/m@sha256:12",
        "user@r.example/m",
        "r.example//m",
        "r.example/m#path=",
        "r.example/m#path=..",
        "r.example/m#path=a//b",
        "r.example/m#folder=a",
    ] {
        refused(source(&format!("oci://{wrong}")), &["model.source: use oci://REGISTRY/REPOSITORY:TAG"]);
    }
    refused(source("oci://r.example/m#path=a/../b"), &["'..' parts"]);
    for wrong in ["m/q8.gguf".to_owned(), format!("/{}", "a".repeat(129))] {
        refused(source(&format!("oci://r.example/m#path={wrong}")), &["#path= of an image is a folder"]);
    }
    let keyed = json!({"source": "s3://models/m", "tokenSecret": {"name": "s3", "key": "token"}});
    refused(json!({"model": keyed}), &["AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "remove key"]);
    let with = |field: &str, value: Value| json!({"model": {"source": "builtin://ember", field: value}});
    refused(with("tokenSecret", json!({"name": "hub"})), &["model.tokenSecret is for a model.source that is fetched"]);
    refused(with("cache", json!({"claimName": "models"})), &["model.cache is for a model.source that is fetched"]);
    let limit = json!({"source": "hf://a/b", "cache": {"sizeLimit": "much"}});
    refused(json!({"model": limit}), &["model.cache.sizeLimit: a quantity of bytes from 1Mi"]);
    refused(json!({"model": {"source": "hf://a/b", "tokenSecret": {"name": "Hub"}}}), &["spec.model.tokenSecret.name"]);
    refused(source("pvc://weights/../../etc"), &["'..' parts"]);
    refused(source("file:///models/../etc"), &["'..' parts"]);
    refused(json!({"model": {}}), &["spec.model.source", "Required"]);
    refused(json!({}), &["spec.model", "Required"]);
}

#[test]
fn absurd_numbers_name_field_and_limit() {
    refused(ember_with(json!({"replicas": 1_000_000})), &["spec.replicas", "1000"]);
    refused(ember_with(json!({"replicas": -1})), &["spec.replicas", "greater than or equal to 0"]);
    refused(
        ember_with(json!({"engine": {"maxNumSeqs": 0}})),
        &["spec.engine.maxNumSeqs", "greater than or equal to 1"],
    );
    refused(ember_with(json!({"engine": {"threads": 99_999}})), &["spec.engine.threads", "1024"]);
    refused(ember_with(json!({"drain": {"deadlineSeconds": 1_000_000_000}})), &["spec.drain.deadlineSeconds", "86400"]);
    refused(ember_with(json!({"resources": {"cpu": "0"}})), &["resources.cpu: a quantity of CPUs from 50m to 1024"]);
    refused(ember_with(json!({"resources": {"cpu": "five"}})), &["resources.cpu", "for example 4"]);
    let quantised = |resources: Value| ember_with(json!({"resources": resources, "engine": {"quantization": "fp8"}}));
    refused(
        quantised(json!({})),
        &["engine.quantization needs a GPU", "set resources.gpus to 1 or remove quantization"],
    );
    refused(quantised(json!({"gpus": 0})), &["engine.quantization needs a GPU"]);
    accepted(quantised(json!({"gpus": 1})));
    refused(
        ember_with(json!({"resources": {"gpus": 1}, "engine": {"quantization": "int3"}})),
        &["Unsupported value", "fp8"],
    );
    let cached = |resources: Value| ember_with(json!({"resources": resources, "engine": {"kvCacheDtype": "fp8"}}));
    refused(cached(json!({})), &["engine.kvCacheDtype needs a GPU", "set resources.gpus to 1 or remove kvCacheDtype"]);
    accepted(cached(json!({"gpus": 1})));
    refused(
        ember_with(json!({"resources": {"gpus": 1}, "engine": {"kvCacheDtype": "int8"}})),
        &["Unsupported value", "fp8"],
    );
    refused(ember_with(json!({"resources": {"gpus": 65}})), &["spec.resources.gpus", "less than or equal to 64"]);
    for way in ["tensor", "pipeline"] {
        let shared = json!({"parallelism": {way: 2}, "engine": {"quantization": "fp8", "kvCacheDtype": "fp8"}});
        accepted(ember_with(shared));
        for (number, words) in [(0, "greater than or equal to 1"), (9, "less than or equal to 8")] {
            let field = format!("spec.parallelism.{way}");
            refused(ember_with(json!({"parallelism": {way: number}})), &[&field, words]);
        }
    }
    refused(ember_with(json!({"resources": {"gpuResource": "gpu"}})), &["resources.gpuResource: DOMAIN/NAME"]);
    for wrong in ["GPU", "gpu.", "a/b", "a..b"] {
        refused(
            ember_with(json!({"resources": {"gpus": 1, "deviceClass": wrong}})),
            &["resources.deviceClass: the name of a DeviceClass"],
        );
    }
    refused(ember_with(json!({"resources": {"memory": "1Ki"}})), &["resources.memory", "64Mi to 64Ti"]);
}

#[test]
fn wrong_types_name_field_and_type() {
    refused(ember_with(json!({"replicas": "three"})), &["spec.replicas", "integer"]);
    refused(ember_with(json!({"engine": []})), &["spec.engine", "object"]);
    refused(ember_with(json!({"resources": {"cpu": 1.5}})), &["spec.resources.cpu", "integer,string"]);
}

#[test]
fn combinations_that_cannot_work_name_both_fields() {
    let engine = |engine: Value| ember_with(json!({"engine": engine}));
    let on_gpus =
        |resources: Value, parallelism: Value| ember_with(json!({"resources": resources, "parallelism": parallelism}));
    let differ = [
        "resources.gpus is not parallelism.tensor times parallelism.pipeline",
        "set parallelism.tensor to the number of GPUs, or parallelism.pipeline, and remove resources.gpus",
    ];
    for (gpus, parallelism) in [
        (2, json!({})),
        (1, json!({"tensor": 2})),
        (4, json!({"tensor": 2})),
        (2, json!({"tensor": 1})),
        (1, json!({"pipeline": 2})),
        (2, json!({"tensor": 2, "pipeline": 2})),
        (2, json!({"pipeline": 1})),
    ] {
        refused(on_gpus(json!({"gpus": gpus}), parallelism), &differ);
    }
    refused(ember_with(json!({"resources": {"gpus": 2}})), &differ);
    let on_cpus = ["resources.gpus 0 asks for none", "remove resources.gpus, which follows from parallelism"];
    for several in [json!({"tensor": 2}), json!({"pipeline": 2})] {
        refused(on_gpus(json!({"gpus": 0}), several), &on_cpus);
    }
    for (resources, parallelism) in [
        (json!({}), json!({"tensor": 8})),
        (json!({}), json!({"tensor": 8, "pipeline": 8})),
        (json!({"gpus": 3}), json!({"tensor": 3})),
        (json!({"gpus": 3}), json!({"pipeline": 3})),
        (json!({"gpus": 6}), json!({"tensor": 2, "pipeline": 3})),
        (json!({"gpus": 1}), json!({"tensor": 1})),
        (json!({"gpus": 1}), json!({"tensor": 1, "pipeline": 1})),
        (json!({"gpus": 1}), json!({})),
        (json!({"gpus": 0}), json!({"tensor": 1})),
        (json!({"gpus": 0}), json!({"pipeline": 1})),
        (json!({"gpuResource": "nvidia.com/mig-3g.71gb"}), json!({"tensor": 2})),
    ] {
        accepted(on_gpus(resources, parallelism));
    }
    let claimed = |more: Value| {
        let mut resources = json!({"deviceClass": "gpu.nvidia.com"});
        resources.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        resources
    };
    accepted(on_gpus(claimed(json!({"gpus": 1})), json!({})));
    accepted(on_gpus(claimed(json!({})), json!({"tensor": 2})));
    accepted(on_gpus(claimed(json!({})), json!({"pipeline": 2})));
    let two_ways = ["resources.deviceClass and resources.gpuResource", "remove gpuResource if a DRA driver gives them"];
    refused(on_gpus(claimed(json!({"gpus": 1, "gpuResource": "nvidia.com/gpu"})), json!({})), &two_ways);
    for none in [json!({}), json!({"gpus": 0})] {
        refused(
            on_gpus(claimed(none), json!({})),
            &["none are asked for", "set resources.gpus to 1 or remove deviceClass"],
        );
    }
    refused(
        engine(json!({"maxModelLen": 4096, "kvCacheTokens": 1024})),
        &["engine.kvCacheTokens", "engine.maxModelLen", "raise"],
    );
    // 1000 tokens are 62 blocks of 16, which hold 992: the agent would refuse it after the pod has started.
    refused(engine(json!({"maxModelLen": 1000, "kvCacheTokens": 1000})), &["rounded down to whole blocks of 16"]);
    accepted(engine(json!({"maxModelLen": 1000, "kvCacheTokens": 1008})));
    refused(
        engine(json!({"maxNumSeqs": 600, "maxBatchedTokens": 512})),
        &["engine.maxBatchedTokens must be at least engine.maxNumSeqs", "raise maxBatchedTokens or lower maxNumSeqs"],
    );
    // What is not written gives way: the agent derives it from the one that is.
    accepted(engine(json!({"maxNumSeqs": 600})));
    accepted(engine(json!({"maxBatchedTokens": 32})));
}

#[test]
fn a_replica_is_not_withdrawn_for_longer_than_its_streams_may_take() {
    let drain = |drain: Value| ember_with(json!({"drain": drain}));
    refused(
        drain(json!({"withdrawSeconds": 61, "deadlineSeconds": 60})),
        &["drain.withdrawSeconds is above drain.deadlineSeconds", "lower withdrawSeconds or raise deadlineSeconds"],
    );
    accepted(drain(json!({"withdrawSeconds": 60, "deadlineSeconds": 60})));
    // Only what the user wrote is held against him: streams may be ended at once without a word on withdrawing.
    accepted(drain(json!({"deadlineSeconds": 0})));
    accepted(drain(json!({"withdrawSeconds": 300})));
}

#[test]
fn replicas_and_native_scaling_exclude_each_other() {
    let both = |mode: &str| ember_with(json!({"replicas": 2, "scaling": {"max": 4, "mode": mode}}));
    refused(both("native"), &["spec.replicas and spec.scaling exclude each other", "remove replicas", "advisory"]);
    refused(ember_with(json!({"replicas": 2, "scaling": {"max": 4}})), &["exclude each other"]);
    accepted(both("external"));
    accepted(both("advisory"));
    accepted(ember_with(json!({"scaling": {"max": 4}})));
    refused(both("hpa"), &["spec.scaling.mode", "\"native\", \"external\", \"advisory\""]);
}

#[test]
fn the_scale_subresource_works_without_replicas_and_not_against_native_scaling() {
    let object = |name: &str, spec: Value| json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec});
    let create = |object: Value| kubectl(&["create", "-f", "-"], Some(object)).unwrap();
    create(object("unsaid", ember_with(json!({}))));
    create(object("handed-over", ember_with(json!({"scaling": {"max": 4, "mode": "external"}}))));
    create(object("followed", ember_with(json!({"scaling": {"max": 4}}))));
    for name in ["unsaid", "handed-over"] {
        kubectl(&["scale", "infd", name, "--replicas=3"], None).unwrap();
        assert_eq!(kubectl(&["get", "infd", name, "-o", "jsonpath={.spec.replicas}"], None).unwrap(), "3");
    }
    let answer = kubectl(&["scale", "infd", "followed", "--replicas=3"], None).unwrap_err();
    assert!(answer.contains("spec.replicas and spec.scaling exclude each other"), "{answer}");
}

#[test]
fn a_number_left_by_the_scale_subresource_does_not_keep_scaling_from_the_operator() {
    let manifest = |name: &str, spec: Value| json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}, "spec": spec});
    let apply = |name: &str, spec: Value| kubectl(&["apply", "-f", "-"], Some(manifest(name, spec)));
    let native = |more: Value| {
        let mut spec = ember_with(json!({"scaling": {"max": 4}}));
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    apply("lent", ember_with(json!({"scaling": {"max": 4, "mode": "external"}}))).unwrap();
    kubectl(&["scale", "infd", "lent", "--replicas=3"], None).unwrap();
    apply("lent", native(json!({}))).unwrap();
    let scaled = kubectl(&["scale", "infd", "lent", "--replicas=2"], None).unwrap_err();
    assert!(scaled.contains("spec.replicas and spec.scaling exclude each other"), "{scaled}");
    let changed = apply("lent", native(json!({"replicas": 2}))).unwrap_err();
    assert!(changed.contains("spec.replicas and spec.scaling exclude each other"), "{changed}");

    // Who never scaled and writes both means one of them.
    apply("said", ember_with(json!({"replicas": 3}))).unwrap();
    let both = apply("said", native(json!({"replicas": 3}))).unwrap_err();
    assert!(both.contains("spec.replicas and spec.scaling exclude each other"), "{both}");
}

#[test]
fn impossible_scaling_names_field_and_fix() {
    let scaling = |scaling: Value| ember_with(json!({"scaling": scaling}));
    let targets = |targets: Value| scaling(json!({"max": 4, "targets": targets}));
    let prices = |prices: Value| scaling(json!({"max": 4, "prices": prices}));
    let behavior = |behavior: Value| scaling(json!({"max": 4, "behavior": behavior}));
    refused(scaling(json!({"min": 5, "max": 2})), &["scaling.min is above scaling.max", "raise max or lower min"]);
    refused(scaling(json!({"min": 0, "max": 2})), &["spec.scaling.min", "greater than or equal to 1"]);
    refused(scaling(json!({"min": 2})), &["spec.scaling.max", "Required"]);
    refused(scaling(json!({"max": 4, "mode": "external", "toZero": {}})), &["scaling.toZero with mode external"]);
    refused(
        scaling(json!({"max": 4, "toZero": {"afterSeconds": 5}})),
        &["toZero.afterSeconds", "greater than or equal to 10"],
    );
    refused(
        scaling(json!({"max": 4, "standby": 1})),
        &["scaling.standby is for a model that nodes keep", "remove standby"],
    );
    refused(scaling(json!({"max": 4, "standby": 17})), &["scaling.standby", "less than or equal to 16"]);
    refused(scaling(json!({"max": 4, "toZero": {"idle": 5}})), &["unknown field \"spec.scaling.toZero.idle\""]);
    refused(targets(json!({"kv": 0})), &["scaling.targets.kv: use a share above 0 and at most 1"]);
    refused(targets(json!({"kv": 1.1})), &["scaling.targets.kv: use a share above 0 and at most 1"]);
    refused(targets(json!({"slowdown": 1})), &["scaling.targets.slowdown: use a number above 1"]);
    refused(targets(json!({"queueSeconds": 0})), &["scaling.targets.queueSeconds: use seconds above 0"]);
    refused(targets(json!({"preemptionsPerMinute": -1})), &["scaling.targets.preemptionsPerMinute: use a number"]);
    refused(targets(json!({"ttftMs": 0})), &["scaling.targets.ttftMs: use milliseconds above 0, or leave it out"]);
    refused(
        prices(json!({"lateAnswer": -0.01})),
        &["scaling.prices.lateAnswer: use a number of at least 0; 0 keeps no"],
    );
    refused(prices(json!({"replicaHour": 0})), &["scaling.prices.replicaHour: use a number above 0, such as 3"]);
    refused(prices(json!({"gpuHour": 3})), &["unknown field \"spec.scaling.prices.gpuHour\""]);
    refused(behavior(json!({"panicWindowSeconds": -6})), &["panicWindowSeconds", "greater than or equal to 2"]);
    refused(behavior(json!({"stableWindowSeconds": -60})), &["stableWindowSeconds", "greater than or equal to 2"]);
    refused(behavior(json!({"panicWindowSeconds": 90})), &["panicWindowSeconds is above stableWindowSeconds: lower"]);
    refused(behavior(json!({"downStabilizationSeconds": -1})), &["downStabilizationSeconds", "or equal to 0"]);
    refused(behavior(json!({"downPressure": 1})), &["scaling.behavior.downPressure", "at most 0.95"]);
    refused(behavior(json!({"quorum": {"up": 0}})), &["scaling.behavior.quorum.up: use a share above 0"]);
    refused(behavior(json!({"up": {"replicas": 0, "percent": 9}})), &["up.replicas", "greater than or equal to 1"]);
}

#[test]
fn what_a_user_leaves_out_is_not_stored() {
    let spec = ember_with(json!({"scaling": {"max": 4, "targets": {"kv": 0.7}}}));
    let object = json!({"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "brief"}, "spec": spec});
    kubectl(&["create", "-f", "-"], Some(object)).unwrap();
    let stored = kubectl(&["get", "infd", "brief", "-o", "jsonpath={.spec.scaling}"], None).unwrap();
    let stored: Value = serde_json::from_str(&stored).unwrap();
    assert_eq!(stored, json!({"max": 4, "targets": {"kv": 0.7}}));
    // One window alone is held against the other's default.
    refused(
        ember_with(json!({"scaling": {"max": 4, "behavior": {"stableWindowSeconds": 4}}})),
        &["panicWindowSeconds"],
    );
    accepted(ember_with(json!({"scaling": {"max": 4, "behavior": {"stableWindowSeconds": 30}}})));
}

#[test]
fn a_name_given_twice_is_refused() {
    refused(
        json!({"model": {"source": "builtin://ember", "servedNames": ["a", "b", "a"]}}),
        &["model.servedNames: each name once"],
    );
    refused(
        json!({"model": {"source": "builtin://ember", "servedNames": []}}),
        &["spec.model.servedNames", "at least 1"],
    );
}

#[test]
fn unknown_fields_are_refused_by_name() {
    refused(ember_with(json!({"gpus": 8})), &["unknown field \"spec.gpus\""]);
    refused(ember_with(json!({"engine": {"maxNumSeq": 8}})), &["unknown field \"spec.engine.maxNumSeq\""]);
}

#[test]
fn a_name_that_no_service_can_have_is_refused() {
    for name in ["1chat", "chat.a", "a-name-that-is-longer-than-forty-five-characters"] {
        let answer = create_as(name, &ember_with(json!({}))).unwrap_err();
        assert!(answer.contains("metadata.name") && answer.contains("at most 45 characters"), "{name}: {answer}");
    }
    let longest = format!("a{}", "b".repeat(44));
    assert!(create_as(&longest, &ember_with(json!({}))).is_ok());
}

#[test]
fn malformed_yaml_is_refused() {
    let answer = kubectl(&["apply", "--dry-run=server", "-f", "-"], Some(json!("kind: [")));
    assert!(answer.is_err(), "{answer:?}");
}

/// What `kubectl explain` says. Discovery hears of a definition a moment after it is established.
fn explained(field: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match kubectl(&["explain", field], None) {
            Ok(text) => return text,
            Err(unknown) if unknown.contains("doesn't have a resource type") && Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(200));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn kubectl_explains_every_field_with_its_default() {
    let text = explained("infd.spec.engine");
    for field in [
        "maxModelLen",
        "maxNumSeqs",
        "maxBatchedTokens",
        "kvCacheTokens",
        "maxWaiting",
        "threads",
        "memoryFraction",
        "prefixCaching",
        "batchInvariant",
        "itlTargetMs",
        "quantization",
        "kvCacheDtype",
        "trustRequestChatTemplate",
    ] {
        assert!(text.contains(field), "{text}");
    }
    assert_eq!(text.matches("Default: ").count(), 14, "{text}");
}

#[test]
fn kubectl_explains_how_gpus_share_a_model() {
    let text = explained("infd.spec.parallelism");
    assert!(text.contains("tensor") && text.contains("pipeline"), "{text}");
    assert_eq!(text.matches("Default: 1.").count(), 2, "{text}");
    let text = explained("infd.spec.resources.gpus");
    assert!(text.contains("`parallelism.tensor`") && text.contains("`parallelism.pipeline`"), "{text}");
}

#[test]
fn kubectl_explains_what_pods_may_have() {
    let text = explained("infd.spec.pod");
    for field in [
        "affinity",
        "topologySpreadConstraints",
        "runtimeClassName",
        "schedulerName",
        "env",
        "volumes",
        "securityContext",
        "nodeSelector",
        "tolerations",
        "serviceAccountName",
        "priorityClassName",
    ] {
        assert!(text.contains(&format!("\n  {field}\t")), "{field}: {text}");
    }
    assert!(text.matches("Default: ").count() >= 16, "{text}");
    let ids = explained("infd.spec.pod.securityContext.platformIds");
    assert!(ids.contains("OpenShift"), "{ids}");
}
