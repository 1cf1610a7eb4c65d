//! What `spec.pod` may say of replicas' pods, and that a namespace which enforces the restricted profile admits what is made of it.

use std::sync::Arc;

use serde_json::{Value, json};
use stoker_crds::{InferenceDeployment, devices::Gpus};
use stoker_operator::{
    desired::desired,
    image_volumes::{Ground, ImageVolumes, Release},
    validate::{Defaults, ValidatedDeployment, validate},
    watched::Seen,
};

use super::{CLIENT, accepted, ember_with, kubectl, refused};

/// The fields of `spec.pod` that say where pods run, what is added to them and as whom they run.
pub(super) fn placed_and_added() -> Value {
    let zone =
        json!({"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"});
    let replicas = json!({"matchLabels": {"app.kubernetes.io/instance": "chat"}});
    let h100 = json!({"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]});
    let apart =
        json!({"weight": 1, "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": replicas}});
    json!({
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [h100]}},
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}
        },
        "topologySpreadConstraints": [zone],
        "runtimeClassName": "sandboxed", "schedulerName": "bin-packer",
        "env": [
            {"name": "STOKER_LOG", "value": "debug"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
            {"name": "PROXY", "valueFrom": {"configMapKeyRef": {"name": "site", "key": "proxy"}}}
        ],
        "volumes": [
            {"mountPath": "/tmp", "emptyDir": {"sizeLimit": "1Gi"}},
            {"mountPath": "/dev/shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"mountPath": "/mnt/site", "configMap": {"name": "site"}},
            {"mountPath": "/mnt/keys", "secret": {"secretName": "keys"}},
            {"mountPath": "/var/cache/models", "readOnly": false, "persistentVolumeClaim": {"claimName": "cache"}}
        ],
        "securityContext": {
            "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000,
            "seLinuxOptions": {"level": "s0:c123,c456", "type": "container_t"}
        }
    })
}

#[test]
fn labels_and_annotations_of_the_operator_are_refused() {
    refused(
        ember_with(json!({"pod": {"labels": {"app.kubernetes.io/instance": "x"}}})),
        &["pod.labels", "choose another prefix"],
    );
    refused(
        ember_with(json!({"pod": {"annotations": {"stoker.dev/x": "y"}}})),
        &["pod.annotations", "belong to the operator"],
    );
}

#[test]
fn where_pods_run_is_refused_by_field_and_fix() {
    let pod = |pod: Value| ember_with(json!({"pod": pod}));
    let spread = |changed: Value| {
        let mut spread = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"});
        spread.as_object_mut().unwrap().extend(changed.as_object().unwrap().clone());
        pod(json!({"topologySpreadConstraints": [spread]}))
    };
    accepted(spread(json!({})));
    refused(spread(json!({"maxSkew": 0})), &["pod.topologySpreadConstraints: maxSkew", "use 1 or more"]);
    refused(spread(json!({"topologyKey": ""})), &["topologyKey names the node label to spread over"]);
    refused(spread(json!({"whenUnsatisfiable": "Never"})), &["whenUnsatisfiable is DoNotSchedule or ScheduleAnyway"]);
    refused(spread(json!({"matchLabelKeys": ["team"]})), &["matchLabelKeys needs labelSelector; add it or remove"]);
    refused(pod(json!({"affinity": {"nodeAfinity": {}}})), &["unknown field \"spec.pod.affinity.nodeAfinity\""]);
    refused(pod(json!({"runtimeClassName": "No_Name"})), &["pod.runtimeClassName: use the name of a RuntimeClass"]);
    refused(pod(json!({"schedulerName": "-"})), &["pod.schedulerName: use the name that a scheduler"]);
}

#[test]
fn variables_that_change_what_runs_are_refused() {
    let env = |env: Value| ember_with(json!({"pod": {"env": env}}));
    let named = |name: &str| env(json!([{"name": name, "value": "x"}]));
    for name in ["LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES"] {
        refused(named(name), &["pod.env: LD_… and GLIBC_TUNABLES change which program runs", "pod.image"]);
    }
    refused(named("NVIDIA_VISIBLE_DEVICES"), &["pod.env: NVIDIA_…", "ask for GPUs with resources.gpus"]);
    refused(named("STOKER_POD_UID"), &["belong to the operator; remove them"]);
    refused(named("1A"), &["pod.env: a name has letters"]);
    refused(env(json!([{"name": "A"}])), &["pod.env: a variable has either value or valueFrom"]);
    let key = json!({"name": "n", "key": "k"});
    refused(env(json!([{"name": "A", "value": "a", "valueFrom": {"secretKeyRef": key}}])), &["either value or"]);
    refused(
        env(json!([{"name": "A", "valueFrom": {"secretKeyRef": key, "configMapKeyRef": key}}])),
        &["valueFrom has either secretKeyRef or configMapKeyRef"],
    );
    refused(env(json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}])), &["unknown field", "fieldRef"]);
    refused(env(json!([{"name": "A", "value": "a"}, {"name": "A", "value": "b"}])), &["Duplicate value"]);
}

#[test]
fn volumes_outside_the_safe_list_are_refused() {
    let volumes = |volumes: Value| ember_with(json!({"pod": {"volumes": volumes}}));
    let at = |path: &str| volumes(json!([{"mountPath": path, "emptyDir": {}}]));
    for path in ["/tmp", "/dev/shm", "/mnt", "/data/a/b", "/cache/..a", "/var/cache/models"] {
        accepted(at(path));
    }
    for path in
        ["/", "/usr/bin", "/etc/stoker", "/models", "/proc", "/dev", "/tmpfs", "/tmp/a", "/data/", "data", "/mnt//a"]
    {
        refused(
            at(path),
            &["pod.volumes: mountPath is /tmp, /dev/shm, or at or below /mnt, /data, /cache or /var/cache"],
        );
    }
    for path in ["/mnt/../etc", "/mnt/.", "/mnt/a:b"] {
        refused(at(path), &["pod.volumes: mountPath has no '.' or '..' parts and no ':'"]);
    }
    let one = "pod.volumes: a volume is exactly one of emptyDir, configMap, secret and persistentVolumeClaim";
    refused(volumes(json!([{"mountPath": "/tmp"}])), &[one]);
    refused(volumes(json!([{"mountPath": "/tmp", "emptyDir": {}, "configMap": {"name": "a"}}])), &[one]);
    refused(volumes(json!([{"mountPath": "/tmp", "hostPath": {"path": "/"}}])), &["unknown field", "hostPath"]);
    refused(
        volumes(json!([{"mountPath": "/mnt", "readOnly": false, "secret": {"secretName": "a"}}])),
        &["pod.volumes: readOnly says something of a persistentVolumeClaim only", "remove readOnly"],
    );
    refused(volumes(json!([{"mountPath": "/tmp", "emptyDir": {"sizeLimit": "much"}}])), &["emptyDir.sizeLimit"]);
    let same = json!({"mountPath": "/tmp", "emptyDir": {}});
    refused(volumes(json!([same, same])), &["Duplicate value"]);
}

#[test]
fn the_agent_runs_as_nobody_whom_a_restricted_namespace_refuses() {
    let security = |security: Value| ember_with(json!({"pod": {"securityContext": security}}));
    refused(security(json!({"runAsUser": 0})), &["securityContext.runAsUser", "greater than or equal to 1"]);
    refused(security(json!({"privileged": true})), &["unknown field", "privileged"]);
    refused(security(json!({"seLinuxOptions": {"type": "spc_t"}})), &["seLinuxOptions.type", "\"container_t\""]);
    refused(security(json!({"seLinuxOptions": {"user": "system_u"}})), &["unknown field", "user"]);
    for id in ["runAsUser", "runAsGroup", "fsGroup"] {
        refused(
            security(json!({"platformIds": true, id: 1000})),
            &["pod.securityContext.platformIds leaves the ids to the platform: remove runAsUser"],
        );
    }
    accepted(security(json!({"platformIds": true, "seLinuxOptions": {"level": "s0"}})));
}

#[test]
fn a_restricted_namespace_admits_a_pod_of_every_field() {
    let create = |object: Value| kubectl(&["create", "-f", "-"], Some(object)).unwrap();
    let enforced = json!({"pod-security.kubernetes.io/enforce": "restricted"});
    create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "strict", "labels": enforced}}));
    // Who admits pods asks whether these exist.
    create(
        json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000}),
    );
    create(
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "sandboxed"}, "handler": "runsc"}),
    );
    let mut every = placed_and_added();
    every.as_object_mut().unwrap().extend(
        json!({
            "image": "registry.example/agent:1", "imagePullPolicy": "Always", "imagePullSecrets": [{"name": "pull"}],
            "nodeSelector": {"disk": "ssd"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "labels": {"team": "a"}, "annotations": {"note": "b"}, "serviceAccountName": "default", "priorityClassName": "high"
        })
        .as_object()
        .unwrap()
        .clone(),
    );
    let platform = json!({"securityContext": {"platformIds": true}});
    for pod in [json!({}), every, platform] {
        let rendered = replica(&pod);
        let admitted = kubectl(&["create", "--dry-run=server", "--validate=strict", "-f", "-"], Some(rendered.clone()));
        assert!(admitted.is_ok(), "{pod}: {admitted:?}");
        // The namespace does refuse.
        for (field, value) in [("runAsUser", json!(0)), ("seLinuxOptions", json!({"type": "spc_t"}))] {
            let mut lax = rendered.clone();
            lax["spec"]["securityContext"][field] = value;
            let refused = kubectl(&["create", "--dry-run=server", "-f", "-"], Some(lax)).unwrap_err();
            assert!(refused.contains("violates PodSecurity \"restricted"), "{refused}");
        }
    }
}

/// A replica's pod of a deployment with this `spec.pod`, in the namespace that enforces.
fn replica(pod: &Value) -> Value {
    let deployment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "strict", "uid": "uid-chat", "generation": 1},
        "spec": {"model": {"source": "pvc://weights"}, "resources": {"cpu": 1, "memory": "1Gi", "gpus": 1}, "pod": pod},
    });
    let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
    let valid = validate(&serde_json::from_value(deployment).unwrap(), &defaults).unwrap();
    pod_of(&valid)
}

fn pod_of(valid: &ValidatedDeployment) -> Value {
    let mut pod = serde_json::to_value(desired(valid, "").pod(0)).unwrap();
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod
}

/// As where the cluster has image volumes.
#[test]
fn a_restricted_namespace_admits_a_pod_that_mounts_its_model_s_image() {
    let create = |object: Value| kubectl(&["create", "-f", "-"], Some(object)).unwrap();
    let enforced = json!({"pod-security.kubernetes.io/enforce": "restricted"});
    create(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "mounts", "labels": enforced}}));
    let (runtime, client) = &*CLIENT;
    let server = runtime.block_on(Release::of_server(client));
    let node = json!({"metadata": {"name": "a"}, "status": {"nodeInfo": {
        "kubeletVersion": "v1.35.0", "containerRuntimeVersion": "containerd://2.1.4", "architecture": "", "bootID": "",
        "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "operatingSystem": "", "osImage": "", "systemUUID": "",
    }}});
    let nodes = Seen::All(Arc::new(vec![serde_json::from_value(node).unwrap()]));
    let digest = "0a".repeat(32);
    let deployment = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "mounts", "uid": "uid-chat", "generation": 1},
        "spec": {"model": {"source": format!("oci://registry.example:5000/team/chat:v1@sha256:{digest}#path=models"), "tokenSecret": {"name": "pull"}}},
    });
    let deployment: InferenceDeployment = serde_json::from_value(deployment).unwrap();
    let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
    let (rule, devices) = (ImageVolumes::Auto, Gpus::default());
    let ground = Ground { rule, server, nodes: &nodes, devices: Some(&devices), spec: &deployment.spec };
    let valid = validate(&deployment, &defaults).unwrap().delivered_on(&ground);
    let asked = ["create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"];
    let admitted = kubectl(&asked, Some(pod_of(&valid))).unwrap();
    let stored: Value = serde_json::from_str(&admitted).unwrap();
    let volumes = stored["spec"]["volumes"].as_array().unwrap();
    let image = volumes.iter().find(|volume| volume["name"] == "model").map(|volume| volume["image"].clone());
    let reference = format!("registry.example:5000/team/chat@sha256:{digest}");
    assert_eq!(image, Some(json!({"reference": reference, "pullPolicy": "IfNotPresent"})), "{:?}", valid.delivery);
}
