//! A real gateway that a real operator tells where real replicas are: rolls, scale-downs and the operator's own death go by without
//! a client that notices.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    gateway::GatewayProcess,
    operator::{Rig, is_ready, revision_of, serves},
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(180);

fn spec(replicas: u32, change: usize) -> Value {
    json!({
        "model": {"source": "builtin://ember", "servedNames": ["ember"]}, "replicas": replicas,
        "pod": {"image": IMAGE, "annotations": {"change": change.to_string()}},
        "drain": {"withdrawSeconds": 3, "deadlineSeconds": 120},
        "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
    })
}

/// Waits until exactly so many replicas serve and nobody is on its way, none of a revision of before.
fn wait_settled(rig: &Rig, replicas: usize, before: Option<&str>) -> String {
    let settled = |rig: &Rig| {
        let pods = rig.pods("chat").unwrap_or_default();
        let is_new = pods.iter().all(|pod| Some(revision_of(pod).as_str()) != before);
        rig.get("chat").is_ok_and(|chat| is_ready(&chat)) && pods.len() == replicas && pods.iter().all(serves) && is_new
    };
    rig.wait(&format!("{replicas} replicas serve"), SOON, |rig| Ok(settled(rig))).unwrap();
    revision_of(&rig.pods("chat").unwrap()[0])
}

#[test]
fn clients_of_the_gateway_notice_no_roll_no_scale_down_and_no_dead_operator() {
    let mut rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    let gateway = GatewayProcess::start(&rig.operator.url(), &["--hold", "5"]).unwrap();
    rig.apply("chat", spec(2, 0)).unwrap();
    let first = wait_settled(&rig, 2, None);
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 2)).unwrap();
    rig.block_on(gateway.hears("chat", 2)).unwrap();

    let service = Service { base: gateway.base().to_owned(), model: "ember".to_owned() };
    let clients = Clients::start(&service, 4, 24, Duration::from_millis(20));
    rig.apply("chat", spec(2, 1)).unwrap();
    let second = wait_settled(&rig, 2, Some(&first));
    rig.operator.kill().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    rig.operator.restart().unwrap();
    rig.scale("chat", 1).unwrap();
    assert_eq!(wait_settled(&rig, 1, Some(&first)), second);
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 1)).unwrap();
    let (answered, failures) = clients.stop();
    assert!(failures.is_empty() && answered > 0, "{answered} answered, {failures:?}\n{}", gateway.log());

    rig.apply("chat", spec(0, 1)).unwrap();
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 0)).unwrap();
    rig.wait("the last replica is gone", SOON, |rig| Ok(rig.pods("chat")?.is_empty())).unwrap();
    let asked = rig.block_on(async {
        let body = json!({"model": "ember", "messages": [{"role": "user", "content": "Hi"}]});
        let mut answer = (0, Value::Null);
        // The gateway hears of it a moment later.
        while answer.1["error"]["code"] != "scaled_to_zero" {
            let response =
                reqwest::Client::new().post(gateway.url("/v1/chat/completions")).json(&body).send().await.unwrap();
            answer = (response.status().as_u16(), response.json().await.unwrap());
            assert_eq!(answer.0, 503, "{answer:?}");
        }
        answer
    });
    assert!(asked.1["error"]["message"].as_str().unwrap().contains("chat.default"), "{asked:?}");
}
