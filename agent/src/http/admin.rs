//! The admin port: what only operator, gateways and the kubelet ask. `GET /v1/load` is one reading, `GET /v1/history` those of a day, `GET /v1/model` what
//! is served and the memory that it took, `PUT /v1/intent` an order, `PUT /v1/holders` who has the model that this process fetches; `GET /v1/kv-events` is what the prefix cache holds, `GET /v1/accounts/GATEWAY` what
//! devices did for tenants and no answer told, for gateways. No Service has this port; an order is believed for its
//! signature alone, so whoever else reaches the port moves nothing.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::{Bytes, to_bytes},
    extract::{Path, Query, Request, State},
    http::StatusCode,
    middleware,
    routing::{get, put},
};
use serde::Deserialize;
use stoker_crds::{
    accounts::{ACCOUNTS_PATH, Accounts},
    contract::LoadReport,
    description::{DESCRIPTION_PATH, Description},
    history::{HISTORY_PATH, LoadHistory},
    holders::{BLOBS_PATH, HOLDERS_PATH, HOLDERS_PURPOSE, Holder, Holders, TICKET_HEADER},
    intent::{INTENT_PATH, ORDER_BYTES_MAX, SIGNATURE_HEADER},
    kv_events::{KV_EVENTS_PATH, KvEvents, WAIT_SECONDS_MAX},
};
use stoker_fetch::Giver;

use crate::{
    http::{error::ApiError, observe, probes, unknown_path, wrong_method},
    intent::{Addressed, Refused, signed_for},
    replica::Replica,
};

/// The endpoints of the admin port.
pub fn admin_router(replica: Arc<Replica>) -> Router {
    Router::new()
        // Here no crowd of clients stands before the kubelet, which restarts whoever does not answer.
        .route("/healthz", get(probes::healthz))
        .route("/v1/load", get(load))
        .route(HISTORY_PATH, get(history))
        .route(DESCRIPTION_PATH, get(description))
        .route(INTENT_PATH, put(intent))
        .route(HOLDERS_PATH, put(holders))
        .route(KV_EVENTS_PATH, get(kv_events))
        .route(&format!("{ACCOUNTS_PATH}/{{gateway}}"), get(accounts))
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

async fn accounts(State(replica): State<Arc<Replica>>, Path(gateway): Path<String>) -> Json<Accounts> {
    Json(replica.accounts(&gateway))
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

/// Takes the operator's word on who has the model; answers as to an order. Who fetches nothing has no use for it.
async fn holders(State(replica): State<Arc<Replica>>, request: Request) -> Result<Json<LoadReport>, ApiError> {
    let signature = request.headers().get(SIGNATURE_HEADER).map(|value| value.to_str().unwrap_or_default().to_owned());
    let body = to_bytes(request.into_body(), ORDER_BYTES_MAX).await.map_err(|_| Refused::TooLarge);
    let told = body.and_then(|body: Bytes| believed(&replica, &body, signature.as_deref()));
    let told = told.inspect_err(|refused| replica.note_refused(refused))?;
    let Some(suppliers) = replica.suppliers() else {
        return Err(ApiError::new(StatusCode::NOT_FOUND, "no_fetch", "this process fetches no model"));
    };
    suppliers.tell(told.holders.into_iter().map(given_by).collect(), Instant::now());
    Ok(Json(replica.load_report()))
}

fn believed(replica: &Replica, body: &[u8], signature: Option<&str>) -> Result<Holders, Refused> {
    let keys = replica.settings().authority.public_keys();
    let told: Holders = signed_for(HOLDERS_PURPOSE, body, signature, &keys)?;
    let Holders { pod_uid, start_id, expires_up_ms, .. } = &told;
    Addressed { pod_uid, start_id, expires_up_ms: *expires_up_ms }.to(replica.receiver())?;
    Ok(told)
}

fn given_by(Holder { pod, address, ticket, signature }: Holder) -> Giver {
    let headers = [(TICKET_HEADER, ticket), (SIGNATURE_HEADER, signature)].into();
    Giver { name: pod, url: format!("http://{address}{BLOBS_PATH}"), headers }
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
