//! A real gateway process as an endpoint picker before real agents: what a proxy that speaks Envoy's external processing is told, in every
//! way in which it may send a request, and that what it is told is what the gateway itself would have done.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use reqwest::Client;
use serde_json::{Value, json};
use stoker_crds::endpoints::{EndpointState, ReplicaEndpoint};
use stoker_gateway::picker::messages::{BodySendMode, HttpTrailers, Said, ServingStatus, Told};
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
    picker::{Destination, Picker, Refusal, Request, head, part},
};

const CHAT: &str = "/v1/chat/completions";
/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);
const SWITCH: &str = "--endpoint-picker";

/// Agents behind a gateway that picks, as `pod-0` and so on of the deployment `chat.default`.
struct Rig {
    agents: Vec<AgentProcess>,
    teller: Teller,
    gateway: GatewayProcess,
    picker: Picker,
}

impl Rig {
    async fn start(n_agents: usize, gateway_args: &[&str]) -> Result<Self> {
        let agents = try_join_all((0..n_agents).map(|_| AgentProcess::ready(&[]))).await?;
        Self::before(agents, gateway_args).await
    }

    async fn before(agents: Vec<AgentProcess>, gateway_args: &[&str]) -> Result<Self> {
        let teller = Teller::start().await?;
        let gateway = GatewayProcess::start(teller.url(), &[&[SWITCH], gateway_args].concat())?;
        let picker = Picker::at(&gateway.address()?.to_string())?;
        let rig = Self { agents, teller, gateway, picker };
        rig.tell(|_, _| {}).await?;
        rig.gateway.knows("chat", EndpointState::Serving, rig.agents.len()).await?;
        Ok(rig)
    }

    async fn tell(&self, change: impl Fn(usize, &mut ReplicaEndpoint)) -> Result<()> {
        let replicas = self.replicas(change).await?;
        self.teller.tell(vec![deployment("chat", &["chat", "ember"], replicas)]);
        Ok(())
    }

    async fn replicas(&self, change: impl Fn(usize, &mut ReplicaEndpoint)) -> Result<Vec<ReplicaEndpoint>> {
        let mut replicas = Vec::new();
        for (at, agent) in self.agents.iter().enumerate() {
            let mut told = replica(&format!("pod-{at}"), agent).await?;
            change(at, &mut told);
            replicas.push(told);
        }
        Ok(replicas)
    }

    fn address(&self, agent: usize) -> String {
        self.agents[agent].base().trim_start_matches("http://").to_owned()
    }

    fn agent_at(&self, address: &str) -> Result<usize> {
        (0..self.agents.len()).find(|agent| self.address(*agent) == address).context("it is an agent's address")
    }

    /// Waits until a gauge or counter of the gateway has this value.
    async fn counts(&self, name: &str, count: usize) -> Result<()> {
        self.gateway.counts(name, count).await
    }

    /// Asks for a whole conversation in full duplex, with an answer.
    async fn pick(&self, request: &Request, body: &str) -> Result<Result<Destination, Refusal>> {
        let mut conversation = self.picker.begin().await?;
        let told = conversation.whole(request, body.as_bytes()).await?;
        if told.is_ok() {
            conversation.answered("200", "{}").await?;
        }
        Ok(told)
    }

    async fn refusal(&self, request: &Request, body: &str) -> Result<Refusal> {
        self.pick(request, body).await?.err().context("it is refused")
    }
}

fn chat(content: &str) -> String {
    json!({"model": "ember", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}).to_string()
}

fn code(refusal: &Refusal) -> (i32, &str) {
    (refusal.status, refusal.body["error"]["code"].as_str().unwrap_or_default())
}

#[tokio::test]
async fn a_request_in_full_duplex_goes_where_its_prefix_is_and_comes_back_unchanged() -> Result<()> {
    let rig = Rig::start(2, &[]).await?;
    let talk = |seed: usize| {
        chat(&format!("You are assistant number {seed}. {}", "Be brief and say what you know. ".repeat(40)))
    };
    let mut used = [0, 0];
    for seed in 0..8 {
        let first = rig.pick(&Request::post(CHAT), &talk(seed)).await?.unwrap();
        let again = rig.pick(&Request::post(CHAT), &talk(seed)).await?.unwrap();
        assert_eq!(first.address, again.address, "conversation {seed}");
        used[rig.agent_at(&first.address)?] += 1;
        assert!(first.set["x-stoker-prefixes"].split(' ').count() > 2, "{first:?}");
    }
    assert!(used.iter().all(|used| *used > 0), "all eight at one replica: {used:?}");
    let metrics = rig.gateway.metrics().await?;
    assert!(
        metrics.contains("stoker_gateway_requests_total{code=\"200\",deployment=\"chat.default\"} 16"),
        "{metrics}"
    );
    Ok(())
}

#[tokio::test]
async fn what_a_proxy_is_told_is_what_the_gateway_does_itself() -> Result<()> {
    let agents = try_join_all((0..3).map(|_| AgentProcess::ready(&[]))).await?;
    let asked: Vec<String> = (0..24)
        .map(|number| {
            let content =
                format!("{} {}", number % 6, "What is it that you know of this? ".repeat(10 + 8 * (number / 6)));
            json!({"model": "ember", "max_tokens": 1, "user": format!("u{}", number % 5),
                   "messages": [{"role": "user", "content": content}]})
            .to_string()
        })
        .collect();
    // Events of caches would come at other moments to one than to the other.
    let deaf = |_: usize, told: &mut ReplicaEndpoint| told.events = None;
    let rig = Rig::before(agents, &[]).await?;
    let of_picker = {
        rig.tell(deaf).await?;
        let mut told = Vec::new();
        for (number, body) in asked.iter().enumerate() {
            let request = Request::post(CHAT).with("x-request-id", &format!("r{number}"));
            told.push(rig.agent_at(&rig.pick(&request, body).await?.unwrap().address)?);
        }
        told
    };
    let Rig { agents, .. } = rig;
    let rig = Rig::before(agents, &[]).await?;
    rig.tell(deaf).await?;
    let mut of_gateway = Vec::new();
    for (number, body) in asked.iter().enumerate() {
        let request = Client::new().post(rig.gateway.url(CHAT)).body(body.clone());
        let request = request.header("x-request-id", format!("r{number}")).header("x-stoker-route", "explain");
        let answer = request.send().await?;
        assert_eq!(answer.status(), 200);
        let route = answer.headers()["x-stoker-route"].to_str()?.to_owned();
        let pod = route.split(' ').find_map(|term| term.strip_prefix("replica=pod-")).context("a replica")?;
        of_gateway.push(pod.parse::<usize>()?);
    }
    assert_eq!(of_picker, of_gateway);
    assert!((0..3).all(|agent| of_picker.contains(&agent)), "{of_picker:?}");
    Ok(())
}

#[tokio::test]
async fn a_request_without_a_body_goes_to_a_replica_and_unknown_paths_go_nowhere() -> Result<()> {
    let rig = Rig::start(1, &[]).await?;
    for path in ["/v1/models", "/v1/models/ember", "/v1/responses/resp_1"] {
        let mut conversation = rig.picker.begin().await?;
        conversation.ask(&Request::get(path)).await?;
        let destination = Destination::of(&conversation.told().await?)?;
        assert_eq!(destination.address, rig.address(0), "{path}");
        conversation.say(Said::ResponseHeaders(head(&[(":status", "200")], true))).await?;
        assert!(matches!(conversation.told().await?.told, Some(Told::ResponseHeaders(_))));
        drop(conversation);
        rig.gateway
            .access_line(|line| line["path"] == path && line["status"] == 200 && line["ending"] == "whole")
            .await?;
    }
    for path in ["/metrics", "/v1/modelsx", "/"] {
        let mut conversation = rig.picker.begin().await?;
        conversation.ask(&Request::get(path)).await?;
        let refusal = Refusal::of(&conversation.told().await?)?;
        assert_eq!(code(&refusal), (404, "unknown_url"), "{path}");
        assert!(conversation.next().await?.is_none(), "the conversation is over");
    }
    Ok(())
}

#[tokio::test]
async fn a_body_may_come_in_parts_with_trailers_at_once_or_not_at_all() -> Result<()> {
    let rig = Rig::start(1, &[]).await?;
    let body = chat(&"A long prompt. ".repeat(20_000));
    let mut conversation = rig.picker.begin().await?;
    conversation.ask(&Request::post(CHAT)).await?;
    let parts: Vec<&[u8]> = body.as_bytes().chunks(10_000).collect();
    for piece in &parts {
        conversation.say(Said::RequestBody(part(piece.to_vec(), false))).await?;
    }
    conversation.say(Said::RequestTrailers(HttpTrailers::default())).await?;
    let destination = Destination::of(&conversation.told().await?)?;
    assert_eq!(destination.address, rig.address(0));
    let mut back = Vec::new();
    while back.len() < body.len() {
        let (piece, is_last) = conversation.passed().await?;
        assert!(!is_last && piece.len() <= 64 << 10, "trailers follow, and pieces are small");
        back.extend_from_slice(&piece);
    }
    assert_eq!(back, body.as_bytes());
    assert!(matches!(conversation.told().await?.told, Some(Told::RequestTrailers(_))));
    conversation.answered("200", "{}").await?;

    // At once: its head is let go first, and is changed with the body.
    let buffered = (BodySendMode::Buffered, BodySendMode::None);
    let mut conversation = rig.picker.begin().await?;
    conversation.ask(&Request { modes: Some(buffered), ..Request::post(CHAT) }).await?;
    let told = conversation.told().await?;
    assert!(Destination::of(&told).is_err() && matches!(told.told, Some(Told::RequestHeaders(_))), "{told:?}");
    conversation.say(Said::RequestBody(part(body.clone(), true))).await?;
    let told = conversation.told().await?;
    assert!(matches!(told.told, Some(Told::RequestBody(_))), "{told:?}");
    assert!(Destination::of(&told)?.set.contains_key("x-stoker-prefixes"));

    // Not at all: it goes by load.
    for mode in [BodySendMode::None, BodySendMode::Streamed] {
        let mut conversation = rig.picker.begin().await?;
        conversation.ask(&Request { modes: Some((mode, BodySendMode::None)), ..Request::post(CHAT) }).await?;
        let destination = Destination::of(&conversation.told().await?)?;
        assert!(!destination.set.contains_key("x-stoker-prefixes"), "{destination:?}");
    }

    // And who does not say how is taken for one in full duplex.
    let silent = Request { modes: None, ..Request::post(CHAT) };
    assert_eq!(rig.pick(&silent, &chat("Hi")).await?.unwrap().address, rig.address(0));
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused_in_the_gateway_s_own_words() -> Result<()> {
    let rig = Rig::start(1, &["--body-bytes-max", "100000"]).await?;
    let long = chat(&"x".repeat(100_000));
    for (body, expected) in [
        (r#"{"model": "gpt-7"}"#, (404, "model_not_found")),
        (r#"{"model": "ember","#, (400, "invalid_json")),
        ("hello", (400, "invalid_json")),
        ("", (400, "invalid_json")),
        (r#"{"model": "ember", "model": "chat"}"#, (400, "duplicate_parameter")),
        (long.as_str(), (413, "body_too_large")),
    ] {
        let request = Request::post(CHAT).with("x-request-id", "mine");
        let refusal = rig.refusal(&request, body).await?;
        assert_eq!(code(&refusal), expected, "{body:.40}");
        assert_eq!(refusal.headers["content-type"], "application/json");
        assert_eq!(refusal.headers["x-request-id"], "mine");
        let own = Client::new().post(rig.gateway.url(CHAT)).body(body.to_owned()).send().await?;
        assert_eq!(i32::from(own.status().as_u16()), refusal.status, "{body:.40}");
        if expected.0 != 413 {
            assert_eq!(own.json::<Value>().await?, refusal.body, "{body:.40}");
        }
    }
    let unknown = rig.refusal(&Request::post(CHAT), r#"{"model": "gpt-7"}"#).await?;
    assert!(unknown.body["error"]["message"].as_str().unwrap().ends_with("there is: chat, ember"), "{unknown:?}");
    let encoded = rig.picker.begin().await?.whole(&Request::post(CHAT).with("content-encoding", "gzip"), b"x").await?;
    assert_eq!(code(&encoded.unwrap_err()), (415, "unsupported_encoding"));
    let of_messages = rig.refusal(&Request::post("/v1/messages"), "hello").await?;
    assert_eq!(of_messages.body["type"], "error", "in the form of the API that was asked");
    let empty = rig.picker.begin().await?;
    let mut empty = empty;
    empty.ask(&Request { ends: true, ..Request::post(CHAT) }).await?;
    assert_eq!(code(&Refusal::of(&empty.told().await?)?), (400, "invalid_json"));
    rig.counts("requests_in_flight", 0).await
}

#[tokio::test]
async fn a_hint_bounds_the_choice_and_one_without_a_replica_is_503_at_once() -> Result<()> {
    let rig = Rig::start(3, &[]).await?;
    let among = |endpoints: &[String]| Request { subset: Some(endpoints.to_vec()), ..Request::post(CHAT) };
    for number in 0..12 {
        let agent = number % 3;
        let named = [rig.address(agent), "10.9.9.9:8000".to_owned()];
        let told = rig.pick(&among(&named), &chat(&format!("{number} and more"))).await?.unwrap();
        assert_eq!(rig.agent_at(&told.address)?, agent);
    }
    for named in [vec![], vec!["10.9.9.9:8000".to_owned()]] {
        let begun = Instant::now();
        let refusal = rig.refusal(&among(&named), &chat("Hi")).await?;
        assert_eq!(code(&refusal), (503, "no_ready_replicas"), "{named:?}");
        assert!(refusal.headers.contains_key("retry-after"));
        // It would wait for 45 s in line.
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    rig.tell(|at, told| told.state = if at == 0 { EndpointState::Draining } else { told.state }).await?;
    rig.gateway.knows("chat", EndpointState::Draining, 1).await?;
    assert_eq!(code(&rig.refusal(&among(&[rig.address(0)]), &chat("Hi")).await?), (503, "no_ready_replicas"));
    Ok(())
}

#[tokio::test]
async fn where_no_replica_takes_requests_it_waits_and_is_503_and_where_all_are_full_it_is_429() -> Result<()> {
    let agents = try_join_all((0..1).map(|_| AgentProcess::ready(&[]))).await?;
    let rig = Rig::before(agents, &["--hold", "1", "--line-max", "2"]).await?;
    rig.tell(|_, told| told.state = EndpointState::Starting).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    let begun = Instant::now();
    let away = rig.refusal(&Request::post(CHAT), &chat("Hi")).await?;
    assert_eq!((code(&away), away.headers["retry-after"].as_str()), ((503, "model_loading"), "5"));
    assert!(begun.elapsed() >= Duration::from_millis(900), "it was held");
    // One that is held goes on when a replica is there.
    let mut held = rig.picker.begin().await?;
    let asks = Request::post(CHAT);
    let (told, _) = tokio::try_join!(held.whole(&asks, b"{\"model\":\"ember\"}"), rig.tell(|_, _| {}))?;
    assert_eq!(told.unwrap().address, rig.address(0));
    held.answered("200", "{}").await?;
    rig.gateway.knows("chat", EndpointState::Serving, 1).await?;

    // Its window is full of requests of which nothing comes back.
    let mut unanswered = Vec::new();
    let full = loop {
        let mut conversation = rig.picker.begin().await?;
        match conversation.whole(&Request::post(CHAT), chat("Hi").as_bytes()).await? {
            Ok(_) => unanswered.push(conversation),
            Err(refusal) => break refusal,
        }
        ensure!(unanswered.len() < 1000, "it takes everything");
    };
    assert_eq!(code(&full), (429, "overloaded"), "{full:?}");
    let seconds: u32 = full.headers["retry-after"].parse()?;
    assert!((1..=120).contains(&seconds));
    assert!(unanswered.len() >= 32, "{} were taken", unanswered.len());
    // Whoever goes gives its place back.
    rig.counts("requests_in_flight", unanswered.len()).await?;
    unanswered.truncate(4);
    rig.counts("requests_in_flight", 4).await?;
    assert_eq!(rig.pick(&Request::post(CHAT), &chat("Hi")).await?.unwrap().address, rig.address(0));
    Ok(())
}

#[tokio::test]
async fn whoever_leaves_gives_its_place_back_at_any_moment() -> Result<()> {
    let rig = Rig::start(1, &["--hold", "60"]).await?;
    let body = chat("Hi");
    // Before its body came.
    let mut conversation = rig.picker.begin().await?;
    conversation.ask(&Request::post(CHAT).with("x-request-id", "early")).await?;
    conversation.say(Said::RequestBody(part(body.as_bytes()[..10].to_vec(), false))).await?;
    rig.counts("requests_in_flight", 1).await?;
    drop(conversation);
    rig.gateway.access_line(|line| line["request_id"] == "early" && line["status"] == 499).await?;
    // While it waits in line.
    rig.tell(|_, told| told.state = EndpointState::Starting).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    conversation = rig.picker.begin().await?;
    conversation.ask(&Request::post(CHAT).with("x-request-id", "in-line")).await?;
    conversation.say(Said::RequestBody(part(body.clone(), true))).await?;
    rig.counts("held{deployment=\"chat.default\"}", 1).await?;
    drop(conversation);
    rig.gateway.access_line(|line| line["request_id"] == "in-line" && line["status"] == 499).await?;
    rig.counts("held{deployment=\"chat.default\"}", 0).await?;
    rig.tell(|_, _| {}).await?;
    rig.gateway.knows("chat", EndpointState::Serving, 1).await?;
    // In the middle of its answer.
    conversation = rig.picker.begin().await?;
    conversation.whole(&Request::post(CHAT).with("x-request-id", "late"), body.as_bytes()).await?.unwrap();
    let stream = [(":status", "200"), ("content-type", "text/event-stream")];
    conversation.say(Said::ResponseHeaders(head(&stream, false))).await?;
    conversation.told().await?;
    conversation.say(Said::ResponseBody(part("data: {}\n\n", false))).await?;
    assert_eq!(conversation.passed().await?.0, "data: {}\n\n");
    drop(conversation);
    let line = rig.gateway.access_line(|line| line["request_id"] == "late").await?;
    assert_eq!((&line["status"], &line["ending"], &line["bytes"]), (&json!(200), &json!("left"), &json!(10)));
    rig.counts("requests_in_flight", 0).await
}

#[tokio::test]
async fn an_answer_passes_with_reasons_and_says_what_it_cost() -> Result<()> {
    let rig = Rig::start(1, &[]).await?;
    let request = Request::post(CHAT).with("x-stoker-route", "explain").with("x-stoker-whole", "marks");
    let mut conversation = rig.picker.begin().await?;
    let destination = conversation.whole(&request, chat("Hi").as_bytes()).await?.unwrap();
    let mut removed = destination.removed;
    removed.sort_unstable();
    assert_eq!(removed, ["x-stoker-route", "x-stoker-whole"], "nobody would take marks out of the answer");
    let answer = [(":status", "200"), ("content-type", "text/event-stream")];
    conversation.say(Said::ResponseHeaders(head(&answer, false))).await?;
    let told = conversation.told().await?;
    let Some(Told::ResponseHeaders(passes)) = told.told else { panic!("{told:?}") };
    let set = stoker_tests::picker::headers(&passes.response.unwrap().header_mutation.unwrap())?;
    assert!(set["x-stoker-route"].starts_with("replica=pod-0 reason=only "), "{set:?}");
    let last = "data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4}}\n\n";
    for (body, is_last) in [("data: {\"a\":1}\n\n", false), (last, true)] {
        conversation.say(Said::ResponseBody(part(body, is_last))).await?;
        assert_eq!(conversation.passed().await?, (body.into(), is_last));
    }
    drop(conversation);
    let line = rig.gateway.access_line(|line| line["pod"] == "pod-0").await?;
    let cost = ["prompt_tokens", "completion_tokens", "ending"].map(|field| line[field].clone());
    assert_eq!(cost, [json!(9), json!(4), json!("whole")]);
    Ok(())
}

#[tokio::test]
async fn what_comes_at_a_deployment_s_own_port_is_for_no_other() -> Result<()> {
    let rig = Rig::start(2, &[]).await?;
    let mut replicas = rig.replicas(|_, _| {}).await?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut team = deployment("team", &["ember"], vec![replicas.remove(1)]);
    team.port = Some(port);
    rig.teller.tell(vec![deployment("chat", &["ember"], replicas), team]);
    rig.gateway.knows("team", EndpointState::Serving, 1).await?;
    let shared = rig.refusal(&Request::post(CHAT), &chat("Hi")).await?;
    assert_eq!(code(&shared), (400, "ambiguous_model"));
    let mut named = Request::post(CHAT);
    named.head[2].1 = "chat.default".to_owned();
    assert_eq!(rig.pick(&named, &chat("Hi")).await?.unwrap().address, rig.address(0));
    let begun = Instant::now();
    while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
        ensure!(begun.elapsed() < PATIENCE, "its port is not opened");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let own = Picker::at(&format!("127.0.0.1:{port}"))?;
    for request in [named, Request::post(CHAT)] {
        let told = own.begin().await?.whole(&request, chat("Hi").as_bytes()).await?.unwrap();
        assert_eq!(told.address, rig.address(1));
    }
    let plain = Client::new().get(format!("http://127.0.0.1:{port}/v1/models")).send().await?;
    assert_eq!(plain.json::<Value>().await?["data"][0]["id"], "ember", "it speaks HTTP/1 there as before");
    Ok(())
}

#[tokio::test]
async fn a_tenant_s_key_opens_and_goes_no_further() -> Result<()> {
    use std::io::Write;
    let mut file = tempfile::NamedTempFile::new()?;
    // Of `key-of-search`.
    let hash = "sha256:".to_owned() + &hex(&sha256("key-of-search")?);
    write!(file, "tenants: [{{name: search, keys: [\"{hash}\"], limits: {{concurrentRequests: 1}}}}]")?;
    let rig = Rig::start(1, &["--tenants", file.path().to_str().unwrap()]).await?;
    assert_eq!(code(&rig.refusal(&Request::post(CHAT), &chat("Hi")).await?), (401, "invalid_api_key"));
    let mut early = rig.picker.begin().await?;
    early.ask(&Request::post(CHAT)).await?;
    assert_eq!(code(&Refusal::of(&early.told().await?)?), (401, "invalid_api_key"), "before its body");
    let known = Request::post(CHAT).with("authorization", "Bearer key-of-search");
    let mut conversation = rig.picker.begin().await?;
    let told = conversation.whole(&known, chat("Hi").as_bytes()).await?.unwrap();
    assert_eq!((told.removed, told.set["x-stoker-salt"].as_str()), (vec!["authorization".to_owned()], "search"));
    let over = rig.refusal(&known, &chat("Hi")).await?;
    assert_eq!(code(&over), (429, "rate_limit_exceeded"));
    conversation.answered("200", r#"{"usage":{"prompt_tokens":9,"completion_tokens":4}}"#).await?;
    drop(conversation);
    rig.counts("tenant_tokens_total{kind=\"completion\",tenant=\"search\"}", 4).await?;
    rig.counts("tenant_device_seconds_total{tenant=\"search\"}", 2).await?;
    rig.pick(&known, &chat("Hi")).await?.unwrap();
    assert!(!rig.gateway.log().contains("key-of-search"));
    Ok(())
}

#[tokio::test]
async fn what_a_stream_that_another_proxy_has_used_is_counted_as_its_replica_says() -> Result<()> {
    let mut file = tempfile::NamedTempFile::new()?;
    let hash = "sha256:".to_owned() + &hex(&sha256("key-of-search")?);
    std::io::Write::write_all(&mut file, format!("tenants: [{{name: search, keys: [\"{hash}\"]}}]").as_bytes())?;
    let rig = Rig::start(1, &["--tenants", file.path().to_str().unwrap()]).await?;
    // It sends no bodies of answers.
    let modes = Some((BodySendMode::FullDuplexStreamed, BodySendMode::None));
    let known = Request { modes, ..Request::post(CHAT).with("authorization", "Bearer key-of-search") };
    let mut body: Value = serde_json::from_str(&chat("Tell me a story."))?;
    (body["stream"], body["max_tokens"]) = (json!(true), json!(40));
    let mut conversation = rig.picker.begin().await?;
    let told = conversation.whole(&known, body.to_string().as_bytes()).await?.unwrap();
    let begun = Instant::now();
    let mut sent = Client::new().post(format!("http://{}{CHAT}", told.address)).body(body.to_string());
    for (name, value) in &told.set {
        sent = sent.header(name, value);
    }
    let text = sent.send().await?.text().await?;
    assert!(text.ends_with("data: [DONE]\n\n") && !text.contains(": stoker"), "{text}");
    let answer = [(":status", "200"), ("content-type", "text/event-stream")];
    conversation.say(Said::ResponseHeaders(head(&answer, false))).await?;
    conversation.told().await?;
    drop(conversation);
    let account = rig.agents[0].admin_url(&format!("/v1/accounts/{}", told.set["x-stoker-account"]));
    let account: Value = reqwest::get(account).await?.json().await?;
    let seconds = account["deviceMicros"]["search"].as_f64().context("an account")? / 1e6;
    assert!(seconds > 0.0 && seconds < begun.elapsed().as_secs_f64(), "{account}");
    let family = "stoker_gateway_tenant_device_seconds_total{tenant=\"search\"} ";
    let counted = async || -> Result<f64> {
        let metrics = rig.gateway.metrics().await?;
        Ok(metrics.lines().find_map(|line| line.strip_prefix(family)?.parse().ok()).unwrap_or_default())
    };
    while (counted().await? - seconds).abs() > 1e-9 {
        ensure!(begun.elapsed() < PATIENCE, "{} of {seconds}\n{}", counted().await?, rig.gateway.log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

fn sha256(text: &str) -> Result<Vec<u8>> {
    Ok(ring::digest::digest(&ring::digest::SHA256, text.as_bytes()).as_ref().to_vec())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_thousand_conversations_at_once_all_end_and_no_place_is_lost() -> Result<()> {
    let rig = Rig::start(2, &["--line-max", "2000"]).await?;
    let picked = try_join_all((0..1000).map(async |number: usize| {
        let mut conversation = rig.picker.begin().await?;
        let told = conversation.whole(&Request::post(CHAT), chat(&format!("Number {number}")).as_bytes()).await?;
        let told = told.map_err(|refusal| anyhow::anyhow!("{refusal:?}"))?;
        conversation.answered("200", "{}").await?;
        anyhow::Ok(told.address)
    }))
    .await?;
    let mut counts = BTreeMap::new();
    picked.iter().for_each(|address| *counts.entry(rig.agent_at(address).unwrap()).or_insert(0) += 1);
    assert!(counts.len() == 2 && counts.values().all(|count| *count >= 250), "{counts:?}");
    rig.counts("requests_in_flight", 0).await?;
    rig.counts("requests_total{code=\"200\",deployment=\"chat.default\"}", 1000).await
}

#[tokio::test]
async fn health_follows_what_the_gateway_knows_and_without_the_switch_nobody_is_told_anything() -> Result<()> {
    let teller = Teller::start().await?;
    let gateway = GatewayProcess::start(teller.url(), &[SWITCH])?;
    let picker = Picker::at(&gateway.address()?.to_string())?;
    let status = async |service: &'static str| Ok::<_, tonic::Status>(picker.health(service).await?.status());
    assert_eq!(status("liveness").await?, ServingStatus::Serving);
    teller.tell(vec![deployment("chat", &["chat"], vec![])]);
    let begun = Instant::now();
    while status("readiness").await? != ServingStatus::Serving {
        ensure!(begun.elapsed() < PATIENCE, "it is never ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(status("envoy.service.ext_proc.v3.ExternalProcessor").await?, ServingStatus::Serving);
    assert_eq!(status("chat").await.unwrap_err().code(), tonic::Code::NotFound);
    gateway.signal("TERM")?;
    let begun = Instant::now();
    while status("readiness").await? != ServingStatus::NotServing {
        ensure!(begun.elapsed() < PATIENCE, "it leaves and says that it is ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let silent = GatewayProcess::start(teller.url(), &[])?;
    assert!(Picker::at(&silent.address()?.to_string())?.begin().await.is_err());
    Ok(())
}
