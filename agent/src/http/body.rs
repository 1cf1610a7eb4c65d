//! The body of a streamed answer: pulls events from `Choices`, pushes the frames that an `Answer` makes of them. Dropping it aborts the request.

use std::{collections::BTreeMap, time::Duration};

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
    passage::{MODEL, Mark},
    stream::{KEEP_ALIVE, finish_name, has_failed, stopped},
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
    /// Frames of text without a token, which only the end of a choice brings: they go with it, under its mark.
    last_texts: BTreeMap<u32, Bytes>,
}

/// Frames, and what they are of the answer.
struct Piece {
    frames: Bytes,
    mark: Mark,
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
    if !choices.tells_device_time() {
        choices.put_on_account();
    }
    let unfinished = choices.n_choices();
    let mut streaming =
        Streaming { choices, answer, usage, unfinished, stage: Stage::Opening(None), last_texts: BTreeMap::new() };
    streaming.pass_over_told();
    streaming.wait().await?;
    let model = model_header(&streaming.choices);
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
    model.into_iter().for_each(|model| drop(headers.insert(MODEL, model)));
    Ok(response)
}

/// Whose tokens marks tell, where there are any.
pub(crate) fn model_header(choices: &Choices) -> Option<HeaderValue> {
    let identity = choices.identity().filter(|_| choices.is_marked())?;
    let bits = identity.bits.as_deref().unwrap_or_default();
    Some(HeaderValue::from_str(&format!("{}-{bits}", identity.vocabulary)).expect("both are hexadecimal"))
}

impl<A: Answer> Streaming<A> {
    /// Lets the answer take in what another replica told of it, and tells nothing of that again.
    fn pass_over_told(&mut self) {
        let Some(told) = self.choices.take_told() else { return };
        let _ = self.answer.opening(self.choices.n_choices());
        self.stage = Stage::Running(None);
        for (index, event) in told {
            let _ = self.encode(index, event);
        }
    }

    /// Waits for the first event, or until somebody must be told that there will be one.
    async fn wait(&mut self) -> Result<(), ApiError> {
        let first = match tokio::time::timeout(KEEP_ALIVE_PERIOD, self.choices.next()).await {
            Ok(Some((_, RequestEvent::Finished { reason, .. }))) if has_failed(&reason) => {
                return Err(self.choices.failed(&reason));
            }
            Ok(Some(first)) => Some(first),
            Ok(None) => return Err(self.choices.failed(&stopped())),
            Err(_) => None,
        };
        match &mut self.stage {
            Stage::Opening(next) | Stage::Running(next) => *next = first,
            Stage::Ended => {}
        }
        Ok(())
    }

    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            let Piece { frames, mark } = match std::mem::replace(&mut self.stage, Stage::Running(None)) {
                Stage::Opening(first) => {
                    self.stage = Stage::Running(first);
                    Piece { frames: self.answer.opening(self.choices.n_choices()), mark: Mark::Opened }
                }
                Stage::Running(Some((index, event))) => self.encode(index, event),
                Stage::Running(None) => match tokio::time::timeout(KEEP_ALIVE_PERIOD, self.choices.next()).await {
                    Ok(Some((index, event))) => self.encode(index, event),
                    Ok(None) => self.fail(&stopped()),
                    Err(_) => Piece { frames: Bytes::from_static(KEEP_ALIVE.as_bytes()), mark: Mark::Nothing },
                },
                Stage::Ended => {
                    self.stage = Stage::Ended;
                    return None;
                }
            };
            if self.choices.is_marked() && (mark != Mark::Nothing || !frames.is_empty()) {
                return Some(mark.behind(&frames));
            }
            if !frames.is_empty() {
                return Some(frames);
            }
        }
    }

    fn encode(&mut self, index: u32, event: RequestEvent) -> Piece {
        let (reason, stop, usage, timing) = match event {
            // Not asked for of a stream.
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {
                return Piece { frames: Bytes::new(), mark: Mark::Nothing };
            }
            RequestEvent::Delta { text, tokens, logprobs } => {
                return self.delta(index, Fresh { text, tokens, logprobs });
            }
            RequestEvent::Finished { reason, stop_match, usage, timing } => (reason, stop_match, usage, timing),
        };
        let reason = match finish_name(reason) {
            Ok(name) => name,
            Err(why) => return self.fail(&why),
        };
        self.usage.add(index, usage, timing);
        self.unfinished -= 1;
        let last_text = self.last_texts.remove(&index).unwrap_or_default();
        let finish = self.answer.finish(index, End { reason, stop });
        if self.unfinished > 0 {
            return Piece { frames: [last_text, finish].concat().into(), mark: Mark::End { index } };
        }
        self.stage = Stage::Ended;
        let closing = self.answer.closing(self.usage.body());
        Piece { frames: [last_text, finish, closing].concat().into(), mark: Mark::Done }
    }

    fn delta(&mut self, index: u32, fresh: Fresh) -> Piece {
        self.usage.note(index, &fresh.tokens);
        self.answer.counted(self.usage.so_far());
        let tokens = if self.choices.is_marked() { fresh.tokens.clone() } else { Vec::new() };
        let is_last = fresh.tokens.is_empty();
        let frames = self.answer.delta(index, fresh);
        if is_last {
            self.last_texts.insert(index, frames);
            return Piece { frames: Bytes::new(), mark: Mark::Nothing };
        }
        Piece { frames, mark: self.choices.more(index, tokens) }
    }

    fn fail(&mut self, why: &FinishReason) -> Piece {
        self.stage = Stage::Ended;
        let mark = self.choices.replica_end().map_or(Mark::Done, Mark::of_end);
        // Whoever reads marks says itself what cannot go on, and gateways of before do not know this one.
        let is_told = mark != Mark::Broken || !self.choices.is_marked();
        let frames = if is_told { self.answer.failure(&self.choices.failed(why)) } else { Bytes::new() };
        Piece { frames, mark }
    }
}
