//! The gateway's paths: which it answers itself and which a replica does, and on a port of their own what is not for clients. And its end:
//! unready first, then no new connections, then none at all.

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, Request, State},
    http::{Method, StatusCode, Uri},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};
use stoker_crds::{
    endpoints::{LINES_PATH, Lines},
    in_flight::IN_FLIGHT_PATH,
};
use stoker_edge::{
    connections::{ADMIN_LIMITS, Limits},
    cors,
};
use tokio::{net::TcpListener, sync::watch};

use crate::{
    doors::{House, whom},
    error::{Dialect, GatewayError},
    fleet::Lost,
    gateway::Gateway,
    in_flight, permit, picker,
    proxy::{forward, forward_stored},
    tls::Tls,
};

/// What replicas answer.
pub(crate) const FORWARDED: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
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

/// All paths for clients, with `pages` for people beside them.
pub fn router(gateway: Arc<Gateway>, pages: Router<Arc<Gateway>>) -> Router {
    let own = pages
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/responses/{id}", get(forward_stored).delete(forward_stored))
        .route("/v1/responses/{id}/cancel", post(forward_stored))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/health", get(readyz))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path);
    let own = if gateway.settings.picks_endpoints { own.merge(picker::routes()) } else { own };
    FORWARDED.iter().fold(own, |router, path| router.route(path, post(forward))).with_state(gateway)
}

/// What the operator, other gateways and whoever watches ask. It has no key, and tells of tenants and pods: no Service leads there.
pub fn admin_router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route(LINES_PATH, get(lines))
        .route(IN_FLIGHT_PATH, get(in_flight::stream))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
        .with_state(gateway)
}

/// Where connections come in.
pub struct Listeners {
    /// Of clients, for all deployments.
    pub clients: TcpListener,
    /// On it, if there is any.
    pub tls: Option<Tls>,
    /// Of [`admin_router`].
    pub admin: TcpListener,
}

/// Serves until `stop`, then lets requests finish.
pub async fn serve(
    listeners: Listeners,
    gateway: Arc<Gateway>,
    pages: Router<Arc<Gateway>>,
    leaving: Leaving,
    stop: impl Future<Output = ()>,
) {
    let (ended, told) = watch::channel(false);
    let Listeners { clients, tls, admin } = listeners;
    let address = clients.local_addr().map_or(IpAddr::from([0, 0, 0, 0]), |address| address.ip());
    let limits = Limits { http2: gateway.settings.picks_endpoints, ..Limits::default() };
    let shared = cors::shared(router(Arc::clone(&gateway), pages), &gateway.settings.allowed_origins);
    let admin = House::new(admin_router(Arc::clone(&gateway)), ADMIN_LIMITS, told.clone()).serve_all(admin, None);
    let house = House::new(shared, limits, told);
    let (all, each) = (house.clone().serve_all(clients, tls), house.serve_each(Arc::clone(&gateway), address));
    let mut served = std::pin::pin!(async { tokio::join!(all, each, admin) });
    tokio::select! {
        _ = &mut served => return,
        () = stop => gateway.leave(),
    }
    tracing::info!(withdraw_seconds = leaving.withdraw.as_secs(), "leaving: not ready any more");
    tokio::select! {
        _ = &mut served => return,
        () = tokio::time::sleep(leaving.withdraw) => {}
    }
    ended.send_replace(true);
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

/// What waits here, for the operator, which makes replicas by it.
async fn lines(State(gateway): State<Arc<Gateway>>) -> Json<Lines> {
    Json(gateway.turns.lines(&gateway.fleet(), gateway.now_ms()))
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Result<String, (StatusCode, String)> {
    gateway.render_metrics().map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// OpenAI's list: of the deployment that the host names, or of all.
async fn models(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let (parts, fleet) = (request.into_parts().0, gateway.fleet());
    let tenant = match permit::who(&gateway, &parts.headers).await {
        Ok(tenant) => tenant,
        Err(error) => return error.response(Dialect::OpenAi),
    };
    let data: Vec<Value> = fleet.models(&whom(&parts), tenant.as_deref()).into_iter().map(card).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(gateway): State<Arc<Gateway>>, Path(id): Path<String>, request: Request) -> Response {
    let (parts, fleet) = (request.into_parts().0, gateway.fleet());
    let tenant = match permit::who(&gateway, &parts.headers).await {
        Ok(tenant) => tenant,
        Err(error) => return error.response(Dialect::OpenAi),
    };
    let names = fleet.models(&whom(&parts), tenant.as_deref());
    match names.contains(&id.as_str()) {
        true => Json(card(&id)).into_response(),
        false => GatewayError::lost(&Lost::Unknown(id), &names).response(Dialect::OpenAi),
    }
}

fn card(id: &str) -> Value {
    json!({"id": id, "object": "model", "created": 0, "owned_by": "stoker"})
}

async fn unknown_path(uri: Uri) -> Response {
    GatewayError::unknown_path(uri.path()).response(Dialect::OpenAi)
}

async fn wrong_method(method: Method, request: Request) -> Response {
    let message = format!("{} does not answer to {method}", request.uri().path());
    GatewayError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).response(Dialect::OpenAi)
}
