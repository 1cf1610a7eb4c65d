//! Requests are spans at a collector of traces.

use std::{sync::Arc, time::Instant};

use axum::{Json, Router, body::Body, extract::State, http::Request, routing::post};
use serde_json::{Value, json};
use stoker_edge::spans::SpanLine;
use stoker_engine::{EngineLimits, exec::sim::SimScript};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tower::ServiceExt;

use crate::agent::{Agent, PATIENCE};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// An address that takes spans, and what it was sent.
async fn collector() -> (String, UnboundedReceiver<Value>) {
    let (sent, spans) = unbounded_channel();
    let take = async |State(sent): State<Arc<UnboundedSender<Value>>>, Json(message): Json<Value>| {
        let of_agent = json!({"key": "service.name", "value": {"stringValue": "stoker-agent"}});
        assert_eq!(message["resourceSpans"][0]["resource"]["attributes"][0], of_agent);
        let spans = message["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone();
        spans.into_iter().for_each(|span| sent.send(span).unwrap());
        Json(json!({}))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/traces", post(take)).with_state(Arc::new(sent));
    tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
    (url, spans)
}

fn traced(url: &str) -> Agent {
    let agent = Agent::with(SimScript { completion: "Hello".into(), ..SimScript::default() }, EngineLimits::default());
    agent.replica.trace(SpanLine::open(url, "stoker-agent".into(), agent.replica.metrics().spans_dropped()).unwrap());
    agent
}

async fn ask(agent: &Agent, traceparent: Option<&str>, body: Value) {
    let request = Request::post("/v1/completions").header("x-request-id", "mine");
    let request = traceparent.into_iter().fold(request, |request, parent| request.header("traceparent", parent));
    let answer = agent.router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    assert_eq!(answer.status(), 200);
    axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
}

fn attribute<'a>(span: &'a Value, key: &str) -> &'a Value {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|attribute| attribute["key"] == key);
    &found.unwrap_or_else(|| panic!("{key} is not in {span}"))["value"]
}

#[tokio::test]
async fn a_request_and_its_completions_are_spans_of_the_trace_that_it_came_with() {
    let (url, mut spans) = collector().await;
    let agent = traced(&url);
    for is_streamed in [false, true] {
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
        ask(&agent, Some(&parent), json!({"prompt": "x", "n": 2, "max_tokens": 3, "stream": is_streamed})).await;
        let mut found = Vec::new();
        while found.len() < 3 {
            found.push(tokio::time::timeout(PATIENCE, spans.recv()).await.unwrap().unwrap());
        }
        let whole = found.iter().find(|span| span["kind"] == 2).unwrap();
        assert_eq!((&whole["traceId"], &whole["parentSpanId"]), (&json!(TRACE), &json!("00f067aa0ba902b7")));
        assert_eq!(whole["name"], "POST /v1/completions");
        assert_eq!(attribute(whole, "gen_ai.request.id"), &json!({"stringValue": "mine"}));
        let time = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
        let mut indices = Vec::new();
        for part in found.iter().filter(|span| span["kind"] == 1) {
            assert_eq!((&part["traceId"], &part["parentSpanId"]), (&json!(TRACE), &whole["spanId"]));
            assert_eq!(attribute(part, "gen_ai.usage.output_tokens"), &json!({"intValue": "3"}));
            assert_eq!(attribute(part, "gen_ai.response.finish_reasons"), &json!({"stringValue": "length"}));
            assert!(attribute(part, "gen_ai.latency.time_to_first_token")["doubleValue"].as_f64().unwrap() >= 0.0);
            assert!(time(part, "endTimeUnixNano") <= time(whole, "endTimeUnixNano"));
            assert!(time(part, "startTimeUnixNano") <= time(part, "endTimeUnixNano"));
            indices.push(attribute(part, "gen_ai.choice.index")["intValue"].as_str().unwrap().to_owned());
        }
        indices.sort();
        assert_eq!(indices, ["0", "1"]);
    }
}

#[tokio::test]
async fn a_trace_that_nobody_writes_down_stays_unwritten_and_one_of_nobody_is_new() {
    let (url, mut spans) = collector().await;
    let agent = traced(&url);
    ask(&agent, Some(&format!("00-{TRACE}-00f067aa0ba902b7-00")), json!({"prompt": "x", "max_tokens": 1})).await;
    ask(&agent, None, json!({"prompt": "x", "max_tokens": 1})).await;
    for _ in 0..2 {
        let span = tokio::time::timeout(PATIENCE, spans.recv()).await.unwrap().unwrap();
        assert!(span["traceId"] != TRACE && span["traceId"].as_str().unwrap().len() == 32, "{span}");
    }
    assert!(spans.try_recv().is_err(), "no more than one request's");
}

#[tokio::test]
async fn without_a_collector_requests_are_answered_and_lost_spans_are_counted() {
    let agent = traced("http://127.0.0.1:9");
    ask(&agent, None, json!({"prompt": "x", "max_tokens": 1})).await;
    let deadline = Instant::now() + PATIENCE;
    while agent.replica.metrics().spans_dropped().get() < 2 {
        assert!(Instant::now() < deadline, "both are lost");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
