//! Services that lead to gateways in another namespace: a real API server, operator, gateway and replicas. Two deployments of one name
//! and one model are never taken for each other, and no client notices when gateways come, the operator goes, or gateways go.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    operator::Rig,
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(180);
const NAMESPACES: [&str; 2] = ["default", "team"];

/// The deployment `chat` of a namespace. Everything that could tell the two apart is the same.
fn chat(namespace: &str) -> String {
    json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "chat", "namespace": namespace},
        "spec": {
            "model": {"source": "builtin://ember", "servedNames": ["ember"]}, "replicas": 1,
            "pod": {"image": IMAGE, "annotations": {"namespace": namespace}},
            "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
        },
    })
    .to_string()
}

struct Town(Rig);

impl Town {
    fn get(&self, kind: &str, namespace: &str) -> Value {
        let text = self.0.cluster.kubectl(&["get", kind, "-n", namespace, "-o", "json"]);
        serde_json::from_str(&text).unwrap()
    }

    fn base(&self, namespace: &str) -> String {
        let services = self.get("services", namespace);
        let service = services["items"].as_array().unwrap().iter().find(|item| item["metadata"]["name"] == "chat");
        format!("http://{}:8000", service.unwrap()["spec"]["clusterIP"].as_str().unwrap())
    }

    /// Slices that the operator wrote in a namespace.
    fn slices(&self, namespace: &str) -> Vec<Value> {
        self.get("endpointslices", namespace)["items"].as_array().cloned().unwrap()
    }

    /// Which pod answers at a namespace's Service; `None`: no gateway was on the way.
    fn answers(&self, namespace: &str, host: Option<&str>) -> Result<Option<String>> {
        let url = format!("{}/v1/chat/completions", self.base(namespace));
        let body = json!({"model": "ember", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]});
        self.0.block_on(async {
            let mut request = reqwest::Client::new().post(url).header("x-stoker-route", "explain").json(&body);
            if let Some(host) = host {
                request = request.header("host", host);
            }
            let answer = request.send().await?;
            ensure!(answer.status() == 200, "{namespace}: {}", answer.status());
            let Some(route) = answer.headers().get("x-stoker-route") else { return Ok(None) };
            let pod = route.to_str()?.split(' ').find_map(|term| term.strip_prefix("replica="));
            Ok(Some(pod.context("a replica")?.to_owned()))
        })
    }

    /// Waits until both Services lead to the gateway, or past it.
    fn wait_led(&self, to_gateway: bool) {
        for namespace in NAMESPACES {
            let what = format!("the Service in {namespace} leads to the gateway: {to_gateway}");
            let led = |town: &Self| town.slices(namespace).len() == usize::from(to_gateway);
            let through = |town: &Self| Ok(town.answers(namespace, None)?.is_some() == to_gateway);
            self.0.wait(&what, SOON, |_| if led(self) { through(self) } else { Ok(false) }).unwrap();
        }
    }

    fn ports(&self) -> [Value; 2] {
        NAMESPACES.map(|namespace| self.slices(namespace)[0]["ports"][0]["port"].clone())
    }
}

#[test]
fn services_lead_to_gateways_while_there_are_any_and_nobody_notices() {
    const LED: [&str; 2] = ["--gateway-service", "stoker-system/gateway"];
    let mut town = Town(Rig::start(Audit::Off).unwrap());
    town.0.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    town.0.operator.restart_with(&LED).unwrap();
    let gateway = town.0.led_gateway(&[]).unwrap();
    town.0.cluster.kubectl(&["create", "namespace", "team"]);
    for namespace in NAMESPACES {
        town.0.cluster.apply(&chat(namespace)).unwrap();
    }
    for namespace in NAMESPACES {
        let ready = ["wait", "--for=condition=Ready", "infd/chat", "-n", namespace, "--timeout=180s"];
        town.0.cluster.kubectl(&ready);
    }
    assert_eq!(town.answers("team", None).unwrap(), None, "no gateway is known, so none is on the way");
    town.0.block_on(gateway.knows("chat", EndpointState::Serving, 1)).unwrap();

    let clients = NAMESPACES.map(|namespace| {
        let service = Service { base: town.base(namespace), model: "ember".to_owned() };
        Clients::start(&service, 2, 24, Duration::from_millis(20))
    });
    town.0.cluster.apply(&gateway.slice(true).unwrap()).unwrap();
    town.wait_led(true);
    let pods = NAMESPACES.map(|namespace| town.get("pods", namespace)["items"][0]["metadata"]["name"].clone());
    assert_ne!(pods[0], pods[1]);
    for (namespace, pod) in NAMESPACES.iter().zip(&pods) {
        for host in [None, Some("chat"), Some("chat.default.svc"), Some("chat.team")] {
            let answered = town.answers(namespace, host).unwrap();
            assert_eq!(answered.as_deref(), pod.as_str(), "{namespace} {host:?}");
        }
    }

    let written = NAMESPACES.map(|namespace| town.slices(namespace));
    let [default, team] = town.ports();
    assert_ne!(default, team);
    town.0.operator.kill().unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(town.answers("team", None).unwrap().as_deref(), pods[1].as_str(), "nobody leads, and all goes on");
    town.0.operator.restart().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(NAMESPACES.map(|namespace| town.slices(namespace)), written, "who comes next finds nothing to write");

    town.0.cluster.apply(&gateway.slice(false).unwrap()).unwrap();
    town.wait_led(false);
    town.0.cluster.apply(&gateway.slice(true).unwrap()).unwrap();
    town.wait_led(true);
    town.0.operator.restart_with(&[]).unwrap();
    town.wait_led(false);
    for clients in clients {
        let (answered, failures) = clients.stop();
        assert!(failures.is_empty() && answered > 0, "{answered} answered, {failures:?}\n{}", gateway.log());
    }

    town.0.operator.restart_with(&LED).unwrap();
    town.wait_led(true);
    let ports = town.ports();
    // Whoever deletes it cuts the Service off until the operator has seen it, so no clients are there.
    town.0.cluster.kubectl(&["delete", "endpointslice", "chat-gateway-fqdn", "-n", "team"]);
    town.wait_led(true);
    assert_eq!(town.ports(), ports, "it is the deployment's port for good");
}

#[test]
fn the_operator_knows_what_waits_in_gateways() {
    let mut town = Town(Rig::start(Audit::Off).unwrap());
    town.0.operator.restart_with(&["--gateway-service", "stoker-system/gateway"]).unwrap();
    let gateway = town.0.led_gateway(&["--hold", "300"]).unwrap();
    town.0.cluster.apply(&gateway.slice(true).unwrap()).unwrap();
    // Nobody has its image, so no replica ever serves.
    let never = json!({
        "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": "never", "namespace": "default"},
        "spec": {"model": {"source": "builtin://ember"}, "scaling": {"max": 2}, "pod": {"image": "nobody/has:1"}},
    });
    town.0.cluster.apply(&never.to_string()).unwrap();
    town.0.block_on(gateway.knows("never", EndpointState::Starting, 1)).unwrap();
    let told: Value =
        town.0.block_on(async { reqwest::get(town.0.operator.url() + "/v1/endpoints").await?.json().await }).unwrap();
    let gateways: Vec<&str> = told["gateways"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    let [address] = gateways.as_slice() else { panic!("gateways are told of each other: {told}") };
    assert_eq!(gateway.admin_url(""), format!("http://{address}"), "{told}");
    let held = |town: &Town| {
        let metrics = town.0.block_on(async { reqwest::get(town.0.operator.url() + "/metrics").await?.text().await });
        let line = "stoker_scaling_held_requests{name=\"never\",namespace=\"default\"} ";
        metrics.unwrap().lines().find_map(|found| found.strip_prefix(line)?.parse().ok())
    };
    town.0.wait("nothing waits", SOON, |_| Ok(held(&town) == Some(0))).unwrap();
    let ask = reqwest::Client::new().post(gateway.url("/v1/chat/completions")).json(&json!({"model": "never"}));
    let asked = town.0.spawn(ask.send());
    town.0.wait("it knows that one waits", SOON, |_| Ok(held(&town) == Some(1))).unwrap();
    let fleet = async { reqwest::get(town.0.operator.url() + "/v1/fleet").await?.json::<Value>().await };
    let fleet = town.0.block_on(fleet).unwrap();
    assert_eq!(fleet["deployments"][0]["inLine"], 1, "`kubectl stoker top` says so: {fleet}");
    asked.abort();
    town.0.wait("it knows that it left", SOON, |_| Ok(held(&town) == Some(0))).unwrap();
}
