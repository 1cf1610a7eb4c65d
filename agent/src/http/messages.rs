//! Chat messages as OpenAI's clients send them, and their plain form for chat templates. Only text is understood: other
//! parts are refused by the path of the part. Renders nothing.

use std::{collections::BTreeMap, fmt};

use minijinja::Value;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor, value::SeqAccessDeserializer},
};

use crate::{
    chat_template::{FunctionCall, Message, ToolCall},
    http::{error::ApiError, fields::FieldError},
};

/// One message on the wire.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WireMessage {
    role: Role,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<Vec<WireToolCall>>,
    tool_call_id: Option<String>,
    /// An earlier refusal, as clients echo it: it is what the assistant said.
    refusal: Option<String>,
    /// Clients echo answers with these: notes about the text, none of which a model reads.
    #[serde(rename = "annotations")]
    _annotations: Option<Vec<IgnoredAny>>,
    /// Always `null` in what this server answered.
    audio: Option<IgnoredAny>,
    function_call: Option<IgnoredAny>,
}

#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

#[derive(Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
enum Part {
    Text { text: String },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireToolCall {
    id: String,
    #[serde(rename = "type")]
    _kind: Option<FunctionKind>,
    #[serde(rename = "index")]
    _index: Option<u32>,
    function: WireFunction,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FunctionKind {
    Function,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireFunction {
    name: String,
    arguments: String,
}

/// The conversation in the form templates see.
pub(crate) fn conversation(messages: Vec<WireMessage>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::empty_array("messages", "`messages` is empty: send at least one message"));
    }
    messages.into_iter().enumerate().map(|(index, message)| plain(index, message)).collect()
}

fn plain(index: usize, message: WireMessage) -> Result<Message, ApiError> {
    let path = |field: &str| format!("messages[{index}].{field}");
    for (field, sent) in [("audio", message.audio.is_some()), ("function_call", message.function_call.is_some())] {
        if sent {
            return Err(ApiError::unsupported(path(field), format!("`{}` is not supported: remove it", path(field))));
        }
    }
    let tool_calls = message.tool_calls.unwrap_or_default();
    if matches!(&message.content, Some(Content::Parts(parts)) if parts.is_empty()) {
        return Err(ApiError::empty_array(path("content"), format!("`{}` has no part: send text", path("content"))));
    }
    let content = message.content.map(Content::into_text).or(message.refusal);
    let only_calls = message.role == Role::Assistant && !tool_calls.is_empty();
    if content.is_none() && !only_calls {
        let message =
            format!("`{}` is missing: only an assistant message with tool calls may omit it", path("content"));
        return Err(ApiError::invalid(path("content"), message));
    }
    if message.role == Role::Tool && message.tool_call_id.is_none() {
        return Err(FieldError::Missing { field: path("tool_call_id") }.into());
    }
    Ok(Message {
        role: message.role.name().to_owned(),
        content: content.unwrap_or_default(),
        name: message.name,
        tool_calls: tool_calls
            .into_iter()
            .enumerate()
            .map(|(call, wire)| wire.plain(&path("tool_calls"), call))
            .collect::<Result<_, _>>()?,
        tool_call_id: message.tool_call_id,
    })
}

impl Role {
    /// Templates know no `developer`: it is the newer name of `system`.
    fn name(self) -> &'static str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl Content {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts: Vec<String> = parts.into_iter().map(|Part::Text { text }| text).collect();
                texts.join("\n")
            }
        }
    }
}

impl WireToolCall {
    fn plain(self, list: &str, index: usize) -> Result<ToolCall, ApiError> {
        let WireFunction { name, arguments } = self.function;
        let arguments = match arguments.trim() {
            "" => Ok(Value::from(BTreeMap::<String, Value>::new())),
            text => serde_json::from_str(text),
        };
        let arguments = arguments.map_err(|error| {
            let path = format!("{list}[{index}].function.arguments");
            ApiError::invalid(&path, format!("`{path}` is not JSON text: {error}"))
        })?;
        Ok(ToolCall { id: self.id, r#type: "function", function: FunctionCall { name, arguments } })
    }
}

/// By hand rather than untagged: an untagged enum would lose the path of the wrong part.
impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a string or an array of text parts")
    }

    fn visit_str<E>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Content, A::Error> {
        Deserialize::deserialize(SeqAccessDeserializer::new(parts)).map(Content::Parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::fields::Fields;

    fn parse(messages: &str) -> Result<Vec<Message>, ApiError> {
        let mut fields = Fields::parse(format!("{{\"messages\": {messages}}}").as_bytes())?;
        conversation(fields.require("messages")?)
    }

    fn param_of(messages: &str) -> String {
        parse(messages).unwrap_err().param.unwrap()
    }

    #[test]
    fn text_parts_are_joined_and_developer_is_system() {
        let messages = parse(
            r#"[{"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]"#,
        )
        .unwrap();
        assert_eq!((messages[0].role.as_str(), messages[1].content.as_str()), ("system", "b\nc"));
    }

    #[test]
    fn an_echoed_answer_is_accepted_as_the_sdk_dumps_it() {
        let messages = parse(
            r#"[{"role": "assistant", "content": null, "refusal": null, "annotations": [], "audio": null,
                 "function_call": null, "tool_calls": [{"id": "c1", "type": "function",
                 "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
                {"role": "tool", "tool_call_id": "c1", "content": "2"}]"#,
        )
        .unwrap();
        assert_eq!(messages[0].tool_calls[0].function.arguments.get_attr("x").unwrap(), Value::from(1));
        assert_eq!(messages[1].tool_call_id.as_deref(), Some("c1"));
    }

    #[test]
    fn mistakes_are_named_by_their_path() {
        assert_eq!(param_of("[]"), "messages");
        assert_eq!(param_of(r#"[{"role": "robot", "content": "x"}]"#), "messages[0].role");
        assert_eq!(param_of(r#"[{"content": "x"}]"#), "messages[0].role");
        assert_eq!(param_of(r#"[{"role": "user"}]"#), "messages[0].content");
        assert_eq!(param_of(r#"[{"role": "user", "content": []}]"#), "messages[0].content");
        assert_eq!(param_of(r#"[{"role": "tool", "content": "x"}]"#), "messages[0].tool_call_id");
        assert_eq!(param_of(r#"[{"role": "user", "content": 5}]"#), "messages[0].content");
        let image = r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]"#;
        assert!(param_of(image).starts_with("messages[0].content[0]"), "{}", param_of(image));
        let call =
            r#"[{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}]"#;
        assert_eq!(param_of(call), "messages[0].tool_calls[0].function.arguments");
        assert!(param_of(r#"[{"role": "user", "content": "x", "mood": 1}]"#).starts_with("messages[0]"));
    }
}
