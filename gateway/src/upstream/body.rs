//! The body of an answer, read from its connection by whoever polls it. While nothing comes it holds no memory but its connection's.

use std::{
    io,
    mem::MaybeUninit,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use httparse::{Status, parse_chunk_size};
use hyper::body::{Body, Frame, SizeHint};
use tokio::{
    io::{AsyncRead, ReadBuf},
    net::TcpStream,
};

use super::{
    Home,
    head::{Length, Unreadable},
};

/// Read at a time at most.
const READ_BYTES: usize = 16 << 10;
/// A line between chunks is not longer: what they may say beside their length nobody uses.
const LINE_BYTES_MAX: usize = 4096;

/// A connection to a replica, and what came on it and was not taken yet.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    pub(super) unread: BytesMut,
}

impl Connection {
    /// Takes in what came; 0: it has ended. Read into the stack first, so that a connection that waits has no buffer.
    pub(super) fn poll_fill(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut space = [MaybeUninit::uninit(); READ_BYTES];
        let mut read = ReadBuf::uninit(&mut space);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut read))?;
        self.unread.extend_from_slice(read.filled());
        Poll::Ready(Ok(read.filled().len()))
    }
}

/// What is left of a body.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Left {
    Known(u64),
    /// The line before a chunk.
    ChunkSize,
    Chunk(u64),
    /// The line feed behind it.
    ChunkEnd,
    Trailers,
    UntilClose,
    Nothing,
}

/// See the module.
#[derive(Debug)]
pub struct ReplicaBody {
    connection: Option<Connection>,
    /// Where its connection goes when all of it was read.
    home: Option<Home>,
    left: Left,
}

impl ReplicaBody {
    pub(super) fn new(connection: Connection, length: Length, home: Option<Home>) -> Self {
        let left = match length {
            Length::Known(0) => Left::Nothing,
            Length::Known(n_bytes) => Left::Known(n_bytes),
            Length::Chunked => Left::ChunkSize,
            Length::UntilClose => Left::UntilClose,
        };
        let mut body = Self { connection: Some(connection), home, left };
        if left == Left::Nothing {
            body.end();
        }
        body
    }

    /// All of it.
    pub async fn whole(self) -> io::Result<Bytes> {
        Ok(self.collect().await?.to_bytes())
    }

    /// It was read: its connection takes another request, if nothing more came on it.
    fn end(&mut self) {
        self.left = Left::Nothing;
        let clean = self.connection.take().filter(|connection| connection.unread.is_empty());
        if let (Some(connection), Some(home)) = (clean, self.home.take()) {
            home.take_back(connection.stream);
        }
    }

    /// What of what came is the body's, if any is; what is left then.
    fn next(&mut self) -> Result<Option<Bytes>, Unreadable> {
        loop {
            let Some(Connection { unread, .. }) = &mut self.connection else { return Ok(None) };
            self.left = match self.left {
                Left::Known(n_bytes) | Left::Chunk(n_bytes) if !unread.is_empty() => {
                    let data = unread.split_to(unread.len().min(usize::try_from(n_bytes).unwrap_or(usize::MAX)));
                    let rest = n_bytes - data.len() as u64;
                    match (self.left, rest) {
                        (Left::Known(_), 0) => self.end(),
                        (Left::Known(_), rest) => self.left = Left::Known(rest),
                        (_, 0) => self.left = Left::ChunkEnd,
                        (_, rest) => self.left = Left::Chunk(rest),
                    }
                    return Ok(Some(data.freeze()));
                }
                Left::UntilClose if !unread.is_empty() => return Ok(Some(unread.split().freeze())),
                Left::ChunkSize => match parse_chunk_size(unread).map_err(|_| Unreadable::Chunk)? {
                    Status::Complete((n_bytes, size)) => {
                        unread.advance(n_bytes);
                        if size == 0 { Left::Trailers } else { Left::Chunk(size) }
                    }
                    Status::Partial if unread.len() > LINE_BYTES_MAX => return Err(Unreadable::Chunk),
                    Status::Partial => return Ok(None),
                },
                Left::ChunkEnd if unread.len() < 2 => return Ok(None),
                Left::ChunkEnd if unread.starts_with(b"\r\n") => {
                    unread.advance(2);
                    Left::ChunkSize
                }
                Left::ChunkEnd => return Err(Unreadable::Chunk),
                Left::Trailers => match line_end(unread)? {
                    None => return Ok(None),
                    Some(2) => {
                        unread.advance(2);
                        self.end();
                        return Ok(None);
                    }
                    Some(n_bytes) => {
                        unread.advance(n_bytes);
                        Left::Trailers
                    }
                },
                Left::Known(_) | Left::Chunk(_) | Left::UntilClose | Left::Nothing => return Ok(None),
            };
        }
    }
}

/// Bytes up to the end of a line, its end included.
fn line_end(bytes: &[u8]) -> Result<Option<usize>, Unreadable> {
    match memchr::memmem::find(bytes, b"\r\n") {
        Some(at) => Ok(Some(at + 2)),
        None if bytes.len() > LINE_BYTES_MAX => Err(Unreadable::Chunk),
        None => Ok(None),
    }
}

impl Body for ReplicaBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            match self.next() {
                Ok(Some(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Ok(None) if self.left == Left::Nothing => return Poll::Ready(None),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(self.broken(io::Error::other(error))))),
            }
            let Some(connection) = &mut self.connection else { return Poll::Ready(None) };
            match ready!(connection.poll_fill(context)) {
                Ok(0) if self.left == Left::UntilClose => {
                    self.home = None;
                    self.end();
                }
                Ok(0) => {
                    let early = io::Error::new(io::ErrorKind::UnexpectedEof, "its connection ended before its answer");
                    return Poll::Ready(Some(Err(self.broken(early))));
                }
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(self.broken(error)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == Left::Nothing
    }

    fn size_hint(&self) -> SizeHint {
        match self.left {
            Left::Known(n_bytes) => SizeHint::with_exact(n_bytes),
            Left::Nothing => SizeHint::with_exact(0),
            _ => SizeHint::default(),
        }
    }
}

impl ReplicaBody {
    /// Nothing more comes.
    fn broken(&mut self, error: io::Error) -> io::Error {
        (self.connection, self.left) = (None, Left::Nothing);
        error
    }
}
