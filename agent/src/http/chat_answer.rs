//! Wire forms of a chat answer, whole and in chunks. Both read the generated text through one `Reader`, so that a stream
//! adds up to the whole answer, tool calls included.

use std::sync::Arc;

use serde::{Serialize, de::IgnoredAny};
use stoker_engine::TokenId;

use crate::{
    answer::{AnswerParser, CallFormat, Piece, Reading},
    http::{
        choices::{Completion, Fresh},
        logprobs::{ChatLogprobs, Names, PromptLogprobs, prompt_logprobs},
        params::TokensShown,
        stream::{AnswerHead, Shape},
        usage::{AnswerMetrics, UsageBody},
    },
    metrics::AnswerMeters,
};

/// What a request asked of the form of its answer.
#[derive(Clone, Debug)]
pub(crate) struct AnswerForm {
    /// Log-probabilities are part of it, with these names of tokens.
    pub(crate) logprobs: Option<Names>,
    /// How its tokens are shown.
    pub(crate) shown: TokensShown,
    /// Those of the prompt are part of it.
    pub(crate) prompt_logprobs: bool,
    /// What stands before its text.
    pub(crate) echo: Option<String>,
    /// How its text is read.
    pub(crate) reading: Arc<Reading>,
    /// Reasoning is part of it.
    pub(crate) shows_reasoning: bool,
    /// More than one call may be part of it.
    pub(crate) are_parallel: bool,
    /// What is in it is counted here.
    pub(crate) meters: AnswerMeters,
}

/// A whole answer.
#[derive(Serialize)]
pub(crate) struct ChatCompletion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: UsageBody,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<AnswerMetrics>,
    prompt_logprobs: Option<PromptLogprobs>,
    prompt_token_ids: Option<Vec<TokenId>>,
}

#[derive(Serialize)]
struct ChatChoice {
    index: u32,
    message: AssistantMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
    token_ids: Option<Vec<TokenId>>,
}

#[derive(Serialize)]
struct AssistantMessage {
    role: &'static str,
    /// `null` in an answer that only calls tools or thinks.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(flatten)]
    reasoning: ReasoningBody,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

/// Reasoning, by both of the names that clients read.
#[derive(Default, Serialize)]
struct ReasoningBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
}

/// A tool call, or in chunks a part of one, which carries its index.
#[derive(Default, Serialize)]
struct CallBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionBody,
}

#[derive(Default, Serialize)]
struct FunctionBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ChatCompletion {
    pub(crate) fn new(head: AnswerHead, form: &AnswerForm, completions: Vec<Completion>, usage: UsageBody) -> Self {
        let prompt = completions.first().map(|completion| prompt_logprobs(&completion.prompt_logprobs));
        let completions_made = completions.len();
        let choices = completions.into_iter().zip(0..);
        let choices = choices.map(|(completion, index)| ChatChoice::new(&head, form, index, completion)).collect();
        let metrics = usage.metrics(completions_made).filter(|_| head.tells_times);
        let AnswerHead { id, created, model, prompt_token_ids, .. } = head;
        let prompt_logprobs = prompt.filter(|_| form.prompt_logprobs);
        Self {
            id,
            object: "chat.completion",
            created,
            model,
            choices,
            usage,
            metrics,
            prompt_logprobs,
            prompt_token_ids,
        }
    }
}

impl ChatChoice {
    fn new(head: &AnswerHead, form: &AnswerForm, index: u32, completion: Completion) -> Self {
        let mut reader = Reader::new(form);
        let mut pieces = reader.push(completion.text);
        pieces.extend(reader.finish());
        Self {
            index,
            message: AssistantMessage::new(&CallIds::new(head, form, index), form.echo.as_deref(), pieces),
            logprobs: form.logprobs.map(|names| ChatLogprobs::new(completion.logprobs, names)),
            finish_reason: reader.finish_reason(completion.finish_reason),
            token_ids: form.shown.with_ids.then_some(completion.tokens),
        }
    }
}

impl AssistantMessage {
    fn new(ids: &CallIds, echo: Option<&str>, pieces: Vec<Piece>) -> Self {
        let mut text = echo.unwrap_or_default().to_owned();
        let (mut thoughts, mut tool_calls) = (String::new(), Vec::<CallBody>::new());
        for piece in pieces {
            match piece {
                Piece::Text(more) => text.push_str(&more),
                Piece::Reasoning(more) => thoughts.push_str(&more),
                Piece::Call { name, id } => {
                    let id = ids.id(tool_calls.len() as u32, id);
                    tool_calls.push(CallBody::begun(id, name));
                }
                Piece::Arguments(json) => {
                    tool_calls.last_mut().expect("a call begins before its arguments").function.arguments += &json;
                }
                Piece::CallEnd => {}
            }
        }
        let says_else = !tool_calls.is_empty() || !thoughts.is_empty();
        let content = (!says_else || !text.is_empty()).then_some(text);
        let reasoning = if thoughts.is_empty() { ReasoningBody::default() } else { ReasoningBody::new(thoughts) };
        Self { role: "assistant", content, refusal: None, reasoning, tool_calls }
    }
}

impl ReasoningBody {
    fn new(text: String) -> Self {
        Self { reasoning: Some(text.clone()), reasoning_content: Some(text) }
    }
}

impl CallBody {
    fn begun(id: String, name: String) -> Self {
        let function = FunctionBody { name: Some(name), arguments: String::new() };
        Self { index: None, id: Some(id), r#type: Some("function"), function }
    }

    fn arguments(arguments: String) -> Self {
        Self { function: FunctionBody { name: None, arguments }, ..Self::default() }
    }
}

/// Ids of one choice's calls: made of the answer's id, the choice and the call's number, unique without randomness.
pub(crate) struct CallIds {
    answer: String,
    choice: u32,
    /// Mistral's templates take ids of nine letters and digits only.
    is_short: bool,
}

impl CallIds {
    pub(crate) fn new(head: &AnswerHead, form: &AnswerForm, choice: u32) -> Self {
        let answer = head.id.trim_start_matches("chatcmpl-").to_owned();
        Self { answer, choice, is_short: form.reading.calls == Some(CallFormat::Mistral) }
    }

    pub(crate) fn id(&self, number: u32, of_model: Option<String>) -> String {
        let Self { answer, choice, is_short } = self;
        match of_model {
            Some(id) => id,
            None if *is_short => format!("{answer:.5}{:04x}", (choice * 128 + number) % 0x1_0000),
            None => format!("call_{answer}-{choice}-{number}"),
        }
    }
}

/// Reads one choice's text: pieces, and what its end is called.
pub(crate) struct Reader {
    parser: Option<AnswerParser>,
    shows_reasoning: bool,
    are_parallel: bool,
    n_calls: u32,
    /// Of the call that is not complete yet.
    arguments: Option<String>,
    is_broken: bool,
    thinks: bool,
    meters: AnswerMeters,
}

impl Reader {
    pub(crate) fn new(form: &AnswerForm) -> Self {
        let reads = form.reading.calls.is_some() || form.reading.reasoning.is_some();
        Self {
            parser: reads.then(|| AnswerParser::new(&form.reading)),
            shows_reasoning: form.shows_reasoning,
            are_parallel: form.are_parallel,
            n_calls: 0,
            arguments: None,
            is_broken: false,
            thinks: false,
            meters: form.meters.clone(),
        }
    }

    pub(crate) fn push(&mut self, text: String) -> Vec<Piece> {
        let pieces = match &mut self.parser {
            Some(parser) => parser.push(&text),
            None => vec![Piece::Text(text)],
        };
        self.noted(pieces)
    }

    pub(crate) fn finish(&mut self) -> Vec<Piece> {
        let pieces = self.parser.as_mut().map(AnswerParser::finish).unwrap_or_default();
        let pieces = self.noted(pieces);
        let n_cut_off = u32::from(self.arguments.is_some());
        self.meters.complete_calls.inc_by(u64::from(self.n_calls - n_cut_off));
        self.meters.cut_off_calls.inc_by(u64::from(n_cut_off));
        self.meters.reasoning.inc_by(u64::from(self.thinks));
        pieces
    }

    fn noted(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        pieces.into_iter().filter(|piece| self.note(piece)).collect()
    }

    /// Whether a piece is part of the answer.
    fn note(&mut self, piece: &Piece) -> bool {
        // Who wants one call at most gets what the model said up to its end.
        if !self.are_parallel && self.n_calls > 0 && self.arguments.is_none() {
            return false;
        }
        match piece {
            Piece::Text(_) => {}
            Piece::Reasoning(_) => {
                self.thinks = true;
                return self.shows_reasoning;
            }
            Piece::Call { .. } => {
                self.n_calls += 1;
                self.arguments = Some(String::new());
            }
            Piece::Arguments(json) => {
                if let Some(arguments) = &mut self.arguments {
                    arguments.push_str(json);
                }
            }
            Piece::CallEnd => {
                let arguments = self.arguments.take().unwrap_or_default();
                self.is_broken |= serde_json::from_str::<IgnoredAny>(&arguments).is_err();
            }
        }
        true
    }

    /// An answer ends in calls only if all of them are complete and their arguments are JSON.
    pub(crate) fn finish_reason(&self, reason: &'static str) -> &'static str {
        let are_complete = self.n_calls > 0 && self.arguments.is_none() && !self.is_broken;
        if are_complete && reason == "stop" { "tool_calls" } else { reason }
    }
}

/// Chunks of one chat answer.
pub(crate) struct ChatShape {
    logprobs: Option<Names>,
    with_ids: bool,
    echo: Option<String>,
    choices: Vec<ChoiceInProgress>,
}

/// A choice that is being streamed.
struct ChoiceInProgress {
    index: u32,
    ids: CallIds,
    reader: Reader,
    n_begun: u32,
}

/// One entry of a chunk's `choices`.
#[derive(Serialize)]
pub(crate) struct ChunkChoice {
    index: u32,
    delta: Delta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
}

#[derive(Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(flatten)]
    reasoning: ReasoningBody,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

impl ChatShape {
    pub(crate) fn new(head: &AnswerHead, form: &AnswerForm, n_choices: u32) -> Self {
        let choice = |index| ChoiceInProgress {
            index,
            ids: CallIds::new(head, form, index),
            reader: Reader::new(form),
            n_begun: 0,
        };
        Self {
            logprobs: form.logprobs,
            with_ids: form.shown.with_ids,
            echo: form.echo.clone(),
            choices: (0..n_choices).map(choice).collect(),
        }
    }
}

impl ChoiceInProgress {
    fn chunks(&mut self, pieces: Vec<Piece>) -> Vec<ChunkChoice> {
        let chunk = |piece| {
            let delta = self.delta(piece)?;
            Some(self.chunk(delta))
        };
        pieces.into_iter().filter_map(chunk).collect()
    }

    fn chunk(&self, delta: Delta) -> ChunkChoice {
        ChunkChoice { index: self.index, delta, logprobs: None, finish_reason: None, token_ids: None }
    }

    /// Nothing for the end of a call: on the wire a call ends where the next one begins.
    fn delta(&mut self, piece: Piece) -> Option<Delta> {
        let call = match piece {
            Piece::Text(text) => return Some(Delta { content: Some(text), ..Delta::default() }),
            Piece::Reasoning(text) => {
                return Some(Delta { reasoning: ReasoningBody::new(text), ..Delta::default() });
            }
            Piece::Call { name, id } => {
                self.n_begun += 1;
                CallBody::begun(self.ids.id(self.n_begun - 1, id), name)
            }
            Piece::Arguments(json) => CallBody::arguments(json),
            Piece::CallEnd => return None,
        };
        let tool_calls = vec![CallBody { index: Some(self.n_begun - 1), ..call }];
        Some(Delta { tool_calls, ..Delta::default() })
    }
}

impl Shape for ChatShape {
    type Choice = ChunkChoice;

    const OBJECT: &'static str = "chat.completion.chunk";

    fn opening(&mut self, index: u32) -> Option<ChunkChoice> {
        let content = Some(self.echo.clone().unwrap_or_default());
        let delta = Delta { role: Some("assistant"), content, ..Delta::default() };
        Some(self.choices[index as usize].chunk(delta))
    }

    fn delta(&mut self, index: u32, Fresh { text, tokens, logprobs }: Fresh) -> Vec<ChunkChoice> {
        let choice = &mut self.choices[index as usize];
        let pieces = choice.reader.push(text);
        let mut chunks = choice.chunks(pieces);
        // Tokens whose text is held back still report what was asked of them, in a chunk without text.
        if chunks.is_empty() && (self.logprobs.is_some() || self.with_ids) {
            chunks = vec![choice.chunk(Delta { content: Some(String::new()), ..Delta::default() })];
        }
        if let Some(first) = chunks.first_mut() {
            first.logprobs = self.logprobs.map(|names| ChatLogprobs::new(logprobs, names));
            first.token_ids = self.with_ids.then_some(tokens);
        }
        chunks
    }

    fn finish(&mut self, index: u32, reason: &'static str) -> Vec<ChunkChoice> {
        let choice = &mut self.choices[index as usize];
        let pieces = choice.reader.finish();
        let mut chunks = choice.chunks(pieces);
        let finish_reason = Some(choice.reader.finish_reason(reason));
        chunks.push(ChunkChoice { finish_reason, ..choice.chunk(Delta::default()) });
        chunks
    }
}
