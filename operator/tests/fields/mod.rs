//! Fields of a spec as its schema has them, objects that have them all, and other values for them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Value, json};

/// Objects that have every field, none of them at its default.
pub(crate) fn objects() -> [Value; 4] {
    let pod = json!({
        "image": "registry.example/agent:1", "imagePullPolicy": "Always", "imagePullSecrets": [{"name": "pull"}],
        "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "labels": {"team": "a"}, "annotations": {"note": "b"}, "serviceAccountName": "chat", "priorityClassName": "high",
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "runtimeClassName": "sandboxed", "schedulerName": "bin-packer",
        "env": [{"name": "PROXY", "value": "http://proxy"}],
        "volumes": [{"mountPath": "/tmp", "emptyDir": {"sizeLimit": "1Gi"}}],
        "securityContext": {
            "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000,
            "seLinuxOptions": {"level": "s0:c123,c456", "type": "container_kvm_t"}
        }
    });
    let fixed = json!({
        "model": {"source": "pvc://weights/llama/8b", "servedNames": ["llama", "llama-8b"]},
        "resources": {"cpu": "1500m", "memory": "8Gi", "gpus": 1, "gpuResource": "amd.com/gpu"},
        "engine": {
            "maxModelLen": 4096, "maxNumSeqs": 32, "maxBatchedTokens": 256, "kvCacheTokens": 65536, "maxWaiting": 64,
            "threads": 2, "memoryFraction": 0.5, "prefixCaching": false, "batchInvariant": true, "itlTargetMs": 40, "quantization": "fp8",
            "kvCacheDtype": "fp8", "trustRequestChatTemplate": true
        },
        "replicas": 3,
        "rollout": {
            "maxUnavailable": 1, "maxSurge": 2, "surgeSeconds": 45, "progressDeadlineSeconds": 900, "paused": true, "keepRevisions": 2,
            "autoRollback": false,
            "canary": {
                "weight": 20, "seconds": 60,
                "analysis": {
                    "prompts": {"maxMeanDrift": 0.2, "texts": ["Once upon a time"]},
                    "traffic": {"minRequests": 20, "maxTtftRatio": 2.0, "maxItlRatio": 2.5, "maxErrorPercent": 2.0}
                }
            }
        },
        "drain": {"deadlineSeconds": 60, "withdrawSeconds": 7},
        "pod": pod
    });
    let scaled = json!({
        "model": {"source": "builtin://ember"},
        "resources": {"deviceClass": "gpu.nvidia.com"},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "pod": {"securityContext": {"platformIds": true}},
        "rollout": {"minAvailable": "75%"},
        "scaling": {
            "min": 2, "max": 8, "mode": "advisory",
            "targets": {"kv": 0.7, "slowdown": 3.0, "queueSeconds": 0.5, "preemptionsPerMinute": 1.5, "ttftMs": 1500.0, "itlMs": 50.0},
            "prices": {"lateAnswer": 0.1, "replicaHour": 2.5},
            "toZero": {"afterSeconds": 300, "maxWakeSeconds": 90},
            "behavior": {
                "stableWindowSeconds": 30, "panicWindowSeconds": 4, "downPressure": 0.8, "downStabilizationSeconds": 60,
                "spareReplicas": 1, "up": {"replicas": 2, "percent": 90}, "down": {"replicas": 2, "percent": 10},
                "quorum": {"up": 0.4, "down": 0.9}
            }
        }
    });
    let fetched = json!({"model": {
        "source": "hf://org/model@v1", "tokenSecret": {"name": "hub", "key": "read"},
        "cache": {"claimName": "models", "sizeLimit": "200Gi"},
    }});
    let kept = json!({"model": {"source": "hf://org/model@v1"}, "scaling": {"max": 8, "standby": 3}});
    [fixed, scaled, fetched, kept]
}

/// Every field of the schema below `schema` as a JSON pointer. What Kubernetes defines, and lists, are one field.
pub(crate) fn fields(schema: &Value, at: &str) -> Vec<String> {
    match schema["properties"].as_object() {
        Some(properties) if at != "/pod/affinity" => {
            properties.iter().flat_map(|(name, schema)| fields(schema, &format!("{at}/{name}"))).collect()
        }
        _ => vec![at.to_owned()],
    }
}

pub(crate) fn schema_of_spec(crd: CustomResourceDefinition) -> Value {
    let crd = serde_json::to_value(crd).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Another value of the same type; `None` for lists and maps.
pub(crate) fn another(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(value) => Some((!value).into()),
        Value::Number(number) => {
            Some(number.as_i64().map_or_else(|| json!(number.as_f64().unwrap() * 0.9), |n| (n + 16).into()))
        }
        Value::String(text) => Some(format!("{text}x").into()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

pub(crate) fn take_out(spec: &mut Value, field: &str) {
    let (parent, name) = field.rsplit_once('/').unwrap();
    spec.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name);
}
