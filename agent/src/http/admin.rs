//! The admin port: what only operator and gateways ask. `GET /v1/load` is one reading, `GET /v1/history` those of a day, `GET /v1/model` what
//! is served and the memory that it took, `PUT /v1/intent` an order; `GET /v1/kv-events` is what the prefix cache holds, for gateways. No Service has this port; an order is believed for its
//! signature alone, so whoever else reaches the port moves nothing.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::{Bytes, to_bytes},
    extract::{Query, Request, State},
    http::StatusCode,
    middleware,
    routing::{get, put},
};
use serde::Deserialize;
use stoker_crds::{
    contract::LoadReport,
    description::{DESCRIPTION_PATH, Description},
    history::{HISTORY_PATH, LoadHistory},
    intent::{INTENT_PATH, ORDER_BYTES_MAX, SIGNATURE_HEADER},
    kv_events::{KV_EVENTS_PATH, KvEvents, WAIT_SECONDS_MAX},
};

use crate::{
    http::{error::ApiError, observe, unknown_path, wrong_method},
    intent::Refused,
    replica::Replica,
};

/// The endpoints of the admin port.
pub fn admin_router(replica: Arc<Replica>) -> Router {
    Router::new()
        .route("/v1/load", get(load))
        .route(HISTORY_PATH, get(history))
        .route(DESCRIPTION_PATH, get(description))
        .route(INTENT_PATH, put(intent))
        .route(KV_EVENTS_PATH, get(kv_events))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(replica.clone(), observe))
        .with_state(replica)
}

async fn load(State(replica): State<Arc<Replica>>) -> Json<LoadReport> {
    Json(replica.load_report())
}

async fn history(State(replica): State<Arc<Replica>>) -> Json<LoadHistory> {
    Json(replica.history())
}

async fn description(State(replica): State<Arc<Replica>>) -> Json<Description> {
    Json(replica.description())
}

/// What a gateway knows, and how long it waits for more.
#[derive(Debug, Deserialize)]
struct Known {
    #[serde(default)]
    start: String,
    #[serde(default)]
    since: u64,
    #[serde(default)]
    wait: u64,
}

async fn kv_events(State(replica): State<Arc<Replica>>, Query(known): Query<Known>) -> Json<KvEvents> {
    let wait = Duration::from_secs(known.wait.min(WAIT_SECONDS_MAX));
    Json(replica.kv_events(&known.start, known.since, wait).await)
}

/// Takes an order; answers with the reading after it, which names the order's number.
async fn intent(State(replica): State<Arc<Replica>>, request: Request) -> Result<Json<LoadReport>, ApiError> {
    let signature = request.headers().get(SIGNATURE_HEADER).map(|value| value.to_str().unwrap_or_default().to_owned());
    let body = to_bytes(request.into_body(), ORDER_BYTES_MAX).await.map_err(|_| Refused::TooLarge);
    let obeyed = body.and_then(|body: Bytes| replica.obey(&body, signature.as_deref()));
    match obeyed {
        Ok(report) => Ok(Json(report)),
        Err(refused) => {
            replica.note_refused(&refused);
            Err(refused.into())
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let status = match refused {
            Refused::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Refused::Unreadable(_) | Refused::SignatureMalformed => StatusCode::BAD_REQUEST,
            Refused::Unsigned => StatusCode::UNAUTHORIZED,
            Refused::SignatureWrong | Refused::NoKeys | Refused::OtherPod(_) | Refused::Expired { .. } => {
                StatusCode::FORBIDDEN
            }
            Refused::OtherProcess(_) | Refused::LowerNumber { .. } | Refused::NumberReused(_) => StatusCode::CONFLICT,
        };
        Self::new(status, refused.code(), refused.to_string())
    }
}
