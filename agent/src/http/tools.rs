//! The tools of a chat request: what the model is shown, what it may or must call. Renders and parses nothing.

use std::{collections::HashMap, sync::Arc};

use minijinja::Value;
use serde::Deserialize;

use crate::{
    answer::{CallableFunction, CallsWanted, ToolSchemas},
    http::{
        error::ApiError,
        fields::{FieldError, Fields},
    },
};

/// Longest name of a function; OpenAI's is half of it.
const MAX_NAME_BYTES: usize = 128;

/// The tools of a request.
pub(crate) struct Tools {
    /// Definitions as they were sent, for the template; none if the model shall call none.
    pub(crate) shown: Vec<Value>,
    /// Types of the arguments.
    pub(crate) schemas: Arc<ToolSchemas>,
    /// What the model may call, and whether it must.
    pub(crate) wanted: CallsWanted,
}

/// `tool_choice` on the wire.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `none`, `auto`, `required` or a function by name")]
enum WireChoice {
    Word(String),
    Named { r#type: String, function: Option<NamedFunction> },
}

#[derive(Deserialize)]
struct NamedFunction {
    name: String,
}

/// The parts of a definition that must be right; all of it reaches the template.
#[derive(Deserialize)]
struct Tool {
    r#type: ToolKind,
    function: Function,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ToolKind {
    Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    parameters: Option<serde_json::Value>,
    strict: Option<bool>,
}

/// Whether calls are wanted.
#[derive(Debug, PartialEq)]
enum Choice {
    None,
    Auto,
    Required,
    Named(String),
}

impl Tools {
    /// Takes the fields about tools. `tool_choice: none` shows the model none, so that it can call none.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let shown: Vec<Value> = fields.take("tools")?.unwrap_or_default();
        let are_parallel = fields.take("parallel_tool_calls")?.unwrap_or(true);
        let choice = choice(fields)?;
        let functions =
            shown.iter().enumerate().map(|(index, tool)| function(index, tool)).collect::<Result<Vec<_>, _>>()?;
        check_names(&functions)?;
        check_choice(&choice, &functions)?;
        let wanted = CallsWanted { functions: Vec::new(), is_required: false, are_parallel };
        if choice == Choice::None || shown.is_empty() {
            return Ok(Self { shown: Vec::new(), schemas: Arc::default(), wanted });
        }
        let schemas = functions.iter().map(|function| (function.name.clone(), function.parameters.clone()));
        let schemas = Arc::new(ToolSchemas::new(schemas));
        let wanted = match choice {
            Choice::Named(name) => CallsWanted {
                functions: functions.into_iter().filter(|function| function.name == name).collect(),
                is_required: true,
                are_parallel: false,
            },
            choice => CallsWanted { functions, is_required: choice == Choice::Required, are_parallel },
        };
        Ok(Self { shown, schemas, wanted })
    }
}

fn choice(fields: &mut Fields) -> Result<Choice, ApiError> {
    let unknown = |choice: &str| {
        let message =
            format!("tool_choice `{choice}` is not supported: use `none`, `auto`, `required` or a function by name");
        Err(ApiError::unsupported("tool_choice", message))
    };
    match fields.object("tool_choice")? {
        None => Ok(Choice::Auto),
        Some(WireChoice::Word(word)) => match word.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" => Ok(Choice::Required),
            other => unknown(other),
        },
        Some(WireChoice::Named { r#type, function }) => match function {
            Some(function) if r#type == "function" => Ok(Choice::Named(function.name)),
            Some(_) => unknown(&r#type),
            None if r#type == "function" => {
                let param = "tool_choice.function.name";
                Err(FieldError::Missing { field: param.to_owned() }.into())
            }
            None => unknown(&r#type),
        },
    }
}

/// Who calls one of two tools of one name could mean either.
fn check_names(functions: &[CallableFunction]) -> Result<(), ApiError> {
    let mut first = HashMap::new();
    for (index, function) in functions.iter().enumerate() {
        if let Some(earlier) = first.insert(function.name.as_str(), index) {
            let path = format!("tools[{index}].function.name");
            let message =
                format!("`{path}` is `{}`, as is that of tools[{earlier}]: give each tool its own name", function.name);
            return Err(ApiError::invalid(path, message));
        }
    }
    Ok(())
}

/// What must be called must be there.
fn check_choice(choice: &Choice, functions: &[CallableFunction]) -> Result<(), ApiError> {
    match choice {
        Choice::None | Choice::Auto => Ok(()),
        Choice::Required | Choice::Named(_) if functions.is_empty() => {
            Err(ApiError::invalid("tool_choice", "`tool_choice` asks for a call, but `tools` is empty: send tools"))
        }
        Choice::Named(name) if !functions.iter().any(|function| function.name == *name) => {
            let known: Vec<&str> = functions.iter().map(|function| function.name.as_str()).collect();
            let message = format!("tool_choice `{name}` is not among the tools: use {}", known.join(", "));
            Err(ApiError::invalid("tool_choice", message))
        }
        Choice::Required | Choice::Named(_) => Ok(()),
    }
}

fn function(index: usize, tool: &Value) -> Result<CallableFunction, ApiError> {
    let path = format!("tools[{index}]");
    let Tool { r#type: ToolKind::Function, function: Function { name, parameters, strict } } =
        Tool::deserialize(tool.clone())
            .map_err(|error| ApiError::invalid(&path, format!("`{path}` is not a function tool: {error}")))?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "_-./:".contains(c);
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_name) {
        let path = format!("{path}.function.name");
        let message = format!(
            "`{path}` must be 1 to {MAX_NAME_BYTES} of letters, digits and `_-./:`, got {} bytes of something else",
            name.len()
        );
        return Err(ApiError::invalid(path, message));
    }
    let param = format!("{path}.function.parameters");
    let parameters = parameters.unwrap_or_default();
    if !parameters.is_object() && !parameters.is_null() {
        let message = format!("`{param}` must be a JSON schema of an object, got {parameters}");
        return Err(ApiError::invalid(param, message));
    }
    Ok(CallableFunction { name, parameters, is_strict: strict.unwrap_or(false), param })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(body: &serde_json::Value) -> Result<Tools, ApiError> {
        let mut fields = Fields::parse(body.to_string().into())?;
        let tools = Tools::take(&mut fields)?;
        fields.finish()?;
        Ok(tools)
    }

    fn tool(name: &str) -> serde_json::Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn what_must_be_called_is_what_may_be_called() {
        let tools = json!([tool("f"), tool("g")]);
        let wanted = |choice: serde_json::Value| {
            let taken = take(&json!({"tools": tools, "tool_choice": choice})).unwrap();
            let names: Vec<String> = taken.wanted.functions.iter().map(|function| function.name.clone()).collect();
            (taken.shown.len(), names.concat(), taken.wanted.is_required, taken.wanted.are_parallel)
        };
        assert_eq!(wanted(json!("auto")), (2, "fg".into(), false, true));
        assert_eq!(wanted(json!("none")), (0, String::new(), false, true));
        assert_eq!(wanted(json!("required")), (2, "fg".into(), true, true));
        let named = json!({"type": "function", "function": {"name": "g"}});
        assert_eq!(wanted(named), (2, "g".into(), true, false));
        assert_eq!(take(&json!({"tool_choice": "none"})).unwrap().shown.len(), 0);
    }

    #[test]
    fn mistakes_are_named_by_their_path() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (body, param) in [
            (json!({"tools": [tool("f"), {"type": "retrieval"}]}), "tools[1]"),
            (json!({"tools": [tool("")]}), "tools[0].function.name"),
            (json!({"tools": [tool("a b")]}), "tools[0].function.name"),
            (json!({"tools": [tool(&"x".repeat(129))]}), "tools[0].function.name"),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
                "tools[0].function.parameters",
            ),
            (json!({"tools": [tool("f"), tool("g"), tool("f")]}), "tools[2].function.name"),
            (json!({"tools": [tool("f"), tool("f")], "tool_choice": "none"}), "tools[1].function.name"),
            (json!({"tools": [tool("f")], "tool_choice": named("g")}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": "always"}), "tool_choice"),
            (json!({"tools": [tool("f")], "tool_choice": {"type": "function"}}), "tool_choice.function.name"),
            (json!({"tool_choice": "required"}), "tool_choice"),
        ] {
            let error = take(&body).map(|_| ()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}: {error:?}");
        }
    }
}
