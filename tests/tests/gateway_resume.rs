//! Replicas that die, freeze and are drained past their deadline while they stream: clients get what they would have got. Real agents
//! with ember, a real gateway. `STOKER_RESUME_MINUTES` makes a soak of it (`make resumes`), `STOKER_RESUME_SEED` another one.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Response},
    routing::{get, post},
};
use futures::{StreamExt, future::try_join_all};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint, WHOLE_WEIGHT};
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment},
    resumes::{Blow, Case, Fleet, Said, cases, thinking_cases, whole_cases},
    thinking::thinking_ember,
};
use tokio::net::TcpListener;

/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(120);

/// What these requests say when nobody disturbs them.
async fn undisturbed(fleet: &Fleet, cases: &[Case]) -> Result<Vec<Said>> {
    let base = fleet.agents().next().unwrap().base().to_owned();
    try_join_all(cases.iter().map(|case| case.ask(&base, || {}))).await
}

/// Whether the gateway is told that a replica that was struck is none any more.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Told {
    Never,
    AtOnce,
}

/// Strikes a replica in the middle of many streams; all must say what they say undisturbed. What the gateway logged.
async fn check(blow: Blow, told: Told, gateway_args: &[&str]) -> Result<String> {
    check_of(&[cases(1, 250), whole_cases(1, 250)].concat(), &[], (blow, told), gateway_args).await
}

/// The same with these streams, of agents with these arguments.
async fn check_of(
    cases: &[Case],
    agent_args: &[&str],
    (blow, told): (Blow, Told),
    gateway_args: &[&str],
) -> Result<String> {
    // On a busy machine a replica's answers may have ended before the blow comes.
    const ATTEMPTS: usize = 5;
    for _ in 0..ATTEMPTS {
        let fleet = Fleet::of(2, gateway_args, agent_args).await?;
        if let Some(log) = attempt(fleet, cases, blow, told).await? {
            return Ok(log);
        }
    }
    bail!("{blow:?}: no stream was met in {ATTEMPTS} attempts")
}

/// One blow; nothing if it met no stream.
async fn attempt(mut fleet: Fleet, cases: &[Case], blow: Blow, told: Told) -> Result<Option<String>> {
    let expected = undisturbed(&fleet, cases).await?;
    let (n_begun, base) = (Arc::new(AtomicUsize::new(0)), fleet.gateway.base().to_owned());
    let answers: Vec<_> = cases
        .iter()
        .cloned()
        .map(|case| {
            let (n_begun, base) = (Arc::clone(&n_begun), base.clone());
            tokio::spawn(async move { case.ask(&base, || _ = n_begun.fetch_add(1, Ordering::Relaxed)).await })
        })
        .collect();
    let deadline = Instant::now() + PATIENCE;
    // Those that are not streamed begin when they end.
    while n_begun.load(Ordering::Relaxed) < cases.len() / 3 {
        ensure!(Instant::now() < deadline, "they do not begin");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    fleet.strike(0, blow)?;
    if told == Told::AtOnce {
        fleet.tell().await?;
    }
    for ((answer, case), expected) in answers.into_iter().zip(cases).zip(&expected) {
        let seen = tokio::time::timeout(PATIENCE, answer).await.context(case.name)??;
        let seen = seen.with_context(|| format!("{blow:?}: {}\n{}", case.name, fleet.gateway.log()))?;
        assert_eq!(&seen, expected, "{blow:?}: {}", case.name);
    }
    let resumed = fleet.counted("stoker_gateway_resumed_total", "exact=\"true\"").await?;
    let unsure = fleet.counted("stoker_gateway_resumed_total", "exact=\"false\"").await?;
    assert_eq!(unsure, 0.0, "{blow:?}: {resumed} went on, {unsure} of them unsure");
    assert_eq!(fleet.counted("stoker_gateway_answers_cut_total", "").await?, 0.0);
    if resumed == 0.0 {
        return Ok(None);
    }
    let went_on = |line: &Value| line["resumes"].as_u64() >= Some(1) && line["ending"] == "whole";
    let line = fleet.gateway.access_line(went_on).await?;
    let [device_seconds, seconds] = ["device_seconds", "seconds"].map(|name| line[name].as_f64().unwrap());
    assert!(device_seconds > 0.0 && device_seconds <= seconds, "of both replicas, one after the other: {line}");
    Ok(Some(fleet.gateway.log()))
}

#[tokio::test]
async fn streams_outlive_a_killed_replica() -> Result<()> {
    check(Blow::Kill, Told::Never, &[]).await.map(drop)
}

#[tokio::test]
async fn thoughts_outlive_a_killed_replica() -> Result<()> {
    let model = tempfile::tempdir()?;
    thinking_ember(model.path())?;
    let model = model.path().to_str().context("its path")?;
    let (cases, agent_args) =
        ([thinking_cases(1, 250), thinking_cases(2, 250)].concat(), ["--model", model, "--served-name", "ember"]);
    // They think, and then they answer.
    let said = cases[1].ask(Fleet::of(1, &[], &agent_args).await?.gateway.base(), || ()).await?;
    let is_told = |part: &str| said[part].as_str().is_some_and(|text| text.len() > 100);
    assert!(is_told("0 reasoning") && is_told("0 content"), "{said:?}");
    check_of(&cases, &agent_args, (Blow::Kill, Told::Never), &[]).await.map(drop)
}

#[tokio::test]
async fn streams_outlive_a_frozen_replica_that_others_leave_behind() -> Result<()> {
    // By itself it would be taken for lost long after this test.
    let log = check(Blow::Freeze, Told::Never, &["--stall", "3600"]).await?;
    assert!(log.contains("a replica is silent while others are not"), "{log}");
    Ok(())
}

#[tokio::test]
async fn streams_outlive_a_frozen_replica_that_is_in_no_document_any_more() -> Result<()> {
    let log = check(Blow::Freeze, Told::AtOnce, &[]).await?;
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let why: Vec<Value> = lines.filter(|line| line["gap_ms"].is_u64()).map(|line| line["why"].clone()).collect();
    // On a busy machine one may have gone on for another reason besides.
    assert!(why.iter().any(|why| why == "it does not say that it lives"), "{why:?}\n{log}");
    Ok(())
}

#[tokio::test]
async fn streams_outlive_a_replica_that_is_drained_past_its_deadline() -> Result<()> {
    check(Blow::Drain, Told::Never, &[]).await.map(drop)
}

#[tokio::test]
async fn whoever_lost_its_gateway_asks_another_one_again_and_gets_the_same_answer() -> Result<()> {
    let agents = try_join_all((0..2).map(|_| AgentProcess::ready(&[]))).await?;
    let teller = Teller::start().await?;
    teller.tell_chat(&agents, |_, _| {}).await?;
    let [lost, other] = [GatewayProcess::start(teller.url(), &[])?, GatewayProcess::start(teller.url(), &[])?];
    lost.knows("chat", EndpointState::Serving, 2).await?;
    other.knows("chat", EndpointState::Serving, 2).await?;
    let cases = [cases(1, 250), whole_cases(1, 250)].concat();
    let expected = try_join_all(cases.iter().map(|case| case.ask(agents[0].base(), || {}))).await?;
    let n_begun = Arc::new(AtomicUsize::new(0));
    let begin = |case: &Case| {
        let (case, base, n_begun) = (case.clone(), lost.base().to_owned(), Arc::clone(&n_begun));
        tokio::spawn(async move { case.ask(&base, || _ = n_begun.fetch_add(1, Ordering::Relaxed)).await })
    };
    let answers: Vec<_> = cases.iter().map(begin).collect();
    let deadline = Instant::now() + PATIENCE;
    while n_begun.load(Ordering::Relaxed) < 6 {
        ensure!(Instant::now() < deadline, "they do not begin");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    lost.signal("KILL")?;
    let mut n_lost = 0;
    for ((answer, case), expected) in answers.into_iter().zip(&cases).zip(&expected) {
        let seen = tokio::time::timeout(PATIENCE, answer).await.context(case.name)??;
        n_lost += usize::from(seen.is_err());
        // By the same id and seed: `ask` sends both.
        let again = case.ask(other.base(), || {}).await.with_context(|| other.log())?;
        assert_eq!(&again, expected, "{}", case.name);
    }
    assert!(n_lost >= 6, "{n_lost} of {} answers were lost with the gateway", cases.len());
    Ok(())
}

#[tokio::test]
async fn whoever_lost_its_replica_waits_for_one_that_comes_also_if_nothing_was_said_yet() -> Result<()> {
    let mut fleet = Fleet::start(3, &["--stall", "1"]).await?;
    let cases: Vec<Case> = whole_cases(1, 250).into_iter().filter(|case| case.name == "a whole answer").collect();
    let expected = undisturbed(&fleet, &cases).await?;
    let (case, base) = (cases[0].clone(), fleet.gateway.base().to_owned());
    let answer = tokio::spawn(async move { case.ask(&base, || {}).await });
    fleet.answers(1).await?;
    // Nobody is left, and two of them do not say so by refusing connections.
    for blow in [Blow::Freeze, Blow::Kill, Blow::Freeze] {
        fleet.strike(0, blow)?;
    }
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!answer.is_finished(), "{:?}\n{}", answer.await??, fleet.gateway.log());
    fleet.add().await?;
    let seen = tokio::time::timeout(PATIENCE, answer).await??;
    assert_eq!(seen.with_context(|| fleet.gateway.log())?, expected[0]);
    Ok(())
}

/// A replica that is not one: it answers as it was told to, piece by piece, and then breaks off.
struct Fake {
    endpoint: ReplicaEndpoint,
    asked: Arc<Mutex<Vec<(HeaderMap, Bytes)>>>,
}

impl Fake {
    async fn start(name: &str, model: &'static str, status: u16, pieces: &'static [&'static str]) -> Result<Self> {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (kept, is_gone) = (Arc::clone(&asked), name == "first");
        let answer = move |headers: HeaderMap, body: Bytes| async move {
            let is_again = headers.contains_key("x-stoker-resume") && is_gone;
            kept.lock().unwrap().push((headers, body));
            let pieces = pieces.iter().map(|piece| Ok::<_, std::io::Error>(Bytes::from_static(piece.as_bytes())));
            let broken = std::iter::once(Err(std::io::Error::other("the replica is gone")));
            let stream = futures::stream::iter(pieces.chain(broken));
            // What was written is on its way before the connection breaks.
            let stream = stream.then(|piece| async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                piece
            });
            let head = Response::builder()
                .status(if is_again { 503 } else { status })
                .header("content-type", "text/event-stream");
            head.header("x-stoker-model", model).body(Body::from_stream(stream)).unwrap()
        };
        let routes = Router::new().route(CHAT, post(answer)).route("/healthz", get(|| async { "ok" }));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = ReplicaEndpoint {
            pod: name.into(),
            uid: name.into(),
            address: Some(listener.local_addr()?.to_string()),
            events: None,
            revision: "r".into(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: None,
        };
        // It ends with the test.
        tokio::spawn(async { axum::serve(listener, routes).await });
        Ok(Self { endpoint, asked })
    }

    fn n_asked(&self) -> usize {
        self.asked.lock().unwrap().len()
    }
}

/// A gateway before such replicas.
async fn before(fakes: &[Fake], flags: &[&str]) -> Result<(Teller, GatewayProcess)> {
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &[&["--resume", "2"], flags].concat())?;
    let replicas = fakes.iter().map(|fake| fake.endpoint.clone()).collect();
    teller.tell(vec![deployment("chat", &["ember"], replicas)]);
    gateway.knows("chat", EndpointState::Serving, fakes.len()).await?;
    Ok((teller, gateway))
}

const CHAT: &str = "/v1/chat/completions";

/// What a client has, and how often the only replica was asked, which says so often with this status and code why it has no answer.
async fn behind_one_that_says(times: usize, status: u16, code: &'static str) -> Result<(u16, String, usize)> {
    let n_asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&n_asked);
    let answer = move || async move {
        let (status, body) = match counted.fetch_add(1, Ordering::SeqCst) < times {
            true => (status, json!({"error": {"message": "it says why", "code": code}}).to_string()),
            false => (200, WHOLE.to_owned()),
        };
        let head = Response::builder().status(status).header("content-type", "application/json");
        head.body(Body::from(body)).unwrap()
    };
    let routes = Router::new().route(CHAT, post(answer)).route("/healthz", get(|| async { "ok" }));
    let mut fake = Fake::start("only", "aa-bb", 200, &[]).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    fake.endpoint.address = Some(listener.local_addr()?.to_string());
    // It ends with the test.
    tokio::spawn(async { axum::serve(listener, routes).await });
    let (_teller, gateway) = before(&[fake], &[]).await?;
    let asked = reqwest::Client::new().post(gateway.url(CHAT)).body(r#"{"model":"ember"}"#).send().await?;
    Ok((asked.status().as_u16(), asked.text().await?, n_asked.load(Ordering::SeqCst)))
}

const WHOLE: &str = r#"{"choices":[]}"#;

#[tokio::test]
async fn a_whole_answer_whose_replicas_end_one_after_the_other_is_no_refusal() -> Result<()> {
    assert_eq!(behind_one_that_says(5, 503, "replica_ended").await?, (200, WHOLE.to_owned(), 6));
    Ok(())
}

#[tokio::test]
async fn a_replica_that_starts_again_is_waited_for() -> Result<()> {
    for (status, code, times) in [(500, "engine_died", 1), (503, "engine_stopped", 2), (503, "model_loading", 2)] {
        let (status, said, n_asked) = behind_one_that_says(times, status, code).await?;
        assert_eq!((status, said.as_str(), n_asked), (200, WHOLE, times + 1), "{code}");
    }
    Ok(())
}

#[tokio::test]
async fn what_stops_engines_is_not_asked_for_without_end() -> Result<()> {
    let (status, said, n_asked) = behind_one_that_says(usize::MAX, 500, "engine_died").await?;
    assert_eq!((status, n_asked), (502, 3), "{said}");
    assert!(said.contains("its engine stopped"), "{said}");
    Ok(())
}

#[tokio::test]
async fn what_ends_replicas_does_not_go_through_all_of_them() -> Result<()> {
    let names = ["a", "b", "c", "d", "e"];
    let fake = |name| Fake::start(name, "aa-bb", 200, &["data: 0\n\n: stoker opened\n"]);
    let fakes = try_join_all(names.map(fake)).await?;
    let (_teller, gateway) = before(&fakes, &[]).await?;
    let answer =
        reqwest::Client::new().post(gateway.url(CHAT)).body(r#"{"model":"ember","stream":true}"#).send().await?;
    let said = answer.text().await?;
    assert!(said.contains("\"replica_lost\"") && said.ends_with("data: [DONE]\n\n"), "{said}");
    assert_eq!(fakes.iter().map(Fake::n_asked).sum::<usize>(), 3);
    Ok(())
}

#[tokio::test]
async fn whoever_goes_on_is_told_what_the_client_has_and_says_whether_it_is_the_same_model() -> Result<()> {
    let begun: &[&str] = &["data: 0\n\n: stoker opened\n", "data: a\n\n: stoker 0 4 17 5\ndata: half an eve"];
    let rest: &[&str] = &["data: b\n\n: stoker 0 4 6\n", "data: [DONE]\n\n: stoker done\n"];
    for (model, status, is_gone_on_with, exact) in [
        ("aa-bb", 200, true, "true"),
        ("aa-cc", 200, true, "false"),
        ("aa-", 200, true, "false"),
        ("aa-bb", 409, false, ""),
    ] {
        let first = Fake::start("first", "aa-bb", 200, begun).await?;
        let (teller, gateway) = before(std::slice::from_ref(&first), &[]).await?;
        let second = Fake::start("second", model, status, rest).await?;
        let body = r#"{"model":"ember","stream":true}"#;
        let mut answer = reqwest::Client::new().post(gateway.url(CHAT)).body(body).send().await?;
        let mut said = answer.chunk().await?.context("a beginning")?.to_vec();
        teller.tell(vec![deployment("chat", &["ember"], vec![second.endpoint.clone()])]);
        while let Some(chunk) = answer.chunk().await? {
            said.extend_from_slice(&chunk);
        }
        let said = String::from_utf8(said)?;
        assert!(second.n_asked() > 0, "{said}");
        let (headers, asked) = second.asked.lock().unwrap()[0].clone();
        let told = r#"{"vocabulary":"aa","choices":[{"tokens":[17,5],"cached":4,"ended":false}]}"#;
        assert_eq!(
            (asked, headers["x-stoker-resume"].to_str()?),
            (Bytes::from(format!("{told}{body}")), told.len().to_string().as_str())
        );
        assert_eq!(headers["x-stoker-drawn"], first.asked.lock().unwrap()[0].0["x-stoker-drawn"]);
        if is_gone_on_with {
            assert_eq!(said, "data: 0\n\ndata: a\n\ndata: b\n\ndata: [DONE]\n\n", "{model}");
            let metrics = gateway.metrics().await?;
            let line = format!("stoker_gateway_resumed_total{{deployment=\"chat.default\",exact=\"{exact}\"}} 1");
            assert!(metrics.contains(&line), "{line}\n{metrics}");
        } else {
            assert!(
                said.starts_with("data: 0\n\ndata: a\n\ndata: {") && said.contains("second answered 409"),
                "{said}"
            );
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_a_killed_replica_did_is_known_up_to_its_last_mark_and_no_further() -> Result<()> {
    const BEGUN: &[&str] =
        &["data: 0\n\n: stoker opened\n", "data: a\n\n: stoker 0 4/300000 17\ndata: b\n\n: stoker 0 4/900000"];
    const REST: &[&str] = &["data: b\n\n: stoker 0 4/200000 6\n", "data: [DONE]\n\n: stoker done\n"];
    let fakes = [Fake::start("first", "aa-bb", 200, BEGUN).await?, Fake::start("second", "aa-bb", 200, REST).await?];
    let (teller, gateway) = before(&fakes[..1], &[]).await?;
    let body = r#"{"model":"ember","stream":true}"#;
    let answer = reqwest::Client::new().post(gateway.url(CHAT)).body(body).send().await?;
    teller.tell(vec![deployment("chat", &["ember"], vec![fakes[1].endpoint.clone()])]);
    assert_eq!(answer.text().await?, "data: 0\n\ndata: a\n\ndata: b\n\ndata: [DONE]\n\n");
    let line = gateway.access_line(|line| line["resumes"] == 1).await?;
    assert_eq!(line["device_seconds"], 0.5, "{line}");
    Ok(())
}

#[tokio::test]
async fn a_stream_that_is_not_kept_ends_with_an_error_also_behind_what_came_with_it() -> Result<()> {
    const ALL_AT_ONCE: &[&str] = &["data: 0\n\n: stoker opened\ndata: a\n\n: stoker 0 4 17\n: stoker elsewhere\n"];
    let fake = Fake::start("a", "aa-bb", 200, ALL_AT_ONCE).await?;
    let (_teller, gateway) = before(std::slice::from_ref(&fake), &["--kept-bytes-max", "0"]).await?;
    let body = r#"{"model":"ember","stream":true}"#;
    let said = reqwest::Client::new().post(gateway.url(CHAT)).body(body).send().await?.text().await?;
    assert!(said.starts_with("data: 0\n\ndata: a\n\n") && said.contains("\"replica_lost\""), "{said}");
    Ok(())
}

/// Replicas that answer what `says` says of how often one was asked before, and then break off; they are asked for whole answers. And
/// what each time came to them.
async fn telling(count: usize, says: fn(usize) -> String) -> Result<(Vec<ReplicaEndpoint>, Arc<Mutex<Vec<Bytes>>>)> {
    let asked: Arc<Mutex<Vec<Bytes>>> = Arc::default();
    let mut replicas = Vec::new();
    for number in 0..count {
        let kept = Arc::clone(&asked);
        let answer = move |headers: HeaderMap, body: Bytes| async move {
            assert_eq!(headers["x-stoker-whole"], "marks");
            let said = says(kept.lock().unwrap().len());
            kept.lock().unwrap().push(body);
            let pieces = [Ok(said), Err(std::io::Error::other("the replica is gone"))];
            let stream = futures::stream::iter(pieces).then(|piece| async {
                tokio::time::sleep(Duration::from_millis(20)).await;
                piece
            });
            let head = Response::builder().header("content-type", "application/json").header("x-stoker-model", "aa-bb");
            head.body(Body::from_stream(stream)).unwrap()
        };
        let routes = Router::new().route(CHAT, post(answer)).route("/healthz", get(|| async { "ok" }));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        replicas.push(ReplicaEndpoint {
            pod: format!("pod-{number}"),
            uid: format!("uid-{number}"),
            address: Some(listener.local_addr()?.to_string()),
            events: None,
            revision: "r".into(),
            weight: WHOLE_WEIGHT,
            state: EndpointState::Serving,
            load: None,
        });
        // It ends with the test.
        tokio::spawn(async { axum::serve(listener, routes).await });
    }
    Ok((replicas, asked))
}

async fn asked_through_gateway(replicas: Vec<ReplicaEndpoint>) -> Result<(u16, String)> {
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &["--resume", "2"])?;
    let count = replicas.len();
    teller.tell(vec![deployment("chat", &["ember"], replicas)]);
    gateway.knows("chat", EndpointState::Serving, count).await?;
    let answer = reqwest::Client::new().post(gateway.url(CHAT)).body(r#"{"model":"ember"}"#).send().await?;
    assert_eq!(
        (answer.headers().get("x-stoker-model"), &answer.headers()["content-type"]),
        (None, &"application/json".parse()?)
    );
    Ok((answer.status().as_u16(), answer.text().await?))
}

#[tokio::test]
async fn a_whole_answer_goes_on_for_as_long_as_each_replica_tells_a_token_more() -> Result<()> {
    let says = |n_before: usize| match n_before {
        0..5 => format!(": stoker opened\n: stoker 0 4 {}\n{{\"half\":", 70 + n_before),
        _ => ": stoker 0 end\n{\"whole\":\": stoker done\"}\n: stoker done\n".to_owned(),
    };
    let (replicas, asked) = telling(6, says).await?;
    assert_eq!(asked_through_gateway(replicas).await?, (200, r#"{"whole":": stoker done"}"#.to_owned()));
    let told = asked.lock().unwrap().last().unwrap().clone();
    let expected =
        r#"{"vocabulary":"aa","choices":[{"tokens":[70,71,72,73,74],"cached":4,"ended":false}]}{"model":"ember"}"#;
    assert_eq!(String::from_utf8(told.to_vec())?, expected);
    Ok(())
}

#[tokio::test]
async fn a_whole_answer_ends_with_what_ends_replicas_and_with_its_own_error() -> Result<()> {
    let (replicas, asked) = telling(5, |_| ": stoker opened\n".to_owned()).await?;
    let (status, said) = asked_through_gateway(replicas).await?;
    assert!(status == 502 && said.contains("\"replica_lost\""), "{status} {said}");
    assert_eq!(asked.lock().unwrap().len(), 3);

    let says = |_| ": stoker opened\n: stoker 0 4 7\n{\"error\":1}\n: stoker failed 500\n".to_owned();
    let (replicas, asked) = telling(2, says).await?;
    assert_eq!(asked_through_gateway(replicas).await?, (500, r#"{"error":1}"#.to_owned()));
    assert_eq!(asked.lock().unwrap().len(), 1);
    Ok(())
}

#[tokio::test]
async fn a_whole_answer_has_the_bytes_that_it_has_without_marks() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    for case in whole_cases(1, 20) {
        let (path, body) = case.request();
        let ask = || {
            let drawn = format!("ff-{:032x}-7", 9);
            reqwest::Client::new().post(format!("{}{path}", agent.base())).header("x-stoker-drawn", drawn).json(body)
        };
        // The first one has the prompt cached for the others.
        ask().send().await?.text().await?;
        let plain = ask().send().await?.text().await?;
        let told = ask().header("x-stoker-whole", "marks").send().await?;
        let tells = told.headers().contains_key("x-stoker-model");
        assert_eq!(tells, !case.name.contains("log-probabilities"), "{}", case.name);
        let said: Vec<String> =
            told.text().await?.lines().filter(|line| !line.starts_with(": stoker")).map(str::to_owned).collect();
        let said: Vec<String> = said.iter().map(|line| undated(line)).collect();
        assert_eq!(said, [undated(&plain)], "{}", case.name);
    }
    Ok(())
}

/// Without the second in which it was complete, which two answers may not share.
fn undated(answer: &str) -> String {
    let mut parts = answer.split("\"completed_at\":");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start_matches(|digit: char| digit.is_ascii_digit()))
}

/// What a soak counts.
#[derive(Default)]
struct Tally {
    answers: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

/// Asks one request after the other until it is told to stop.
async fn client(base: String, pool: Arc<Vec<(Case, Said)>>, tally: Arc<Tally>, stop: Arc<AtomicBool>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while !stop.load(Ordering::Relaxed) {
        let (case, expected) = &pool[random.random_range(0..pool.len())];
        match case.ask(&base, || {}).await {
            Ok(seen) if &seen == expected => {}
            Ok(seen) => tally.wrong.lock().unwrap().push(format!("{}: {:?}\ninstead of {expected:?}", case.name, seen)),
            Err(error) => tally.wrong.lock().unwrap().push(format!("{}: {error:#}", case.name)),
        }
        tally.answers.fetch_add(1, Ordering::Relaxed);
    }
}

/// An answer that went on elsewhere.
struct Gap {
    /// What befell the replica that was lost with it; `None`: nothing, the gateway gave it up.
    blow: Option<Blow>,
    /// Milliseconds between the last that came of that replica and the next byte.
    millis: u64,
    /// Of these, those since the gateway knew.
    search_millis: u64,
}

/// What a gateway's log says of answers that went on; `struck` says what befell pods.
fn gaps(log: &str, struck: &BTreeMap<String, Blow>) -> Vec<Gap> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let gap = |line: Value| {
        let blow = struck.get(line["lost"].as_str()?).copied();
        Some(Gap { blow, millis: line["gap_ms"].as_u64()?, search_millis: line["search_ms"].as_u64()? })
    };
    lines.filter_map(gap).collect()
}

/// Two percentiles and the longest.
fn spread(mut millis: Vec<u64>) -> String {
    millis.sort_unstable();
    let at = |share: f64| millis.get((millis.len().saturating_sub(1) as f64 * share) as usize).copied().unwrap_or(0);
    format!("p50 {}, p99 {}, longest {} ms", at(0.5), at(0.99), at(1.0))
}

fn print_gaps(gaps: &[Gap]) {
    let of = |name: &str, of: &dyn Fn(&Gap) -> bool| {
        let some: Vec<&Gap> = gaps.iter().filter(|gap| of(gap)).collect();
        let all = spread(some.iter().map(|gap| gap.millis).collect());
        let search = spread(some.iter().map(|gap| gap.search_millis).collect());
        println!("gaps after {name}: {} of them, {all}; since the loss was known {search}", some.len());
    };
    of("all blows", &|_| true);
    for blow in Blow::ALL {
        of(&format!("{blow:?}"), &|gap| gap.blow == Some(blow));
    }
    of("no blow", &|gap| gap.blow.is_none());
}

#[tokio::test]
async fn whatever_befalls_replicas_clients_get_what_they_asked_for() -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<f64>()).transpose();
    let is_soak = number("STOKER_RESUME_MINUTES")?.is_some();
    let minutes = number("STOKER_RESUME_MINUTES")?.unwrap_or(0.05);
    let n_clients = number("STOKER_RESUME_CLIENTS")?.unwrap_or(6.0) as u64;
    let (seeds, max_tokens) = if is_soak { (0..4, 400) } else { (0..1, 100) };
    let mut fleet = Fleet::start(if is_soak { 4 } else { 3 }, &["--stall", "2"]).await?;
    let all: Vec<Case> =
        seeds.flat_map(|seed| [cases(seed, max_tokens), whole_cases(seed, max_tokens)].concat()).collect();
    let expected = undisturbed(&fleet, &all).await?;
    let pool: Arc<Vec<(Case, Said)>> = Arc::new(all.into_iter().zip(expected).collect());
    let (tally, stop) = (Arc::new(Tally::default()), Arc::new(AtomicBool::new(false)));
    let base = fleet.gateway.base().to_owned();
    let clients: Vec<_> = (0..n_clients)
        .map(|seed| tokio::spawn(client(base.clone(), Arc::clone(&pool), Arc::clone(&tally), Arc::clone(&stop), seed)))
        .collect();
    let (begun, mut random) =
        (Instant::now(), StdRng::seed_from_u64(number("STOKER_RESUME_SEED")?.unwrap_or(7.0) as u64));
    let (mut blows, mut struck) = (BTreeMap::<Blow, u32>::new(), BTreeMap::<String, Blow>::new());
    while begun.elapsed() < Duration::from_secs_f64(minutes * 60.0) {
        // A thousand in half an hour.
        tokio::time::sleep(Duration::from_millis(random.random_range(100..1000))).await;
        let blow = Blow::ALL[random.random_range(0..Blow::ALL.len())];
        *blows.entry(blow).or_default() += 1;
        if blow == Blow::Roll {
            fleet.add().await?;
            struck.insert(fleet.strike(0, blow)?, blow);
            fleet.tell().await?;
        } else {
            let place = random.random_range(0..fleet.agents().len());
            struck.insert(fleet.strike(place, blow)?, blow);
            // The gateway hears of it as late as an operator would say it.
            tokio::time::sleep(Duration::from_millis(random.random_range(0..1500))).await;
            fleet.add().await?;
        }
        if blows.values().sum::<u32>().is_multiple_of(20) {
            // Those that were frozen and drained have been left behind by now.
            tokio::time::sleep(Duration::from_secs(5)).await;
            fleet.bury();
        }
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        client.await?;
    }
    let resumed = [
        fleet.counted("stoker_gateway_resumed_total", "\"true\"").await?,
        fleet.counted("stoker_gateway_resumed_total", "\"false\"").await?,
    ];
    let wrong = tally.wrong.lock().unwrap().clone();
    let n_different = wrong.iter().filter(|wrong| wrong.contains("\ninstead of ")).count();
    println!(
        "{minutes} minutes, {n_clients} clients: {} answers, {} of them wrong, {n_different} of these whole and different; {blows:?}; {} streams went on elsewhere, {} of them unsure",
        tally.answers.load(Ordering::Relaxed),
        wrong.len(),
        resumed[0] + resumed[1],
        resumed[1].abs(),
    );
    print_gaps(&gaps(&fleet.gateway.log(), &struck));
    assert!(wrong.is_empty(), "{} wrong answers, the first:\n{}", wrong.len(), wrong[0]);
    Ok(())
}
