//! The messages of `envoy.service.ext_proc.v3` that a conversation with a proxy is made of, and those of gRPC's health check: of each the
//! fields that are read or written here, with their numbers. Fields that are not named are passed over when they come. Decides nothing.

use std::collections::HashMap;

use bytes::Bytes;
use prost::{Enumeration, Message, Oneof};
use prost_types::Struct;

/// What a proxy says: `ProcessingRequest`.
#[derive(Clone, Message, PartialEq)]
pub struct ProcessingRequest {
    /// Which part of a request or its answer.
    #[prost(oneof = "Said", tags = "2, 3, 4, 5, 6, 7")]
    pub said: Option<Said>,
    /// What filters before it noted.
    #[prost(message, optional, tag = "8")]
    pub metadata_context: Option<Metadata>,
    /// It only tells, and takes no answers.
    #[prost(bool, tag = "10")]
    pub observability_mode: bool,
    /// How it sends bodies; in its first message.
    #[prost(message, optional, tag = "11")]
    pub protocol_config: Option<ProtocolConfiguration>,
}

/// A part of a request or its answer.
#[derive(Clone, Oneof, PartialEq)]
pub enum Said {
    /// The head of the request.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// The head of the answer.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A part of the request's body.
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    /// A part of the answer's body.
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    /// What follows the request's body.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// What follows the answer's body.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// How a proxy sends bodies.
#[derive(Clone, Copy, Message, PartialEq)]
pub struct ProtocolConfiguration {
    /// Those of requests.
    #[prost(enumeration = "BodySendMode", tag = "1")]
    pub request_body_mode: i32,
    /// Those of answers.
    #[prost(enumeration = "BodySendMode", tag = "2")]
    pub response_body_mode: i32,
}

/// How a body is sent: `ProcessingMode.BodySendMode`.
#[derive(Clone, Copy, Debug, Enumeration, Eq, PartialEq)]
#[repr(i32)]
pub enum BodySendMode {
    /// It is not.
    None = 0,
    /// In pieces, each of which waits for its answer.
    Streamed = 1,
    /// All of it at once.
    Buffered = 2,
    /// As much of it at once as fits.
    BufferedPartial = 3,
    /// In pieces that the other side sends back when it likes.
    FullDuplexStreamed = 4,
}

/// Notes of filters by their namespaces.
#[derive(Clone, Message, PartialEq)]
pub struct Metadata {
    /// By namespace.
    #[prost(map = "string, message", tag = "1")]
    pub filter_metadata: HashMap<String, Struct>,
}

/// A head.
#[derive(Clone, Message, PartialEq)]
pub struct HttpHeaders {
    /// Names in lower case; `:method`, `:path`, `:authority` and `:status` among them.
    #[prost(message, optional, tag = "1")]
    pub headers: Option<HeaderMap>,
    /// No body follows.
    #[prost(bool, tag = "3")]
    pub end_of_stream: bool,
}

/// A part of a body.
#[derive(Clone, Message, PartialEq)]
pub struct HttpBody {
    /// The part.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// Nothing follows, not even trailers.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// What follows a body.
#[derive(Clone, Message, PartialEq)]
pub struct HttpTrailers {
    /// Them.
    #[prost(message, optional, tag = "1")]
    pub trailers: Option<HeaderMap>,
}

/// `envoy.config.core.v3.HeaderMap`.
#[derive(Clone, Message, PartialEq)]
pub struct HeaderMap {
    /// In their order.
    #[prost(message, repeated, tag = "1")]
    pub headers: Vec<HeaderValue>,
}

/// `envoy.config.core.v3.HeaderValue`.
#[derive(Clone, Message, PartialEq)]
pub struct HeaderValue {
    /// Its name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Its value, if the next one is empty.
    #[prost(string, tag = "2")]
    pub value: String,
    /// Its value.
    #[prost(bytes = "bytes", tag = "3")]
    pub raw_value: Bytes,
}

/// What a proxy is told: `ProcessingResponse`.
#[derive(Clone, Message, PartialEq)]
pub struct ProcessingResponse {
    /// Of the part that it said.
    #[prost(oneof = "Told", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub told: Option<Told>,
    /// Notes for what comes behind it, by their namespaces.
    #[prost(message, optional, tag = "8")]
    pub dynamic_metadata: Option<Struct>,
}

/// What becomes of a part.
#[derive(Clone, Oneof, PartialEq)]
pub enum Told {
    /// Of the request's head.
    #[prost(message, tag = "1")]
    RequestHeaders(Answer),
    /// Of the answer's head.
    #[prost(message, tag = "2")]
    ResponseHeaders(Answer),
    /// Of a part of the request's body.
    #[prost(message, tag = "3")]
    RequestBody(Answer),
    /// Of a part of the answer's body.
    #[prost(message, tag = "4")]
    ResponseBody(Answer),
    /// Of what follows the request's body.
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    /// Of what follows the answer's body.
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    /// The request goes nowhere: this is its answer.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `HeadersResponse` and `BodyResponse`, which have the same one field.
#[derive(Clone, Message, PartialEq)]
pub struct Answer {
    /// What is changed.
    #[prost(message, optional, tag = "1")]
    pub response: Option<CommonResponse>,
}

/// Changes. Its `status`, the first field, stays 0: go on.
#[derive(Clone, Message, PartialEq)]
pub struct CommonResponse {
    /// Of the head.
    #[prost(message, optional, tag = "2")]
    pub header_mutation: Option<HeaderMutation>,
    /// Of the body.
    #[prost(message, optional, tag = "3")]
    pub body_mutation: Option<BodyMutation>,
    /// The route is to be looked for again, by the changed head.
    #[prost(bool, tag = "5")]
    pub clear_route_cache: bool,
}

/// Changes of a head.
#[derive(Clone, Message, PartialEq)]
pub struct HeaderMutation {
    /// To be set.
    #[prost(message, repeated, tag = "1")]
    pub set_headers: Vec<HeaderValueOption>,
    /// To be removed.
    #[prost(string, repeated, tag = "2")]
    pub remove_headers: Vec<String>,
}

/// `envoy.config.core.v3.HeaderValueOption`.
#[derive(Clone, Message, PartialEq)]
pub struct HeaderValueOption {
    /// The header.
    #[prost(message, optional, tag = "1")]
    pub header: Option<HeaderValue>,
    /// What becomes of one of that name that is there.
    #[prost(enumeration = "HeaderAppendAction", tag = "3")]
    pub append_action: i32,
}

/// What becomes of a header that is there.
#[derive(Clone, Copy, Debug, Enumeration, Eq, PartialEq)]
#[repr(i32)]
pub enum HeaderAppendAction {
    /// It stays, and the new one with it.
    AppendIfExistsOrAdd = 0,
    /// The new one takes its place.
    OverwriteIfExistsOrAdd = 2,
}

/// Changes of a body.
#[derive(Clone, Message, PartialEq)]
pub struct BodyMutation {
    /// The part that goes on, in full duplex; in other modes a body is left as it is.
    #[prost(message, optional, tag = "3")]
    pub streamed_response: Option<StreamedBodyResponse>,
}

/// A part of a body that goes on.
#[derive(Clone, Message, PartialEq)]
pub struct StreamedBodyResponse {
    /// The part.
    #[prost(bytes = "bytes", tag = "1")]
    pub body: Bytes,
    /// Nothing follows, not even trailers.
    #[prost(bool, tag = "2")]
    pub end_of_stream: bool,
}

/// What becomes of trailers: they stay as they are.
#[derive(Clone, Copy, Message, PartialEq)]
pub struct TrailersResponse {}

/// An answer that is not a replica's.
#[derive(Clone, Message, PartialEq)]
pub struct ImmediateResponse {
    /// Its status.
    #[prost(message, optional, tag = "1")]
    pub status: Option<HttpStatus>,
    /// Its headers.
    #[prost(message, optional, tag = "2")]
    pub headers: Option<HeaderMutation>,
    /// Its body.
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
    /// Why, for the proxy's log.
    #[prost(string, tag = "5")]
    pub details: String,
}

/// `envoy.type.v3.HttpStatus`.
#[derive(Clone, Copy, Message, PartialEq)]
pub struct HttpStatus {
    /// The number.
    #[prost(int32, tag = "1")]
    pub code: i32,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, Message, PartialEq)]
pub struct HealthCheckRequest {
    /// Whose health.
    #[prost(string, tag = "1")]
    pub service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, Copy, Message, PartialEq)]
pub struct HealthCheckResponse {
    /// How it is.
    #[prost(enumeration = "ServingStatus", tag = "1")]
    pub status: i32,
}

/// How a service is.
#[derive(Clone, Copy, Debug, Enumeration, Eq, PartialEq)]
#[repr(i32)]
pub enum ServingStatus {
    /// Nobody knows.
    Unknown = 0,
    /// It serves.
    Serving = 1,
    /// It does not.
    NotServing = 2,
}
