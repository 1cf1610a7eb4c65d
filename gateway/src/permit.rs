//! A tenant's leave to ask: from the key or token that a request sends to what its answer cost. Without tenants everybody has leave, and nothing
//! is counted by name.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode};
use stoker_edge::api_key::{self, INVALID_API_KEY};

use crate::{
    error::GatewayError,
    fleet::Deployment,
    gateway::{Admission, Gateway},
    oidc::{Known, Now, Refused, token::is_like_one},
    quota::Exceeded,
    tenants::Tenant,
    usage::Usage,
};

/// Who sends a request, by its key or token; `None` where there are no tenants.
pub async fn who(gateway: &Gateway, headers: &HeaderMap) -> Result<Option<Arc<Tenant>>, GatewayError> {
    let Some(admission) = gateway.admission() else { return Ok(None) };
    let sent = api_key::sent(headers).unwrap_or_default();
    if let Some(tenant) = admission.tenants.of(sent) {
        return Ok(Some(Arc::clone(tenant)));
    }
    let found = match admission.tenants.issuers() {
        [_, ..] if is_like_one(sent) => by_token(gateway, &admission, sent).await,
        _ => Err(GatewayError::unauthorized("invalid_api_key", INVALID_API_KEY)),
    };
    if found.is_err() {
        gateway.metrics.refused_keys.inc();
    }
    found.map(Some)
}

async fn by_token(gateway: &Gateway, admission: &Admission, token: &[u8]) -> Result<Arc<Tenant>, GatewayError> {
    let known = admission.issuers.identify(token, Now::read()).await;
    let outcome = match &known {
        Ok(Known { is_remembered: true, .. }) => "remembered",
        Ok(Known { is_remembered: false, .. }) => "verified",
        Err(_) => "refused",
    };
    gateway.metrics.tokens.with_label_values(&[outcome]).inc();
    let identity = known.map_err(not_believed)?.identity;
    let forbidden = |why: String| GatewayError::new(StatusCode::FORBIDDEN, "unknown_tenant", why);
    let (tenant, is_of_class) = admission.tenants.meant(&identity).map_err(|nobody| forbidden(nobody.to_string()))?;
    if is_of_class && !gateway.has_account(&tenant.name) {
        return Err(forbidden("tokens have named too many tenants already: have tenantClaim name fewer".to_owned()));
    }
    Ok(tenant)
}

fn not_believed(refused: Refused) -> GatewayError {
    match refused {
        Refused::Token(error) => GatewayError::unauthorized("invalid_token", error.to_string()),
        Refused::NoKeys(issuer) => GatewayError::no_issuer_keys(&issuer),
    }
}

/// Whether a tenant may ask a deployment.
pub fn may_ask(tenant: Option<&Tenant>, deployment: &Deployment) -> Result<(), GatewayError> {
    let Some(tenant) = tenant.filter(|tenant| !tenant.may_ask(deployment)) else { return Ok(()) };
    let may = tenant.models.as_deref().unwrap_or_default().join(", ");
    let message = format!("tenant {} may not ask {}: it may ask for {may}", tenant.name, deployment.host());
    Err(GatewayError { param: Some("model"), ..GatewayError::new(StatusCode::FORBIDDEN, "model_not_allowed", message) })
}

/// The class of a request in line: its tenant's, or a later one that it asks for. Replicas see the same field, so that it is
/// refused and not changed.
pub fn class(tenant: Option<&Tenant>, asked: Option<i32>) -> Result<i32, GatewayError> {
    let Some(tenant) = tenant else { return Ok(asked.unwrap_or_default()) };
    let least = tenant.priority;
    match asked {
        Some(asked) if asked < least.min(0) => {
            let message = format!(
                "tenant {} may not ask for priority {asked}: use {least} or more, or leave it out",
                tenant.name
            );
            let error = GatewayError::new(StatusCode::FORBIDDEN, "priority_not_allowed", message);
            Err(GatewayError { param: Some("priority"), ..error })
        }
        asked => Ok(asked.map_or(least, |asked| asked.max(least))),
    }
}

/// A request within its tenant's limits. They have it back when it ends.
pub struct Permit {
    gateway: Arc<Gateway>,
    tenant: Arc<Tenant>,
    /// Tokens that were taken from the limit at its beginning.
    foreseen_tokens: u32,
}

impl Permit {
    /// A request of about so many prompt tokens begins, or is over a limit.
    pub fn begin(gateway: &Arc<Gateway>, tenant: &Arc<Tenant>, prompt_tokens: u32) -> Result<Self, GatewayError> {
        gateway.begin_of(tenant, prompt_tokens).map_err(|exceeded| over(tenant, exceeded))?;
        Ok(Self { gateway: Arc::clone(gateway), tenant: Arc::clone(tenant), foreseen_tokens: prompt_tokens })
    }

    /// It ended and cost this.
    pub fn end(self, usage: &Usage) {
        let prompt_tokens = usage.prompt_tokens.unwrap_or(self.foreseen_tokens);
        let tokens = i64::from(prompt_tokens) + i64::from(usage.completion_tokens);
        self.gateway.end_of(&self.tenant, tokens - i64::from(self.foreseen_tokens));
        let count = |kind, tokens: u32| {
            self.gateway
                .metrics
                .tenant_tokens
                .with_label_values(&[self.tenant.name.as_str(), kind])
                .inc_by(tokens.into());
        };
        count("prompt", prompt_tokens);
        count("cached", usage.cached_tokens);
        count("completion", usage.completion_tokens);
        if let Some(time) = usage.device_time {
            let family = &self.gateway.metrics.tenant_device_seconds;
            family.with_label_values(&[self.tenant.name.as_str()]).inc_by(time.as_secs_f64());
        }
    }
}

fn over(tenant: &Tenant, Exceeded { limit, most, retry_after_seconds }: Exceeded) -> GatewayError {
    let message = format!(
        "tenant {} is at its limit of {most} {limit} at this gateway: come back in {retry_after_seconds} s",
        tenant.name
    );
    let error = GatewayError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
    GatewayError { retry_after_seconds: Some(retry_after_seconds), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenants::Tenants;

    #[test]
    fn a_class_is_what_is_asked_for_and_never_sooner_than_the_tenant_s() {
        let of = |priority: i32, asked| {
            let tenants = Tenants::parse(&format!("tenants: [{{name: a, keys: [], priority: {priority}}}]")).unwrap();
            class(tenants.named("a").map(|tenant| &**tenant), asked).map_err(|error| error.code)
        };
        let refused = Err("priority_not_allowed");
        for (priority, asked, expected) in [
            (0, None, Ok(0)),
            (0, Some(7), Ok(7)),
            (0, Some(-1), refused),
            (5, None, Ok(5)),
            (5, Some(9), Ok(9)),
            // Agents take it for no more than what says nothing.
            (5, Some(0), Ok(5)),
            (5, Some(-1), refused),
            (-5, None, Ok(-5)),
            (-5, Some(-5), Ok(-5)),
            (-5, Some(-6), refused),
        ] {
            assert_eq!(of(priority, asked), expected, "{priority} {asked:?}");
        }
        assert_eq!(class(None, Some(-9)), Ok(-9), "without tenants it is everybody's to say");
    }
}
