//! A request of OpenAI's Responses API as the chat request that asks for the same, and the conversation that it belongs to.
//! Everything in it is either translated or refused by its path; ranges and models are checked where chat requests are.

use serde::{Deserialize, Deserializer, de::MapAccess};
use serde_json::{Value, value::RawValue};

use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
    json_object::{Filled, filled, pass_over, text_or_list},
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

/// A request, translated.
pub(super) struct Translated {
    /// The chat request, as JSON text.
    pub(super) chat: String,
    /// The conversation so far, without the instructions, as JSON texts of chat messages.
    pub(super) messages: Vec<String>,
    /// What the answer repeats of the request.
    pub(super) echoed: Vec<(&'static str, Value)>,
    /// Whether the answer is kept.
    pub(super) store: bool,
    /// Not in the background.
    pub(super) is_waited_for: bool,
}

enum Input {
    Text(String),
    Items(Vec<Item>),
}

enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// An item of the input, of any type.
#[derive(Default)]
struct Item {
    kind: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Content>,
    /// A member that belongs to none of the types understood here.
    unknown: Option<String>,
}

#[derive(Default)]
struct Part {
    kind: Option<String>,
    text: Option<String>,
    unknown: Option<String>,
}

#[derive(Default)]
struct Tool {
    kind: Option<String>,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
    strict: Option<bool>,
    /// A member that no function has.
    unknown: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: Option<Box<RawValue>>,
    verbosity: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Format {
    r#type: String,
    name: Option<Value>,
    description: Option<Value>,
    schema: Option<Box<RawValue>>,
    strict: Option<Value>,
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
fn add_logprobs(
    chat: &mut Object,
    echoed: &mut Vec<(&'static str, Value)>,
    fields: &mut Fields,
) -> Result<(), ApiError> {
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

fn messages(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let items = match fields.require("input")? {
        Input::Text(text) => return Ok(vec![message("user", Some(&text)).text()]),
        Input::Items(items) => items,
    };
    let mut list = List::default();
    for (index, item) in items.into_iter().enumerate() {
        list.add(item, &format!("input[{index}]"))?;
    }
    list.flush();
    if list.messages.is_empty() {
        return Err(ApiError::empty_array("input", "`input` is empty: send at least one item"));
    }
    Ok(list.messages)
}

fn message(role: &str, content: Option<&str>) -> Object {
    let mut message = Object::default();
    message.add("role", &text_json(role));
    message.add("content", &content.map_or("null".to_owned(), text_json));
    message
}

/// Messages that are made of items: what the assistant thought, said and called is one of them.
#[derive(Default)]
struct List {
    messages: Vec<String>,
    thoughts: Option<String>,
    said: Option<String>,
    calls: Vec<String>,
}

impl List {
    fn add(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let missing = |field: &str| FieldError::Missing { field: format!("{path}.{field}") };
        match item.kind(path)? {
            "message" => {
                let role = item.role.as_deref().ok_or_else(|| missing("role"))?;
                let text = text_of(item.content.ok_or_else(|| missing("content"))?, &format!("{path}.content"))?;
                match role {
                    "assistant" => {
                        if self.said.is_some() || !self.calls.is_empty() {
                            self.flush();
                        }
                        self.said = Some(text);
                    }
                    "user" | "system" | "developer" => self.add_other(message(role, Some(&text))),
                    other => {
                        let path = format!("{path}.role");
                        let message = format!("`{path}` is `{other}`: use user, assistant, system or developer");
                        return Err(ApiError::invalid(path, message));
                    }
                }
            }
            "function_call" => {
                let (mut function, mut call) = (Object::default(), Object::default());
                function.add("name", &text_json(&item.name.ok_or_else(|| missing("name"))?));
                function.add("arguments", &text_json(&item.arguments.ok_or_else(|| missing("arguments"))?));
                call.add("id", &text_json(&item.call_id.ok_or_else(|| missing("call_id"))?));
                call.add("type", "\"function\"");
                call.add("function", &function.text());
                self.calls.push(call.text());
            }
            "function_call_output" => {
                let output = text_of(item.output.ok_or_else(|| missing("output"))?, &format!("{path}.output"))?;
                let mut tool = message("tool", Some(&output));
                tool.add("tool_call_id", &text_json(&item.call_id.ok_or_else(|| missing("call_id"))?));
                self.add_other(tool);
            }
            _ => {
                let thoughts =
                    item.content.map_or(Ok(String::new()), |text| text_of(text, &format!("{path}.content")))?;
                if !thoughts.is_empty() {
                    self.flush();
                    self.thoughts = Some(thoughts);
                }
            }
        }
        Ok(())
    }

    fn add_other(&mut self, message: Object) {
        self.flush();
        self.messages.push(message.text());
    }

    fn flush(&mut self) {
        let Self { messages, thoughts, said, calls } = self;
        if thoughts.is_none() && said.is_none() && calls.is_empty() {
            return;
        }
        let mut assistant = message("assistant", said.take().as_deref());
        if let Some(thoughts) = thoughts.take() {
            assistant.add("reasoning_content", &text_json(&thoughts));
        }
        if !calls.is_empty() {
            assistant.add("tool_calls", &format!("[{}]", std::mem::take(calls).join(",")));
        }
        messages.push(assistant.text());
    }
}

/// The message that an answer becomes in what follows it.
pub(super) fn message_of_answer(
    thoughts: Option<String>,
    said: Option<&str>,
    calls: &[(String, String, String)],
) -> String {
    let call_json = |(id, name, arguments): &(String, String, String)| {
        let (mut function, mut call) = (Object::default(), Object::default());
        function.add("name", &text_json(name));
        function.add("arguments", &text_json(arguments));
        call.add("id", &text_json(id));
        call.add("type", "\"function\"");
        call.add("function", &function.text());
        call.text()
    };
    let mut list = List {
        messages: Vec::new(),
        thoughts,
        said: said.or(calls.is_empty().then_some("")).map(str::to_owned),
        calls: calls.iter().map(call_json).collect(),
    };
    list.flush();
    list.messages.concat()
}

/// Content that must be text.
fn text_of(content: Content, path: &str) -> Result<String, ApiError> {
    let parts = match content {
        Content::Text(text) => return Ok(text),
        Content::Parts(parts) => parts,
    };
    let text = |(index, part): (usize, Part)| {
        let path = format!("{path}[{index}]");
        let kind = part.kind.ok_or(FieldError::Missing { field: format!("{path}.type") })?;
        if !["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"].contains(&kind.as_str())
        {
            let message = format!("`{path}` is of type `{kind}`, and this model reads text: send `input_text`");
            return Err(ApiError::unsupported(path, message));
        }
        if let Some(name) = part.unknown {
            return Err(FieldError::Unknown { field: format!("{path}.{name}"), advice: "remove it".into() }.into());
        }
        Ok(part.text.ok_or(FieldError::Missing { field: format!("{path}.text") })?)
    };
    Ok(parts.into_iter().enumerate().map(text).collect::<Result<Vec<_>, ApiError>>()?.join("\n"))
}

fn add_tools(chat: &mut Object, echoed: &mut Vec<(&'static str, Value)>, fields: &mut Fields) -> Result<(), ApiError> {
    let sent = fields.take::<Box<RawValue>>("tools")?;
    let tools: Vec<Tool> = match &sent {
        Some(raw) => serde_json::from_str(raw.get())
            .map_err(|error| ApiError::invalid("tools", format!("`tools` is no list of tools: {error}")))?,
        None => Vec::new(),
    };
    let mut list = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        let missing = |field: &str| FieldError::Missing { field: format!("{path}.{field}") };
        let kind = tool.kind.ok_or_else(|| missing("type"))?;
        if kind != "function" {
            let message = format!("`{path}` is of type `{kind}`, which this server does not run: send functions");
            return Err(ApiError::unsupported(path, message));
        }
        if let Some(name) = tool.unknown {
            return Err(FieldError::Unknown { field: format!("{path}.{name}"), advice: "remove it".into() }.into());
        }
        let (mut function, mut definition) = (Object::default(), Object::default());
        function.add("name", &text_json(&tool.name.ok_or_else(|| missing("name"))?));
        if let Some(description) = tool.description {
            function.add("description", &text_json(&description));
        }
        if let Some(parameters) = tool.parameters {
            function.add("parameters", parameters.get());
        }
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
    let choice = fields.take::<Value>("tool_choice")?;
    match &choice {
        Some(Value::String(word)) => chat.add("tool_choice", &text_json(word)),
        Some(Value::Object(named)) if named.get("type").is_some_and(|kind| kind == "function") => {
            let name = named.get("name").and_then(Value::as_str).unwrap_or_default();
            chat.add(
                "tool_choice",
                &format!("{{\"type\":\"function\",\"function\":{{\"name\":{}}}}}", text_json(name)),
            );
        }
        Some(Value::Object(allowed)) if allowed.get("type").is_some_and(|kind| kind == "allowed_tools") => {
            chat.add("tool_choice", &allowed_tools(allowed)?.to_string());
        }
        Some(_) => {
            let message = "`tool_choice` is `none`, `auto`, `required`, {\"type\": \"function\", \"name\": …} or of type `allowed_tools`";
            return Err(ApiError::invalid("tool_choice", message));
        }
        None => {}
    }
    let tools = sent.map_or(Value::Array(Vec::new()), |raw| serde_json::from_str(raw.get()).unwrap_or_default());
    echoed.push(("tools", with_members(tools, &["description", "parameters", "strict"])));
    echoed.push(("tool_choice", choice.unwrap_or_else(|| "auto".into())));
    Ok(())
}

/// The same in the form of chat, which nests what it is about.
fn allowed_tools(choice: &serde_json::Map<String, Value>) -> Result<Value, ApiError> {
    let tools = choice.get("tools").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let tool = |(index, tool): (usize, &Value)| match (tool["type"].as_str(), tool["name"].as_str()) {
        (Some("function"), Some(name)) => Ok(serde_json::json!({"type": "function", "function": {"name": name}})),
        _ => {
            let path = format!("tool_choice.tools[{index}]");
            let message = format!("`{path}` is no function by name: send {{\"type\": \"function\", \"name\": …}}");
            Err(ApiError::unsupported(path, message))
        }
    };
    let tools = tools.iter().enumerate().map(tool).collect::<Result<Vec<_>, _>>()?;
    let mode = choice.get("mode").cloned().unwrap_or_else(|| "auto".into());
    Ok(serde_json::json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}))
}

/// Answers repeat tools with all members that a function has.
fn with_members(mut tools: Value, names: &[&str]) -> Value {
    for tool in tools.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        for name in names {
            tool.entry(*name).or_insert(Value::Null);
        }
    }
    tools
}

fn add_text(chat: &mut Object, echoed: &mut Vec<(&'static str, Value)>, fields: &mut Fields) -> Result<(), ApiError> {
    let mut shown = serde_json::json!({"format": {"type": "text"}});
    if let Some(Text { format, verbosity }) = fields.object("text")? {
        if let Some(verbosity) = verbosity {
            chat.add("verbosity", &text_json(&verbosity));
        }
        if let Some(raw) = format {
            chat.add("response_format", &response_format(&raw)?);
            shown["format"] = shown_format(&raw);
        }
    }
    echoed.push(("text", shown));
    Ok(())
}

/// A schema holds whether or not `strict` says so.
fn shown_format(raw: &RawValue) -> Value {
    let mut format: Value = serde_json::from_str(raw.get()).unwrap_or_default();
    if format["type"] == "json_schema" {
        format["strict"] = true.into();
        if let Some(members) = format.as_object_mut() {
            members.entry("name").or_insert_with(|| "output".into());
            members.entry("description").or_insert(Value::Null);
        }
    }
    format
}

/// The schema is a member of its own in chat requests.
fn response_format(raw: &RawValue) -> Result<String, ApiError> {
    let Format { r#type, name, description, schema, strict } = serde_json::from_str(raw.get())
        .map_err(|error| ApiError::invalid("text.format", format!("`text.format` is wrong: {error}")))?;
    let of_schemas = [
        ("name", name.is_some()),
        ("description", description.is_some()),
        ("schema", schema.is_some()),
        ("strict", strict.is_some()),
    ];
    if let Some((member, _)) = of_schemas.into_iter().find(|(_, is_sent)| *is_sent && r#type != "json_schema") {
        let field = format!("text.format.{member}");
        return Err(FieldError::Unknown { field, advice: "it is for `type: json_schema`".into() }.into());
    }
    let mut format = Object::default();
    format.add("type", &text_json(&r#type));
    if r#type == "json_schema" {
        let mut json_schema = Object::default();
        for (member, value) in [("name", name), ("description", description), ("strict", strict)] {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                json_schema.add(member, &value.to_string());
            }
        }
        let schema = schema.ok_or(FieldError::Missing { field: "text.format.schema".into() })?;
        json_schema.add("schema", schema.get());
        format.add("json_schema", &json_schema.text());
    }
    Ok(format.text())
}

fn add_reasoning(
    chat: &mut Object,
    echoed: &mut Vec<(&'static str, Value)>,
    fields: &mut Fields,
) -> Result<(), ApiError> {
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

impl Item {
    /// The type; a message may do without.
    fn kind(&self, path: &str) -> Result<&'static str, ApiError> {
        let kinds = ["message", "function_call", "function_call_output", "reasoning"];
        let sent = self.kind.as_deref().or(self.role.as_ref().map(|_| "message"));
        let sent = sent.ok_or(FieldError::Missing { field: format!("{path}.type") })?;
        let Some(kind) = kinds.into_iter().find(|kind| *kind == sent) else {
            let message = format!("`{path}` is of type `{sent}`: only {} may stand here", kinds.join(", "));
            return Err(ApiError::unsupported(path, message));
        };
        match self.unknown.as_deref().or_else(|| self.of_another(kind)) {
            Some(name) => {
                let field = format!("{path}.{name}");
                Err(FieldError::Unknown { field, advice: "remove it".into() }.into())
            }
            None => Ok(kind),
        }
    }

    /// A member that items of this type do not have.
    fn of_another(&self, kind: &str) -> Option<&'static str> {
        let members = [
            ("role", self.role.is_some(), &["message"][..]),
            ("content", self.content.is_some(), &["message", "reasoning"]),
            ("call_id", self.call_id.is_some(), &["function_call", "function_call_output"]),
            ("name", self.name.is_some(), &["function_call"]),
            ("arguments", self.arguments.is_some(), &["function_call"]),
            ("output", self.output.is_some(), &["function_call_output"]),
        ];
        members.into_iter().find(|(_, is_sent, kinds)| *is_sent && !kinds.contains(&kind)).map(|(name, ..)| name)
    }
}

impl Filled for Item {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "role" => self.role = map.next_value()?,
            "content" => self.content = map.next_value()?,
            "call_id" => self.call_id = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "arguments" => self.arguments = map.next_value()?,
            "output" => self.output = map.next_value()?,
            // Of items that come back as they were given.
            "id" | "status" | "summary" | "encrypted_content" | "namespace" | "phase" => pass_over(map, name, &[name])?,
            _ => {
                if map.next_value::<Option<serde::de::IgnoredAny>>()?.is_some() {
                    self.unknown = Some(name.to_owned());
                }
            }
        }
        Ok(())
    }
}

impl Filled for Part {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "text" | "refusal" => self.text = map.next_value()?,
            "annotations" | "logprobs" => pass_over(map, name, &[name])?,
            _ => {
                if map.next_value::<Option<serde::de::IgnoredAny>>()?.is_some() {
                    self.unknown = Some(name.to_owned());
                }
            }
        }
        Ok(())
    }
}

impl Filled for Tool {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "description" => self.description = map.next_value()?,
            "parameters" => self.parameters = map.next_value()?,
            "strict" => self.strict = map.next_value()?,
            // Another type has other members; it is refused by its type.
            _ => {
                if map.next_value::<Option<serde::de::IgnoredAny>>()?.is_some() {
                    self.unknown = Some(name.to_owned());
                }
            }
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

deserialize_filled!(Item, Part, Tool);

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer, Self::Text, Self::Items, "a string or an array of items")
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer, Self::Text, Self::Parts, "a string or an array of parts")
    }
}
