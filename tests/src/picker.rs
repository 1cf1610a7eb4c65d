//! Speaks to a gateway as a proxy does that asks it where requests go: gRPC of Envoy's external processing, one conversation a request.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use axum::{body::Bytes, http::Uri};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use prost_types::{ListValue, Struct, Value, value::Kind};
use stoker_gateway::picker::{
    HEALTH_PATH, PROCESS_PATH,
    messages::{
        Answer, BodySendMode, HeaderMap, HeaderMutation, HeaderValue, HealthCheckRequest, HealthCheckResponse,
        HttpBody, HttpHeaders, ImmediateResponse, Metadata, ProcessingRequest, ProcessingResponse,
        ProtocolConfiguration, Said, Told,
    },
    words::{DESTINATION, DESTINATION_NAMESPACE, SUBSET, SUBSET_NAMESPACE},
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Streaming, client::Grpc};
use tonic_prost::ProstCodec;

/// For what takes milliseconds on a machine that has nothing else to do.
const PATIENCE: Duration = Duration::from_secs(60);

/// A proxy's connection to who picks. Clones share it.
#[derive(Clone)]
pub struct Picker {
    http: Client<HttpConnector, tonic::body::Body>,
    origin: Uri,
}

impl Picker {
    /// At this `IP:PORT`.
    pub fn at(address: &str) -> Result<Self> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = Client::builder(TokioExecutor::new()).http2_only(true).build(connector);
        Ok(Self { http, origin: format!("http://{address}").parse()? })
    }

    fn grpc(&self) -> Grpc<Client<HttpConnector, tonic::body::Body>> {
        Grpc::with_origin(self.http.clone(), self.origin.clone())
    }

    /// How a service is.
    pub async fn health(&self, service: &str) -> Result<HealthCheckResponse, tonic::Status> {
        let (codec, path) = (ProstCodec::default(), Uri::from_static(HEALTH_PATH));
        let path = path.into_parts().path_and_query.expect("it is a path");
        let asked = tonic::Request::new(HealthCheckRequest { service: service.to_owned() });
        let mut grpc = self.grpc();
        grpc.ready().await.map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        Ok(grpc.unary(asked, path, codec).await?.into_inner())
    }

    /// Begins a conversation about a request.
    pub async fn begin(&self) -> Result<Conversation> {
        self.begin_with(Vec::new()).await
    }

    /// Begins one with a whole request, as a proxy does that has all of it.
    pub async fn begin_whole(&self, request: &Request, body: &str) -> Result<Conversation> {
        let body = Some(Said::RequestBody(part(body.to_owned(), true)));
        self.begin_with(vec![request.message(), ProcessingRequest { said: body, ..ProcessingRequest::default() }]).await
    }

    async fn begin_with(&self, messages: Vec<ProcessingRequest>) -> Result<Conversation> {
        let (say, said) = mpsc::channel(64);
        for message in messages {
            say.send(message).await?;
        }
        let path = Uri::from_static(PROCESS_PATH).into_parts().path_and_query.expect("it is a path");
        let codec: ProstCodec<ProcessingRequest, ProcessingResponse> = ProstCodec::default();
        let mut grpc = self.grpc();
        grpc.ready().await?;
        let told = grpc.streaming(tonic::Request::new(ReceiverStream::new(said)), path, codec);
        let told = timeout(PATIENCE, told).await.context("the conversation begins")??.into_inner();
        Ok(Conversation { say, told })
    }
}

/// How a request is told.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its head, with `:method`, `:path` and `:authority`.
    pub head: Vec<(String, String)>,
    /// Nothing follows.
    pub ends: bool,
    /// How bodies are sent.
    pub modes: Option<(BodySendMode, BodySendMode)>,
    /// Endpoints that alone may be picked.
    pub subset: Option<Vec<String>>,
}

impl Request {
    /// A request in full duplex, with a body.
    pub fn post(path: &str) -> Self {
        let pairs = [(":method", "POST"), (":path", path), (":authority", "gateway"), (":scheme", "http")];
        let duplex = BodySendMode::FullDuplexStreamed;
        let head = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Self { head, ends: false, modes: Some((duplex, duplex)), subset: None }
    }

    /// One without a body.
    pub fn get(path: &str) -> Self {
        let mut request = Self { ends: true, ..Self::post(path) };
        "GET".clone_into(&mut request.head[0].1);
        request
    }

    /// With a header more.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.head.push((name.to_owned(), value.to_owned()));
        self
    }

    fn message(&self) -> ProcessingRequest {
        let named = |subset: &Vec<String>| {
            let values = subset.iter().map(|endpoint| Kind::StringValue(endpoint.clone()));
            let values = values.map(|kind| Value { kind: Some(kind) }).collect();
            let list = Value { kind: Some(Kind::ListValue(ListValue { values })) };
            let hint = Struct { fields: BTreeMap::from([(SUBSET.to_owned(), list)]) };
            Metadata { filter_metadata: [(SUBSET_NAMESPACE.to_owned(), hint)].into() }
        };
        ProcessingRequest {
            said: Some(Said::RequestHeaders(head(&self.head, self.ends))),
            metadata_context: self.subset.as_ref().map(named),
            protocol_config: self.modes.map(|(request, response)| ProtocolConfiguration {
                request_body_mode: request.into(),
                response_body_mode: response.into(),
            }),
            observability_mode: false,
        }
    }
}

/// A head as Envoy sends it: values in bytes.
pub fn head<S: AsRef<str>>(pairs: &[(S, S)], end_of_stream: bool) -> HttpHeaders {
    let header = |(key, value): &(S, S)| HeaderValue {
        key: key.as_ref().to_owned(),
        value: String::new(),
        raw_value: Bytes::copy_from_slice(value.as_ref().as_bytes()),
    };
    HttpHeaders { headers: Some(HeaderMap { headers: pairs.iter().map(header).collect() }), end_of_stream }
}

/// A part of a body.
pub fn part(body: impl Into<Bytes>, end_of_stream: bool) -> HttpBody {
    HttpBody { body: body.into(), end_of_stream }
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Destination {
    /// As the header and the note say.
    pub address: String,
    /// Other headers to set.
    pub set: BTreeMap<String, String>,
    /// Headers to remove.
    pub removed: Vec<String>,
}

impl Destination {
    /// What an answer with a destination says; an error if header and note do not say the same.
    pub fn of(told: &ProcessingResponse) -> Result<Self> {
        let (Some(Told::RequestHeaders(Answer { response: Some(response) }))
        | Some(Told::RequestBody(Answer { response: Some(response) }))) = &told.told
        else {
            bail!("no destination: {told:?}")
        };
        let mutation = response.header_mutation.as_ref().context("the head is changed")?;
        let mut set = headers(mutation)?;
        let address = set.remove(DESTINATION).context("the header is set")?;
        let noted = told.dynamic_metadata.as_ref().and_then(|metadata| metadata.fields.get(DESTINATION_NAMESPACE));
        let Some(Kind::StructValue(noted)) = noted.and_then(|value| value.kind.as_ref()) else { bail!("no note") };
        let noted = noted.fields.get(DESTINATION).and_then(|value| value.kind.as_ref());
        ensure!(noted == Some(&Kind::StringValue(address.clone())), "the note is {noted:?}, the header {address}");
        Ok(Self { address, set, removed: mutation.remove_headers.clone() })
    }
}

/// Headers that are set.
pub fn headers(mutation: &HeaderMutation) -> Result<BTreeMap<String, String>> {
    let pair = |option: &stoker_gateway::picker::messages::HeaderValueOption| {
        let header = option.header.clone().context("a header")?;
        Ok((header.key, String::from_utf8(header.raw_value.to_vec())?))
    };
    mutation.set_headers.iter().map(pair).collect()
}

/// What a client is told in a replica's place.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Its status.
    pub status: i32,
    /// Its headers.
    pub headers: BTreeMap<String, String>,
    /// Its body.
    pub body: serde_json::Value,
}

impl Refusal {
    /// What an answer says that is a refusal.
    pub fn of(told: &ProcessingResponse) -> Result<Self> {
        let Some(Told::Immediate(ImmediateResponse { status, headers: set, body, .. })) = &told.told else {
            bail!("no refusal: {told:?}")
        };
        let status = status.context("a status")?.code;
        let headers = headers(set.as_ref().context("headers")?)?;
        Ok(Self { status, headers, body: serde_json::from_slice(body)? })
    }
}

/// A conversation about one request.
pub struct Conversation {
    say: mpsc::Sender<ProcessingRequest>,
    told: Streaming<ProcessingResponse>,
}

impl Conversation {
    /// Tells the head of the request.
    pub async fn ask(&self, request: &Request) -> Result<()> {
        Ok(self.say.send(request.message()).await?)
    }

    /// Says a part.
    pub async fn say(&self, said: Said) -> Result<()> {
        let message = ProcessingRequest { said: Some(said), ..ProcessingRequest::default() };
        Ok(self.say.send(message).await?)
    }

    /// What is told next; `None`: the conversation is over.
    pub async fn next(&mut self) -> Result<Option<ProcessingResponse>> {
        Ok(timeout(PATIENCE, self.told.message()).await.context("something is told")??)
    }

    /// What is told next.
    pub async fn told(&mut self) -> Result<ProcessingResponse> {
        self.next().await?.context("something is told")
    }

    /// A part of a body in full duplex, and whether it is the last.
    pub async fn passed(&mut self) -> Result<(Bytes, bool)> {
        let told = self.told().await?;
        let (Some(Told::RequestBody(Answer { response: Some(response) }))
        | Some(Told::ResponseBody(Answer { response: Some(response) }))) = &told.told
        else {
            bail!("no body: {told:?}")
        };
        let mutation = response.body_mutation.clone().context("a part")?;
        let part = mutation.streamed_response.context("a part of a stream")?;
        Ok((part.body, part.end_of_stream))
    }

    /// Asks with this body in full duplex, and takes all of it back; where it goes, or why nowhere.
    pub async fn whole(&mut self, request: &Request, body: &[u8]) -> Result<Result<Destination, Refusal>> {
        self.ask(request).await?;
        self.say(Said::RequestBody(part(body.to_vec(), true))).await?;
        let told = self.told().await?;
        if let Ok(refusal) = Refusal::of(&told) {
            return Ok(Err(refusal));
        }
        let destination = Destination::of(&told)?;
        let mut back = Vec::new();
        loop {
            let (piece, is_last) = self.passed().await?;
            back.extend_from_slice(&piece);
            if is_last {
                ensure!(back == body, "the body came back changed: {} of {} bytes", back.len(), body.len());
                return Ok(Ok(destination));
            }
        }
    }

    /// The answer came, whole.
    pub async fn answered(&mut self, status: &str, body: &str) -> Result<()> {
        let device_seconds = ("x-stoker-device-seconds", "2.000000");
        let answer = [(":status", status), ("content-type", "application/json"), device_seconds];
        self.say(Said::ResponseHeaders(head(&answer, false))).await?;
        let told = self.told().await?;
        ensure!(matches!(told.told, Some(Told::ResponseHeaders(_))), "{told:?}");
        self.say(Said::ResponseBody(part(body.to_owned(), true))).await?;
        let (back, is_last) = self.passed().await?;
        ensure!(back == body && is_last, "the answer came back changed: {back:?}");
        Ok(())
    }
}
