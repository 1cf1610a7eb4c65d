//! Server-sent events of one streamed answer: which frames follow each other, as OpenAI's clients expect them.
//!
//! The order: an opening chunk per choice, then deltas of all choices as they come, a finish chunk per choice, the usage
//! chunk if asked for, `[DONE]`. After a failure: one error frame and `[DONE]`. `Frames` is pure; the wire form of a
//! chunk is its `Shape`'s. The HTTP body that pulls events and pushes frames is `body.rs`.

use bytes::Bytes;
use serde::Serialize;
use stoker_engine::{FinishReason, TokenId};

use crate::http::{
    body::{Answer, End},
    choices::Fresh,
    error::ApiError,
    params::UsageIn,
    usage::{AnswerMetrics, UsageBody},
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
    fn delta(&mut self, index: u32, fresh: Fresh) -> Vec<Self::Choice>;

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
    /// Tokens of the prompt, where they are part of the whole answer and not of its choices.
    pub(crate) prompt_token_ids: Option<Vec<TokenId>>,
    /// How long it took is said beside the counts.
    pub(crate) tells_times: bool,
}

#[derive(Serialize)]
struct Chunk<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<TokenId>>,
    /// OpenAI sends `null` in every chunk but the last when usage was asked for, and no field at all otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<AnswerMetrics>,
}

/// Encodes one streamed answer.
#[derive(Debug)]
pub(crate) struct Frames<S> {
    head: AnswerHead,
    shape: S,
    usage: UsageIn,
    /// The counts now.
    so_far: UsageBody,
    /// Texts are not all: tokens without text are chunks too.
    tells_tokens: bool,
    n_choices: usize,
}

impl<S: Shape> Frames<S> {
    /// An encoder. Before any token, the counts are `at_first`.
    pub(crate) fn new(head: AnswerHead, shape: S, usage: UsageIn, at_first: UsageBody) -> Self {
        Self { head, shape, usage, so_far: at_first, tells_tokens: false, n_choices: 0 }
    }

    /// One that also tells of tokens without text.
    pub(crate) fn telling_tokens(self, tells_tokens: bool) -> Self {
        Self { tells_tokens, ..self }
    }

    /// One frame an entry: clients expect at most one choice in a chunk.
    fn frames(&mut self, choices: Vec<S::Choice>) -> Bytes {
        let usage = self.usage.every.then_some(self.so_far);
        choices.into_iter().map(|choice| self.frame(&[choice], usage)).collect::<String>().into()
    }

    /// The prompt's tokens are in the first one only.
    fn frame(&mut self, choices: &[S::Choice], usage: Option<UsageBody>) -> String {
        // Only counts at the end have times.
        let metrics = usage.filter(|_| self.head.tells_times).and_then(|usage| usage.metrics(self.n_choices));
        let AnswerHead { id, created, model, prompt_token_ids, .. } = &mut self.head;
        let prompt_token_ids = prompt_token_ids.take();
        let usage = self.usage.any().then_some(usage);
        let chunk =
            Chunk { id, object: S::OBJECT, created: *created, model, choices, prompt_token_ids, usage, metrics };
        data_frame(&chunk)
    }
}

impl<S: Shape> Answer for Frames<S> {
    fn opening(&mut self, n_choices: u32) -> Bytes {
        self.n_choices = n_choices as usize;
        let choices = (0..n_choices).filter_map(|index| self.shape.opening(index)).collect();
        self.frames(choices)
    }

    fn counted(&mut self, so_far: UsageBody) {
        self.so_far = so_far;
    }

    fn delta(&mut self, index: u32, fresh: Fresh) -> Bytes {
        if fresh.text.is_empty() && fresh.logprobs.is_empty() && !self.tells_tokens {
            return Bytes::new();
        }
        let choices = self.shape.delta(index, fresh);
        self.frames(choices)
    }

    fn finish(&mut self, index: u32, end: End) -> Bytes {
        let choices = self.shape.finish(index, end.reason);
        self.frames(choices)
    }

    fn closing(&mut self, usage: UsageBody) -> Bytes {
        let mut frames = if self.usage.last { self.frame(&[], Some(usage)) } else { String::new() };
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

/// The wire name of a reason that ends a choice well, or the reason why it failed.
pub(crate) fn finish_name(reason: FinishReason) -> Result<&'static str, FinishReason> {
    match reason {
        FinishReason::Stop => Ok("stop"),
        FinishReason::Length => Ok("length"),
        FinishReason::Abort | FinishReason::Expired | FinishReason::Unfollowed(_) | FinishReason::Error(_) => {
            Err(reason)
        }
    }
}

/// Whether a choice ended without an answer, before anybody asked for its end.
pub(crate) fn has_failed(reason: &FinishReason) -> bool {
    matches!(reason, FinishReason::Expired | FinishReason::Unfollowed(_) | FinishReason::Error(_))
}

/// What is known of a choice whose engine says nothing any more.
pub(crate) fn stopped() -> FinishReason {
    FinishReason::Error("it stopped".to_owned())
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

        fn delta(&mut self, index: u32, fresh: Fresh) -> Vec<String> {
            vec![format!("{index} {}", fresh.text)]
        }

        fn finish(&mut self, index: u32, reason: &'static str) -> Vec<String> {
            vec![format!("{index} {reason}")]
        }
    }

    fn frames(usage: UsageIn) -> Frames<Plain> {
        let head =
            AnswerHead { id: "a".into(), created: 7, model: "m".into(), prompt_token_ids: None, tells_times: false };
        Frames::new(head, Plain, usage, stoker_engine::Usage::default().into())
    }

    fn fresh(text: &str) -> Fresh {
        Fresh { text: text.into(), ..Fresh::default() }
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
        let mut frames = frames(UsageIn::default());
        assert_eq!(text(frames.opening(2)), format!("{HEAD}[\"open 0\"]}}\n\n{HEAD}[\"open 1\"]}}\n\n"));
        assert_eq!(text(frames.delta(1, fresh("x"))), format!("{HEAD}[\"1 x\"]}}\n\n"));
        assert_eq!(text(frames.finish(1, stop())), format!("{HEAD}[\"1 stop\"]}}\n\n"));
        assert_eq!(text(frames.closing(stoker_engine::Usage::default().into())), DONE);
    }

    #[test]
    fn undecided_text_makes_no_chunk() {
        assert!(frames(UsageIn::default()).delta(0, fresh("")).is_empty());
        assert!(
            !frames(UsageIn::default()).telling_tokens(true).delta(0, fresh("")).is_empty(),
            "unless its tokens are told"
        );
    }

    #[test]
    fn usage_is_null_until_the_last_chunk_and_absent_when_not_asked_for() {
        let mut frames = frames(UsageIn { every: false, last: true });
        assert!(text(frames.finish(0, stop())).ends_with(",\"usage\":null}\n\n"));
        let closing = text(frames.closing(stoker_engine::Usage::default().into()));
        assert!(closing.starts_with(&format!("{HEAD}[],\"usage\":{{\"prompt_tokens\":0")), "{closing}");
        assert!(closing.ends_with(DONE));
    }

    #[test]
    fn who_wants_counts_all_along_finds_them_in_every_chunk() {
        let mut frames = frames(UsageIn { every: true, last: true });
        frames.counted(stoker_engine::Usage { prompt_tokens: 3, completion_tokens: 1, cached_tokens: 0 }.into());
        assert!(text(frames.delta(0, fresh("x"))).contains(r#""usage":{"prompt_tokens":3,"completion_tokens":1,"#));
        assert!(text(frames.finish(0, stop())).contains(r#""usage":{"prompt_tokens":3"#));
    }

    #[test]
    fn the_prompts_tokens_are_in_the_first_chunk_only() {
        let mut frames = frames(UsageIn::default());
        frames.head.prompt_token_ids = Some(vec![5, 6]);
        assert!(text(frames.opening(1)).contains(r#""prompt_token_ids":[5,6]"#));
        assert!(!text(frames.delta(0, fresh("x"))).contains("prompt_token_ids"));
    }

    #[test]
    fn a_failure_is_one_error_frame_then_done() {
        let frames = text(failure(&ApiError::engine_failed("out of luck")));
        assert!(frames.starts_with("data: {\"error\":{\"message\":") && frames.contains("out of luck"), "{frames}");
        assert!(frames.ends_with(DONE));
    }
}
