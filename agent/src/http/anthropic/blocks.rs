//! An answer as Anthropic's content blocks: whole, or as the events of a stream. Both are made of the same pieces in the same
//! order, so that a stream adds up to the whole answer.

use bytes::Bytes;
use serde_json::{Value, json};
use stoker_crds::contract::KV_BLOCK_TOKENS;

use crate::http::{
    anthropic::error_body,
    body::{Answer, End},
    choices::Fresh,
    error::ApiError,
    parts::{Part, Parts},
    stream::AnswerHead,
    usage::UsageBody,
};

/// What a stream begins with.
pub(super) struct MessageHead {
    pub(super) answer: AnswerHead,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: u32,
    /// Prompts are kept for requests that begin with the same.
    pub(super) keeps_prompts: bool,
}

/// The blocks of an answer, as they grow.
pub(super) struct Blocks {
    parts: Parts,
    /// Closed ones, and the one that pieces are added to.
    blocks: Vec<Block>,
    is_open: bool,
}

/// One block.
enum Block {
    /// Without a signature to check: what comes back in history is the client's word.
    Thinking(String),
    Text(String),
    ToolUse {
        id: String,
        name: String,
        input: String,
    },
}

/// A step of a block's growth.
enum Change<'a> {
    Start(usize, &'a Block),
    Delta(usize, &'static str, &'static str, String),
    Stop(usize),
}

impl Blocks {
    pub(super) fn new(parts: Parts) -> Self {
        Self { parts, blocks: Vec::new(), is_open: false }
    }

    /// Adds text; tells what changed.
    pub(super) fn push(&mut self, text: String, tell: &mut impl FnMut(Value)) {
        let parts = self.parts.push(text);
        parts.into_iter().for_each(|part| self.add(part, tell));
    }

    /// Ends the answer.
    pub(super) fn finish(&mut self, tell: &mut impl FnMut(Value)) {
        let parts = self.parts.finish();
        parts.into_iter().for_each(|part| self.add(part, tell));
        self.close(tell);
    }

    fn add(&mut self, part: Part, tell: &mut impl FnMut(Value)) {
        match part {
            Part::Reasoning(more) => {
                if !matches!((self.blocks.last(), self.is_open), (Some(Block::Thinking(_)), true)) {
                    self.open(Block::Thinking(String::new()), tell);
                }
                self.grow(more, tell);
            }
            Part::Text(more) => {
                if !matches!((self.blocks.last(), self.is_open), (Some(Block::Text(_)), true)) {
                    self.open(Block::Text(String::new()), tell);
                }
                self.grow(more, tell);
            }
            Part::Call { id, name } => self.open(Block::ToolUse { id, name, input: String::new() }, tell),
            Part::Arguments(more) => self.grow(more, tell),
            Part::CallEnd => self.close(tell),
        }
    }

    fn open(&mut self, block: Block, tell: &mut impl FnMut(Value)) {
        self.close(tell);
        tell(Change::Start(self.blocks.len(), &block).event());
        self.blocks.push(block);
        self.is_open = true;
    }

    fn grow(&mut self, more: String, tell: &mut impl FnMut(Value)) {
        let Some(index) = self.blocks.len().checked_sub(1) else { return };
        let (kind, name) = match &mut self.blocks[index] {
            Block::Thinking(text) => {
                text.push_str(&more);
                ("thinking_delta", "thinking")
            }
            Block::Text(text) => {
                text.push_str(&more);
                ("text_delta", "text")
            }
            Block::ToolUse { input, .. } => {
                input.push_str(&more);
                ("input_json_delta", "partial_json")
            }
        };
        tell(Change::Delta(index, kind, name, more).event());
    }

    fn close(&mut self, tell: &mut impl FnMut(Value)) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let index = self.blocks.len() - 1;
        if let Block::Thinking(_) = self.blocks[index] {
            tell(Change::Delta(index, "signature_delta", "signature", String::new()).event());
        }
        tell(Change::Stop(index).event());
    }

    /// The blocks of the whole answer.
    pub(super) fn content(&self) -> Vec<Value> {
        self.blocks.iter().map(Block::whole).collect()
    }

    /// Anthropic's name of the end.
    pub(super) fn stop_reason(&self, end: &End) -> &'static str {
        match (self.parts.finish_reason(end.reason), &end.stop) {
            ("tool_calls", _) => "tool_use",
            ("length", _) => "max_tokens",
            (_, Some(_)) => "stop_sequence",
            _ => "end_turn",
        }
    }
}

impl Block {
    fn whole(&self) -> Value {
        match self {
            Self::Thinking(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::ToolUse { id, name, input } => {
                // Arguments that were cut off are no object; the stop reason says that they were.
                let input = serde_json::from_str(input).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }

    /// As it begins.
    fn empty(&self) -> Value {
        match self {
            Self::Thinking(_) => Self::Thinking(String::new()).whole(),
            Self::Text(_) => Self::Text(String::new()).whole(),
            Self::ToolUse { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
        }
    }
}

impl Change<'_> {
    fn event(self) -> Value {
        match self {
            Self::Start(index, block) => {
                json!({"type": "content_block_start", "index": index, "content_block": block.empty()})
            }
            Self::Delta(index, kind, name, more) => {
                json!({"type": "content_block_delta", "index": index, "delta": {"type": kind, name: more}})
            }
            Self::Stop(index) => json!({"type": "content_block_stop", "index": index}),
        }
    }
}

/// Writes the events of a stream: `message_start`, `ping`, blocks, `message_delta`, `message_stop`.
pub(super) struct Events {
    head: MessageHead,
    blocks: Blocks,
    end: Option<End>,
}

impl Events {
    pub(super) fn new(head: MessageHead, blocks: Blocks) -> Self {
        Self { head, blocks, end: None }
    }
}

impl Answer for Events {
    fn opening(&mut self, _: u32) -> Bytes {
        let AnswerHead { id, model, .. } = &self.head.answer;
        let usage = json!({"input_tokens": self.head.prompt_tokens, "output_tokens": 0});
        let message = json!({"id": id, "type": "message", "role": "assistant", "model": model, "content": [],
                             "stop_reason": null, "stop_sequence": null, "usage": usage});
        let start = json!({"type": "message_start", "message": message});
        [frame(&start), frame(&json!({"type": "ping"}))].concat().into()
    }

    fn delta(&mut self, _: u32, fresh: Fresh) -> Bytes {
        let mut frames = String::new();
        self.blocks.push(fresh.text, &mut |event| frames.push_str(&frame(&event)));
        frames.into()
    }

    fn finish(&mut self, _: u32, end: End) -> Bytes {
        let mut frames = String::new();
        self.blocks.finish(&mut |event| frames.push_str(&frame(&event)));
        self.end = Some(end);
        frames.into()
    }

    fn closing(&mut self, usage: UsageBody) -> Bytes {
        let end = self.end.take().expect("the only choice has ended");
        let reason = self.blocks.stop_reason(&end);
        let delta = json!({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": end.stop},
                           "usage": usage_body(usage, self.head.keeps_prompts)});
        [frame(&delta), frame(&json!({"type": "message_stop"}))].concat().into()
    }

    fn failure(&mut self, error: &ApiError) -> Bytes {
        frame(&error_body(error)).into()
    }
}

/// Token counts by Anthropic's names, where tokens from the cache are not among the input tokens, nor are those that it got: whole blocks
/// of the prompt.
pub(super) fn usage_body(usage: UsageBody, keeps_prompts: bool) -> Value {
    let (prompt, read) = (usage.prompt_tokens(), usage.cached_tokens());
    let kept = if keeps_prompts { prompt / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS } else { 0 };
    let written = kept.saturating_sub(read);
    json!({"input_tokens": prompt - read - written, "cache_read_input_tokens": read, "cache_creation_input_tokens": written,
           "output_tokens": usage.completion_tokens()})
}

fn frame(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use stoker_engine::Usage;

    use super::*;

    #[test]
    fn a_prompt_is_read_from_the_cache_written_to_it_or_neither() {
        let parts = |prompt_tokens, cached_tokens, keeps_prompts| {
            let body = usage_body(Usage { prompt_tokens, completion_tokens: 3, cached_tokens }.into(), keeps_prompts);
            let of = |name: &str| body[name].as_u64().unwrap();
            assert_eq!(of("output_tokens"), 3);
            [of("input_tokens"), of("cache_read_input_tokens"), of("cache_creation_input_tokens")]
        };
        assert_eq!(parts(37, 0, true), [5, 0, 32]);
        assert_eq!(parts(37, 32, true), [5, 32, 0]);
        assert_eq!(parts(64, 48, true), [0, 48, 16]);
        assert_eq!(parts(15, 0, true), [15, 0, 0]);
        assert_eq!(parts(37, 0, false), [37, 0, 0], "nothing is kept");
    }
}
