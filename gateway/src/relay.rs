//! An answer on its way from a replica to its client: passed on as it comes, until it ends, the replica is lost or the client leaves.
//! A stream whose replica is lost goes on with another one; if there is none, it ends with an error in its own form. Any other answer
//! breaks off. Looks at marks and at nothing else of what passes.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::http::StatusCode;
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, SizeHint};
use tokio::{
    sync::futures::OwnedNotified,
    time::{Instant, Sleep, sleep},
};

use crate::{
    access::Access,
    attempt::{ENDED_EARLIER, ENGINE_DIED},
    error::{Dialect, GatewayError},
    events::Events,
    journal::{Passed, Then},
    resume::{GoneOn, Resumable},
    search::Loss,
    upstream::ReplicaBody,
    vital::{DEAD, Flight, Life},
};

/// A replica that streams says something at least every 15 s.
pub const SILENCE: Duration = Duration::from_secs(45);

/// How often a stream looks for how long its replica has been silent.
const LOOK: Duration = Duration::from_secs(5);

/// See the module.
pub struct Relay {
    inner: Either<ReplicaBody, Full<Bytes>>,
    flight: Flight,
    access: Access,
    stream: Option<Stream>,
    stage: Stage,
}

/// Of an answer that is a stream of events.
struct Stream {
    events: Events,
    dialect: Dialect,
    heard: Instant,
    look: Pin<Box<Sleep>>,
    /// Ends when its replica lives less than before.
    lives_less: Pin<Box<OwnedNotified>>,
    resumable: Option<Resumable>,
}

enum Stage {
    Passing,
    /// All was said; what is left is the end of the connection's.
    Done,
    /// Its replica was lost; another one is looked for.
    GoingOn(GoingOn),
    Ended,
}

type GoingOn = Pin<Box<dyn Future<Output = Result<GoneOn, GatewayError>> + Send>>;

/// Why an answer cannot go on; its connection is broken off.
#[derive(Debug, thiserror::Error)]
#[error("the replica was lost: {0}")]
pub struct ReplicaLost(String);

impl Relay {
    /// Passes an answer on; `events`: it is a stream, of this form; `resumable`: it can go on elsewhere.
    pub fn new(
        inner: Either<ReplicaBody, Full<Bytes>>,
        flight: Flight,
        access: Access,
        events: Option<Dialect>,
        resumable: Option<Resumable>,
    ) -> Self {
        let stream = events.map(|dialect| Stream {
            events: Events::default(),
            dialect,
            heard: Instant::now(),
            look: Box::pin(sleep(LOOK)),
            lives_less: Box::pin(flight.vital().lives_less()),
            resumable,
        });
        Self { inner, flight, access, stream, stage: Stage::Passing }
    }

    fn pass(&mut self, data: Bytes) -> Passed {
        self.flight.prefilled();
        self.access.passed(data.len());
        let Some(stream) = &mut self.stream else { return Passed { data, then: Then::More } };
        stream.heard = Instant::now();
        let Some(resumable) = &mut stream.resumable else {
            return Passed { data: stream.events.pass(data), then: Then::More };
        };
        self.flight.vital().heard(resumable.gateway().now_ms());
        self.access.came();
        let passed = resumable.journal.pass(data);
        self.access.usage = resumable.journal.usage();
        passed
    }

    /// What becomes of an answer whose replica was lost; what is to be said of it now.
    fn lost(&mut self, how: Loss, why: &str) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        let Some(stream) = &mut self.stream else {
            self.end_cut();
            return Some(Err(ReplicaLost(why.to_owned())));
        };
        if let Some(search) = stream.resumable.as_mut().and_then(|resumable| resumable.go_on(how)) {
            self.access.lost(why, stream.heard.into_std());
            self.stage = Stage::GoingOn(Box::pin(search));
            // The connection with it: whoever is alive nevertheless stops computing.
            self.inner = Either::Right(Full::default());
            return None;
        }
        let message = format!("the replica that wrote this answer was lost: {why}");
        let error = GatewayError::new(StatusCode::BAD_GATEWAY, "replica_lost", message);
        let events = error.events(stream.dialect);
        self.end_cut();
        Some(Ok(Frame::data(events)))
    }

    fn end_cut(&mut self) {
        self.stage = Stage::Ended;
        self.access.cut();
    }

    /// Goes on with what was found.
    fn went_on(&mut self, there: GoneOn) {
        let Some(stream) = &mut self.stream else { return };
        let Some(resumable) = &mut stream.resumable else { return };
        resumable.moved(&there);
        self.access.goes_on(&there.pod, there.is_exact);
        self.flight = there.flight;
        self.inner = there.answer.into_body();
        stream.heard = Instant::now();
        stream.lives_less.set(self.flight.vital().lives_less());
        self.stage = Stage::Passing;
    }

    fn found_nobody(&mut self, error: &GatewayError) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        let events = self.stream.as_ref().map(|stream| error.events(stream.dialect));
        tracing::warn!(message = error.message, "a stream ends: nobody goes on with it");
        self.end_cut();
        events.map(|events| Ok(Frame::data(events)))
    }

    /// Whether the replica of a stream that waits is lost, and why.
    fn looks_lost(&mut self, context: &mut Context<'_>) -> Option<String> {
        let stream = self.stream.as_mut()?;
        let vital = self.flight.vital();
        while stream.lives_less.as_mut().poll(context).is_ready() {
            stream.lives_less.set(vital.lives_less());
        }
        if vital.life() >= stream.resumable.as_ref().map_or(Life::Stalled, Resumable::leaves_at) {
            return Some(DEAD.to_owned());
        }
        while stream.look.as_mut().poll(context).is_ready() {
            if stream.heard.elapsed() >= SILENCE {
                return Some(format!("it was silent for {} s", SILENCE.as_secs()));
            }
            stream.look.as_mut().reset(Instant::now() + LOOK);
        }
        None
    }

    fn ended(&mut self) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        let can_tell = self.stream.as_ref().is_some_and(|stream| stream.resumable.is_some());
        if can_tell && !matches!(self.stage, Stage::Done) {
            return self.lost(Loss::Broken, "it ended the answer before its end");
        }
        self.stage = Stage::Ended;
        self.access.whole();
        let rest = self.stream.as_mut().map(|stream| stream.events.rest()).filter(|rest| !rest.is_empty());
        rest.map(|rest| Ok(Frame::data(rest)))
    }

    /// Takes in what came; what is to be said now.
    fn came(&mut self, data: Bytes) -> Option<Result<Frame<Bytes>, ReplicaLost>> {
        let Passed { data, then } = self.pass(data);
        let more = match then {
            Then::More => None,
            Then::Done | Then::Failed(_) => {
                self.stage = Stage::Done;
                self.access.whole();
                None
            }
            Then::Elsewhere => self.lost(Loss::Left, ENDED_EARLIER),
            Then::Broken => self.lost(Loss::Broken, ENGINE_DIED),
            Then::Unreadable => self.lost(Loss::Broken, "what it says cannot be read"),
        };
        // Of an announced length: nobody asks again.
        if self.stream.is_none() && self.inner.is_end_stream() {
            self.access.whole();
        }
        match more {
            more if data.is_empty() => more,
            Some(Ok(error)) => Some(Ok(Frame::data(behind(data, error)))),
            _ => Some(Ok(Frame::data(data))),
        }
    }
}

/// What came, and the error behind it.
fn behind(data: Bytes, error: Frame<Bytes>) -> Bytes {
    let error = error.into_data().unwrap_or_default();
    Bytes::from([data, error].concat())
}

impl Body for Relay {
    type Data = Bytes;
    type Error = ReplicaLost;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ReplicaLost>>> {
        let relay = &mut *self;
        loop {
            let said = match &mut relay.stage {
                Stage::Ended => return Poll::Ready(None),
                Stage::GoingOn(search) => match ready!(search.as_mut().poll(context)) {
                    Ok(there) => {
                        relay.went_on(there);
                        None
                    }
                    Err(error) => relay.found_nobody(&error),
                },
                Stage::Passing | Stage::Done => {
                    let is_done = matches!(relay.stage, Stage::Done);
                    match Pin::new(&mut relay.inner).poll_frame(context) {
                        Poll::Ready(Some(Ok(frame))) => frame.into_data().ok().and_then(|data| relay.came(data)),
                        Poll::Ready(Some(Err(_))) if is_done => relay.ended(),
                        Poll::Ready(Some(Err(error))) => relay.lost(Loss::Broken, &error.to_string()),
                        Poll::Ready(None) => relay.ended(),
                        Poll::Pending => match relay.looks_lost(context) {
                            Some(_) if is_done => relay.ended(),
                            Some(why) => relay.lost(Loss::Left, &why),
                            None => return Poll::Pending,
                        },
                    }
                }
            };
            if said.is_some() {
                return Poll::Ready(said);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    fn size_hint(&self) -> SizeHint {
        match self.stream {
            Some(_) => SizeHint::default(),
            None => self.inner.size_hint(),
        }
    }
}
