//! Two gateways before the same replicas: each counts what the other sent, spreads its own beside it, and forgets it when the other is killed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{future::pending, time::Duration};

use anyhow::{Result, ensure};
use axum::{
    Router,
    routing::{get, post},
};
use reqwest::Client;
use serde_json::{Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint, WHOLE_WEIGHT};
use stoker_tests::gateway::{GatewayProcess, Teller, deployment};
use tokio::{net::TcpListener, time::Instant};

const CHAT: &str = "/v1/chat/completions";
const REPLICAS: [&str; 4] = ["a", "b", "c", "d"];
/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// A replica that lives and never answers.
async fn replica(name: &str) -> Result<ReplicaEndpoint> {
    let routes = Router::new().route(CHAT, post(pending::<()>)).route("/healthz", get(|| async { "ok" }));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    // It ends with the test.
    tokio::spawn(async { axum::serve(listener, routes).await });
    Ok(ReplicaEndpoint {
        pod: name.into(),
        uid: name.into(),
        address: Some(address),
        events: None,
        revision: "r".into(),
        weight: WHOLE_WEIGHT,
        state: EndpointState::Serving,
        load: None,
    })
}

fn request(gateway: &GatewayProcess, number: usize) -> reqwest::RequestBuilder {
    let content = format!("{number}: what is this? ").repeat(40);
    let body = json!({"model": "chat", "messages": [{"role": "user", "content": content}]});
    Client::new().post(gateway.url(CHAT)).json(&body)
}

/// Requests on each replica, as this gateway sees them.
async fn seen(gateway: &GatewayProcess) -> Result<Vec<u64>> {
    let foreseen = request(gateway, 0).header("x-stoker-route", "dry-run").send().await?;
    let foreseen: Value = foreseen.error_for_status()?.json().await?;
    let mut requests: Vec<(String, u64)> = Vec::new();
    for replica in foreseen["replicas"].as_array().unwrap() {
        requests.push((replica["pod"].to_string(), replica["requests"].as_u64().unwrap()));
    }
    requests.sort();
    Ok(requests.into_iter().map(|(_, requests)| requests).collect())
}

async fn until(what: &str, gateway: &GatewayProcess, is_so: impl Fn(&[u64]) -> bool) -> Result<Vec<u64>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = seen(gateway).await?;
        if is_so(&seen) {
            return Ok(seen);
        }
        ensure!(Instant::now() < deadline, "{what}: {seen:?}\n{}", gateway.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn each_counts_what_the_other_has_sent_until_the_other_is_gone() -> Result<()> {
    let mut replicas = Vec::new();
    for name in REPLICAS {
        replicas.push(replica(name).await?);
    }
    let teller = Teller::start().await?;
    let [one, other] = [(); 2].map(|()| GatewayProcess::start(teller.url(), &["--hold", "300"]));
    let (one, other) = (one?, other?);
    teller.tell(vec![deployment("chat", &["chat"], replicas)]);
    teller.tell_of(&[&one, &other]);
    for gateway in [&one, &other] {
        gateway.knows("chat", EndpointState::Serving, REPLICAS.len()).await?;
        gateway.counts("peers", 1).await?;
    }
    let mut asked = Vec::new();
    for number in 0..24usize {
        let gateway = if number % 3 == 0 { &other } else { &one };
        asked.push(tokio::spawn(request(gateway, number).send()));
        // Both know of it before the next one comes.
        let all = |seen: &[u64]| seen.iter().sum::<u64>() == number as u64 + 1;
        until("one sees it", &one, all).await?;
        until("the other sees it", &other, all).await?;
    }
    let (by_one, by_other) = (seen(&one).await?, seen(&other).await?);
    assert_eq!(by_one, by_other);
    assert!(by_one.iter().all(|requests| (4..=8).contains(requests)), "spread over all: {by_one:?}");

    one.signal("KILL")?;
    let left = until("its requests are forgotten", &other, |seen| seen.iter().sum::<u64>() == 8).await?;
    assert!(left.iter().zip(&by_other).all(|(left, before)| left <= before), "{left:?} of {by_other:?}");
    other.counts("peers", 0).await?;
    asked.iter().for_each(tokio::task::JoinHandle::abort);
    Ok(())
}
