//! The Helm chart: renders in every shape, a real API server accepts what it renders, an older release becomes this one as
//! docs/install.md says, and the operator may do what that page says and nothing else. Installing it on a real node is
//! `make e2e`.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{
    collections::BTreeSet,
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
};

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::{
    api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use stoker_cluster::{ControlPlane, ControlPlaneOptions};
use stoker_operator::peers::Peers;
use stoker_tests::{cluster::of_go, skip::skip};

const IMAGES: [&str; 2] =
    ["image.repository=registry.example/stoker-operator", "agent.image.repository=registry.example/stoker-agent"];
/// One address for all deployments.
const GATEWAY: [&str; 2] = ["gateway.enabled=true", "gateway.image.repository=registry.example/stoker-gateway"];
/// Who may reach the operator's port.
const PEER: &str = "networkPolicy.from[0].namespaceSelector.matchLabels.team=monitoring";
/// The shapes that change which objects there are.
const SHAPES: [&[&str]; 9] = [
    &[],
    &["platformIds=true"],
    &["watchNamespace=default"],
    &[
        "replicas=2",
        "priorityClassName=system-cluster-critical",
        "log.filter=debug",
        "log.format=json",
        "podLabels.team=ml",
    ],
    &["networkPolicy.enabled=true"],
    &["networkPolicy.enabled=true", PEER],
    &[GATEWAY[0], GATEWAY[1]],
    &[
        GATEWAY[0],
        GATEWAY[1],
        "gateway.tenants.secret=who",
        "gateway.tls.secret=shown",
        "gateway.replicas=2",
        "gateway.holdSeconds=90",
        "gateway.endpointPicker.enabled=true",
        "gateway.endpointPicker.failureMode=FailOpen",
        "traces.otlpEndpoint=http://collector.tracing:4318",
        "networkPolicy.enabled=true",
        "platformIds=true",
        "metrics.dashboard.enabled=true",
    ],
    &["imagePullSecrets[0].name=pull", "nodeSelector.disk=ssd", "tolerations[0].operator=Exists"],
];

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn helm() -> PathBuf {
    of_go("helm").unwrap()
}

/// Helm takes more than a minute to build and only this file needs it; `make chart-check` builds it first.
fn cannot_run(test: &str) -> bool {
    of_go("helm").inspect_err(|reason| skip(test, &format!("{reason:#}"))).is_err()
}

fn template(values: &[&str]) -> Output {
    template_as("stoker", values)
}

fn template_as(release: &str, values: &[&str]) -> Output {
    let chart = repository().join("charts/stoker");
    let set = values.iter().flat_map(|value| ["--set", value]);
    let mut helm = Command::new(helm());
    helm.args(["template", release]).arg(chart).args(["--namespace", "default"]).args(set).output().unwrap()
}

fn refusal(values: &[&str]) -> String {
    let output = template(values);
    assert!(!output.status.success(), "{values:?} was accepted");
    String::from_utf8(output.stderr).unwrap()
}

fn manifests(values: &[&str]) -> String {
    let output = template(&[&IMAGES, values].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Applies without storing, as strictly as the API server can; panics with its answer.
fn dry_run(cluster: &ControlPlane, manifests: &str) {
    let mut child = cluster
        .kubectl()
        .unwrap()
        .args(["apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(manifests.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{manifests}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_api_server_accepts_the_chart_in_every_shape() {
    if cannot_run("the_api_server_accepts_the_chart_in_every_shape") {
        return;
    }
    let cluster = ControlPlane::start(ControlPlaneOptions::default()).unwrap();
    for shape in SHAPES {
        dry_run(&cluster, &manifests(shape));
    }
    let crds = repository().join("charts/stoker/crds");
    for crd in ["inferencedeployments.yaml", "inferencebudgets.yaml"] {
        dry_run(&cluster, &std::fs::read_to_string(crds.join(crd)).unwrap());
    }
}

#[test]
fn without_images_it_says_which_value_is_missing() {
    if cannot_run("without_images_it_says_which_value_is_missing") {
        return;
    }
    assert!(refusal(&[]).contains("image.repository: name the image you built and pushed"));
    assert!(refusal(&IMAGES[..1]).contains("agent.image.repository: name the image"));
}

#[test]
fn a_misspelt_or_absurd_value_is_refused_by_name() {
    if cannot_run("a_misspelt_or_absurd_value_is_refused_by_name") {
        return;
    }
    assert!(refusal(&[&IMAGES[..], &["image.tagg=1"]].concat()).contains("tagg"));
    assert!(refusal(&[&IMAGES[..], &["replicas=-1"]].concat()).contains("/replicas"));
    assert!(refusal(&[&IMAGES[..], &["watchNamespace=Not_A_Name"]].concat()).contains("/watchNamespace"));
}

#[test]
fn watching_one_namespace_needs_no_cluster_wide_right() {
    if cannot_run("watching_one_namespace_needs_no_cluster_wide_right") {
        return;
    }
    let text = manifests(&["watchNamespace=team"]);
    assert!(!text.contains("ClusterRole"), "{text}");
    assert!(text.contains("--namespace=team"), "{text}");
    assert!(manifests(&[]).contains("kind: ClusterRole\n"));
}

#[test]
fn ids_are_ours_unless_the_platform_gives_them() {
    if cannot_run("ids_are_ours_unless_the_platform_gives_them") {
        return;
    }
    let said = |values: &[&str]| {
        let text = manifests(values);
        [text.contains("runAsUser: 65532"), text.contains("runAsGroup: 65532"), text.contains("- --platform-ids\n")]
    };
    assert_eq!(said(&[]), [true, true, false]);
    assert_eq!(said(&["platformIds=true"]), [false, false, true]);
}

#[test]
fn what_deployments_may_name_reaches_the_operator() {
    if cannot_run("what_deployments_may_name_reaches_the_operator") {
        return;
    }
    assert!(!manifests(&[]).contains("--allow-"));
    let text = manifests(&["allow.images={a/*,b:1}", "allow.serviceAccounts={team-*}"]);
    let lines = [
        "            - \"--allow-image=a/*\"\n            - \"--allow-image=b:1\"\n",
        "            - \"--allow-service-account=team-*\"\n",
    ];
    assert!(lines.iter().all(|line| text.contains(line)), "{text}");
    assert!(refusal(&[&IMAGES[..], &["allow.images[0]="]].concat()).contains("/allow/images/0"));
    let text = manifests(&[
        "models.hub.endpoint=https://hub.example",
        "models.cache.hostPath=/srv/models",
        "models.cache.limitBytes=500000000000",
        "models.replicas.bytesPerSecond=0",
        "models.imageVolumes=never",
    ]);
    for argument in [
        "\"--hub-endpoint=https://hub.example\"",
        "\"--model-cache=/srv/models\"",
        "--model-cache-limit=500000000000",
        "--replica-weights-bytes-per-second=0",
        "--image-volumes=never",
    ] {
        assert!(text.contains(&format!("            - {argument}\n")), "{argument}: {text}");
    }
    assert!(refusal(&[&IMAGES[..], &["models.hub.endpoint=hub"]].concat()).contains("/models/hub/endpoint"));
}

#[test]
fn one_collector_is_told_to_gateways_and_by_the_operator_to_agents() {
    if cannot_run("one_collector_is_told_to_gateways_and_by_the_operator_to_agents") {
        return;
    }
    assert!(!manifests(&GATEWAY).contains("otlp-endpoint"));
    let text = manifests(&[GATEWAY[0], GATEWAY[1], "traces.otlpEndpoint=http://collector:4318"]);
    for argument in ["--otlp-endpoint", "--agent-otlp-endpoint"] {
        let line = format!("            - \"{argument}=http://collector:4318\"\n");
        assert_eq!(text.matches(&line).count(), 1, "{argument}: {text}");
    }
    assert!(refusal(&[&IMAGES[..], &["traces.otlpEndpoint=collector"]].concat()).contains("/traces/otlpEndpoint"));
}

#[test]
fn who_may_reach_replicas_is_told_to_the_operator_as_it_reads_it() {
    if cannot_run("who_may_reach_replicas_is_told_to_the_operator_as_it_reads_it") {
        return;
    }
    assert!(!manifests(&[]).contains("--replica-network-policy"));
    let gateway = "agent.networkPolicy.inferenceFrom[0].namespaceSelector.matchLabels.team=gateway";
    let text = manifests(&["agent.networkPolicy.enabled=true", gateway]);
    let line = text.lines().find_map(|line| line.trim().strip_prefix("- \"--replica-network-policy=")).unwrap();
    let json: String = serde_json::from_str(&format!("\"{line}")).unwrap();
    let peers: Peers = serde_json::from_str(&json).unwrap();
    let labels = |selector: Option<LabelSelector>| selector.unwrap().match_labels.unwrap();
    assert_eq!(labels(peers.operator.namespace_selector)["kubernetes.io/metadata.name"], "default");
    assert_eq!(labels(peers.operator.pod_selector)["app.kubernetes.io/instance"], "stoker");
    assert_eq!(labels(peers.inference[0].namespace_selector.clone())["team"], "gateway");
    assert_eq!(peers.gateways, None, "there are none");
    let typo = "agent.networkPolicy.inferenceFrom[0].namespaceSelecter.matchLabels.team=gateway";
    assert!(refusal(&[&IMAGES[..], &[typo]].concat()).contains("namespaceSelecter"));
}

#[test]
fn the_gateway_has_no_rights_and_reaches_operator_and_replicas() {
    if cannot_run("the_gateway_has_no_rights_and_reaches_operator_and_replicas") {
        return;
    }
    assert!(!manifests(&[]).contains("stoker-gateway"));
    assert!(refusal(&[&IMAGES[..], &GATEWAY[..1]].concat()).contains("gateway.image.repository: name the image"));
    let text = manifests(&GATEWAY);
    assert!(text.contains("--operator=http://stoker-operator.default.svc:8080\n"), "{text}");
    let gateway = text
        .split("\n---\n")
        .find(|object| object.contains("kind: Deployment\n") && object.contains("  name: stoker-gateway\n"));
    let gateway = gateway.unwrap();
    assert!(
        gateway.contains("automountServiceAccountToken: false") && !gateway.contains("serviceAccountName"),
        "{gateway}"
    );

    let rule = "agent.networkPolicy.inferenceFrom[0].podSelector.matchLabels.team=web";
    let limited =
        manifests(&[&GATEWAY[..], &["agent.networkPolicy.enabled=true", rule, "networkPolicy.enabled=true"]].concat());
    let peers = limited.lines().find(|line| line.contains("--replica-network-policy=")).unwrap();
    assert!(peers.contains("stoker-gateway") && peers.contains("web"), "{peers}");
    let admitted = peers.split("gateways").nth(1).and_then(|peer| peer.split("inference").next());
    assert!(admitted.is_some_and(|peer| peer.contains("stoker-gateway")), "replicas tell it what they hold: {peers}");
    let policies: Vec<&str> =
        limited.split("\n---\n").filter(|object| object.contains("kind: NetworkPolicy")).collect();
    let [operator, gateways] = policies.as_slice() else { panic!("{limited}") };
    assert!(operator.contains("stoker-gateway"), "the operator answers it: {operator}");
    let (clients, admin) = gateways.split_once("    - from:").unwrap();
    assert!(clients.contains("{port: http, protocol: TCP}") && clients.contains("endPort: 29999"), "{gateways}");
    for peer in ["name: stoker-operator\n", "name: stoker-gateway\n", "ports: [{port: admin, protocol: TCP}]"] {
        assert!(admin.contains(peer), "{peer}: {gateways}");
    }
    let service =
        text.split("\n---\n").find(|object| object.contains("kind: Service\n") && object.contains("stoker-gateway"));
    assert!(!service.unwrap().contains("8001"), "no Service leads to what is not for clients");
    assert!(text.contains("--gateway-service=default/stoker-gateway\n") && !text.contains("--tenants"), "{text}");
    assert!(text.contains("--hold=45\n"), "{text}");
    assert!(text.contains("port: http, scheme: HTTP}") && !text.contains("--tls"), "{text}");
    let tls = manifests(&[&GATEWAY[..], &["gateway.tls.secret=shown"]].concat());
    for part in ["--tls-certificate=/etc/stoker/tls/tls.crt\n", "port: http, scheme: HTTPS}", "secretName: \"shown\""] {
        assert!(tls.contains(part), "{part}: {tls}");
    }
    assert!(!text.contains("--endpoint-picker") && !text.contains("--inference-pools"), "{text}");
    let picks = ["gateway.endpointPicker.enabled=true", "gateway.endpointPicker.failureMode=FailOpen"];
    let picks = manifests(&[&GATEWAY[..], &picks].concat());
    assert!(picks.contains("--endpoint-picker\n") && picks.contains("--inference-pools=FailOpen\n"), "{picks}");
    let wrong = refusal(&[&IMAGES[..], &GATEWAY[..], &["gateway.endpointPicker.failureMode=Maybe"]].concat());
    assert!(wrong.contains("failureMode"), "{wrong}");
    let tenants = manifests(&[&GATEWAY[..], &["gateway.tenants.secret=who"]].concat());
    assert!(
        tenants.contains("--tenants=/etc/stoker/tenants/tenants.yaml\n") && tenants.contains("secretName: \"who\"")
    );
    let everybody = manifests(&[&GATEWAY[..], &["agent.networkPolicy.enabled=true"]].concat());
    let peers = everybody.lines().find(|line| line.contains("--replica-network-policy=")).unwrap();
    assert!(peers.contains(r#"\"inference\":[]"#), "a list of one would be a limit: {peers}");
}

#[test]
fn prometheus_is_asked_for_never_assumed() {
    if cannot_run("prometheus_is_asked_for_never_assumed") {
        return;
    }
    assert!(!manifests(&[]).contains("ServiceMonitor"));
    let text = manifests(&["metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prom"]);
    assert!(text.contains("kind: ServiceMonitor") && text.contains("release: prom"), "{text}");
    assert!(text.contains("honorLabels: true"), "the operator's series name the namespace of their deployment: {text}");
    let kinds = ["PodMonitor", "PrometheusRule", "ConfigMap"].map(|kind| format!("kind: {kind}"));
    assert!(kinds.iter().all(|kind| !text.contains(kind)), "{text}");
    let all = ["metrics.podMonitor.enabled=true", "metrics.rules.enabled=true", "metrics.dashboard.enabled=true"];
    let text = manifests(&[&all[..], &GATEWAY].concat());
    assert!(kinds.iter().all(|kind| text.contains(kind)), "{text}");
    assert_eq!(text.matches("kind: PodMonitor").count(), 2, "of replicas and of gateways");
    assert_eq!(text.matches("    - port: admin\n      path: /metrics\n").count(), 1, "that of gateways: {text}");
    let text = manifests(&[all[0], "watchNamespace=team"]);
    assert!(text.contains("matchNames: [team]") && text.matches("kind: PodMonitor").count() == 1, "{text}");
}

#[test]
fn two_operators_are_evicted_one_by_one_and_a_single_one_holds_up_no_node_drain() {
    if cannot_run("two_operators_are_evicted_one_by_one_and_a_single_one_holds_up_no_node_drain") {
        return;
    }
    let budget = |values: &[&str]| manifests(values).contains("kind: PodDisruptionBudget");
    let off = "podDisruptionBudget.enabled=false";
    assert_eq!([budget(&[]), budget(&["replicas=2"]), budget(&["replicas=2", off])], [false, true, false]);
}

#[test]
fn a_network_policy_is_asked_for_and_without_peers_lets_in_nobody() {
    if cannot_run("a_network_policy_is_asked_for_and_without_peers_lets_in_nobody") {
        return;
    }
    assert!(!manifests(&[]).contains("kind: NetworkPolicy"));
    assert!(manifests(&["networkPolicy.enabled=true"]).contains("\n  ingress: []\n"));
    let text = manifests(&["networkPolicy.enabled=true", PEER]);
    let peers = "    - from:\n        - namespaceSelector:\n            matchLabels:\n              team: monitoring\n      ports:";
    assert!(text.contains(peers), "{text}");
}

#[test]
fn pages_have_a_port_of_their_own_that_can_be_limited_and_turned_off() {
    if cannot_run("pages_have_a_port_of_their_own_that_can_be_limited_and_turned_off") {
        return;
    }
    let text = manifests(&["pages.port=9000"]);
    for part in [
        "--pages-address=0.0.0.0:9000\n",
        "{name: pages, containerPort: 9000}",
        "{name: pages, port: 9000, targetPort: pages}",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        !text.contains("type: NodePort") && !text.contains("type: LoadBalancer"),
        "inside the cluster only: {text}"
    );
    assert!(!manifests(&["pages.enabled=false"]).contains("pages"));
    let reader = "pages.from[0].namespaceSelector.matchLabels.team=platform";
    let limited = manifests(&["networkPolicy.enabled=true", PEER, reader]);
    let of = |port: &str| format!("      ports: [{{port: {port}, protocol: TCP}}]\n");
    let (metrics, rest) = limited.split_once(&of("http")).unwrap();
    assert!(
        metrics.ends_with("team: monitoring\n") && rest.contains(&format!("team: platform\n{}", of("pages"))),
        "{limited}"
    );
    assert!(refusal(&[&IMAGES[..], &["pages.port=8080"]].concat()).contains("pages"));
}

#[test]
fn no_container_of_the_chart_can_gain_rights() {
    if cannot_run("no_container_of_the_chart_can_gain_rights") {
        return;
    }
    let text = manifests(&[]);
    for line in ["runAsNonRoot: true", "allowPrivilegeEscalation: false", "readOnlyRootFilesystem: true", "drop: [ALL]"]
    {
        assert!(text.contains(line), "{line} is missing");
    }
    let manifest =
        |kind: &str| text.split("\n---\n").find(|manifest| manifest.contains(&format!("kind: {kind}\n"))).unwrap();
    assert!(!manifest("ClusterRole").contains("secrets"), "the operator reads no Secret of others");
    let own = "resources: [secrets]\n    resourceNames: [stoker-operator-keys]\n    verbs: [get]\n";
    assert!(manifest("Role").contains(own), "of its own namespace it reads one: {text}");
}

/// The release before this one, as it was packaged: of the commit that the budgets for disruptions came after.
const OLDER: &str = "tests/charts/stoker-0.1.0.tgz";

/// The commands of a section of docs/install.md.
fn commands_of(section: &str) -> String {
    let page = std::fs::read_to_string(repository().join("docs/install.md")).unwrap();
    let section = page.split("\n## ").find(|text| text.starts_with(section)).unwrap();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.collect()
}

/// Runs commands of the page, as whoever reads it would, on this cluster.
fn say(cluster: &ControlPlane, commands: &str) {
    let kubectl = cluster.kubectl().unwrap().get_program().to_owned();
    let folders = [helm(), PathBuf::from(kubectl)].map(|program| program.parent().unwrap().to_owned());
    let own = std::env::var_os("PATH").unwrap();
    let path = std::env::join_paths(folders.into_iter().chain(std::env::split_paths(&own))).unwrap();
    let output = Command::new("bash")
        .args(["-euo", "pipefail", "-c", commands])
        .current_dir(repository())
        .env("PATH", path)
        .env("KUBECONFIG", cluster.kubeconfig_path())
        .env("REGISTRY", "registry.example")
        .env("TAG", "newer")
        .env("HELM_CACHE_HOME", cluster.dir().join("helm"))
        .env("HELM_CONFIG_HOME", cluster.dir().join("helm"))
        .env("HELM_DATA_HOME", cluster.dir().join("helm"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{commands}\n{}", String::from_utf8_lossy(&output.stderr));
}

fn jsonpath(cluster: &ControlPlane, object: &str, path: &str) -> String {
    let mut kubectl = cluster.kubectl().unwrap();
    let form = format!("jsonpath={path}");
    let output = kubectl.args(["-n", "stoker-system", "get", object, "-o", &form]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_older_release_becomes_this_one_by_the_commands_of_the_page() {
    if cannot_run("an_older_release_becomes_this_one_by_the_commands_of_the_page") {
        return;
    }
    let cluster = ControlPlane::start(ControlPlaneOptions::default()).unwrap();
    say(
        &cluster,
        &format!(
            "helm install stoker {OLDER} --namespace stoker-system --create-namespace \
             --set image.repository=$REGISTRY/stoker-operator,image.tag=older,log.filter=debug \
             --set agent.image.repository=$REGISTRY/stoker-agent,agent.image.tag=older"
        ),
    );
    let crd = "crd/inferencedeployments.stoker.dev";
    let pod = "{.spec.versions[0].schema.openAPIV3Schema.properties.spec.properties.pod.properties}";
    let operator = "{.spec.template.spec.containers[0]}";
    assert!(!jsonpath(&cluster, crd, pod).contains("topologySpreadConstraints"), "the older release is not older");
    assert!(jsonpath(&cluster, "deployment/stoker-operator", operator).contains("stoker-operator:older"));

    // Without a node no pod becomes ready, so nothing is waited for.
    let commands = commands_of("4. Upgrade");
    assert!(commands.contains(" --wait"), "{commands}");
    say(&cluster, &commands.replace(" --wait", ""));
    assert!(jsonpath(&cluster, crd, pod).contains("topologySpreadConstraints"), "the CRD is the older one");
    let after = jsonpath(&cluster, "deployment/stoker-operator", operator);
    for kept_or_new in
        ["registry.example/stoker-operator:newer", "--agent-image=registry.example/stoker-agent:newer", "debug"]
    {
        assert!(after.contains(kept_or_new), "{kept_or_new}: {after}");
    }
    assert!(!after.contains("older"), "{after}");
    let rules = jsonpath(&cluster, "clusterrole/stoker-system-stoker-operator", "{.rules}");
    assert!(rules.contains("poddisruptionbudgets"), "{rules}");
}

/// A right: resource with its group, and a verb. `pods get`, `leases.coordination.k8s.io create`.
type Rights = BTreeSet<String>;

/// Where the page says that a right holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Where {
    Watched,
    OwnNamespace,
    /// On the operator's own object there.
    OwnObject,
}

/// The rows of the page's table under a heading, cells of a column that repeats the one above filled in.
fn table(heading: &str) -> Vec<Vec<String>> {
    let page = std::fs::read_to_string(repository().join("docs/install.md")).unwrap();
    let section = page.split("\n### ").find(|text| text.starts_with(heading)).unwrap().to_owned();
    let lines = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
    let mut rows: Vec<Vec<String>> = Vec::new();
    for line in lines.take_while(|line| line.starts_with('|')) {
        let cells = line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned());
        let above = rows.last().cloned().unwrap_or_default();
        let filled = cells
            .enumerate()
            .map(|(column, cell)| if cell.is_empty() { above.get(column).cloned().unwrap_or_default() } else { cell });
        let row = filled.collect();
        rows.push(row);
    }
    rows
}

fn right(resource: &str, group: &str, verb: &str) -> String {
    if group.is_empty() { format!("{resource} {verb}") } else { format!("{resource}.{group} {verb}") }
}

/// What the page says the operator may do there.
fn promised(place: Where) -> Rights {
    let mut rights = Rights::new();
    for row in table("What the operator may do") {
        let [at, group, objects, verbs] = [0, 1, 2, 3].map(|column| row[column].clone());
        let own_object = objects.contains("its own");
        let row_place = match at.as_str() {
            "watched namespaces" => Where::Watched,
            _ if own_object => Where::OwnObject,
            _ => Where::OwnNamespace,
        };
        let resource = objects.split('`').nth(1).unwrap();
        let group = if group == "core" { "" } else { group.trim_matches('`') };
        if row_place == place {
            rights.extend(verbs.split(", ").map(|verb| right(resource, group, verb)));
        }
    }
    assert!(!rights.is_empty(), "{place:?}");
    rights
}

/// Who asks, and about what.
struct Question<'a> {
    account: &'a str,
    namespace: &'a str,
    name: Option<&'a str>,
}

/// What the API server's authorizer says.
async fn may(client: &Client, asked: &Question<'_>, right: &str) -> kube::Result<bool> {
    let (resource, verb) = right.split_once(' ').unwrap();
    let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
    let (resource, subresource) = resource.split_once('/').map_or((resource, None), |(all, sub)| (all, Some(sub)));
    let text = |text: &str| Some(text.to_owned());
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:default:{}", asked.account)),
            groups: Some(
                ["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"]
                    .map(str::to_owned)
                    .into(),
            ),
            resource_attributes: Some(ResourceAttributes {
                namespace: text(asked.namespace),
                name: asked.name.map(str::to_owned),
                group: text(group),
                resource: text(resource),
                subresource: subresource.map(str::to_owned),
                verb: text(verb),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

/// Of `rights`, those that the account has.
async fn granted(client: &Client, asked: &Question<'_>, rights: &Rights) -> kube::Result<Rights> {
    let answers = futures::stream::iter(rights)
        .map(async |right| Ok::<_, kube::Error>((right, may(client, asked, right).await?)));
    let answers: Vec<(&String, bool)> = answers.buffer_unordered(16).try_collect().await?;
    Ok(answers.into_iter().filter(|(_, allowed)| *allowed).map(|(right, _)| right.clone()).collect())
}

/// Every verb on every resource and subresource that the API server has, and verbs that are rights in themselves.
async fn every_right(client: &Client) -> kube::Result<Rights> {
    let mut lists = vec![(String::new(), client.list_core_api_resources("v1").await?)];
    for group in client.list_api_groups().await?.groups {
        let version = &group.preferred_version.as_ref().unwrap_or(&group.versions[0]).group_version;
        lists.push((group.name.clone(), client.list_api_group_resources(version).await?));
    }
    let verbs = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];
    let special = [
        "roles.rbac.authorization.k8s.io escalate",
        "roles.rbac.authorization.k8s.io bind",
        "clusterroles.rbac.authorization.k8s.io escalate",
        "clusterroles.rbac.authorization.k8s.io bind",
        "users impersonate",
        "groups impersonate",
        "serviceaccounts impersonate",
        "signers.certificates.k8s.io approve",
        "signers.certificates.k8s.io sign",
    ];
    let mut rights: Rights = special.map(str::to_owned).into();
    for (group, list) in lists {
        for resource in list.resources {
            rights.extend(verbs.map(|verb| right(&resource.name, &group, verb)));
        }
    }
    Ok(rights)
}

fn apply(cluster: &ControlPlane, release: &str, values: &[&str]) {
    let output = template_as(release, &[&IMAGES, values].concat());
    let file = cluster.dir().join(format!("{release}.yaml"));
    std::fs::write(&file, output.stdout).unwrap();
    let output = cluster.kubectl().unwrap().args(["apply", "--server-side", "-f"]).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn the_operator_may_do_what_the_page_says_and_nothing_else() {
    if cannot_run("the_operator_may_do_what_the_page_says_and_nothing_else") {
        return;
    }
    let cluster = ControlPlane::start(ControlPlaneOptions::default()).unwrap();
    let kubeconfig = Kubeconfig::read_from(cluster.kubeconfig_path()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let client = Client::try_from(config).unwrap();
    let crds = repository().join("charts/stoker/crds");
    let made = cluster.kubectl().unwrap().args(["apply", "--server-side", "-f"]).arg(&crds).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let namespace = cluster.kubectl().unwrap().args(["create", "namespace", "team"]).output().unwrap();
    assert!(namespace.status.success());
    apply(&cluster, "stoker", &[]);
    apply(&cluster, "narrow", &["watchNamespace=team"]);

    let mut every = every_right(&client).await.unwrap();
    every.extend(promised(Where::Watched));
    assert!(every.len() > 500 && every.contains("pods/exec create"), "{} rights", every.len());
    // What every account of a cluster may do, such as asking what it may do, is no right of the operator's.
    let nobody = Question { account: "nobody", namespace: "team", name: None };
    let anybody = granted(&client, &nobody, &every).await.unwrap();
    let of = async |account: &str, namespace: &str, name: Option<&str>| -> Rights {
        let has = granted(&client, &Question { account, namespace, name }, &every).await.unwrap();
        has.difference(&anybody).cloned().collect()
    };
    let watched = promised(Where::Watched);
    let own: Rights = promised(Where::OwnNamespace);
    let with_own: Rights = watched.union(&own).cloned().collect();
    assert_eq!(of("stoker-operator", "team", None).await, watched);
    assert_eq!(of("stoker-operator", "default", None).await, with_own);
    assert_eq!(of("narrow-operator", "team", None).await, watched);
    assert_eq!(of("narrow-operator", "elsewhere", None).await, Rights::new());
    assert_eq!(of("narrow-operator", "default", None).await, own);

    // On its own Lease and its own Secret it may do more, on others of the same name elsewhere not.
    for (resource, name) in [("leases.coordination.k8s.io", "stoker-operator"), ("secrets", "stoker-operator-keys")] {
        let about = |right: &&String| right.split(' ').next() == Some(resource);
        let expected: Rights = promised(Where::OwnObject).union(&own).filter(about).cloned().collect();
        let asked: Rights = every.iter().filter(about).cloned().collect();
        let on = async |namespace: &str| {
            let asked_of = Question { account: "stoker-operator", namespace, name: Some(name) };
            granted(&client, &asked_of, &asked).await.unwrap()
        };
        assert_eq!(on("default").await, expected);
        assert_eq!(on("team").await, Rights::new());
    }

    // Those that would make it more than it is, one by one as the page lists them.
    for row in table("What it may not do") {
        let (group, resource) = (row[0].trim_matches('`').replace("core", ""), row[1].trim_matches('`').to_owned());
        for verb in row[2].split(", ") {
            let right = right(&resource, &group, verb);
            assert!(every.contains(&right), "{right}: the API server has no such right");
            let asked = Question { account: "stoker-operator", namespace: "team", name: None };
            assert!(!may(&client, &asked, &right).await.unwrap(), "{right}");
        }
    }
}
