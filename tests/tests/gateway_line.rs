//! The line before replicas, through real HTTP: a greedy tenant beside a modest one, requests that are held until there is a replica,
//! and who is refused where the line is full. Replicas are stand-ins that end a request when a test says so, so nothing here is
//! about time.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use reqwest::{Client, Response};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use stoker_crds::endpoints::EndpointState;
use stoker_tests::{
    gateway::{GatewayProcess, Teller, deployment},
    seats::SeatedReplica,
};
use tempfile::TempDir;
use tokio::task::JoinHandle;

const CHAT: &str = "/v1/chat/completions";
const PATIENCE: Duration = Duration::from_secs(60);
/// The operator reads agents every two seconds.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// A gateway with the tenants `greedy`, `modest` and `low` before one replica with one seat.
struct Rig {
    gateway: GatewayProcess,
    replica: Arc<SeatedReplica>,
    state: Arc<Mutex<EndpointState>>,
    teller: Arc<Teller>,
    telling: JoinHandle<()>,
    _folder: TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.telling.abort();
    }
}

impl Rig {
    async fn start(state: EndpointState, args: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("tenants.yaml").display().to_string();
        std::fs::write(&file, tenants())?;
        let replica = Arc::new(SeatedReplica::start(1).await?);
        let teller = Arc::new(Teller::start().await?);
        let gateway = GatewayProcess::start(teller.url(), &[&["--tenants", &file], args].concat())?;
        let state = Arc::new(Mutex::new(state));
        let telling = tokio::spawn(tell(Arc::clone(&teller), "pod-0", Arc::clone(&replica), Arc::clone(&state)));
        let rig = Self { gateway, replica, state, teller, telling, _folder: folder };
        rig.told().await?;
        Ok(rig)
    }

    fn is_now(&self, state: EndpointState) {
        *self.state.lock().expect("nobody panics with it") = state;
    }

    /// Waits until the gateway knows how the replica is now.
    async fn told(&self) -> Result<()> {
        let heard = "stoker_gateway_feed_total{outcome=\"ok\"}";
        let before = self.counted(heard).await?;
        self.until(heard, |now| now >= before + 3.0).await
    }

    /// Asks, and goes on while the answer is on its way.
    fn ask(&self, tenant: &str, more: &Value) -> JoinHandle<Result<Response>> {
        let mut body = json!({"model": "chat", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]});
        body.as_object_mut().expect("it is one").extend(more.as_object().expect("it is one").clone());
        let key = format!("key-of-{tenant}");
        let asking = Client::new().post(self.gateway.url(CHAT)).bearer_auth(key).header("x-stoker-route", "explain");
        tokio::spawn(async move { Ok(asking.json(&body).send().await?) })
    }

    async fn counted(&self, line: &str) -> Result<f64> {
        let metrics = self.gateway.metrics().await?;
        let found = metrics.lines().filter_map(|found| found.strip_prefix(line)?.trim().parse::<f64>().ok());
        Ok(found.sum())
    }

    async fn until(&self, line: &str, is_so: impl Fn(f64) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let counted = self.counted(line).await?;
            if is_so(counted) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{line} is {counted}\n{}", self.gateway.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until so many requests of a tenant are in line.
    async fn in_line(&self, tenant: &str, count: usize) -> Result<()> {
        let line = format!("stoker_gateway_waiting{{deployment=\"chat.default\",tenant=\"{tenant}\"}}");
        self.until(&line, |waiting| waiting == count as f64).await
    }

    /// Gives the replica as much as it takes, and waits until the gateway knows that more has to wait.
    async fn fill(&self) -> Result<Vec<JoinHandle<Result<Response>>>> {
        let first: Vec<_> = (0..3).map(|_| self.ask("greedy", &json!({}))).collect();
        self.arrived(3).await?;
        self.told().await?;
        Ok(first)
    }

    /// Waits until so many requests came to the replica.
    async fn arrived(&self, count: u64) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while self.replica.asked() < count {
            ensure!(Instant::now() < deadline, "{} of {count} arrive\n{}", self.replica.asked(), self.gateway.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}

fn tenants() -> String {
    let line = |(name, more): (&str, &str)| {
        let key = format!("key-of-{name}");
        let hash: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        format!("- {{name: {name}, keys: ['sha256:{hash}']{more}}}\n")
    };
    format!("tenants:\n{}", [("greedy", ""), ("modest", ""), ("low", ", priority: 5")].map(line).concat())
}

/// Says how the replica is, over and over.
async fn tell(teller: Arc<Teller>, pod: &str, replica: Arc<SeatedReplica>, state: Arc<Mutex<EndpointState>>) {
    loop {
        let state = *state.lock().expect("nobody panics with it");
        teller.tell(vec![deployment("chat", &["chat"], vec![replica.endpoint(pod, state)])]);
        tokio::time::sleep(TELL_EVERY).await;
    }
}

async fn refused(asked: JoinHandle<Result<Response>>) -> Result<(u16, String, Option<u32>)> {
    let answer = tokio::time::timeout(PATIENCE, asked).await???;
    let status = answer.status().as_u16();
    let retry = answer.headers().get("retry-after").and_then(|seconds| seconds.to_str().ok()?.parse().ok());
    let code = answer.json::<Value>().await?["error"]["code"].as_str().context("a code")?.to_owned();
    Ok((status, code, retry))
}

#[tokio::test]
async fn a_modest_tenant_goes_before_what_a_greedy_one_has_in_line() -> Result<()> {
    let rig = Rig::start(EndpointState::Serving, &[]).await?;
    let mut asked = rig.fill().await?;
    asked.extend((0..30).map(|_| rig.ask("greedy", &json!({}))));
    rig.in_line("greedy", 30).await?;
    asked.extend((0..3).map(|_| rig.ask("modest", &json!({}))));
    rig.in_line("modest", 3).await?;
    rig.replica.end(36);
    for asked in asked {
        let answer = tokio::time::timeout(PATIENCE, asked).await???;
        assert_eq!(answer.status(), 200);
        let route = answer.headers()["x-stoker-route"].to_str()?.to_owned();
        assert!(route.contains(" line-ms="), "{route}");
        assert!(answer.text().await?.ends_with("data: [DONE]\n\n"));
    }
    let begun = rig.replica.begun();
    let last = begun.iter().rposition(|tenant| tenant == "modest").context("it had its turns")?;
    assert!((3..14).contains(&last), "the third of the modest one is number {last}: {begun:?}");
    assert_eq!(begun.len(), 36, "each is answered once");
    rig.in_line("greedy", 0).await?;
    let waited = rig.counted("stoker_gateway_wait_seconds_count{deployment=\"chat.default\"}").await?;
    assert_eq!(waited, 33.0);
    let line = rig.gateway.access_line(|line| line["tenant"] == "modest").await?;
    assert!(line["line_seconds"].as_f64() > Some(0.0), "{line}");
    Ok(())
}

#[tokio::test]
async fn requests_are_held_until_there_is_a_replica() -> Result<()> {
    let rig = Rig::start(EndpointState::Starting, &[]).await?;
    rig.gateway.knows("chat", EndpointState::Starting, 1).await?;
    let asked: Vec<_> = (0..5).map(|_| rig.ask("modest", &json!({}))).collect();
    rig.until("stoker_gateway_held{deployment=\"chat.default\"}", |held| held == 5.0).await?;
    let lines: Value = reqwest::get(rig.gateway.admin_url("/v1/lines")).await?.json().await?;
    assert_eq!(lines, json!({"lines": [{"namespace": "default", "name": "chat", "waiting": 5}]}));
    // One of them is not patient.
    let mut asked = asked.into_iter();
    asked.next().context("five asked")?.abort();
    rig.in_line("modest", 4).await?;
    rig.replica.end(4);
    rig.is_now(EndpointState::Serving);
    for asked in asked {
        assert_eq!(tokio::time::timeout(PATIENCE, asked).await???.status(), 200);
    }
    assert_eq!(rig.replica.begun().len(), 4, "who left is not asked for");
    assert_eq!(rig.counted("stoker_gateway_held{deployment=\"chat.default\"}").await?, 0.0);
    Ok(())
}

#[tokio::test]
async fn who_finds_the_last_replica_leaving_goes_back_in_line() -> Result<()> {
    let rig = Rig::start(EndpointState::Serving, &[]).await?;
    rig.gateway.knows("chat", EndpointState::Serving, 1).await?;
    // The gateway has not heard of it yet when it asks.
    rig.replica.leave();
    let asked = rig.ask("modest", &json!({}));
    rig.arrived(1).await?;
    rig.is_now(EndpointState::Draining);
    rig.in_line("modest", 1).await?;
    let next = Arc::new(SeatedReplica::start(1).await?);
    next.end(1);
    rig.telling.abort();
    let serves = Arc::new(Mutex::new(EndpointState::Serving));
    let telling = tokio::spawn(tell(Arc::clone(&rig.teller), "pod-1", Arc::clone(&next), serves));
    let answer = tokio::time::timeout(PATIENCE, asked).await???;
    telling.abort();
    assert_eq!(answer.status(), 200);
    assert!(answer.text().await?.ends_with("data: [DONE]\n\n"));
    assert_eq!((rig.replica.asked(), next.asked()), (1, 1), "who said no is not asked again");
    Ok(())
}

#[tokio::test]
async fn where_the_line_is_full_the_lowest_priority_goes_first() -> Result<()> {
    let rig = Rig::start(EndpointState::Serving, &["--line-max", "4"]).await?;
    let mut answered = rig.fill().await?;
    let mut low = Vec::new();
    for number in 1..=4 {
        low.push(rig.ask("low", &json!({})));
        rig.in_line("low", number).await?;
    }
    let (status, code, retry) = refused(rig.ask("low", &json!({"priority": 1}))).await?;
    assert_eq!((status, code.as_str()), (429, "overloaded"), "its tenant's priority is the best that it gets");
    assert!(retry > Some(0), "it is told when to come back");

    answered.push(rig.ask("modest", &json!({})));
    rig.in_line("modest", 1).await?;
    let last = low.pop().context("four are low")?;
    assert_eq!(refused(last).await?.0, 429, "the last of the lowest made place");
    rig.in_line("low", 3).await?;
    let shed = |reason: &str| format!("stoker_gateway_shed_total{{deployment=\"chat.default\",reason=\"{reason}\"}}");
    assert_eq!([rig.counted(&shed("full")).await?, rig.counted(&shed("displaced")).await?], [1.0, 1.0]);

    let (status, code, _) = refused(rig.ask("modest", &json!({"priority": -1}))).await?;
    assert_eq!((status, code.as_str()), (403, "priority_not_allowed"));
    for arrived in [4, 5, 6, 7, 7, 7, 7] {
        rig.replica.end(1);
        rig.arrived(arrived).await?;
    }
    answered.extend(low);
    for asked in answered {
        assert_eq!(tokio::time::timeout(PATIENCE, asked).await???.status(), 200);
    }
    let begun = rig.replica.begun();
    // Two may be on their way at a time.
    let place = begun[3..].iter().position(|tenant| tenant == "modest").context("it had its turn")?;
    assert!(place < 2 && begun.len() == 7, "the highest begins first: {begun:?}");
    Ok(())
}

#[tokio::test]
async fn who_waits_for_too_long_is_told_when_to_come_back() -> Result<()> {
    let rig = Rig::start(EndpointState::Serving, &["--hold", "0.5"]).await?;
    let _open = rig.fill().await?;
    let (status, code, retry) = refused(rig.ask("modest", &json!({}))).await?;
    assert_eq!((status, code.as_str(), retry > Some(0)), (429, "overloaded", true));
    let shed = "stoker_gateway_shed_total{deployment=\"chat.default\",reason=\"expired\"}";
    assert_eq!(rig.counted(shed).await?, 1.0);
    let line = rig.gateway.access_line(|line| line["status"] == 429).await?;
    assert!(line["line_seconds"].as_f64() >= Some(0.5) && line["deployment"] == "chat.default", "{line}");
    Ok(())
}
