//! One request: read, find its deployment, choose a replica, send it there and, while nothing has come back, to another one if that is
//! of use. What comes back is relayed.

use std::{io, sync::Arc, time::Duration};

use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, Method, StatusCode, header::CONTENT_TYPE, request::Parts},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Body as _;
use memchr::memmem;
use stoker_crds::route::{DRY_RUN, EXPLAIN, ForeseenRoute};
use stoker_edge::trace::TRACEPARENT;
use stoker_routing::{Chain, hash};

use crate::{
    access::Access,
    body,
    doors::whom,
    error::{Dialect, GatewayError},
    explain::{explained, foreseen},
    fleet::{Deployment, Fleet, Member, Whom},
    gateway::{Gateway, Routed},
    headers::{PREFIXES, REQUEST_ID, RESUME, ROUTE, prefixes, request_id, to_client, to_replica},
    line::Waiter,
    permit::{self, Permit},
    relay::{Relay, SILENCE},
    resume::Resumable,
    scan::Facts,
    search::{Loss, Losses, Patience, Rounds},
    tenants::Tenant,
    turns::{Turn, turn},
    upstream::ReplicaBody,
    usage::{Usage, device_time_of},
    vital::{DEAD, Flight, Life, Vital},
    whole::Telling,
};

/// Replicas that may refuse one request at most.
const REFUSALS_MAX: u32 = 3;
/// An answer that is not streamed is waited for if it is not longer.
const WHOLE_BYTES_MAX: u64 = 8 << 20;

/// Nobody knows before how long an answer gets: it is counted as so many tokens in line, or as fewer if it may have fewer only.
const ANSWER_TOKENS: u32 = 256;
/// Requests that no engine computes anything for: they go past the line where a replica takes requests.
const UNCOMPUTED: [&str; 3] = ["/tokenize", "/detokenize", "/v1/messages/count_tokens"];

/// How often somebody who waits for a replica looks whether it has said a word.
const LOOK: Duration = Duration::from_millis(50);

/// An answer of a replica: on its way, or all of it.
pub type Answered = hyper::Response<Either<ReplicaBody, Full<Bytes>>>;

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
    /// Of this request alone, whenever a replica is chosen for it.
    pub request: u64,
    streams: bool,
    /// It goes on with a response that one replica keeps.
    pub follows: bool,
    explains: bool,
    dialect: Dialect,
    /// Where it stands in line.
    class: i32,
    /// Tokens of its answer, as many as are counted before it is there.
    answer_tokens: u32,
    /// It should begin within so many milliseconds.
    begins_within_ms: Option<u32>,
}

impl Asked {
    /// What it takes to keep it while its answer is on its way, about. Until there is an answer it is here anyway, and one that is not
    /// streamed is there when all of it is.
    pub fn n_bytes(&self) -> u64 {
        if self.streams { self.body.len() as u64 } else { 0 }
    }

    /// One that no prompt is in.
    pub(crate) fn without_prompt(parts: Parts, id: &HeaderValue, tenant: Option<&Tenant>, body: Bytes) -> Self {
        Self {
            explains: wants_reasons(&parts.headers),
            path_and_query: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
            method: parts.method,
            headers: to_replica(parts.headers, id, tenant),
            body,
            chain: Chain::default(),
            session: None,
            request: hash(0, id.as_bytes()),
            // Nothing is computed for it: who is silent is lost.
            streams: true,
            follows: false,
            dialect: Dialect::Responses,
            class: 0,
            answer_tokens: 0,
            begins_within_ms: None,
        }
    }

    /// With the trace that replicas are told.
    fn traced(mut self, access: &Access) -> Self {
        if let Some(parent) = access.traceparent() {
            self.headers.insert(TRACEPARENT, parent);
        }
        self
    }

    /// Whether the reasons for its replica are to be in its answer.
    pub(crate) fn explains(&self) -> bool {
        self.explains
    }

    /// Headers of it for a replica.
    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// What waits in line for it, if it came at `begun_ms` and nobody waits for longer than `hold`.
    pub(crate) fn waiter(&self, tenant: Option<&Tenant>, begun_ms: u64, hold: Duration) -> Waiter {
        Waiter {
            tenant: tenant.map_or_else(String::new, |tenant| tenant.name.clone()),
            weight: tenant.map_or(1, |tenant| tenant.weight),
            class: self.class,
            tokens: self.chain.n_tokens().saturating_add(self.answer_tokens),
            n_bytes: self.body.len(),
            deadline_ms: begun_ms + hold.as_millis() as u64,
            due_ms: self.begins_within_ms.map(|within_ms| begun_ms + u64::from(within_ms)),
        }
    }
}

/// What came of asking one replica.
pub enum Attempt {
    /// An answer for the client.
    Answered(Answered, Flight),
    /// It said that another one should be asked.
    Refused(Answered, Flight),
    /// Nothing came back.
    Silent(Silence),
}

/// Why a replica did not answer.
pub enum Silence {
    /// No connection came about, or it stood still before.
    Unreachable(String),
    /// It was lost after the request was sent.
    Lost(Loss, String),
    /// It did not say that it lives, while others spoke. It may be slow: it can be asked again, and has more time then.
    Doubted,
}

impl Silence {
    fn why(&self) -> &str {
        match self {
            Self::Unreachable(error) | Self::Lost(_, error) => error,
            Self::Doubted => DEAD,
        }
    }
}

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
                Attempt::Answered(response, flight) | Attempt::Refused(response, flight) => {
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
    if UNCOMPUTED.contains(&asked.path_and_query.as_str()) && deployment.room(now_ms, 0).serves {
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

/// Whether it is only to be told where it would go.
pub(crate) fn is_rehearsal(headers: &HeaderMap) -> bool {
    headers.get(ROUTE).is_some_and(|value| value == DRY_RUN)
}

fn wants_reasons(headers: &HeaderMap) -> bool {
    headers.get(ROUTE).is_some_and(|value| value == EXPLAIN)
}

/// A word that was mistyped would be sent on, and its answer looked through for reasons in vain.
fn knows_word(headers: &HeaderMap) -> Result<(), GatewayError> {
    match headers.get(ROUTE) {
        Some(word) if word != EXPLAIN && word != DRY_RUN => Err(GatewayError::unknown_route_word()),
        _ => Ok(()),
    }
}

/// Reads what routing needs, and finds who is asked.
pub(crate) fn ask<'a>(
    fleet: &'a Fleet,
    whom: &Whom,
    tenant: Option<&Tenant>,
    parts: Parts,
    id: &HeaderValue,
    body: Bytes,
) -> Result<(Asked, &'a Arc<Deployment>), GatewayError> {
    if fleet.version.is_none() {
        return Err(GatewayError::no_endpoints_yet());
    }
    let Parts { method, uri, headers, .. } = parts;
    knows_word(&headers)?;
    let facts = Facts::scan(&body)?;
    let found = fleet.find(whom, facts.model.as_deref());
    let deployment = found.map_err(|lost| GatewayError::lost(&lost, &fleet.models(whom, tenant)))?;
    permit::may_ask(tenant, deployment)?;
    // Whose prompts are not shared, they are not looked for among others'.
    let own = tenant.filter(|tenant| !tenant.shares_prefixes);
    let salt = own.map_or(deployment.salt, |tenant| hash(deployment.salt, tenant.name.as_bytes()));
    let chain = Chain::of(salt, &facts.prompt(&body));
    // Of what follows a kept response, the prompt begins with what only its replica knows.
    let names = prefixes(&chain).filter(|_| !facts.follows);
    let mut asked = Asked {
        chain,
        session: facts.session.as_deref().map(|session| hash(salt, session.as_bytes())),
        request: hash(0, id.as_bytes()),
        streams: facts.stream,
        follows: facts.follows,
        explains: wants_reasons(&headers),
        dialect: Dialect::of(uri.path()),
        class: permit::class(tenant, facts.priority)?,
        answer_tokens: facts.max_tokens.unwrap_or(ANSWER_TOKENS).min(ANSWER_TOKENS),
        begins_within_ms: facts.begins_within_ms,
        path_and_query: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        headers: to_replica(headers, id, tenant),
        method,
        body: body.clone(),
    };
    asked.headers.extend(names.map(|names| (PREFIXES, names)));
    Ok((asked, deployment))
}

/// An answer of a replica that goes to the client.
struct Relayed {
    response: Answered,
    flight: Flight,
    /// It is a stream that can go on elsewhere.
    resumable: Option<Resumable>,
}

/// How long a deployment is looked at again that should have replicas and has none that takes requests: others may know that one is
/// ready a moment before this gateway has heard of it.
const NEWS: Duration = Duration::from_secs(2);

/// What asking replicas has come to while none has answered.
#[derive(Default)]
struct Tries {
    /// Who was asked in this round, by their slots.
    tried: Vec<u32>,
    n_refused: u32,
    losses: Losses,
    patience: Patience,
    /// Since somebody was silent.
    rounds: Option<Rounds>,
    refusal: Option<Relayed>,
    silence: Option<String>,
}

impl Tries {
    fn refused(&mut self, refusal: Relayed) {
        self.n_refused += 1;
        self.refusal = Some(refusal);
    }

    fn unreachable(&mut self, error: String, window: Duration) {
        self.rounds.get_or_insert_with(|| Rounds::within(window));
        self.silence = Some(error);
    }

    /// The time for the search begins again: a replica that had the request may have computed for long.
    fn lost(&mut self, how: Loss, error: String, window: Duration) {
        self.losses.add(how);
        self.rounds = Some(Rounds::within(window));
        self.silence = Some(error);
    }

    /// Whether another replica of this round may be asked. What a replica that was lost had taken is looked a place for as streams
    /// are; what none has taken yet is load that those who are full would only send on.
    fn may_ask(&self, gateway: &Gateway, asked: &Asked) -> bool {
        let is_free = self.n_refused == 0 || self.losses.is_any() || asked.follows;
        is_free || self.n_refused < REFUSALS_MAX && gateway.spend_retry()
    }

    /// Whether the request goes back in line: nobody had it, and nobody takes any. Who was asked has left.
    fn is_held(&self, gateway: &Gateway, asked: &Asked, deployment: &Deployment) -> bool {
        self.silence.is_none() && !asked.follows && !deployment.room(gateway.now_ms(), 0).serves
    }

    /// Whether those who were asked take no requests any more: others may be on their way, or it is not known yet that nobody does.
    fn all_leave(&self) -> bool {
        let status = self.refusal.as_ref().map(|refusal| refusal.response.status());
        self.silence.is_none() && status == Some(StatusCode::SERVICE_UNAVAILABLE)
    }

    /// Waits for another round, if one is of use.
    async fn next_round(&mut self, asked: &Asked, deployment: &Deployment) -> bool {
        if self.refusal.is_none() && self.silence.is_none() && deployment.replicas_wanted > 0 {
            self.rounds.get_or_insert_with(|| Rounds::within(NEWS));
        }
        if self.all_leave() && !asked.follows {
            // They are not asked again: they said no.
            return self.rounds.get_or_insert_with(|| Rounds::within(NEWS)).next().await;
        }
        let is_of_use = (self.refusal.is_none() || self.losses.is_any()) && !asked.follows;
        let Some(rounds) = self.rounds.as_mut().filter(|_| is_of_use) else { return false };
        self.tried.clear();
        rounds.next().await
    }

    /// What the client is told.
    fn end(self, deployment: &Deployment, attempts: u32) -> Result<Relayed, GatewayError> {
        match (self.refusal, self.silence) {
            (_, Some(error)) if self.losses.are_too_many() => Err(GatewayError::lost_before_answer(deployment, &error)),
            (Some(refusal), _) => Ok(refusal),
            (None, Some(error)) => Err(GatewayError::no_answer(deployment, attempts, &error)),
            (None, None) => Err(GatewayError::no_replica(deployment)),
        }
    }
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
                tries.refused(Relayed { response, flight, resumable: None });
                why
            }
            Attempt::Silent(Silence::Unreachable(error)) => {
                // Once: it may be asked in each round.
                if tries.silence.is_none() {
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
    tries.end(&deployment, access.attempts).map(Some)
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

/// Asks the replica that was chosen; `told`: to go on behind what was told of the answer.
pub async fn attempt(
    gateway: &Gateway,
    asked: &Asked,
    told: Option<&Bytes>,
    patience: Patience,
    routed: &Routed<'_>,
) -> Attempt {
    // Who alone knows the answer is not left for others.
    let others = Some((routed.deployment, patience)).filter(|_| !asked.follows);
    attempt_at(gateway, asked, told, others, routed.member, routed.choice.terms.uncached_tokens).await
}

/// Waits until a replica has been asked whether it lives, and others have spoken since and it has not for longer than is patience.
async fn doubted(gateway: &Gateway, vital: &Vital, others: Option<(&Deployment, Patience)>) {
    let Some((deployment, patience)) = others else { return std::future::pending().await };
    let is_doubted = || vital.is_silent_for(patience.time(), gateway.now_ms()) && deployment.speaks_louder_than(vital);
    while !is_doubted() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Asks one replica; `others`: who can be asked instead.
async fn attempt_at(
    gateway: &Gateway,
    asked: &Asked,
    told: Option<&Bytes>,
    others: Option<(&Deployment, Patience)>,
    member: &Member,
    prefill_tokens: u32,
) -> Attempt {
    let vital = &member.vital;
    let leaves_at = if others.is_some() { Life::LeftBehind } else { Life::Stalled };
    if vital.life() >= leaves_at {
        return Attempt::Silent(Silence::Unreachable(DEAD.to_owned()));
    }
    let flight = Flight::begin(vital, prefill_tokens);
    let address = member.address.as_deref().unwrap_or_default();
    let request = match request(asked, told, address) {
        Ok(request) => request,
        Err(error) => return Attempt::Silent(Silence::Unreachable(error.to_string())),
    };
    let limit = if asked.streams { SILENCE } else { gateway.settings.answer_timeout };
    let answer = async {
        let response = gateway.send(request).await.map_err(|error| match error.is_connect() {
            true => Silence::Unreachable(chain_of(&error)),
            false => Silence::Lost(Loss::Broken, chain_of(&error)),
        })?;
        vital.heard(gateway.now_ms());
        whole_if_short(response).await.map_err(|error| Silence::Lost(Loss::Broken, chain_of(&error)))
    };
    let silent = || Silence::Lost(Loss::Broken, format!("no answer came within {} s", limit.as_secs()));
    let answer = tokio::select! {
        answer = tokio::time::timeout(limit, answer) => answer.unwrap_or_else(|_| Err(silent())),
        () = vital.falls_to(leaves_at) => Err(Silence::Lost(Loss::Left, DEAD.to_owned())),
        () = doubted(gateway, vital, others) => return Attempt::Silent(Silence::Doubted),
    };
    let response = match answer {
        Ok(response) => response,
        Err(failed) => {
            vital.breaker(|breaker| breaker.failed(gateway.now_ms()));
            return Attempt::Silent(failed);
        }
    };
    vital.breaker(|breaker| breaker.answered());
    if response.extensions().get::<Ended>().is_some() {
        return Attempt::Silent(Silence::Lost(Loss::Left, "it ended before the answer did".to_owned()));
    }
    match response.status() {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Attempt::Refused(response, flight),
        StatusCode::NOT_FOUND if asked.follows => Attempt::Refused(response, flight),
        _ => Attempt::Answered(response, flight),
    }
}

/// A replica had a request and says that it ends before the answer does: no refusal, but a loss.
#[derive(Clone, Copy)]
struct Ended;

/// How agents call that. A text has its quotes escaped.
const ENDED: &[u8] = b"\"replica_ended\"";

/// Waits for all of an answer that was made before its head was sent, so that the request can be sent again if it breaks off.
async fn whole_if_short(response: hyper::Response<ReplicaBody>) -> io::Result<Answered> {
    let (mut parts, body) = response.into_parts();
    let is_short = body.size_hint().exact().is_some_and(|n_bytes| n_bytes <= WHOLE_BYTES_MAX);
    let body = match is_short && !is_stream(&parts.headers) {
        true => {
            let whole = body.whole().await?;
            match parts.status {
                StatusCode::OK => _ = parts.extensions.insert(Usage::of_whole(&whole).unwrap_or_default()),
                StatusCode::SERVICE_UNAVAILABLE if memmem::find(&whole, ENDED).is_some() => {
                    parts.extensions.insert(Ended);
                }
                _ => {}
            }
            Either::Right(Full::new(whole))
        }
        false => Either::Left(body),
    };
    Ok(Answered::from_parts(parts, body))
}

/// Whether an answer is a stream of events.
pub fn is_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

fn request(asked: &Asked, told: Option<&Bytes>, address: &str) -> hyper::http::Result<hyper::Request<Bytes>> {
    let uri = format!("http://{address}{}", asked.path_and_query);
    let body = told.map_or_else(|| asked.body.clone(), |told| [told.as_ref(), &asked.body].concat().into());
    let mut request = hyper::Request::builder().method(asked.method.clone()).uri(uri).body(body)?;
    *request.headers_mut() = asked.headers.clone();
    if let Some(told) = told {
        request.headers_mut().insert(RESUME, told.len().into());
    }
    Ok(request)
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

/// An error with its causes: the outermost alone says only that something failed.
fn chain_of(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    std::iter::once(error.to_string()).chain(causes.map(ToString::to_string)).collect::<Vec<_>>().join(": ")
}

fn explain(asked: &Asked, routed: &Routed<'_>, access: &Access, response: &mut Answered) {
    if asked.explains
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
    access.usage = parts.extensions.remove().unwrap_or_default();
    access.usage.device_time = access.usage.device_time.or_else(|| device_time_of(&parts.headers));
    let dialect = is_stream(&parts.headers).then_some(asked.dialect);
    to_client(&mut parts.headers);
    let relay = Relay::new(body, flight, access, dialect, resumable);
    Response::from_parts(parts, Body::new(relay))
}
