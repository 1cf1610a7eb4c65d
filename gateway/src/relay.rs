//! An answer on its way from a replica to its client: passed on as it comes, until it ends, the replica is lost or the client leaves.
//! A lost replica ends a stream with an error in its own form, and breaks off any other answer. Parses nothing.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::http::StatusCode;
use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use crate::{
    access::Access,
    error::{Dialect, GatewayError},
    events::Events,
    fleet::Flight,
};

/// A replica that streams says something at least every 15 s.
pub const SILENCE: Duration = Duration::from_secs(45);

/// See the module.
pub struct Relay {
    inner: Incoming,
    flight: Flight,
    access: Access,
    stream: Option<Stream>,
    stage: Stage,
}

/// Of an answer that is a stream of events.
struct Stream {
    events: Events,
    dialect: Dialect,
    silence: Pin<Box<Sleep>>,
}

#[derive(Clone, Copy, Eq, PartialEq)]
enum Stage {
    Passing,
    Ended,
}

/// Why an answer cannot go on; its connection is broken off.
#[derive(Debug, thiserror::Error)]
#[error("the replica was lost: {0}")]
pub struct ReplicaLost(String);

impl Relay {
    /// Passes an answer on; `events`: it is a stream, of this form.
    pub fn new(inner: Incoming, flight: Flight, access: Access, events: Option<Dialect>) -> Self {
        let stream =
            events.map(|dialect| Stream { events: Events::default(), dialect, silence: Box::pin(sleep(SILENCE)) });
        Self { inner, flight, access, stream, stage: Stage::Passing }
    }

    fn pass(&mut self, data: Bytes) -> Bytes {
        self.flight.prefilled();
        self.access.passed(data.len());
        match &mut self.stream {
            Some(stream) => {
                stream.silence.as_mut().reset(Instant::now() + SILENCE);
                stream.events.pass(data)
            }
            None => data,
        }
    }

    fn lost(&mut self, why: &str) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        self.stage = Stage::Ended;
        self.access.cut();
        let Some(stream) = &mut self.stream else { return Some(Err(ReplicaLost(why.to_owned()))) };
        let message = format!("the replica that wrote this answer was lost: {why}");
        let error = GatewayError::new(StatusCode::BAD_GATEWAY, "replica_lost", message);
        Some(Ok(Frame::data(error.events(stream.dialect))))
    }

    fn ended(&mut self) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        self.stage = Stage::Ended;
        self.access.whole();
        let rest = self.stream.as_mut().map(|stream| stream.events.rest()).filter(|rest| !rest.is_empty());
        rest.map(|rest| Ok(Frame::data(rest)))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = ReplicaLost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ReplicaLost>>> {
        let relay = &mut *self;
        while relay.stage == Stage::Passing {
            match Pin::new(&mut relay.inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => {
                        let data = relay.pass(data);
                        // Of an announced length: nobody asks again.
                        if relay.inner.is_end_stream() {
                            relay.access.whole();
                        }
                        if !data.is_empty() {
                            return Poll::Ready(Some(Ok(Frame::data(data))));
                        }
                    }
                    Err(_trailers) => {}
                },
                Poll::Ready(Some(Err(error))) => return Poll::Ready(relay.lost(&error.to_string())),
                Poll::Ready(None) => return Poll::Ready(relay.ended()),
                Poll::Pending => {
                    let silent = relay.stream.as_mut().map(|stream| stream.silence.as_mut().poll(context).is_ready());
                    if silent == Some(true) {
                        return Poll::Ready(relay.lost(&format!("it was silent for {} s", SILENCE.as_secs())));
                    }
                    return Poll::Pending;
                }
            }
        }
        Poll::Ready(None)
    }

    fn is_end_stream(&self) -> bool {
        self.stage == Stage::Ended
    }

    fn size_hint(&self) -> SizeHint {
        match self.stream {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}
