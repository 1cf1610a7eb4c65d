//! The body of an answer in chunks of HTTP/1.1, written as it comes: what is ready at a time in one write. While nothing comes there is
//! no buffer, and it is watched whether the client has left. Knows nothing of what it writes.

use std::{
    fmt::Write as _,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::Body;
use bytes::{Buf, BytesMut};
use hyper::{
    body::Body as _,
    rt::{Read, Write},
};

use crate::wire::Wire;

/// What is ready goes out when it is so much, whether more is or not.
const ENOUGH_BYTES: usize = 16 << 10;
/// Around the data of a chunk: its length in hexadecimal digits and two ends of lines.
const FRAME_BYTES: usize = 20;
const END: &[u8] = b"0\r\n\r\n";

/// See the module.
pub(crate) struct Chunks {
    /// `None`: all of it came.
    body: Option<Body>,
    /// What came and is not written yet.
    unwritten: BytesMut,
    is_flushed: bool,
}

/// Why an answer was not written to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Cut {
    #[error("the answer broke off: {0}")]
    Answer(#[from] axum::Error),
    #[error("{0}")]
    Connection(#[from] io::Error),
    #[error("the client left")]
    Left,
}

impl Chunks {
    /// Of a body that has not begun.
    pub(crate) fn of(body: Body) -> Self {
        Self { body: Some(body), unwritten: BytesMut::new(), is_flushed: true }
    }

    /// Writes all of it.
    pub(crate) async fn write(mut self, wire: &mut Wire<impl Read + Write + Unpin>) -> Result<(), Cut> {
        std::future::poll_fn(|context| self.poll_write(wire, context)).await
    }

    fn poll_write(
        &mut self,
        wire: &mut Wire<impl Read + Write + Unpin>,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Cut>> {
        loop {
            let waits = self.gather(context)?;
            ready!(self.poll_out(wire, context))?;
            if self.body.is_none() {
                return Poll::Ready(Ok(()));
            }
            if waits {
                ready!(wire.poll_left(context))?;
                return Poll::Ready(Err(Cut::Left));
            }
        }
    }

    /// Takes in what is ready, up to a bound; whether the body will say when there is more.
    fn gather(&mut self, context: &mut Context<'_>) -> Result<bool, axum::Error> {
        while self.unwritten.len() < ENOUGH_BYTES {
            let Some(body) = &mut self.body else { break };
            match Pin::new(body).poll_frame(context) {
                Poll::Pending => return Ok(true),
                Poll::Ready(Some(frame)) => self.put(frame?.into_data().unwrap_or_default().as_ref()),
                Poll::Ready(None) => {
                    self.body = None;
                    self.unwritten.extend_from_slice(END);
                }
            }
        }
        Ok(false)
    }

    fn put(&mut self, data: &[u8]) {
        // A chunk of no bytes would be the end.
        if !data.is_empty() {
            self.unwritten.reserve(data.len() + FRAME_BYTES);
            // Writing to memory does not fail.
            let _ = write!(self.unwritten, "{:x}\r\n", data.len());
            self.unwritten.extend_from_slice(data);
            self.unwritten.extend_from_slice(b"\r\n");
        }
    }

    /// Writes what came, and keeps no buffer.
    fn poll_out(&mut self, wire: &mut (impl Write + Unpin), context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unwritten.is_empty() {
            self.is_flushed = false;
            match ready!(Pin::new(&mut *wire).poll_write(context, &self.unwritten))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n_bytes => self.unwritten.advance(n_bytes),
            }
        }
        if !self.is_flushed {
            self.unwritten = BytesMut::new();
            ready!(Pin::new(wire).poll_flush(context))?;
            self.is_flushed = true;
        }
        Poll::Ready(Ok(()))
    }
}
