//! The events of a watch on their way to the operator: left out, told twice, in another order, or ended.

use std::{collections::VecDeque, io, pin::Pin, sync::Arc};

use axum::{
    body::{Body, Bytes},
    response::Response,
};
use futures::{Stream, StreamExt, stream};
use http_body_util::BodyExt;
use kube::client::Body as KubeBody;

use super::{
    Shared,
    answers::{answer_of, expired},
    lock,
    script::EventVerdict,
};

impl Shared {
    /// The events of a watch, with what goes wrong with them.
    pub(super) fn watched(self: Arc<Self>, answer: axum::http::Response<KubeBody>) -> Response {
        let (head, body) = answer.into_parts();
        let chunks = body.into_data_stream().map(|chunk| chunk.map_err(io::Error::other));
        let mut ends = self.watches_end.subscribe();
        ends.mark_unchanged();
        let over = async move {
            // Nobody raises it any more: the watch goes on.
            if ends.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let events =
            Events { shared: self, chunks: Box::pin(chunks), rest: Vec::new(), ready: VecDeque::new(), later: None };
        let told = stream::unfold(events, |mut events| async { Some((events.next().await?, events)) });
        let begin_anew = stream::once(async { Ok(expired()) });
        answer_of(&head, Body::from_stream(told.take_until(over).chain(begin_anew)))
    }
}

/// A watch on its way.
struct Events {
    shared: Arc<Shared>,
    chunks: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>,
    /// The beginning of a line.
    rest: Vec<u8>,
    /// What is to be told.
    ready: VecDeque<Option<Bytes>>,
    /// Told behind the next one.
    later: Option<Bytes>,
}

impl Events {
    /// The next line; `None` when the watch ends.
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if let Some(line) = self.ready.pop_front() {
                return line.map(Ok);
            }
            match self.chunks.next().await? {
                Ok(chunk) => self.rest.extend_from_slice(&chunk),
                Err(error) => return Some(Err(error)),
            }
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line = Bytes::from(self.rest.drain(..=end).collect::<Vec<u8>>());
                self.take(line);
            }
        }
    }

    fn take(&mut self, line: Bytes) {
        let verdict = lock(&self.shared.script).judge_event();
        if verdict != EventVerdict::Pass {
            lock(&self.shared.seen).faults += 1;
        }
        match verdict {
            EventVerdict::Drop => {}
            EventVerdict::Later => {
                let before = self.later.replace(line);
                self.ready.extend(before.map(Some));
            }
            EventVerdict::Expire => self.ready.extend([Some(expired()), None]),
            EventVerdict::Pass | EventVerdict::Twice => {
                let times = if verdict == EventVerdict::Twice { 2 } else { 1 };
                self.ready.extend(std::iter::repeat_n(Some(line), times));
                self.ready.extend(self.later.take().map(Some));
            }
        }
    }
}
