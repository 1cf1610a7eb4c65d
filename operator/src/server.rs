//! The operator's own HTTP: `/metrics`, `/healthz`, `/readyz`, the full records of scaling decisions, and what gateways are told.
//! Reads only.

use std::time::{Duration, Instant};

use axum::{
    Json, Router,
    extract::{Path, Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use serde::Deserialize;
use stoker_crds::{
    endpoints::{ENDPOINTS_PATH, FLEET_PATH, WAIT_SECONDS_MAX},
    scaling_status::RECORDS_PATH,
};
use tokio::net::TcpListener;

use crate::controller::Shared;

/// Serves until the process ends. A standby is as ready as a leader.
pub async fn serve(listener: TcpListener, shared: Shared) -> std::io::Result<()> {
    let routes = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(|| async { "ok" }))
        .route(&format!("{RECORDS_PATH}/{{namespace}}/{{name}}"), get(records))
        .route(ENDPOINTS_PATH, get(endpoints))
        .route(FLEET_PATH, get(fleet))
        .with_state(shared);
    axum::serve(listener, routes).await
}

/// Progress, not existence: 503 names what stands still, and the kubelet restarts the operator.
async fn healthz(State(shared): State<Shared>) -> (StatusCode, String) {
    match shared.vitals.complaint(Instant::now()) {
        None => (StatusCode::OK, "ok".to_owned()),
        Some(complaint) => (StatusCode::SERVICE_UNAVAILABLE, complaint),
    }
}

async fn metrics(State(shared): State<Shared>) -> Result<String, (StatusCode, String)> {
    shared.metrics.leader.set(shared.leadership.holds().into());
    shared.metrics.render().map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// Which records.
#[derive(Debug, Deserialize)]
struct Since {
    /// Only those made after this Unix time in milliseconds.
    #[serde(default)]
    after: u64,
}

/// One record a line, oldest first.
async fn records(
    State(shared): State<Shared>,
    Path((namespace, name)): Path<(String, String)>,
    Query(since): Query<Since>,
) -> Response {
    let Some(records) = shared.ledger.records(&namespace, &name, since.after) else {
        let why = format!(
            "nothing is decided about InferenceDeployment {namespace}/{name} here: it has no spec.scaling, its mode is \
             external, or another operator leads\n"
        );
        return (StatusCode::NOT_FOUND, why).into_response();
    };
    let lines: String = records.iter().map(|record| record.to_line() + "\n").collect();
    ([(CONTENT_TYPE, "application/jsonl")], lines).into_response()
}

/// What a gateway has already.
#[derive(Debug, Deserialize)]
#[serde(default)]
struct Known {
    /// Who numbered it.
    source: String,
    /// The number.
    after: u64,
    /// Seconds to wait for another one.
    wait: u64,
}

impl Default for Known {
    fn default() -> Self {
        Self { source: String::new(), after: 0, wait: FIRST_WAIT_SECONDS }
    }
}

/// For the first document, which is made once somebody asks.
const FIRST_WAIT_SECONDS: u64 = 5;

/// Where all replicas are, once that is something else than what is known. Only the leader reads agents: another one says so at
/// once, and who asks again reaches the leader by and by.
async fn endpoints(State(shared): State<Shared>, Query(known): Query<Known>) -> Response {
    let refuse = |why: &'static str| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    if !shared.leadership.holds() {
        return refuse("another operator leads: ask again\n");
    }
    let wait = Duration::from_secs(known.wait.min(WAIT_SECONDS_MAX));
    match shared.endpoints.other_than(&known.source, known.after, wait).await {
        Some(document) => Json(&*document).into_response(),
        None => refuse("nothing is known yet: ask again\n"),
    }
}

/// What all replicas say now. Only the leader asks them.
async fn fleet(State(shared): State<Shared>) -> Response {
    let refuse = |why: &'static str| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    if !shared.leadership.holds() {
        return refuse("another operator leads: ask that one\n");
    }
    // There is a document once everything was listed: an empty cache is no empty cluster.
    let document = shared.endpoints.other_than("", 0, Duration::from_secs(FIRST_WAIT_SECONDS)).await;
    match document.and(shared.fleet.get()) {
        Some(fleet) => Json(fleet.look()).into_response(),
        None => refuse("nothing is known yet: ask again\n"),
    }
}
