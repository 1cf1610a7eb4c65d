//! Pods of a model that a hub has: what fetches it, what it may, and what the agent sees of it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use k8s_openapi::api::core::v1::{Container, Pod};
use serde_json::{Value, json};
use stoker_operator::{
    desired::{Desired, desired},
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
