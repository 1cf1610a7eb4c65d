//! The bytes of a connection between one reader of its requests and the next: what one has read of a request that follows is read again by the next. And the
//! place where a stream changes hands, which has to be known from three sides: hyper was given it, has written its head, has nothing left to write.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use axum::body::Body;
use bytes::{Buf, BytesMut};
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};

/// Of a request that follows, this much is read at a time while an answer is written.
const AHEAD_BYTES: usize = 256;

/// See the module.
pub(crate) struct Wire<Io> {
    io: Io,
    unread: BytesMut,
    handover: Arc<Handover>,
}

/// A stream that goes from hyper, which writes its head, to who writes its events.
#[derive(Default)]
pub(crate) struct Handover(Mutex<State>);

#[derive(Default)]
struct State {
    /// All of the request was read: what is left of one would be taken for the next one.
    is_read: bool,
    stream: Option<Stream>,
    stage: Stage,
}

/// An answer that is written here, and whether its connection ends with it.
pub(crate) struct Stream {
    pub(crate) body: Body,
    pub(crate) closes: bool,
}

#[derive(Clone, Copy, Default, Eq, PartialEq)]
enum Stage {
    /// hyper has the head.
    #[default]
    Given,
    /// It has asked for what comes behind it, so the head is in its buffer,
    Begun,
    /// and that was empty after this.
    Out,
}

impl Handover {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request comes.
    pub(crate) fn begin(&self, is_read: bool) {
        *self.lock() = State { is_read, ..State::default() };
    }

    /// All of the request was read.
    pub(crate) fn note_read(&self) {
        self.lock().is_read = true;
    }

    /// Whether all of it was.
    pub(crate) fn is_read(&self) -> bool {
        self.lock().is_read
    }

    /// The head of its answer goes to hyper.
    pub(crate) fn give(&self, stream: Stream) {
        let mut state = self.lock();
        (state.stream, state.stage) = (Some(stream), Stage::Given);
    }

    /// hyper asks for what comes behind the head.
    pub(crate) fn note_begun(&self) {
        let mut state = self.lock();
        if state.stage == Stage::Given {
            state.stage = Stage::Begun;
        }
    }

    /// All that hyper had to write is written.
    fn note_flushed(&self) {
        let mut state = self.lock();
        if state.stage == Stage::Begun {
            state.stage = Stage::Out;
        }
    }

    /// The stream, if its head is out.
    pub(crate) fn take(&self) -> Option<Stream> {
        let mut state = self.lock();
        if state.stage == Stage::Out { state.stream.take() } else { None }
    }

    /// Nobody waits for it any more.
    pub(crate) fn forget(&self) {
        let stream = self.lock().stream.take();
        drop(stream);
    }
}

impl<Io> Wire<Io> {
    pub(crate) fn new(io: Io, handover: Arc<Handover>) -> Self {
        Self { io, unread: BytesMut::new(), handover }
    }

    /// With what was read of it and belongs to a request that follows.
    pub(crate) fn rewound(self, unread: &[u8]) -> Self {
        Self { unread: [unread, &self.unread[..]].concat().as_slice().into(), ..self }
    }
}

impl<Io: Read + Unpin> Wire<Io> {
    /// Waits until the other side has ended. What it says meanwhile is of its next request, and waits; whether more comes nobody asks then.
    pub(crate) fn poll_left(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.unread.is_empty() {
            return Poll::Pending;
        }
        let mut space = [MaybeUninit::uninit(); AHEAD_BYTES];
        let mut read = ReadBuf::uninit(&mut space);
        ready!(Pin::new(&mut self.io).poll_read(context, read.unfilled()))?;
        self.unread.extend_from_slice(read.filled());
        if self.unread.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

impl<Io: Read + Unpin> Read for Wire<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            return Pin::new(&mut self.io).poll_read(context, buffer);
        }
        let n_bytes = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread[..n_bytes]);
        self.unread.advance(n_bytes);
        if self.unread.is_empty() {
            self.unread = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: Write + Unpin> Write for Wire<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    /// Nobody flushes who still has something to write.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.io).poll_flush(context))?;
        self.handover.note_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, empty};

    use super::*;

    fn stream() -> Stream {
        Stream { body: Body::empty(), closes: false }
    }

    #[test]
    fn a_stream_is_taken_when_its_head_was_written_and_then_all_was() {
        let handover = Handover::default();
        handover.give(stream());
        handover.note_flushed();
        assert!(handover.take().is_none(), "that was what stood before its head");
        handover.note_begun();
        assert!(handover.take().is_none());
        handover.note_flushed();
        handover.note_begun();
        assert!(handover.take().is_some() && handover.take().is_none(), "once");
    }

    #[test]
    fn a_stream_that_hyper_dropped_or_of_the_request_before_is_nobody_s() {
        let handover = Handover::default();
        for forget in [Handover::forget, |handover: &Handover| handover.begin(false)] {
            handover.give(stream());
            handover.note_begun();
            handover.note_flushed();
            forget(&handover);
            assert!(handover.take().is_none());
        }
    }

    #[tokio::test]
    async fn what_was_read_is_read_again_in_its_order() {
        let wire = Wire::new(TokioIo::new(empty()), Arc::default()).rewound(b"def").rewound(b"abc");
        let mut read = String::new();
        TokioIo::new(wire).read_to_string(&mut read).await.unwrap();
        assert_eq!(read, "abcdef");
    }
}
