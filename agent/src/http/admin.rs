//! What the kubelet, the operator and Prometheus ask: `/healthz`, `/readyz`, `/metrics`, `/v1/load`, `/v1/drain`.

use std::{sync::Arc, time::Instant};

use axum::{
    Json,
    extract::{Request, State},
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::json;
use stoker_crds::contract::{AgentPhase, DrainRequest, DrainSettings, LoadReport};

use crate::{
    http::{error::ApiError, extract::read_body},
    lifecycle::{Departure, Event, Purpose},
    replica::Replica,
};

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

/// One reading of this replica.
pub(crate) async fn load(State(replica): State<Arc<Replica>>) -> Json<LoadReport> {
    Json(replica.load_report())
}

/// Takes the replica out of service; answers at once with the phase it is in.
pub(crate) async fn drain(State(replica): State<Arc<Replica>>, request: Request) -> Result<Response, ApiError> {
    let body = read_body(request).await?;
    let asked: DrainRequest = match &body[..] {
        [] => DrainRequest::default(),
        text => serde_json::from_slice(text).map_err(|error| {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the drain request is not valid: {error}"))
        })?,
    };
    let defaults = replica.settings().drain;
    let window = DrainSettings {
        deadline_seconds: asked.deadline_seconds.unwrap_or(defaults.deadline_seconds),
        withdraw_seconds: asked.withdraw_seconds.unwrap_or(defaults.withdraw_seconds),
    };
    let phase = replica.apply(Event::Leave(Departure::new(Purpose::Drain, Instant::now(), window)));
    Ok((StatusCode::ACCEPTED, Json(json!({"phase": phase}))).into_response())
}

/// Takes the replica back into service, unless it is on its way to exit.
pub(crate) async fn undrain(State(replica): State<Arc<Replica>>) -> Result<Response, ApiError> {
    let phase = replica.apply(Event::Return);
    match phase {
        AgentPhase::Withdrawing | AgentPhase::Draining | AgentPhase::Empty => Err(ApiError::new(
            StatusCode::CONFLICT,
            "exiting",
            "this replica was told to exit by a signal and cannot be taken back",
        )),
        AgentPhase::Loading | AgentPhase::Ready | AgentPhase::Failed => {
            Ok(Json(json!({"phase": phase})).into_response())
        }
    }
}
