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
    answer::AnswerGrammar,
    http::{
        body::streamed,
        choices::Completion,
        error::ApiError,
        extract::Admitted,
        fields::Fields,
        generate::{self, Encoding, TokenizedRequest},
        logprobs::{TextLogprobs, TextOffset},
        params::{Delivery, Generation, MAX_TOP_LOGPROBS, only},
        stream::{AnswerHead, Frames, Shape},
        structure,
        usage::{UsageBody, UsageSum},
    },
    replica::{Replica, Served},
};

/// OpenAI's default for text completions (chat has none).
const DEFAULT_MAX_TOKENS: MaxTokens = MaxTokens { tokens: 16, field: "max_tokens" };

/// Answers one text completion.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, mut fields }: Admitted,
) -> Result<Response, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let mut generation = Generation::take(&mut fields, &generate::defaults(&served))?;
    generation.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
    let logprobs = fields.number("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    refuse_unsupported(&mut fields, generation.n)?;
    let echo = echo(&mut fields, logprobs)?;
    let structure = structure::take(&mut fields)?;
    let prompt: WirePrompt = fields.require("prompt")?;
    let specials = fields.take("add_special_tokens")?.unwrap_or(true).into();
    fields.finish()?;

    generate::admit_prompts(&replica, prompt.len(), &generation)?;
    if let Some(part) = structure {
        generation.sampling.constraint = Some(structure::compile(&replica, &served, AnswerGrammar::of(part)).await?);
    }
    let echoed = echo.then(|| prompt.texts(&served));
    let prompts = prompt.tokens(&served, Encoding::new(specials, generation.truncate)).await?;
    let echoed = Echo { texts: echoed.unwrap_or_default(), n: generation.n };
    let request = TokenizedRequest { prompts, generation, logprobs };
    let choices = generate::start(&replica, &served, &request, open)?;
    let head = generate::answer_head(&replica, "cmpl", &request.generation);
    let usage = UsageSum::new(request.generation.n);
    match request.generation.delivery {
        Delivery::Stream { include_usage } => {
            let shape = TextShape::new(echoed, choices.n_choices(), logprobs.is_some());
            streamed(choices, Frames::new(head, shape, include_usage), usage).await
        }
        Delivery::Whole => {
            let (completions, usage) = choices.collect(usage).await?;
            let completions = echoed.before(completions);
            Ok(Json(TextCompletion::new(head, completions, usage, logprobs.is_some())).into_response())
        }
    }
}

fn refuse_unsupported(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    only(fields, "suffix", &String::new(), "text is only continued at its end")?;
    only(fields, "best_of", &n, "every completion is returned")
}

/// Whether the prompt is part of the answer.
fn echo(fields: &mut Fields, logprobs: Option<u8>) -> Result<bool, ApiError> {
    let echo = fields.take("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        let message = "`echo` with `logprobs` is not supported, as the log-probabilities of a prompt are not computed: \
                       remove one of them";
        return Err(ApiError::unsupported("echo", message));
    }
    Ok(echo)
}

/// Prompts that are part of the answer.
#[derive(Default)]
struct Echo {
    /// Of each prompt, or none at all.
    texts: Vec<String>,
    /// Choices of each prompt.
    n: u32,
}

impl Echo {
    /// What stands before the text of a choice.
    fn of_choice(&self, index: u32) -> Option<&String> {
        self.texts.get((index / self.n) as usize)
    }

    fn before(&self, mut completions: Vec<Completion>) -> Vec<Completion> {
        for (completion, index) in completions.iter_mut().zip(0..) {
            if let Some(prompt) = self.of_choice(index) {
                completion.text.insert_str(0, prompt);
            }
        }
        completions
    }
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
    /// Prompts.
    fn len(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }

    fn texts(&self, served: &Served) -> Vec<String> {
        let spell = |tokens: &Vec<TokenId>| served.engine.tokenizer().decode(tokens);
        match self {
            Self::Text(text) => vec![text.clone()],
            Self::Texts(texts) => texts.clone(),
            Self::Tokens(tokens) => vec![spell(tokens)],
            Self::TokenLists(lists) => lists.iter().map(spell).collect(),
        }
    }

    async fn tokens(self, served: &Arc<Served>, encoding: Encoding) -> Result<Vec<Vec<TokenId>>, ApiError> {
        match self {
            Self::Text(text) => generate::tokenize(served, vec![text], encoding).await,
            Self::Texts(texts) => generate::tokenize(served, texts, encoding).await,
            Self::Tokens(tokens) => Ok(vec![tokens]),
            Self::TokenLists(lists) => Ok(lists),
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
    echoed: Echo,
    offsets: Vec<TextOffset>,
    logprobs: bool,
}

impl TextShape {
    fn new(echoed: Echo, n_choices: u32, logprobs: bool) -> Self {
        Self { echoed, offsets: vec![TextOffset::default(); n_choices as usize], logprobs }
    }
}

impl Shape for TextShape {
    type Choice = TextChoice;

    const OBJECT: &'static str = "text_completion";

    fn opening(&mut self, index: u32) -> Option<TextChoice> {
        let text = self.echoed.of_choice(index)?.clone();
        Some(TextChoice { index, text, logprobs: None, finish_reason: None })
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
