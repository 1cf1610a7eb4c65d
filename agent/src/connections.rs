//! Connections of the HTTP server: accepts them, speaks HTTP/1 on them, and at the end lets each finish its answer. Owns
//! how long a client may take to send the head of a request; for a body that is the handlers' business. Knows no endpoint.

use std::{pin::pin, time::Duration};

use axum::{Router, serve::Listener};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};

/// For the head of a request, counted from the opening of its connection or the end of the answer before it. Without it a
/// client that sends a byte a minute holds its connection for ever. Pools of clients in Go and Rust close what is idle for
/// 90 s; they have to be the first, or the request that they send at that moment is lost.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(100);

/// Serves what the listener accepts until `ended`, then until the last answer is written.
pub async fn serve(
    mut listener: impl Listener,
    router: Router,
    head_timeout: Duration,
    ended: impl Future<Output = ()>,
) {
    let open = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    let mut ended = pin!(ended);
    loop {
        let (io, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut ended => break,
        };
        let served = http.serve_connection(TokioIo::new(io), TowerToHyperService::new(router.clone()));
        let served = open.watch(served);
        tokio::spawn(async move {
            // A client that breaks off, sends no HTTP or is too slow with it: its own affair.
            if let Err(error) = served.await {
                tracing::debug!(%error, "connection");
            }
        });
    }
    drop(listener);
    open.shutdown().await;
}
