//! A request's body, within the bounds of [`stoker_edge::body`].

use axum::{body::Body, http::HeaderMap};
use bytes::Bytes;
use stoker_edge::body;

use crate::error::GatewayError;

/// The body, or why it is refused. It stays as long as its answer may have to be asked for again: what waits and runs is counted as
/// requests, not as bodies that are being read.
pub async fn read(headers: &HeaderMap, body: Body, bytes_max: usize) -> Result<Bytes, GatewayError> {
    Ok(body::read(headers, body, bytes_max).await?.counted_elsewhere())
}
