//! Which replica a request of another proxy goes to: who asks, what, whom, whether they may, its turn, the choice. The same functions in
//! the same order as for a request that comes here; but this one is sent by the proxy, once.

use std::sync::Arc;

use axum::http::{HeaderValue, Method, request::Parts};
use bytes::Bytes;

use crate::{
    access::Access,
    asked::{Asked, ask, is_rehearsal},
    doors::whom,
    error::GatewayError,
    explain::explained,
    fleet::{Deployment, Fleet, Whom},
    gateway::Gateway,
    headers::{self, Changes},
    permit::{self, Permit},
    proxy::{newest, wait},
    server::FORWARDED,
    tenants::Tenant,
    vital::Flight,
};

/// Paths under which replicas say what they are or keep, beside those that are routed by what is asked.
const UNROUTED: [&str; 2] = ["/v1/models", "/v1/responses"];

/// What is known of a request when a replica is picked for it.
pub(super) struct Question {
    /// Its head, with its host.
    pub(super) parts: Parts,
    /// By which it is found in logs.
    pub(super) id: HeaderValue,
    /// Endpoints that alone may be picked.
    pub(super) subset: Option<Vec<String>>,
}

/// Where it goes.
pub(super) struct Picked {
    /// `IP:PORT`.
    pub(super) address: String,
    /// What is changed of its head.
    pub(super) changes: Changes,
    /// Its place there.
    pub(super) flight: Flight,
    /// Why there, if that was asked for.
    pub(super) reasons: Option<HeaderValue>,
}

/// How a replica is picked for a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    /// By its prompt, which is in its body.
    ByPrompt,
    /// By load: nothing is computed for it.
    Uncomputed,
}

/// How a replica is picked for a request; an error for what this gateway would not send on either.
pub(super) fn way(parts: &Parts) -> Result<Way, GatewayError> {
    if is_rehearsal(&parts.headers) {
        // The proxy would send it.
        return Err(GatewayError::no_dry_run());
    }
    let path = parts.uri.path();
    let is_of = |base: &str| path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    match FORWARDED.contains(&path) && parts.method == Method::POST {
        true => Ok(Way::ByPrompt),
        false if UNROUTED.into_iter().any(is_of) => Ok(Way::Uncomputed),
        false => Err(GatewayError::unknown_path(path)),
    }
}

/// Picks; `body`: all of it, or none where it is not to be known. Waits until a replica has room.
pub(super) async fn pick(
    gateway: &Arc<Gateway>,
    question: Question,
    body: Option<Bytes>,
    access: &mut Access,
) -> Result<Picked, GatewayError> {
    let Question { parts, id, subset } = question;
    let way = way(&parts)?;
    let (whom, tenant) = (whom(&parts), permit::who(gateway, &parts.headers).await?);
    access.asked_by(tenant.as_ref());
    let (fleet, sent) = (gateway.fleet(), parts.headers.clone());
    let (asked, deployment) = match body {
        Some(body) => ask(&fleet, &whom, tenant.as_deref(), parts, &id, body)?,
        None => {
            let deployment = only(&fleet, &whom, tenant.as_deref())?;
            (Asked::without_prompt(parts, &id, tenant.as_deref(), Bytes::new()), deployment)
        }
    };
    access.deployment = deployment.host();
    among(deployment, subset.as_deref())?;
    let begin = |tenant| Permit::begin(gateway, tenant, asked.chain.n_tokens());
    access.permitted(tenant.as_ref().map(begin).transpose()?);
    let search = Search { gateway, asked: &asked, tenant: tenant.as_deref(), subset, way };
    let (address, flight, reasons) = search.run(deployment, access).await?;
    Ok(Picked { address, changes: headers::changes(&sent, asked.headers()), flight, reasons })
}

/// The search for a replica that has room.
struct Search<'a> {
    gateway: &'a Arc<Gateway>,
    asked: &'a Asked,
    tenant: Option<&'a Tenant>,
    subset: Option<Vec<String>>,
    way: Way,
}

/// Where a request goes, its place there, and why if that was asked for.
type Found = (String, Flight, Option<HeaderValue>);

impl Search<'_> {
    async fn run(&self, deployment: &Arc<Deployment>, access: &mut Access) -> Result<Found, GatewayError> {
        let gateway = self.gateway;
        let (begun_ms, hold) = (gateway.now_ms(), gateway.settings.hold);
        loop {
            let turn = match self.way == Way::Uncomputed && deployment.room(gateway.now_ms(), 0).serves {
                true => None,
                false => {
                    let waiter = self.asked.waiter(self.tenant, begun_ms, hold);
                    wait(gateway, self.asked, waiter, deployment, access).await?
                }
            };
            let deployment = newest(gateway, Arc::clone(deployment));
            let found = self.choose(&deployment, access)?;
            // From here on it counts at its replica.
            drop(turn);
            match found {
                Some(found) => return Ok(found),
                None if deployment.room(gateway.now_ms(), 0).serves => {
                    return Err(GatewayError::no_replica(&deployment));
                }
                None => tracing::debug!(deployment = access.deployment, "the last replica left; in line again"),
            }
        }
    }

    fn choose(&self, deployment: &Deployment, access: &mut Access) -> Result<Option<Found>, GatewayError> {
        let outside = among(deployment, self.subset.as_deref())?;
        let Some(routed) = self.gateway.choose(deployment, self.asked, &outside) else { return Ok(None) };
        access.attempts += 1;
        access.pod.clone_from(&routed.member.pod);
        access.reason = routed.choice.reason.word();
        let reasons = explained(&access.pod, &routed.choice, access.attempts, access.line_time);
        let reasons = self.asked.explains().then(|| HeaderValue::from_str(&reasons).ok()).flatten();
        let flight = Flight::begin(&routed.member.vital, routed.choice.terms.uncached_tokens);
        Ok(Some((routed.member.address.clone().unwrap_or_default(), flight, reasons)))
    }
}

/// The deployment of a request that says nothing of its model.
fn only<'a>(fleet: &'a Fleet, whom: &Whom, tenant: Option<&Tenant>) -> Result<&'a Arc<Deployment>, GatewayError> {
    if fleet.version.is_none() {
        return Err(GatewayError::no_endpoints_yet());
    }
    let deployment = fleet.find(whom, None).map_err(|lost| GatewayError::lost(&lost, &fleet.models(whom, tenant)))?;
    permit::may_ask(tenant, deployment).map(|()| deployment)
}

/// Slots of replicas that may not be picked; an error if no other takes requests.
fn among(deployment: &Deployment, subset: Option<&[String]>) -> Result<Vec<u32>, GatewayError> {
    let Some(subset) = subset else { return Ok(Vec::new()) };
    let is_named = |address: &Option<String>| address.as_ref().is_some_and(|address| subset.contains(address));
    let outside = deployment.members.iter().filter(|member| !is_named(&member.address));
    let outside: Vec<u32> = outside.map(|member| member.slot).collect();
    match deployment.candidates(0, &outside).0.is_empty() {
        true => Err(GatewayError::none_of_subset(deployment, subset.len())),
        false => Ok(outside),
    }
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    #[test]
    fn a_request_is_picked_for_by_its_prompt_or_by_load_and_not_to_try_it() {
        let way = |method: Method, path: &str, route: &str| {
            let request = Request::builder().method(method).uri(path).header("x-stoker-route", route);
            way(&request.body(()).unwrap().into_parts().0).map_err(|error| error.code)
        };
        for (path, expected) in [
            ("/v1/chat/completions", Ok(Way::ByPrompt)),
            ("/v1/responses/resp_1", Ok(Way::Uncomputed)),
            ("/metrics", Err("unknown_url")),
        ] {
            assert_eq!(way(Method::POST, path, "explain"), expected, "{path}");
            assert_eq!(way(Method::POST, path, "dry-run"), Err("dry_run_unsupported"), "{path}");
        }
    }
}
