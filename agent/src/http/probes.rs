//! What the kubelet and Prometheus ask on the public port: `/healthz`, `/readyz`, `/metrics`. Reads only: nothing here moves
//! a replica.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;
use stoker_crds::contract::{AgentPhase, LoadReport};

use crate::replica::Replica;

/// Liveness: 200 while the process makes progress, also while loading, draining, or unable to load its model.
pub(crate) async fn healthz(State(replica): State<Arc<Replica>>) -> Response {
    match replica.health() {
        Ok(()) => Json(json!({"status": "ok"})).into_response(),
        Err(unhealthy) => {
            let body = json!({"status": "unhealthy", "reason": unhealthy.to_string()});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

/// Readiness: 200 when the model is loaded and warm, the replica is not leaving, and the engine makes progress.
pub(crate) async fn readyz(State(replica): State<Arc<Replica>>) -> Response {
    let LoadReport { phase, load_progress, error, .. } = replica.load_report();
    let unhealthy = replica.health().err().map(|unhealthy| unhealthy.to_string());
    let status = match (phase, &unhealthy) {
        (AgentPhase::Ready, None) => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = json!({"phase": phase, "loadProgress": load_progress, "error": error.or(unhealthy)});
    (status, Json(body)).into_response()
}

/// Prometheus text.
pub(crate) async fn metrics(State(replica): State<Arc<Replica>>) -> ([(HeaderName, &'static str); 1], String) {
    replica.tick();
    let text = replica.metrics().text(&replica.load_report());
    ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text)
}
