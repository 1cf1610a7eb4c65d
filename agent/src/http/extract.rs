//! What a request must be before an endpoint sees it: taken by the replica, its body read and parsed. Knows no endpoint.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use stoker_edge::body::{self, MAX_BYTES, may_read};
use stoker_engine::FinishReason;

use crate::{
    admit::{Asked, admit},
    http::{
        device_time::DeviceTime,
        error::ApiError,
        fields::Fields,
        passage::{Passage, TOLD_BYTES_MAX, accounted},
        prompt_work,
        trace::RequestSpan,
    },
    replica::{OpenRequest, Replica, ReplicaEnd},
};

/// The fields of a JSON body.
pub(crate) struct JsonFields(pub(crate) Fields);

impl FromRequest<Arc<Replica>> for JsonFields {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &Arc<Replica>) -> Result<Self, ApiError> {
        let body = read(request, MAX_BYTES).await?;
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
        match self.open.replica_end() {
            Some(ReplicaEnd::Left) => ApiError::given_up(why),
            Some(ReplicaEnd::EngineDied) => ApiError::engine_died(why),
            None => ApiError::engine_failed(why),
        }
    }
}

impl FromRequest<Arc<Replica>> for Admitted {
    type Rejection = ApiError;

    async fn from_request(request: Request, replica: &Arc<Replica>) -> Result<Self, ApiError> {
        may_read(request.headers())?;
        match enter(replica) {
            Ok(open) => {
                let span = RequestSpan::begin(replica.spans(), &request, &replica.settings().served_names[0]);
                let account =
                    accounted(request.headers()).and_then(|(gateway, tenant)| replica.account(gateway, tenant));
                let (mut passage, n_told) = Passage::of(request.headers())?;
                let mut body = read(request, MAX_BYTES + n_told.min(TOLD_BYTES_MAX)).await?;
                passage.take_told(&mut body, n_told)?;
                let arrival = Arrival { open, passage, span, device_time: DeviceTime::on(account) };
                Ok(Self { open: arrival, fields: fields_of(body).await? })
            }
            Err(refused) => {
                let (parts, body) = request.into_parts();
                body::discard(&parts.headers, body).await;
                Err(refused)
            }
        }
    }
}

/// The body, in its place until the last of its fields was taken.
async fn read(request: Request, bytes_max: usize) -> Result<Bytes, ApiError> {
    let (parts, body) = request.into_parts();
    Ok(body::read(&parts.headers, body, bytes_max).await?.in_place())
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
