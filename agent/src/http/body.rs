//! The body of a streamed answer: pulls events from `Choices`, pushes frames of `stream`. Dropping it aborts the request.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderValue, header},
    response::Response,
};
use bytes::Bytes;
use stoker_engine::RequestEvent;

use crate::http::{
    choices::Choices,
    error::ApiError,
    stream::{Frames, KEEP_ALIVE, Shape, failure, finish_name},
    usage::UsageSum,
};

/// Silence after which a comment is sent. Common proxies close an idle connection after 60 s.
const KEEP_ALIVE_PERIOD: Duration = Duration::from_secs(15);

struct Streaming<S> {
    choices: Choices,
    frames: Frames<S>,
    usage: UsageSum,
    unfinished: u32,
    stage: Stage,
}

enum Stage {
    Opening,
    Running,
    Ended,
}

/// The response that streams these choices.
pub(crate) fn streamed<S: Shape + Send + 'static>(choices: Choices, frames: Frames<S>, usage: UsageSum) -> Response {
    let unfinished = choices.n_choices();
    let streaming = Streaming { choices, frames, usage, unfinished, stage: Stage::Opening };
    let frames = futures::stream::unfold(streaming, |mut streaming| async {
        let frame = streaming.next_frame().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(frame), streaming))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl<S: Shape> Streaming<S> {
    async fn next_frame(&mut self) -> Option<Bytes> {
        loop {
            let frame = match self.stage {
                Stage::Opening => {
                    self.stage = Stage::Running;
                    self.frames.opening(self.choices.n_choices())
                }
                Stage::Running => match tokio::time::timeout(KEEP_ALIVE_PERIOD, self.choices.next()).await {
                    Ok(Some((index, event))) => self.encode(index, event),
                    Ok(None) => self.fail(&ApiError::engine_failed("it stopped")),
                    Err(_) => Bytes::from_static(KEEP_ALIVE.as_bytes()),
                },
                Stage::Ended => return None,
            };
            if !frame.is_empty() {
                return Some(frame);
            }
        }
    }

    fn encode(&mut self, index: u32, event: RequestEvent) -> Bytes {
        let (reason, usage) = match event {
            RequestEvent::Delta { text, logprobs, .. } => return self.frames.delta(index, text, logprobs),
            RequestEvent::Finished { reason, usage, .. } => (reason, usage),
        };
        let name = match finish_name(&reason) {
            Ok(name) => name,
            Err(error) => return self.fail(&error),
        };
        self.usage.add(index, usage);
        self.unfinished -= 1;
        let finish = self.frames.finish(index, name);
        if self.unfinished > 0 {
            return finish;
        }
        self.stage = Stage::Ended;
        [finish, self.frames.closing(self.usage.body())].concat().into()
    }

    fn fail(&mut self, error: &ApiError) -> Bytes {
        self.stage = Stage::Ended;
        failure(error)
    }
}
