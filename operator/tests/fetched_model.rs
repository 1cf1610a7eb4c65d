//! Pods of a model that a hub, a bucket or a registry has: what fetches it, what it may, and what the agent sees of it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use serde_json::{Value, json};
use stoker_crds::status::ModelStatus;
use stoker_operator::{
    desired::{Desired, desired},
    rollout::prefetch::{PrefetchPod, PrefetchState},
    standby::StandbyPod,
    validate::{Defaults, ModelDefaults, validate},
};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn made(model: Value, status: Value, models: ModelDefaults) -> Desired {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "spec": {
            "model": model, "resources": {"gpus": 1, "cpu": 4, "memory": "8Gi"},
            "pod": {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}], "volumes": [{"mountPath": "/mnt/ca", "configMap": {"name": "ca"}}]},
        },
        "status": status,
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
    desired(&validate(&serde_json::from_value(object).unwrap(), &defaults).unwrap(), "")
}

fn of_hub() -> Value {
    json!({"source": "hf://org/model", "tokenSecret": {"name": "hub"}})
}

fn fetcher(pod: &Pod) -> Container {
    pod.spec.as_ref().unwrap().init_containers.as_ref().unwrap()[0].clone()
}

fn args(desired: &Desired) -> String {
    fetcher(&desired.pod(0)).args.unwrap().join(" ")
}

fn volume(pod: &Pod, name: &str) -> Value {
    let volumes = pod.spec.as_ref().unwrap().volumes.clone().unwrap();
    serde_json::to_value(volumes.into_iter().find(|volume| volume.name == name).unwrap()).unwrap()
}

#[test]
fn what_fetches_has_the_token_and_no_gpu_and_the_agent_can_only_read() {
    let pod = made(of_hub(), Value::Null, ModelDefaults::default()).pod(0);
    let (fetcher, agent) = (fetcher(&pod), pod.spec.as_ref().unwrap().containers[0].clone());
    let names = |container: &Container| {
        container.env.iter().flatten().map(|variable| variable.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&fetcher), ["HTTPS_PROXY", "HF_TOKEN", "STOKER_POD_UID"]);
    assert_eq!(names(&agent), ["HTTPS_PROXY", "STOKER_POD_UID"]);
    assert_eq!(fetcher.security_context, agent.security_context);
    let asked = fetcher.resources.clone().unwrap().limits.unwrap();
    assert_eq!(asked.keys().collect::<Vec<_>>(), ["cpu", "memory"]);
    let read_only = |container: &Container, path: &str| {
        let mounts = container.volume_mounts.clone().unwrap();
        mounts.into_iter().find(|mount| mount.mount_path == path).map(|mount| mount.read_only == Some(true))
    };
    for path in ["/models", "/run/stoker/model"] {
        assert_eq!((read_only(&fetcher, path), read_only(&agent, path)), (Some(false), Some(true)), "{path}");
    }
    assert_eq!(read_only(&fetcher, "/mnt/ca"), Some(true), "a CA for the hub");
}

/// Variables that come from Secrets: name, Secret, key, and whether a pod starts without it.
fn secrets(container: &Container) -> Vec<(String, String, String, bool)> {
    let of_secret = |variable: &EnvVar| {
        let key = variable.value_from.clone()?.secret_key_ref?;
        Some((variable.name.clone(), key.name, key.key, key.optional == Some(true)))
    };
    container.env.iter().flatten().filter_map(of_secret).collect()
}

#[test]
fn a_bucket_has_its_variables_and_a_registry_or_web_server_its_login() {
    let pod = |source: &str, secret: Value| {
        let made = made(json!({"source": source, "tokenSecret": secret}), Value::Null, ModelDefaults::default());
        (secrets(&fetcher(&made.pod(0))), args(&made), secrets(&made.pod(0).spec.unwrap().containers[0]))
    };
    let (bucket, said, agent) = pod("s3://models/chat", json!({"name": "s3"}));
    let names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"];
    assert_eq!(bucket, names.map(|name| (name.to_owned(), "s3".to_owned(), name.to_owned(), true)));
    assert!(said.starts_with("fetch s3://models/chat ") && said.contains("--token-name Secret s3"), "{said}");
    assert_eq!(agent, []);

    let (registry, said, agent) = pod("oci://registry.example/chat:v1", json!({"name": "pull"}));
    let login = |key: &str| [("DOCKER_AUTH_CONFIG".to_owned(), "pull".to_owned(), key.to_owned(), false)];
    assert_eq!(registry, login(".dockerconfigjson"));
    assert!(said.contains("--token-name key .dockerconfigjson of Secret pull"), "{said}");
    assert_eq!(agent, []);
    let (named, ..) = pod("oci://registry.example/chat:v1", json!({"name": "pull", "key": "config"}));
    assert_eq!(named, login("config"));

    let web = |variable: &str, key: &str, optional| {
        (format!("STOKER_SOURCE_{variable}"), "files".to_owned(), key.to_owned(), optional)
    };
    let (either, said, agent) = pod("https://files.example/chat", json!({"name": "files"}));
    let parts = [("TOKEN", "token"), ("USERNAME", "username"), ("PASSWORD", "password")];
    assert_eq!(either, parts.map(|(variable, key)| web(variable, key, true)));
    assert!(said.contains("--token-name Secret files"), "{said}");
    assert_eq!(agent, []);
    let (named, ..) = pod("https://files.example/chat", json!({"name": "files", "key": "read"}));
    assert_eq!(named, [web("TOKEN", "read", false)]);
}

#[test]
fn the_mirror_of_hubs_is_none_of_buckets_and_registries() {
    let models = || ModelDefaults { endpoint: Some("https://mirror".to_owned()), ..ModelDefaults::default() };
    for source in ["s3://models/chat", "oci://registry.example/chat:v1", "https://files.example/chat"] {
        let said = args(&made(json!({"source": source}), Value::Null, models()));
        assert!(!said.contains("https://mirror"), "{said}");
    }
}

#[test]
fn replicas_wait_for_the_commit_of_what_can_change() {
    let awaits = |source: &str, status: Value| {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": {"model": {"source": source}}, "status": status,
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1},
        });
        let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
        validate(&serde_json::from_value(object).unwrap(), &defaults).unwrap().awaits_commit()
    };
    let digest = "0a".repeat(32);
    let by_digest = format!("oci://registry.example/chat@sha256:{digest}");
    let at_sign = format!("s3://models/chat@{digest}");
    let by_hash = format!("https://files.example/chat#sha256={digest}");
    let web_at_sign = format!("https://files.example/chat@{digest}");
    let moving = ["hf://org/model", "s3://models/chat", &at_sign, "oci://registry.example/chat:v1", &web_at_sign];
    for moving in moving {
        assert!(awaits(moving, Value::Null), "{moving}");
        assert!(!awaits(moving, json!({"model": {"source": moving, "commit": digest}})), "{moving} is written down");
    }
    for fixed in [&format!("hf://org/model@{COMMIT}"), &by_digest, &by_hash] {
        assert!(!awaits(fixed, Value::Null), "{fixed}");
    }
}

#[test]
fn nodes_that_had_the_model_are_preferred_and_move_no_revision() {
    let on_nodes = || ModelDefaults { node_cache: Some("/var/lib/models".to_owned()), ..ModelDefaults::default() };
    let written = |commit: &str, models| {
        let status = json!({"model": {"source": "hf://org/model", "commit": commit, "nodes": ["a", "b"]}});
        made(of_hub(), status, models)
    };
    let preferred = |made: &Desired| {
        let affinity = serde_json::to_value(made.pod(0).spec.unwrap().affinity).unwrap();
        let terms = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].as_array().cloned();
        let name = |term: Value| term["preference"]["matchFields"][0]["values"][0].as_str().unwrap().to_owned();
        terms.unwrap_or_default().into_iter().map(name).collect::<Vec<_>>()
    };
    let pinned = written(COMMIT, on_nodes());
    assert_eq!(preferred(&pinned), ["a", "b"]);
    assert_eq!(pinned.revision, made(of_hub(), Value::Null, on_nodes()).revision);
    for nowhere in [written("--evil", on_nodes()), written(COMMIT, ModelDefaults::default())] {
        assert_eq!(preferred(&nowhere), [""; 0], "of no commit, or kept in the pod");
    }
}

#[test]
fn nodes_where_others_serve_the_same_model_are_preferred_too() {
    let object = |source: &str, status: Value| {
        json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": {"model": {"source": source}}, "status": status,
            "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1},
        })
    };
    let models = ModelDefaults { node_cache: Some("/var/lib/models".to_owned()), ..ModelDefaults::default() };
    let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
    let model = |source: &str, commit: &str, nodes: &[&str]| -> ModelStatus {
        serde_json::from_value(json!({"source": source, "commit": commit, "nodes": nodes})).unwrap()
    };
    let other = "f".repeat(40);
    let others = [
        model("hf://org/model", COMMIT, &["b", "c"]),
        model("hf://org/model", &other, &["d"]),
        model("hf://org/another", COMMIT, &["e"]),
    ];
    let preferred = |source: &str, status: Value| -> Vec<String> {
        let valid = validate(&serde_json::from_value(object(source, status)).unwrap(), &defaults).unwrap();
        valid.among(&others).preferred_nodes().into_iter().map(str::to_owned).collect()
    };
    let own = json!({"model": {"source": "hf://org/model", "commit": COMMIT, "nodes": ["a", "b"]}});
    assert_eq!(preferred("hf://org/model", own), ["a", "b", "c"], "of the same commit, its own first");
    assert_eq!(preferred("hf://org/model", Value::Null), ["b", "c", "d"], "the commit is not known yet");
    assert_eq!(preferred("builtin://ember", Value::Null), [""; 0]);
}

#[test]
fn nodes_that_have_the_model_in_memory_are_preferred_first_and_once() {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": {"model": of_hub()},
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1},
        "status": {"model": {"source": "hf://org/model", "commit": COMMIT, "nodes": ["a", "b"]}},
    });
    let models = ModelDefaults { node_cache: Some("/var/lib/models".to_owned()), ..ModelDefaults::default() };
    let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
    let valid = validate(&serde_json::from_value(object).unwrap(), &defaults).unwrap();
    let revision = desired(&valid, "").revision;
    let stands_by = |node: &str, revision: &str, state: PrefetchState| {
        let (name, uid, revision) = (node.to_owned(), node.to_owned(), revision.to_owned());
        let fetch = PrefetchPod { name, uid, revision, node: node.to_owned(), state, is_leaving: false };
        StandbyPod { fetch, created: Timestamp::UNIX_EPOCH }
    };
    let pods = [
        stands_by("w", &revision, PrefetchState::Done),
        stands_by("b", &revision, PrefetchState::Done),
        stands_by("fetching", &revision, PrefetchState::Fetching { trouble: None }),
        stands_by("another", "aaaaaaaa", PrefetchState::Done),
    ];
    let desired = desired(&valid.warm_on(&pods), "");
    let affinity = serde_json::to_value(desired.pod(0).spec.unwrap().affinity).unwrap();
    let terms = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].as_array().unwrap();
    let told = |term: &Value| (term["preference"]["matchFields"][0]["values"][0].clone(), term["weight"].clone());
    let told: Vec<(Value, Value)> = terms.iter().map(told).collect();
    assert_eq!(told, [("w", 75), ("b", 75), ("a", 50)].map(|(node, weight)| (json!(node), json!(weight))));
    assert_eq!(desired.revision, revision, "it rolls nothing");
}

#[test]
fn what_fetches_ahead_runs_on_one_node_asks_for_nothing_and_is_no_replica() {
    let on_nodes = || ModelDefaults { node_cache: Some("/var/lib/models".to_owned()), ..ModelDefaults::default() };
    let status = json!({"model": {"source": "hf://org/model", "commit": COMMIT}});
    let desired = made(of_hub(), status, on_nodes());
    let ahead = desired.prefetch(&desired.revision, "node-a.example").unwrap();
    let spec = ahead.spec.clone().unwrap();
    let [container] = &spec.containers[..] else { panic!("one container") };
    let said = container.args.clone().unwrap().join(" ");
    assert_eq!(
        said,
        format!("fetch hf://org/model --cache /models --token-name key token of Secret hub --commit {COMMIT}")
    );
    assert_eq!((container.resources.clone(), spec.priority_class_name.clone()), (None, None));
    assert_eq!(secrets(container), [("HF_TOKEN".to_owned(), "hub".to_owned(), "token".to_owned(), false)]);
    assert_eq!(container.security_context, fetcher(&desired.pod(0)).security_context);
    assert_eq!(volume(&ahead, "model-cache")["hostPath"]["path"], "/var/lib/models");
    let mounts: Vec<_> =
        container.volume_mounts.iter().flatten().map(|mount| (&*mount.mount_path, mount.read_only)).collect();
    assert_eq!(mounts, [("/models", None), ("/mnt/ca", Some(true))]);
    let required =
        serde_json::to_value(&spec.affinity).unwrap()["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            ["nodeSelectorTerms"]
            .clone();
    let is_node = json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-a.example"]}]}]);
    assert_eq!(required, is_node);
    assert_eq!(spec.restart_policy.as_deref(), Some("OnFailure"));

    let labels = |pod: &Pod| pod.metadata.labels.clone().unwrap();
    let (own, of_replica) = (labels(&ahead), labels(&desired.pod(0)));
    for key in ["app.kubernetes.io/managed-by", "app.kubernetes.io/component"] {
        assert_ne!(own[key], of_replica[key], "{key}: by this replicas are found");
    }
    let name = |node: &str| desired.prefetch(&desired.revision, node).unwrap().metadata.name.unwrap();
    assert_ne!(name("a"), name("b"));
    assert_eq!(name("a"), name("a"));
    assert!(name("a").starts_with(&format!("chat-{}-prefetch-", desired.revision)));
    assert_eq!(desired.prefetch("another", "a"), None);
    let in_pods = made(of_hub(), Value::Null, ModelDefaults::default());
    assert_eq!(in_pods.prefetch(&in_pods.revision, "a"), None, "each pod has its own cache");
}

#[test]
fn a_commit_that_is_known_is_told_and_moves_no_revision() {
    let plain = made(of_hub(), Value::Null, ModelDefaults::default());
    assert!(!args(&plain).contains("--commit"), "{}", args(&plain));
    let written = |source: &str, commit: &str| {
        made(of_hub(), json!({"model": {"source": source, "commit": commit}}), ModelDefaults::default())
    };
    let pinned = written("hf://org/model", COMMIT);
    assert!(args(&pinned).contains(&format!("--commit {COMMIT}")), "{}", args(&pinned));
    assert_eq!(pinned.revision, plain.revision);
    for other in [written("hf://org/other", COMMIT), written("hf://org/model", "--evil")] {
        assert_eq!(args(&other), args(&plain), "of another source, or no commit");
    }
}

#[test]
fn the_cache_is_where_chart_or_deployment_say() {
    let node = || ModelDefaults {
        endpoint: Some("https://mirror".to_owned()),
        node_cache: Some("/srv/models".to_owned()),
        node_cache_limit: Some(1000),
        ..ModelDefaults::default()
    };
    let cache = |desired: &Desired| volume(&desired.pod(0), "model-cache");
    let own = made(of_hub(), Value::Null, ModelDefaults::default());
    assert_eq!(cache(&own)["emptyDir"], json!({}));
    let of_node = made(of_hub(), Value::Null, node());
    assert_eq!(cache(&of_node)["hostPath"], json!({"path": "/srv/models", "type": "Directory"}));
    let said = args(&of_node);
    assert!(said.contains("--endpoint https://mirror") && said.contains("--cache-limit 1000"), "{said}");
    let mut claimed = of_hub();
    claimed["cache"] = json!({"claimName": "weights", "sizeLimit": "1Gi"});
    let claimed = made(claimed, Value::Null, node());
    assert_eq!(cache(&claimed)["persistentVolumeClaim"]["claimName"], "weights");
    assert!(args(&claimed).contains("--cache-limit 1073741824"), "the claim's limit, not the node's");
    let builtin = made(json!({"source": "builtin://ember"}), Value::Null, node()).pod(0);
    assert!(builtin.spec.unwrap().init_containers.is_none());
}

#[test]
fn what_stands_by_asks_for_the_models_bytes_and_is_ready_once_they_are_in_memory() {
    let nodes = || ModelDefaults { node_cache: Some("/var/lib/models".into()), ..ModelDefaults::default() };
    let status = |bytes: Value| json!({"model": {"source": "hf://org/model", "commit": COMMIT, "bytes": bytes}});
    let desired = made(of_hub(), status(json!(16_000_000_000_i64)), nodes());
    let (stays, ahead) = (desired.standby("node-a").unwrap(), desired.prefetch(&desired.revision, "node-a").unwrap());
    let container = |pod: &Pod| pod.spec.as_ref().unwrap().containers[0].clone();
    let (kept, fetched) = (container(&stays), container(&ahead));
    assert_eq!(kept.args.unwrap().join(" "), format!("{} --keep-resident", fetched.args.unwrap().join(" ")));
    let resources = serde_json::to_value(kept.resources).unwrap();
    assert_eq!(resources, json!({"requests": {"memory": "16067108864"}}), "no GPU, no CPU, no limit");
    let probe = serde_json::to_value(kept.readiness_probe).unwrap();
    assert_eq!(probe["httpGet"], json!({"path": "/readyz", "port": "admin"}));
    assert_eq!((kept.env, kept.volume_mounts), (fetched.env, fetched.volume_mounts));
    let spec = stays.spec.clone().unwrap();
    assert_eq!((spec.restart_policy, spec.active_deadline_seconds), (None, None), "it stays, and comes back");
    assert_eq!(spec.affinity, ahead.spec.clone().unwrap().affinity, "on this node alone");
    let tolerates = |pod: &Pod| {
        let tolerations = pod.spec.clone().unwrap().tolerations.unwrap_or_default();
        tolerations.iter().any(|toleration| toleration.key.as_deref() == Some("nvidia.com/gpu"))
    };
    assert_eq!([tolerates(&stays), tolerates(&ahead)], [true; 2], "of nodes for GPUs, which it asks none of");
    let label = |pod: &Pod| pod.metadata.labels.clone().unwrap()["app.kubernetes.io/component"].clone();
    assert_eq!([label(&stays), label(&ahead), label(&desired.pod(0))], ["standby", "prefetch", "agent"]);
    assert!(stays.metadata.name.unwrap().starts_with(&format!("chat-{}-standby-", desired.revision)));

    assert_eq!(made(of_hub(), status(Value::Null), nodes()).standby("a"), None, "nobody knows how large it is");
    let in_pods = made(of_hub(), status(json!(1)), ModelDefaults::default());
    assert_eq!(in_pods.standby("a"), None, "each pod has its own cache");
}

#[test]
fn nodes_stand_by_for_what_they_keep_alone() {
    let refusal = |model: Value, models: ModelDefaults| {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "spec": {"model": model, "scaling": {"max": 4, "standby": 2}},
            "metadata": {"name": "chat", "namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"},
        });
        let defaults = Defaults { agent_image: "agent:1".into(), models, ..Defaults::default() };
        validate(&serde_json::from_value(object).unwrap(), &defaults).map(drop).map_err(|error| error.to_string())
    };
    let nodes = || ModelDefaults { node_cache: Some("/var/lib/models".into()), ..ModelDefaults::default() };
    assert_eq!(refusal(of_hub(), nodes()), Ok(()));
    let begins = "spec.scaling.standby is 2, for a model that nodes keep:";
    let claim = json!({"source": "hf://org/model", "cache": {"claimName": "models"}});
    let cases = [
        (refusal(json!({"source": "builtin://ember"}), nodes()), "use a spec.model.source that is fetched"),
        (refusal(claim, nodes()), "remove spec.model.cache.claimName"),
        (refusal(of_hub(), ModelDefaults::default()), "models.cache.hostPath of the operator's chart"),
    ];
    for (refused, fix) in cases {
        let refused = refused.unwrap_err();
        assert!(
            refused.starts_with(begins) && refused.contains(fix) && refused.ends_with("remove standby"),
            "{refused}"
        );
    }
}
