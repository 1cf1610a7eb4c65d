//! What a client sees when the gateway itself refuses or fails: status, an error body in the form of the API that was asked,
//! `Retry-After`. Words answers, decides nothing.

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use serde_json::{Value, json};
use stoker_crds::endpoints::EndpointState;
use stoker_edge::body::BodyError;

use crate::{
    fleet::{Deployment, Lost},
    line::{Refusal, Shed},
    scan::ScanError,
};

/// How errors look, by the API that was asked.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Dialect {
    /// `/v1/chat/completions` and most others.
    OpenAi,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Anthropic,
}

impl Dialect {
    /// That of a path.
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Anthropic,
            "/v1/responses" => Self::Responses,
            _ => Self::OpenAi,
        }
    }
}

/// An error of the gateway.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayError {
    /// HTTP status.
    pub status: StatusCode,
    /// A word programs can branch on.
    pub code: &'static str,
    /// What was asked, the limit, and what to change.
    pub message: String,
    /// The field at fault.
    pub param: Option<&'static str>,
    /// When to come back.
    pub retry_after_seconds: Option<u32>,
}

impl GatewayError {
    /// An error without a field at fault.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), param: None, retry_after_seconds: None }
    }

    /// Nobody is known to ask.
    pub fn unauthorized(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, code, message)
    }

    /// A token cannot be judged.
    pub fn no_issuer_keys(issuer: &str) -> Self {
        let message =
            format!("keys of the issuer {issuer} could not be read yet: come back, or ask why it does not answer");
        Self::unavailable("issuer_unreachable", message, 5)
    }

    fn unavailable(code: &'static str, message: impl Into<String>, retry_after_seconds: u32) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
        Self { retry_after_seconds: Some(retry_after_seconds), ..error }
    }

    /// No document of the operator has come yet.
    pub fn no_endpoints_yet() -> Self {
        Self::unavailable(
            "no_endpoints_yet",
            "this gateway has not heard of any replica yet: the operator did not answer",
            2,
        )
    }

    /// A deployment without a replica that takes requests.
    pub fn no_replica(deployment: &Deployment) -> Self {
        let (host, wanted) = (deployment.host(), deployment.replicas_wanted);
        let [starting, _, draining, unready] = EndpointState::ALL.map(|state| deployment.count(state));
        if wanted == 0 && deployment.members.is_empty() {
            let message = format!(
                "{host} is scaled to zero, and no replica was started while the request was held: with scaling.toZero the \
                 operator starts one, if it runs; otherwise ask who scales it"
            );
            return Self::unavailable("scaled_to_zero", message, 30);
        }
        let message = format!(
            "no replica of {host} takes requests: {wanted} wanted, {starting} starting, {draining} draining, {unready} not ready"
        );
        let code = if starting > 0 { "model_loading" } else { "no_ready_replicas" };
        Self::unavailable(code, message, 5)
    }

    /// None of the endpoints that alone may be picked takes requests.
    pub fn none_of_subset(deployment: &Deployment, n_named: usize) -> Self {
        let message = format!(
            "none of the {n_named} endpoint(s) that the proxy allows is a replica of {} that takes requests",
            deployment.host()
        );
        Self::unavailable("no_ready_replicas", message, 5)
    }

    /// A path that no replica answers.
    pub fn unknown_path(path: &str) -> Self {
        let message = format!("there is no endpoint {path}: see GET /v1/models, POST /v1/chat/completions");
        Self::new(StatusCode::NOT_FOUND, "unknown_url", message)
    }

    /// What is asked about its route is not known.
    pub fn unknown_route_word() -> Self {
        let message = "`x-stoker-route` is `explain` or `dry-run`: write one of them, or leave it out";
        Self::new(StatusCode::BAD_REQUEST, "invalid_route_header", message)
    }

    /// It would not be a dry run.
    pub fn no_dry_run() -> Self {
        let message =
            "`x-stoker-route: dry-run` is for requests with a prompt, at the gateway's own address: leave it out";
        Self::new(StatusCode::BAD_REQUEST, "dry_run_unsupported", message)
    }

    /// A request that does not wait in line any longer, or not at all.
    pub fn shed(host: &str, Refusal { shed, retry_after_seconds }: Refusal, hold_seconds: f64) -> Self {
        let why = match shed {
            Shed::Full => "their line is full".to_owned(),
            Shed::Late => format!("it would wait for longer than {hold_seconds} s"),
            Shed::Displaced => "their line is full, and others go first".to_owned(),
            Shed::Expired => format!("it has waited for {hold_seconds} s"),
        };
        let message = format!(
            "requests for {host} wait already, and {why}: come back in {retry_after_seconds} s, or add replicas"
        );
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "overloaded", message);
        Self { retry_after_seconds: Some(retry_after_seconds), ..error }
    }

    /// A request that says by when it should begin, and does not.
    pub fn deadline_exceeded(host: &str, Refusal { shed, retry_after_seconds }: Refusal) -> Self {
        let when = if shed == Shed::Late { "would pass" } else { "passed" };
        let message = format!(
            "`deadline_ms` {when} while the request waits for its turn at {host}: send it with a later one, with a `priority` that is \
             smaller, or in {retry_after_seconds} s"
        );
        let error = Self::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message);
        Self { param: Some("deadline_ms"), retry_after_seconds: Some(retry_after_seconds), ..error }
    }

    /// Replicas that were asked and did not answer.
    pub fn no_answer(deployment: &Deployment, attempts: u32, last: &str) -> Self {
        let message = format!("{attempts} replica(s) of {} did not answer, the last one: {last}", deployment.host());
        Self::unavailable("replica_unreachable", message, 1)
    }

    /// A replica that took a request and was lost before it answered. Asked again, the request may end the next one, too.
    pub fn lost_before_answer(deployment: &Deployment, last: &str) -> Self {
        let message = format!("a replica of {} was lost before it answered: {last}", deployment.host());
        Self::new(StatusCode::BAD_GATEWAY, "replica_lost", message)
    }

    /// Which deployment is meant, nobody knows.
    pub fn lost(lost: &Lost, models: &[&str]) -> Self {
        let list = if models.is_empty() { "nothing is served".to_owned() } else { models.join(", ") };
        let (status, code, message) = match lost {
            Lost::Unknown(model) => {
                let message = format!("the model `{model}` does not exist here; there is: {list}");
                (StatusCode::NOT_FOUND, "model_not_found", message)
            }
            Lost::Ambiguous(model, hosts) => {
                let hosts = hosts.join(" and ");
                let message =
                    format!("the model `{model}` is served by {hosts}: name one of them in the header `host`");
                (StatusCode::BAD_REQUEST, "ambiguous_model", message)
            }
            Lost::Unnamed => {
                let message = format!("`model` is missing; there is: {list}");
                (StatusCode::BAD_REQUEST, "missing_required_parameter", message)
            }
        };
        Self { param: Some("model"), ..Self::new(status, code, message) }
    }

    /// The answer.
    pub fn response(&self, dialect: Dialect) -> Response {
        let mut response = Response::new(Body::from(self.text(dialect)));
        (*response.status_mut(), *response.headers_mut()) = (self.status, self.headers());
        response
    }

    /// Headers of the answer.
    pub fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, self.challenge());
        }
        headers
    }

    /// How to ask instead (RFC 6750, 3): what is wrong with a token that was sent, and nothing of the token.
    fn challenge(&self) -> HeaderValue {
        const REALM: HeaderValue = HeaderValue::from_static("Bearer realm=\"stoker\"");
        if self.code != "invalid_token" {
            return REALM;
        }
        let is_plain = |c: &char| matches!(c, ' '..='~') && !['"', '\\'].contains(c);
        let description: String = self.message.chars().filter(is_plain).collect();
        let challenge =
            format!("Bearer realm=\"stoker\", error=\"invalid_token\", error_description=\"{description}\"");
        HeaderValue::from_str(&challenge).unwrap_or(REALM)
    }

    /// Its body.
    pub fn text(&self, dialect: Dialect) -> String {
        self.body(dialect).to_string()
    }

    /// The last events of a stream that cannot go on.
    pub fn events(&self, dialect: Dialect) -> Bytes {
        let body = self.body(dialect);
        match dialect {
            Dialect::OpenAi => format!("data: {body}\n\ndata: [DONE]\n\n"),
            Dialect::Anthropic => format!("event: error\ndata: {body}\n\n"),
            Dialect::Responses => {
                let event = json!({"type": "error", "code": self.code, "message": self.message, "param": self.param});
                format!("event: error\ndata: {event}\n\ndata: [DONE]\n\n")
            }
        }
        .into()
    }

    fn body(&self, dialect: Dialect) -> Value {
        let (kind, message) = (self.kind(), &self.message);
        match dialect {
            Dialect::Anthropic => {
                json!({"type": "error", "error": {"type": anthropic(self.status), "message": message}})
            }
            _ => json!({"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}),
        }
    }

    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

/// Anthropic's names of error classes.
fn anthropic(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    }
}

impl From<BodyError> for GatewayError {
    fn from(error: BodyError) -> Self {
        let retry_after_seconds = error.retry_after_seconds();
        Self { retry_after_seconds, ..Self::new(error.status(), error.code(), error.to_string()) }
    }
}

impl From<ScanError> for GatewayError {
    fn from(error: ScanError) -> Self {
        let (code, param) = match error {
            ScanError::Malformed { .. } => ("invalid_json", None),
            ScanError::Twice { field } => ("duplicate_parameter", Some(field)),
            ScanError::WrongType { field, .. } => ("invalid_type", Some(field)),
        };
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, code, error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_model_is_told_with_the_list() {
        let error = GatewayError::lost(&Lost::Unknown("gpt".into()), &["chat", "code"]);
        let body = error.body(Dialect::OpenAi);
        assert_eq!((error.status.as_u16(), &body["error"]["code"]), (404, &json!("model_not_found")));
        assert_eq!(body["error"]["message"], "the model `gpt` does not exist here; there is: chat, code");
    }

    #[test]
    fn who_is_not_known_is_told_how_to_ask() {
        let challenge = |code, message: &str| {
            let headers = GatewayError::unauthorized(code, message).headers();
            headers[header::WWW_AUTHENTICATE].to_str().unwrap().to_owned()
        };
        assert_eq!(challenge("invalid_api_key", "no key"), "Bearer realm=\"stoker\"");
        assert_eq!(
            challenge("invalid_token", "use \"this\"\\, ä\n"),
            "Bearer realm=\"stoker\", error=\"invalid_token\", error_description=\"use this, \""
        );
        let busy = GatewayError::new(StatusCode::FORBIDDEN, "model_not_allowed", "no");
        assert!(!busy.headers().contains_key(header::WWW_AUTHENTICATE));
    }

    #[test]
    fn a_stream_ends_with_an_error_in_its_own_form() {
        let error = GatewayError::new(StatusCode::BAD_GATEWAY, "replica_lost", "gone");
        let text = |dialect| String::from_utf8(error.events(dialect).to_vec()).unwrap();
        assert!(
            text(Dialect::OpenAi).starts_with("data: {\"error\":{")
                && text(Dialect::OpenAi).ends_with("data: [DONE]\n\n")
        );
        let anthropic = text(Dialect::of("/v1/messages"));
        assert!(
            anthropic.starts_with("event: error\ndata: {") && anthropic.contains(r#""type":"api_error""#),
            "{anthropic}"
        );
        assert!(text(Dialect::of("/v1/responses")).contains(r#""code":"replica_lost""#));
    }
}
