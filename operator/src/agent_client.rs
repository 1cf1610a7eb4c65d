//! The operator's conversation with an agent: read its load, tell it to drain, take it back. Plain HTTP/1.
//!
//! Every question is bounded in time and every answer in size. Decides nothing.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, header::CONTENT_TYPE};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use stoker_crds::contract::{AGENT_PORT, DrainRequest, DrainSettings, LoadReport};
use thiserror::Error;
use tokio::time::timeout;

/// How long an agent may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes of an answer that are read at most.
const ANSWER_LIMIT: usize = 64 * 1024;
/// How long an unused connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Asks agents. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct AgentClient {
    http: Client<HttpConnector, Full<Bytes>>,
}

/// Why an agent gave no usable answer.
#[derive(Debug, Error)]
pub enum AgentError {
    /// Nobody answered in time.
    #[error("no answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Timeout,
    /// The connection failed.
    #[error("{0}")]
    Connection(String),
    /// The agent answered with another status than 2xx.
    #[error("answered {status}: {body}")]
    Status {
        /// Its status.
        status: StatusCode,
        /// The beginning of its answer.
        body: String,
    },
    /// The answer is not a load report.
    #[error("answer is no load report: {0}")]
    Body(#[from] serde_json::Error),
}

impl Default for AgentClient {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(ANSWER_TIMEOUT));
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(1)
            .build(connector);
        Self { http }
    }
}

impl AgentClient {
    /// Reads the load of the agent at `ip`.
    pub async fn load(&self, ip: &str) -> Result<LoadReport, AgentError> {
        let body = self.ask(Method::GET, ip, "/v1/load", Bytes::new()).await?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Tells the agent at `ip` to drain. Telling it again changes nothing.
    pub async fn drain(&self, ip: &str, settings: &DrainSettings) -> Result<(), AgentError> {
        let request = DrainRequest {
            deadline_seconds: Some(settings.deadline_seconds),
            withdraw_seconds: Some(settings.withdraw_seconds),
        };
        let body = serde_json::to_vec(&request).expect("a drain request is JSON");
        self.ask(Method::POST, ip, "/v1/drain", body.into()).await.map(drop)
    }

    /// Takes the draining agent at `ip` back into service.
    pub async fn undrain(&self, ip: &str) -> Result<(), AgentError> {
        self.ask(Method::DELETE, ip, "/v1/drain", Bytes::new()).await.map(drop)
    }

    async fn ask(&self, method: Method, ip: &str, path: &str, body: Bytes) -> Result<Bytes, AgentError> {
        timeout(ANSWER_TIMEOUT, self.exchange(method, ip, path, body)).await.unwrap_or(Err(AgentError::Timeout))
    }

    async fn exchange(&self, method: Method, ip: &str, path: &str, body: Bytes) -> Result<Bytes, AgentError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}:{AGENT_PORT}{path}", host(ip)))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| AgentError::Connection(error.to_string()))?;
        let answer = self.http.request(request).await.map_err(|error| AgentError::Connection(root(&error)))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_LIMIT).collect().await;
        let body = body.map_err(|error| AgentError::Connection(error.to_string()))?.to_bytes();
        if status.is_success() { Ok(body) } else { Err(refused(status, &body)) }
    }
}

/// An address as it stands in a URL.
fn host(ip: &str) -> String {
    if ip.contains(':') { format!("[{ip}]") } else { ip.to_owned() }
}

fn refused(status: StatusCode, body: &Bytes) -> AgentError {
    let body = String::from_utf8_lossy(body).chars().take(200).collect();
    AgentError::Status { status, body }
}

/// The innermost cause: "connection refused" rather than "client error".
fn root(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
