//! The gateway's paths: which it answers itself and which a replica does. And its end: unready first, then no new connections, then
//! none at all.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, Request, State},
    http::{HeaderMap, Method, StatusCode, Uri, header::HOST},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use stoker_edge::connections::{self, Limits};
use tokio::net::TcpListener;

use crate::{
    error::{Dialect, GatewayError},
    fleet::{Fleet, Lost},
    gateway::Gateway,
    proxy::{forward, forward_stored},
};

/// What replicas answer.
const FORWARDED: [&str; 8] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/invocations",
    "/tokenize",
    "/detokenize",
];

/// How the gateway ends.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    /// Unready and still taking requests for this long, so that load balancers stop sending first.
    pub withdraw: Duration,
    /// What is being answered then may take this much longer.
    pub drain: Duration,
}

/// All paths, with `pages` for people beside them.
pub fn router(gateway: Arc<Gateway>, pages: Router<Arc<Gateway>>) -> Router {
    let own = pages
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/responses/{id}", get(forward_stored).delete(forward_stored))
        .route("/v1/responses/{id}/cancel", post(forward_stored))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/health", get(readyz))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path);
    FORWARDED.iter().fold(own, |router, path| router.route(path, post(forward))).with_state(gateway)
}

/// Serves until `stop`, then lets requests finish.
pub async fn serve(
    listener: TcpListener,
    gateway: Arc<Gateway>,
    pages: Router<Arc<Gateway>>,
    leaving: Leaving,
    stop: impl Future<Output = ()>,
) {
    use axum::serve::ListenerExt;
    // Without this the kernel holds a token back for up to 40 ms to fill a packet.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "no TCP_NODELAY");
        }
    });
    let (ended, told) = tokio::sync::oneshot::channel::<()>();
    let ends = async {
        // The sender is dropped only with this whole function.
        let _ = told.await;
    };
    let served = connections::serve(listener, router(Arc::clone(&gateway), pages), Limits::default(), || {}, ends);
    let mut served = std::pin::pin!(served);
    tokio::select! {
        () = &mut served => return,
        () = stop => gateway.leave(),
    }
    tracing::info!(withdraw_seconds = leaving.withdraw.as_secs(), "leaving: not ready any more");
    tokio::select! {
        () = &mut served => return,
        () = tokio::time::sleep(leaving.withdraw) => {}
    }
    let _ = ended.send(());
    if tokio::time::timeout(leaving.drain, served).await.is_err() {
        tracing::warn!(drain_seconds = leaving.drain.as_secs(), "ending with requests under way");
    }
}

async fn readyz(State(gateway): State<Arc<Gateway>>) -> (StatusCode, &'static str) {
    match gateway.is_ready() {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "it is leaving, or has not heard of any replica yet"),
    }
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Result<String, (StatusCode, String)> {
    gateway.render_metrics().map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// OpenAI's list: of the deployment that the host names, or of all.
async fn models(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    let fleet = gateway.fleet();
    let data: Vec<Value> = names(&fleet, &headers).into_iter().map(card).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, Path(id): Path<String>) -> Response {
    let fleet = gateway.fleet();
    let names = names(&fleet, &headers);
    match names.contains(&id.as_str()) {
        true => Json(card(&id)).into_response(),
        false => GatewayError::lost(&Lost::Unknown(id), &names).response(Dialect::OpenAi),
    }
}

fn names<'a>(fleet: &'a Fleet, headers: &HeaderMap) -> Vec<&'a str> {
    let host = headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    match fleet.of_host(host) {
        Some(deployment) => deployment.models.iter().map(String::as_str).collect(),
        None => fleet.models(),
    }
}

fn card(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "stoker"})
}

async fn unknown_path(uri: Uri) -> Response {
    let message = format!("there is no endpoint {}: see GET /v1/models, POST /v1/chat/completions", uri.path());
    GatewayError::new(StatusCode::NOT_FOUND, "unknown_url", message).response(Dialect::OpenAi)
}

async fn wrong_method(method: Method, request: Request) -> Response {
    let message = format!("{} does not answer to {method}", request.uri().path());
    GatewayError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).response(Dialect::OpenAi)
}
