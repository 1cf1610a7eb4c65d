//! The operator's conversation with an agent, on the agent's admin port: read its load, give it an order. Plain HTTP/1.
//!
//! Every question is bounded in time and every answer in size. Decides nothing.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, header::CONTENT_TYPE};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use stoker_crds::{
    contract::{ADMIN_PORT, LoadReport},
    intent::{INTENT_PATH, SIGNATURE_HEADER},
};
use thiserror::Error;
use tokio::time::timeout;

use crate::keys::Signed;

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
        self.ask(request(Method::GET, ip, "/v1/load").body(Full::default())).await
    }

    /// Gives the agent at `ip` an order; its load after it. Giving it again changes nothing.
    pub async fn order(&self, ip: &str, order: Signed) -> Result<LoadReport, AgentError> {
        let request = request(Method::PUT, ip, INTENT_PATH).header(SIGNATURE_HEADER, order.signature);
        self.ask(request.body(Full::from(order.body))).await
    }

    async fn ask(&self, request: hyper::http::Result<Request<Full<Bytes>>>) -> Result<LoadReport, AgentError> {
        let request = request.map_err(|error| AgentError::Connection(error.to_string()))?;
        let body = timeout(ANSWER_TIMEOUT, self.exchange(request)).await.unwrap_or(Err(AgentError::Timeout))?;
        Ok(serde_json::from_slice(&body)?)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, AgentError> {
        let answer = self.http.request(request).await.map_err(|error| AgentError::Connection(root(&error)))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_LIMIT).collect().await;
        let body = body.map_err(|error| AgentError::Connection(error.to_string()))?.to_bytes();
        if status.is_success() { Ok(body) } else { Err(refused(status, &body)) }
    }
}

fn request(method: Method, ip: &str, path: &str) -> hyper::http::request::Builder {
    let uri = format!("http://{}:{ADMIN_PORT}{path}", host(ip));
    Request::builder().method(method).uri(uri).header(CONTENT_TYPE, "application/json")
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
