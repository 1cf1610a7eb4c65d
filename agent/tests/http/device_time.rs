//! What answers tell of their devices' time: those that are there as a whole in their head, those with marks in these, bodies never.

use std::time::Duration;

use axum::{body::Body, http::Request, response::Response};
use serde_json::{Value, json};
use stoker_engine::{EngineLimits, exec::sim::SimScript};
use tower::ServiceExt;

use crate::agent::*;

const HEADER: &str = "x-stoker-device-seconds";
const STEP: Duration = Duration::from_millis(2);

/// Two devices. The text and its end are 13 steps.
fn agent() -> Agent {
    Agent::with(SimScript { step_time: STEP, n_devices: 2, ..SimScript::default() }, EngineLimits::default())
}

/// In the words of a gateway; `told`: of what another replica has made.
async fn ask(agent: &Agent, path: &str, body: &Value, told: Option<&str>) -> Response {
    let request = Request::post(path)
        .header("x-stoker-drawn", "000000000000002a-0123456789abcdef0123456789abcdef-1700000000")
        .header("x-stoker-whole", "marks")
        .header(HEADER, "marks");
    let request = match told {
        Some(told) => request.header("x-stoker-resume", told.len()),
        None => request,
    };
    let body = format!("{}{body}", told.unwrap_or_default());
    agent.router.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap()
}

/// Microseconds of each choice, one a mark of its tokens.
fn marked(text: &str, index: &str) -> Vec<u64> {
    let marks = text.lines().filter_map(|line| line.strip_prefix(": stoker ")?.strip_prefix(index)?.strip_prefix(' '));
    let micros = |mark: &str| mark.split(' ').next().unwrap().split_once('/').unwrap().1.parse().unwrap();
    marks.filter(|mark| *mark != "end").map(micros).collect()
}

fn seconds(response: &Response) -> Option<f64> {
    Some(response.headers().get(HEADER)?.to_str().unwrap().parse().unwrap())
}

#[tokio::test]
async fn an_answer_that_is_there_as_a_whole_tells_it_in_its_head_and_nowhere_else() {
    let message = json!({"model": "sim", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]});
    for (path, body, n_steps) in [
        ("/v1/completions", json!({"prompt": "hi"}), 13_u32),
        ("/v1/completions", json!({"prompt": "hi", "n": 3}), 13),
        ("/v1/completions", json!({"prompt": "hi", "max_tokens": 1}), 1),
        ("/v1/chat/completions", chat(json!({"max_tokens": 5})), 5),
        ("/v1/messages", message, 13),
        ("/v1/responses", json!({"input": "hi", "store": false}), 13),
    ] {
        let begun = std::time::Instant::now();
        let response = agent().send("POST", path, &body.to_string()).await;
        let passed = begun.elapsed().as_secs_f64();
        let told = seconds(&response).unwrap_or_else(|| panic!("{path} {body}: {}", response.status()));
        let (least, most) = ((2 * n_steps * STEP).as_secs_f64(), 2.0 * passed);
        assert!((least..=most).contains(&told), "{path} {body}: {told} of {least} to {most}");
        let (_, answer) = json_of(response).await;
        assert!(!answer.to_string().contains("device"), "{path}: {answer}");
    }
    let refused = agent().send("POST", "/v1/completions", r#"{"prompt": 7}"#).await;
    assert_eq!((refused.status().as_u16(), seconds(&refused)), (400, None));
}

#[tokio::test]
async fn marks_tell_what_each_choice_had_by_then_where_it_is_asked_for() {
    let agent = agent();
    for stream in [true, false] {
        let body = json!({"prompt": "hi", "n": 2, "stream": stream});
        let response = ask(&agent, "/v1/completions", &body, None).await;
        assert_eq!(seconds(&response), None, "its head is sent before it is known");
        let text = Stream { body: response.into_body() }.rest().await;
        let marked = ["0", "1"].map(|index| marked(&text, index));
        assert!(marked.iter().all(|choice| choice.len() > 1 && choice.is_sorted()), "{marked:?}");
        let all: u64 = marked.iter().filter_map(|choice| choice.last()).sum();
        let least = (2 * 13 * STEP).as_micros() as u64;
        assert!(all >= least - 2, "{all} of two devices' 13 steps at least, {least}, each rounded down: {marked:?}");
        assert!(!text.replace(": stoker", "").contains("device"), "{text}");
    }
}

#[tokio::test]
async fn who_goes_on_tells_its_own_part() {
    let agent = agent();
    let body = json!({"prompt": "hi", "stream": true});
    let response = ask(&agent, "/v1/completions", &body, None).await;
    let model = response.headers()["x-stoker-model"].to_str().unwrap().to_owned();
    let whole = marked(&Stream { body: response.into_body() }.rest().await, "0");
    let vocabulary = model.split_once('-').unwrap().0;
    let tokens: Vec<u8> = b"All is wel".to_vec();
    let told = json!({"vocabulary": vocabulary, "choices": [{"tokens": tokens, "cached": 0, "ended": false}]});
    let response = ask(&agent, "/v1/completions", &body, Some(&told.to_string())).await;
    let rest = marked(&Stream { body: response.into_body() }.rest().await, "0");
    assert_eq!((whole.len(), rest.len()), (13, 3));
    let least = (2 * 3 * STEP).as_micros() as u64;
    assert!(*rest.last().unwrap() >= least, "{rest:?}");
    // Of the ten steps that another one made nothing is in it: each mark is a step later than the one before.
    assert!(rest[0] < rest[1] && rest[1] < rest[2], "{rest:?}");
}
