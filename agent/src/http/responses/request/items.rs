//! The items of a request's input, and the chat messages that they are: what the assistant thought, said and called is one message.

use serde::{Deserialize, Deserializer, de::MapAccess};

use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
    json_object::{Filled, filled, note_unknown, pass_over, text_or_list},
    json_text::{Object, text_json},
};

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

/// Takes the input out of `fields`, as JSON texts of chat messages.
pub(super) fn messages(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
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
        match item.kind(path)? {
            "message" => self.add_message(item, path),
            "function_call" => self.add_call(item, path),
            "function_call_output" => self.add_output(item, path),
            _ => self.add_thoughts(item, path),
        }
    }

    fn add_message(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let role = item.role.as_deref().ok_or_else(|| missing(path, "role"))?;
        let text = text_of(item.content.ok_or_else(|| missing(path, "content"))?, &format!("{path}.content"))?;
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
        Ok(())
    }

    fn add_call(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let name = item.name.ok_or_else(|| missing(path, "name"))?;
        let arguments = item.arguments.ok_or_else(|| missing(path, "arguments"))?;
        let id = item.call_id.ok_or_else(|| missing(path, "call_id"))?;
        self.calls.push(call(&id, &name, &arguments));
        Ok(())
    }

    fn add_output(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let output = text_of(item.output.ok_or_else(|| missing(path, "output"))?, &format!("{path}.output"))?;
        let mut tool = message("tool", Some(&output));
        tool.add("tool_call_id", &text_json(&item.call_id.ok_or_else(|| missing(path, "call_id"))?));
        self.add_other(tool);
        Ok(())
    }

    fn add_thoughts(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let thoughts = item.content.map_or(Ok(String::new()), |text| text_of(text, &format!("{path}.content")))?;
        if !thoughts.is_empty() {
            self.flush();
            self.thoughts = Some(thoughts);
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

fn missing(path: &str, field: &str) -> FieldError {
    FieldError::Missing { field: format!("{path}.{field}") }
}

/// A call as a message of the assistant has it.
fn call(id: &str, name: &str, arguments: &str) -> String {
    let (mut function, mut call) = (Object::default(), Object::default());
    function.add("name", &text_json(name));
    function.add("arguments", &text_json(arguments));
    call.add("id", &text_json(id));
    call.add("type", "\"function\"");
    call.add("function", &function.text());
    call.text()
}

/// The message that an answer becomes in what follows it.
pub(in super::super) fn message_of_answer(
    thoughts: Option<String>,
    said: Option<&str>,
    calls: &[(String, String, String)],
) -> String {
    let mut list = List {
        messages: Vec::new(),
        thoughts,
        said: said.or(calls.is_empty().then_some("")).map(str::to_owned),
        calls: calls.iter().map(|(id, name, arguments)| call(id, name, arguments)).collect(),
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

/// A chat message.
pub(super) fn message(role: &str, content: Option<&str>) -> Object {
    let mut message = Object::default();
    message.add("role", &text_json(role));
    message.add("content", &content.map_or("null".to_owned(), text_json));
    message
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
            _ => note_unknown(map, name, &mut self.unknown)?,
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
            _ => note_unknown(map, name, &mut self.unknown)?,
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}

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
