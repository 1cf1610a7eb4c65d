//! The gateway as an endpoint picker: a proxy of the Gateway API that holds the connections asks where each request goes, in the protocol
//! of the Gateway API Inference Extension over Envoy's external processing, and is told by the choice that the gateway's own requests
//! are sent by: the same tenants, line, prefixes and loads.
//!
//! `messages` are what is said, `words` what is told, `pick` finds the replica, `talk` is the conversation about one request. Bodies pass
//! unchanged, and no replica is asked from here.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::Response,
    routing::post,
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_stream::Stream;
use tonic::{Status, Streaming, server::Grpc};
use tonic_prost::ProstCodec;
use tower::service_fn;

use self::{
    messages::{HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse, ServingStatus},
    talk::Talk,
};
use crate::{doors::Meant, gateway::Gateway};

pub mod messages;
mod pick;
mod talk;
pub mod words;

/// Where a proxy asks.
pub const PROCESS_PATH: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// Where it asks for health.
pub const HEALTH_PATH: &str = "/grpc.health.v1.Health/Check";

/// Of one message more than a body's limit: heads, and bodies that are just too long, which are refused in words.
const MESSAGE_BYTES_MORE: usize = 1 << 20;
/// Messages to a proxy that it has not taken yet.
const MESSAGES_AHEAD: usize = 16;

/// What is asked over gRPC.
pub fn routes() -> Router<Arc<Gateway>> {
    Router::new().route(PROCESS_PATH, post(process)).route(HEALTH_PATH, post(health))
}

/// One conversation for each request that a proxy has.
async fn process(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let meant = request.extensions().get::<Meant>().cloned();
    let bytes_max = 2 * gateway.settings.body_bytes_max + MESSAGE_BYTES_MORE;
    let talk = service_fn(move |said: tonic::Request<Streaming<ProcessingRequest>>| {
        let told = Telling::begin(Arc::clone(&gateway), meant.clone(), said.into_inner());
        async { Ok::<_, Status>(tonic::Response::new(told)) }
    });
    let mut grpc = Grpc::new(ProstCodec::default()).max_decoding_message_size(bytes_max);
    grpc.streaming(talk, request).await.map(Body::new)
}

async fn health(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let check = service_fn(move |asked: tonic::Request<HealthCheckRequest>| {
        let status = health_of(&asked.get_ref().service, gateway.is_ready());
        async move { status.map(|status| tonic::Response::new(HealthCheckResponse { status: status.into() })) }
    });
    Grpc::new(ProstCodec::default()).unary(check, request).await.map(Body::new)
}

/// How the process is, and whether requests should come here.
fn health_of(service: &str, is_ready: bool) -> Result<ServingStatus, Status> {
    match (service, is_ready) {
        ("" | "liveness", _) | ("readiness" | "envoy.service.ext_proc.v3.ExternalProcessor", true) => {
            Ok(ServingStatus::Serving)
        }
        ("readiness" | "envoy.service.ext_proc.v3.ExternalProcessor", false) => Ok(ServingStatus::NotServing),
        _ => Err(Status::not_found("liveness, readiness and envoy.service.ext_proc.v3.ExternalProcessor are known")),
    }
}

/// What a proxy is told in one conversation. It ends when this is dropped, and the request has no place at a replica any more.
struct Telling {
    told: mpsc::Receiver<Result<ProcessingResponse, Status>>,
    _talk: JoinSet<()>,
}

impl Telling {
    fn begin(gateway: Arc<Gateway>, meant: Option<Meant>, said: Streaming<ProcessingRequest>) -> Self {
        let (tell, told) = mpsc::channel(MESSAGES_AHEAD);
        let mut talk = JoinSet::new();
        talk.spawn(Talk::new(gateway, meant, said, tell).run());
        Self { told, _talk: talk }
    }
}

impl Stream for Telling {
    type Item = Result<ProcessingResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.told.poll_recv(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_told_by_the_names_of_the_protocol() {
        let of = |service, is_ready| health_of(service, is_ready).ok();
        for service in ["", "liveness"] {
            assert_eq!([true, false].map(|ready| of(service, ready)), [Some(ServingStatus::Serving); 2], "{service}");
        }
        for service in ["readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
            let told = [true, false].map(|ready| of(service, ready));
            assert_eq!(told, [Some(ServingStatus::Serving), Some(ServingStatus::NotServing)], "{service}");
        }
        assert_eq!(of("chat", true), None);
    }
}
