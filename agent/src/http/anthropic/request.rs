//! A request of Anthropic's Messages API as the chat request that asks for the same. Everything in it is either translated or
//! refused by its path; ranges and models are checked where chat requests are.

use std::collections::BTreeMap;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess},
};
use serde_json::{json, value::RawValue};

use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
    json_object::{Filled, filled, note_unknown, pass_over, text_or_list},
    json_text::{Object, text_json},
    neutral::{neutral, take_all},
};

/// Fields that mean the same in both APIs, and behind Anthropic's those of chat that this API takes too.
const SAME: [&str; 8] =
    ["max_tokens", "temperature", "top_p", "top_k", "stream", "priority", "deadline_ms", "cache_salt"];
/// What clients send with a block or a tool for caches and viewers elsewhere: it changes no answer here.
const NOTES: [&str; 3] = ["cache_control", "citations", "caller"];

/// A string, or blocks.
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

#[derive(Default)]
struct WireMessage {
    role: Option<String>,
    content: Option<Content>,
}

/// A content block of any type.
#[derive(Default)]
struct Block {
    kind: Option<String>,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Box<RawValue>>,
    tool_use_id: Option<String>,
    content: Option<Content>,
    /// A member that belongs to none of the types understood here.
    unknown: Option<String>,
}

#[derive(Default)]
struct WireTool {
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    input_schema: Option<Box<RawValue>>,
    strict: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireToolChoice {
    r#type: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireThinking {
    r#type: String,
    budget_tokens: Option<u32>,
    display: Option<String>,
}

/// The chat request, as JSON text.
pub(super) fn chat_request(fields: &mut Fields) -> Result<String, ApiError> {
    let mut chat = Object::default();
    for field in SAME {
        add_same(&mut chat, fields, field)?;
    }
    if let Some(stop) = fields.take::<Vec<String>>("stop_sequences")? {
        chat.add("stop", &json!(stop).to_string());
    }
    drop_labels(fields)?;
    add_prompt(&mut chat, fields)?;
    Ok(chat.text())
}

/// The part of it that a prompt is made of, as JSON text. What says how to answer is not taken: nothing would come of it.
pub(super) fn prompt_request(fields: &mut Fields) -> Result<String, ApiError> {
    let mut chat = Object::default();
    fields.take::<BTreeMap<String, IgnoredAny>>("cache_control")?;
    add_prompt(&mut chat, fields)?;
    Ok(chat.text())
}

fn add_prompt(chat: &mut Object, fields: &mut Fields) -> Result<(), ApiError> {
    add_same(chat, fields, "model")?;
    add_messages(chat, fields)?;
    add_tools(chat, fields)?;
    add_thinking(chat, fields)?;
    add_output(chat, fields)
}

fn add_same(chat: &mut Object, fields: &mut Fields, field: &'static str) -> Result<(), FieldError> {
    if let Some(value) = fields.take::<Box<RawValue>>(field)? {
        chat.add(field, value.get());
    }
    Ok(())
}

/// The form of the answer. How hard the model tries is not its form, and refused by name.
fn add_output(chat: &mut Object, fields: &mut Fields) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Output {
        format: Option<Format>,
    }
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Format {
        r#type: String,
        schema: Option<Box<RawValue>>,
    }
    let Some(Format { r#type, schema }) = fields.object::<Output>("output_config")?.and_then(|output| output.format)
    else {
        return Ok(());
    };
    if r#type != "json_schema" {
        let message = format!("output_config.format.type `{}` is not supported: use `json_schema`", r#type);
        return Err(ApiError::unsupported("output_config.format.type", message));
    }
    let schema = schema.ok_or_else(|| FieldError::Missing { field: "output_config.format.schema".into() })?;
    if !schema.get().starts_with('{') {
        let message = "`output_config.format.schema` must be a JSON schema, an object";
        return Err(ApiError::invalid("output_config.format.schema", message));
    }
    let mut named = Object::default();
    named.add("name", &text_json("output"));
    named.add("schema", schema.get());
    let mut format = Object::default();
    format.add("type", &text_json("json_schema"));
    format.add("json_schema", &named.text());
    chat.add("response_format", &format.text());
    Ok(())
}

/// Whose request it is and how urgent changes no answer.
fn drop_labels(fields: &mut Fields) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Metadata {
        #[serde(rename = "user_id")]
        _user_id: Option<String>,
    }
    fields.object::<Metadata>("metadata")?;
    fields.take::<BTreeMap<String, IgnoredAny>>("cache_control")?;
    for label in ["user_profile_id", "workspace_id"] {
        fields.take::<String>(label)?;
    }
    take_all(fields, vec![neutral("speed", [json!("standard")], "there is one speed")])?;
    let tier = fields.take::<String>("service_tier")?.unwrap_or_default();
    if !["", "auto", "standard_only"].contains(&tier.as_str()) {
        let message = format!("service_tier `{tier}` is not supported: use `auto`");
        return Err(ApiError::unsupported("service_tier", message));
    }
    Ok(())
}

fn add_messages(chat: &mut Object, fields: &mut Fields) -> Result<(), ApiError> {
    let mut list = Vec::new();
    if let Some(system) = fields.take::<Content>("system")? {
        list.push(message("system", Some(&text_of(system, "system")?)).text());
    }
    let messages: Vec<WireMessage> = fields.require("messages")?;
    let is_open = messages.last().is_some_and(|last| last.role.as_deref() == Some("assistant"));
    if messages.is_empty() {
        return Err(ApiError::empty_array("messages", "`messages` is empty: send at least one message"));
    }
    for (index, WireMessage { role, content }) in messages.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        let missing = |field: &str| FieldError::Missing { field: format!("{path}.{field}") };
        let content = content.ok_or_else(|| missing("content"))?;
        match role.ok_or_else(|| missing("role"))?.as_str() {
            "user" => list.extend(of_user(content, &format!("{path}.content"))?),
            "assistant" => list.push(of_assistant(content, &format!("{path}.content"))?),
            other => {
                let message =
                    format!("`{path}.role` is `{other}`: use `user` or `assistant`, and `system` beside `messages`");
                return Err(ApiError::invalid(format!("{path}.role"), message));
            }
        }
    }
    chat.add("messages", &format!("[{}]", list.join(",")));
    // An answer that the client has begun is gone on with.
    if is_open {
        chat.add("continue_final_message", "true");
    }
    Ok(())
}

fn message(role: &str, content: Option<&str>) -> Object {
    let mut message = Object::default();
    message.add("role", &text_json(role));
    message.add("content", &content.map_or("null".to_owned(), text_json));
    message
}

/// Results of tools are messages of their own, before what the user says to them.
fn of_user(content: Content, path: &str) -> Result<Vec<String>, ApiError> {
    let blocks = match content {
        Content::Text(text) => return Ok(vec![message("user", Some(&text)).text()]),
        Content::Blocks(blocks) => blocks,
    };
    let (mut list, mut texts) = (Vec::new(), Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        match block.kind(&path, &["text", "tool_result"])? {
            "text" => texts.push(block.text.ok_or(FieldError::Missing { field: format!("{path}.text") })?),
            _ => {
                let id = block.tool_use_id.ok_or(FieldError::Missing { field: format!("{path}.tool_use_id") })?;
                let result =
                    block.content.map_or(Ok(String::new()), |result| text_of(result, &format!("{path}.content")))?;
                let mut tool = message("tool", Some(&result));
                tool.add("tool_call_id", &text_json(&id));
                list.push(tool.text());
            }
        }
    }
    if !texts.is_empty() || list.is_empty() {
        list.push(message("user", Some(&texts.join("\n"))).text());
    }
    Ok(list)
}

fn of_assistant(content: Content, path: &str) -> Result<String, ApiError> {
    let blocks = match content {
        Content::Text(text) => return Ok(message("assistant", Some(&text)).text()),
        Content::Blocks(blocks) => blocks,
    };
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{index}]");
        let missing = |field: &str| FieldError::Missing { field: format!("{path}.{field}") };
        match block.kind(&path, &["text", "thinking", "tool_use"])? {
            "text" => texts.push(block.text.ok_or_else(|| missing("text"))?),
            "thinking" => thoughts.push(block.thinking.ok_or_else(|| missing("thinking"))?),
            _ => {
                let (mut function, mut call) = (Object::default(), Object::default());
                function.add("name", &text_json(&block.name.ok_or_else(|| missing("name"))?));
                function.add("arguments", &text_json(block.input.ok_or_else(|| missing("input"))?.get()));
                call.add("id", &text_json(&block.id.ok_or_else(|| missing("id"))?));
                call.add("type", "\"function\"");
                call.add("function", &function.text());
                calls.push(call.text());
            }
        }
    }
    let content = (!texts.is_empty()).then(|| texts.join("\n"));
    let mut assistant = message("assistant", content.as_deref());
    if !thoughts.is_empty() {
        assistant.add("reasoning_content", &text_json(&thoughts.join("\n")));
    }
    if !calls.is_empty() {
        assistant.add("tool_calls", &format!("[{}]", calls.join(",")));
    }
    Ok(assistant.text())
}

/// Content that must be text.
fn text_of(content: Content, path: &str) -> Result<String, ApiError> {
    let blocks = match content {
        Content::Text(text) => return Ok(text),
        Content::Blocks(blocks) => blocks,
    };
    let text = |(index, block): (usize, Block)| {
        let path = format!("{path}[{index}]");
        block.kind(&path, &["text"])?;
        Ok(block.text.ok_or(FieldError::Missing { field: format!("{path}.text") })?)
    };
    Ok(blocks.into_iter().enumerate().map(text).collect::<Result<Vec<_>, ApiError>>()?.join("\n"))
}

fn add_tools(chat: &mut Object, fields: &mut Fields) -> Result<(), ApiError> {
    let tools: Vec<WireTool> = fields.take("tools")?.unwrap_or_default();
    let mut list = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        let missing = |field: &str| FieldError::Missing { field: format!("{path}.{field}") };
        if let Some(kind) = tool.kind.filter(|kind| kind != "custom") {
            let message =
                format!("`{path}` is of type `{kind}`, which this server does not run: send tools of your own");
            return Err(ApiError::unsupported(path, message));
        }
        let (mut function, mut definition) = (Object::default(), Object::default());
        function.add("name", &text_json(&tool.name.ok_or_else(|| missing("name"))?));
        if let Some(description) = tool.description {
            function.add("description", &text_json(&description));
        }
        function.add("parameters", tool.input_schema.ok_or_else(|| missing("input_schema"))?.get());
        if let Some(strict) = tool.strict {
            function.add("strict", if strict { "true" } else { "false" });
        }
        definition.add("type", "\"function\"");
        definition.add("function", &function.text());
        list.push(definition.text());
    }
    if !list.is_empty() {
        chat.add("tools", &format!("[{}]", list.join(",")));
    }
    if let Some(choice) = fields.object::<WireToolChoice>("tool_choice")? {
        add_tool_choice(chat, choice)?;
    }
    Ok(())
}

fn add_tool_choice(chat: &mut Object, choice: WireToolChoice) -> Result<(), ApiError> {
    let WireToolChoice { r#type, name, disable_parallel_tool_use } = choice;
    match (r#type.as_str(), name) {
        ("auto" | "none", None) => chat.add("tool_choice", &text_json(&r#type)),
        ("any", None) => chat.add("tool_choice", "\"required\""),
        ("tool", Some(name)) => {
            chat.add(
                "tool_choice",
                &format!("{{\"type\":\"function\",\"function\":{{\"name\":{}}}}}", text_json(&name)),
            );
        }
        _ => {
            let message = "`tool_choice` is {\"type\": \"auto\"}, \"any\" or \"none\", or \"tool\" with a `name`";
            return Err(ApiError::invalid("tool_choice", message));
        }
    }
    if let Some(is_disabled) = disable_parallel_tool_use {
        chat.add("parallel_tool_calls", if is_disabled { "false" } else { "true" });
    }
    Ok(())
}

fn add_thinking(chat: &mut Object, fields: &mut Fields) -> Result<(), ApiError> {
    let Some(WireThinking { r#type, budget_tokens, display }) = fields.object("thinking")? else { return Ok(()) };
    match display.as_deref() {
        // Thoughts are told as they are, which is more than their summary.
        None | Some("summarized") => {}
        Some("omitted") => chat.add("include_reasoning", "false"),
        Some(other) => {
            let message = format!("thinking.display `{other}` is not known: use `summarized` or `omitted`");
            return Err(ApiError::invalid("thinking.display", message));
        }
    }
    match r#type.as_str() {
        "disabled" => chat.add("reasoning_effort", "\"none\""),
        "adaptive" => {}
        "enabled" if budget_tokens.is_none() => {
            return Err(FieldError::Missing { field: "thinking.budget_tokens".into() }.into());
        }
        "enabled" => {
            chat.add("reasoning_effort", "\"medium\"");
            chat.add("thinking_token_budget", &budget_tokens.unwrap_or_default().to_string());
        }
        other => {
            let message = format!("thinking `{other}` is not known: use `enabled`, `adaptive` or `disabled`");
            return Err(ApiError::invalid("thinking.type", message));
        }
    }
    Ok(())
}

impl Block {
    /// The type, which must be one of those that may stand here.
    fn kind(&self, path: &str, kinds: &[&'static str]) -> Result<&'static str, ApiError> {
        let sent = self.kind.as_deref().ok_or_else(|| FieldError::Missing { field: format!("{path}.type") })?;
        let Some(kind) = kinds.iter().find(|kind| **kind == sent) else {
            let message = format!("`{path}` is of type `{sent}`: only {} may stand here", kinds.join(", "));
            return Err(ApiError::unsupported(path, message));
        };
        match &self.unknown {
            Some(name) => {
                let field = format!("{path}.{name}");
                Err(FieldError::Unknown { field, advice: "remove it".into() }.into())
            }
            None => Ok(kind),
        }
    }
}

impl Filled for WireMessage {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "role" => self.role = map.next_value()?,
            "content" => self.content = map.next_value()?,
            // Of answers that come back as they were given.
            _ => pass_over(map, name, &["id", "type", "model", "stop_reason", "stop_sequence", "usage"])?,
        }
        Ok(())
    }
}

impl Filled for Block {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "text" => self.text = map.next_value()?,
            "thinking" => self.thinking = map.next_value()?,
            "id" => self.id = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "input" => self.input = map.next_value()?,
            "tool_use_id" => self.tool_use_id = map.next_value()?,
            "content" => self.content = map.next_value()?,
            // Whether a tool failed is for its result to say; whose thoughts they were, nobody checks here.
            "is_error" | "signature" => pass_over(map, name, &[name])?,
            _ if NOTES.contains(&name) => pass_over(map, name, &NOTES)?,
            _ => note_unknown(map, name, &mut self.unknown)?,
        }
        Ok(())
    }
}

impl Filled for WireTool {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "description" => self.description = map.next_value()?,
            "input_schema" => self.input_schema = map.next_value()?,
            "strict" => self.strict = map.next_value()?,
            _ => pass_over(map, name, &NOTES)?,
        }
        Ok(())
    }
}

macro_rules! deserialize_filled {
    ($($kind:ty),*) => {$(
        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                filled(deserializer)
            }
        }
    )*};
}

deserialize_filled!(WireMessage, Block, WireTool);

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer, Self::Text, Self::Blocks, "a string or an array of content blocks")
    }
}
