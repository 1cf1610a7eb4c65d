//! `spec.pod` in, the pod out: each field in the form that a user writes, and what of it reaches the replica's pod.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use jiff::Timestamp;
use serde_json::{Value, json};
use stoker_operator::{
    allow::{AllowList, Allowed},
    desired::{Desired, desired},
    status::status_of_invalid,
    validate::{Defaults, SpecError, validate},
};

fn deployment(pod: &Value) -> stoker_crds::InferenceDeployment {
    let object = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "default", "uid": "uid-chat", "generation": 1, "resourceVersion": "1"},
        "spec": {"model": {"source": "builtin://ember"}, "pod": pod},
    });
    serde_json::from_value(object).unwrap()
}

/// What a deployment with this `spec.pod` renders to.
fn rendered(pod: &Value, platform_ids: bool) -> Desired {
    let defaults = Defaults { agent_image: "agent:1".into(), platform_ids, ..Defaults::default() };
    desired(&validate(&deployment(pod), &defaults).unwrap(), "")
}

fn yaml(text: &str) -> Value {
    serde_norway::from_str(text).unwrap()
}

fn spec_of(pod: &Value) -> Value {
    serde_json::to_value(rendered(pod, false).pod(0)).unwrap()["spec"].clone()
}

/// What is at `at` of the pod's spec for a `spec.pod` in YAML.
#[track_caller]
fn check(pod: &str, at: &str, expected: &str) {
    let spec = spec_of(&yaml(pod));
    assert_eq!(spec.pointer(at).unwrap_or(&Value::Null), &yaml(expected), "{at} of {pod}");
}

#[test]
fn a_crowd_of_clients_is_nothing_to_be_restarted_for() {
    check("{}", "/containers/0/startupProbe/httpGet", "{path: /healthz, port: admin}");
    check("{}", "/containers/0/livenessProbe/httpGet", "{path: /healthz, port: admin}");
    check("{}", "/containers/0/readinessProbe/httpGet", "{path: /readyz, port: http}");
}

#[test]
fn where_pods_run_is_passed_on() {
    let affinity = "{nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [h100]}]}]}}}";
    check(&format!("affinity: {affinity}"), "/affinity", affinity);
    check("runtimeClassName: gvisor", "/runtimeClassName", "gvisor");
    check("schedulerName: bin-packer", "/schedulerName", "bin-packer");
    for field in ["/affinity", "/runtimeClassName", "/schedulerName", "/topologySpreadConstraints"] {
        check("{}", field, "null");
    }
}

#[test]
fn a_spread_without_a_selector_is_about_the_replicas_of_a_revision() {
    let zones = "maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: DoNotSchedule";
    check(
        &format!("topologySpreadConstraints: [{{{zones}}}]"),
        "/topologySpreadConstraints/0",
        &format!(
            "{{{zones}, matchLabelKeys: [stoker.dev/revision], labelSelector: {{matchLabels: {{app.kubernetes.io/managed-by: stoker, app.kubernetes.io/instance: chat, app.kubernetes.io/component: agent}}}}}}"
        ),
    );
    let own = format!("{{{zones}, labelSelector: {{matchLabels: {{team: a}}}}}}");
    check(&format!("topologySpreadConstraints: [{own}]"), "/topologySpreadConstraints/0", &own);
}

#[test]
fn variables_come_before_the_operators_own() {
    let at = "/containers/0/env";
    let own = "{name: STOKER_POD_UID, valueFrom: {fieldRef: {fieldPath: metadata.uid}}}";
    check("{}", at, &format!("[{own}]"));
    check("env: [{name: A, value: b}]", at, &format!("[{{name: A, value: b}}, {own}]"));
    for source in ["secretKeyRef", "configMapKeyRef"] {
        let variable = format!("{{name: A, valueFrom: {{{source}: {{name: n, key: k}}}}}}");
        check(&format!("env: [{variable}]"), at, &format!("[{variable}, {own}]"));
    }
}

#[test]
fn volumes_are_mounted_to_be_read_unless_they_are_there_to_be_written() {
    let cases = [
        ("emptyDir: {}", "", "emptyDir: {}", "false"),
        ("emptyDir: {medium: Memory, sizeLimit: 1Gi}", "", "emptyDir: {medium: Memory, sizeLimit: 1Gi}", "false"),
        ("configMap: {name: c}", "", "configMap: {name: c}", "true"),
        ("secret: {secretName: s}", "", "secret: {secretName: s}", "true"),
        ("persistentVolumeClaim: {claimName: p}", "", "persistentVolumeClaim: {claimName: p, readOnly: true}", "true"),
        (
            "persistentVolumeClaim: {claimName: p}",
            "readOnly: false, ",
            "persistentVolumeClaim: {claimName: p, readOnly: false}",
            "false",
        ),
    ];
    for (source, how, volume, read_only) in cases {
        let pod = format!("volumes: [{{mountPath: /tmp, {how}{source}}}]");
        check(&pod, "/volumes/2", &format!("{{name: added-0, {volume}}}"));
        let mount = format!("{{name: added-0, mountPath: /tmp, readOnly: {read_only}}}");
        check(&pod, "/containers/0/volumeMounts/2", &mount);
    }
    check("{}", "/volumes/2", "null");
}

#[test]
fn agents_are_told_the_collector_unless_their_deployment_names_one() {
    let env = |pod: &str, otlp_endpoint: Option<&str>| {
        let otlp_endpoint = otlp_endpoint.map(str::to_owned);
        let defaults = Defaults { agent_image: "agent:1".into(), otlp_endpoint, ..Defaults::default() };
        let desired = desired(&validate(&deployment(&yaml(pod)), &defaults).unwrap(), "");
        let env = serde_json::to_value(desired.pod(0)).unwrap()["spec"]["containers"][0]["env"].clone();
        let of_collector = |variable: &&Value| variable["name"] == "OTEL_EXPORTER_OTLP_ENDPOINT";
        let values: Vec<Value> =
            env.as_array().unwrap().iter().filter(of_collector).map(|one| one["value"].clone()).collect();
        (values, desired.revision.clone())
    };
    let collector = Some("http://collector:4318");
    let (none, plain) = env("{}", None);
    assert!(none.is_empty());
    let (told, traced) = env("{}", collector);
    assert_eq!(told, ["http://collector:4318"]);
    assert_ne!(plain, traced, "agents read it when they start");
    let own = "{env: [{name: OTEL_EXPORTER_OTLP_ENDPOINT, value: 'http://own:4318'}]}";
    assert_eq!(env(own, collector), env(own, None), "the deployment's own counts, whatever the chart says");
    assert_eq!(env(own, collector).0, ["http://own:4318"]);
}

/// What the pod of a deployment with these resources and parallelism asks for and what its agent is told: GPUs and ranks.
fn gpus_of(resources: &str, parallelism: &str) -> (Value, Value, Value) {
    let mut deployment = deployment(&json!({}));
    deployment.spec.resources = serde_norway::from_str(resources).unwrap();
    deployment.spec.parallelism = serde_norway::from_str(parallelism).unwrap();
    let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
    let desired = desired(&validate(&deployment, &defaults).unwrap(), "");
    let config: Value = serde_json::from_str(&desired.config_map.data.as_ref().unwrap()["agent.json"]).unwrap();
    let pod = serde_json::to_value(desired.pod(0)).unwrap();
    let resources = &pod["spec"]["containers"][0]["resources"];
    assert_eq!(resources["limits"], resources["requests"]);
    assert_eq!(pod["spec"]["volumes"].as_array().unwrap().len(), 2, "ranks are threads of one process: no /dev/shm");
    (resources["limits"].clone(), config["gpus"].clone(), config["parallelism"].clone())
}

#[test]
fn ranks_have_a_gpu_each_and_the_agent_is_told() {
    let cases = [
        ("{}", "{tensor: 2}", "{nvidia.com/gpu: '2'}", "2", "{tensor: 2}"),
        ("{gpus: 4}", "{tensor: 4}", "{nvidia.com/gpu: '4'}", "4", "{tensor: 4}"),
        ("{gpuResource: amd.com/gpu}", "{tensor: 8}", "{amd.com/gpu: '8'}", "8", "{tensor: 8}"),
        // So have those of each stage.
        ("{}", "{pipeline: 2}", "{nvidia.com/gpu: '2'}", "2", "{tensor: 1, pipeline: 2}"),
        ("{gpus: 6}", "{tensor: 2, pipeline: 3}", "{nvidia.com/gpu: '6'}", "6", "{tensor: 2, pipeline: 3}"),
        // One stage is what agents before there were several have: nothing is said of it.
        ("{}", "{tensor: 2, pipeline: 1}", "{nvidia.com/gpu: '2'}", "2", "{tensor: 2}"),
        // One rank is what agents before there were several compute with: nothing is said of it.
        ("{gpus: 1}", "{tensor: 1}", "{nvidia.com/gpu: '1'}", "1", "null"),
        ("{gpus: 1}", "null", "{nvidia.com/gpu: '1'}", "1", "null"),
        ("{}", "{}", "null", "null", "null"),
        ("{gpus: 0}", "{tensor: 1}", "null", "null", "null"),
        ("{gpus: 0}", "{pipeline: 1}", "null", "null", "null"),
    ];
    for (resources, parallelism, asked, gpus, told) in cases {
        let expected = (yaml(asked), yaml(gpus), yaml(told));
        assert_eq!(gpus_of(resources, parallelism), expected, "{resources} {parallelism}");
    }
}

/// Claims of the pod and of the container that computes, and the template, of a deployment with these resources on four GPUs.
fn claimed_by(resources: &str) -> [Value; 3] {
    let mut deployment = deployment(&json!({}));
    deployment.spec.resources = serde_norway::from_str(resources).unwrap();
    deployment.spec.parallelism = serde_norway::from_str("{tensor: 2, pipeline: 2}").unwrap();
    let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
    let desired = desired(&validate(&deployment, &defaults).unwrap(), "");
    let pod = serde_json::to_value(desired.pod(0)).unwrap();
    let container = &pod["spec"]["containers"][0]["resources"];
    [pod["spec"]["resourceClaims"].clone(), container.clone(), serde_json::to_value(&desired.claim).unwrap()]
}

#[test]
fn gpus_of_a_class_are_one_claim_of_the_pod_and_no_resource() {
    let [of_pod, container, template] = claimed_by("{deviceClass: gpu.nvidia.com, cpu: 4}");
    let name = "chat.4.gpu.nvidia.com";
    assert_eq!(of_pod, json!([{"name": "gpus", "resourceClaimTemplateName": name}]));
    let asked = json!({"cpu": "4"});
    assert_eq!(container, json!({"requests": asked, "limits": asked, "claims": [{"name": "gpus"}]}));
    assert_eq!(claimed_by("{deviceClass: gpu.nvidia.com}")[1], json!({"claims": [{"name": "gpus"}]}));
    assert_eq!(
        (&template["metadata"]["name"], &template["metadata"]["ownerReferences"][0]["uid"]),
        (&json!(name), &json!("uid-chat"))
    );
    let exactly = json!({"deviceClassName": "gpu.nvidia.com", "allocationMode": "ExactCount", "count": 4});
    assert_eq!(template["spec"]["spec"]["devices"]["requests"], json!([{"name": "gpus", "exactly": exactly}]));
    let [of_pod, container, template] = claimed_by("{}");
    assert_eq!((of_pod, &container["claims"], template), (Value::Null, &Value::Null, Value::Null));
}

#[test]
fn more_ranks_or_stages_are_another_revision_and_one_is_the_revision_of_none() {
    let revision = |parallelism: &str, gpus: &str| {
        let mut deployment = deployment(&json!({}));
        deployment.spec.resources = serde_norway::from_str(gpus).unwrap();
        deployment.spec.parallelism = serde_norway::from_str(parallelism).unwrap();
        let defaults = Defaults { agent_image: "agent:1".into(), ..Defaults::default() };
        desired(&validate(&deployment, &defaults).unwrap(), "").revision
    };
    assert_eq!(revision("{tensor: 1}", "{gpus: 1}"), revision("null", "{gpus: 1}"));
    assert_eq!(revision("{tensor: 2}", "null"), revision("{tensor: 2}", "{gpus: 2}"));
    assert_ne!(revision("{tensor: 2}", "null"), revision("{tensor: 4}", "null"));
    assert_ne!(revision("{tensor: 2}", "null"), revision("null", "{gpus: 1}"));
    assert_eq!(revision("{pipeline: 1}", "{gpus: 1}"), revision("null", "{gpus: 1}"));
    assert_eq!(revision("{tensor: 2, pipeline: 1}", "null"), revision("{tensor: 2}", "null"));
    // As many GPUs, and another share of the model on each.
    assert_ne!(revision("{pipeline: 2}", "null"), revision("{tensor: 2}", "null"));
}

#[test]
fn ids_are_the_agents_own_the_users_or_the_platforms() {
    let security = |pod: &str, platform_ids: bool| {
        let pod = serde_json::to_value(rendered(&yaml(pod), platform_ids).pod(0)).unwrap();
        pod["spec"]["securityContext"].clone()
    };
    let restricted =
        |ids: &str| yaml(&format!("{{runAsNonRoot: true, seccompProfile: {{type: RuntimeDefault}}{ids}}}"));
    let own = restricted(", runAsUser: 65532, runAsGroup: 65532");
    let user = restricted(", runAsUser: 1000, runAsGroup: 65532");
    let group = restricted(", runAsUser: 65532, runAsGroup: 65532, fsGroup: 2000");
    let of_platform = restricted("");
    let label =
        restricted(", runAsUser: 65532, runAsGroup: 65532, seLinuxOptions: {level: 's0:c1,c2', type: container_t}");
    assert_eq!(security("{}", false), own);
    assert_eq!(security("securityContext: {}", false), own);
    assert_eq!(security("securityContext: {runAsUser: 1000}", false), user);
    assert_eq!(security("securityContext: {fsGroup: 2000}", false), group);
    assert_eq!(security("securityContext: {platformIds: true}", false), of_platform);
    assert_eq!(security("securityContext: {seLinuxOptions: {level: 's0:c1,c2', type: container_t}}", false), label);
    // Where the operator was told that the platform gives ids, a deployment that names its own has them.
    assert_eq!(security("{}", true), of_platform);
    assert_eq!(security("securityContext: {runAsUser: 1000}", true), user);
    assert_eq!(security("securityContext: {platformIds: false}", true), own);
}

/// Revisions as the operator gave them before these fields were there: an upgrade of the operator alone must roll nobody.
#[test]
fn deployments_that_use_none_of_the_newer_fields_keep_their_revision() {
    let older = "{nodeSelector: {disk: ssd}, tolerations: [{key: gpu, operator: Exists}], labels: {team: a}, serviceAccountName: sa}";
    for (pod, revision) in [("{}", "c047811c"), (older, "8c2881ed")] {
        assert_eq!(rendered(&yaml(pod), false).revision, revision, "{pod}");
    }
    // What changes nothing rolls nothing.
    for pod in ["securityContext: {}", "securityContext: {platformIds: false}", "env: []"] {
        assert_eq!(rendered(&yaml(pod), false).revision, "c047811c", "{pod}");
    }
}

#[test]
fn each_field_is_in_the_revision() {
    let mut revisions = vec![rendered(&json!({}), false).revision, rendered(&json!({}), true).revision];
    for pod in [
        "affinity: {nodeAffinity: {}}",
        "topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
        "topologySpreadConstraints: [{maxSkew: 2, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]",
        "runtimeClassName: a",
        "schedulerName: a",
        "env: [{name: A, value: a}]",
        "env: [{name: A, value: b}]",
        "env: [{name: A, valueFrom: {secretKeyRef: {name: a, key: b}}}]",
        "volumes: [{mountPath: /tmp, emptyDir: {}}]",
        "volumes: [{mountPath: /data, emptyDir: {}}]",
        "volumes: [{mountPath: /data, configMap: {name: a}}]",
        "securityContext: {runAsUser: 1000}",
        "securityContext: {runAsGroup: 1000}",
        "securityContext: {fsGroup: 1000}",
        "securityContext: {seLinuxOptions: {level: s0}}",
        "securityContext: {seLinuxOptions: {type: container_t}}",
    ] {
        revisions.push(rendered(&yaml(pod), false).revision);
    }
    let count = revisions.len();
    revisions.sort();
    revisions.dedup();
    assert_eq!(revisions.len(), count);
}

/// Why a `spec.pod` is refused where only these may be named.
fn refusal(pod: &str, images: &[&str], accounts: &[&str]) -> Option<SpecError> {
    let list = |patterns: &[&str]| AllowList::new(patterns.iter().map(|&pattern| pattern.to_owned()).collect());
    let allowed = Allowed { images: list(images), service_accounts: list(accounts) };
    let defaults = Defaults { agent_image: "agent:1".into(), allowed, ..Defaults::default() };
    validate(&deployment(&yaml(pod)), &defaults).err()
}

#[test]
fn without_lists_everything_may_be_named() {
    assert_eq!(refusal("{image: evil/agent, serviceAccountName: root}", &[], &[]), None);
}

#[test]
fn what_a_list_does_not_have_is_refused_with_what_it_has() {
    let images = ["registry.example/team/*", "mirror.example/agent:2"];
    for image in ["registry.example/team/agent:3", "mirror.example/agent:2", "agent:1"] {
        assert_eq!(refusal(&format!("image: {image}"), &images, &["a"]), None, "{image}");
    }
    assert_eq!(refusal("{}", &images, &["a"]), None, "naming nothing is allowed");
    let refused = refusal("image: evil/agent", &images, &[]).unwrap().to_string();
    for words in
        ["spec.pod.image: \"evil/agent\"", "registry.example/team/*, mirror.example/agent:2", "remove the field"]
    {
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(refusal("serviceAccountName: team-a", &images, &["team-*"]), None);
    let refused = refusal("serviceAccountName: root", &[], &["team-*"]).unwrap().to_string();
    for words in ["spec.pod.serviceAccountName: \"root\"", "use one of team-*", "remove the field"] {
        assert!(refused.contains(words), "{refused}");
    }
}

#[test]
fn a_refused_name_is_a_condition() {
    let error = refusal("image: evil/agent", &["good/*"], &[]).unwrap();
    let status = status_of_invalid(&error, Some(1), &Default::default(), Timestamp::UNIX_EPOCH);
    let ready = status.conditions.iter().find(|condition| condition.type_ == "Ready").unwrap();
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "InvalidSpec"));
    assert!(ready.message.contains("\"evil/agent\" is not allowed here; use an image of good/*"), "{}", ready.message);
}

#[test]
fn a_pattern_is_about_the_whole_name() {
    for (pattern, name, allowed) in [
        ("registry.example/agent:1", "registry.example/agent:1", true),
        ("registry.example/agent:1", "registry.example/agent:12", false),
        ("registry.example/agent:1", "evil.example/registry.example/agent:1", false),
        ("registry.example/team/*", "registry.example/team/agent:1", true),
        ("registry.example/team/*", "registry.example/team/deep/agent@sha256:00", true),
        ("registry.example/team/*", "registry.example/team", false),
        ("registry.example/team/*", "registry.example/teammate/agent:1", false),
        ("registry.example/*/agent:*", "registry.example/a/b/agent:1", true),
        ("registry.example/*/agent:*", "registry.example/a/agents:1", false),
        ("*/agent:1", "registry.example/agent:1", true),
        ("*", "", true),
        ("a*a", "a", false),
        ("a*a", "aa", true),
        ("*ab*ab", "abab", true),
        ("*ab*ab", "xab", false),
        ("a**b", "ab", true),
        ("a*b*c*d", "abcbcd", true),
        ("a*b*c*d", "acbd", false),
        ("ü*", "üé", true),
        ("", "a", false),
    ] {
        let list = AllowList::new(vec!["no-other".into(), pattern.into()]);
        assert_eq!(list.permits(name), allowed, "{pattern} {name}");
    }
    assert!(AllowList::default().permits("anything"));
}
