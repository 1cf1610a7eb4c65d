//! What the chart gives to Prometheus and Grafana: alerts fire for what they say, and a real Prometheus that scrapes a real operator,
//! gateway and agents has data for every panel of the dashboard.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command, time::Duration};

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    gateway::GatewayProcess,
    operator::Rig,
    prometheus::{Prometheus, Target, program, repository},
    skip::skip,
};

const IMAGE: &str = "real/agent:1";
/// Where metrics are made that have no series before something goes wrong.
const SOURCES: [&str; 2] =
    [include_str!("../../gateway/src/metrics.rs"), include_str!("../../operator/src/metrics.rs")];

fn monitoring(file: &str) -> String {
    fs::read_to_string(repository().join("charts/stoker/monitoring").join(file)).unwrap()
}

fn tool(test: &str, name: &str) -> Option<PathBuf> {
    let found = program(name);
    if found.is_none() {
        skip(test, "no Prometheus; fetch it with: tools/prometheus.sh");
    }
    found
}

#[test]
fn alerts_fire_for_what_they_say_and_not_for_what_is_close_to_it() {
    let Some(promtool) = tool("alerts_fire_for_what_they_say_and_not_for_what_is_close_to_it", "promtool") else {
        return;
    };
    let worlds = repository().join("tests/monitoring/rules.test.yaml");
    let output = Command::new(promtool).args(["test", "rules"]).arg(&worlds).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let worlds = fs::read_to_string(worlds).unwrap();
    for alert in alerts() {
        assert!(worlds.contains(&format!("alertname=\"{}\"", alert.name)), "no world for {}", alert.name);
    }
}

#[test]
fn the_page_has_every_alert() {
    let page = fs::read_to_string(repository().join("docs/monitoring.md")).unwrap();
    for alert in alerts() {
        assert!(page.contains(&format!("| `{}` |", alert.name)), "{} is not in docs/monitoring.md", alert.name);
    }
}

struct Alert {
    name: String,
    expression: String,
}

fn alerts() -> Vec<Alert> {
    let rules: Value = serde_norway::from_str(&monitoring("rules.yaml")).unwrap();
    let groups = rules["groups"].as_array().unwrap().iter();
    let rules = groups.flat_map(|group| group["rules"].as_array().unwrap().clone());
    rules
        .map(|rule| Alert {
            name: rule["alert"].as_str().unwrap().to_owned(),
            expression: rule["expr"].as_str().unwrap().to_owned(),
        })
        .collect()
}

struct Panel {
    title: String,
    expression: String,
}

/// Every query of every panel, with all namespaces and deployments chosen.
fn panels() -> Vec<Panel> {
    let dashboard: Value = serde_json::from_str(&monitoring("dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap().clone().into_iter();
    panels
        .flat_map(|panel| {
            let targets = panel["targets"].as_array().cloned().unwrap_or_default();
            targets.into_iter().map(move |target| Panel {
                title: panel["title"].as_str().unwrap().to_owned(),
                expression: chosen(target["expr"].as_str().unwrap()),
            })
        })
        .collect()
}

fn chosen(expression: &str) -> String {
    let all = |text: String, name: &str| text.replace(name, ".*");
    let rates = expression.replace("$__rate_interval", "15s");
    ["$namespace", "$deployment"].into_iter().fold(rates, all)
}

/// Names of the metrics of an expression: ours and those of vLLM's names.
fn metrics(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| word.starts_with("stoker_") || word.starts_with("vllm:")).map(str::to_owned).collect()
}

/// Whether a program makes a metric, whatever it counts.
fn is_made(metric: &str) -> bool {
    let name = ["stoker_gateway_", "stoker_operator_"].into_iter().find_map(|prefix| metric.strip_prefix(prefix));
    name.is_some_and(|name| SOURCES.iter().any(|source| source.contains(&format!("\"{name}\""))))
}

fn address(url: &str) -> String {
    url.trim_start_matches("http://").to_owned()
}

/// As the ServiceMonitor and the PodMonitors of the chart find them.
fn targets(rig: &Rig, gateway: &GatewayProcess) -> Vec<Target> {
    let target = |url: &str, labels, honors_labels| Target { address: address(url), labels, honors_labels };
    let mut targets = vec![
        target(&rig.operator.url(), json!({"namespace": "stoker-system", "pod": "operator-0"}), true),
        target(&gateway.admin_url(""), json!({"namespace": "stoker-system", "pod": "gateway-0"}), false),
    ];
    targets.extend(rig.pods("chat").unwrap().into_iter().map(|pod| {
        let url = format!("{}:8000", pod.status.unwrap().pod_ip.unwrap());
        target(&url, json!({"namespace": "default", "pod": pod.metadata.name, "deployment": "chat"}), false)
    }));
    targets
}

#[test]
fn every_panel_has_data_and_every_alert_its_metrics() {
    let Some(prometheus) = tool("every_panel_has_data_and_every_alert_its_metrics", "prometheus") else { return };
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    let gateway = GatewayProcess::start(&rig.operator.url(), &[]).unwrap();
    let spec = json!({
        "model": {"source": "builtin://ember", "servedNames": ["ember"]}, "pod": {"image": IMAGE},
        "scaling": {"min": 2, "max": 3}, "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
    });
    rig.apply("chat", spec).unwrap();
    rig.wait_ready("chat", Duration::from_secs(180)).unwrap();
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 2)).unwrap();

    let prometheus = rig.block_on(Prometheus::start(&prometheus, &targets(&rig, &gateway))).unwrap();
    let service = Service { base: gateway.base().to_owned(), model: "ember".to_owned() };
    let clients = Clients::start(&service, 2, 24, Duration::from_millis(100));
    let has_data =
        |expression: &str| rig.block_on(prometheus.query(expression)).unwrap().iter().any(|value| value.is_finite());
    let empty = |expressions: &mut Vec<Panel>| expressions.retain(|panel| !has_data(&panel.expression));
    let mut without = panels();
    assert!(without.len() > 30, "{} queries", without.len());
    // A settled deployment has no rounds, and a rate over seconds without one has no data.
    rig.wait("every panel has data", Duration::from_secs(90), |rig| {
        rig.nudge("chat")?;
        empty(&mut without);
        Ok(without.is_empty())
    })
    .map_err(|error| {
        let queries: Vec<String> =
            without.iter().map(|panel| format!("{}: {}", panel.title, panel.expression)).collect();
        anyhow::anyhow!("{error:#}; without data: {queries:#?}")
    })
    .unwrap();
    let (answered, failures) = clients.stop();
    assert!(failures.is_empty() && answered > 0, "{answered} answered, {failures:?}");

    let of_panels = panels().into_iter().map(|panel| panel.expression);
    let expressions = of_panels.chain(alerts().into_iter().map(|alert| alert.expression));
    let unknown: BTreeSet<String> = expressions
        .flat_map(|expression| metrics(&expression))
        .filter(|metric| !has_data(metric) && !is_made(metric))
        .collect();
    assert!(unknown.is_empty(), "nobody makes {unknown:?}");
}
