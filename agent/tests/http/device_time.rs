//! What answers tell of their devices' time: those that are there as a whole in their head, those with marks in these, bodies never. And
//! what is on account, since they tell nothing of it.

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

/// Asks as a tenant of the gateway `g`; `marks`: in the words of a gateway that takes them out.
async fn ask_as(agent: &Agent, path: &str, body: &Value, marks: bool) -> Response {
    let mut request = Request::post(path).header("x-stoker-account", "g").header("x-stoker-tenant", "search");
    if marks {
        let drawn = "000000000000002a-0123456789abcdef0123456789abcdef-1700000000";
        request = request.header("x-stoker-drawn", drawn).header("x-stoker-whole", "marks").header(HEADER, "marks");
    }
    agent.router.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap()
}

/// Microseconds on account, as the gateway `g` is told.
async fn on_account(agent: &Agent) -> u64 {
    let asked = Request::get("/v1/accounts/g").body(Body::empty()).unwrap();
    let answer = stoker_agent::http::admin_router(agent.replica.clone()).oneshot(asked).await.unwrap();
    let (status, told) = json_of(answer).await;
    assert_eq!((status.as_u16(), &told["startId"]), (200, &json!(agent.replica.load_report().start_id)), "{told}");
    told["deviceMicros"]["search"].as_u64().unwrap_or_default()
}

async fn is_idle(agent: &Agent) {
    agent.wait_until("nothing is computed", |load| load.running + load.waiting == 0).await;
}

#[tokio::test]
async fn what_no_answer_tells_is_on_account_and_nothing_else() {
    let responses = "/v1/responses";
    let logprobs =
        json!({"input": "hi", "stream": true, "include": ["message.output_text.logprobs"], "top_logprobs": 1});
    for (path, body, marks, is_on_account) in [
        ("/v1/completions", json!({"prompt": "hi", "stream": true}), false, true),
        ("/v1/completions", json!({"prompt": "hi", "stream": true, "n": 2}), false, true),
        ("/v1/completions", json!({"prompt": "hi", "stream": true, "n": 2}), true, false),
        ("/v1/completions", json!({"prompt": "hi"}), false, false),
        ("/v1/completions", json!({"prompt": "hi", "n": 2}), true, false),
        (responses, json!({"input": "hi", "stream": true}), true, false),
        (responses, logprobs, true, true),
        (responses, json!({"input": "hi", "background": true}), true, true),
        (responses, json!({"input": "hi", "background": true}), false, true),
    ] {
        let (agent, begun) = (agent(), std::time::Instant::now());
        let response = ask_as(&agent, path, &body, marks).await;
        assert_eq!(response.status(), 200, "{path} {body}");
        Stream { body: response.into_body() }.rest().await;
        is_idle(&agent).await;
        let least = (2 * 13 * STEP).as_micros() as u64;
        let deadline = begun + PATIENCE;
        loop {
            // What nobody waits for may begin only now.
            let told = on_account(&agent).await;
            let most = 2 * begun.elapsed().as_micros() as u64;
            let expected = if is_on_account { least..=most } else { 0..=0 };
            if expected.contains(&told) {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{path} {body} {marks}: {told} of {expected:?}");
            tokio::time::sleep(STEP).await;
        }
    }
}

#[tokio::test]
async fn what_is_on_account_rises_while_an_answer_is_made_and_stays_when_its_client_leaves() {
    let agent = Agent::slow(EngineLimits::default());
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1000});
    let mut stream = Stream { body: ask_as(&agent, "/v1/completions", &body, false).await.into_body() };
    let mut told = Vec::new();
    for _ in 0..3 {
        stream.next().await.unwrap();
        told.push(on_account(&agent).await);
    }
    assert!(told[0] < told[1] && told[1] < told[2], "{told:?}");
    drop(stream);
    is_idle(&agent).await;
    assert!(on_account(&agent).await >= told[2]);
}

#[tokio::test]
async fn of_a_whole_answer_that_nobody_waited_for_it_is_on_account_what_came_by_then() {
    let agent = Agent::slow(EngineLimits::default());
    let body = json!({"prompt": "hi", "max_tokens": 1000});
    {
        let mut answer = std::pin::pin!(ask_as(&agent, "/v1/completions", &body, false));
        let some_tokens = agent.wait_until("some tokens", |load| load.generated_tokens > Some(3));
        tokio::select! {
            _ = &mut answer => panic!("it has a thousand tokens"),
            () = some_tokens => {}
        }
        assert_eq!(on_account(&agent).await, 0, "its head will tell");
    }
    is_idle(&agent).await;
    assert!(on_account(&agent).await > 0);
}
