//! Nothing of the object is accepted and then ignored: each field of the schema, changed or taken out, changes what the
//! operator wants or is refused; put back, everything is as before.
//!
//! The fields come from the schema, so a new one is in one of the objects here or the test fails.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use serde_json::{Value, json};
use stoker_operator::{
    desired::desired,
    validate::{Defaults, validate},
};

/// Objects that have every field, none of them at its default.
fn objects() -> [Value; 3] {
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
            "kvCacheDtype": "fp8"
        },
        "replicas": 3,
        "rollout": {
            "maxUnavailable": 1, "surgeSeconds": 45, "progressDeadlineSeconds": 900, "paused": true, "keepRevisions": 2,
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
        "parallelism": {"tensor": 2},
        "pod": {"securityContext": {"platformIds": true}},
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
    [fixed, scaled, fetched]
}

/// All that the operator wants for a spec, as text; the refusal if it wants none of it.
fn wants(spec: &Value) -> Result<String, String> {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
    });
    let deployment = serde_json::from_value(object).map_err(|error| error.to_string())?;
    let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
    let valid = validate(&deployment, &defaults).map_err(|error| error.to_string())?;
    let desired = desired(&valid, "");
    Ok(format!("{valid:?} {desired:?} {:?}", desired.pod(0)))
}

/// Every field of the schema below `schema` as a JSON pointer. What Kubernetes defines, and lists, are one field.
fn fields(schema: &Value, at: &str) -> Vec<String> {
    match schema["properties"].as_object() {
        Some(properties) if at != "/pod/affinity" => {
            properties.iter().flat_map(|(name, schema)| fields(schema, &format!("{at}/{name}"))).collect()
        }
        _ => vec![at.to_owned()],
    }
}

fn schema_of_spec() -> Value {
    let crd = serde_json::to_value(stoker_crds::crd::crd()).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Another value of the same type; `None` for lists and maps.
fn another(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(value) => Some((!value).into()),
        Value::Number(number) => {
            Some(number.as_i64().map_or_else(|| json!(number.as_f64().unwrap() * 0.9), |n| (n + 16).into()))
        }
        Value::String(text) => Some(format!("{text}x").into()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn take_out(spec: &mut Value, field: &str) {
    let (parent, name) = field.rsplit_once('/').unwrap();
    spec.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(name);
}

#[test]
fn every_field_changes_what_is_wanted_or_is_refused() {
    let objects = objects();
    let fields = fields(&schema_of_spec(), "");
    assert!(fields.len() > 50, "{fields:?}");
    for field in fields {
        let spec = objects.iter().find(|object| object.pointer(&field).is_some());
        let spec = spec.unwrap_or_else(|| panic!("{field} is in no object of this test"));
        let before = wants(spec).unwrap_or_else(|refusal| panic!("{spec}: {refusal}"));
        let mut without = spec.clone();
        take_out(&mut without, &field);
        assert_ne!(wants(&without).as_ref(), Ok(&before), "{field} taken out");
        if let Some(value) = another(spec.pointer(&field).unwrap()) {
            let mut changed = spec.clone();
            *changed.pointer_mut(&field).unwrap() = value;
            assert_ne!(wants(&changed).as_ref(), Ok(&before), "{field} changed");
        }
        assert_eq!(wants(spec), Ok(before), "{field} put back");
    }
}
