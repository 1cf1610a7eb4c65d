//! The tools of a request and which of them may be called, as chat requests have them.

use serde::{Deserialize, Deserializer, de::MapAccess};
use serde_json::{Value, value::RawValue};

use super::Echoed;
use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
    json_object::{Filled, filled, note_unknown},
    json_text::{Object, text_json},
};

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

/// Takes tools and their choice out of `fields`.
pub(super) fn add_tools(chat: &mut Object, echoed: &mut Echoed, fields: &mut Fields) -> Result<(), ApiError> {
    let sent = fields.take::<Box<RawValue>>("tools")?;
    let functions = sent.as_deref().map_or(Ok(Vec::new()), functions)?;
    if !functions.is_empty() {
        chat.add("tools", &format!("[{}]", functions.join(",")));
    }
    let choice = fields.take::<Value>("tool_choice")?;
    if let Some(choice) = &choice {
        chat.add("tool_choice", &choice_of(choice)?);
    }
    let tools = sent.map_or(Value::Array(Vec::new()), |raw| serde_json::from_str(raw.get()).unwrap_or_default());
    echoed.push(("tools", with_members(tools, &["description", "parameters", "strict"])));
    echoed.push(("tool_choice", choice.unwrap_or_else(|| "auto".into())));
    Ok(())
}

fn functions(sent: &RawValue) -> Result<Vec<String>, ApiError> {
    let tools: Vec<Tool> = serde_json::from_str(sent.get())
        .map_err(|error| ApiError::invalid("tools", format!("`tools` is no list of tools: {error}")))?;
    tools.into_iter().enumerate().map(|(index, tool)| function(tool, &format!("tools[{index}]"))).collect()
}

/// A tool as chat requests define it.
fn function(tool: Tool, path: &str) -> Result<String, ApiError> {
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
    Ok(definition.text())
}

/// A choice as chat requests make it.
fn choice_of(choice: &Value) -> Result<String, ApiError> {
    match choice {
        Value::String(word) => Ok(text_json(word)),
        Value::Object(named) if named.get("type").is_some_and(|kind| kind == "function") => {
            let name = named.get("name").and_then(Value::as_str).unwrap_or_default();
            Ok(format!("{{\"type\":\"function\",\"function\":{{\"name\":{}}}}}", text_json(name)))
        }
        Value::Object(allowed) if allowed.get("type").is_some_and(|kind| kind == "allowed_tools") => {
            Ok(allowed_tools(allowed)?.to_string())
        }
        _ => {
            let message = "`tool_choice` is `none`, `auto`, `required`, {\"type\": \"function\", \"name\": …} or of type `allowed_tools`";
            Err(ApiError::invalid("tool_choice", message))
        }
    }
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

impl Filled for Tool {
    fn fill<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = map.next_value()?,
            "name" => self.name = map.next_value()?,
            "description" => self.description = map.next_value()?,
            "parameters" => self.parameters = map.next_value()?,
            "strict" => self.strict = map.next_value()?,
            // Another type has other members; it is refused by its type.
            _ => note_unknown(map, name, &mut self.unknown)?,
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Tool {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        filled(deserializer)
    }
}
