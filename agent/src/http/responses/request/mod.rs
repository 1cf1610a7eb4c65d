//! A request of OpenAI's Responses API as the chat request that asks for the same, and the conversation that it belongs to.
//! Everything in it is either translated or refused by its path; ranges and models are checked where chat requests are.
//!
//! `items` are its input, `tools` what may be called, `format` the form of its text.

mod format;
mod items;
mod tools;

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

pub(super) use self::items::message_of_answer;
use self::{
    format::add_text,
    items::{message, messages},
    tools::add_tools,
};
use crate::http::{
    error::ApiError,
    fields::Fields,
    json_text::{Object, text_json},
    neutral::{Neutral, neutral, take_all},
};

/// Fields that mean the same in both APIs, and what they are called there. Behind OpenAI's, those of chat that this API takes too.
const SAME: [(&str, &str); 29] = [
    ("model", "model"),
    ("max_output_tokens", "max_completion_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("stream", "stream"),
    ("parallel_tool_calls", "parallel_tool_calls"),
    ("user", "user"),
    ("safety_identifier", "safety_identifier"),
    ("prompt_cache_key", "prompt_cache_key"),
    ("service_tier", "service_tier"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("stop_token_ids", "stop_token_ids"),
    ("ignore_eos", "ignore_eos"),
    ("min_tokens", "min_tokens"),
    ("logit_bias", "logit_bias"),
    ("allowed_token_ids", "allowed_token_ids"),
    ("bad_words", "bad_words"),
    ("chat_template_kwargs", "chat_template_kwargs"),
    ("thinking_token_budget", "thinking_token_budget"),
    ("request_id", "request_id"),
    ("priority", "priority"),
    ("deadline_ms", "deadline_ms"),
    ("cache_salt", "cache_salt"),
];

/// What answers repeat of a request.
type Echoed = Vec<(&'static str, Value)>;

/// A request, translated.
pub(super) struct Translated {
    /// The chat request, as JSON text.
    pub(super) chat: String,
    /// The conversation so far, without the instructions, as JSON texts of chat messages.
    pub(super) messages: Vec<String>,
    /// What the answer repeats of the request.
    pub(super) echoed: Echoed,
    /// Whether the answer is kept.
    pub(super) store: bool,
    /// Not in the background.
    pub(super) is_waited_for: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    effort: Option<String>,
    summary: Option<String>,
    generate_summary: Option<String>,
}

/// Translates what `fields` ask; `before` are the messages of the response that this one follows.
pub(super) fn translate(fields: &mut Fields, before: Vec<String>) -> Result<Translated, ApiError> {
    let mut chat = Object::default();
    let mut echoed = Vec::new();
    for (field, name) in SAME {
        if let Some(value) = fields.take::<Box<RawValue>>(field)? {
            chat.add(name, value.get());
            echoed.push((field, serde_json::from_str(value.get()).unwrap_or_default()));
        }
    }
    let metadata = fields.take::<std::collections::BTreeMap<String, String>>("metadata")?.unwrap_or_default();
    echoed.push(("metadata", serde_json::json!(metadata)));
    take_all(fields, table())?;
    let store = fields.take("store")?.unwrap_or(true);
    echoed.push(("store", store.into()));
    let is_background = fields.take("background")?.unwrap_or(false);
    check_background(is_background, store, &echoed)?;
    echoed.push(("background", is_background.into()));
    add_logprobs(&mut chat, &mut echoed, fields)?;

    let messages = [before, messages(fields)?].concat();
    let instructions = fields.take::<String>("instructions")?;
    let system = instructions.as_deref().map(|text| message("system", Some(text)).text());
    let shown: Vec<&str> = system.iter().chain(&messages).map(String::as_str).collect();
    chat.add("messages", &format!("[{}]", shown.join(",")));
    echoed.push(("instructions", instructions.into()));

    add_tools(&mut chat, &mut echoed, fields)?;
    add_text(&mut chat, &mut echoed, fields)?;
    add_reasoning(&mut chat, &mut echoed, fields)?;
    Ok(Translated { chat: chat.text(), messages, echoed, store, is_waited_for: !is_background })
}

pub(super) fn table() -> Vec<Neutral> {
    use serde_json::json;
    vec![
        neutral("truncation", [json!("disabled")], "a conversation is never cut in its middle"),
        neutral("max_tool_calls", [], "no tool of this server's is called"),
        neutral("conversation", [], "conversations are kept by `previous_response_id`"),
        neutral("prompt", [], "there are no stored prompts"),
        neutral("stream_options", [json!({}), json!({"include_obfuscation": false})], "chunks are not padded here"),
    ]
}

/// What is made in the background is read from where it is kept.
fn check_background(is_background: bool, store: bool, echoed: &[(&str, Value)]) -> Result<(), ApiError> {
    if !is_background {
        return Ok(());
    }
    if !store {
        return Err(ApiError::invalid("background", "background can only be used when `store` is true"));
    }
    if echoed.contains(&("stream", Value::Bool(true))) {
        let message =
            "`background` and `stream` exclude each other: read the response by its id, or wait for the stream";
        return Err(ApiError::unsupported("background", message));
    }
    Ok(())
}

/// What an answer has beside its text, if it is asked for.
fn add_logprobs(chat: &mut Object, echoed: &mut Echoed, fields: &mut Fields) -> Result<(), ApiError> {
    const LOGPROBS: &str = "message.output_text.logprobs";
    let include = fields.take::<Vec<String>>("include")?.unwrap_or_default();
    // Thoughts are in the answer as they are.
    if let Some(other) = include.iter().find(|name| ![LOGPROBS, "reasoning.encrypted_content"].contains(&name.as_str()))
    {
        let message = format!("`include` has `{other}`, which no answer has here: use `{LOGPROBS}` or remove it");
        return Err(ApiError::unsupported("include", message));
    }
    let top = fields.take::<Box<RawValue>>("top_logprobs")?;
    if include.iter().any(|name| name == LOGPROBS) {
        chat.add("logprobs", "true");
    }
    if let Some(top) = top {
        chat.add("top_logprobs", top.get());
        echoed.push(("top_logprobs", serde_json::from_str(top.get()).unwrap_or_default()));
    }
    Ok(())
}

fn add_reasoning(chat: &mut Object, echoed: &mut Echoed, fields: &mut Fields) -> Result<(), ApiError> {
    let Reasoning { effort, summary, generate_summary } =
        fields.object("reasoning")?.unwrap_or(Reasoning { effort: None, summary: None, generate_summary: None });
    if let Some(summary) = summary.or(generate_summary).filter(|summary| summary != "auto") {
        let message =
            format!("a `{summary}` summary of the reasoning is not made: the reasoning itself is in the answer");
        return Err(ApiError::unsupported("reasoning.summary", message));
    }
    if let Some(effort) = &effort {
        chat.add("reasoning_effort", &text_json(effort));
    }
    echoed.push(("reasoning", serde_json::json!({"effort": effort, "summary": null})));
    Ok(())
}
