//! An agent from loading to its end, and the endpoints that tell of it.

use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use serde_json::json;
use stoker_agent::lifecycle::Event;
use stoker_crds::contract::AgentPhase;
use stoker_engine::EngineLimits;
use stoker_engine::exec::sim::SimScript;
use tower::ServiceExt;

use crate::agent::*;

#[tokio::test]
async fn a_step_that_fails_ends_the_stream_with_an_error_and_then_the_process() {
    let script = SimScript { fail_at_step: Some(5), completion: "x".repeat(100), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let stream = agent.open_stream().await.rest().await;
    let last = events(&stream).pop().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("scripted failure"), "{last}");

    agent.wait_until("the failure is noticed", |report| report.phase == AgentPhase::Failed).await;
    let (status, health) = agent.get("/healthz").await;
    assert_eq!(status, 503, "{health}");
    assert_eq!(agent.post("/v1/completions", json!({"prompt": "x"})).await.0, 503);
    assert_eq!(*agent.replica.exit_code().borrow(), Some(1));
}

#[tokio::test]
async fn a_step_that_hangs_makes_the_replica_unhealthy_until_it_completes() {
    let script = SimScript { step_time: Duration::from_millis(900), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1}).to_string();
    let stream = agent.send_aside("/v1/completions", &body);
    agent.wait_until("it stands still", |report| report.stalled_seconds > 0.35).await;
    let (status, health) = agent.get("/healthz").await;
    assert_eq!(status, 503);
    assert!(health["reason"].as_str().unwrap().contains("no step completed for"), "{health}");
    assert_eq!(agent.get("/readyz").await.0, 503);
    Stream { body: stream.await.unwrap().into_body() }.rest().await;
    assert_eq!(agent.get("/healthz").await.0, 200);
}

#[tokio::test]
async fn what_fails_before_the_first_token_has_the_status_of_an_error() {
    let script = SimScript { fail_at_step: Some(1), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let (status, answer) = agent.post("/v1/completions", json!({"prompt": "x", "stream": true})).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (500, &json!("engine_died")), "{answer}");
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    agent.wait_until("it runs", |report| report.referenced_blocks > 0).await;
    drop(stream);
    agent.wait_until("its blocks are free", |report| report.referenced_blocks == 0 && report.running == 0).await;
}

#[tokio::test]
async fn a_drain_admits_until_withdrawn_then_finishes_what_runs_and_can_be_undone() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    let closes = async || agent.send("GET", "/v1/models", "").await.headers().get("connection").cloned();
    assert_eq!(closes().await, None);
    agent.leave(60, 60);
    assert_eq!(agent.replica.load_report().phase, AgentPhase::Withdrawing);
    assert_eq!(agent.get("/readyz").await.0, 503);
    assert_eq!(closes().await.unwrap(), "close", "a connection through a Service would stay with this replica");
    let other = agent.open_stream().await;

    agent.leave(0, 60);
    let refused = agent.send("POST", "/v1/completions", r#"{"prompt": "x"}"#).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(agent.replica.load_report().phase, AgentPhase::Draining);
    drop((stream, other));
    agent.wait_until("it is empty", |report| report.phase == AgentPhase::Empty).await;

    agent.replica.apply(Event::Return);
    assert_eq!(agent.get("/readyz").await.0, 200);
    agent.open_stream().await;
}

#[tokio::test]
async fn the_drain_deadline_ends_a_stream_with_an_error_terminal() {
    let agent = Agent::slow(EngineLimits::default());
    let stream = agent.open_stream().await;
    agent.leave(0, 0);
    let last = events(&stream.rest().await).pop().unwrap();
    assert!(last["error"]["message"].as_str().unwrap().contains("drain deadline"), "{last}");
    agent.wait_until("it is empty", |report| report.phase == AgentPhase::Empty).await;
    let load = agent.replica.load_report();
    assert_eq!((load.failed, load.finished), (Some(1), 1), "the operator is told of it");
}

#[tokio::test]
async fn while_loading_it_is_alive_unready_and_says_when_to_retry() {
    let agent = Agent::loading(&EngineLimits::default());
    agent.replica.note_load_progress(0.4);
    assert_eq!(agent.get("/healthz").await.0, 200);
    let (status, ready) = agent.get("/readyz").await;
    assert_eq!((status.as_u16(), &ready["phase"]), (503, &json!("loading")));
    let refused = agent.send("POST", "/v1/chat/completions", &chat(json!({})).to_string()).await;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(agent.get("/v1/models").await.1["data"][1]["id"], "alias");

    agent.replica.apply(Event::LoadFailed("config.json: no such file".into()));
    assert_eq!(agent.get("/healthz").await.0, 200, "a restart would hide the reason");
    let load = agent.replica.load_report();
    assert_eq!((load.phase, load.error.as_deref()), (AgentPhase::Failed, Some("config.json: no such file")));
}

#[tokio::test]
async fn the_request_id_is_echoed_or_made() {
    let agent = Agent::new();
    let request = Request::builder().uri("/healthz").header("x-request-id", "abc").body(Body::empty()).unwrap();
    let response = agent.router.clone().oneshot(request).await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "abc");
    assert!(agent.send("GET", "/healthz", "").await.headers()["x-request-id"].to_str().unwrap().starts_with("req-"));
}

#[tokio::test]
async fn what_other_servers_answer_is_answered_here() {
    let agent = Agent::new();
    assert_eq!(agent.get("/health").await.0, 200);
    assert_eq!(Agent::loading(&EngineLimits::default()).get("/health").await.0, 503, "others listen once they serve");
    assert_eq!(agent.get("/version").await.1, json!({"version": env!("CARGO_PKG_VERSION")}));
}
