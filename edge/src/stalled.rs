//! A connection whose other side stops reading. While bytes are there to be written and none can be, a clock runs; when it has
//! run out the connection is broken, which ends what was being answered on it. Reading is left as it is, but for the first byte where
//! nobody else waits for it.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use tokio::time::{Sleep, sleep};

/// A connection with a limit on how long its other side may read nothing.
pub(crate) struct Stalled<Io> {
    io: Io,
    limit: Duration,
    /// Runs while nothing can be written.
    clock: Option<Pin<Box<Sleep>>>,
    /// What the other side has to begin with, while it has not.
    opening: Option<Opening>,
}

/// The first bytes of a connection that may be of either HTTP: which one is known by as many as the preface of HTTP/2 has.
struct Opening {
    n_missing: usize,
    clock: Pin<Box<Sleep>>,
}

/// `PRI * HTTP/2.0`, two empty lines and `SM`. No head of HTTP/1.1 is shorter.
const PREFACE_BYTES: usize = 24;

impl<Io> Stalled<Io> {
    pub(crate) fn new(io: Io, limit: Duration) -> Self {
        Self { io, limit, clock: None, opening: None }
    }

    /// One whose other side has to say within `opening` which HTTP it speaks.
    pub(crate) fn opening(io: Io, limit: Duration, opening: Duration) -> Self {
        Self {
            io,
            limit,
            clock: None,
            opening: Some(Opening { n_missing: PREFACE_BYTES, clock: Box::pin(sleep(opening)) }),
        }
    }

    /// A write that was tried: one that must wait lets the clock run, any other stops it.
    fn watch<T>(&mut self, tried: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.clock = None;
            return tried;
        }
        let clock = self.clock.get_or_insert_with(|| Box::pin(sleep(self.limit)));
        ready!(clock.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl Opening {
    /// Reads no more than is missing, so that it is known how much that was.
    fn read(
        &mut self,
        io: &mut (impl Read + Unpin),
        context: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut bytes = [0; PREFACE_BYTES];
        let mut piece = ReadBuf::new(&mut bytes[..self.n_missing.min(buffer.remaining())]);
        let Poll::Ready(read) = Pin::new(io).poll_read(context, piece.unfilled()) else {
            ready!(self.clock.as_mut().poll(context));
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client says too little")));
        };
        self.n_missing -= piece.filled().len();
        buffer.put_slice(piece.filled());
        Poll::Ready(read)
    }
}

impl<Io: Read + Unpin> Read for Stalled<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, opening, .. } = &mut *self;
        match opening {
            Some(opening) if opening.n_missing > 0 => opening.read(io, context, buffer),
            _ => Pin::new(io).poll_read(context, buffer),
        }
    }
}

impl<Io: Write + Unpin> Write for Stalled<Io> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.io).poll_write(context, bytes);
        self.watch(tried, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.watch(tried, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.io).poll_flush(context);
        self.watch(tried, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let tried = Pin::new(&mut self.io).poll_shutdown(context);
        self.watch(tried, context)
    }
}
