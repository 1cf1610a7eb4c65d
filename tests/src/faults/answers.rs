//! Requests and answers as they are passed on, and those that an API server gives that has trouble.

use std::io;

use anyhow::Result;
use axum::{
    body::{Body, Bytes},
    http::{StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use futures::stream;
use kube::client::Body as KubeBody;
use serde_json::json;

/// A request as the API server gets it.
pub(super) fn upstream(parts: &Parts, body: Bytes) -> Result<axum::http::Request<KubeBody>> {
    let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let mut request = axum::http::Request::builder().method(&parts.method).uri(target).body(KubeBody::from(body))?;
    for name in [header::ACCEPT, header::CONTENT_TYPE] {
        if let Some(value) = parts.headers.get(&name) {
            request.headers_mut().insert(name, value.clone());
        }
    }
    Ok(request)
}

/// An answer with this head and body.
pub(super) fn answer_of(head: &axum::http::response::Parts, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    if let Some(value) = head.headers.get(header::CONTENT_TYPE) {
        response.headers_mut().insert(header::CONTENT_TYPE, value.clone());
    }
    response
}

/// The API server's words for such a refusal.
pub(super) fn refusal(code: u16) -> Response {
    let reason = match code {
        403 => "Forbidden",
        409 => "Conflict",
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code,
        "message": "the script says so"});
    let code = StatusCode::from_u16(code).expect("codes are written above");
    (code, [(header::CONTENT_TYPE, "application/json"), (header::RETRY_AFTER, "1")], status.to_string()).into_response()
}

/// The connection ends without an answer.
pub(super) fn cut() -> Response {
    Response::new(broken(Bytes::new()))
}

/// What begins so, and breaks off.
pub(super) fn broken(beginning: Bytes) -> Body {
    let cut = Err(io::Error::other("the connection is cut"));
    Body::from_stream(stream::iter([Ok(beginning), cut]))
}

/// The event that says: what you missed is told no more, list again.
pub(super) fn expired() -> Bytes {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired",
        "message": "too old resource version", "code": 410});
    format!("{}\n", json!({"type": "ERROR", "object": status})).into()
}
