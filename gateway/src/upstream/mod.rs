//! Connections to replicas, and to whoever else answers gateways: HTTP/1.1, one request at a time on each. An answer's body is read by
//! whoever passes it on, in the same task: an event of a stream wakes one task, and a stream of which nothing comes has no buffer. A general client has a task, a
//! channel and two buffers for each connection, which were a quarter of the processor time of an event and half of the memory of a
//! silent stream.

mod body;
mod head;

use std::{
    collections::HashMap,
    future::poll_fn,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{Request, Response};
use bytes::{Buf, Bytes, BytesMut};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::timeout};

use body::Connection;
pub use body::ReplicaBody;
pub use head::Unreadable;

/// For a connection to a replica in the same cluster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// An agent closes what is idle for 100 s: the gateway has to be the first, or the request that it sends at that moment is lost.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Debug, Default)]
pub struct Upstream {
    idle: Arc<Idle>,
}

/// Connections that wait for their next request.
#[derive(Debug, Default)]
struct Idle(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    /// By `HOST:PORT`; the last that came is the first to go.
    by_address: HashMap<Arc<str>, Vec<Waiting>>,
    /// When those that had waited for too long were closed, whoever they were to.
    swept: Option<Instant>,
}

#[derive(Debug)]
struct Waiting {
    stream: TcpStream,
    since: Instant,
}

/// Where a connection waits when its answer was read.
#[derive(Debug)]
struct Home {
    idle: Arc<Idle>,
    address: Arc<str>,
}

/// Why nothing was answered.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Nobody was asked: there is no address.
    #[error("no address to ask at")]
    NoAddress,
    /// Nobody was asked: no connection came about.
    #[error("connect to {address}")]
    Connect {
        /// Where.
        address: Arc<str>,
        /// Why not.
        source: io::Error,
    },
    /// The connection broke.
    #[error("the connection to {address} broke")]
    Broken {
        /// Where to.
        address: Arc<str>,
        /// How.
        source: io::Error,
    },
    /// Something came that is no answer.
    #[error("{0}")]
    Unreadable(#[from] Unreadable),
}

impl SendError {
    /// Whether nobody was asked.
    pub fn is_connect(&self) -> bool {
        matches!(self, Self::NoAddress | Self::Connect { .. })
    }
}

impl Upstream {
    /// Sends a request, and reads the head of its answer.
    pub async fn send(&self, request: Request<Bytes>) -> Result<Response<ReplicaBody>, SendError> {
        let (parts, body) = request.into_parts();
        let authority = parts.uri.authority().ok_or(SendError::NoAddress)?;
        let address: Arc<str> = match authority.port_u16() {
            Some(_) => authority.as_str().into(),
            None => format!("{authority}:80").into(),
        };
        let head = head::written(&parts, authority.as_str(), body.len());
        let stream = match self.idle.take(&address) {
            Some(stream) => stream,
            None => connect(&address).await?,
        };
        let broken = |source| SendError::Broken { address: Arc::clone(&address), source };
        let mut connection = Connection { stream, unread: BytesMut::new() };
        // Whoever refuses a body may answer and close before all of it was sent: what it says counts.
        let sent = connection.stream.write_all_buf(&mut head.as_slice().chain(body)).await;
        let head = match read_head(&mut connection).await {
            Ok(head) => head?,
            Err(error) => return Err(broken(sent.err().unwrap_or(error))),
        };
        let home = Home { idle: Arc::clone(&self.idle), address: Arc::clone(&address) };
        let home = Some(home).filter(|_| head.stays_open && sent.is_ok());
        Ok(Response::from_parts(head.parts, ReplicaBody::new(connection, head.length, home)))
    }
}

async fn connect(address: &Arc<str>) -> Result<TcpStream, SendError> {
    let failed = |source| SendError::Connect { address: Arc::clone(address), source };
    let connected = timeout(CONNECT_TIMEOUT, TcpStream::connect(&**address)).await;
    let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    Ok(stream)
}

/// The head of an answer; those that only say that one comes are passed over.
async fn read_head(connection: &mut Connection) -> io::Result<Result<head::Head, Unreadable>> {
    loop {
        match head::read(&connection.unread) {
            Err(unreadable) => return Ok(Err(unreadable)),
            Ok(Some(head)) => {
                connection.unread.advance(head.n_bytes);
                if !head.parts.status.is_informational() {
                    return Ok(Ok(head));
                }
            }
            Ok(None) => {
                if poll_fn(|context| connection.poll_fill(context)).await? == 0 {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it ended without an answer"));
                }
            }
        }
    }
}

impl Idle {
    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection that is still open, and on which nothing came that nobody asked for.
    fn take(&self, address: &str) -> Option<TcpStream> {
        let (mut shelf, now) = (self.lock(), Instant::now());
        let waiting = shelf.by_address.get_mut(address)?;
        while let Some(Waiting { stream, since }) = waiting.pop() {
            let is_silent = || stream.try_read(&mut [0]).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
            if now.duration_since(since) < IDLE_TIMEOUT && is_silent() {
                return Some(stream);
            }
        }
        None
    }
}

impl Home {
    fn take_back(self, stream: TcpStream) {
        let (mut shelf, now) = (self.idle.lock(), Instant::now());
        shelf.by_address.entry(self.address).or_default().push(Waiting { stream, since: now });
        // Replicas go for good, and nobody asks for connections to them any more.
        if shelf.swept.is_none_or(|swept| now.duration_since(swept) >= IDLE_TIMEOUT) {
            shelf.sweep(now);
        }
    }
}

impl Shelf {
    fn sweep(&mut self, now: Instant) {
        self.swept = Some(now);
        self.by_address.retain(|_, all| {
            all.retain(|waiting| now.duration_since(waiting.since) < IDLE_TIMEOUT);
            !all.is_empty()
        });
    }
}
