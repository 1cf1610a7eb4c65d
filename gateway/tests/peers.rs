//! Gateways that tell each other what they have on replicas: what one sends all count, and its prompts lead others where it sent them; what
//! one said is forgotten with it, however it ends and whatever else it says.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Router, body::Body, http::StatusCode, routing::get};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use stoker_crds::{
    endpoints::{DeploymentEndpoints, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
    in_flight::{IN_FLIGHT_PATH, InFlight, ReplicaInFlight, SentPrompt},
};
use stoker_gateway::{
    gateway::{Gateway, Settings},
    peers,
    server::{admin_router, router},
    vital::{Flight, Vital},
};
use stoker_routing::Own;
use tokio::net::TcpListener;

const REPLICAS: [&str; 2] = ["a", "b"];

async fn served(routes: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

fn endpoints(number: u64, gateways: &[String], replicas: &[&str]) -> Endpoints {
    let replica = |uid: &&str| ReplicaEndpoint {
        pod: (*uid).into(),
        uid: (*uid).into(),
        address: Some("127.0.0.1:1".into()),
        events: None,
        revision: "r".into(),
        weight: WHOLE_WEIGHT,
        state: EndpointState::Serving,
        load: None,
    };
    let chat = DeploymentEndpoints {
        namespace: "default".into(),
        name: "chat".into(),
        models: vec!["chat".into()],
        replicas: replicas.iter().map(replica).collect(),
        ..DeploymentEndpoints::default()
    };
    Endpoints { source: "test".into(), number, gateways: gateways.to_vec(), deployments: vec![chat] }
}

/// Gateways that follow each other and whoever is at `others`, themselves among them.
async fn town(n_gateways: usize, others: &[String]) -> Vec<Arc<Gateway>> {
    let gateways: Vec<_> = (0..n_gateways).map(|_| Gateway::new(Settings::default()).unwrap()).collect();
    let mut addresses = others.to_vec();
    for gateway in &gateways {
        addresses.push(served(admin_router(Arc::clone(gateway))).await);
        tokio::spawn(peers::follow(Arc::clone(gateway)));
    }
    gateways.iter().for_each(|gateway| gateway.learn(endpoints(1, &addresses, &REPLICAS)));
    gateways
}

fn vital(gateway: &Gateway, uid: &str) -> Arc<Vital> {
    let fleet = gateway.fleet();
    fleet.vitals().find(|(of, _)| *of == uid).map(|(_, vital)| Arc::clone(vital)).unwrap()
}

/// Requests and tokens of all gateways on each replica, as this one knows.
fn known(gateway: &Gateway) -> [(u32, u64); 2] {
    REPLICAS.map(|uid| vital(gateway, uid).of_all()).map(|Own { requests, prefill_tokens }| (requests, prefill_tokens))
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}: not in 30 s");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn hear_each_other(gateways: &[Arc<Gateway>], n_others: i64) {
    until("all hear the others, and nobody itself", || {
        gateways.iter().all(|gateway| gateway.metrics.peers.get() == n_others)
    })
    .await;
}

#[tokio::test]
async fn what_one_has_all_count_for_as_long_as_it_has_it() {
    let gateways = town(3, &[]).await;
    hear_each_other(&gateways, 2).await;
    let mut first = Flight::begin(&vital(&gateways[0], "a"), 100);
    let second = Flight::begin(&vital(&gateways[1], "a"), 50);
    let third = Flight::begin(&vital(&gateways[2], "b"), 7);
    let all = |expected: [(u32, u64); 2]| gateways.iter().all(|gateway| known(gateway) == expected);
    until("three requests", || all([(2, 150), (1, 7)])).await;
    assert_eq!(vital(&gateways[1], "a").own(), Own { requests: 1, prefill_tokens: 50 }, "others' are not its own");
    first.prefilled();
    until("one has begun to answer", || all([(2, 50), (1, 7)])).await;
    drop((second, third));
    until("two have ended", || all([(1, 0), (0, 0)])).await;

    // A replica that leaves while it has something, and one that comes, with its documents at different times.
    gateways[1].learn(endpoints(2, &gateways[1].fleet().gateways, &["b", "c"]));
    let new = Flight::begin(&vital(&gateways[1], "c"), 9);
    drop(first);
    until("it has nothing more", || vital(&gateways[2], "a").of_all() == Own::default()).await;
    for gateway in &gateways {
        gateway.learn(endpoints(2, &gateway.fleet().gateways, &["b", "c"]));
    }
    let another = Flight::begin(&vital(&gateways[1], "c"), 9);
    until("what comes next says it", || vital(&gateways[0], "c").of_all().requests == 2).await;
    drop((new, another));
    until("they have ended", || vital(&gateways[0], "c").of_all() == Own::default()).await;
}

/// Where a gateway would send a prompt that begins like others, and what it thinks that replicas hold of it.
async fn dry_run(address: &str) -> Vec<Value> {
    let answer: Value = asked(address, "dry-run").await.json().await.unwrap();
    answer["replicas"].as_array().unwrap().clone()
}

async fn asked(address: &str, route: &str) -> reqwest::Response {
    let content = "The quick brown fox jumps over the lazy dog. ".repeat(40);
    let body = json!({"model": "chat", "messages": [{"role": "user", "content": content}]});
    let url = format!("http://{address}/v1/chat/completions");
    reqwest::Client::new().post(url).header("x-stoker-route", route).json(&body).send().await.unwrap()
}

#[tokio::test]
async fn where_one_sent_a_prompt_all_know_before_its_replica_says_that_it_holds_it() {
    // An error means that another test did.
    let _chosen_before = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let gateways = town(3, &[]).await;
    hear_each_other(&gateways, 2).await;
    let mut addresses = Vec::new();
    for gateway in &gateways {
        addresses.push(served(router(Arc::clone(gateway), Router::new())).await);
        let unknown = dry_run(addresses.last().unwrap()).await;
        assert!(unknown.iter().all(|replica| replica["prefix"] == "none"), "{unknown:?}");
    }
    // Nobody answers there: both are tried, again and again.
    let address = addresses[0].clone();
    let asking = tokio::spawn(async move { asked(&address, "explain").await });
    for address in &addresses {
        let begun = Instant::now();
        loop {
            let told = dry_run(address).await;
            if told
                .iter()
                .all(|replica| replica["prefix"] == "predicted" && replica["cachedTokens"].as_u64() > Some(100))
            {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(30), "{told:?}");
        }
    }
    assert!(!asking.is_finished(), "nobody has answered");
    asking.abort();
}

#[tokio::test]
async fn prompts_of_replicas_that_are_not_known_are_no_harm() {
    let prompt = |uid: &str| SentPrompt { uid: uid.into(), names: (0..300).collect(), new_bytes: u32::MAX };
    let replica = ReplicaInFlight { uid: "a".into(), requests: 4, prefill_tokens: 1000 };
    let prompts = vec![prompt("nobody"), prompt("a"), prompt("a")];
    let told = written(&InFlight { gateway: "another".into(), replicas: vec![replica], prompts });
    let gateways = town(1, &[says(vec![told], false).await]).await;
    until("what stands beside them counts", || known(&gateways[0])[0] == (4, 1000)).await;
    until("those of who is known are remembered", || {
        let metrics = gateways[0].render_metrics().unwrap();
        metrics.contains("stoker_gateway_prefixes{source=\"predicted\"} 300")
    })
    .await;
}

#[tokio::test]
async fn who_leaves_is_forgotten_and_not_followed_any_more() {
    let gateways = town(2, &[]).await;
    hear_each_other(&gateways, 1).await;
    let _flight = Flight::begin(&vital(&gateways[0], "a"), 100);
    until("one request", || known(&gateways[1])[0] == (1, 100)).await;
    gateways[0].leave();
    until("its word is gone", || known(&gateways[1])[0] == (0, 0) && gateways[1].metrics.peers.get() == 0).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(gateways[1].metrics.peers.get(), 0, "it tells nobody any more");
    assert_eq!(known(&gateways[0])[0], (1, 100));
}

/// A gateway that says these pieces and is then silent, or ends.
async fn says(pieces: Vec<Vec<u8>>, ends: bool) -> String {
    let stream = move || {
        let said = stream::iter(pieces.clone().into_iter().map(Ok::<_, std::io::Error>));
        let rest = stream::pending().take(if ends { 0 } else { 1 });
        async move { Body::from_stream(said.chain(rest)) }
    };
    served(Router::new().route(IN_FLIGHT_PATH, get(stream))).await
}

fn line(uid: &str, requests: u32) -> Vec<u8> {
    let replica = ReplicaInFlight { uid: uid.into(), requests, prefill_tokens: 1000 };
    written(&InFlight { gateway: "another".into(), replicas: vec![replica], prompts: vec![] })
}

fn written(line: &InFlight) -> Vec<u8> {
    [serde_json::to_vec(line).unwrap(), b"\n".to_vec()].concat()
}

#[tokio::test]
async fn what_a_stream_says_counts_while_it_goes_on_and_nonsense_ends_it() {
    let (front, back) = (line("a", 4)[..20].to_vec(), line("a", 4)[20..].to_vec());
    let in_pieces = says(vec![front, back, line("nobody", 3)], false).await;
    let others = [
        in_pieces,
        says(vec![line("a", 50)], true).await,
        says(vec![line("a", 600), b"{]\n".to_vec()], false).await,
        says(vec![line("a", 7000), vec![b'x'; 5 << 20]], false).await,
        served(Router::new().route(IN_FLIGHT_PATH, get(|| async { StatusCode::NOT_FOUND }))).await,
        served(Router::new()).await,
        "127.0.0.1:1".to_owned(),
    ];
    let gateways = town(1, &others).await;
    until("the one that goes on counts", || known(&gateways[0])[0] == (4, 1000)).await;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..300 {
        tokio::time::sleep(Duration::from_millis(5)).await;
        seen.insert(known(&gateways[0])[0].0);
    }
    // Whoever ended is asked again, and counts for a moment each time.
    assert!(seen.contains(&4) && seen.iter().all(|requests| requests % 10 == 4), "{seen:?}");
}

#[tokio::test]
async fn no_more_than_so_many_are_told() {
    // An error means that another test did.
    let _chosen_before = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    // Nobody follows it, not even itself.
    let gateway = Gateway::new(Settings::default()).unwrap();
    let url = format!("http://{}{IN_FLIGHT_PATH}", served(admin_router(gateway)).await);
    let mut streams = Vec::new();
    let refused = loop {
        let answer = reqwest::get(&url).await.unwrap();
        match answer.status().as_u16() {
            200 => streams.push(answer),
            refused => break refused,
        }
        assert!(streams.len() < 100, "somebody has to be refused");
    };
    assert_eq!((refused, streams.len()), (503, 32));
    streams.clear();
    let begun = Instant::now();
    while reqwest::get(&url).await.unwrap().status() != 200 {
        assert!(begun.elapsed() < Duration::from_secs(30), "who goes away makes room");
    }
}
