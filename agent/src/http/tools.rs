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
#[serde(untagged, expecting = "expected `none`, `auto`, `required`, a function by name or `allowed_tools`")]
enum WireChoice {
    Word(String),
    Typed { r#type: String, function: Option<NamedFunction>, allowed_tools: Option<AllowedTools> },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AllowedTools {
    mode: String,
    tools: Vec<AllowedTool>,
}

#[derive(Deserialize)]
struct AllowedTool {
    r#type: ToolKind,
    function: NamedFunction,
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
    /// One of these, if any or at any rate.
    Allowed {
        names: Vec<String>,
        is_required: bool,
    },
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
        let wanted = CallsWanted { are_parallel, ..CallsWanted::default() };
        if choice == Choice::None || shown.is_empty() {
            return Ok(Self { shown: Vec::new(), schemas: Arc::default(), wanted });
        }
        let schemas = functions.iter().map(|function| (function.name.clone(), function.parameters.clone()));
        let schemas = Arc::new(ToolSchemas::new(schemas));
        let wanted = match choice {
            Choice::Named(name) => {
                CallsWanted { functions: named(functions, &[name]), is_required: true, ..CallsWanted::default() }
            }
            Choice::Allowed { names, is_required } => {
                CallsWanted { functions: named(functions, &names), is_required, are_parallel, is_narrowed: true }
            }
            choice => {
                CallsWanted { functions, is_required: choice == Choice::Required, are_parallel, is_narrowed: false }
            }
        };
        Ok(Self { shown, schemas, wanted })
    }
}

fn named(functions: Vec<CallableFunction>, names: &[String]) -> Vec<CallableFunction> {
    functions.into_iter().filter(|function| names.contains(&function.name)).collect()
}

fn choice(fields: &mut Fields) -> Result<Choice, ApiError> {
    let unknown = |choice: &str| {
        let message = format!(
            "tool_choice `{choice}` is not supported: use `none`, `auto`, `required`, a function by name or `allowed_tools`"
        );
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
        Some(WireChoice::Typed { r#type, function, allowed_tools }) => match (r#type.as_str(), function, allowed_tools)
        {
            ("function", Some(function), _) => Ok(Choice::Named(function.name)),
            ("allowed_tools", _, Some(allowed)) => allowed.choice(),
            ("function", None, _) => Err(missing("tool_choice.function.name")),
            ("allowed_tools", _, None) => Err(missing("tool_choice.allowed_tools")),
            (other, ..) => unknown(other),
        },
    }
}

fn missing(field: &str) -> ApiError {
    FieldError::Missing { field: field.to_owned() }.into()
}

impl AllowedTools {
    fn choice(self) -> Result<Choice, ApiError> {
        let is_required = match self.mode.as_str() {
            "auto" => false,
            "required" => true,
            other => {
                let path = "tool_choice.allowed_tools.mode";
                return Err(ApiError::invalid(path, format!("`{path}` is `{other}`: use `auto` or `required`")));
            }
        };
        if self.tools.is_empty() {
            let path = "tool_choice.allowed_tools.tools";
            let message = format!("`{path}` is empty: name a tool, or send `tool_choice: none`");
            return Err(ApiError::empty_array(path, message));
        }
        let name = |AllowedTool { r#type: ToolKind::Function, function }: AllowedTool| function.name;
        Ok(Choice::Allowed { names: self.tools.into_iter().map(name).collect(), is_required })
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

/// What is named, and what must be called, must be there.
fn check_choice(choice: &Choice, functions: &[CallableFunction]) -> Result<(), ApiError> {
    let names = match choice {
        Choice::None | Choice::Auto => return Ok(()),
        Choice::Required => &[][..],
        Choice::Named(name) => std::slice::from_ref(name),
        Choice::Allowed { names, .. } => names,
    };
    if functions.is_empty() {
        return Err(ApiError::invalid(
            "tool_choice",
            "`tool_choice` asks for a call, but `tools` is empty: send tools",
        ));
    }
    let is_known = |name: &&String| functions.iter().any(|function| function.name == **name);
    match names.iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => {
            let known: Vec<&str> = functions.iter().map(|function| function.name.as_str()).collect();
            let message = format!("tool_choice `{name}` is not among the tools: use {}", known.join(", "));
            Err(ApiError::invalid("tool_choice", message))
        }
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
        let allowed = |mode: &str, tools: serde_json::Value| json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}});
        let only = json!([{"type": "function", "function": {"name": "g"}}]);
        assert_eq!(wanted(allowed("auto", only.clone())), (2, "g".into(), false, true), "all are shown");
        assert_eq!(wanted(allowed("required", only)), (2, "g".into(), true, true));
        assert_eq!(wanted(allowed("required", tools.clone())), (2, "fg".into(), true, true));
        assert_eq!(take(&json!({"tool_choice": "none"})).unwrap().shown.len(), 0);
    }

    #[test]
    fn mistakes_are_named_by_their_path() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let allowed = |allowed: serde_json::Value| json!({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}});
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
            (allowed(json!({"mode": "auto", "tools": [named("g")]})), "tool_choice"),
            (allowed(json!({"mode": "all", "tools": [named("f")]})), "tool_choice.allowed_tools.mode"),
            (allowed(json!({"mode": "auto", "tools": []})), "tool_choice.allowed_tools.tools"),
            (allowed(json!({"mode": "auto", "tools": [{"type": "mcp", "server_label": "s"}]})), "tool_choice"),
            (allowed(json!(null)), "tool_choice.allowed_tools"),
        ] {
            let error = take(&body).map(|_| ()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}: {error:?}");
        }
    }
}
