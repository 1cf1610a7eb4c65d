//! `POST /v1/chat/completions`: from fields to an answer. The prompt is `prompt`'s, the wire forms are `chat_answer`'s.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use stoker_engine::{TokenId, constraint::Constraint};

use crate::{
    answer::{CallFormat, CallsWanted, Formats, Part, Reading, ReasoningFormat, ThinkingBudget, answer_grammar},
    http::{
        body::streamed,
        chat_answer::{AnswerForm, ChatCompletion, ChatShape},
        choices::Choices,
        error::ApiError,
        extract::{Admitted, Arrival},
        fields::Fields,
        generate::{self, TokenizedRequest},
        neutral::take_neutral_of_chat,
        params::{self, Delivery, Generation, MAX_TOP_LOGPROBS},
        passage::Drawn,
        prompt::{Prompt, PromptTokens, of_messages},
        reasoning_tokens::ThoughtMarks,
        stream::{AnswerHead, Frames},
        structure,
        usage::UsageSum,
        whole::{Writing, whole},
    },
    replica::{Replica, Served},
};

/// A chat request that generates.
pub(crate) struct Begun {
    pub(crate) choices: Choices,
    pub(crate) head: AnswerHead,
    pub(crate) form: AnswerForm,
    pub(crate) generation: Generation,
    /// What it has used, nothing yet but the prompt.
    pub(crate) usage: UsageSum,
    /// Tokens of the prompt.
    pub(crate) prompt_tokens: u32,
}

/// Answers one chat completion.
pub(crate) async fn create(
    State(replica): State<Arc<Replica>>,
    Admitted { open, fields }: Admitted,
) -> Result<Response, ApiError> {
    let Begun { choices, head, form, generation, usage, .. } = begin(&replica, open, fields).await?;
    match generation.delivery {
        Delivery::Stream { usage: chunks } => {
            let shape = ChatShape::new(&head, &form, choices.n_choices());
            let frames = Frames::new(head, shape, chunks, usage.so_far()).telling_tokens(generation.shown.with_ids);
            streamed(choices, frames, usage).await
        }
        Delivery::Whole => {
            let answer = move |completions, usage| ChatCompletion::new(head, &form, completions, usage);
            whole(choices, usage, Writing::of_openai(answer)).await
        }
    }
}

/// Reads a chat request and hands it to the engine. Requests of other APIs are translated into this form.
pub(crate) async fn begin(replica: &Arc<Replica>, open: Arrival, mut fields: Fields) -> Result<Begun, ApiError> {
    let served = replica.served()?;
    generate::check_model(&mut fields, &replica.settings().served_names)?;
    let mut generation = Generation::take(&mut fields, &generate::defaults(replica, &served, &open.passage))?;
    let logprobs = logprobs_wanted(&mut fields)?;
    let structure = structure::take(&mut fields)?;
    let thinking_budget = params::thinking_budget(&mut fields)?;
    let echoes = fields.take("echo")?.unwrap_or(false);
    let shows_reasoning = fields.take("include_reasoning")?.unwrap_or(true);
    let mut prompt = Prompt::take(&mut fields, replica.settings(), &served, generation.truncate).await?;
    if let Some(now) = open.passage.drawn.as_ref().and_then(Drawn::when) {
        prompt.now = now;
    }
    take_neutral_of_chat(&mut fields)?;
    fields.finish()?;

    let wanted = prompt.tools.wanted.clone();
    let echo = prompt.words_of_assistant().filter(|_| echoes).map(str::to_owned);
    let (tokens, reading) = prompt_of(prompt, &served).await?;
    generation.stop.shown_specials = shown_specials(&served, &reading);
    generation.sampling.constraint =
        constraint(replica, &served, &reading, Asked { wanted: &wanted, structure }).await?;
    generate::filter(&served, &mut generation)?;
    if let Some(n_tokens) = thinking_budget {
        bound_thoughts(n_tokens, &served, &reading, &mut generation)?;
    }
    let thoughts = ThoughtMarks::new(&reading, served.engine.tokenizer());
    let form = AnswerForm {
        logprobs: logprobs.map(|_| generation.token_names()),
        shown: generation.shown,
        prompt_logprobs: generation.prompt_logprobs.is_some(),
        echo,
        reading: Arc::new(reading),
        shows_reasoning,
        are_parallel: wanted.are_parallel,
        meters: replica.metrics().answers(),
    };
    let mut request = TokenizedRequest { prompts: vec![tokens], generation, logprobs };
    let choices = generate::start(replica, &served, &mut request, open).map_err(of_messages)?;
    let TokenizedRequest { mut prompts, generation, .. } = request;
    let mut head = generate::answer_head(replica, "chatcmpl", &generation, choices.drawn());
    let prompt_tokens = prompts[0].len() as u32;
    head.prompt_token_ids = generation.shown.with_ids.then(|| prompts.remove(0));
    let usage = UsageSum::new(generation.n, prompt_tokens).with_thoughts(thoughts, generation.n);
    Ok(Begun { choices, head, form, generation, usage, prompt_tokens })
}

/// The prompt, and how what follows it is read.
async fn prompt_of(prompt: Prompt, served: &Arc<Served>) -> Result<(Vec<TokenId>, Reading), ApiError> {
    let Formats { calls, reasoning } = served.formats;
    let (calls, schemas) = (calls.filter(|_| prompt.has_tools()), Arc::clone(&prompt.tools.schemas));
    let PromptTokens { tokens, reasoning_is_open } = prompt.tokens(served).await.map_err(of_messages)?;
    Ok((tokens, Reading { calls, reasoning, reasoning_is_open, schemas }))
}

/// Marks that are special tokens to this model and must be seen where answers are read.
fn shown_specials(served: &Served, reading: &Reading) -> Arc<[TokenId]> {
    let calls = reading.calls.map_or(&[][..], CallFormat::marks);
    let reasoning = reading.reasoning.map_or(&[][..], ReasoningFormat::visible_marks);
    let tokenizer = served.engine.tokenizer();
    let ids = calls.iter().chain(reasoning).filter_map(|mark| tokenizer.token_id(mark));
    ids.filter(|id| tokenizer.is_special(*id)).collect()
}

/// The grammar of the answer, if the request asks for one, compiled.
async fn constraint(
    replica: &Replica,
    served: &Served,
    reading: &Reading,
    asked: Asked<'_>,
) -> Result<Option<Constraint>, ApiError> {
    let tokenizer = served.engine.tokenizer();
    let special = |mark: &str| tokenizer.token_id(mark).filter(|id| tokenizer.is_special(*id));
    match answer_grammar(reading, asked.wanted, asked.structure, &special) {
        Some(grammar) => Ok(Some(structure::compile(replica, served, grammar).await?)),
        None => Ok(None),
    }
}

/// Makes a bound on thoughts a part of the constraint.
fn bound_thoughts(
    n_tokens: u32,
    served: &Served,
    reading: &Reading,
    generation: &mut Generation,
) -> Result<(), ApiError> {
    let inner = generation.sampling.constraint.take();
    let budget = ThinkingBudget::new(n_tokens, reading, served.engine.tokenizer(), inner).ok_or_else(|| {
        let message = "`thinking_token_budget`: this model does not think: remove it";
        ApiError::unsupported("thinking_token_budget", message)
    })?;
    generation.sampling.constraint = Some(Constraint(Arc::new(budget)));
    Ok(())
}

/// What a request says about the form of its answer.
struct Asked<'a> {
    wanted: &'a CallsWanted,
    structure: Option<Part>,
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
