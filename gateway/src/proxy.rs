//! One request: read, find its deployment, choose a replica, send it there and, while nothing has come back, to another one if that is
//! of use. What comes back is relayed.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderValue, StatusCode, request::Parts},
    response::{IntoResponse, Response},
};
use stoker_crds::route::ForeseenRoute;

use crate::{
    access::Access,
    asked::{Asked, ask, is_rehearsal},
    attempt::{Answered, Attempt, Silence, attempt, attempt_at},
    body,
    doors::whom,
    error::{Dialect, GatewayError},
    explain::{explained, foreseen},
    fleet::Deployment,
    gateway::{Gateway, Routed},
    headers::{REQUEST_ID, ROUTE, is_stream, request_id, to_client},
    line::Waiter,
    permit::{self, Permit},
    relay::Relay,
    resume::Resumable,
    tries::Tries,
    turns::{Turn, turn},
    usage::Usage,
    vital::{DEAD, Flight},
    whole::Telling,
};

/// Answers a request about a response that one replica keeps: asks one after the other until one knows it.
pub async fn forward_stored(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let mut access = Access::begin(&gateway, parts.method.clone(), "/v1/responses/{id}", &parts.headers, id.clone());
    let whom = whom(&parts);
    let tenant = match permit::who(&gateway, &parts.headers).await {
        Ok(tenant) => tenant,
        Err(error) => return refused(&error, Dialect::Responses, access),
    };
    if is_rehearsal(&parts.headers) {
        return refused(&GatewayError::no_dry_run(), Dialect::Responses, access);
    }
    access.asked_by(tenant.as_ref());
    let asked = match body::read(&parts.headers, body, gateway.settings.body_bytes_max).await {
        Ok(body) => Asked::without_prompt(parts, &id, tenant.as_deref(), body).traced(&access),
        Err(error) => return refused(&error, Dialect::Responses, access),
    };
    let fleet = gateway.fleet();
    let mut last = GatewayError::new(StatusCode::NOT_FOUND, "response_not_found", "no replica keeps this response");
    let may = |deployment: &&Arc<Deployment>| permit::may_ask(tenant.as_deref(), deployment).is_ok();
    for deployment in fleet.within(&whom).iter().filter(may) {
        access.deployment = deployment.host();
        for member in deployment.candidates(gateway.now_ms(), &[]).0 {
            access.attempts += 1;
            access.pod.clone_from(&member.pod);
            match attempt_at(&gateway, &asked, None, None, member, 0).await {
                Attempt::Answered(response, _) if response.status() == StatusCode::NOT_FOUND => {}
                Attempt::Answered(mut response, flight) | Attempt::Refused(mut response, flight) => {
                    // What it tells of was counted when it was made.
                    response.extensions_mut().remove::<Usage>();
                    let mut response = relayed(Relayed { response, flight, resumable: None }, access, &asked);
                    response.headers_mut().insert(REQUEST_ID, id);
                    return response;
                }
                Attempt::Silent(silence) => {
                    last = GatewayError::no_answer(deployment, access.attempts, silence.why());
                }
            }
        }
    }
    refused(&last, Dialect::Responses, access)
}

/// Answers a request that a replica is to answer, or only with where it would go.
pub async fn forward(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let path = parts.uri.path().to_owned();
    let mut access = Access::begin(&gateway, parts.method.clone(), &path, &parts.headers, id.clone());
    if is_rehearsal(&parts.headers) {
        let mut response = match rehearse(&gateway, parts, body, &id, &mut access).await {
            Ok(foreseen) => rehearsed(&foreseen, access),
            Err(error) => refused(&error, Dialect::of(&path), access),
        };
        response.headers_mut().insert(REQUEST_ID, id);
        return response;
    }
    let mut response = match serve(&gateway, parts, body, &id, &mut access).await {
        Ok((answer, asked)) => relayed(answer, access, &asked),
        Err(error) => refused(&error, Dialect::of(&path), access),
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Who asks, what, whom, whether they may: then replicas are asked.
async fn serve(
    gateway: &Arc<Gateway>,
    parts: Parts,
    body: Body,
    id: &HeaderValue,
    access: &mut Access,
) -> Result<(Relayed, Arc<Asked>), GatewayError> {
    let (whom, tenant) = (whom(&parts), permit::who(gateway, &parts.headers).await?);
    access.asked_by(tenant.as_ref());
    let body = body::read(&parts.headers, body, gateway.settings.body_bytes_max).await?;
    let fleet = gateway.fleet();
    let (asked, deployment) = ask(&fleet, &whom, tenant.as_deref(), parts, id, body)?;
    let asked = asked.traced(access);
    let begin = |tenant| Permit::begin(gateway, tenant, asked.chain.n_tokens());
    access.permitted(tenant.as_ref().map(begin).transpose()?);
    let asked = Arc::new(asked);
    access.deployment = deployment.host();
    let (begun_ms, hold) = (gateway.now_ms(), gateway.settings.hold);
    loop {
        let waiter = asked.waiter(tenant.as_deref(), begun_ms, hold);
        let turn = wait(gateway, &asked, waiter, deployment, access).await?;
        match answer(gateway, &asked, turn, newest(gateway, Arc::clone(deployment)), access).await? {
            Some(answer) => return Ok((answer, asked)),
            None => tracing::debug!(deployment = access.deployment, "the last replica left; in line again"),
        }
    }
}

/// Who asks, what, whom, whether they may: then they are told what a choice would see. It is one of their tenant's requests, and has no tokens.
async fn rehearse(
    gateway: &Arc<Gateway>,
    parts: Parts,
    body: Body,
    id: &HeaderValue,
    access: &mut Access,
) -> Result<ForeseenRoute, GatewayError> {
    let (whom, tenant) = (whom(&parts), permit::who(gateway, &parts.headers).await?);
    access.asked_by(tenant.as_ref());
    let body = body::read(&parts.headers, body, gateway.settings.body_bytes_max).await?;
    let fleet = gateway.fleet();
    let (asked, deployment) = ask(&fleet, &whom, tenant.as_deref(), parts, id, body)?;
    access.permitted(tenant.as_ref().map(|tenant| Permit::begin(gateway, tenant, 0)).transpose()?);
    access.deployment = deployment.host();
    access.reason = "dry_run";
    Ok(foreseen(&gateway.foresee(deployment, &asked), asked.chain.n_tokens()))
}

fn rehearsed(foreseen: &ForeseenRoute, mut access: Access) -> Response {
    access.answered(StatusCode::OK.as_u16());
    access.whole();
    Json(foreseen).into_response()
}

/// Waits until a replica has room for a request.
pub(crate) async fn wait(
    gateway: &Arc<Gateway>,
    asked: &Asked,
    waiter: Waiter,
    deployment: &Deployment,
    access: &mut Access,
) -> Result<Option<Turn>, GatewayError> {
    let now_ms = gateway.now_ms();
    if asked.is_uncomputed() && deployment.room(now_ms, 0).serves {
        return Ok(None);
    }
    let turn = turn(gateway, deployment, waiter).await;
    access.line_time += Duration::from_millis(gateway.now_ms() - now_ms);
    turn.map(Some)
}

fn refused(error: &GatewayError, dialect: Dialect, mut access: Access) -> Response {
    access.answered(error.status.as_u16());
    access.whole();
    error.response(dialect)
}

/// An answer of a replica that goes to the client.
struct Relayed {
    response: Answered,
    flight: Flight,
    /// It is a stream that can go on elsewhere.
    resumable: Option<Resumable>,
}

/// Asks replicas until one answers, none is left or enough were asked. `None`: there is none any more, and nobody had the request.
async fn answer(
    gateway: &Arc<Gateway>,
    asked: &Arc<Asked>,
    mut turn: Option<Turn>,
    mut deployment: Arc<Deployment>,
    access: &mut Access,
) -> Result<Option<Relayed>, GatewayError> {
    gateway.earn_retry();
    let mut tries = Tries::default();
    loop {
        let Some(routed) = gateway.choose(&deployment, asked, &tries.tried) else {
            if tries.is_held(gateway, asked, &deployment) {
                return Ok(None);
            }
            if !tries.next_round(asked, &deployment).await {
                break;
            }
            deployment = newest(gateway, deployment);
            continue;
        };
        access.attempts += 1;
        access.pod.clone_from(&routed.member.pod);
        access.reason = routed.choice.reason.word();
        tries.tried.push(routed.member.slot);
        // From here on it counts at its replica.
        drop(turn.take());
        let why = match attempt(gateway, asked, None, tries.patience, &routed).await {
            Attempt::Answered(mut response, flight) => {
                explain(asked, &routed, access, &mut response);
                let resumable = resumable(gateway, asked, &routed, access, &response);
                return match resumable {
                    Some(resumable) if !is_stream(response.headers()) => {
                        let (response, flight) = Telling { response, flight, resumable }.whole(access).await?;
                        Ok(Some(Relayed { response, flight, resumable: None }))
                    }
                    resumable => Ok(Some(Relayed { response, flight, resumable })),
                };
            }
            Attempt::Refused(response, flight) => {
                let why = why_refused(response.status());
                tries.refused((response, flight));
                why
            }
            Attempt::Silent(Silence::Unreachable(error)) => {
                // Once: it may be asked in each round.
                if tries.all_spoke() {
                    tracing::warn!(pod = access.pod, error, "no connection to a replica");
                }
                tries.unreachable(error, gateway.settings.resume);
                "unreachable"
            }
            Attempt::Silent(Silence::Doubted) => {
                tries.patience.double();
                tries.unreachable(DEAD.to_owned(), gateway.settings.resume);
                "silent"
            }
            Attempt::Silent(Silence::Lost(how, error)) => {
                tracing::warn!(pod = access.pod, error, "a replica was lost before it answered");
                tries.lost(how, error, gateway.settings.resume);
                "lost"
            }
        };
        gateway.metrics.failed_attempts.with_label_values(&[access.deployment.as_str(), why]).inc();
        if tries.losses.are_too_many() || !tries.may_ask(gateway, asked) {
            break;
        }
        deployment = newest(gateway, deployment);
    }
    let (response, flight) = tries.end(&deployment, access.attempts)?;
    Ok(Some(Relayed { response, flight, resumable: None }))
}

/// Who is there may have changed since.
pub(crate) fn newest(gateway: &Gateway, deployment: Arc<Deployment>) -> Arc<Deployment> {
    gateway.fleet().of_host(&deployment.host()).map_or(deployment, Arc::clone)
}

fn why_refused(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "full",
        StatusCode::NOT_FOUND => "elsewhere",
        _ => "unavailable",
    }
}

/// How an answer could go on elsewhere, if it has marks.
fn resumable(
    gateway: &Arc<Gateway>,
    asked: &Arc<Asked>,
    routed: &Routed<'_>,
    access: &Access,
    response: &Answered,
) -> Option<Resumable> {
    let begin = || Resumable::begin(gateway, asked, &access.deployment, routed.member.slot, response.headers());
    if response.status() == StatusCode::OK { begin() } else { None }
}

fn explain(asked: &Asked, routed: &Routed<'_>, access: &Access, response: &mut Answered) {
    if asked.explains()
        && let Ok(value) =
            HeaderValue::from_str(&explained(&routed.member.pod, &routed.choice, access.attempts, access.line_time))
    {
        response.headers_mut().insert(ROUTE, value);
    }
}

/// The answer as the client gets it.
fn relayed(answer: Relayed, mut access: Access, asked: &Asked) -> Response {
    let Relayed { response, flight, resumable } = answer;
    let (mut parts, body) = response.into_parts();
    access.answered(parts.status.as_u16());
    access.usage = Usage::of_head(&parts.headers).and(parts.extensions.remove().unwrap_or_default());
    let dialect = is_stream(&parts.headers).then_some(asked.dialect);
    to_client(&mut parts.headers);
    let relay = Relay::new(body, flight, access, dialect, resumable);
    Response::from_parts(parts, Body::new(relay))
}
