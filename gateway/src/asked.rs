//! A request that was read: what routing, its line and its replicas need to know of it, and whom it means. Sends nothing.

use std::{sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderValue, Method, request::Parts};
use bytes::Bytes;
use stoker_crds::route::{DRY_RUN, EXPLAIN};
use stoker_edge::trace::TRACEPARENT;
use stoker_routing::{Chain, hash};

use crate::{
    access::Access,
    error::{Dialect, GatewayError},
    fleet::{Deployment, Fleet, Whom},
    headers::{PREFIXES, RESUME, ROUTE, prefixes, to_replica},
    line::Waiter,
    permit,
    scan::Facts,
    tenants::Tenant,
};

/// Nobody knows before how long an answer gets: it is counted as so many tokens in line, or as fewer if it may have fewer only.
const ANSWER_TOKENS: u32 = 256;
/// Requests that no engine computes anything for: they go past the line where a replica takes requests.
const UNCOMPUTED: [&str; 3] = ["/tokenize", "/detokenize", "/v1/messages/count_tokens"];

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
    /// Its answer is to be a stream.
    pub(crate) streams: bool,
    /// It goes on with a response that one replica keeps.
    pub follows: bool,
    explains: bool,
    /// How its errors are written.
    pub(crate) dialect: Dialect,
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
    pub(crate) fn traced(mut self, access: &Access) -> Self {
        if let Some(parent) = access.traceparent() {
            self.headers.insert(TRACEPARENT, parent);
        }
        self
    }

    /// Whether the reasons for its replica are to be in its answer.
    pub(crate) fn explains(&self) -> bool {
        self.explains
    }

    /// Whether no engine computes anything for it.
    pub(crate) fn is_uncomputed(&self) -> bool {
        UNCOMPUTED.contains(&self.path_and_query.as_str())
    }

    /// Headers of it for a replica.
    pub(crate) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// What is sent to the replica at this address; `told`: to go on behind what was told of the answer.
    pub(crate) fn to(&self, address: &str, told: Option<&Bytes>) -> hyper::http::Result<hyper::Request<Bytes>> {
        let uri = format!("http://{address}{}", self.path_and_query);
        let body = told.map_or_else(|| self.body.clone(), |told| [told.as_ref(), &self.body].concat().into());
        let mut request = hyper::Request::builder().method(self.method.clone()).uri(uri).body(body)?;
        *request.headers_mut() = self.headers.clone();
        if let Some(told) = told {
            request.headers_mut().insert(RESUME, told.len().into());
        }
        Ok(request)
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
