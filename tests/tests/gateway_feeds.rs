//! What a gateway is told at its worst: endpoints that flap, replicas whose names of prompts are others, whose events do not follow and whose
//! clocks are minutes apart. Requests are answered once, and nobody is asked in a storm.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use axum::{
    Json, Router,
    extract::Query,
    routing::{get, post},
};
use futures::future::try_join_all;
use reqwest::Client;
use serde_json::{Value, json};
use stoker_crds::{
    contract::LoadReport,
    endpoints::{EndpointLoad, EndpointState, ReplicaEndpoint, WHOLE_WEIGHT},
    kv_events::{KV_EVENTS_PATH, KvEvent, KvEvents},
};
use stoker_tests::gateway::{GatewayProcess, Teller, deployment};
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";
/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// A replica that is not one: it answers at once, and says of its cache what it is made to.
struct Fake {
    endpoint: ReplicaEndpoint,
    n_asked: Arc<AtomicUsize>,
    n_asked_for_events: Arc<AtomicUsize>,
}

/// What it says to the question with this number, which knows as much.
type Says = fn(usize, Option<u64>) -> KvEvents;

impl Fake {
    async fn start(name: &str, says: Option<Says>) -> Result<Self> {
        let (n_asked, n_asked_for_events) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (answered, told) = (Arc::clone(&n_asked), Arc::clone(&n_asked_for_events));
        let answer = move || async move {
            answered.fetch_add(1, Ordering::SeqCst);
            Json(json!({"choices": []}))
        };
        let events = move |Query(known): Query<HashMap<String, String>>| async move {
            let since = known.get("since").map(|number| number.parse().unwrap());
            let number = told.fetch_add(1, Ordering::SeqCst);
            Json(says.expect("asked although it has no events")(number, since))
        };
        let routes = Router::new().route(CHAT, post(answer)).route(KV_EVENTS_PATH, get(events));
        let routes = routes.route("/healthz", get(|| async { "ok" }));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        // It ends with the test.
        tokio::spawn(async { axum::serve(listener, routes).await });
        let endpoint = ReplicaEndpoint {
            pod: name.into(),
            uid: name.into(),
            events: says.map(|_| address.clone()),
            address: Some(address),
            revision: "r".into(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: None,
        };
        Ok(Self { endpoint, n_asked, n_asked_for_events })
    }

    fn n_asked(&self) -> usize {
        self.n_asked.load(Ordering::SeqCst)
    }
}

/// A load at this age of its replica.
fn load(up_ms: u64) -> EndpointLoad {
    let report = LoadReport { start_id: "s".into(), up_ms, ..LoadReport::idle(1000) };
    (&report).into()
}

async fn ask(gateway: &GatewayProcess, content: &str) -> Result<String> {
    let body = json!({"model": "ember", "messages": [{"role": "user", "content": content}]});
    let request = Client::new().post(gateway.url(CHAT)).header("x-stoker-route", "explain").json(&body);
    let answer = request.send().await?;
    let route = answer.headers().get("x-stoker-route").map(|route| route.to_str().unwrap().to_owned());
    let (status, body) = (answer.status(), answer.text().await?);
    ensure!(status == 200, "{status}: {body}");
    Ok(route.unwrap_or_default())
}

/// A family of its metrics.
async fn counted(gateway: &GatewayProcess, line: &str) -> Result<f64> {
    let metrics = gateway.metrics().await?;
    let value = metrics.lines().find_map(|found| found.strip_prefix(line));
    Ok(value.map_or(0.0, |value| value.trim().parse().unwrap()))
}

async fn wait_for(what: &str, mut is_so: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await? {
        ensure!(Instant::now() < deadline, "{what}: not in {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test]
async fn endpoints_that_flap_and_clocks_minutes_apart_cost_no_request_and_no_second_answer() -> Result<()> {
    let fakes = try_join_all(["a", "b"].map(|name| Fake::start(name, None))).await?;
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    let told = |places: &[usize], up_ms: [u64; 2]| {
        let replica = |at: &usize| ReplicaEndpoint { load: Some(load(up_ms[*at])), ..fakes[*at].endpoint.clone() };
        teller.tell(vec![deployment("chat", &["ember"], places.iter().map(replica).collect())])
    };
    told(&[0, 1], [5_000, 900_000]);
    gateway.knows("chat", EndpointState::Serving, 2).await?;
    let n_clients = 8;
    let asking = try_join_all((0..n_clients).map(async |client| {
        for number in 0..40 {
            ask(&gateway, &format!("{client}, {number}: {}", "what is this? ".repeat(40))).await?;
        }
        anyhow::Ok(())
    }));
    let flapping = async {
        // One replica's clock goes back by minutes, and the other's on, each time.
        for round in 0u64.. {
            let places: &[usize] = [&[0usize][..], &[], &[1], &[0, 1], &[]][round as usize % 5];
            told(places, [9_000_000 - 300_000 * (round % 30), 600_000 * round]);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let answered = async {
        tokio::select! {
            answered = asking => answered.map(drop),
            () = flapping => Ok(()),
        }
    };
    tokio::time::timeout(2 * PATIENCE, answered).await??;
    let all: usize = fakes.iter().map(Fake::n_asked).sum();
    assert_eq!(all, n_clients * 40, "each request went to one replica, once");
    Ok(())
}

/// Some names that nobody gave, then more of them for whoever follows.
fn foreign(number: usize, since: Option<u64>) -> KvEvents {
    let events: Vec<KvEvent> = (0..8).map(|at| KvEvent::Stored(0x5eed_0000 + 8 * number as u64 + at)).collect();
    match since {
        None => KvEvents { start_id: "s".into(), after: 0, number: 8, is_whole: true, events },
        Some(after @ ..32) => KvEvents { start_id: "s".into(), after, number: after + 8, is_whole: false, events },
        Some(after) => KvEvents { start_id: "s".into(), after, number: after, is_whole: false, events: vec![] },
    }
}

#[tokio::test]
async fn replicas_that_name_prompts_by_another_hash_are_predicted() -> Result<()> {
    let fakes = try_join_all(["a", "b"].map(|name| Fake::start(name, Some(foreign)))).await?;
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    teller.tell(vec![deployment("chat", &["ember"], fakes.iter().map(|fake| fake.endpoint.clone()).collect())]);
    gateway.knows("chat", EndpointState::Serving, 2).await?;
    wait_for("all names are known", async || {
        Ok(counted(&gateway, "stoker_gateway_prefixes{source=\"exact\"}").await? >= 32.0)
    })
    .await?;
    let talk = "It was a dark and stormy night. ".repeat(60);
    let first = ask(&gateway, &talk).await?;
    let second = ask(&gateway, &talk).await?;
    assert!(first.contains("prefix=none"), "{first}");
    assert!(second.contains("prefix=predicted"), "{second}");
    let replica = |route: &str| route.split(' ').next().unwrap().to_owned();
    assert_eq!(replica(&first), replica(&second), "it goes on by what it sent");
    Ok(())
}

/// All that is held to whoever knows nothing, and to everybody else something that does not follow.
fn out_of_order(_: usize, since: Option<u64>) -> KvEvents {
    let events = vec![KvEvent::Stored(7)];
    match since {
        None => KvEvents { start_id: "s".into(), after: 0, number: 1, is_whole: true, events },
        Some(since) => KvEvents { start_id: "s".into(), after: since + 5, number: since + 6, is_whole: false, events },
    }
}

#[tokio::test]
async fn events_that_do_not_follow_are_asked_for_as_a_whole_and_not_in_a_storm() -> Result<()> {
    let fake = Fake::start("a", Some(out_of_order)).await?;
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    teller.tell(vec![deployment("chat", &["ember"], vec![fake.endpoint.clone()])]);
    gateway.knows("chat", EndpointState::Serving, 1).await?;
    let begun = Instant::now();
    let gaps = "stoker_gateway_kv_events_total{kind=\"gap\"}";
    wait_for("three gaps", async || Ok(counted(&gateway, gaps).await? >= 3.0)).await?;
    ask(&gateway, "Hello!").await?;
    let n_asked = fake.n_asked_for_events.load(Ordering::SeqCst);
    // Pauses only get longer: the shortest is a tenth of a second.
    let most = 2 + (begun.elapsed().as_millis() / 100) as usize;
    assert!(n_asked <= most, "{n_asked} questions in {:?}", begun.elapsed());
    assert!(counted(&gateway, "stoker_gateway_kv_events_total{kind=\"whole\"}").await? >= 3.0);
    let line: Value = gateway.access_line(|line| line["path"] == CHAT).await?;
    assert_eq!(line["status"], 200);
    Ok(())
}
