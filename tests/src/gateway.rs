//! A real `stoker-gateway` process before real agents, and who tells it where they are in the operator's place.

use std::{
    net::IpAddr,
    process::ExitStatus,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use axum::{
    Json, Router,
    extract::{Query, State},
    routing::get,
};
use serde_json::{Value, json};
use stoker_crds::{
    contract::ADMIN_PORT,
    endpoints::{DeploymentEndpoints, ENDPOINTS_PATH, EndpointState, Endpoints, ReplicaEndpoint, WHOLE_WEIGHT},
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

use crate::{
    agent::AgentProcess,
    process::{PATIENCE, Process},
};

/// Answers `/v1/endpoints` with what it is told to, as the operator does: at once if it is new, else after a wait.
pub struct Teller {
    told: Arc<watch::Sender<Endpoints>>,
    url: String,
    server: JoinHandle<()>,
}

/// What a gateway asks with.
type Known = Query<std::collections::HashMap<String, String>>;

impl Teller {
    /// Starts it without any deployment.
    pub async fn start() -> Result<Self> {
        let told = Arc::new(watch::Sender::new(Endpoints { source: "test".into(), number: 1, ..Endpoints::default() }));
        let routes = Router::new().route(ENDPOINTS_PATH, get(answer)).with_state(Arc::clone(&told));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let server = tokio::spawn(async move {
            // It ends with the test.
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { told, url, server })
    }

    /// Its URL without a path.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Says something else from now on; the number of it.
    pub fn tell(&self, deployments: Vec<DeploymentEndpoints>) -> u64 {
        self.told.send_modify(|told| {
            told.number += 1;
            told.deployments = deployments;
        });
        self.told.borrow().number
    }

    /// Says from now on that these are the gateways that there are.
    pub fn tell_of(&self, gateways: &[&GatewayProcess]) {
        self.told.send_modify(|told| {
            told.number += 1;
            told.gateways =
                gateways.iter().map(|gateway| gateway.admin.trim_start_matches("http://").to_owned()).collect();
        });
    }

    /// Tells of a deployment `chat`, which these agents serve, after a change of each one's endpoint.
    pub async fn tell_chat(&self, agents: &[AgentProcess], change: impl Fn(usize, &mut ReplicaEndpoint)) -> Result<()> {
        let mut replicas = Vec::new();
        for (at, agent) in agents.iter().enumerate() {
            let mut told = replica(&format!("pod-{at}"), agent).await?;
            change(at, &mut told);
            replicas.push(told);
        }
        self.tell(vec![deployment("chat", &["chat", "ember"], replicas)]);
        Ok(())
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn answer(State(told): State<Arc<watch::Sender<Endpoints>>>, Query(known): Known) -> Json<Endpoints> {
    let after = known.get("after").and_then(|number| number.parse().ok()).unwrap_or(0);
    let mut newest = told.subscribe();
    let _ = tokio::time::timeout(Duration::from_secs(30), newest.wait_for(|newest| newest.number > after)).await;
    let newest = newest.borrow().clone();
    Json(newest)
}

/// A deployment `NAME.default` of these replicas that serves the model `NAME` and ember.
pub fn deployment(name: &str, models: &[&str], replicas: Vec<ReplicaEndpoint>) -> DeploymentEndpoints {
    DeploymentEndpoints {
        namespace: "default".into(),
        name: name.into(),
        models: models.iter().map(|model| (*model).to_owned()).collect(),
        replicas_wanted: replicas.len() as u32,
        port: None,
        replicas,
    }
}

/// An agent as the operator would tell it.
pub async fn replica(pod: &str, agent: &AgentProcess) -> Result<ReplicaEndpoint> {
    let load = agent.load().await?;
    Ok(ReplicaEndpoint {
        pod: pod.into(),
        uid: format!("uid-{pod}"),
        address: Some(agent.base().trim_start_matches("http://").to_owned()),
        events: Some(agent.admin_url("").trim_start_matches("http://").to_owned()),
        revision: load.revision.clone(),
        weight: WHOLE_WEIGHT,
        state: EndpointState::of(load.phase),
        load: Some((&load).into()),
    })
}

/// A running gateway on a free port of the loopback.
pub struct GatewayProcess {
    process: Process,
    base: String,
    admin: String,
}

impl GatewayProcess {
    /// Starts a gateway that asks the operator at this URL, or who stands in for it.
    pub fn start(operator: &str, args: &[&str]) -> Result<Self> {
        let listen = if args.contains(&"--listen") { &[][..] } else { &["--listen", "127.0.0.1:0"] };
        let process = Process::start("stoker-gateway", &[&["--operator", operator], listen, args].concat())?;
        Ok(Self { base: process.url("address")?, admin: process.url("admin")?, process })
    }

    /// Starts one that the operator finds by its [`slice`](Self::slice): at an IP where nobody else listens on the port that it asks.
    pub fn start_led(operator: &str, ip: IpAddr, args: &[&str]) -> Result<Self> {
        let (clients, admin) = (format!("{ip}:0"), format!("{ip}:{ADMIN_PORT}"));
        Self::start(operator, &[&["--listen", &clients, "--admin-listen", &admin], args].concat())
    }

    /// What its Service's controller would write about it, as YAML takes it. Addresses of the loopback are taken as names only.
    pub fn slice(&self, is_ready: bool) -> Result<String> {
        let ip = self.address()?.ip();
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "gateway-x", "namespace": "stoker-system", "labels": {"kubernetes.io/service-name": "gateway"}},
            "addressType": "FQDN", "endpoints": [{"addresses": [ip], "conditions": {"ready": is_ready}}],
            "ports": [{"name": "http", "port": 8000}],
        });
        Ok(slice.to_string())
    }

    /// The text of its `/metrics`.
    pub async fn metrics(&self) -> Result<String> {
        Ok(reqwest::get(self.admin_url("/metrics")).await?.text().await?)
    }

    /// Its URL without a path.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The URL of a path.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// The URL of a path that is not for clients.
    pub fn admin_url(&self, path: &str) -> String {
        format!("{}{path}", self.admin)
    }

    /// The address of its base.
    pub fn address(&self) -> Result<std::net::SocketAddr> {
        Ok(self.base.trim_start_matches("http://").parse()?)
    }

    /// Memory that it holds now.
    pub fn resident_bytes(&self) -> Result<u64> {
        self.process.resident_bytes()
    }

    /// Processor time that it has used.
    pub fn busy_seconds(&self) -> Result<f64> {
        self.process.busy_seconds()
    }

    /// Waits until it knows a replica in each of these states, of the deployment `NAME.default`.
    pub async fn knows(&self, name: &str, state: EndpointState, count: usize) -> Result<()> {
        let replicas = format!("replicas{{deployment=\"{name}.default\",state=\"{}\"}}", state.word());
        self.counts(&replicas, count).await
    }

    /// Waits until so many replicas of the deployment `NAME.default` have said what they hold.
    pub async fn hears(&self, name: &str, count: usize) -> Result<()> {
        self.counts(&format!("replicas_heard{{deployment=\"{name}.default\"}}"), count).await
    }

    /// Waits until a metric, named without `stoker_gateway_` and with its labels, has this value.
    pub async fn counts(&self, name: &str, count: usize) -> Result<()> {
        let line = format!("stoker_gateway_{name} {count}");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let metrics = self.metrics().await?;
            if metrics.lines().any(|found| found == line) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "no {line} in\n{metrics}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sends a signal by its name without SIG.
    pub fn signal(&self, name: &str) -> Result<()> {
        self.process.signal(name)
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        self.process.ended().await
    }

    /// What it logged so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Waits for the line about a request that is like this. It is written when the answer has gone, so a client may be first.
    pub async fn access_line(&self, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            if let Some(found) = lines.find(|line| line["message"] == "request" && is_it(line)) {
                return Ok(found);
            }
            ensure!(Instant::now() < deadline, "no such request in\n{log}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
