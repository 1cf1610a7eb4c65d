//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API. A request is translated into the chat request
//! that asks for the same and answered as that one is; only the forms of request, answer and error are this module's.

mod blocks;
mod request;

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use crate::{
    http::{
        anthropic::blocks::{Blocks, Events, MessageHead, usage_body},
        body::{End, streamed},
        chat::{self, Begun},
        choices::Completion,
        error::ApiError,
        extract::{Admitted, JsonFields},
        fields::{FieldError, Fields},
        generate,
        params::Delivery,
        parts::Parts,
        prompt::Prompt,
        whole::{Writing, whole},
    },
    replica::Replica,
};

/// The versions of the API that are spoken here: what they say of text and tools is the same.
const VERSIONS: [&str; 3] = ["2023-06-01", "2023-01-01", "2026-10-21"];

/// Answers a message.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    headers: HeaderMap,
    admitted: Result<Admitted, ApiError>,
) -> Response {
    match answer(&replica, &headers, admitted).await {
        Ok(response) => response,
        Err(error) => refused(&error),
    }
}

/// Counts the tokens that a message's prompt would have.
pub(crate) async fn count_tokens(
    State(replica): State<Arc<Replica>>,
    headers: HeaderMap,
    fields: Result<JsonFields, ApiError>,
) -> Response {
    match count(&replica, &headers, fields).await {
        Ok(n_tokens) => Json(json!({"input_tokens": n_tokens})).into_response(),
        Err(error) => refused(&error),
    }
}

async fn answer(
    replica: &Arc<Replica>,
    headers: &HeaderMap,
    admitted: Result<Admitted, ApiError>,
) -> Result<Response, ApiError> {
    check_version(headers)?;
    let Admitted { open, mut fields } = admitted?;
    if !fields.has("max_tokens") {
        return Err(FieldError::Missing { field: "max_tokens".into() }.into());
    }
    let chat = Fields::parse(request::chat_request(&mut fields)?.into())?;
    fields.finish()?;
    let keeps_prompts = replica.settings().limits.prefix_caching;
    let begun = chat::begin(replica, open, chat).await.map_err(in_its_words)?;
    let Begun { choices, mut head, form, generation, prompt_tokens, usage } = begun;
    let blocks = Blocks::new(Parts::new(&head, &form));
    head.id = head.id.replacen("chatcmpl-", "msg_", 1);
    let head = MessageHead { answer: head, prompt_tokens, keeps_prompts };
    match generation.delivery {
        Delivery::Stream { .. } => streamed(choices, Events::new(head, blocks), usage).await,
        Delivery::Whole => {
            let answer = move |completions: Vec<Completion>, usage| {
                let completion = completions.into_iter().next().expect("one prompt and one completion of it");
                let end = End { reason: completion.finish_reason, stop: completion.stop };
                message(head, blocks, completion.text, &end, usage_body(usage, keeps_prompts))
            };
            whole(choices, usage, Writing { answer, failure: |error| error_body(error).to_string().into() }).await
        }
    }
}

fn message(head: MessageHead, mut blocks: Blocks, text: String, end: &End, usage: Value) -> Value {
    blocks.push(text, &mut |_| {});
    blocks.finish(&mut |_| {});
    json!({"id": head.answer.id, "type": "message", "role": "assistant", "model": head.answer.model,
           "content": blocks.content(), "stop_reason": blocks.stop_reason(end), "stop_sequence": end.stop, "usage": usage})
}

async fn count(
    replica: &Arc<Replica>,
    headers: &HeaderMap,
    fields: Result<JsonFields, ApiError>,
) -> Result<usize, ApiError> {
    check_version(headers)?;
    let JsonFields(mut fields) = fields?;
    let served = replica.served()?;
    let mut chat = Fields::parse(request::prompt_request(&mut fields)?.into())?;
    fields.finish()?;
    generate::check_model(&mut chat, &replica.settings().served_names)?;
    let prompt = Prompt::take(&mut chat, replica.settings(), &served, None).await.map_err(in_its_words)?;
    Ok(prompt.tokens(&served).await.map_err(in_its_words)?.tokens.len())
}

fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(sent) = headers.get("anthropic-version") else { return Ok(()) };
    if VERSIONS.iter().any(|version| sent == version) {
        return Ok(());
    }
    let message = format!("anthropic-version {sent:?} is not known: use {}", VERSIONS[0]);
    Err(ApiError::invalid("anthropic-version", message))
}

/// Fields of a chat request by the names that this API has for them.
fn in_its_words(error: ApiError) -> ApiError {
    error.in_words_of(|param| {
        Some(match param {
            "stop" => "stop_sequences".to_owned(),
            "reasoning_effort" => "thinking".to_owned(),
            "thinking_token_budget" => "thinking.budget_tokens".to_owned(),
            "prompt" => "messages".to_owned(),
            "parallel_tool_calls" => "tool_choice.disable_parallel_tool_use".to_owned(),
            _ if param.starts_with("stop[") => param.replacen("stop", "stop_sequences", 1),
            _ if param.starts_with("response_format") => "output_config.format.schema".to_owned(),
            _ if param.starts_with("tools[") => {
                param.replacen(".function.parameters", ".input_schema", 1).replacen(".function", "", 1)
            }
            _ => return None,
        })
    })
}

fn refused(error: &ApiError) -> Response {
    let mut response = error.clone().into_response();
    *response.body_mut() = error_body(error).to_string().into();
    response
}

/// The body of an error, also inside a stream.
fn error_body(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message, "param": error.param}})
}
