//! An answer as items of the Responses API: whole, or as the events of a stream. Both are made of the same pieces in the same
//! order, and the last event carries the whole.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde_json::{Value, json};
use stoker_engine::PositionLogprobs;

use crate::http::{
    body::{Answer, End},
    choices::Fresh,
    error::ApiError,
    logprobs::{ChatLogprobs, Names},
    parts::{Part, Parts},
    responses::{
        aligned::Aligned,
        owner::Owner,
        request::message_of_answer,
        store::{Store, Stored},
    },
    usage::UsageBody,
};

/// Where a response is kept when it has ended.
pub(super) struct Keeping {
    pub(super) store: Arc<Mutex<Store>>,
    /// Who asked for it.
    pub(super) owner: Owner,
    /// The conversation before it.
    pub(super) messages: Vec<String>,
}

/// A response as it grows.
pub(super) struct Growing {
    pub(super) id: String,
    /// Everything of the response but its output, status and usage.
    pub(super) frame: Value,
    pub(super) parts: Parts,
    pub(super) items: Vec<Item>,
    pub(super) is_open: bool,
    /// Log-probabilities of tokens whose text has not come yet; they belong to what is said, not to thoughts and calls.
    pub(super) aligned: Aligned,
    /// Where it is kept, if it is to be.
    pub(super) keep: Option<Keeping>,
}

/// One item of the output.
pub(super) enum Item {
    Reasoning(String),
    Message { text: String, logprobs: Vec<Value> },
    Call { call_id: String, name: String, arguments: String },
}

impl Growing {
    /// Adds text with its log-probabilities, if they were asked for; tells what changed.
    pub(super) fn push(&mut self, text: String, logprobs: Vec<PositionLogprobs>, tell: &mut impl FnMut(Value)) {
        self.aligned.push(logprobs);
        let parts = self.parts.push(text);
        parts.into_iter().for_each(|part| self.add(part, tell));
    }

    /// Ends the output; what is said last may be cut off.
    pub(super) fn finish(&mut self, end: &End, tell: &mut impl FnMut(Value)) {
        let parts = self.parts.finish();
        parts.into_iter().for_each(|part| self.add(part, tell));
        self.close(status(end), tell);
    }

    fn add(&mut self, part: Part, tell: &mut impl FnMut(Value)) {
        match part {
            Part::Reasoning(more) => {
                if !matches!((self.items.last(), self.is_open), (Some(Item::Reasoning(_)), true)) {
                    self.open(Item::Reasoning(String::new()), tell);
                }
                self.aligned.take(&more);
                self.grow(&more, Vec::new(), tell);
            }
            Part::Text(more) => {
                if !matches!((self.items.last(), self.is_open), (Some(Item::Message { .. }), true)) {
                    self.open(Item::Message { text: String::new(), logprobs: Vec::new() }, tell);
                }
                let logprobs = wire_form(self.aligned.take(&more));
                self.grow(&more, logprobs, tell);
            }
            Part::Call { id, name } => self.open(Item::Call { call_id: id, name, arguments: String::new() }, tell),
            Part::Arguments(more) => self.grow(&more, Vec::new(), tell),
            Part::CallEnd => self.close("completed", tell),
        }
    }

    fn open(&mut self, item: Item, tell: &mut impl FnMut(Value)) {
        self.close("completed", tell);
        let index = self.items.len();
        tell(json!({"type": "response.output_item.added", "output_index": index,
                    "item": item.body(&self.item_id(index), "in_progress")}));
        if let Some(part) = item.part() {
            tell(json!({"type": "response.content_part.added", "item_id": self.item_id(index), "output_index": index,
                        "content_index": 0, "part": part}));
        }
        self.items.push(item);
        self.is_open = true;
    }

    fn grow(&mut self, more: &str, fresh: Vec<Value>, tell: &mut impl FnMut(Value)) {
        let Some(index) = self.items.len().checked_sub(1) else { return };
        let item_id = self.item_id(index);
        let item = &mut self.items[index];
        item.text_mut().push_str(more);
        let mut event = json!({"type": format!("response.{}.delta", item.event()), "item_id": item_id,
                               "output_index": index, "delta": more});
        if item.part().is_some() {
            event["content_index"] = 0.into();
        }
        if let Item::Message { logprobs, .. } = item {
            event["logprobs"] = json!(fresh);
            logprobs.extend(fresh);
        }
        tell(event);
    }

    fn close(&mut self, status: &str, tell: &mut impl FnMut(Value)) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let index = self.items.len() - 1;
        let (item_id, item) = (self.item_id(index), &self.items[index]);
        let mut done =
            json!({"type": format!("response.{}.done", item.event()), "item_id": item_id, "output_index": index});
        match item {
            Item::Reasoning(text) => done["text"] = text.as_str().into(),
            Item::Message { text, logprobs } => {
                done["text"] = text.as_str().into();
                done["logprobs"] = json!(logprobs);
            }
            Item::Call { name, arguments, .. } => {
                done["name"] = name.as_str().into();
                done["arguments"] = arguments.as_str().into();
            }
        }
        if let Some(part) = item.part() {
            done["content_index"] = 0.into();
            tell(done);
            tell(json!({"type": "response.content_part.done", "item_id": item_id, "output_index": index,
                        "content_index": 0, "part": part}));
        } else {
            tell(done);
        }
        tell(json!({"type": "response.output_item.done", "output_index": index, "item": item.body(&item_id, status)}));
    }

    fn item_id(&self, index: usize) -> String {
        format!("item_{}_{index}", self.id.trim_start_matches("resp_"))
    }

    /// The response before its end.
    pub(super) fn begun(&self) -> Value {
        let mut response = self.frame.clone();
        response["status"] = "in_progress".into();
        response["output"] = json!([]);
        response["usage"] = Value::Null;
        response
    }

    /// The response that came to nothing.
    pub(super) fn failed(&self, error: &ApiError) -> Value {
        let mut response = self.begun();
        response["status"] = "failed".into();
        response["error"] = json!({"code": error.code, "message": error.message});
        response
    }

    /// The response at its end, which is kept from now on if it is to be.
    pub(super) fn ended(&mut self, end: &End, usage: UsageBody) -> Value {
        let mut response = self.frame.clone();
        let status = status(end);
        response["status"] = status.into();
        match status {
            "completed" => response["completed_at"] = unix_seconds().into(),
            _ => response["incomplete_details"] = json!({"reason": "max_output_tokens"}),
        }
        let last = self.items.len().saturating_sub(1);
        let body = |(index, item): (usize, &Item)| {
            item.body(&self.item_id(index), if index == last { status } else { "completed" })
        };
        response["output"] = self.items.iter().enumerate().map(body).collect();
        response["usage"] = json!({
            "input_tokens": usage.prompt_tokens(), "input_tokens_details": {"cached_tokens": usage.cached_tokens()},
            "output_tokens": usage.completion_tokens(), "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens()},
            "total_tokens": usage.prompt_tokens() + usage.completion_tokens()});
        if let Some(Keeping { store, owner, mut messages }) = self.keep.take() {
            messages.push(self.message());
            let stored = Stored { owner, response: response.clone(), messages };
            store.lock().unwrap_or_else(PoisonError::into_inner).put(self.id.clone(), stored);
        }
        response
    }

    fn message(&self) -> String {
        let (mut thoughts, mut said, mut calls) = (None::<String>, None::<String>, Vec::new());
        for item in &self.items {
            match item {
                Item::Reasoning(text) => thoughts.get_or_insert_default().push_str(text),
                Item::Message { text, .. } => said.get_or_insert_default().push_str(text),
                Item::Call { call_id, name, arguments } => {
                    calls.push((call_id.clone(), name.clone(), arguments.clone()));
                }
            }
        }
        message_of_answer(thoughts, said.as_deref(), &calls)
    }
}

impl Item {
    fn body(&self, id: &str, status: &str) -> Value {
        match self {
            Self::Reasoning(_) => {
                json!({"type": "reasoning", "id": id, "status": status, "summary": [], "content": self.contents()})
            }
            Self::Message { .. } => {
                json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": self.contents()})
            }
            Self::Call { call_id, name, arguments } => {
                json!({"type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": arguments,
                       "status": status})
            }
        }
    }

    /// An item that has begun has no part yet.
    fn contents(&self) -> Vec<Value> {
        self.part().filter(|part| part["text"] != "").into_iter().collect()
    }

    fn part(&self) -> Option<Value> {
        match self {
            Self::Reasoning(text) => Some(json!({"type": "reasoning_text", "text": text})),
            Self::Message { text, logprobs } => {
                Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}))
            }
            Self::Call { .. } => None,
        }
    }

    /// The middle of its events' names.
    fn event(&self) -> &'static str {
        match self {
            Self::Reasoning(_) => "reasoning_text",
            Self::Message { .. } => "output_text",
            Self::Call { .. } => "function_call_arguments",
        }
    }

    fn text_mut(&mut self) -> &mut String {
        match self {
            Self::Reasoning(text) | Self::Message { text, .. } => text,
            Self::Call { arguments, .. } => arguments,
        }
    }
}

fn status(end: &End) -> &'static str {
    if end.reason == "length" { "incomplete" } else { "completed" }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs())
}

/// As chat has them.
fn wire_form(positions: Vec<PositionLogprobs>) -> Vec<Value> {
    ChatLogprobs::new(positions, Names::Text).into_content()
}

/// Writes the events of a stream, numbered.
pub(super) struct Events {
    growing: Growing,
    number: u64,
    end: Option<End>,
}

impl Events {
    pub(super) fn new(growing: Growing) -> Self {
        Self { growing, number: 0, end: None }
    }

    fn frames(&mut self, events: Vec<Value>) -> Bytes {
        let mut frames = String::new();
        for mut event in events {
            event["sequence_number"] = self.number.into();
            self.number += 1;
            frames.push_str(&format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default()));
        }
        frames.into()
    }

    /// Behind the last event Open Responses has a word that OpenAI's clients know from chat.
    fn last_frames(&mut self, event: Value) -> Bytes {
        let event = self.frames(vec![event]);
        [&event[..], b"data: [DONE]\n\n"].concat().into()
    }
}

impl Answer for Events {
    fn opening(&mut self, _: u32) -> Bytes {
        let response = self.growing.begun();
        let events = ["response.created", "response.in_progress"];
        self.frames(events.map(|name| json!({"type": name, "response": response})).into())
    }

    fn delta(&mut self, _: u32, fresh: Fresh) -> Bytes {
        let mut events = Vec::new();
        self.growing.push(fresh.text, fresh.logprobs, &mut |event| events.push(event));
        self.frames(events)
    }

    fn finish(&mut self, _: u32, end: End) -> Bytes {
        let mut events = Vec::new();
        self.growing.finish(&end, &mut |event| events.push(event));
        self.end = Some(end);
        self.frames(events)
    }

    fn closing(&mut self, usage: UsageBody) -> Bytes {
        let end = self.end.take().expect("the only choice has ended");
        let response = self.growing.ended(&end, usage);
        self.last_frames(json!({"type": format!("response.{}", status(&end)), "response": response}))
    }

    fn failure(&mut self, error: &ApiError) -> Bytes {
        let response = self.growing.failed(error);
        self.last_frames(json!({"type": "response.failed", "response": response}))
    }
}
