//! What of a chat request becomes the prompt: messages, tools, template variables. Tokenizes nothing.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Zoned;
use minijinja::Value;
use serde::Deserialize;
use stoker_engine::TokenId;

use crate::{
    chat_template::{ChatTemplate, Conversation, Message, PromptEnd, SpecialTokens, TemplateError},
    config::Settings,
    http::{
        error::ApiError,
        fields::Fields,
        generate::{self, Encoding},
        long_texts::{self, Held},
        messages::{WireMessage, conversation},
        params::Truncation,
        prompt_work,
        tools::Tools,
    },
    replica::Served,
    wording::in_words_of,
};

/// The fields of a chat request that become its prompt.
pub(crate) struct Prompt {
    messages: Vec<Message>,
    /// What the model may call.
    pub(crate) tools: Tools,
    end: PromptEnd,
    documents: Vec<Value>,
    variables: BTreeMap<String, Value>,
    effort: Option<Effort>,
    /// Instead of the model's own.
    template: Option<String>,
    /// What the template takes for now.
    pub(crate) now: Zoned,
    encoding: Encoding,
}

/// Roles that every template is made for.
const KNOWN_ROLES: [&str; 4] = ["system", "user", "assistant", "tool"];

const TEMPLATE_FIELD: &str = "chat_template";
/// The longest templates that are published have some 20,000.
const TEMPLATE_BYTES_MAX: usize = 64 * 1024;

/// How much to think, by OpenAI's words.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    XHigh,
}

/// A prompt, ready for the engine.
pub(crate) struct PromptTokens {
    pub(crate) tokens: Vec<TokenId>,
    /// It ends with the opening of the model's reasoning.
    pub(crate) reasoning_is_open: bool,
}

impl Prompt {
    /// Takes the fields that become the prompt, unless messages cannot fit the context: a template copies what it prints, some of it more
    /// than once.
    pub(crate) async fn take(
        fields: &mut Fields,
        settings: &Settings,
        served: &Arc<Served>,
        truncate: Option<Truncation>,
    ) -> Result<Self, ApiError> {
        // Templates write the begin token themselves, so the default is `No`.
        let specials = fields.take("add_special_tokens")?.unwrap_or(false).into();
        let encoding = Encoding::new(specials, truncate);
        long_texts::refuse(fields, "messages", Held::Messages, served, encoding).await?;
        let messages: Vec<WireMessage> = fields.require("messages")?;
        Ok(Self {
            messages: conversation(messages)?,
            tools: Tools::take(fields)?,
            end: prompt_end(fields)?,
            documents: fields.take("documents")?.unwrap_or_default(),
            variables: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            effort: fields.take("reasoning_effort")?,
            template: template(fields, settings)?,
            now: Zoned::now(),
            encoding,
        })
    }

    /// What the assistant has said last, if the last words are its own.
    pub(crate) fn words_of_assistant(&self) -> Option<&str> {
        self.messages.last().filter(|last| last.role == "assistant").map(|last| last.content.as_str())
    }

    /// Whether the model is shown tools it may call.
    pub(crate) fn has_tools(&self) -> bool {
        !self.tools.shown.is_empty()
    }

    /// The prompt.
    pub(crate) async fn tokens(self, served: &Arc<Served>) -> Result<PromptTokens, ApiError> {
        let served = served.clone();
        let n_bytes = self.messages.iter().map(|message| message.content.len()).sum();
        let work = move |is_abandoned: &dyn Fn() -> bool| {
            let text = self.render(&served)?;
            let reasoning_is_open = served.formats.reasoning.is_some_and(|format| format.is_open_in(&text));
            let tokens = generate::encode(&served, &text, self.encoding, is_abandoned)?;
            Ok(PromptTokens { tokens, reasoning_is_open })
        };
        prompt_work::run(n_bytes, work).await
    }

    /// The prompt text.
    fn render(&self, served: &Served) -> Result<String, ApiError> {
        let brought = self.template.clone().map(|source| ChatTemplate::compile(source, specials(served))).transpose();
        let brought = brought.map_err(|error| ApiError::invalid(TEMPLATE_FIELD, error.to_string()))?;
        let template = brought.as_ref().or(served.template.as_ref()).ok_or_else(|| {
            ApiError::invalid("messages", "this model has no chat template: use /v1/completions with a prompt")
        })?;
        self.check_tools(served, template)?;
        if !self.documents.is_empty() && !template.reads("documents") {
            let message = "this model's chat template shows the model no documents: put them into a message";
            return Err(ApiError::unsupported("documents", message));
        }
        let conversation = Conversation {
            messages: &self.messages,
            tools: &self.tools.shown,
            documents: &self.documents,
            end: self.end,
            variables: &self.variables(template)?,
            now: self.now.clone(),
        };
        let text = template.render(&conversation).map_err(|error| self.failed(&error))?;
        self.check_roles(&text)?;
        Ok(text)
    }

    /// A template that refuses a conversation means the messages, whoever wrote it.
    fn failed(&self, error: &TemplateError) -> ApiError {
        let is_brought = self.template.is_some() && !matches!(error, TemplateError::Refused(_));
        ApiError::invalid(if is_brought { TEMPLATE_FIELD } else { "messages" }, error.to_string())
    }

    /// Many templates leave out what has a role that they do not know: such a message is refused.
    fn check_roles(&self, text: &str) -> Result<(), ApiError> {
        let is_lost =
            |message: &Message| !KNOWN_ROLES.contains(&message.role.as_str()) && !text.contains(message.content.trim());
        let Some(index) = self.messages.iter().position(is_lost) else { return Ok(()) };
        let path = format!("messages[{index}].role");
        let role = &self.messages[index].role;
        let message = format!("`{path}`: this model's chat template leaves out what `{role}` says: use another role");
        Err(ApiError::invalid(path, message))
    }

    fn check_tools(&self, served: &Served, template: &ChatTemplate) -> Result<(), ApiError> {
        if !self.has_tools() {
            return Ok(());
        }
        if served.formats.calls.is_none() {
            let message = "this model's tool calls are not understood by this server (its chat template is of no \
                           known format): remove `tools`, or start the agent with --tool-call-format";
            return Err(ApiError::unsupported("tools", message));
        }
        if !template.reads("tools") {
            let message = "this model's chat template shows the model no tools: remove `tools`";
            return Err(ApiError::unsupported("tools", message));
        }
        Ok(())
    }

    /// What the template is told beside the messages: what the client said itself, then what its effort means.
    fn variables(&self, template: &ChatTemplate) -> Result<BTreeMap<String, Value>, ApiError> {
        // A model that does not think is not told not to.
        let never_thinks = template.reasoning_format().is_none();
        let is_neutral = |name: &str, value: &Value| {
            never_thinks && ["enable_thinking", "thinking"].contains(&name) && *value == Value::from(false)
        };
        let mut unread = self.variables.iter().filter(|(name, _)| !template.reads(name));
        if let Some((unread, _)) = unread.find(|(name, value)| !is_neutral(name, value)) {
            let path = format!("chat_template_kwargs.{unread}");
            let message = format!("`{path}`: this model's chat template reads no variable of this name: remove it");
            return Err(ApiError::unsupported(path, message));
        }
        let mut variables = self.variables.clone();
        let Some(effort) = self.effort else { return Ok(variables) };
        let meant = [
            ("reasoning_effort", Value::from(effort.word())),
            ("enable_thinking", Value::from(effort != Effort::None)),
            ("thinking", Value::from(effort != Effort::None)),
        ];
        let read: Vec<_> = meant.into_iter().filter(|(name, _)| template.reads(name)).collect();
        if read.is_empty() && (effort != Effort::None || template.reasoning_format().is_some()) {
            let message = "`reasoning_effort`: this model's chat template has no setting for it: remove it";
            return Err(ApiError::unsupported("reasoning_effort", message));
        }
        for (name, value) in read {
            variables.entry(name.to_owned()).or_insert(value);
        }
        Ok(variables)
    }
}

impl Effort {
    fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::XHigh => "xhigh",
        }
    }
}

/// The prompt was made of `messages`, the field that the client knows.
pub(crate) fn of_messages(error: ApiError) -> ApiError {
    match error.param.as_deref() {
        Some("prompt") => ApiError { param: Some("messages".into()), ..error },
        _ => error,
    }
}

fn specials(served: &Served) -> SpecialTokens {
    let model = served.engine.model();
    SpecialTokens { bos: model.bos_token.clone(), eos: model.eos_token.clone() }
}

/// A template is a program, so only whoever runs the replica says whether those of clients run there.
fn template(fields: &mut Fields, settings: &Settings) -> Result<Option<String>, ApiError> {
    let Some(source) = fields.take::<String>(TEMPLATE_FIELD)? else { return Ok(None) };
    if !settings.trusts_request_templates {
        let switch = in_words_of(settings.started_by, "trust_request_chat_template");
        let message = format!(
            "`chat_template`: prompts are rendered by the model's own template: remove it, or have the replica run with {switch}"
        );
        return Err(ApiError::unsupported(TEMPLATE_FIELD, message));
    }
    if source.len() > TEMPLATE_BYTES_MAX {
        let message = format!("`chat_template` has {} bytes, more than {TEMPLATE_BYTES_MAX}: shorten it", source.len());
        return Err(ApiError::invalid(TEMPLATE_FIELD, message));
    }
    Ok(Some(source))
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
