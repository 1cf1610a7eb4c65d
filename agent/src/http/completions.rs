//! `POST /v1/completions`: its fields, and the wire forms of its answers. Generates nothing itself.

use std::sync::Arc;

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Serialize};
use stoker_engine::{PositionLogprobs, TokenId};

use crate::{
    admit::MaxTokens,
    http::{
        body::streamed,
        choices::Completion,
        error::ApiError,
        extract::JsonFields,
        fields::Fields,
        generate::{self, AddSpecials, TokenizedRequest},
        logprobs::{TextLogprobs, TextOffset},
        params::{Delivery, Generation, MAX_TOP_LOGPROBS, only},
        stream::{AnswerHead, Frames, Shape},
        usage::{UsageBody, UsageSum},
    },
    replica::{Replica, Served},
};

/// OpenAI's default for text completions (chat has none).
const DEFAULT_MAX_TOKENS: MaxTokens = MaxTokens { tokens: 16, field: "max_tokens" };

/// Answers one text completion.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    JsonFields(mut fields): JsonFields,
) -> Result<Response, ApiError> {
    let open = replica.enter()?;
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let mut generation = Generation::take(&mut fields, &generate::defaults(&served))?;
    generation.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
    let logprobs = fields.number("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    refuse_unsupported(&mut fields, generation.n)?;
    let prompt: WirePrompt = fields.require("prompt")?;
    let specials = fields.take("add_special_tokens")?.unwrap_or(true).into();
    fields.finish()?;

    let prompts = prompt.tokens(&served, specials).await?;
    let request = TokenizedRequest { prompts, generation, logprobs };
    let choices = generate::start(&replica, &served, &request, open)?;
    let head = generate::answer_head(&replica, "cmpl");
    let usage = UsageSum::new(request.generation.n);
    match request.generation.delivery {
        Delivery::Stream { include_usage } => {
            let shape = TextShape::new(choices.n_choices(), logprobs.is_some());
            Ok(streamed(choices, Frames::new(head, shape, include_usage), usage))
        }
        Delivery::Whole => {
            let (completions, usage) = choices.collect(usage).await?;
            Ok(Json(TextCompletion::new(head, completions, usage, logprobs.is_some())).into_response())
        }
    }
}

fn refuse_unsupported(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    only(fields, "echo", &false, "the prompt is never part of the answer")?;
    only(fields, "suffix", &String::new(), "text is only continued at its end")?;
    only(fields, "best_of", &n, "every completion is returned")
}

/// The four forms of `prompt`.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids or an array of arrays of token ids"
)]
enum WirePrompt {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

impl WirePrompt {
    async fn tokens(self, served: &Arc<Served>, specials: AddSpecials) -> Result<Vec<Vec<TokenId>>, ApiError> {
        match self {
            Self::Text(text) => Ok(vec![generate::tokenize(served, text, specials).await?]),
            Self::Tokens(tokens) => Ok(vec![tokens]),
            Self::TokenLists(lists) => Ok(lists),
            Self::Texts(texts) => {
                let mut prompts = Vec::with_capacity(texts.len());
                for text in texts {
                    prompts.push(generate::tokenize(served, text, specials).await?);
                }
                Ok(prompts)
            }
        }
    }
}

#[derive(Serialize)]
struct TextCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<TextChoice>,
    usage: UsageBody,
}

/// One entry of `choices`, in whole answers and in chunks.
#[derive(Serialize)]
struct TextChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

impl TextCompletion {
    fn new(head: AnswerHead, completions: Vec<Completion>, usage: UsageBody, logprobs: bool) -> Self {
        let choices = completions.into_iter().zip(0..).map(|(completion, index)| TextChoice {
            index,
            text: completion.text,
            logprobs: logprobs.then(|| TextLogprobs::new(completion.logprobs, &mut TextOffset::default())),
            finish_reason: Some(completion.finish_reason),
        });
        let AnswerHead { id, created, model } = head;
        Self { id, object: "text_completion", created, model, choices: choices.collect(), usage }
    }
}

/// Chunks of text completions. Each choice counts where its tokens lie in its text.
struct TextShape {
    offsets: Vec<TextOffset>,
    logprobs: bool,
}

impl TextShape {
    fn new(n_choices: u32, logprobs: bool) -> Self {
        Self { offsets: vec![TextOffset::default(); n_choices as usize], logprobs }
    }
}

impl Shape for TextShape {
    type Choice = TextChoice;

    const OBJECT: &'static str = "text_completion";

    fn opening(&mut self, _: u32) -> Option<TextChoice> {
        None
    }

    fn delta(&mut self, index: u32, text: String, logprobs: Vec<PositionLogprobs>) -> Vec<TextChoice> {
        let offset = &mut self.offsets[index as usize];
        let logprobs = self.logprobs.then(|| TextLogprobs::new(logprobs, offset));
        vec![TextChoice { index, text, logprobs, finish_reason: None }]
    }

    fn finish(&mut self, index: u32, reason: &'static str) -> Vec<TextChoice> {
        vec![TextChoice { index, text: String::new(), logprobs: None, finish_reason: Some(reason) }]
    }
}
