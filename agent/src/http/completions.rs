//! `POST /v1/completions`: its fields, and the wire forms of its answers. Generates nothing itself.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use serde::Serialize;
use stoker_engine::{TokenId, TokenLogprob};

use crate::{
    admit::MaxTokens,
    answer::AnswerGrammar,
    http::{
        body::streamed,
        choices::{Completion, Fresh},
        error::ApiError,
        extract::Admitted,
        fields::Fields,
        generate::{self, Encoding, TokenizedRequest},
        logprobs::{Names, PromptLogprobs, TextLogprobs, TextOffset, prompt_logprobs},
        params::{Delivery, Generation, MAX_TOP_LOGPROBS, TokensShown, only},
        stream::{AnswerHead, Frames, Shape},
        structure,
        usage::{AnswerMetrics, UsageBody, UsageSum},
        whole::{Writing, whole},
        wire_prompt::WirePrompt,
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
    let mut generation = Generation::take(&mut fields, &generate::defaults(&replica, &served, &open.passage))?;
    generation.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
    let logprobs = fields.number("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    refuse_unsupported(&mut fields, generation.n)?;
    let echo = echo(&mut fields, logprobs, &mut generation)?;
    let structure = structure::take(&mut fields)?;
    let specials = fields.take("add_special_tokens")?.unwrap_or(true).into();
    let encoding = Encoding::new(specials, generation.truncate);
    let prompt = WirePrompt::take(&mut fields, "prompt", &served, encoding).await?;
    fields.finish()?;

    generate::admit_prompts(&replica, prompt.len(), &generation)?;
    if let Some(part) = structure {
        generation.sampling.constraint = Some(structure::compile(&replica, &served, AnswerGrammar::of(part)).await?);
    }
    generate::filter(&served, &mut generation)?;
    let echoed = echo.then(|| prompt.texts(&served));
    let prompts = prompt.tokens(&served, encoding).await?;
    let mut request = TokenizedRequest { prompts, generation, logprobs };
    let choices = generate::start(&replica, &served, &mut request, open).map_err(|error| of_echo(echo, error))?;
    let TokenizedRequest { prompts, generation, .. } = request;
    let head = generate::answer_head(&replica, "cmpl", &generation, choices.drawn());
    let usage = UsageSum::new(generation.n, prompts.iter().map(|prompt| prompt.len() as u32).sum());
    let form = TextForm {
        n: generation.n,
        echoed: echoed.unwrap_or_default(),
        logprobs: logprobs.map(|_| generation.token_names()),
        prompt_logprobs: generation.prompt_logprobs.is_some(),
        shown: generation.shown,
        prompts,
    };
    match generation.delivery {
        Delivery::Stream { usage: chunks } => {
            let shape = TextShape::new(form, choices.n_choices());
            let frames = Frames::new(head, shape, chunks, usage.so_far()).telling_tokens(generation.shown.with_ids);
            streamed(choices, frames, usage).await
        }
        Delivery::Whole => {
            let first_tokens = form.first_tokens(&served);
            let answer = move |completions, usage| TextCompletion::new(head, &form, &first_tokens, completions, usage);
            whole(choices, usage, Writing::of_openai(answer)).await
        }
    }
}

fn refuse_unsupported(fields: &mut Fields, n: u32) -> Result<(), ApiError> {
    only(fields, "suffix", &String::new(), "text is only continued at its end")?;
    only(fields, "best_of", &n, "every completion is returned")
}

/// Whether the prompt is part of the answer. Its log-probabilities then are, if those of the answer are.
fn echo(fields: &mut Fields, logprobs: Option<u8>, generation: &mut Generation) -> Result<bool, ApiError> {
    let echo = fields.take("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        if generation.delivery != Delivery::Whole {
            let message = "`echo` with `logprobs` is not supported in a stream: remove one of the three";
            return Err(ApiError::unsupported("echo", message));
        }
        generation.prompt_logprobs = generation.prompt_logprobs.max(logprobs);
    }
    Ok(echo)
}

/// The prompt's log-probabilities were wanted for `echo`, the field that the client knows.
fn of_echo(echo: bool, error: ApiError) -> ApiError {
    if !echo || error.param.as_deref() != Some("prompt_logprobs") {
        return error;
    }
    let message = "`echo` with `logprobs` needs log-probabilities of the prompt, which the device that serves this model \
                   does not compute: remove one of them";
    ApiError::unsupported("echo", message)
}

/// What a request asked of the form of its answer.
struct TextForm {
    /// Texts of prompts that are part of it, or none at all.
    echoed: Vec<String>,
    /// Choices of each prompt.
    n: u32,
    /// Log-probabilities are part of it, with these names of tokens.
    logprobs: Option<Names>,
    /// Those of the prompts are.
    prompt_logprobs: bool,
    shown: TokensShown,
    prompts: Vec<Vec<TokenId>>,
}

impl TextForm {
    /// What stands before the text of a choice.
    fn echo_of(&self, index: u32) -> Option<&String> {
        self.echoed.get(self.prompt_idx(index))
    }

    fn prompt_idx(&self, index: u32) -> usize {
        (index / self.n) as usize
    }

    fn prompt_token_ids(&self, index: u32) -> Option<Vec<TokenId>> {
        self.shown.with_ids.then(|| self.prompts[self.prompt_idx(index)].clone())
    }

    /// Of each prompt, for the log-probabilities of echoed ones: nothing is known of it but its text.
    fn first_tokens(&self, served: &Served) -> Vec<TokenLogprob> {
        let tokenizer = served.engine.tokenizer();
        let spell = |prompt: &Vec<TokenId>| {
            let bytes = tokenizer.token_bytes(prompt[0]);
            TokenLogprob { token: prompt[0], text: String::from_utf8_lossy(&bytes).into_owned(), bytes, logprob: 0.0 }
        };
        self.prompts.iter().map(spell).collect()
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
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<AnswerMetrics>,
}

/// One entry of `choices` of a whole answer.
#[derive(Serialize)]
struct TextChoice {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    prompt_logprobs: Option<PromptLogprobs>,
    prompt_token_ids: Option<Vec<TokenId>>,
    token_ids: Option<Vec<TokenId>>,
}

impl TextCompletion {
    fn new(
        head: AnswerHead,
        form: &TextForm,
        first_tokens: &[TokenLogprob],
        completions: Vec<Completion>,
        usage: UsageBody,
    ) -> Self {
        let choice =
            |(completion, index)| TextChoice::new(form, &first_tokens[form.prompt_idx(index)], index, completion);
        let metrics = usage.metrics(completions.len()).filter(|_| head.tells_times);
        let choices = completions.into_iter().zip(0..).map(choice).collect();
        let AnswerHead { id, created, model, .. } = head;
        Self { id, object: "text_completion", created, model, choices, usage, metrics }
    }
}

impl TextChoice {
    fn new(form: &TextForm, first_token: &TokenLogprob, index: u32, completion: Completion) -> Self {
        let Completion { text, tokens, logprobs, prompt_logprobs: prompt, finish_reason, .. } = completion;
        let echo = form.echo_of(index);
        let prompt_logprobs = form.prompt_logprobs.then(|| prompt_logprobs(&prompt));
        let logprobs = form.logprobs.map(|names| match echo {
            Some(_) => TextLogprobs::behind_prompt(first_token.clone(), prompt, logprobs, names),
            None => TextLogprobs::new(logprobs, &mut TextOffset::default(), names),
        });
        Self {
            index,
            text: echo.cloned().unwrap_or_default() + &text,
            logprobs,
            finish_reason: Some(finish_reason),
            prompt_logprobs,
            prompt_token_ids: form.prompt_token_ids(index),
            token_ids: form.shown.with_ids.then_some(tokens),
        }
    }
}

/// One entry of a chunk's `choices`.
#[derive(Serialize)]
struct TextChunk {
    index: u32,
    text: String,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

/// Chunks of text completions. Each choice counts where its tokens lie in its text.
struct TextShape {
    form: TextForm,
    offsets: Vec<TextOffset>,
}

impl TextShape {
    fn new(form: TextForm, n_choices: u32) -> Self {
        Self { form, offsets: vec![TextOffset::default(); n_choices as usize] }
    }

    fn chunk(&self, index: u32, text: String, tokens: Vec<TokenId>) -> TextChunk {
        let token_ids = self.form.shown.with_ids.then_some(tokens);
        TextChunk { index, text, logprobs: None, finish_reason: None, prompt_token_ids: None, token_ids }
    }
}

impl Shape for TextShape {
    type Choice = TextChunk;

    const OBJECT: &'static str = "text_completion";

    fn opening(&mut self, index: u32) -> Option<TextChunk> {
        let echo = self.form.echo_of(index);
        if echo.is_none() && !self.form.shown.with_ids {
            return None;
        }
        let opening = self.chunk(index, echo.cloned().unwrap_or_default(), Vec::new());
        Some(TextChunk { prompt_token_ids: self.form.prompt_token_ids(index), ..opening })
    }

    fn delta(&mut self, index: u32, Fresh { text, tokens, logprobs }: Fresh) -> Vec<TextChunk> {
        let offset = &mut self.offsets[index as usize];
        let logprobs = self.form.logprobs.map(|names| TextLogprobs::new(logprobs, offset, names));
        vec![TextChunk { logprobs, ..self.chunk(index, text, tokens) }]
    }

    fn finish(&mut self, index: u32, reason: &'static str) -> Vec<TextChunk> {
        vec![TextChunk { finish_reason: Some(reason), ..self.chunk(index, String::new(), Vec::new()) }]
    }
}
