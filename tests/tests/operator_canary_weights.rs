//! Real agents behind a real gateway, whose new revision has ember's weights with a little noise, or with much: the prompts' gate lets the
//! one on and stops the other, and no client notices either.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::{path::Path, time::Duration};

use serde_json::{Value, json};
use stoker_cluster::Audit;
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    agent,
    clients::{Clients, Service},
    drifted::ember_with_noise,
    gateway::GatewayProcess,
    operator::{Rig, condition, is_ready, revision_of, serves},
};

const IMAGE: &str = "real/agent:1";
const SOON: Duration = Duration::from_secs(180);
/// Rounding to bf16 is a noise of up to 0.004.
const LITTLE: f32 = 0.004;
const MUCH: f32 = 0.5;

fn spec(model: &Path, seconds: u32) -> Value {
    json!({
        "model": {"source": format!("file://{}", model.display()), "servedNames": ["ember"]}, "replicas": 2,
        "pod": {"image": IMAGE},
        "drain": {"withdrawSeconds": 3, "deadlineSeconds": 120},
        "engine": {"maxModelLen": 512, "kvCacheTokens": 2048, "threads": 1},
        "rollout": {"canary": {"weight": 20, "seconds": seconds, "analysis": {"prompts": {}, "traffic": {}}}},
    })
}

fn canary(rig: &Rig) -> Value {
    let rollout = rig.get("chat").unwrap().status.unwrap().rollout.unwrap();
    serde_json::to_value(rollout.canary).unwrap()
}

/// Which share of requests with prompts of their own, that begin alike, replicas of another revision than this one answer.
fn share_of_others(rig: &Rig, gateway: &GatewayProcess, good: &str, count: usize) -> f64 {
    let of_good: Vec<String> = rig
        .pods("chat")
        .unwrap()
        .iter()
        .filter(|pod| revision_of(pod) == good)
        .map(kube::ResourceExt::name_any)
        .collect();
    let to_others = rig.block_on(async {
        let (http, mut to_others) = (reqwest::Client::new(), 0);
        for number in 0..count {
            let prompt =
                format!("{} {number}", "All of these prompts begin alike, and long before they end. ".repeat(10));
            let body = json!({"model": "ember", "prompt": prompt, "max_tokens": 1});
            let request = http.post(gateway.url("/v1/completions")).header("x-stoker-route", "explain").json(&body);
            let answer = request.send().await.unwrap();
            assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
            let route = answer.headers()["x-stoker-route"].to_str().unwrap().to_owned();
            assert!(route.contains("replica="), "{route}");
            to_others += usize::from(!of_good.iter().any(|pod| route.contains(&format!("replica={pod} "))));
        }
        to_others
    });
    to_others as f64 / count as f64
}

#[test]
fn weights_with_much_noise_are_stopped_by_prompts_and_those_with_little_go_on() {
    let models = tempfile::tempdir().unwrap();
    let [good, little, much] = ["good", "little", "much"].map(|name| models.path().join(name));
    ember_with_noise(0.0, &good).unwrap();
    ember_with_noise(LITTLE, &little).unwrap();
    ember_with_noise(MUCH, &much).unwrap();
    let rig = Rig::start(Audit::Off).unwrap();
    rig.cluster.node.add_image(IMAGE, agent::binary().unwrap());
    let gateway = GatewayProcess::start(&rig.operator.url(), &["--hold", "5"]).unwrap();
    rig.apply("chat", spec(&good, 10)).unwrap();
    rig.wait_ready("chat", SOON).unwrap();
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 2)).unwrap();
    let service = Service { base: gateway.base().to_owned(), model: "ember".to_owned() };
    let clients = Clients::start(&service, 2, 16, Duration::from_millis(100));

    rig.apply("chat", spec(&little, 10)).unwrap();
    rig.wait("the little noise goes on", SOON, |rig| {
        let chat = rig.get("chat")?;
        Ok(is_ready(&chat) && rig.pods("chat")?.iter().filter(|pod| serves(pod)).count() == 2)
    })
    .unwrap();
    let passed = canary(&rig);
    println!("noise of {LITTLE}: {passed}");
    assert_eq!(passed["phase"], "Passed", "{passed}");

    let served = rig.get("chat").unwrap().status.unwrap().revision;
    // So that there is a moment in which it serves.
    let mut unjudged = spec(&much, 3600);
    unjudged["rollout"]["canary"]["analysis"] = json!({"traffic": {"minRequests": 100_000}});
    rig.apply("chat", unjudged).unwrap();
    rig.block_on(gateway.knows("chat", EndpointState::Serving, 3)).unwrap();
    let share = share_of_others(&rig, &gateway, &served, 400);
    println!("share of requests: {share}");
    assert!((0.14..0.26).contains(&share), "{share}, with a spread of 0.02");

    let mut judged = spec(&much, 3600);
    judged["rollout"]["canary"]["analysis"] = json!({"prompts": {}});
    rig.apply("chat", judged).unwrap();
    rig.wait("the much noise is given up", SOON, |rig| {
        Ok(condition(&rig.get("chat")?, "Degraded")
            .is_some_and(|(value, why, _)| value == "True" && why == "RolledBack"))
    })
    .unwrap();
    let failed = canary(&rig);
    println!("noise of {MUCH}: {failed}");
    let message = condition(&rig.get("chat").unwrap(), "Ready").unwrap().2;
    assert!(message.contains("log-probabilities drift by") && message.contains("maxMeanDrift"), "{message}");
    rig.wait("only what served is left", SOON, |rig| {
        let pods = rig.pods("chat")?;
        Ok(pods.len() == 2 && pods.iter().all(|pod| revision_of(pod) == served && serves(pod)))
    })
    .unwrap();
    let (answered, failures) = clients.stop();
    assert!(failures.is_empty() && answered > 0, "{answered} answered, {failures:?}\n{}", gateway.log());
}
