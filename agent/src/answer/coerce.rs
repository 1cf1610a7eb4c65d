//! Values that a model wrote without JSON's quotes, as JSON: the tool's schema says which are text. Without one, what
//! reads as JSON or as a Python literal is that, and everything else is text.

use std::collections::HashMap;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::pythonic::literal;

/// Schemas of the parameters of the tools a request offers, by the function's name.
#[derive(Clone, Debug, Default)]
pub struct ToolSchemas {
    parameters: HashMap<String, Value>,
}

/// What a value must be.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// A string, whatever it looks like.
    Text,
    /// Whatever it reads as.
    Any,
}

impl ToolSchemas {
    /// From functions and the JSON schemas of their arguments.
    pub fn new(functions: impl IntoIterator<Item = (String, Value)>) -> Self {
        Self { parameters: functions.into_iter().collect() }
    }

    pub(super) fn kind(&self, function: &str, parameter: &str) -> Kind {
        let schema = self.parameters.get(function).map(|schema| &schema["properties"][parameter]);
        if schema.is_some_and(is_text) { Kind::Text } else { Kind::Any }
    }
}

/// Whether a schema takes strings and nothing else that text could mean.
pub(super) fn is_text(schema: &Value) -> bool {
    let all = |list: &Value, holds: fn(&Value) -> bool| {
        list.as_array().is_some_and(|list| !list.is_empty() && list.iter().all(holds))
    };
    match &schema["type"] {
        Value::String(name) => name == "string",
        Value::Array(_) => all(&schema["type"], |name| name == "string"),
        _ => all(&schema["enum"], Value::is_string) || all(&schema["anyOf"], is_text) || all(&schema["oneOf"], is_text),
    }
}

/// The value as JSON text.
pub(super) fn json_of(value: &str, kind: Kind) -> String {
    let trimmed = value.trim();
    match kind {
        Kind::Any if serde_json::from_str::<IgnoredAny>(trimmed).is_ok() => trimmed.to_owned(),
        Kind::Any => literal(trimmed).unwrap_or_else(|| quoted(value)),
        Kind::Text => quoted(value),
    }
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::to_string(text).expect("text is always JSON")
}

/// A text as the inside of a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let quoted = quoted(text);
    quoted[1..quoted.len() - 1].to_owned()
}
