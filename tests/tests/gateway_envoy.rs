//! A real Envoy that asks a real gateway where requests go, before real agents: what its clients get is what the agents say, prefixes find
//! their replica, refusals are the gateway's, and whoever leaves is forgotten.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use rcgen::{CertifiedKey, generate_simple_self_signed};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint};
use stoker_tests::{
    agent::AgentProcess,
    envoy::{self, Envoy, Setup},
    gateway::{GatewayProcess, Teller, deployment, replica},
    skip::skip,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(60);

/// The program, or a reason to skip that was said.
async fn program(test: &str) -> Result<Option<PathBuf>> {
    match tokio::task::spawn_blocking(envoy::program).await? {
        Ok(program) => Ok(Some(program)),
        Err(error) => {
            skip(test, &format!("no Envoy: {error:#}"));
            Ok(None)
        }
    }
}

struct Rig {
    agents: Vec<AgentProcess>,
    teller: Teller,
    gateway: GatewayProcess,
    program: PathBuf,
}

impl Rig {
    async fn start(program: PathBuf, n_agents: usize, gateway_args: &[&str]) -> Result<Self> {
        // Loads are told once: after ten seconds they are not believed, and agents are sent everything.
        let agents = try_join_all((0..n_agents).map(|_| AgentProcess::ready(&["--max-waiting", "2000"]))).await?;
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), &[&["--endpoint-picker"], gateway_args].concat())?;
        let rig = Self { agents, teller, gateway, program };
        rig.tell(|_, _| {}).await?;
        rig.gateway.knows("chat", EndpointState::Serving, n_agents).await?;
        Ok(rig)
    }

    async fn tell(&self, change: impl Fn(usize, &mut ReplicaEndpoint)) -> Result<()> {
        self.teller.tell_chat(&self.agents, change).await
    }

    fn setup(&self) -> Result<Setup> {
        Ok(Setup::duplex(&self.gateway.address()?.to_string()))
    }

    async fn envoy(&self, setup: &Setup) -> Result<Envoy> {
        Envoy::start(&self.program, setup).await
    }
}

async fn ask(envoy: &Envoy, path: &str, body: &Value) -> Result<Response> {
    Ok(Client::new().post(envoy.url(path)).header("x-stoker-route", "explain").json(body).send().await?)
}

fn chat(content: &str, max_tokens: u32) -> Value {
    json!({"model": "ember", "temperature": 0, "seed": 7, "max_tokens": max_tokens,
           "messages": [{"role": "user", "content": content}]})
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// More tokens than any test waits for.
fn endless() -> Value {
    let mut body = streamed(chat("Once upon a time", 1900));
    body["ignore_eos"] = json!(true);
    body
}

fn replica_of(answer: &Response) -> Result<usize> {
    let route = answer.headers().get("x-stoker-route").context("the answer explains its route")?.to_str()?;
    let pod = route.split(' ').find_map(|term| term.strip_prefix("replica=pod-")).context("it names the replica")?;
    Ok(pod.parse()?)
}

/// What an answer says, streamed or whole.
fn told(answer: &str) -> Result<String> {
    let events = answer.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let mut text = String::new();
    for data in events.filter(|data| *data != "[DONE]") {
        let chunk: Value = serde_json::from_str(data)?;
        text += chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
    }
    if text.is_empty() {
        let whole: Value = serde_json::from_str(answer)?;
        whole["choices"][0]["message"]["content"].as_str().unwrap_or_default().clone_into(&mut text);
    }
    Ok(text)
}

#[tokio::test]
async fn answers_and_streams_pass_and_a_conversation_stays_where_its_beginning_is() -> Result<()> {
    let Some(program) = program("answers_and_streams_pass_and_a_conversation_stays_where_its_beginning_is").await?
    else {
        return Ok(());
    };
    let rig = Rig::start(program, 2, &[]).await?;
    let duplex = rig.setup()?;
    let whole = Setup { request_body: "BUFFERED", response_body: "NONE", by_note: true, ..duplex.clone() };
    let by_note = Setup { by_note: true, ..duplex.clone() };
    for (name, setup) in [("duplex", duplex), ("buffered", whole), ("note", by_note)] {
        let envoy = rig.envoy(&setup).await?;
        let mut used = [0, 0];
        for seed in 0..6 {
            let beginning = format!("You are {name} {seed}. {}", "Be brief and say what you know. ".repeat(24));
            let mut home = None;
            for turn in 0..3 {
                let said = format!("{beginning}{}", "And so on. ".repeat(turn));
                let body = if turn == 1 { streamed(chat(&said, 8)) } else { chat(&said, 8) };
                let answer = ask(&envoy, CHAT, &body).await?;
                ensure!(answer.status() == 200, "{name}: {}\n{}", answer.status(), envoy.log());
                let found = replica_of(&answer)?;
                assert_eq!(*home.get_or_insert(found), found, "{name}: conversation {seed}, turn {turn}");
                let text = answer.text().await?;
                let direct = Client::new().post(rig.agents[found].url(CHAT)).json(&body).send().await?.text().await?;
                assert_eq!(told(&text)?, told(&direct)?, "{name}: {text}");
                assert!(!text.contains(": stoker"), "{name}: marks are nobody's here: {text}");
            }
            used[home.unwrap()] += 1;
        }
        assert!(used.iter().all(|used| *used > 0), "{name}: all six on one replica: {used:?}");
        let long = chat(&"A long prompt. ".repeat(20_000), 1);
        let answer = ask(&envoy, CHAT, &long).await?;
        let direct = Client::new().post(rig.agents[0].url(CHAT)).json(&long).send().await?;
        assert_eq!(answer.status(), direct.status(), "{name}: 300 KB arrive as they are");
    }
    let is_counted = |line: &Value| line["completion_tokens"].as_u64() > Some(0) && line["ending"] == "whole";
    assert_eq!(rig.gateway.access_line(is_counted).await?["deployment"], "chat.default");
    assert!(!rig.gateway.log().contains("\"ending\":\"left\""), "{}", rig.gateway.log());
    rig.gateway.counts("requests_in_flight", 0).await
}

#[tokio::test]
async fn what_the_gateway_refuses_the_client_is_told() -> Result<()> {
    let Some(program) = program("what_the_gateway_refuses_the_client_is_told").await? else { return Ok(()) };
    let rig = Rig::start(program, 1, &["--hold", "1", "--body-bytes-max", "200000"]).await?;
    let envoy = rig.envoy(&rig.setup()?).await?;
    let post = async |body: String| {
        let answer = Client::new().post(envoy.url(CHAT)).body(body).send().await?;
        let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
        let text = answer.text().await?;
        let body: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        anyhow::Ok((status, headers, body["error"].clone()))
    };
    for (body, status, code) in [
        (r#"{"model": "gpt-7"}"#.to_owned(), 404, "model_not_found"),
        ("hello".to_owned(), 400, "invalid_json"),
        (chat(&"x".repeat(200_000), 1).to_string(), 413, "body_too_large"),
    ] {
        let (found, headers, error) = post(body).await?;
        assert_eq!((found, error["code"].as_str()), (status, Some(code)), "{error}");
        assert_eq!(headers["content-type"], "application/json");
    }
    let (.., error) = post(r#"{"model": "gpt-7"}"#.to_owned()).await?;
    assert!(error["message"].as_str().unwrap().ends_with("there is: chat, ember"), "{error}");
    let models = Client::new().get(envoy.url("/v1/models")).send().await?;
    assert_eq!(
        (models.status().as_u16(), models.json::<Value>().await?["data"][0]["id"].as_str()),
        (200, Some("ember"))
    );
    assert_eq!(Client::new().get(envoy.url("/metrics")).send().await?.status(), 404, "no replica's business is told");

    let nobody = Setup { subset: Some(vec!["10.9.9.9:8000".to_owned()]), ..rig.setup()? };
    let nobody = rig.envoy(&nobody).await?;
    let refused = ask(&nobody, CHAT, &chat("Hi", 1)).await?;
    assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].to_str()?), (503, "5"));
    let own = Setup { subset: Some(vec![rig.agents[0].base().replace("http://", "")]), ..rig.setup()? };
    assert_eq!(ask(&rig.envoy(&own).await?, CHAT, &chat("Hi", 1)).await?.status(), 200);

    rig.tell(|_, told| told.state = EndpointState::Starting).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    let (status, headers, error) = post(chat("Hi", 1).to_string()).await?;
    assert_eq!((status, error["code"].as_str()), (503, Some("model_loading")), "held for a second before");
    assert_eq!(headers["retry-after"], "5");
    Ok(())
}

#[tokio::test]
async fn a_request_that_is_held_goes_on_and_full_replicas_are_429() -> Result<()> {
    let Some(program) = program("a_request_that_is_held_goes_on_and_full_replicas_are_429").await? else {
        return Ok(());
    };
    let rig = Rig::start(program, 1, &["--hold", "20", "--line-max", "1"]).await?;
    let envoy = rig.envoy(&rig.setup()?).await?;
    rig.tell(|_, told| told.state = EndpointState::Starting).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    let (request, body) = (Client::new().post(envoy.url(CHAT)), chat("Hi", 1));
    let held = tokio::spawn(request.json(&body).send());
    rig.gateway.counts("held{deployment=\"chat.default\"}", 1).await?;
    let full = ask(&envoy, CHAT, &body).await?;
    assert_eq!(full.status(), 429);
    assert!(full.headers()["retry-after"].to_str()?.parse::<u32>()? > 0);
    assert_eq!(full.json::<Value>().await?["error"]["code"], "overloaded");
    rig.tell(|_, _| {}).await?;
    assert_eq!(held.await??.status(), 200);
    Ok(())
}

#[tokio::test]
async fn a_proxy_may_ask_over_tls() -> Result<()> {
    let Some(program) = program("a_proxy_may_ask_over_tls").await? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(vec!["localhost".to_owned()])?;
    let (certificate, key) = (folder.path().join("tls.crt"), folder.path().join("tls.key"));
    std::fs::write(&certificate, cert.pem())?;
    std::fs::write(&key, signing_key.serialize_pem())?;
    let agent = AgentProcess::ready(&[]).await?;
    let teller = Teller::start().await?;
    let files = ["--tls-certificate", certificate.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let gateway = GatewayProcess::start(teller.url(), &[&["--endpoint-picker"], &files[..]].concat())?;
    teller.tell(vec![deployment("chat", &["ember"], vec![replica("pod-0", &agent).await?])]);
    let setup = Setup { tls: true, ..Setup::duplex(&gateway.address()?.to_string()) };
    let envoy = Envoy::start(&program, &setup).await?;
    let begun = Instant::now();
    loop {
        let answer = ask(&envoy, CHAT, &chat("Hi", 1)).await?;
        if answer.status() == 200 {
            assert_eq!(replica_of(&answer)?, 0);
            break;
        }
        ensure!(begun.elapsed() < PATIENCE, "{}\n{}\n{}", answer.status(), envoy.log(), gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let plain = Envoy::start(&program, &Setup { tls: false, ..setup }).await?;
    assert_eq!(ask(&plain, CHAT, &chat("Hi", 1)).await?.status(), 500, "who asks in plain text is told nothing");
    Ok(())
}

#[tokio::test]
async fn who_leaves_in_the_middle_of_a_stream_has_no_place_any_more() -> Result<()> {
    let Some(program) = program("who_leaves_in_the_middle_of_a_stream_has_no_place_any_more").await? else {
        return Ok(());
    };
    let rig = Rig::start(program, 1, &[]).await?;
    let envoy = rig.envoy(&rig.setup()?).await?;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = ask(&envoy, CHAT, &endless()).await?;
        assert!(stream.chunk().await?.is_some());
        streams.push(stream);
    }
    rig.gateway.counts("requests_in_flight", 3).await?;
    rig.agents[0].wait_until("three run", |load| load.running == 3).await?;
    streams.truncate(1);
    rig.gateway.counts("requests_in_flight", 1).await?;
    rig.agents[0].wait_until("one runs", |load| load.running == 1).await?;
    drop(streams);
    rig.gateway.access_line(|line| line["ending"] == "left" && line["status"] == 200).await?;
    rig.gateway.counts("requests_in_flight", 0).await
}

#[tokio::test]
async fn a_replica_that_is_gone_is_left_alone_before_the_operator_says_so() -> Result<()> {
    let Some(program) = program("a_replica_that_is_gone_is_left_alone_before_the_operator_says_so").await? else {
        return Ok(());
    };
    let mut rig = Rig::start(program, 2, &[]).await?;
    let envoy = rig.envoy(&rig.setup()?).await?;
    rig.agents[0].kill()?;
    let begun = Instant::now();
    let mut in_a_row = 0;
    while in_a_row < 10 {
        let answer = ask(&envoy, CHAT, &chat(&format!("{in_a_row} of {}", begun.elapsed().as_nanos()), 1)).await?;
        in_a_row = if answer.status() == 200 { in_a_row + 1 } else { 0 };
        ensure!(begun.elapsed() < PATIENCE, "it is asked again and again");
    }
    // How often it was asked before is chance; that it says nothing any more is known.
    rig.gateway.counts("replicas_heard{deployment=\"chat.default\"}", 1).await?;
    rig.gateway.counts("replicas{deployment=\"chat.default\",state=\"serving\"}", 2).await?;
    // Where there are no others they are asked, and found broken.
    rig.agents[1].kill()?;
    let asked = async {
        loop {
            _ = ask(&envoy, CHAT, &chat("Who is there?", 1)).await;
        }
    };
    tokio::select! {
        found = rig.gateway.counts("replicas_broken{deployment=\"chat.default\"}", 2) => found,
        () = asked => unreachable!("it asks for ever"),
    }
}

#[tokio::test]
async fn trailers_pass_and_a_thousand_requests_at_once_are_answered() -> Result<()> {
    let Some(program) = program("trailers_pass_and_a_thousand_requests_at_once_are_answered").await? else {
        return Ok(());
    };
    // All are answered, however slow the machine is: nobody in line is to be told that it would take too long.
    let rig = Rig::start(program, 2, &["--line-max", "2000", "--hold", "300"]).await?;
    let envoy = rig.envoy(&rig.setup()?).await?;
    let mut connection = TcpStream::connect(envoy.url("").trim_start_matches("http://")).await?;
    let body = chat("What is 12 + 30?", 20).to_string();
    let (first, rest) = body.split_at(20);
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n\
         {:x}\r\n{first}\r\n{:x}\r\n{rest}\r\n0\r\nx-sum: 7\r\n\r\n",
        first.len(),
        rest.len(),
    );
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, connection.read_to_string(&mut answer)).await??;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("42"), "{answer}");

    let http = Client::builder().pool_max_idle_per_host(0).build()?;
    let statuses = try_join_all((0..1000).map(async |number: usize| {
        let request = http.post(envoy.url(CHAT)).json(&streamed(chat(&format!("Number {number}"), 1)));
        let answer = request.send().await?;
        anyhow::Ok((answer.status().as_u16(), answer.text().await?))
    }))
    .await?;
    let is_whole = |(status, text): &&(u16, String)| *status == 200 && text.contains("[DONE]");
    let cut: Vec<_> = statuses.iter().filter(|answer| !is_whole(answer)).collect();
    assert!(cut.is_empty(), "{} of {} were not: {:?}", cut.len(), statuses.len(), cut[0]);
    rig.gateway.counts("requests_in_flight", 0).await
}
