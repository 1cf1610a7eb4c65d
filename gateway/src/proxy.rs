//! One request: read, find its deployment, choose a replica, send it there and, while nothing has come back, to another one if that is
//! of use. What comes back is relayed.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::{Request, State},
    http::{
        HeaderMap, HeaderValue, Method, StatusCode, Uri,
        header::{CONTENT_TYPE, HOST},
        request::Parts,
    },
    response::Response,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body as _, Incoming};
use stoker_routing::{Chain, hash};

use crate::{
    access::Access,
    body,
    error::{Dialect, GatewayError},
    explain::explained,
    fleet::{Deployment, Fleet, Flight, Member},
    gateway::{Gateway, Routed},
    headers::{REQUEST_ID, RESUME, ROUTE, request_id, to_client, to_replica},
    relay::{Relay, SILENCE},
    resume::{LOSSES_MAX, Resumable},
    scan::Facts,
};

/// Replicas that are asked for one request at most.
const ATTEMPTS_MAX: u32 = 3;
/// An answer that is not streamed is waited for if it is not longer.
const WHOLE_BYTES_MAX: u64 = 8 << 20;

/// An answer of a replica: on its way, or all of it.
pub type Answered = hyper::Response<Either<Incoming, Full<Bytes>>>;

/// A request that was read.
pub struct Asked {
    method: Method,
    path_and_query: String,
    headers: HeaderMap,
    body: Bytes,
    /// The beginnings of its prompt.
    pub chain: Chain,
    /// What belongs together where prompts do not begin alike.
    pub session: Option<u64>,
    streams: bool,
    /// It goes on with a response that one replica keeps.
    follows: bool,
    explains: bool,
    dialect: Dialect,
}

impl Asked {
    /// What it takes to keep it, about.
    pub fn n_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    /// One that no prompt is in.
    fn without_prompt(parts: Parts, id: &HeaderValue, body: Bytes) -> Self {
        Self {
            path_and_query: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
            method: parts.method,
            headers: to_replica(parts.headers, id),
            body,
            chain: Chain::default(),
            session: None,
            // Nothing is computed for it: who is silent is lost.
            streams: true,
            follows: false,
            explains: false,
            dialect: Dialect::Responses,
        }
    }
}

/// What came of asking one replica.
pub enum Attempt {
    /// An answer for the client.
    Answered(Answered, Flight),
    /// It said that another one should be asked.
    Refused(Answered, Flight),
    /// No connection came about, or it stands still.
    Unreachable(String),
    /// It was lost after the request was sent.
    Lost(String),
}

/// Answers a request about a response that one replica keeps: asks one after the other until one knows it.
pub async fn forward_stored(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let metrics = Arc::clone(&gateway.metrics);
    let mut access = Access::begin(metrics, parts.method.clone(), "/v1/responses/{id}", &parts.headers, id.clone());
    let host = host_of(&parts.uri, &parts.headers);
    let asked = match body::read(&parts.headers, body, gateway.settings.body_bytes_max).await {
        Ok(body) => Arc::new(Asked::without_prompt(parts, &id, body)),
        Err(error) => return refused(&error, Dialect::Responses, access),
    };
    let fleet = gateway.fleet();
    let named = fleet.of_host(&host).map(std::slice::from_ref);
    let mut last = GatewayError::new(StatusCode::NOT_FOUND, "response_not_found", "no replica keeps this response");
    for deployment in named.unwrap_or(fleet.deployments()) {
        access.deployment = deployment.host();
        for member in deployment.candidates(gateway.now_ms(), &[]).0 {
            access.attempts += 1;
            access.pod.clone_from(&member.pod);
            match attempt(&gateway, &asked, None, member, 0).await {
                Attempt::Answered(response, _) if response.status() == StatusCode::NOT_FOUND => {}
                Attempt::Answered(response, flight) | Attempt::Refused(response, flight) => {
                    let mut response = relayed(Relayed { response, flight, resumable: None }, access, &asked);
                    response.headers_mut().insert(REQUEST_ID, id);
                    return response;
                }
                Attempt::Unreachable(error) | Attempt::Lost(error) => {
                    last = GatewayError::no_answer(deployment, access.attempts, &error);
                }
            }
        }
    }
    refused(&last, Dialect::Responses, access)
}

/// Answers a request that a replica is to answer.
pub async fn forward(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let path = parts.uri.path().to_owned();
    let dialect = Dialect::of(&path);
    let metrics = Arc::clone(&gateway.metrics);
    let mut access = Access::begin(metrics, parts.method.clone(), &path, &parts.headers, id.clone());
    let host = host_of(&parts.uri, &parts.headers);
    let read = body::read(&parts.headers, body, gateway.settings.body_bytes_max).await;
    let fleet = gateway.fleet();
    let asked = read.and_then(|body| {
        let (asked, deployment) = ask(&fleet, &host, parts.method, &parts.uri, parts.headers, &id, body)?;
        Ok((Arc::new(asked), Arc::clone(deployment)))
    });
    let mut response = match asked {
        Ok((asked, deployment)) => match answer(&gateway, &asked, deployment, &mut access).await {
            Ok(answer) => relayed(answer, access, &asked),
            Err(error) => refused(&error, dialect, access),
        },
        Err(error) => refused(&error, dialect, access),
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

fn refused(error: &GatewayError, dialect: Dialect, mut access: Access) -> Response {
    access.answered(error.status.as_u16());
    access.whole();
    error.response(dialect)
}

/// The host that was asked, however the request line says it.
fn host_of(uri: &Uri, headers: &HeaderMap) -> String {
    let header = || headers.get(HOST).and_then(|host| host.to_str().ok());
    uri.authority().map(|authority| authority.as_str()).or_else(header).unwrap_or_default().to_owned()
}

/// Reads what routing needs, and finds who is asked.
fn ask<'a>(
    fleet: &'a Fleet,
    host: &str,
    method: Method,
    uri: &Uri,
    headers: HeaderMap,
    id: &HeaderValue,
    body: Bytes,
) -> Result<(Asked, &'a Arc<Deployment>), GatewayError> {
    if fleet.version.is_none() {
        return Err(GatewayError::no_endpoints_yet());
    }
    let facts = Facts::scan(&body)?;
    let found = fleet.find(host, facts.model.as_deref());
    let deployment = found.map_err(|lost| GatewayError::lost(&lost, &fleet.models()))?;
    let asked = Asked {
        chain: Chain::of(deployment.salt, &facts.prompt(&body)),
        session: facts.session.as_deref().map(|session| hash(deployment.salt, session.as_bytes())),
        streams: facts.stream,
        follows: facts.follows,
        explains: headers.get(ROUTE).is_some_and(|value| value == "explain"),
        dialect: Dialect::of(uri.path()),
        path_and_query: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        headers: to_replica(headers, id),
        method,
        body: body.clone(),
    };
    Ok((asked, deployment))
}

/// An answer of a replica that goes to the client.
struct Relayed {
    response: Answered,
    flight: Flight,
    /// It is a stream that can go on elsewhere.
    resumable: Option<Resumable>,
}

/// Asks replicas until one answers, none is left or enough were asked.
async fn answer(
    gateway: &Arc<Gateway>,
    asked: &Arc<Asked>,
    mut deployment: Arc<Deployment>,
    access: &mut Access,
) -> Result<Relayed, GatewayError> {
    gateway.earn_retry();
    access.deployment = deployment.host();
    let (mut tried, mut refusal, mut silence, mut n_lost) = (Vec::new(), None, None, 0);
    let mut adds_load = false;
    // Who keeps a response is found by asking.
    let attempts_max = if asked.follows { u32::MAX } else { ATTEMPTS_MAX };
    while access.attempts < attempts_max {
        if access.attempts > 0 {
            if adds_load && !gateway.spend_retry() {
                break;
            }
            // Who is there may have changed meanwhile.
            let now = gateway.fleet().of_host(&access.deployment).cloned();
            deployment = now.unwrap_or(deployment);
        }
        let Some(routed) = gateway.choose(&deployment, &asked.chain, asked.session, &tried) else { break };
        access.attempts += 1;
        access.pod.clone_from(&routed.member.pod);
        access.reason = routed.choice.reason.word();
        tried.push(routed.member.slot);
        adds_load = false;
        let why = match attempt(gateway, asked, None, routed.member, routed.choice.terms.uncached_tokens).await {
            Attempt::Answered(mut response, flight) => {
                explain(asked, &routed, access, &mut response);
                let resumable = resumable(gateway, asked, &routed, access, &response);
                return Ok(Relayed { response, flight, resumable });
            }
            Attempt::Refused(response, flight) => {
                let why = match response.status() {
                    StatusCode::TOO_MANY_REQUESTS => "full",
                    StatusCode::NOT_FOUND => "elsewhere",
                    _ => "unavailable",
                };
                // Who is sent on from one that is full is load for another; who keeps a response is found by asking.
                adds_load = !asked.follows;
                refusal = Some(Relayed { response, flight, resumable: None });
                why
            }
            Attempt::Unreachable(error) => {
                tracing::warn!(pod = access.pod, error, "no connection to a replica");
                silence = Some(error);
                "unreachable"
            }
            Attempt::Lost(error) => {
                tracing::warn!(pod = access.pod, error, "a replica was lost before it answered");
                // What ends replicas must not go through all of them.
                n_lost += 1;
                if n_lost >= LOSSES_MAX {
                    return Err(GatewayError::lost_before_answer(&deployment, &error));
                }
                silence = Some(error);
                "lost"
            }
        };
        gateway.metrics.failed_attempts.with_label_values(&[access.deployment.as_str(), why]).inc();
    }
    match (refusal, silence) {
        (Some(refusal), _) => Ok(refusal),
        (None, Some(error)) => Err(GatewayError::no_answer(&deployment, access.attempts, &error)),
        (None, None) => Err(GatewayError::no_replica(&deployment)),
    }
}

/// Asks one replica; `told`: to go on behind what was told of the answer.
pub async fn attempt(
    gateway: &Gateway,
    asked: &Asked,
    told: Option<&Bytes>,
    member: &Member,
    prefill_tokens: u32,
) -> Attempt {
    let vital = &member.vital;
    if vital.is_stalled() {
        return Attempt::Unreachable("it has stalled".to_owned());
    }
    let flight = Flight::begin(vital, prefill_tokens);
    let address = member.address.as_deref().unwrap_or_default();
    let request = match request(asked, told, address) {
        Ok(request) => request,
        Err(error) => return Attempt::Unreachable(error.to_string()),
    };
    let limit = if asked.streams { SILENCE } else { gateway.settings.answer_timeout };
    let answer = async {
        let response = gateway.send(request).await.map_err(|error| (error.is_connect(), chain_of(&error)))?;
        vital.heard(gateway.now_ms());
        whole_if_short(response).await.map_err(|error| (false, chain_of(&error)))
    };
    let answer = tokio::select! {
        answer = tokio::time::timeout(limit, answer) => {
            answer.unwrap_or_else(|_| Err((false, format!("no answer came within {} s", limit.as_secs()))))
        }
        () = vital.stalled() => Err((true, "it has stalled".to_owned())),
    };
    match answer {
        Ok(response) => {
            vital.breaker(|breaker| breaker.answered());
            match response.status() {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Attempt::Refused(response, flight),
                StatusCode::NOT_FOUND if asked.follows => Attempt::Refused(response, flight),
                _ => Attempt::Answered(response, flight),
            }
        }
        Err((is_unreachable, why)) => {
            vital.breaker(|breaker| breaker.failed(gateway.now_ms()));
            if is_unreachable { Attempt::Unreachable(why) } else { Attempt::Lost(why) }
        }
    }
}

/// Waits for all of an answer that was made before its head was sent, so that the request can be sent again if it breaks off.
async fn whole_if_short(response: hyper::Response<Incoming>) -> Result<Answered, hyper::Error> {
    let (parts, body) = response.into_parts();
    let is_short = body.size_hint().exact().is_some_and(|n_bytes| n_bytes <= WHOLE_BYTES_MAX);
    let body = match is_short && !is_stream(&parts.headers) {
        true => Either::Right(Full::new(body.collect().await?.to_bytes())),
        false => Either::Left(body),
    };
    Ok(Answered::from_parts(parts, body))
}

/// Whether an answer is a stream of events.
pub fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

fn request(asked: &Asked, told: Option<&Bytes>, address: &str) -> hyper::http::Result<hyper::Request<Full<Bytes>>> {
    let uri = format!("http://{address}{}", asked.path_and_query);
    let body = told.map_or_else(|| asked.body.clone(), |told| [told.as_ref(), &asked.body].concat().into());
    let mut request = hyper::Request::builder().method(asked.method.clone()).uri(uri).body(Full::new(body))?;
    *request.headers_mut() = asked.headers.clone();
    if let Some(told) = told {
        request.headers_mut().insert(RESUME, told.len().into());
    }
    Ok(request)
}

/// How an answer could go on elsewhere. One that follows a response that only this replica keeps could not.
fn resumable(
    gateway: &Arc<Gateway>,
    asked: &Arc<Asked>,
    routed: &Routed<'_>,
    access: &Access,
    response: &Answered,
) -> Option<Resumable> {
    let may = response.status() == StatusCode::OK && is_stream(response.headers());
    let begin = || Resumable::begin(gateway, asked, &access.deployment, routed.member.slot, response.headers());
    if may { begin().filter(|_| !asked.follows) } else { None }
}

/// An error with its causes: the outermost alone says only that something failed.
fn chain_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    std::iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}

fn explain(asked: &Asked, routed: &Routed<'_>, access: &Access, response: &mut Answered) {
    if asked.explains
        && let Ok(value) = HeaderValue::from_str(&explained(&routed.member.pod, &routed.choice, access.attempts))
    {
        response.headers_mut().insert(ROUTE, value);
    }
}

/// The answer as the client gets it.
fn relayed(answer: Relayed, mut access: Access, asked: &Asked) -> Response {
    let Relayed { response, flight, resumable } = answer;
    let (mut parts, body) = response.into_parts();
    access.answered(parts.status.as_u16());
    let dialect = is_stream(&parts.headers).then_some(asked.dialect);
    to_client(&mut parts.headers);
    let relay = Relay::new(body, flight, access, dialect, resumable);
    Response::from_parts(parts, Body::new(relay))
}
