//! Reads a request's body within its bounds. Knows nothing of what is in it.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, StatusCode, header},
};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use stoker_edge::allocator::note_body;

use crate::error::GatewayError;

/// A body above the limit is read to its end up to this many times the limit: a client that still writes would see a broken connection
/// instead of the answer.
const DISCARDED: usize = 8;
/// A shorter body is less than the buffer that it comes in.
const COPIED_BYTES: usize = 16 << 10;
/// A body that has not arrived by then is given up.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// The body, or why it is refused.
pub async fn read(headers: &HeaderMap, body: Body, bytes_max: usize) -> Result<Bytes, GatewayError> {
    may_read(headers)?;
    let announced = body.size_hint().lower();
    let discarded_max = bytes_max.saturating_mul(DISCARDED);
    if announced > bytes_max as u64 && (awaits_word(headers) || announced > discarded_max as u64) {
        return Err(too_large(announced, bytes_max));
    }
    match tokio::time::timeout(TIMEOUT, collect(body, bytes_max)).await {
        Ok(read) => read.inspect(|body| note_body(body.len())),
        Err(_) => Err(too_late()),
    }
}

/// Whether a body comes as it is.
pub(crate) fn may_read(headers: &HeaderMap) -> Result<(), GatewayError> {
    let encoding = headers.get(header::CONTENT_ENCODING).filter(|encoding| *encoding != "identity");
    let Some(encoding) = encoding else { return Ok(()) };
    let message = format!("content-encoding {encoding:?} is not supported: send the body as it is");
    Err(GatewayError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message))
}

/// A body of which not all came within [`TIMEOUT`].
pub(crate) fn too_late() -> GatewayError {
    let message = format!("the body did not arrive within {} s", TIMEOUT.as_secs());
    GatewayError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
}

async fn collect(mut body: Body, bytes_max: usize) -> Result<Bytes, GatewayError> {
    let announced = body.size_hint().lower().min(bytes_max as u64) as usize;
    let (mut kept, mut received) = (BytesMut::new(), 0usize);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| broken(&error))?.into_data() else { continue };
        received += data.len();
        if received == data.len() && received >= announced && body.is_end_stream() {
            // All of it came at once.
            return if received > bytes_max { Err(too_large(received as u64, bytes_max)) } else { Ok(alone(data)) };
        }
        if received > bytes_max.saturating_mul(DISCARDED) {
            break;
        }
        if received <= bytes_max {
            kept.reserve(announced.saturating_sub(kept.len()));
            kept.extend_from_slice(&data);
        } else {
            kept = BytesMut::new();
        }
    }
    if received > bytes_max { Err(too_large(received as u64, bytes_max)) } else { Ok(kept.freeze()) }
}

/// A short body is copied: it would keep the buffer that its connection reads into for as long as its answer lasts.
fn alone(data: Bytes) -> Bytes {
    if data.len() < COPIED_BYTES { Bytes::copy_from_slice(&data) } else { data }
}

/// `Expect: 100-continue`: the client sends its body once it is asked for, which reading it does.
fn awaits_word(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

fn broken(error: &axum::Error) -> GatewayError {
    GatewayError::new(StatusCode::BAD_REQUEST, "incomplete_body", format!("the body ended early: {error}"))
}

/// A body of at least so many bytes.
pub(crate) fn too_large(received: u64, bytes_max: usize) -> GatewayError {
    let message = format!("the body has at least {received} bytes, the limit is {bytes_max}: send a shorter prompt");
    GatewayError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}
