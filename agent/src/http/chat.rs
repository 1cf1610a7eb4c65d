//! `POST /v1/chat/completions`: its fields, and the wire forms of its answers. Generates nothing itself.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use jiff::Zoned;
use minijinja::Value;
use serde::{Deserialize, Serialize};
use stoker_engine::PositionLogprobs;

use crate::{
    chat_template::{Conversation, Message},
    http::{
        body::streamed,
        choices::Completion,
        error::ApiError,
        extract::JsonFields,
        fields::Fields,
        generate::{self, AddSpecials, Job},
        logprobs::ChatLogprobs,
        messages::{WireMessage, conversation},
        params::{Delivery, Generation, MAX_TOP_LOGPROBS, only},
        stream::{AnswerHead, Frames, Shape},
        usage::{UsageBody, UsageSum},
    },
    replica::{Replica, Served},
};

/// Answers one chat completion.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let open = replica.enter()?;
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let generation = Generation::take(&mut fields, &generate::defaults(&served))?;
    let logprobs = logprobs_wanted(&mut fields)?;
    let prompt = Prompt::take(&mut fields)?;
    fields.finish()?;

    let tokens = generate::tokenize(&served, prompt.render(&served)?, prompt.add_specials).await?;
    let job = Job { prompts: vec![tokens], generation, logprobs };
    let choices = generate::start(&replica, &served, &job, open)?;
    let head = generate::answer_head(&replica, "chatcmpl");
    let usage = UsageSum::new(job.generation.n);
    match job.generation.delivery {
        Delivery::Stream { include_usage } => {
            let shape = ChatShape { logprobs: logprobs.is_some() };
            Ok(streamed(choices, Frames::new(head, shape, include_usage), usage))
        }
        Delivery::Whole => {
            let (completions, usage) = choices.collect(usage).await?;
            Ok(Json(ChatCompletion::new(head, completions, usage, logprobs.is_some())).into_response())
        }
    }
}

/// What becomes the prompt.
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

    /// The prompt text.
    pub(crate) fn render(&self, served: &Served) -> Result<String, ApiError> {
        let template = served.template.as_ref().ok_or_else(|| {
            ApiError::invalid("messages", "this model has no chat template: use /v1/completions with a prompt")
        })?;
        let conversation = Conversation {
            messages: &self.messages,
            tools: &self.tools,
            add_generation_prompt: self.add_generation_prompt,
            variables: &self.variables,
            now: Zoned::now(),
        };
        template.render(&conversation).map_err(|error| ApiError::invalid("messages", error.to_string()))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum ToolChoice {
    None,
    Auto,
}

/// Tool definitions reach the template; calls in the answer are not parsed, so a client that expects parsed calls is told.
fn tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    fields.take::<bool>("parallel_tool_calls")?;
    let choice = fields.take::<ToolChoice>("tool_choice")?;
    response_format(fields)?;
    if !tools.is_empty() && !matches!(choice, Some(ToolChoice::None)) {
        let message = "tool calls in answers are not parsed by this server: send `tool_choice: \"none\"` to show the tools \
                       to the model and get its answer as text";
        return Err(ApiError::unsupported("tool_choice", message));
    }
    Ok(tools)
}

#[derive(Deserialize)]
struct ResponseFormat {
    r#type: String,
}

fn response_format(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.take::<ResponseFormat>("response_format")? {
        Some(format) if format.r#type != "text" => {
            let message = format!("response_format `{}` is not supported: use `text`", format.r#type);
            Err(ApiError::unsupported("response_format", message))
        }
        _ => Ok(()),
    }
}

fn logprobs_wanted(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = fields.take("logprobs")?.unwrap_or(false);
    let top = fields.number("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`")),
    }
}

#[derive(Serialize)]
struct ChatCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: UsageBody,
}

#[derive(Serialize)]
struct ChatChoice {
    index: usize,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct AssistantMessage {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

impl ChatCompletion {
    fn new(head: AnswerHead, completions: Vec<Completion>, usage: UsageBody, logprobs: bool) -> Self {
        let choices = completions.into_iter().enumerate().map(|(index, completion)| ChatChoice {
            index,
            message: AssistantMessage { role: "assistant", content: completion.text, refusal: None },
            logprobs: logprobs.then(|| ChatLogprobs::new(completion.logprobs)),
            finish_reason: completion.finish_reason,
        });
        let AnswerHead { id, created, model } = head;
        Self { id, object: "chat.completion", created, model, choices: choices.collect(), usage }
    }
}

struct ChatShape {
    logprobs: bool,
}

/// One entry of a chunk's `choices`.
#[derive(Serialize)]
struct ChunkChoice {
    index: u32,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

impl Shape for ChatShape {
    type Choice = ChunkChoice;

    const OBJECT: &'static str = "chat.completion.chunk";

    fn opening(&mut self, index: u32) -> Option<ChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Some(ChunkChoice { index, delta, logprobs: None, finish_reason: None })
    }

    fn delta(&mut self, index: u32, text: String, logprobs: Vec<PositionLogprobs>) -> ChunkChoice {
        let logprobs = self.logprobs.then(|| ChatLogprobs::new(logprobs));
        ChunkChoice { index, delta: Delta { role: None, content: Some(text) }, logprobs, finish_reason: None }
    }

    fn finish(&mut self, index: u32, reason: &'static str) -> ChunkChoice {
        ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: Some(reason) }
    }
}
