//! What of a chat request becomes the prompt: messages, tools, template variables. Tokenizes nothing.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Zoned;
use minijinja::Value;
use serde::{Deserialize, de::IgnoredAny};
use stoker_engine::TokenId;

use crate::{
    chat_template::{ChatTemplate, Conversation, Message, PromptEnd},
    http::{
        error::ApiError,
        fields::Fields,
        generate::{self, AddSpecials, Encoding},
        messages::{WireMessage, conversation},
        params::{Truncation, only},
        prompt_work,
    },
    replica::Served,
};

/// The fields of a chat request that become its prompt.
pub(crate) struct Prompt {
    messages: Vec<Message>,
    tools: Vec<Value>,
    end: PromptEnd,
    documents: Vec<Value>,
    variables: BTreeMap<String, Value>,
    /// Templates write the begin token themselves, so the default is `No`.
    add_specials: AddSpecials,
}

impl Prompt {
    /// Takes the fields that become the prompt.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let messages: Vec<WireMessage> = fields.require("messages")?;
        Ok(Self {
            messages: conversation(messages)?,
            tools: tools(fields)?,
            end: prompt_end(fields)?,
            documents: fields.take("documents")?.unwrap_or_default(),
            variables: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            add_specials: fields.take("add_special_tokens")?.unwrap_or(false).into(),
        })
    }

    /// Whether the model is shown tools it may call.
    pub(crate) fn has_tools(&self) -> bool {
        !self.tools.is_empty()
    }

    /// The prompt.
    pub(crate) async fn tokens(
        self,
        served: &Arc<Served>,
        truncate: Option<Truncation>,
    ) -> Result<Vec<TokenId>, ApiError> {
        let served = served.clone();
        let encoding = Encoding::new(self.add_specials, truncate);
        let n_bytes = self.messages.iter().map(|message| message.content.len()).sum();
        let work = move |is_abandoned: &dyn Fn() -> bool| {
            let text = self.render(&served)?;
            generate::encode(&served, &text, encoding, is_abandoned)
        };
        prompt_work::run(n_bytes, work).await
    }

    /// The prompt text.
    fn render(&self, served: &Served) -> Result<String, ApiError> {
        let template = served.template.as_ref().ok_or_else(|| {
            ApiError::invalid("messages", "this model has no chat template: use /v1/completions with a prompt")
        })?;
        self.check_tools(template)?;
        let conversation = Conversation {
            messages: &self.messages,
            tools: &self.tools,
            documents: &self.documents,
            end: self.end,
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

/// The prompt was made of `messages`, the field that the client knows.
pub(crate) fn of_messages(error: ApiError) -> ApiError {
    match error.param.as_deref() {
        Some("prompt") => ApiError { param: Some("messages".into()), ..error },
        _ => error,
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

/// Where the prompt ends: before the assistant's words, unless the client says otherwise.
fn prompt_end(fields: &mut Fields) -> Result<PromptEnd, ApiError> {
    let opens_turn = fields.take("add_generation_prompt")?;
    match (fields.take("continue_final_message")?.unwrap_or(false), opens_turn) {
        (false, None | Some(true)) => Ok(PromptEnd::AssistantsTurn),
        (false, Some(false)) => Ok(PromptEnd::LastMessage),
        (true, None | Some(false)) => Ok(PromptEnd::InsideLastMessage),
        (true, Some(true)) => Err(ApiError::invalid(
            "continue_final_message",
            "the final message is either continued or answered: send one of `continue_final_message` and \
             `add_generation_prompt` as true",
        )),
    }
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
