//! Wire forms of a chat answer, whole and in chunks. Both read the generated text through one `Reader`, so that a stream
//! adds up to the whole answer, tool calls included.

use serde::Serialize;
use stoker_engine::PositionLogprobs;

use crate::{
    http::{
        choices::Completion,
        logprobs::ChatLogprobs,
        stream::{AnswerHead, Shape},
        usage::UsageBody,
    },
    tool_calls::{Call, Piece, ToolCallParser},
};

/// What a request asked of the form of its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnswerForm {
    /// Log-probabilities are part of it.
    pub(crate) logprobs: bool,
    /// Tool calls are taken out of the text.
    pub(crate) tool_calls: bool,
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
    /// `null` in an answer that only calls tools.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

/// A tool call; in chunks it carries its index.
#[derive(Serialize)]
struct CallBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    id: String,
    r#type: &'static str,
    function: FunctionBody,
}

#[derive(Serialize)]
struct FunctionBody {
    name: String,
    arguments: String,
}

impl ChatCompletion {
    pub(crate) fn new(head: AnswerHead, form: AnswerForm, completions: Vec<Completion>, usage: UsageBody) -> Self {
        let choices = completions.into_iter().enumerate();
        let choices = choices.map(|(index, completion)| ChatChoice::new(&head, form, index, completion)).collect();
        let AnswerHead { id, created, model } = head;
        Self { id, object: "chat.completion", created, model, choices, usage }
    }
}

impl ChatChoice {
    fn new(head: &AnswerHead, form: AnswerForm, index: usize, completion: Completion) -> Self {
        let mut reader = Reader::new(form);
        let mut pieces = reader.push(completion.text);
        pieces.extend(reader.finish());
        Self {
            index,
            message: AssistantMessage::new(&format!("{}-{index}", head.id), pieces),
            logprobs: form.logprobs.then(|| ChatLogprobs::new(completion.logprobs)),
            finish_reason: reader.finish_reason(completion.finish_reason),
        }
    }
}

impl AssistantMessage {
    fn new(stem: &str, pieces: Vec<Piece>) -> Self {
        let (mut text, mut tool_calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Text(more) => text.push_str(&more),
                Piece::Call(call) => tool_calls.push(CallBody::new(stem, tool_calls.len() as u32, call)),
            }
        }
        let content = (tool_calls.is_empty() || !text.is_empty()).then_some(text);
        Self { role: "assistant", content, refusal: None, tool_calls }
    }
}

impl CallBody {
    /// The id is made of the answer's, the choice and the call's number: unique without randomness.
    fn new(stem: &str, number: u32, call: Call) -> Self {
        let Call { name, arguments } = call;
        let id = format!("call_{}-{number}", stem.trim_start_matches("chatcmpl-"));
        Self { index: None, id, r#type: "function", function: FunctionBody { name, arguments } }
    }
}

/// Reads one choice's text: pieces, and what its end is called.
#[derive(Clone)]
struct Reader {
    parser: Option<ToolCallParser>,
    n_calls: u32,
}

impl Reader {
    fn new(form: AnswerForm) -> Self {
        Self { parser: form.tool_calls.then(ToolCallParser::default), n_calls: 0 }
    }

    fn push(&mut self, text: String) -> Vec<Piece> {
        let pieces = match &mut self.parser {
            Some(parser) => parser.push(&text),
            None => vec![Piece::Text(text)],
        };
        self.counted(pieces)
    }

    fn finish(&mut self) -> Vec<Piece> {
        let pieces = self.parser.as_mut().map(ToolCallParser::finish).unwrap_or_default();
        self.counted(pieces)
    }

    fn counted(&mut self, pieces: Vec<Piece>) -> Vec<Piece> {
        self.n_calls += pieces.iter().filter(|piece| matches!(piece, Piece::Call(_))).count() as u32;
        pieces
    }

    fn finish_reason(&self, reason: &'static str) -> &'static str {
        if self.n_calls > 0 && reason == "stop" { "tool_calls" } else { reason }
    }
}

/// Chunks of one chat answer.
pub(crate) struct ChatShape {
    stem: String,
    form: AnswerForm,
    readers: Vec<Reader>,
}

/// One entry of a chunk's `choices`.
#[derive(Serialize)]
pub(crate) struct ChunkChoice {
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallBody>,
}

impl ChatShape {
    pub(crate) fn new(head: &AnswerHead, form: AnswerForm, n_choices: u32) -> Self {
        Self { stem: head.id.clone(), form, readers: vec![Reader::new(form); n_choices as usize] }
    }

    fn chunk(&self, index: u32, piece: Piece, number: &mut u32) -> ChunkChoice {
        let delta = match piece {
            Piece::Text(text) => Delta { content: Some(text), ..Delta::default() },
            Piece::Call(call) => {
                let body = CallBody::new(&format!("{}-{index}", self.stem), *number, call);
                let tool_calls = vec![CallBody { index: Some(*number), ..body }];
                *number += 1;
                Delta { tool_calls, ..Delta::default() }
            }
        };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    fn chunks(&self, index: u32, pieces: Vec<Piece>, mut number: u32) -> Vec<ChunkChoice> {
        pieces.into_iter().map(|piece| self.chunk(index, piece, &mut number)).collect()
    }
}

impl Shape for ChatShape {
    type Choice = ChunkChoice;

    const OBJECT: &'static str = "chat.completion.chunk";

    fn opening(&mut self, index: u32) -> Option<ChunkChoice> {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
        Some(ChunkChoice { index, delta, logprobs: None, finish_reason: None })
    }

    fn delta(&mut self, index: u32, text: String, logprobs: Vec<PositionLogprobs>) -> Vec<ChunkChoice> {
        let reader = &mut self.readers[index as usize];
        let number = reader.n_calls;
        let pieces = reader.push(text);
        let mut chunks = self.chunks(index, pieces, number);
        if self.form.logprobs {
            // Tokens whose text is held back still report theirs, in a chunk without text.
            if chunks.is_empty() {
                chunks = self.chunks(index, vec![Piece::Text(String::new())], number);
            }
            chunks[0].logprobs = Some(ChatLogprobs::new(logprobs));
        }
        chunks
    }

    fn finish(&mut self, index: u32, reason: &'static str) -> Vec<ChunkChoice> {
        let reader = &mut self.readers[index as usize];
        let number = reader.n_calls;
        let pieces = reader.finish();
        let finish_reason = Some(reader.finish_reason(reason));
        let mut chunks = self.chunks(index, pieces, number);
        chunks.push(ChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason });
        chunks
    }
}
