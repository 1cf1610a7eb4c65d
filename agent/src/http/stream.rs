//! Server-sent events of one streamed answer: which frames follow each other, as OpenAI's clients expect them.
//!
//! The order: an opening chunk per choice, then deltas of all choices as they come, a finish chunk per choice, the usage
//! chunk if asked for, `[DONE]`. After a failure: one error frame and `[DONE]`. `Frames` is pure; the wire form of a
//! chunk is its `Shape`'s. The HTTP body that pulls events and pushes frames is `body.rs`.

use bytes::Bytes;
use serde::Serialize;
use stoker_engine::{FinishReason, PositionLogprobs};

use crate::http::{
    body::{Answer, End},
    error::ApiError,
    usage::UsageBody,
};

/// The end of every stream.
const DONE: &str = "data: [DONE]\n\n";
/// A comment: keeps proxies from closing a stream that waits for its first token.
pub(crate) const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// What differs between the streams of chat and text completions.
pub(crate) trait Shape {
    /// Body of one chunk's `choices[]` entry.
    type Choice: Serialize;

    /// Value of `object`.
    const OBJECT: &'static str;

    /// The entry that opens a choice, if this shape has one.
    fn opening(&mut self, index: u32) -> Option<Self::Choice>;

    /// New text of a choice, and what it became.
    fn delta(&mut self, index: u32, text: String, logprobs: Vec<PositionLogprobs>) -> Vec<Self::Choice>;

    /// The end of a choice: what was held back, then the reason.
    fn finish(&mut self, index: u32, reason: &'static str) -> Vec<Self::Choice>;
}

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub(crate) struct AnswerHead {
    /// Id of the answer.
    pub(crate) id: String,
    /// Unix time of the request in seconds.
    pub(crate) created: u64,
    /// Name of the model, as the client knows it.
    pub(crate) model: String,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// OpenAI sends `null` in every chunk but the last when usage was asked for, and no field at all otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
}

/// Encodes one streamed answer.
#[derive(Debug)]
pub(crate) struct Frames<S> {
    head: AnswerHead,
    shape: S,
    include_usage: bool,
}

impl<S: Shape> Frames<S> {
    /// An encoder; `include_usage` adds the usage chunk.
    pub(crate) fn new(head: AnswerHead, shape: S, include_usage: bool) -> Self {
        Self { head, shape, include_usage }
    }

    /// One frame an entry: clients expect at most one choice in a chunk.
    fn frames(&self, choices: Vec<S::Choice>) -> Bytes {
        choices.into_iter().map(|choice| self.frame(&[choice], None)).collect::<String>().into()
    }

    fn frame(&self, choices: &[S::Choice], usage: Option<UsageBody>) -> String {
        let AnswerHead { id, created, model } = &self.head;
        let usage = self.include_usage.then_some(usage);
        let chunk = Chunk { id, object: S::OBJECT, created: *created, model, choices, usage };
        data_frame(&chunk)
    }
}

impl<S: Shape> Answer for Frames<S> {
    fn opening(&mut self, n_choices: u32) -> Bytes {
        let choices = (0..n_choices).filter_map(|index| self.shape.opening(index)).collect();
        self.frames(choices)
    }

    fn delta(&mut self, index: u32, text: String, logprobs: Vec<PositionLogprobs>) -> Bytes {
        if text.is_empty() && logprobs.is_empty() {
            return Bytes::new();
        }
        let choices = self.shape.delta(index, text, logprobs);
        self.frames(choices)
    }

    fn finish(&mut self, index: u32, end: End) -> Bytes {
        let choices = self.shape.finish(index, end.reason);
        self.frames(choices)
    }

    fn closing(&mut self, usage: UsageBody) -> Bytes {
        let mut frames = if self.include_usage { self.frame(&[], Some(usage)) } else { String::new() };
        frames.push_str(DONE);
        frames.into()
    }

    fn failure(&mut self, error: &ApiError) -> Bytes {
        failure(error)
    }
}

/// The frames of a failure after the stream began.
fn failure(error: &ApiError) -> Bytes {
    let mut frames = data_frame(&error.body());
    frames.push_str(DONE);
    frames.into()
}

/// The wire name of a reason that ends a choice well, or the error it is.
pub(crate) fn finish_name(reason: &FinishReason) -> Result<&'static str, ApiError> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Abort => Err(ApiError::engine_failed("it was aborted")),
        FinishReason::Error(reason) => Err(ApiError::engine_failed(reason)),
    }
}

fn data_frame(body: &impl Serialize) -> String {
    let json = serde_json::to_string(body).expect("wire types have string keys and finite numbers");
    format!("data: {json}\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Plain;

    impl Shape for Plain {
        type Choice = String;

        const OBJECT: &'static str = "plain";

        fn opening(&mut self, index: u32) -> Option<String> {
            Some(format!("open {index}"))
        }

        fn delta(&mut self, index: u32, text: String, _: Vec<PositionLogprobs>) -> Vec<String> {
            vec![format!("{index} {text}")]
        }

        fn finish(&mut self, index: u32, reason: &'static str) -> Vec<String> {
            vec![format!("{index} {reason}")]
        }
    }

    fn frames(include_usage: bool) -> Frames<Plain> {
        Frames::new(AnswerHead { id: "a".into(), created: 7, model: "m".into() }, Plain, include_usage)
    }

    fn stop() -> End {
        End { reason: "stop", stop: None }
    }

    fn text(frames: Bytes) -> String {
        String::from_utf8(frames.to_vec()).unwrap()
    }

    const HEAD: &str = r#"data: {"id":"a","object":"plain","created":7,"model":"m","choices":"#;

    #[test]
    fn every_choice_is_opened_and_ended_by_its_own_chunk() {
        let mut frames = frames(false);
        assert_eq!(text(frames.opening(2)), format!("{HEAD}[\"open 0\"]}}\n\n{HEAD}[\"open 1\"]}}\n\n"));
        assert_eq!(text(frames.delta(1, "x".into(), vec![])), format!("{HEAD}[\"1 x\"]}}\n\n"));
        assert_eq!(text(frames.finish(1, stop())), format!("{HEAD}[\"1 stop\"]}}\n\n"));
        assert_eq!(text(frames.closing(stoker_engine::Usage::default().into())), DONE);
    }

    #[test]
    fn undecided_text_makes_no_chunk() {
        assert!(frames(false).delta(0, String::new(), vec![]).is_empty());
    }

    #[test]
    fn usage_is_null_until_the_last_chunk_and_absent_when_not_asked_for() {
        let mut frames = frames(true);
        assert!(text(frames.finish(0, stop())).ends_with(",\"usage\":null}\n\n"));
        let closing = text(frames.closing(stoker_engine::Usage::default().into()));
        assert!(closing.starts_with(&format!("{HEAD}[],\"usage\":{{\"prompt_tokens\":0")), "{closing}");
        assert!(closing.ends_with(DONE));
    }

    #[test]
    fn a_failure_is_one_error_frame_then_done() {
        let error = finish_name(&FinishReason::Error("out of luck".into())).unwrap_err();
        let frames = text(failure(&error));
        assert!(frames.starts_with("data: {\"error\":{\"message\":") && frames.contains("out of luck"), "{frames}");
        assert!(frames.ends_with(DONE));
    }
}
