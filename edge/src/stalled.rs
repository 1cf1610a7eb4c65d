//! A connection whose other side stops reading. While bytes are there to be written and none can be, a clock runs; when it has
//! run out the connection is broken, which ends what was being answered on it. Reading is left as it is.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use hyper::rt::{Read, ReadBufCursor, Write};
use tokio::time::{Sleep, sleep};

/// A connection with a limit on how long its other side may read nothing.
pub(crate) struct Stalled<Io> {
    io: Io,
    limit: Duration,
    /// Runs while nothing can be written.
    clock: Option<Pin<Box<Sleep>>>,
}

impl<Io> Stalled<Io> {
    pub(crate) fn new(io: Io, limit: Duration) -> Self {
        Self { io, limit, clock: None }
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

impl<Io: Read + Unpin> Read for Stalled<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, buffer)
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
