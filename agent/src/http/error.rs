//! The one mapping from what can go wrong to what a client sees: status, OpenAI's nested error body, `Retry-After`.
//! Decides nothing about requests; it only words the answer.

use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use stoker_edge::body::BodyError;
use stoker_engine::RejectReason;

use crate::{
    admit::Refusal,
    http::{
        fields::{FieldError, INVALID_VALUE},
        params::DEADLINE,
    },
};

/// An error as a client sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    /// HTTP status.
    pub(crate) status: StatusCode,
    /// What was asked, the limit, and what to change.
    pub(crate) message: String,
    /// The field at fault.
    pub(crate) param: Option<String>,
    /// A word programs can branch on, OpenAI's where it has one.
    pub(crate) code: &'static str,
    /// When to come back.
    pub(crate) retry_after_seconds: Option<u32>,
}

/// The body: `{"error": {...}}`.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorDetail<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorDetail<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl ApiError {
    /// An error without a field at fault.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code, retry_after_seconds: None }
    }

    /// A 400 about one field.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, INVALID_VALUE, message);
        Self { param: Some(param.into()), ..error }
    }

    /// A 400 about a list that needs an element.
    pub(crate) fn empty_array(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: "empty_array", ..Self::invalid(param, message) }
    }

    /// A 400 about a field that other servers know and this one does not.
    pub(crate) fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: "unsupported_parameter", ..Self::invalid(param, message) }
    }

    /// A 404 about a model that is not served here.
    pub(crate) fn unknown_model(name: &str, served_names: &[String]) -> Self {
        let message = format!("the model `{name}` does not exist here: use {}", served_names.join(" or "));
        Self { param: Some("model".into()), ..Self::new(StatusCode::NOT_FOUND, "model_not_found", message) }
    }

    /// The engine failed under an accepted request.
    pub(crate) fn engine_failed(reason: &str) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "engine_error", format!("the engine ended this request: {reason}"))
    }

    /// The engine stopped under an accepted request, and the process ends with it. Another replica may answer it, if it is not what stopped it.
    pub(crate) fn engine_died(reason: &str) -> Self {
        Self { code: "engine_died", ..Self::engine_failed(reason) }
    }

    /// What its answer must look like cannot be followed to the answer's end. No other replica could.
    pub(crate) fn unfollowed(reason: &str) -> Self {
        let message = format!("the form that this request asks for cannot be followed any further: {reason}");
        Self::new(StatusCode::BAD_REQUEST, "structure_not_followed", message)
    }

    /// It did not begin by its deadline.
    pub(crate) fn expired() -> Self {
        let message = "`deadline_ms` passed while the request waited for its turn: send it with a later one, with a `priority` that is \
                       smaller, or when less is to be done";
        Self { param: Some(DEADLINE.into()), ..Self::new(StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded", message) }
    }

    /// The replica ends, and with it an accepted request. Another one may answer it.
    pub(crate) fn given_up(reason: &str) -> Self {
        let message = format!("this replica ended before the answer did: {reason}; send the request again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "replica_ended", message).retry(1)
    }

    /// By the names that another API has for fields: `name` gives that of a chat request's field, if it is another one.
    pub(crate) fn in_words_of(self, name: impl Fn(&str) -> Option<String>) -> Self {
        let Some((was, is)) = self.param.as_deref().and_then(|param| Some((param, name(param)?))) else { return self };
        let message = self.message.replace(&format!("`{was}`"), &format!("`{is}`"));
        Self { message, param: Some(is), ..self }
    }

    /// The body, also for errors inside a stream.
    pub(crate) fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorDetail {
                message: &self.message,
                r#type: error_type(self.status),
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }

    fn retry(self, seconds: u32) -> Self {
        Self { retry_after_seconds: Some(seconds), ..self }
    }
}

/// OpenAI's names of error classes.
fn error_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        429 => "rate_limit_error",
        503 => "service_unavailable_error",
        400..=499 => "invalid_request_error",
        _ => "server_error",
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_seconds {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let unavailable = |code| Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message.clone());
        match refusal {
            Refusal::Loading { retry_after_seconds, .. } => unavailable("model_loading").retry(retry_after_seconds),
            Refusal::Draining { retry_after_seconds } => unavailable("draining").retry(retry_after_seconds),
            Refusal::Failed(_) => unavailable("model_failed"),
            Refusal::QueueFull { retry_after_seconds, .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry(retry_after_seconds)
            }
            Refusal::TooManySequences { asked, .. } => Self::invalid(asked.field(), message),
            Refusal::PromptTooLong { .. } | Refusal::PromptMuchTooLong { .. } => {
                Self { param: Some("prompt".into()), ..Self::new(StatusCode::BAD_REQUEST, CONTEXT_LENGTH, message) }
            }
            Refusal::MaxTokensTooLarge { asked, .. } => Self::invalid(asked.field, message),
        }
    }
}

const CONTEXT_LENGTH: &str = "context_length_exceeded";

impl From<RejectReason> for ApiError {
    fn from(reason: RejectReason) -> Self {
        let message = reason.to_string();
        match reason {
            RejectReason::EmptyPrompt | RejectReason::BadToken { .. } => Self::invalid("prompt", message),
            RejectReason::PromptTooLong { .. } => Self { code: CONTEXT_LENGTH, ..Self::invalid("prompt", message) },
            RejectReason::TooManyBiases { .. } => Self::invalid("logit_bias", message),
            RejectReason::TooManyLogprobs { .. } => Self::invalid("logprobs", message),
            RejectReason::NotOnThisDevice { field, .. } => Self::unsupported(field, message),
            RejectReason::OutputBehind { .. } => {
                Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry(1)
            }
            RejectReason::QueueFull { .. } => Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message).retry(1),
            RejectReason::Stopped(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", message).retry(5),
        }
    }
}

impl From<BodyError> for ApiError {
    fn from(error: BodyError) -> Self {
        let retry_after_seconds = error.retry_after_seconds();
        Self { retry_after_seconds, ..Self::new(error.status(), error.code(), error.to_string()) }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        let code = match error {
            FieldError::Malformed { .. } => "invalid_json",
            FieldError::Missing { .. } => "missing_required_parameter",
            FieldError::Twice { .. } => "duplicate_parameter",
            FieldError::WrongType { .. } => "invalid_type",
            FieldError::WrongValue { .. } => INVALID_VALUE,
            FieldError::OutOfRange { code, .. } => code,
            FieldError::Unknown { .. } => "unknown_parameter",
        };
        let param = error.param().map(str::to_owned);
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, code, error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body_of(error: &ApiError) -> serde_json::Value {
        serde_json::to_value(error.body()).unwrap()
    }

    #[test]
    fn the_body_is_openais_nested_form() {
        let error = ApiError::invalid("temperature", "too hot");
        let expected = serde_json::json!({"error": {
            "message": "too hot", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}});
        assert_eq!(body_of(&error), expected);
    }

    #[test]
    fn a_full_queue_is_429_and_draining_is_503_and_both_say_when_to_retry() {
        let full = Refusal::QueueFull { open: 4, sequences: 1, limit: 4, retry_after_seconds: 7 };
        let drain = Refusal::Draining { retry_after_seconds: 1 };
        for (refusal, status, seconds) in [(full, 429, "7"), (drain, 503, "1")] {
            let response = ApiError::from(refusal).into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers()["retry-after"], seconds);
        }
    }

    #[test]
    fn another_api_reads_its_own_names_of_fields() {
        let error = ApiError::invalid("stop", "`stop` has 17 strings: send fewer, and tokens in `stop_token_ids`");
        let renamed = error.clone().in_words_of(|name| (name == "stop").then(|| "stop_sequences".to_owned()));
        assert_eq!(renamed.param.as_deref(), Some("stop_sequences"));
        assert_eq!(renamed.message, "`stop_sequences` has 17 strings: send fewer, and tokens in `stop_token_ids`");
        assert_eq!(error.clone().in_words_of(|_| None), error);
    }

    #[test]
    fn a_long_prompt_has_openais_code() {
        let refusal = Refusal::PromptTooLong { prompt_tokens: 9, max_model_len: 8 };
        assert_eq!(body_of(&refusal.into())["error"]["code"], "context_length_exceeded");
    }
}
