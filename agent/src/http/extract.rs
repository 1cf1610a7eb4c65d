//! Reads a request body within its bounds. Knows no endpoint.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{FromRequest, Request},
    http::{StatusCode, header},
};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
use stoker_edge::allocator;
use stoker_engine::FinishReason;

use crate::{
    admit::{Asked, admit},
    http::{
        device_time::DeviceTime,
        error::ApiError,
        fields::Fields,
        passage::{Passage, TOLD_BYTES_MAX},
        prompt_work,
        trace::RequestSpan,
    },
    replica::{OpenRequest, Replica},
};

/// Largest body, in bytes. A prompt that fills a context of a million tokens is smaller.
pub(crate) const MAX_BODY_BYTES: usize = 8 * 1024 * 1024;
/// A body above the limit is read to its end up to here: a client that still writes would see a broken connection
/// instead of the answer.
const MAX_DISCARDED_BYTES: usize = 8 * MAX_BODY_BYTES;
/// A body that has not arrived by then is given up.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The fields of a JSON body.
pub(crate) struct JsonFields(pub(crate) Fields);

impl FromRequest<Arc<Replica>> for JsonFields {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Arc<Replica>) -> Result<Self, ApiError> {
        refuse_encoded(&request)?;
        let body = read_body(request, MAX_BODY_BYTES).await?.freeze();
        Ok(Self(fields_of(body).await?))
    }
}

/// The fields of a JSON body that asks for tokens. The replica has taken the request before its body is read: one that is
/// refused costs no more than its head.
pub(crate) struct Admitted {
    /// Keeps the request open, and knows how it came.
    pub(crate) open: Arrival,
    /// What was asked.
    pub(crate) fields: Fields,
}

/// A request that was taken.
pub(crate) struct Arrival {
    /// Keeps it open.
    pub(crate) open: OpenRequest,
    /// How it came.
    pub(crate) passage: Passage,
    /// Its part of a trace.
    pub(crate) span: Option<RequestSpan>,
    /// What it had of its devices.
    pub(crate) device_time: DeviceTime,
}

impl Arrival {
    /// The error that the engine's failure is: of the replica, and then another one may be asked, or of the request.
    pub(crate) fn failed(&self, reason: &FinishReason) -> ApiError {
        let why = match reason {
            FinishReason::Expired => return ApiError::expired(),
            FinishReason::Unfollowed(why) => return ApiError::unfollowed(why),
            FinishReason::Error(why) => why,
            FinishReason::Stop | FinishReason::Length | FinishReason::Abort => "it was aborted",
        };
        match self.open.is_given_up() && !self.open.has_no_engine() {
            true => ApiError::given_up(why),
            false => ApiError::engine_failed(why),
        }
    }
}

impl FromRequest<Arc<Replica>> for Admitted {
    type Rejection = ApiError;

    async fn from_request(request: Request, replica: &Arc<Replica>) -> Result<Self, ApiError> {
        refuse_encoded(&request)?;
        match enter(replica) {
            Ok(open) => {
                let span = RequestSpan::begin(replica.spans(), &request, &replica.settings().served_names[0]);
                let (mut passage, n_told) = Passage::of(request.headers())?;
                let bytes_max = MAX_BODY_BYTES + n_told.min(TOLD_BYTES_MAX);
                let mut body = read_body(request, bytes_max).await?.freeze();
                passage.take_told(&mut body, n_told)?;
                let arrival = Arrival { open, passage, span, device_time: DeviceTime::default() };
                Ok(Self { open: arrival, fields: fields_of(body).await? })
            }
            Err(refused) => {
                discard(request).await;
                Err(refused)
            }
        }
    }
}

/// The fields of a body. A long one is parsed where no probe waits for it.
async fn fields_of(body: Bytes) -> Result<Fields, ApiError> {
    prompt_work::run(body.len(), move |_| Ok(Fields::parse(body)?)).await
}

fn enter(replica: &Arc<Replica>) -> Result<OpenRequest, ApiError> {
    let open = replica.enter()?;
    admit(replica.queue_load(), Asked::ONE)?;
    Ok(open)
}

/// A compressed body is told from one that is not JSON.
fn refuse_encoded(request: &Request) -> Result<(), ApiError> {
    match request.headers().get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => {
            let message = format!("content-encoding {encoding:?} is not supported: send the body as it is");
            Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_encoding", message))
        }
        _ => Ok(()),
    }
}

/// The body, or why it is refused.
async fn read_body(request: Request, bytes_max: usize) -> Result<BytesMut, ApiError> {
    match tokio::time::timeout(BODY_TIMEOUT, read_bounded(request, bytes_max)).await {
        Ok(body) => body,
        Err(_) => {
            let message = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
        }
    }
}

async fn read_bounded(request: Request, bytes_max: usize) -> Result<BytesMut, ApiError> {
    let announced = request.body().size_hint().lower();
    if announced > bytes_max as u64 && (awaits_word(&request) || announced > MAX_DISCARDED_BYTES as u64) {
        return Err(too_large(announced));
    }
    let mut body = request.into_body();
    let mut kept = BytesMut::with_capacity(announced.min(bytes_max as u64) as usize);
    let mut received = 0;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| broken(&error))?;
        let Some(data) = frame.data_ref() else { continue };
        received += data.len();
        if received > MAX_DISCARDED_BYTES {
            break;
        }
        if received <= bytes_max {
            kept.extend_from_slice(data);
        } else {
            kept = BytesMut::new();
        }
    }
    allocator::note_body(received);
    if received > bytes_max { Err(too_large(received as u64)) } else { Ok(kept) }
}

/// Reads what a client still writes of a request that is refused, and keeps none of it. One that waits for a word to begin
/// gets the answer instead.
async fn discard(request: Request) {
    if awaits_word(&request) {
        return;
    }
    let mut body = request.into_body();
    let read = async {
        let mut received = 0;
        while received <= MAX_DISCARDED_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            received += frame.data_ref().map_or(0, |data| data.len());
        }
    };
    // Whoever is too slow may lose the answer: it was refused anyway.
    let _ = tokio::time::timeout(BODY_TIMEOUT, read).await;
}

/// `Expect: 100-continue`: the client sends its body once it is asked for, which reading it does.
fn awaits_word(request: &Request) -> bool {
    request
        .headers()
        .get(header::EXPECT)
        .is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

fn broken(error: &axum::Error) -> ApiError {
    ApiError::new(StatusCode::BAD_REQUEST, "incomplete_body", format!("the body ended early: {error}"))
}

fn too_large(received: u64) -> ApiError {
    let message = format!(
        "the body has at least {received} bytes, the limit is {MAX_BODY_BYTES} ({} MiB): send a shorter prompt",
        MAX_BODY_BYTES / (1024 * 1024)
    );
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}
