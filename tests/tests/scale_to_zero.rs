//! `scaling.toZero` with a real API server, operator, gateway and agents: an idle deployment lets its last replica go, whoever asks
//! then is held and answered whole by the next one, and nothing of it happens where no gateway would hold anybody.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{thread::sleep, time::Duration};

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::endpoints::EndpointState;
use stoker_scaling::{DecisionRecord, Replay, explain};
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    gateway::GatewayProcess,
    operator::{Rig, condition, intent_of, serves},
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(120);
/// The shortest that may be asked for.
const IDLE_SECONDS: u32 = 10;
/// As many who wait for the first replica: enough to learn from, which keeps no replica when they are gone.
const CROWD: usize = 6;
const LED: [&str; 2] = ["--gateway-service", "stoker-system/gateway"];

fn spec() -> Value {
    json!({
        "model": {"source": "builtin://ember", "servedNames": ["ember"]}, "pod": {"image": IMAGE},
        "drain": {"withdrawSeconds": 3, "deadlineSeconds": 60},
        "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
        // Starts may take long on a busy machine.
        "scaling": {"max": 2, "toZero": {"afterSeconds": IDLE_SECONDS, "maxWakeSeconds": 600}, "behavior": {
            "stableWindowSeconds": 6, "panicWindowSeconds": 2, "spareReplicas": 0}},
    })
}

/// A cluster with a gateway that Services lead to, and a node that has the agent.
fn town() -> (Rig, GatewayProcess) {
    let mut rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    rig.operator.restart_with(&LED).unwrap();
    let gateway = rig.led_gateway(&["--hold", "120"]).unwrap();
    (rig, gateway)
}

fn service(rig: &Rig) -> Service {
    let base = format!("http://{}:8000", rig.service("chat").unwrap().spec.unwrap().cluster_ip.unwrap());
    Service { base, model: "ember".to_owned() }
}

fn said(rig: &Rig, type_: &str) -> (String, String, String) {
    rig.get("chat").ok().and_then(|chat| condition(&chat, type_)).unwrap_or_default()
}

fn wait_for_zero(rig: &Rig) {
    let is_there = |rig: &Rig| Ok(rig.pods("chat")?.is_empty() && said(rig, "Ready").1 == "ScaledToZero");
    rig.wait("it is scaled to zero", SOON, is_there).unwrap();
}

fn records(rig: &Rig) -> Vec<DecisionRecord> {
    let records = rig.operator.records("chat", 0).unwrap();
    assert!(records.iter().all(|record| record.replay() == Replay::Identical));
    records
}

/// The value of the line of metrics that begins so.
fn counted(metrics: &str, line: &str) -> f64 {
    let values = metrics.lines().filter_map(|found| found.strip_prefix(line)?.trim().parse::<f64>().ok());
    values.sum()
}

#[test]
fn the_last_replica_goes_and_whoever_asks_then_is_held_until_the_next_one_answers() {
    let (mut rig, gateway) = town();
    rig.cluster.apply(&gateway.slice(true).unwrap()).unwrap();
    rig.apply("chat", spec()).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    let service = service(&rig);
    wait_for_zero(&rig);
    let ready = said(&rig, "Ready");
    assert_eq!(
        (ready.0.as_str(), ready.2.as_str()),
        ("True", "scaled to zero, 0 requests held; a request brings a replica back")
    );
    let asleep = records(&rig);
    let down = asleep.iter().find(|record| record.decision.desired == 0).unwrap();
    assert!(down.signals.idle_seconds >= f64::from(IDLE_SECONDS), "{:?}", down.signals);

    // Who leads is away; its successor knows from the status that nobody serves, and from the gateway that some wait.
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 0)).unwrap();
    rig.operator.kill().unwrap();
    let held = Clients::start(&service, CROWD, 40, Duration::from_millis(20));
    let in_line = |gateway: &GatewayProcess| {
        let metrics = rig.block_on(gateway.metrics())?;
        Ok(counted(&metrics, "stoker_gateway_held{deployment=\"chat.default\"}") == CROWD as f64)
    };
    rig.wait("all are held", SOON, |_| in_line(&gateway)).unwrap();
    rig.operator.restart_with(&LED).unwrap();
    let (answered, failures) = held.stop();
    assert!(failures.is_empty() && answered == CROWD, "{answered} answered, {failures:?}\n{}", gateway.log());
    let woken = records(&rig);
    let up = woken.iter().find(|record| record.decision.desired > 0).unwrap();
    assert_eq!((up.decision.previous, up.signals.held_requests), (0, CROWD as u32));
    let text = explain(up);
    assert!(text.starts_with("0 -> ") && text.contains("6 requests held by gateways"), "{text}");
    assert!(woken.iter().all(|record| record.at_ms < up.at_ms || record.decision.desired > 0), "it stays awake");
    let deployment = "{name=\"chat\",namespace=\"default\"}";
    let metrics = rig.operator.metrics().unwrap();
    assert_eq!(counted(&metrics, &format!("stoker_scaling_cold_starts_total{deployment}")), 1.0);
    let waits = rig.block_on(gateway.metrics()).unwrap();
    assert_eq!(counted(&waits, "stoker_gateway_held_seconds_count{deployment=\"chat.default\"}"), CROWD as f64);

    // It drains again, and now somebody asks in the middle of that.
    let leaves = |rig: &Rig| {
        let pods = rig.pods("chat")?;
        // A machine that stands still for seconds finds it gone.
        Ok(pods.iter().all(|pod| intent_of(pod).is_some_and(|(_, drains)| drains)))
    };
    rig.wait("the last replica drains", SOON, leaves).unwrap();
    let clients = Clients::start(&service, 4, 40, Duration::from_millis(20));
    let is_back = |rig: &Rig| {
        Ok(rig.pods("chat")?.iter().any(|pod| serves(pod) && intent_of(pod).is_none_or(|(_, drains)| !drains)))
    };
    rig.wait("one serves again", SOON, is_back).unwrap();
    sleep(Duration::from_secs(2));
    let (answered, failures) = clients.stop();
    assert!(failures.is_empty() && answered >= 4, "{answered} answered, {failures:?}\n{}", gateway.log());
    let path: Vec<u32> = records(&rig).iter().map(|record| record.decision.desired).collect();
    assert!(path.contains(&0) && path.last().is_some_and(|desired| *desired > 0), "{path:?}");
}

#[test]
fn without_a_gateway_the_last_replica_stays_and_at_zero_it_comes_back() {
    let (rig, gateway) = town();
    rig.apply("chat", spec()).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    rig.wait("it is refused", SOON, |rig| Ok(said(rig, "Scaling").1 == "NoGateway")).unwrap();
    let (value, _, message) = said(&rig, "Scaling");
    assert!(value == "False" && message.contains("enable the gateway (Helm: gateway.enabled=true)"), "{message}");
    sleep(Duration::from_secs(u64::from(IDLE_SECONDS) + 4));
    assert_eq!(rig.pods("chat").unwrap().len(), 1);
    assert!(records(&rig).iter().all(|record| record.decision.desired == 1));

    rig.cluster.apply(&gateway.slice(true).unwrap()).unwrap();
    wait_for_zero(&rig);
    assert_eq!(said(&rig, "Scaling").1, "Native");
    // Nobody would hold a request any more, and it would find nothing behind the Service.
    rig.cluster.apply(&gateway.slice(false).unwrap()).unwrap();
    rig.wait("one serves", SOON, |rig| Ok(rig.pods("chat")?.iter().any(serves))).unwrap();
    rig.wait("it is refused", SOON, |rig| Ok(said(rig, "Scaling").1 == "NoGateway")).unwrap();
}
