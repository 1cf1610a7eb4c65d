//! The HTTP surface: which path leads to which handler, and what every request passes through. Decides nothing itself.

pub mod access;
mod admin;
mod anthropic;
mod body;
mod chat;
mod chat_answer;
mod choices;
mod completions;
mod device_time;
mod embeddings;
mod error;
mod extract;
mod fields;
mod filter;
mod generate;
pub mod giving;
mod json_object;
mod json_text;
mod json_walk;
mod logprobs;
mod long_texts;
mod messages;
mod models;
mod names;
mod neutral;
mod openapi;
mod params;
mod parts;
mod passage;
mod prefixes;
mod probes;
mod prompt;
mod prompt_work;
mod reasoning_tokens;
mod relevance;
mod rerank;
mod responses;
mod score;
mod stream;
mod structure;
mod token_account;
mod tokenize;
mod tools;
mod trace;
mod usage;
mod whole;
mod wire_prompt;

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    extract::{MatchedPath, Request, State},
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, Version, header::CONNECTION},
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use stoker_edge::trace::Parent;

pub use self::admin::admin_router;
use crate::{
    http::{error::ApiError, extract::Admitted},
    replica::Replica,
};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer ids are replaced: they end up in logs.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The endpoints of the public port: requests, and what load balancers and scrapers read. See [`admin_router`] for the other.
/// With `pages` for people beside them.
pub fn router(replica: Arc<Replica>, pages: Router<Arc<Replica>>) -> Router {
    pages
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::get).delete(responses::delete))
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/score", post(score::create))
        .route("/score", post(score::create))
        .route("/v1/rerank", post(rerank::create))
        .route("/v2/rerank", post(rerank::create))
        .route("/rerank", post(rerank::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
        .route("/invocations", post(invocations))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/version", get(models::version))
        .route("/openapi.json", get(openapi::document))
        .route("/health", get(probes::readyz))
        .route("/healthz", get(probes::healthz))
        .route("/readyz", get(probes::readyz))
        .route("/metrics", get(probes::metrics))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_path)
        .layer(middleware::from_fn_with_state(replica.clone(), observe))
        .layer(middleware::from_fn_with_state(replica.clone(), part))
        .with_state(replica)
}

/// Chat or text completion, told by what is asked: the one path that some platforms know.
async fn invocations(state: State<Arc<Replica>>, admitted: Admitted) -> Result<Response, ApiError> {
    match admitted.fields.has("messages") {
        true => chat::create(state, admitted).await,
        false => completions::create(state, admitted).await,
    }
}

async fn unknown_path(uri: Uri) -> ApiError {
    let message = format!("there is no endpoint {}: see GET /v1/models, POST /v1/chat/completions", uri.path());
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not answer to {method}: the methods it knows are in the header `allow`", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Gives every request an id, counts it and logs it. The duration is that of the head: a streamed body goes on after it.
async fn observe(State(replica): State<Arc<Replica>>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(&request);
    let method = request.method().clone();
    let path =
        request.extensions().get::<MatchedPath>().map_or("unmatched".to_owned(), |path| path.as_str().to_owned());
    let trace_id = Parent::of(request.headers()).map_or_else(String::new, |parent| parent.trace_id);
    let mut response = next.run(request).await;
    let status = response.status().as_u16();
    replica.metrics().http_request(&path, status);
    let seconds = started.elapsed().as_secs_f64();
    let request_id = id.to_str().unwrap_or_default();
    match status {
        500 => tracing::warn!(%method, path, status, seconds, request_id, trace_id, "request"),
        _ => tracing::debug!(%method, path, status, seconds, request_id, trace_id, "request"),
    }
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// A Service chooses a replica once a connection: who kept one to a replica that leaves would come back to it until it is gone.
async fn part(State(replica): State<Arc<Replica>>, request: Request, next: Next) -> Response {
    let can_part = request.version() <= Version::HTTP_11;
    let mut response = next.run(request).await;
    if can_part && replica.is_leaving() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn request_id(request: &Request) -> HeaderValue {
    let sent = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MAX_REQUEST_ID_BYTES && id.to_str().is_ok());
    sent.cloned().unwrap_or_else(|| {
        let drawn = format!("req-{:016x}", rand::random::<u64>());
        HeaderValue::from_str(&drawn).expect("hexadecimal digits are visible ASCII")
    })
}
