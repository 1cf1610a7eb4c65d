//! The body of a streamed answer: pulls events from `Choices`, pushes the frames that an `Answer` makes of them. Dropping it aborts the request.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, header},
    response::Response,
};
use bytes::Bytes;
use stoker_engine::{FinishReason, RequestEvent};

use crate::http::{
    choices::{Choices, Fresh},
    error::ApiError,
    stream::{KEEP_ALIVE, finish_name},
    usage::{UsageBody, UsageSum},
};

/// Silence after which a comment is sent. Common proxies close an idle connection after 60 s.
const KEEP_ALIVE_PERIOD: Duration = Duration::from_secs(15);

/// What writes the frames of one streamed answer.
pub(crate) trait Answer {
    /// The frames before any token.
    fn opening(&mut self, n_choices: u32) -> Bytes;

    /// The counts, told before each of the next two.
    fn counted(&mut self, _so_far: UsageBody) {}

    /// New text of one choice; nothing while no text is certain and nothing else is due.
    fn delta(&mut self, index: u32, fresh: Fresh) -> Bytes;

    /// The end of one choice.
    fn finish(&mut self, index: u32, end: End) -> Bytes;

    /// The end of the stream, after every choice has ended.
    fn closing(&mut self, usage: UsageBody) -> Bytes;

    /// The frames of a failure, which end the stream.
    fn failure(&mut self, error: &ApiError) -> Bytes;
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End {
    /// By OpenAI's name.
    pub(crate) reason: &'static str,
    /// The stop string that was found.
    pub(crate) stop: Option<String>,
}

struct Streaming<A> {
    choices: Choices,
    answer: A,
    usage: UsageSum,
    unfinished: u32,
    stage: Stage,
}

enum Stage {
    /// Nothing was written. What was waited for, if it came in time.
    Opening(Option<(u32, RequestEvent)>),
    Running(Option<(u32, RequestEvent)>),
    Ended,
}

/// The response that streams these choices. It begins with the first token, or when that does not come soon: what fails before
/// has an error's status, and whoever stands before this server can ask another one.
pub(crate) async fn streamed<A: Answer + Send + 'static>(
    mut choices: Choices,
    answer: A,
    usage: UsageSum,
) -> Result<Response, ApiError> {
    let first = match tokio::time::timeout(KEEP_ALIVE_PERIOD, choices.next()).await {
        Ok(Some((_, RequestEvent::Finished { reason: FinishReason::Error(reason), .. }))) => {
            return Err(ApiError::engine_failed(&reason));
        }
        Ok(Some(first)) => Some(first),
        Ok(None) => return Err(ApiError::engine_failed("it stopped")),
        Err(_) => None,
    };
    let unfinished = choices.n_choices();
    let streaming = Streaming { choices, answer, usage, unfinished, stage: Stage::Opening(first) };
    let frames = futures::stream::unfold(streaming, |mut streaming| async {
        let frame = streaming.next_frame().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(frame), streaming))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx collects an answer before it passes it on, unless it is told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}

impl<A: Answer> Streaming<A> {
    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            let frame = match std::mem::replace(&mut self.stage, Stage::Running(None)) {
                Stage::Opening(first) => {
                    self.stage = Stage::Running(first);
                    self.answer.opening(self.choices.n_choices())
                }
                Stage::Running(Some((index, event))) => self.encode(index, event),
                Stage::Running(None) => match tokio::time::timeout(KEEP_ALIVE_PERIOD, self.choices.next()).await {
                    Ok(Some((index, event))) => self.encode(index, event),
                    Ok(None) => self.fail(&ApiError::engine_failed("it stopped")),
                    Err(_) => Bytes::from_static(KEEP_ALIVE.as_bytes()),
                },
                Stage::Ended => {
                    self.stage = Stage::Ended;
                    return None;
                }
            };
            if !frame.is_empty() {
                return Some(frame);
            }
        }
    }

    fn encode(&mut self, index: u32, event: RequestEvent) -> Bytes {
        let (reason, stop, usage) = match event {
            // Not asked for of a stream.
            RequestEvent::Prompt(_) => return Bytes::new(),
            RequestEvent::Delta { text, tokens, logprobs } => {
                self.usage.note(index, &tokens);
                self.answer.counted(self.usage.so_far());
                return self.answer.delta(index, Fresh { text, tokens, logprobs });
            }
            RequestEvent::Finished { reason, stop_match, usage } => (reason, stop_match, usage),
        };
        let reason = match finish_name(&reason) {
            Ok(name) => name,
            Err(error) => return self.fail(&error),
        };
        self.usage.add(index, usage);
        self.unfinished -= 1;
        let finish = self.answer.finish(index, End { reason, stop });
        if self.unfinished > 0 {
            return finish;
        }
        self.stage = Stage::Ended;
        [finish, self.answer.closing(self.usage.body())].concat().into()
    }

    fn fail(&mut self, error: &ApiError) -> Bytes {
        self.stage = Stage::Ended;
        self.answer.failure(error)
    }
}
