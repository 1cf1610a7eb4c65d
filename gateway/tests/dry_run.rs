//! Where a request would go, told without sending it: what is said of every replica, that nobody is asked and nothing remembered, that the
//! request then goes there, and who is told.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use axum::{Json, Router, extract::State, routing::post};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use stoker_crds::{
    contract::LoadReport,
    endpoints::{DeploymentEndpoints, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
};
use stoker_gateway::{
    gateway::{Gateway, Settings},
    server::router,
    tenants::Tenants,
};
use tokio::net::TcpListener;

async fn served(routes: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

/// A replica that counts what it is asked.
async fn replica(n_asked: Arc<AtomicU32>) -> String {
    async fn answer(State(n_asked): State<Arc<AtomicU32>>) -> Json<Value> {
        n_asked.fetch_add(1, Ordering::Relaxed);
        Json(json!({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}))
    }
    served(Router::new().route("/v1/chat/completions", post(answer)).with_state(n_asked)).await
}

fn told(pod: &str, address: &str, state: EndpointState, running: u32) -> ReplicaEndpoint {
    let load = LoadReport { running, start_id: "s".into(), referenced_blocks: running, ..LoadReport::idle(100) };
    ReplicaEndpoint {
        pod: pod.into(),
        uid: format!("uid-{pod}"),
        address: Some(address.into()),
        events: None,
        revision: "r".into(),
        weight: WHOLE_WEIGHT,
        state,
        load: Some((&load).into()),
    }
}

fn deployment(name: &str, replicas: Vec<ReplicaEndpoint>) -> DeploymentEndpoints {
    let models = vec![name.to_owned()];
    DeploymentEndpoints {
        namespace: "default".into(),
        name: name.into(),
        models,
        replicas_wanted: 1,
        port: None,
        replicas,
    }
}

struct Rig {
    gateway: Arc<Gateway>,
    url: String,
    n_asked: Arc<AtomicU32>,
    client: Client,
}

impl Rig {
    /// One that is busy, one that is idle, one that starts; and another deployment without any.
    async fn start() -> Self {
        // An error means that the other test did.
        let _chosen_before = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let n_asked = Arc::new(AtomicU32::new(0));
        let [busy, idle] = [replica(Arc::clone(&n_asked)).await, replica(Arc::clone(&n_asked)).await];
        let gateway = Gateway::new(Settings::default()).unwrap();
        let chat = vec![
            told("busy", &busy, EndpointState::Serving, 60),
            told("idle", &idle, EndpointState::Serving, 0),
            told("late", "127.0.0.1:1", EndpointState::Starting, 0),
        ];
        let deployments = vec![deployment("chat", chat), deployment("code", vec![])];
        gateway.learn(Endpoints { source: "test".into(), number: 1, gateways: vec![], deployments });
        let address = served(router(Arc::clone(&gateway), Router::new())).await;
        Self { gateway, url: format!("http://{address}/v1/chat/completions"), n_asked, client: Client::new() }
    }

    async fn ask(&self, model: &str, route: &str, key: &str) -> Response {
        let content = "The quick brown fox jumps over the lazy dog. ".repeat(20);
        let body = json!({"model": model, "messages": [{"role": "user", "content": content}]});
        let asked = self.client.post(&self.url).header("x-stoker-route", route).header("x-request-id", "mine");
        asked.bearer_auth(key).json(&body).send().await.unwrap()
    }

    async fn dry_run(&self) -> Value {
        let answer = self.ask("chat", "dry-run", "").await;
        assert_eq!((answer.status().as_u16(), &answer.headers()["x-request-id"]), (200, &"mine".parse().unwrap()));
        answer.json().await.unwrap()
    }
}

fn of<'a>(foreseen: &'a Value, pod: &str) -> &'a Value {
    foreseen["replicas"].as_array().unwrap().iter().find(|replica| replica["pod"] == pod).unwrap()
}

#[tokio::test]
async fn a_dry_run_says_what_the_choice_sees_and_the_request_goes_there() {
    let rig = Rig::start().await;
    let first = rig.dry_run().await;
    assert_eq!(
        [&first["deployment"], &first["replica"], &first["reason"]],
        [&json!("chat.default"), &json!("idle"), &json!("load")]
    );
    let (busy, idle) = (of(&first, "busy"), of(&first, "idle"));
    assert_eq!([&busy["standing"], &busy["chosen"]], [&json!("over_share"), &json!(false)], "{busy}");
    assert_eq!([&busy["requests"], &busy["kvShare"]], [&json!(15), &json!(0.6)], "a quarter of others' sixty");
    assert_eq!([&idle["standing"], &idle["chosen"]], [&json!("fits"), &json!(true)], "{idle}");
    assert_eq!([&idle["prefix"], &idle["cachedTokens"]], [&json!("none"), &json!(0)], "{idle}");
    assert_eq!(idle["uncachedTokens"], first["promptTokens"]);
    assert_eq!(*of(&first, "late"), json!({"pod": "late", "state": "starting", "chosen": false}));
    assert_eq!(rig.dry_run().await, first, "nothing was remembered");
    assert_eq!(rig.n_asked.load(Ordering::Relaxed), 0, "nobody was asked");
    assert!(!rig.gateway.render_metrics().unwrap().contains("stoker_gateway_routes_total{"), "nothing was counted");

    let sent = rig.ask("chat", "explain", "").await;
    let reasons = sent.headers()["x-stoker-route"].to_str().unwrap();
    assert!(reasons.starts_with("replica=idle reason=load "), "{reasons}");
    assert_eq!(rig.n_asked.load(Ordering::Relaxed), 1);
    let after = rig.dry_run().await;
    let idle = of(&after, "idle");
    assert_eq!([&after["reason"], &idle["prefix"]], [&json!("prefix"), &json!("predicted")], "{after}");
    assert!(idle["cachedTokens"].as_u64().unwrap() > 100, "{after}");
}

#[tokio::test]
async fn a_dry_run_is_for_who_may_ask_and_counts_as_a_request() {
    let rig = Rig::start().await;
    let hash = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    let tenants = format!("tenants: [{{name: a, keys: ['{hash}'], models: [chat], limits: {{requestsPerMinute: 1}}}}]");
    rig.gateway.learn_tenants(Tenants::parse(&tenants).unwrap(), Path::new(""));
    let status = async |model: &str, key: &str| rig.ask(model, "dry-run", key).await.status().as_u16();
    assert_eq!([status("chat", "no-key").await, status("code", "abc").await], [401, 403]);
    assert_eq!([status("nothing", "abc").await, status("chat", "abc").await], [404, 200]);
    assert_eq!(status("chat", "abc").await, 429, "one a minute");
    assert_eq!(rig.n_asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn where_nobody_serves_nobody_is_named() {
    let rig = Rig::start().await;
    let foreseen: Value = rig.ask("code", "dry-run", "").await.json().await.unwrap();
    assert_eq!([&foreseen["replica"], &foreseen["replicas"]], [&Value::Null, &json!([])], "{foreseen}");
    let mistyped = rig.ask("chat", "dryrun", "").await;
    let (status, said) = (mistyped.status(), mistyped.text().await.unwrap());
    assert!(status == 400 && said.contains("`explain` or `dry-run`"), "{said}");
    assert_eq!(rig.n_asked.load(Ordering::Relaxed), 0);
    let stored = rig.url.replace("chat/completions", "responses/resp_1");
    let refused = rig.client.delete(stored).header("x-stoker-route", "dry-run").send().await.unwrap();
    assert_eq!(refused.status(), 400, "it would delete");
}
