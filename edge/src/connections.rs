//! Connections of the HTTP server: accepts them, has HTTP/1 spoken on them, or what gRPC needs too, and at the end lets each finish its answer. Owns how
//! many there are, how long a client may take to send the head of a request, and how long it may read nothing of an answer; for
//! a body that is the handlers' business. Knows no endpoint.

use std::{error::Error, fmt::Display, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use axum::{Router, serve::Listener};
use hyper::{
    rt::{Read, Write},
    server::conn::http1::Builder,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpSocket},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
};

use crate::{http1, stalled::Stalled};

/// What a client may do with its connection.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limits {
    /// For the head of a request, counted from the opening of its connection or the end of the answer before it.
    pub head: Duration,
    /// For bytes of an answer that its client does not read.
    pub stall: Duration,
    /// Connections at once. One more is closed without a word, as a kernel does whose queue is full: whoever asks again is
    /// served once others have left.
    pub n_connections: usize,
    /// It may speak HTTP/2 from its first byte on, as gRPC does.
    pub http2: bool,
}

/// Requests at once on one connection of HTTP/2: a proxy sends all of its clients' on a few.
const STREAMS: u32 = 16_384;
/// A connection of HTTP/2 whose other side is gone without a word is found by this: requests on it may have places at replicas.
const ALIVE_EVERY: Duration = Duration::from_secs(15);

/// Of the admin port: one operator asks, every two seconds, and keeps its connection for ten.
pub const ADMIN_LIMITS: Limits =
    Limits { head: Duration::from_secs(15), stall: Duration::from_secs(5), n_connections: 256, http2: false };

/// Connections that wait to be accepted, or as many as the kernel allows if that is fewer. With tokio's 1,024 a crowd that comes back at once keeps a
/// probe out for seconds.
const BACKLOG: u32 = 4096;

/// Listens with room for a crowd.
///
/// # Errors
///
/// The kernel's: somebody listens there, or it is no address of this machine.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // As `TcpListener::bind` does: connections of a process before hold nobody up.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Without it a client that sends a byte a minute holds its connection for ever. Pools of clients in Go and Rust
            // close what is idle for 90 s; they have to be the first, or the request that they send at that moment is lost.
            head: Duration::from_secs(100),
            // As long as common proxies wait for a silent server.
            stall: Duration::from_secs(60),
            // More than the clients of a replica with its longest queue, and memory for one is about 20 KB.
            n_connections: 16_384,
            http2: false,
        }
    }
}

/// Places for connections; several listeners may share them.
#[derive(Clone, Debug)]
pub struct Places(Arc<Semaphore>);

impl Limits {
    /// As many places as these limits allow.
    pub fn places(&self) -> Places {
        Places(Arc::new(Semaphore::new(self.n_connections)))
    }
}

/// Serves what the listener accepts until `ended`, then until the last answer is written.
/// `closed` is told of every connection that is gone.
pub async fn serve(
    listener: impl Listener,
    router: Router,
    limits: Limits,
    closed: fn(),
    ended: impl Future<Output = ()>,
) {
    serve_at(limits.places(), listener, router, limits, closed, ended).await;
}

/// The same in places that others have connections in, too.
pub async fn serve_at(
    places: Places,
    listener: impl Listener,
    router: Router,
    limits: Limits,
    closed: fn(),
    ended: impl Future<Output = ()>,
) {
    serve_each(places, listener, |_| router.clone(), limits, closed, ended).await;
}

/// The same with the endpoints that are for who comes from an address.
pub async fn serve_each<L: Listener>(
    places: Places,
    mut listener: L,
    routes: impl Fn(&L::Addr) -> Router,
    limits: Limits,
    closed: fn(),
    ended: impl Future<Output = ()>,
) {
    let (end, told) = watch::channel(false);
    let (http1, either) = (Arc::new(http1(limits)), either(limits));
    let mut ended = pin!(ended);
    loop {
        let (io, from) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut ended => break,
        };
        let Ok(place) = Arc::clone(&places.0).try_acquire_owned() else {
            tracing::debug!(limit = limits.n_connections, "one connection too many");
            continue;
        };
        let (io, routes, told) = (TokioIo::new(io), routes(&from), told.clone());
        if limits.http2 {
            let io = Stalled::opening(io, limits.stall, limits.head);
            spawn(serve_either(either.clone(), io, routes, told), place, closed);
        } else {
            let io = Stalled::new(io, limits.stall);
            spawn(http1::serve(Arc::clone(&http1), io, routes, told), place, closed);
        }
    }
    drop((listener, told));
    end.send_replace(true);
    end.closed().await;
}

fn http1(limits: Limits) -> Builder {
    let mut http = Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head);
    http
}

/// Serves a connection of either HTTP until it ends, or until `ended` turns true and what is being answered then is.
async fn serve_either<Io>(
    http: auto::Builder<TokioExecutor>,
    io: Io,
    routes: Router,
    mut ended: watch::Receiver<bool>,
) -> Result<(), Box<dyn Error + Send + Sync>>
where
    Io: Read + Write + Unpin + Send + 'static,
{
    let mut connection = pin!(http.serve_connection(io, TowerToHyperService::new(routes)));
    tokio::select! {
        served = connection.as_mut() => return served,
        _ = ended.wait_for(|ended| *ended) => {}
    }
    connection.as_mut().graceful_shutdown();
    connection.await
}

/// What a client begins with says which one it speaks.
fn either(limits: Limits) -> auto::Builder<TokioExecutor> {
    let mut http = auto::Builder::new(TokioExecutor::new());
    http.http1().timer(TokioTimer::new()).header_read_timeout(limits.head);
    let mut http2 = http.http2();
    http2.timer(TokioTimer::new()).max_concurrent_streams(STREAMS).keep_alive_interval(ALIVE_EVERY);
    http
}

fn spawn<E: Display>(
    served: impl Future<Output = Result<(), E>> + Send + 'static,
    place: OwnedSemaphorePermit,
    closed: fn(),
) {
    tokio::spawn(async move {
        let _place = place;
        // A client that breaks off, sends no HTTP or is too slow with it: its own affair.
        if let Err(error) = served.await {
            tracing::debug!(%error, "connection");
        }
        closed();
    });
}
