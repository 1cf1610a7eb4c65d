//! Chat messages as OpenAI's clients send them, and their plain form for chat templates. Only text is understood: other
//! parts are refused by the path of the part. Renders nothing.

use std::{collections::BTreeMap, fmt};

use minijinja::Value;
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, Visitor},
};

use crate::{
    chat_template::{FunctionCall, Message, ToolCall},
    http::{
        error::ApiError,
        fields::FieldError,
        json_object::{Filled, filled, pass_over, text_or_list},
    },
};

/// One message on the wire.
#[derive(Debug, Default)]
pub(crate) struct WireMessage {
    role: Option<Role>,
    content: Option<Content>,
    name: Option<String>,
    tool_calls: Option<Vec<WireToolCall>>,
    tool_call_id: Option<String>,
    /// An earlier refusal, as clients echo it: it is what the assistant said.
    refusal: Option<String>,
    /// What an earlier answer was thought out with.
    reasoning: Option<String>,
}

/// What clients send back with an answer that they got, from here or elsewhere, and no model reads. docs/api.md lists it.
const ECHOED: [&str; 8] = [
    "annotations",
    "parsed",
    "provider_specific_fields",
    "thinking_blocks",
    "reasoning_details",
    "images",
    "cache_control",
    "id",
];
/// The same of parts, calls and their functions.
const ECHOED_INSIDE: [&str; 6] =
    ["index", "cache_control", "provider_specific_fields", "parsed_arguments", "extra_content", "annotations"];

/// One of OpenAI's, or one that only the model's template knows.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
    #[serde(untagged)]
    Other(String),
}

/// Longest name of a role.
const MAX_ROLE_CHARS: usize = 64;

#[derive(Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// Kinds of parts that are text: OpenAI's of questions, of answers, and of the newer API.
const TEXT_PARTS: [&str; 4] = ["text", "refusal", "input_text", "output_text"];

/// Text; the other kinds of content are refused by name.
#[derive(Debug)]
struct Part(String);

#[derive(Debug, Default)]
struct WireToolCall {
    id: Option<String>,
    /// There is one; another is refused where it is read.
    _kind: Option<FunctionKind>,
    function: Option<WireFunction>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FunctionKind {
    Function,
}

#[derive(Debug, Default)]
struct WireFunction {
    name: Option<String>,
    arguments: Option<String>,
}

impl Filled for WireMessage {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "role" => self.role = Some(map.next_value()?),
            "content" => self.content = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "tool_calls" => self.tool_calls = map.next_value()?,
            "tool_call_id" => self.tool_call_id = map.next_value()?,
            "refusal" => self.refusal = map.next_value()?,
            // Two names of one thing, which some servers send both.
            "reasoning" | "reasoning_content" => {
                self.reasoning = map.next_value::<Option<_>>()?.or(self.reasoning.take())
            }
            _ => pass_over(map, name, &ECHOED)?,
        }
        Ok(())
    }
}

impl Filled for WireToolCall {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "id" => self.id = map.next_value()?,
            "type" => self._kind = map.next_value()?,
            "function" => self.function = map.next_value()?,
            _ => pass_over(map, name, &ECHOED_INSIDE)?,
        }
        Ok(())
    }
}

impl Filled for WireFunction {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "name" => self.name = map.next_value()?,
            "arguments" => self.arguments = map.next_value()?,
            _ => pass_over(map, name, &ECHOED_INSIDE)?,
        }
        Ok(())
    }
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
    let role = message.role.ok_or_else(|| FieldError::Missing { field: path("role") })?;
    if !role.is_name() {
        let advice = "use system, developer, user, assistant or tool";
        return Err(ApiError::invalid(path("role"), format!("`{}` is no role's name: {advice}", path("role"))));
    }
    let tool_calls = message.tool_calls.unwrap_or_default();
    if matches!(&message.content, Some(Content::Parts(parts)) if parts.is_empty()) {
        return Err(ApiError::empty_array(path("content"), format!("`{}` has no part: send text", path("content"))));
    }
    let content = said(message.content.map(Content::into_text), message.refusal);
    let may_be_empty = role == Role::Assistant && (!tool_calls.is_empty() || message.reasoning.is_some());
    if content.is_none() && !may_be_empty {
        let message = format!(
            "`{}` is missing: only an assistant message with tool calls or reasoning may omit it",
            path("content")
        );
        return Err(ApiError::invalid(path("content"), message));
    }
    if role == Role::Tool && message.tool_call_id.is_none() {
        return Err(FieldError::Missing { field: path("tool_call_id") }.into());
    }
    Ok(Message {
        role: role.name().to_owned(),
        content: content.unwrap_or_default(),
        name: message.name,
        tool_calls: tool_calls
            .into_iter()
            .enumerate()
            .map(|(call, wire)| wire.plain(&path("tool_calls"), call))
            .collect::<Result<_, _>>()?,
        tool_call_id: message.tool_call_id,
        reasoning_content: message.reasoning,
    })
}

/// A refusal is a part of what was said, as it is in a list of parts.
fn said(content: Option<String>, refusal: Option<String>) -> Option<String> {
    match (content, refusal) {
        (Some(content), Some(refusal)) if !content.is_empty() && !refusal.is_empty() => {
            Some(format!("{content}\n{refusal}"))
        }
        (content, refusal) => content.filter(|text| !text.is_empty() || refusal.is_none()).or(refusal),
    }
}

impl Role {
    /// Templates know no `developer`: it is the newer name of `system`.
    fn name(&self) -> &str {
        match self {
            Self::System | Self::Developer => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Other(name) => name,
        }
    }

    /// Templates print names as they are: no marks, no new lines.
    fn is_name(&self) -> bool {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let name = self.name();
        !name.is_empty() && name.len() <= MAX_ROLE_CHARS && name.chars().all(is_plain)
    }
}

impl Content {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts: Vec<String> = parts.into_iter().map(|Part(text)| text).collect();
                texts.join("\n")
            }
        }
    }
}

impl WireToolCall {
    fn plain(self, list: &str, index: usize) -> Result<ToolCall, ApiError> {
        let path = |field: &str| format!("{list}[{index}].{field}");
        let missing = |field: &str| FieldError::Missing { field: path(field) };
        let id = self.id.ok_or_else(|| missing("id"))?;
        let function = self.function.ok_or_else(|| missing("function"))?;
        let name = function.name.ok_or_else(|| missing("function.name"))?;
        let arguments = function.arguments.ok_or_else(|| missing("function.arguments"))?;
        let arguments = match arguments.trim() {
            "" => Ok(Value::from(BTreeMap::<String, Value>::new())),
            text => serde_json::from_str(text),
        };
        let arguments = arguments.map_err(|error| {
            let path = path("function.arguments");
            ApiError::invalid(&path, format!("`{path}` is not JSON text: {error}"))
        })?;
        Ok(ToolCall { id, r#type: "function", function: FunctionCall { name, arguments } })
    }
}

impl<'de> Deserialize<'de> for WireMessage {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}

impl<'de> Deserialize<'de> for WireToolCall {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}

impl<'de> Deserialize<'de> for WireFunction {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer, Self::Text, Self::Parts, "a string or an array of text parts")
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PartVisitor)
    }
}

struct PartVisitor;

impl<'de> Visitor<'de> for PartVisitor {
    type Value = Part;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a text part: an object with `type` and `text`, or a string")
    }

    fn visit_str<E>(self, text: &str) -> Result<Part, E> {
        Ok(Part(text.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
        let (mut kind, mut text, mut unknown) = (None::<String>, None, None);
        while let Some(name) = map.next_key::<String>()? {
            match name.as_str() {
                "type" => kind = map.next_value()?,
                "text" | "refusal" => text = map.next_value::<Option<String>>()?.or(text),
                // What belongs to another kind of part is told by the kind, which may come later.
                _ if map.next_value::<Option<IgnoredAny>>()?.is_some() && !ECHOED_INSIDE.contains(&name.as_str()) => {
                    unknown = Some(name);
                }
                _ => {}
            }
        }
        let kind = kind.ok_or_else(|| A::Error::missing_field("type"))?;
        if !TEXT_PARTS.contains(&kind.as_str()) {
            return Err(A::Error::unknown_variant(&kind, &["text"]));
        }
        match unknown {
            Some(name) => Err(A::Error::unknown_field(&name, &[])),
            None => text.map(Part).ok_or_else(|| A::Error::missing_field("text")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::fields::Fields;

    fn parse(messages: &str) -> Result<Vec<Message>, ApiError> {
        let mut fields = Fields::parse(format!("{{\"messages\": {messages}}}").into())?;
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
    fn a_refusal_is_a_part_of_what_was_said() {
        let said = |members: &str| {
            let messages = parse(&format!(r#"[{{"role": "assistant", {members}}}]"#)).unwrap();
            messages[0].content.as_str().to_owned()
        };
        let parts = r#""content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]"#;
        for both in [parts, r#""content": "a", "refusal": "no""#] {
            assert_eq!(said(both), "a\nno");
        }
        assert_eq!(said(r#""content": null, "refusal": "no""#), "no");
        assert_eq!(said(r#""content": "", "refusal": "no""#), "no");
        assert_eq!(said(r#""content": "a", "refusal": """#), "a");
        assert_eq!(said(r#""content": "", "refusal": null"#), "");
    }

    #[test]
    fn mistakes_are_named_by_their_path() {
        assert_eq!(param_of("[]"), "messages");
        assert_eq!(param_of(r#"[{"role": "<|user|>", "content": "x"}]"#), "messages[0].role");
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
        assert_eq!(param_of(r#"[{"role": "user", "content": "x", "mood": 1}]"#), "messages[0].mood");
        assert_eq!(param_of(r#"[{"role": "user", "content": [5]}]"#), "messages[0].content[0]");
        let part = |members: &str| format!(r#"[{{"role": "user", "content": [{{"type": "text", {members}}}]}}]"#);
        assert_eq!(param_of(&part(r#""text": "x", "mood": 1"#)), "messages[0].content[0].mood");
        assert_eq!(param_of(&part(r#""cache_control": {}"#)), "messages[0].content[0].text");
    }

    #[test]
    fn a_part_of_another_kind_is_named_wherever_its_kind_stands() {
        for part in [
            r#"{"type": "image_url", "image_url": {"url": "x"}}"#,
            r#"{"image_url": {"url": "x"}, "type": "image_url"}"#,
        ] {
            let error = parse(&format!(r#"[{{"role": "user", "content": [{part}]}}]"#)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[0].content[0]"));
            assert!(error.message.contains("unknown variant `image_url`, expected `text`"), "{}", error.message);
        }
    }

    #[test]
    fn what_clients_echo_is_taken_and_what_says_nothing_too() {
        let messages = parse(
            r#"[{"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": null}, "parsed": {"x": 1},
                 "thinking_blocks": [], "mood": null, "reasoning_content": "so", "reasoning": "so", "tool_calls": [
                   {"index": 0, "id": "c", "type": "function", "caller": null, "provider_specific_fields": {},
                    "function": {"name": "f", "arguments": "", "parsed_arguments": {}, "strict": null}}]},
                {"role": "user", "content": ["b", {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": null, "reasoning_content": "hm"}]"#,
        )
        .unwrap();
        assert_eq!(messages[0].reasoning_content.as_deref(), Some("so"));
        assert_eq!(messages[0].tool_calls[0].function.name, "f");
        assert_eq!((messages[1].content.as_str(), messages[2].content.as_str()), ("b\nc", ""));
    }
}
