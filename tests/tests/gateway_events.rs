//! What real agents say of their prefix caches, and real gateways hear: a prompt that went through one is found by another, what a
//! small cache gives up is known to be gone, an agent that begins anew holds nothing, and one that says nothing is predicted.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use axum::{
    Router,
    http::{StatusCode, Uri},
    routing::get,
};
use reqwest::Client;
use serde_json::{Value, json};
use stoker_crds::{
    endpoints::{EndpointState, ReplicaEndpoint},
    kv_events::{KV_EVENTS_PATH, KvEvent, KvEvents},
};
use stoker_tests::{
    agent::AgentProcess,
    gateway::{GatewayProcess, Teller, deployment, replica},
};
use tokio::net::TcpListener;

/// Beginnings of a prompt of twenty sentences that have names, at least.
const NAMES: usize = 3;
/// Beginnings that replicas say to hold.
const EXACT: &str = "prefixes{source=\"exact\"}";
/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two gateways before the same agents, which are `pod-0.default` and so on of the deployment `chat`.
struct Rig {
    agents: Vec<AgentProcess>,
    teller: Teller,
    gateways: [GatewayProcess; 2],
}

impl Rig {
    async fn start(n_agents: usize, agent_args: &[&str]) -> Result<Self> {
        let agents = (0..n_agents).map(|_| AgentProcess::ready(agent_args));
        let agents = futures::future::try_join_all(agents).await?;
        let teller = Teller::start().await?;
        let gateways = [GatewayProcess::start(teller.url(), &[])?, GatewayProcess::start(teller.url(), &[])?];
        let rig = Self { agents, teller, gateways };
        rig.tell(|_| {}).await?;
        for gateway in &rig.gateways {
            gateway.knows("chat", EndpointState::Serving, n_agents).await?;
        }
        Ok(rig)
    }

    /// Tells where the agents are, after a change.
    async fn tell(&self, change: impl Fn(&mut ReplicaEndpoint)) -> Result<()> {
        let mut replicas = Vec::new();
        for (at, agent) in self.agents.iter().enumerate() {
            let mut told = replica(&format!("pod-{at}"), agent).await?;
            change(&mut told);
            replicas.push(told);
        }
        self.teller.tell(vec![deployment("chat", &["ember"], replicas)]);
        Ok(())
    }

    /// Both gateways hear all agents.
    async fn hears(&self, n_agents: usize) -> Result<()> {
        for gateway in &self.gateways {
            gateway.hears("chat", n_agents).await?;
        }
        Ok(())
    }

    /// Waits until agents hold what is wanted and both gateways have heard of it; the names that they hold.
    async fn settles(&self, is_wanted: impl Fn(&HashSet<u64>) -> bool) -> Result<HashSet<u64>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut held = HashSet::new();
            for agent in &self.agents {
                held.extend(names(&events(agent, "").await?));
            }
            if is_wanted(&held) {
                for gateway in &self.gateways {
                    gateway.counts(EXACT, held.len()).await?;
                }
                return Ok(held);
            }
            ensure!(Instant::now() < deadline, "they hold {held:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Both gateways have heard every change of the only agent, which they have heard from its first one.
    async fn hears_all(&self) -> Result<()> {
        let number = events(&self.agents[0], "").await?.number;
        let deadline = Instant::now() + PATIENCE;
        for gateway in &self.gateways {
            loop {
                let metrics = gateway.metrics().await?;
                let counted = ["stored", "removed"].map(|kind| {
                    let name = format!("stoker_gateway_kv_events_total{{kind=\"{kind}\"}} ");
                    metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0u64)
                });
                if counted.iter().sum::<u64>() >= number {
                    break;
                }
                ensure!(Instant::now() < deadline, "{counted:?} of {number} events\n{}", gateway.log());
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        Ok(())
    }

    /// Both gateways have heard that somebody holds a prompt.
    async fn hears_of_a_prompt(&self) -> Result<HashSet<u64>> {
        self.settles(|held| held.len() >= NAMES).await
    }

    /// Asks through a gateway; why it went where it went, term by term.
    async fn ask(&self, at: usize, body: &Value) -> Result<Route> {
        let gateway = &self.gateways[at];
        let request = Client::new().post(gateway.url("/v1/chat/completions")).header("x-stoker-route", "explain");
        let answer = request.json(body).send().await?;
        ensure!(answer.status() == 200, "{}: {}", answer.status(), gateway.log());
        let route = answer.headers()["x-stoker-route"].to_str()?;
        let term = |name: &str| {
            let found = route.split(' ').find_map(|term| term.strip_prefix(name)?.strip_prefix('='));
            found.map(str::to_owned).with_context(|| format!("no {name} in {route}"))
        };
        let (pod, prefix, cached) = (term("replica")?, term("prefix")?, term("cached")?.parse()?);
        let answer: Value = answer.json().await?;
        let found = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        Ok(Route { pod, prefix, cached, found })
    }
}

#[derive(Debug)]
struct Route {
    pod: String,
    prefix: String,
    /// Tokens that the gateway thought were cached.
    cached: u32,
    /// Those that were.
    found: u64,
}

fn chat(seed: usize, sentences: usize) -> Value {
    let content = format!("The {seed}th quick brown fox jumps over the lazy dog. ").repeat(sentences);
    json!({"model": "ember", "temperature": 0, "max_tokens": 1, "messages": [{"role": "user", "content": content}]})
}

/// What an agent says, without waiting.
async fn events(agent: &AgentProcess, query: &str) -> Result<KvEvents> {
    let answer = reqwest::get(agent.admin_url(&format!("{KV_EVENTS_PATH}{query}"))).await?;
    ensure!(answer.status() == 200, "{}", answer.status());
    Ok(answer.json().await?)
}

fn names(events: &KvEvents) -> impl Iterator<Item = u64> {
    events.events.iter().map(name_of)
}

fn name_of(event: &KvEvent) -> u64 {
    let (KvEvent::Stored(name) | KvEvent::Removed(name)) = event;
    *name
}

#[tokio::test]
async fn a_prompt_that_went_through_one_gateway_is_found_by_another() -> Result<()> {
    let rig = Rig::start(3, &[]).await?;
    rig.hears(3).await?;
    let prompt = chat(1, 20);
    let first = rig.ask(0, &prompt).await?;
    assert_eq!((first.prefix.as_str(), first.cached, first.found), ("none", 0, 0));
    rig.hears_of_a_prompt().await?;
    for _ in 0..3 {
        let second = rig.ask(1, &prompt).await?;
        assert_eq!((second.pod.as_str(), second.prefix.as_str()), (first.pod.as_str(), "exact"));
        assert!(second.cached >= 192 && second.found >= 192, "{second:?}");
    }
    rig.gateways[1].counts("prefix_total{deployment=\"chat.default\",source=\"exact\"}", 3).await?;
    assert_eq!(rig.ask(1, &chat(2, 20)).await?.prefix, "none", "nobody sent this one");
    Ok(())
}

#[tokio::test]
async fn what_a_small_cache_gives_up_is_heard() -> Result<()> {
    let rig = Rig::start(1, &["--kv-cache-tokens", "2048"]).await?;
    rig.hears(1).await?;
    let prompt = chat(0, 20);
    rig.ask(0, &prompt).await?;
    let of_prompt = rig.hears_of_a_prompt().await?;
    let stored = events(&rig.agents[0], "").await?;
    assert!(stored.is_whole && stored.number == of_prompt.len() as u64, "{stored:?}");
    // The first gateway sent it moments ago, and knows better than to think that it is there.
    for at in [0, 1] {
        for seed in 1..9 {
            rig.ask(at, &chat(10 * at + seed, 20)).await?;
        }
        rig.settles(|held| held.is_disjoint(&of_prompt)).await?;
        rig.hears_all().await?;
        let again = rig.ask(at, &prompt).await?;
        assert_eq!((again.prefix.as_str(), again.found), ("none", 0), "gateway {at}");
        rig.settles(|held| held.is_superset(&of_prompt)).await?;
    }
    let since = format!("?start={}&since={}", stored.start_id, stored.number);
    let changes = events(&rig.agents[0], &since).await?;
    assert!(!changes.is_whole && changes.after == stored.number, "{changes:?}");
    for name in of_prompt {
        let of_name: Vec<_> = changes.events.iter().filter(|event| name_of(event) == name).collect();
        let (stored, removed) = (KvEvent::Stored(name), KvEvent::Removed(name));
        assert_eq!(of_name, [&removed, &stored, &removed, &stored]);
    }
    Ok(())
}

#[tokio::test]
async fn an_agent_that_begins_anew_holds_nothing() -> Result<()> {
    let mut rig = Rig::start(1, &[]).await?;
    rig.hears(1).await?;
    let prompt = chat(1, 20);
    rig.ask(0, &prompt).await?;
    rig.hears_of_a_prompt().await?;
    assert_eq!(rig.ask(1, &prompt).await?.prefix, "exact");

    // The same pod has another process from now on.
    rig.agents = vec![AgentProcess::ready(&[]).await?];
    rig.tell(|_| {}).await?;
    for gateway in &rig.gateways {
        gateway.counts(EXACT, 0).await?;
    }
    rig.hears(1).await?;
    let again = rig.ask(0, &prompt).await?;
    assert_eq!((again.prefix.as_str(), again.found), ("none", 0));
    rig.hears_of_a_prompt().await?;
    assert_eq!(rig.ask(1, &prompt).await?.prefix, "exact");
    Ok(())
}

#[tokio::test]
async fn who_does_not_say_what_it_holds_is_predicted() -> Result<()> {
    let rig = Rig::start(1, &[]).await?;
    let address = rig.agents[0].base().trim_start_matches("http://").to_owned();
    // Of an older version it knows no such question; an older operator names no place to ask.
    for (seed, place) in [(1, Some(address)), (2, None)] {
        rig.tell(|told| told.events.clone_from(&place)).await?;
        rig.hears(0).await?;
        let prefix = async |at| anyhow::Ok(rig.ask(at, &chat(seed, 20)).await?.prefix);
        assert_eq!([prefix(0).await?, prefix(0).await?, prefix(1).await?], ["none", "predicted", "none"]);
    }
    // When it does, that counts.
    rig.tell(|_| {}).await?;
    rig.hears(1).await?;
    rig.hears_of_a_prompt().await?;
    assert_eq!(rig.ask(0, &chat(1, 20)).await?.prefix, "exact");
    Ok(())
}

/// Answers questions for events one after the other with these, then with silence; and what it was asked.
async fn scripted(answers: Vec<(u16, String)>) -> Result<(String, Arc<Mutex<Vec<String>>>)> {
    let (answers, asked) = (Arc::new(Mutex::new(VecDeque::from(answers))), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&asked);
    let answer = async move |uri: Uri| {
        seen.lock().unwrap().push(uri.query().unwrap_or_default().to_owned());
        let next = answers.lock().unwrap().pop_front();
        match next {
            Some((status, body)) => (StatusCode::from_u16(status).unwrap(), body),
            None => std::future::pending().await,
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?.to_string();
    let routes = Router::new().route(KV_EVENTS_PATH, get(answer));
    // It ends with the test.
    tokio::spawn(async { axum::serve(listener, routes).await });
    Ok((address, asked))
}

#[tokio::test]
async fn whatever_comes_instead_of_events_breaks_nothing_and_the_whole_is_asked_for() -> Result<()> {
    let told = |start: &str, after: u64, number: u64, is_whole: bool, events: &[&str]| {
        let told = json!({"startId": start, "after": after, "number": number, "isWhole": is_whole, "events": events});
        (200, told.to_string())
    };
    let script = vec![
        told("a", 0, 5, true, &["+1", "+2", "+3"]),
        told("a", 5, 6, false, &["-2"]),
        told("a", 7, 8, false, &["+9"]),
        told("a", 0, 8, true, &["+1", "+9"]),
        (500, "an error".to_owned()),
        (200, "{\"startId\":".to_owned()),
        told("a", 8, 9, false, &["what is this?"]),
        told("b", 8, 9, false, &["+7"]),
        told("b", 0, 2, true, &["+4"]),
        told("b", 2, 4, false, &["-4", "-4"]),
        told("b", 4, 6, false, &["+5", "+6"]),
    ];
    let (address, asked) = scripted(script).await?;
    // A gateway of its own: each question is answered once.
    let (agent, teller) = (AgentProcess::ready(&[]).await?, Teller::start().await?);
    let gateway = GatewayProcess::start(teller.url(), &[])?;
    let told = ReplicaEndpoint { events: Some(address), ..replica("pod-0", &agent).await? };
    teller.tell(vec![deployment("chat", &["ember"], vec![told])]);
    gateway.knows("chat", EndpointState::Serving, 1).await?;
    let deadline = Instant::now() + PATIENCE;
    while asked.lock().unwrap().len() < 12 {
        let answer = Client::new().post(gateway.url("/v1/chat/completions")).json(&chat(1, 20)).send().await?;
        ensure!(answer.status() == 200, "{}: {}", answer.status(), gateway.log());
        ensure!(Instant::now() < deadline, "{asked:?}\n{}", gateway.log());
    }
    let start = |query: &String| query.split('&').take(2).collect::<Vec<_>>().join(" ");
    let asked: Vec<String> = asked.lock().unwrap().iter().map(start).collect();
    let expected = [
        "",
        "start=a since=5",
        "start=a since=6",
        "",
        "start=a since=8",
        "start=a since=8",
        "start=a since=8",
        "start=a since=8",
        "",
        "start=b since=2",
        "start=b since=4",
        "start=b since=6",
    ];
    assert_eq!(asked, expected);
    gateway.counts(EXACT, 2).await?;
    gateway.counts("kv_events_total{kind=\"gap\"}", 2).await?;
    gateway.counts("kv_events_total{kind=\"whole\"}", 3).await
}

#[tokio::test]
async fn names_that_are_none_are_refused_and_clients_cannot_give_any() -> Result<()> {
    let rig = Rig::start(1, &[]).await?;
    rig.hears(1).await?;
    let ask = async |url: String, names: &str| {
        let request = Client::new().post(url).header("x-stoker-prefixes", names).json(&chat(1, 20));
        let answer = request.send().await?;
        anyhow::Ok((answer.status().as_u16(), answer.json::<Value>().await?))
    };
    let agent = rig.agents[0].url("/v1/chat/completions");
    let (status, error) = ask(agent, "256 512:1").await?;
    assert_eq!((status, error["error"]["code"].as_str()), (400, Some("malformed_passage")), "{error}");
    assert_eq!(ask(rig.gateways[0].url("/v1/chat/completions"), "1000 256:abc").await?.0, 200);
    rig.hears_of_a_prompt().await?;
    let held = events(&rig.agents[0], "").await?.events;
    assert!(held.len() >= NAMES && !held.contains(&KvEvent::Stored(0xabc)), "{held:?}");
    Ok(())
}
