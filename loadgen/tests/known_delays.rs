//! What is measured of a server whose delays are known. Upper limits leave a busy machine 250 ms.

use std::{
    convert::Infallible,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use stoker_loadgen::{
    client::{Client, Connections, Ending, Form, Options, Sampling},
    run::{Model, Outcome, Plan, run},
    session::{Session, Turn},
    shape::Shape,
    summary::Summary,
};
use stoker_workload::{Lengths, Sizes, Steps};
use tokio::{net::TcpListener, sync::mpsc, time::Instant};

/// The two requests that count tokens come first and are no part of the measurement.
const N_COUNTING: usize = 2;
const N_PIECES: u32 = 5;
const GAP: Duration = Duration::from_millis(40);
const SLACK_SECONDS: f64 = 0.25;

/// What the server does with the request of this number, this long after the first; those that are measured count.
type Behaviour = fn(usize, Duration) -> Doing;

enum Doing {
    /// First piece after this time.
    Answer(Duration),
    Refuse,
    /// Ends the stream before its end.
    Cut,
}

#[derive(Clone)]
struct Server {
    behaviour: Behaviour,
    seen: Arc<AtomicUsize>,
    first: Arc<OnceLock<Instant>>,
}

async fn complete(State(server): State<Server>, Json(asked): Json<Value>) -> Response {
    let seen = server.seen.fetch_add(1, Ordering::Relaxed);
    let Some(nth) = seen.checked_sub(N_COUNTING) else { return pieces(&asked, Duration::ZERO, true) };
    match (server.behaviour)(nth, server.first.get_or_init(Instant::now).elapsed()) {
        Doing::Answer(delay) => pieces(&asked, delay, true),
        Doing::Cut => pieces(&asked, Duration::ZERO, false),
        Doing::Refuse => (StatusCode::TOO_MANY_REQUESTS, "the line is full").into_response(),
    }
}

fn pieces(asked: &Value, delay: Duration, has_end: bool) -> Response {
    let words = asked["messages"][0]["content"].as_str().unwrap_or_default().split(' ').count();
    let usage = json!({"prompt_tokens": 7 + 2 * words, "completion_tokens": N_PIECES});
    let piece = format!("data: {}\n\n", json!({"choices": [{"delta": {"content": "a"}}]}));
    let end = format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage}));
    let texts = (0..N_PIECES).map(move |idx| (if idx == 0 { delay } else { GAP }, piece.clone()));
    let texts = texts.chain(has_end.then_some((Duration::ZERO, end)));
    let body = stream::iter(texts).then(|(wait, text)| async move {
        tokio::time::sleep(wait).await;
        Ok::<_, Infallible>(Bytes::from(text))
    });
    Body::from_stream(body).into_response()
}

async fn start(behaviour: Behaviour) -> String {
    let server = Server { behaviour, seen: Arc::default(), first: Arc::default() };
    let models = Json(json!({"data": [{"id": "known"}]}));
    let routes = Router::new()
        .route("/v1/chat/completions", post(complete))
        .route("/v1/models", get(|| async { models }))
        .with_state(server);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

fn options(url: String) -> Options {
    let (form, connections, ending) = (Form::Chat, Connections::Fresh, Ending::Natural);
    Options { url, form, connections, ending, sampling: Sampling::OfModel, api_key: None }
}

async fn measured(behaviour: Behaviour, sessions: Vec<Session>, in_flight_max: usize) -> (Vec<Outcome>, Duration) {
    let client = Client::new(options(start(behaviour).await)).expect("a URL");
    let model = client.first_model().await.expect("it lists one");
    assert_eq!(model, "known");
    let token_count = client.token_count(&model).await.expect("it counts tokens");
    let models = vec![Model { name: model, token_count }];
    let plan = Plan { sessions, models, seed: 1, timeout: Duration::from_secs(20), in_flight_max };
    let (_wish, wishes) = mpsc::channel(1);
    run(&client, plan, wishes, |_| {}).await
}

/// One request every `gap_ms`.
fn regular(n: u32, gap_ms: u32) -> Vec<Session> {
    (0..n).map(|idx| session(f64::from(idx * gap_ms) / 1000.0, &[0])).collect()
}

/// A turn after each of these times to think, the first of which is none.
fn session(arrived: f64, think_ms: &[u64]) -> Session {
    let turn = |think_ms: &u64| Turn {
        think: Duration::from_millis(*think_ms),
        prompt_tokens: 107,
        shared_tokens: 0,
        completion_tokens: N_PIECES,
        shape: Shape::Text,
    };
    Session { arrived, model_idx: 0, turns: think_ms.iter().map(turn).collect() }
}

fn is_just_above(value: f64, least: f64) -> bool {
    (least..least + SLACK_SECONDS).contains(&value)
}

#[tokio::test(flavor = "multi_thread")]
async fn percentiles_are_those_of_the_server() {
    // Ninety of a hundred after 100 ms, eight after 500 ms, two after a second.
    let behaviour: Behaviour = |nth, _| match nth {
        0..90 => Doing::Answer(Duration::from_millis(100)),
        90..98 => Doing::Answer(Duration::from_millis(500)),
        _ => Doing::Answer(Duration::from_secs(1)),
    };
    let (outcomes, elapsed) = measured(behaviour, regular(100, 10), 1000).await;
    let slos = ["ttft=450ms".parse().unwrap()];
    let summary = Summary::of(&outcomes, elapsed, &slos);
    let Summary { ttft_seconds, itl_seconds, e2e_seconds, .. } = summary;
    assert_eq!((summary.answered, summary.planned, summary.failures.len()), (100, 100, 0), "{summary}");
    assert!(is_just_above(ttft_seconds.p50, 0.1) && is_just_above(ttft_seconds.p90, 0.1), "{summary}");
    assert!(is_just_above(ttft_seconds.p99, 1.0), "{summary}");
    assert!(is_just_above(itl_seconds.p50, 0.04), "{summary}");
    assert!(is_just_above(e2e_seconds.p50, 0.1 + 4.0 * 0.04), "{summary}");
    assert_eq!(summary.goodput[0].count, 90, "{summary}");
    assert_eq!(summary.completion_tokens, 500);
    // The server counts seven tokens and two a word; 107 were asked for.
    assert_eq!(summary.prompt_tokens, 100 * 107);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stall_is_felt_by_every_request_planned_within_it() {
    // Nothing is answered before 1.2 s; a closed loop would have shown that to one request only.
    let behaviour: Behaviour = |_, since| Doing::Answer(Duration::from_millis(1200).saturating_sub(since));
    let (outcomes, elapsed) = measured(behaviour, regular(100, 10), 1000).await;
    let summary = Summary::of(&outcomes, elapsed, &[]);
    assert_eq!(summary.answered, 100);
    assert!(summary.ttft_seconds.p50 > 0.5, "half of them were planned within the first half second: {summary}");
    assert!(summary.send_lag_seconds.p50 < SLACK_SECONDS, "all left in time: {summary}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_failure_is_counted_and_none_is_left_out() {
    let behaviour: Behaviour = |nth, _| match nth {
        0..3 => Doing::Refuse,
        3..5 => Doing::Cut,
        _ => Doing::Answer(Duration::ZERO),
    };
    let (outcomes, elapsed) = measured(behaviour, regular(10, 50), 1000).await;
    let summary = Summary::of(&outcomes, elapsed, &[]);
    let count = |kind: &str| summary.failures.get(kind).map_or(0, |failures| failures.count);
    assert_eq!((count("status 429"), count("cut"), summary.answered), (3, 2, 5), "{summary}");
    assert_eq!(summary.failures["status 429"].first, "the line is full");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_above_the_bound_is_counted_as_not_sent() {
    let behaviour: Behaviour = |_, _| Doing::Answer(Duration::from_millis(600));
    let (outcomes, elapsed) = measured(behaviour, regular(10, 10), 4).await;
    let summary = Summary::of(&outcomes, elapsed, &[]);
    assert_eq!((summary.answered, summary.failures["not sent"].count), (4, 6), "{summary}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_load_is_as_planned_while_the_server_is_slow() {
    let behaviour: Behaviour = |_, _| Doing::Answer(Duration::from_secs(1));
    let steps: Steps = "500ms:100".parse().unwrap();
    let requests = steps.requests(Sizes { prompt: Lengths::Fixed(50), completion: Lengths::Fixed(5) }, 1);
    let n_requests = requests.len();
    let sessions = requests.iter().map(|request| session(request.arrived, &[0])).collect();
    let (outcomes, elapsed) = measured(behaviour, sessions, 1000).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.result.is_ok()).count(), n_requests);
    // One second and four gaps after the last of them left, not one second each.
    assert!(elapsed < Duration::from_millis(1500 + 160 + 500), "{elapsed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_turn_is_planned_after_the_answer_before_it_and_some_thought() {
    let behaviour: Behaviour = |_, _| Doing::Answer(Duration::from_millis(300));
    let (outcomes, _) = measured(behaviour, vec![session(0.0, &[0, 200]), session(0.1, &[0, 0])], 1000).await;
    let planned = |turn_idx| {
        let of_turn = outcomes.iter().filter(move |outcome| outcome.which.turn_idx == turn_idx);
        let mut planned: Vec<f64> = of_turn.map(|outcome| outcome.which.planned.as_secs_f64()).collect();
        planned.sort_by(f64::total_cmp);
        planned
    };
    assert_eq!(planned(0), [0.0, 0.1], "sessions arrive as planned");
    // 300 ms to the first piece and four gaps more to the last, then the thought.
    let answered = 0.3 + 4.0 * GAP.as_secs_f64();
    let later = planned(1);
    for (planned, least) in later.into_iter().zip([0.1 + answered, answered + 0.2]) {
        assert!((least..least + 5.0).contains(&planned), "{planned} s instead of {least} s");
    }
    assert!(outcomes.iter().all(|outcome| outcome.result.is_ok()));
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_behind_one_that_failed_are_counted_and_not_sent() {
    let behaviour: Behaviour = |nth, _| if nth == 1 { Doing::Refuse } else { Doing::Answer(Duration::ZERO) };
    let (outcomes, elapsed) = measured(behaviour, vec![session(0.0, &[0, 0, 0, 0])], 1000).await;
    let summary = Summary::of(&outcomes, elapsed, &[]);
    let count = |kind: &str| summary.failures.get(kind).map_or(0, |failures| failures.count);
    assert_eq!((summary.planned, summary.answered), (4, 1), "{summary}");
    assert_eq!((count("status 429"), count("not reached")), (1, 2), "{summary}");
}
