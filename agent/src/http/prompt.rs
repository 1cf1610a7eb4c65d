//! What of a chat request becomes the prompt: messages, tools, template variables. Tokenizes nothing.

use std::collections::BTreeMap;

use jiff::Zoned;
use minijinja::Value;
use serde::{Deserialize, de::IgnoredAny};

use crate::{
    chat_template::{ChatTemplate, Conversation, Message},
    http::{
        error::ApiError,
        fields::Fields,
        generate::AddSpecials,
        messages::{WireMessage, conversation},
        params::only,
    },
    replica::Served,
};

/// The fields of a chat request that become its prompt.
pub(crate) struct Prompt {
    messages: Vec<Message>,
    tools: Vec<Value>,
    add_generation_prompt: bool,
    variables: BTreeMap<String, Value>,
    /// Templates write the begin token themselves, so the default is `No`.
    pub(crate) add_specials: AddSpecials,
}

impl Prompt {
    /// Takes the fields that become the prompt.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let messages: Vec<WireMessage> = fields.require("messages")?;
        only(fields, "continue_final_message", &false, "the last message is always complete")?;
        Ok(Self {
            messages: conversation(messages)?,
            tools: tools(fields)?,
            add_generation_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
            variables: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            add_specials: fields.take("add_special_tokens")?.unwrap_or(false).into(),
        })
    }

    /// Whether the model is shown tools it may call.
    pub(crate) fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    /// The prompt text.
    pub(crate) fn render(&self, served: &Served) -> Result<String, ApiError> {
        let template = served.template.as_ref().ok_or_else(|| {
            ApiError::invalid("messages", "this model has no chat template: use /v1/completions with a prompt")
        })?;
        self.check_tools(template)?;
        let conversation = Conversation {
            messages: &self.messages,
            tools: &self.tools,
            add_generation_prompt: self.add_generation_prompt,
            variables: &self.variables,
            now: Zoned::now(),
        };
        template.render(&conversation).map_err(|error| ApiError::invalid("messages", error.to_string()))
    }

    fn check_tools(&self, template: &ChatTemplate) -> Result<(), ApiError> {
        if self.has_tools() && !template.writes_tool_calls() {
            let message = "this model's tool calls are not understood by this server (its chat template does not write \
                           `<tool_call>`): remove `tools`";
            return Err(ApiError::unsupported("tools", message));
        }
        Ok(())
    }
}

/// What a client may send; only the words `none` and `auto` are understood.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected `none` or `auto`")]
enum ToolChoice {
    Word(String),
    Function {
        #[serde(rename = "type")]
        _kind: IgnoredAny,
    },
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
}

/// The tools the model is shown. `tool_choice: none` shows it none, so that it can call none.
fn tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    only(fields, "parallel_tool_calls", &true, "the model decides how many calls it makes")?;
    let shown = tools_are_shown(fields)?;
    for (index, tool) in tools.iter().enumerate() {
        check_tool(index, tool)?;
    }
    Ok(if shown { tools } else { Vec::new() })
}

fn tools_are_shown(fields: &mut Fields) -> Result<bool, ApiError> {
    let forced = match fields.take("tool_choice")? {
        None => return Ok(true),
        Some(ToolChoice::Word(word)) if word == "auto" => return Ok(true),
        Some(ToolChoice::Word(word)) if word == "none" => return Ok(false),
        Some(ToolChoice::Word(word)) => word,
        Some(ToolChoice::Function { .. }) => "a function by name".to_owned(),
    };
    let message = format!("tool_choice {forced:?} is not supported, as no call can be forced: use `auto` or `none`");
    Err(ApiError::unsupported("tool_choice", message))
}

fn check_tool(index: usize, tool: &Value) -> Result<(), ApiError> {
    match Tool::deserialize(tool.clone()) {
        Ok(Tool { r#type: ToolKind::Function, function }) if !function.name.is_empty() => Ok(()),
        Ok(_) => Err(ApiError::invalid(format!("tools[{index}].function.name"), "a function needs a name")),
        Err(error) => {
            let path = format!("tools[{index}]");
            Err(ApiError::invalid(&path, format!("`{path}` is not a function tool: {error}")))
        }
    }
}
