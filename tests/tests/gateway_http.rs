//! A real gateway process before real agents that serve ember: the same bytes as without it, prefixes that find their replica, replicas
//! that die, drain and refuse, input at its worst, and its own end.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use axum::{Json, Router, routing::post};
use futures::{StreamExt, future::try_join_all, stream::FuturesUnordered};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint};
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    time::timeout,
};

const CHAT: &str = "/v1/chat/completions";
/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// Agents behind a gateway, as `pod-0.default` and so on of the deployment `chat`.
struct Rig {
    agents: Vec<AgentProcess>,
    teller: Teller,
    gateway: GatewayProcess,
}

impl Rig {
    async fn start(n_agents: usize, agent_args: &[&str], gateway_args: &[&str]) -> Result<Self> {
        let agents = try_join_all((0..n_agents).map(|_| AgentProcess::ready(agent_args))).await?;
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), gateway_args)?;
        let rig = Self { agents, teller, gateway };
        rig.tell(|_, _| {}).await?;
        rig.gateway.knows("chat", EndpointState::Serving, n_agents).await?;
        Ok(rig)
    }

    /// Tells how the agents are, after a change.
    async fn tell(&self, change: impl Fn(usize, &mut ReplicaEndpoint)) -> Result<()> {
        self.teller.tell_chat(&self.agents, change).await
    }

    fn ask(&self, path: &str, body: &Value) -> RequestBuilder {
        Client::new().post(self.gateway.url(path)).header("x-stoker-route", "explain").json(body)
    }

    /// A session that goes to this agent while all are idle.
    async fn session_of(&self, agent: usize) -> Result<String> {
        for number in 0..1000 {
            let session = format!("session-{number}");
            let answer = self.ask(CHAT, &chat("Hi", 1, &session)).send().await?;
            if replica_of(&answer)? == agent {
                return Ok(session);
            }
        }
        anyhow::bail!("no session goes to agent {agent}")
    }
}

fn chat(content: &str, max_tokens: u32, session: &str) -> Value {
    json!({"model": "ember", "temperature": 0, "seed": 7, "max_tokens": max_tokens, "user": session,
           "messages": [{"role": "user", "content": content}]})
}

fn streamed(body: Value) -> Value {
    let mut body = body;
    body["stream"] = json!(true);
    body
}

/// More tokens than any test waits for.
fn endless(session: &str) -> Value {
    let mut body = streamed(chat("Once upon a time", 1900, session));
    body["ignore_eos"] = json!(true);
    body
}

/// Which agent answered, as the answer says.
fn replica_of(answer: &Response) -> Result<usize> {
    let route = answer.headers().get("x-stoker-route").context("the answer explains its route")?.to_str()?;
    let pod = route.split(' ').find_map(|term| term.strip_prefix("replica=pod-")).context("it names the replica")?;
    Ok(pod.parse()?)
}

async fn text_of(response: Response) -> Result<String> {
    let mut text = Vec::new();
    let mut chunks = response.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        text.extend_from_slice(&chunk?);
    }
    Ok(String::from_utf8(text)?)
}

/// An answer without what differs between any two: its id and the second that it was made in.
fn without_ids(answer: &str) -> String {
    let mut rest = answer;
    let mut kept = String::new();
    for (name, ends) in std::iter::repeat([("\"id\":\"", '"'), ("\"created\":", ',')]).flatten() {
        let Some(at) = rest.find(name) else { break };
        let (before, after) = rest.split_at(at + name.len());
        kept.push_str(before);
        rest = &after[after.find(ends).unwrap()..];
    }
    kept + rest
}

/// What a streamed chat answer says.
fn told(stream: &str) -> Result<String> {
    let events = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    events
        .map(|data| {
            let chunk: Value = serde_json::from_str(data)?;
            Ok(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned())
        })
        .collect()
}

#[tokio::test]
async fn answers_are_those_of_the_agent_byte_by_byte() -> Result<()> {
    let rig = Rig::start(1, &[], &[]).await?;
    let (agent, gateway) = (rig.agents[0].base().to_owned(), rig.gateway.base().to_owned());
    let mut with_usage = streamed(chat("What is 12 + 30?", 30, "s"));
    with_usage["stream_options"] = json!({"include_usage": true});
    let prompt = json!({"model": "ember", "prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "stream": true});
    let message = json!({"model": "ember", "max_tokens": 20, "stream": true, "messages": [{"role": "user", "content": "Hello!"}]});
    for (path, body) in [
        (CHAT, chat("What is 12 + 30?", 30, "s")),
        (CHAT, with_usage),
        ("/v1/completions", prompt),
        ("/v1/messages", message),
        (CHAT, json!({"model": "ember", "messages": [{"role": "user", "content": 7}]})),
        ("/tokenize", json!({"model": "ember", "prompt": "Grüße, 世界!"})),
        ("/v1/embeddings", json!({"model": "ember", "input": ["Grüße, 世界!", "Hello"]})),
        ("/v1/embeddings", json!({"model": "ember", "input": []})),
        ("/v1/rerank", json!({"model": "ember", "query": "Who?", "documents": ["I", "you"]})),
        ("/score", json!({"model": "ember", "text_1": "Who?", "text_2": "I", "top_n": 1})),
    ] {
        let ask = async |base: &str| {
            let response = Client::new().post(format!("{base}{path}")).json(&body).send().await?;
            let (status, kind) = (response.status(), response.headers()["content-type"].clone());
            anyhow::Ok((status, kind, text_of(response).await?))
        };
        let _warm = ask(&agent).await?;
        let (direct, through) = (ask(&agent).await?, ask(&gateway).await?);
        assert_eq!((direct.0, &direct.1), (through.0, &through.1), "{path} {body}");
        let [direct, through] = [direct.2, through.2].map(|text| without_ids(&text));
        let same = direct == through || path == "/v1/messages" && direct.len() == through.len();
        assert!(same, "{path} {body}\n{direct}\n{through}");
    }

    let ids = [("x-request-id", "mine"), ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")];
    let ask = ids.iter().fold(rig.ask(CHAT, &chat("Hi", 1, "s")), |ask, (name, value)| ask.header(*name, *value));
    assert_eq!(ask.send().await?.headers()["x-request-id"], "mine");
    let line = rig.gateway.access_line(|line| line["request_id"] == "mine").await?;
    assert_eq!((&line["status"], &line["ending"]), (&json!(200), &json!("whole")));
    assert_eq!(line["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
    assert_eq!(line["deployment"], "chat.default");
    Ok(())
}

/// An address that takes spans, and what it was sent, with the service that sent it.
async fn collector() -> Result<(String, UnboundedReceiver<(String, Value)>)> {
    let (sent, spans) = unbounded_channel();
    let take = move |Json(message): Json<Value>| async move {
        let resource = &message["resourceSpans"][0];
        let service = resource["resource"]["attributes"][0]["value"]["stringValue"].as_str().unwrap().to_owned();
        for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
            sent.send((service.clone(), span.clone())).unwrap();
        }
        Json(json!({}))
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    // It ends with the test.
    tokio::spawn(async { axum::serve(listener, Router::new().route("/v1/traces", post(take))).await });
    Ok((url, spans))
}

#[tokio::test]
async fn a_request_is_a_span_of_its_trace_and_what_a_replica_does_for_it_is_a_part_of_that() -> Result<()> {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let (url, mut spans) = collector().await?;
    let traced = ["--otlp-endpoint", url.as_str()];
    let rig = Rig::start(1, &traced, &traced).await?;
    for flags in ["00", "01"] {
        let parent = format!("00-{TRACE}-00f067aa0ba902b7-{flags}");
        let ask = rig.ask(CHAT, &streamed(chat("Hi", 3, "s"))).header("traceparent", parent);
        text_of(ask.send().await?.error_for_status()?).await?;
    }
    // Three of the second request, and nothing of the first: its caller does not sample it.
    let mut found = Vec::new();
    while found.len() < 3 {
        found.push(timeout(PATIENCE, spans.recv()).await?.context("a span")?);
    }
    let of = |service: &str, kind: u32| {
        let mut all = found.iter().filter(|(from, span)| from == service && span["kind"] == kind);
        all.next().map(|(_, span)| span.clone()).with_context(|| format!("{service}, {kind} in {found:?}"))
    };
    let (gateway, agent) = (of("stoker-gateway", 2)?, of("stoker-agent", 2)?);
    assert!([&gateway, &agent].iter().all(|span| span["traceId"] == TRACE), "{gateway} {agent}");
    assert_eq!((&gateway["parentSpanId"], &agent["parentSpanId"]), (&json!("00f067aa0ba902b7"), &gateway["spanId"]));
    assert_eq!(of("stoker-agent", 1)?["parentSpanId"], agent["spanId"]);
    let known = |key: &str| {
        let attributes = gateway["attributes"].as_array().unwrap();
        attributes.iter().find(|attribute| attribute["key"] == key).map(|attribute| attribute["value"].clone())
    };
    assert_eq!(known("stoker.deployment"), Some(json!({"stringValue": "chat.default"})));
    assert_eq!(known("stoker.pod"), Some(json!({"stringValue": "pod-0"})));
    assert_eq!(known("http.response.status_code"), Some(json!({"intValue": "200"})));
    assert_eq!(known("stoker.ending"), Some(json!({"stringValue": "whole"})));
    assert!(gateway.get("status").is_none(), "{gateway}");
    Ok(())
}

#[tokio::test]
async fn a_conversation_stays_where_its_beginning_is_and_others_go_elsewhere() -> Result<()> {
    let rig = Rig::start(2, &[], &[]).await?;
    let talk = |seed: usize, turns: usize| {
        let system = format!("You are assistant number {seed}. {}", "Be brief and say what you know. ".repeat(24));
        let mut messages = vec![json!({"role": "system", "content": system})];
        for turn in 0..turns {
            messages.push(json!({"role": "user", "content": format!("This is question number {turn} of mine.")}));
            messages.push(json!({"role": "assistant", "content": "I do not know."}));
        }
        messages.push(json!({"role": "user", "content": "And now?"}));
        json!({"model": "ember", "temperature": 0, "max_tokens": 2, "messages": messages})
    };
    let mut used = [0, 0];
    for seed in 0..8 {
        let mut home = None;
        for turns in 0..3 {
            let response = rig.ask(CHAT, &talk(seed, turns)).send().await?;
            let found = replica_of(&response)?;
            let answer: Value = response.json().await?;
            let usage = &answer["usage"];
            let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
            match home {
                None => home = Some(found),
                Some(home) => {
                    assert_eq!(found, home, "conversation {seed}, turn {turns}");
                    let prompt = usage["prompt_tokens"].as_u64().unwrap();
                    assert!(cached * 2 > prompt, "the agent itself had {cached} of {prompt} tokens");
                }
            }
        }
        used[home.unwrap()] += 1;
    }
    assert!(used.iter().all(|used| *used > 0), "all eight on one replica: {used:?}");
    Ok(())
}

#[tokio::test]
async fn a_replica_killed_before_it_answers_is_replaced_and_nobody_notices() -> Result<()> {
    let mut rig = Rig::start(2, &[], &[]).await?;
    let session = rig.session_of(0).await?;
    // Frozen, it takes the request and says nothing; then it is gone.
    rig.agents[0].signal("STOP")?;
    let asked = tokio::spawn(rig.ask(CHAT, &streamed(chat("What is 12 + 30?", 20, &session))).send());
    in_flight(&rig, 1).await?;
    tokio::time::sleep(Duration::from_millis(200)).await;
    rig.agents[0].kill()?;
    let answer = asked.await??;
    assert_eq!((answer.status().as_u16(), replica_of(&answer)?), (200, 1));
    assert_eq!(told(&text_of(answer).await?)?, "42");
    // Nobody listens there any more: soon it is not even tried.
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = rig.ask(CHAT, &chat("Hi", 1, &session)).send().await?;
        assert_eq!((answer.status().as_u16(), replica_of(&answer)?), (200, 1));
        if answer.headers()["x-stoker-route"].to_str()?.ends_with("attempts=1") {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "it is tried every time");
    }
}

/// Waits until the gateway answers so many requests.
async fn in_flight(rig: &Rig, count: usize) -> Result<()> {
    let line = format!("stoker_gateway_requests_in_flight {count}");
    let deadline = Instant::now() + PATIENCE;
    loop {
        let metrics = rig.gateway.metrics().await?;
        if metrics.lines().any(|found| found == line) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "no {line} in\n{metrics}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_stream_that_nobody_can_go_on_with_ends_with_a_named_error() -> Result<()> {
    let mut rig = Rig::start(1, &[], &["--resume", "0.5"]).await?;
    let mut answer = rig.ask(CHAT, &endless("s")).send().await?;
    let first = answer.chunk().await?.context("a first event")?;
    assert!(first.starts_with(b"data: {"));
    rig.agents[0].kill()?;
    let whole = String::from_utf8(first.to_vec())? + &text_of(answer).await?;
    let events: Vec<&str> = whole.trim_end().split("\n\n").collect();
    let [before @ .., error, done] = events.as_slice() else { panic!("{whole}") };
    assert_eq!(*done, "data: [DONE]");
    let error: Value = serde_json::from_str(error.strip_prefix("data: ").unwrap())?;
    assert_eq!(error["error"]["code"], "replica_lost", "{error}");
    for event in before {
        let _whole: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap())?;
    }
    in_flight(&rig, 0).await?;
    rig.gateway.access_line(|line| line["ending"] == "cut").await?;
    let refused = rig.ask(CHAT, &chat("Hi", 1, "s")).send().await?;
    assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].to_str()?), (503, "1"));
    assert_eq!(refused.json::<Value>().await?["error"]["code"], "replica_unreachable");
    Ok(())
}

#[tokio::test]
async fn a_draining_replica_finishes_its_stream_and_gets_nothing_new() -> Result<()> {
    let rig = Rig::start(2, &[], &[]).await?;
    let session = rig.session_of(0).await?;
    let mut stream = rig.ask(CHAT, &endless(&session)).send().await?;
    assert_eq!(replica_of(&stream)?, 0);
    stream.chunk().await?;
    rig.tell(|at, told| told.state = if at == 0 { EndpointState::Draining } else { told.state }).await?;
    rig.gateway.knows("chat", EndpointState::Draining, 1).await?;
    for _ in 0..10 {
        assert_eq!(replica_of(&rig.ask(CHAT, &chat("Hi", 1, &session)).send().await?)?, 1);
    }
    assert!(stream.chunk().await?.is_some(), "what it began goes on");
    // Told too late: the agent itself refuses, and another one is asked.
    rig.tell(|_, _| {}).await?;
    rig.gateway.knows("chat", EndpointState::Serving, 2).await?;
    rig.agents[0].terminate()?;
    rig.agents[0].wait_until("withdrawn", |load| EndpointState::of(load.phase) == EndpointState::Draining).await?;
    for _ in 0..20 {
        assert_eq!(rig.ask(CHAT, &chat("Hi", 1, &session)).send().await?.status(), 200);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

#[tokio::test]
async fn where_all_are_full_the_client_learns_when_to_come_back() -> Result<()> {
    let rig = Rig::start(2, &["--max-num-seqs", "1", "--max-waiting", "1"], &[]).await?;
    // Two run and two wait.
    let ask = |at: usize| rig.ask(CHAT, &endless(&format!("s{at}"))).send();
    let mut answers: FuturesUnordered<_> = (0..8).map(ask).collect();
    let mut open = Vec::new();
    let refused = loop {
        let answer = timeout(PATIENCE, answers.next()).await?.context("somebody is refused")??;
        match answer.status().as_u16() {
            200 => open.push(answer),
            _ => break answer,
        }
    };
    assert_eq!(refused.status(), 429);
    let seconds: u64 = refused.headers()["retry-after"].to_str()?.parse()?;
    assert!(seconds > 0);
    assert_eq!(refused.json::<Value>().await?["error"]["code"], "queue_full");
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused_by_name() -> Result<()> {
    let rig = Rig::start(1, &[], &["--hold", "1"]).await?;
    let post = async |body: &'static str| {
        let answer = Client::new().post(rig.gateway.url(CHAT)).body(body).send().await?;
        let status = answer.status().as_u16();
        anyhow::Ok((status, answer.json::<Value>().await?["error"].clone()))
    };
    for (body, status, code, word) in [
        (r#"{"model": "gpt-7"}"#, 404, "model_not_found", "chat, ember"),
        (r#"{"model": "ember","#, 400, "invalid_json", "byte"),
        ("hello", 400, "invalid_json", "byte 0"),
        (r#"{"model": "ember", "model": "gpt-7"}"#, 400, "duplicate_parameter", "twice"),
        (r#"{"model": 7}"#, 400, "invalid_type", "string"),
        (r#"{"model": "ember", "messages": [{]}"#, 400, "invalid_json", ""),
        (r#"{"model": "ember", "messages": []}"#, 400, "empty_array", ""),
    ] {
        let (got, error) = post(body).await?;
        let message = error["message"].as_str().unwrap_or_default();
        assert!(got == status && error["code"] == code && message.contains(word), "{body}: {got} {error}");
    }
    let get = async |path: &str| anyhow::Ok(reqwest::get(rig.gateway.url(path)).await?.status().as_u16());
    assert_eq!([get("/v1/nothing").await?, get(CHAT).await?, get("/v1/load").await?], [404, 405, 404]);
    assert_eq!([get("/v1/models/ember").await?, get("/v1/models/x").await?, get("/healthz").await?], [200, 404, 200]);
    let models: Value = reqwest::get(rig.gateway.url("/v1/models")).await?.json().await?;
    assert_eq!([&models["data"][0]["id"], &models["data"][1]["id"]], ["chat", "ember"]);

    for (replicas, code) in [
        (vec![], "scaled_to_zero"),
        (
            vec![ReplicaEndpoint { state: EndpointState::Starting, ..replica("pod-0", &rig.agents[0]).await? }],
            "model_loading",
        ),
        (
            vec![ReplicaEndpoint { state: EndpointState::Unready, ..replica("pod-0", &rig.agents[0]).await? }],
            "no_ready_replicas",
        ),
    ] {
        let state = replicas.first().map_or(EndpointState::Serving, |replica| replica.state);
        let count = replicas.len();
        rig.teller.tell(vec![deployment("chat", &["ember"], replicas)]);
        rig.gateway.knows("chat", state, count).await?;
        let answer = rig.ask(CHAT, &chat("Hi", 1, "s")).send().await?;
        assert_eq!((answer.status().as_u16(), answer.headers().contains_key("retry-after")), (503, true));
        assert_eq!(answer.json::<Value>().await?["error"]["code"], code);
    }
    Ok(())
}

#[tokio::test]
async fn a_request_that_comes_a_moment_before_the_news_of_a_replica_is_answered() -> Result<()> {
    let rig = Rig::start(1, &[], &[]).await?;
    rig.tell(|_, told| told.state = EndpointState::Starting).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    let body = chat("Hi", 1, "s");
    let asking = tokio::spawn(rig.ask(CHAT, &body).send());
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!asking.is_finished(), "nobody is ready, and the answer does not wait");
    rig.tell(|_, _| {}).await?;
    assert_eq!(timeout(PATIENCE, asking).await???.status(), 200);
    Ok(())
}

#[tokio::test]
async fn a_response_that_one_replica_keeps_is_found_and_followed() -> Result<()> {
    let rig = Rig::start(3, &[], &[]).await?;
    let ask = async |session: usize, more: Value| {
        let mut body = json!({"model": "ember", "input": "What is 12 + 30?", "temperature": 0, "store": true, "user": format!("u{session}")});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = rig.ask("/v1/responses", &body).send().await?;
        anyhow::Ok((answer.status().as_u16(), replica_of(&answer).ok(), answer.json::<Value>().await?))
    };
    let mut homes = [false; 3];
    for session in 0..6 {
        let (status, home, first) = ask(session, json!({})).await?;
        assert_eq!(status, 200, "{first}");
        homes[home.unwrap()] = true;
        // Somebody else's next request is anybody's, but for what it follows.
        let (status, next, second) = ask(session + 10, json!({"previous_response_id": first["id"]})).await?;
        assert_eq!((status, next), (200, home), "{second}");
        let url = rig.gateway.url(&format!("/v1/responses/{}", first["id"].as_str().unwrap()));
        assert_eq!(reqwest::get(&url).await?.json::<Value>().await?["id"], first["id"]);
        assert_eq!(Client::new().delete(&url).send().await?.status(), 200);
        assert_eq!(reqwest::get(&url).await?.status(), 404);
    }
    assert!(homes.iter().filter(|home| **home).count() > 1, "all on one replica: {homes:?}");
    let (status, _, unknown) = ask(0, json!({"previous_response_id": "resp_none"})).await?;
    assert_eq!((status, &unknown["error"]["code"]), (404, &json!("response_not_found")));
    Ok(())
}

#[tokio::test]
async fn hosts_tell_deployments_apart_that_serve_one_name() -> Result<()> {
    let rig = Rig::start(2, &[], &[]).await?;
    let told = [replica("pod-0", &rig.agents[0]).await?, replica("pod-1", &rig.agents[1]).await?];
    let [first, second] = told.map(|replica| vec![replica]);
    rig.teller.tell(vec![deployment("chat", &["ember"], first), deployment("code", &["ember"], second)]);
    rig.gateway.knows("code", EndpointState::Serving, 1).await?;
    for (host, replica) in [("chat.default", 0), ("code.default.svc.cluster.local:8000", 1)] {
        let answer = rig.ask(CHAT, &chat("Hi", 1, "s")).header("host", host).send().await?;
        assert_eq!(replica_of(&answer)?, replica);
    }
    let answer = rig.ask(CHAT, &chat("Hi", 1, "s")).send().await?;
    assert_eq!(answer.status(), 400);
    let error = answer.json::<Value>().await?["error"].clone();
    assert!(
        error["code"] == "ambiguous_model" && error["message"].to_string().contains("chat.default and code.default")
    );
    Ok(())
}

/// Sends bytes as they are; all that comes back until the connection is closed, says nothing for `patience` or has nothing to add.
async fn raw(gateway: &GatewayProcess, request: &[u8], mut patience: Duration) -> Result<String> {
    let mut connection = TcpStream::connect(gateway.base().trim_start_matches("http://")).await?;
    connection.write_all(request).await?;
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(Ok(count @ 1..)) = timeout(patience, connection.read(&mut buffer)).await {
        answer.extend_from_slice(&buffer[..count]);
        patience = Duration::from_secs(1);
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[tokio::test]
async fn requests_within_requests_and_bodies_without_end_are_refused() -> Result<()> {
    let rig = Rig::start(1, &[], &[]).await?;
    let inner = r#"{"model":"ember","messages":[{"role":"user","content":"Hi"}],"max_tokens":1}"#;
    let hidden = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{inner}", inner.len());
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\n");
    // Each would be one request to one reader and two to another.
    for (name, headers, body) in [
        (
            "both lengths",
            format!("content-length: {}\r\ntransfer-encoding: chunked\r\n", inner.len()),
            format!("0\r\n\r\n{hidden}"),
        ),
        ("two lengths", format!("content-length: 2\r\ncontent-length: {}\r\n", inner.len()), format!("{{}}{hidden}")),
        ("a length that is none", "content-length: +2\r\n".to_owned(), format!("{{}}{hidden}")),
        ("a list of lengths", "content-length: 2, 90\r\n".to_owned(), format!("{{}}{hidden}")),
        ("not chunked last", "transfer-encoding: chunked, identity\r\n".to_owned(), format!("0\r\n\r\n{hidden}")),
        ("an unknown coding", "transfer-encoding: xchunked\r\n".to_owned(), format!("0\r\n\r\n{hidden}")),
        ("a space before the colon", "content-length : 2\r\n".to_owned(), format!("{{}}{hidden}")),
        ("a folded header", "content-length: 2\r\n transfer-encoding: chunked\r\n".to_owned(), format!("{{}}{hidden}")),
        (
            "a chunk size that is none",
            "transfer-encoding: chunked\r\n".to_owned(),
            format!("0x2\r\n{{}}\r\n0\r\n\r\n{hidden}"),
        ),
    ] {
        let answer = raw(&rig.gateway, format!("{head}{headers}\r\n{body}").as_bytes(), Duration::from_secs(3)).await?;
        let statuses: Vec<&str> = answer.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
        assert!(statuses.is_empty() || statuses == ["400"], "{name}: {statuses:?}\n{answer}");
    }
    assert_eq!(rig.agents[0].load().await?.finished, 0, "no hidden request came through");

    let huge = raw(&rig.gateway, format!("{head}content-length: 1000000000\r\n\r\n{{").as_bytes(), PATIENCE).await?;
    assert!(huge.starts_with("HTTP/1.1 413 "), "long before its last byte: {huge}");
    let many: String = (0..500).map(|at| format!("x-{at}: y\r\n")).collect();
    let bomb = raw(&rig.gateway, format!("{head}{many}\r\n").as_bytes(), PATIENCE).await?;
    assert!(bomb.starts_with("HTTP/1.1 431 "), "{bomb}");

    // Who is slow holds up nobody.
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut connection = TcpStream::connect(rig.gateway.base().trim_start_matches("http://")).await?;
        connection.write_all(format!("{head}content-length: 90\r\n\r\n{{").as_bytes()).await?;
        slow.push(connection);
    }
    let answer = raw(&rig.gateway, hidden.as_bytes(), PATIENCE).await?;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    Ok(())
}

#[tokio::test]
async fn it_goes_on_without_the_operator_and_ends_when_its_streams_have() -> Result<()> {
    let mut rig = Rig::start(1, &[], &["--withdraw", "1"]).await?;
    let nobody = Teller::start().await?;
    let bare = GatewayProcess::start(nobody.url(), &[])?;
    drop(std::mem::replace(&mut rig.teller, Teller::start().await?));
    assert_eq!(rig.ask(CHAT, &chat("Hi", 1, "s")).send().await?.status(), 200);
    let empty = Client::new().post(bare.url(CHAT)).body("{\"model\":\"x\"}").send().await?;
    assert!([404, 503].contains(&empty.status().as_u16()));

    let mut body = streamed(chat("Once upon a time", 60, "s"));
    body["ignore_eos"] = json!(true);
    let mut stream = rig.ask(CHAT, &body).send().await?;
    stream.chunk().await?;
    rig.gateway.signal("TERM")?;
    let deadline = Instant::now() + PATIENCE;
    while reqwest::get(rig.gateway.url("/readyz")).await.is_ok_and(|ready| ready.status() == 200) {
        ensure!(Instant::now() < deadline, "it stays ready");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(text_of(stream).await?.ends_with("data: [DONE]\n\n"), "the stream is whole");
    let status = rig.gateway.ended().await?;
    assert_eq!(status.code(), Some(0), "{}", rig.gateway.log());
    Ok(())
}
