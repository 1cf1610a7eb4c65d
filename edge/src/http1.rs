//! A connection of HTTP/1.1, one request after the other. hyper reads requests and writes answers, except for the events of a stream: when the
//! head of one has gone out, hyper goes, and [`Chunks`] writes what follows; for the next request hyper comes back. It keeps 16 KiB of buffers
//! for a connection, and streams wait most of their time; and it looks three times at a stream for each event, and writes four pieces of it.
//!
//! hyper is left only where nothing of it is lost: the request was read to its end, and what it had to write is written ([`Handover`]). A client of
//! HTTP/1.0, for whom nothing has chunks, and whoever is answered before it has said all have hyper to the end.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{
        HeaderMap, Method, Request, Response, StatusCode, Version,
        header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING},
    },
};
use hyper::{
    body::{Body as _, Frame, Incoming, SizeHint},
    rt::{Read, Write},
    server::conn::http1::{Builder, Connection},
    service::Service,
};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;

use crate::{
    chunks::{Chunks, Cut},
    wire::{Handover, Stream, Wire},
};

/// Why a connection ended before its time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("{0}")]
    Hyper(#[from] hyper::Error),
    #[error("{0}")]
    Stream(#[from] Cut),
}

/// Serves a connection until it ends, or until `ended` turns true and what is being answered then is.
pub(crate) async fn serve<Io>(
    http: Arc<Builder>,
    io: Io,
    routes: Router,
    mut ended: watch::Receiver<bool>,
) -> Result<(), Broken>
where
    Io: Read + Write + Unpin + 'static,
{
    let handover = Arc::new(Handover::default());
    let mut wire = Wire::new(io, Arc::clone(&handover));
    loop {
        let routes = Routes { routes: TowerToHyperService::new(routes.clone()), handover: Arc::clone(&handover) };
        // In a box, so that it is not there while a stream is written.
        let mut hyper = Box::new(http.serve_connection(wire, routes));
        let Some(stream) = by_hyper(&mut hyper, &handover, &mut ended).await? else { return Ok(()) };
        wire = {
            let parts = hyper.into_parts();
            parts.io.rewound(&parts.read_buf)
        };
        Chunks::of(stream.body).write(&mut wire).await?;
        if stream.closes || *ended.borrow() {
            return Ok(poll_fn(|context| Pin::new(&mut wire).poll_shutdown(context)).await.map_err(Cut::from)?);
        }
    }
}

type Hyper<Io> = Connection<Wire<Io>, Routes>;

/// Lets hyper serve until there is a stream to be written; `None`: until the connection has ended.
async fn by_hyper<Io>(
    hyper: &mut Hyper<Io>,
    handover: &Handover,
    ended: &mut watch::Receiver<bool>,
) -> hyper::Result<Option<Stream>>
where
    Io: Read + Write + Unpin + 'static,
{
    tokio::select! {
        found = poll_fn(|context| poll(hyper, handover, context)) => return found,
        _ = ended.wait_for(|ended| *ended) => {}
    }
    Pin::new(&mut *hyper).graceful_shutdown();
    poll_fn(|context| poll(hyper, handover, context)).await
}

fn poll<Io>(
    hyper: &mut Hyper<Io>,
    handover: &Handover,
    context: &mut Context<'_>,
) -> Poll<hyper::Result<Option<Stream>>>
where
    Io: Read + Write + Unpin + 'static,
{
    let polled = Pin::new(hyper).poll(context);
    match handover.take() {
        Some(stream) => Poll::Ready(Ok(Some(stream))),
        None => polled.map_ok(|()| None),
    }
}

/// What answers requests, and keeps streams from hyper.
struct Routes {
    routes: TowerToHyperService<Router>,
    handover: Arc<Handover>,
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let handover = Arc::clone(&self.handover);
        handover.begin(request.body().is_end_stream());
        let has_chunks = request.version() == Version::HTTP_11 && request.method() != Method::HEAD;
        let closes = says_close(request.headers());
        let answer = self.routes.call(request.map(|body| Asked { body, handover: Arc::clone(&handover) }));
        Box::pin(async move {
            let answer = answer.await?;
            let is_taken = has_chunks && is_stream(&answer) && handover.is_read();
            Ok(if is_taken { given(answer, closes, handover) } else { answer })
        })
    }
}

/// The head of a stream for hyper. The stream waits for whoever writes it.
fn given(answer: Response<Body>, closes: bool, handover: Arc<Handover>) -> Response<Body> {
    let closes = closes || says_close(answer.headers());
    let (head, body) = answer.into_parts();
    handover.give(Stream { body, closes });
    Response::from_parts(head, Body::new(Behind { handover }))
}

/// Whether an answer is a stream of events whose length nobody knows.
fn is_stream(answer: &Response<Body>) -> bool {
    let headers = answer.headers();
    answer.status() == StatusCode::OK
        && headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
        && ![CONTENT_LENGTH, TRANSFER_ENCODING].iter().any(|name| headers.contains_key(name))
        && answer.body().size_hint().exact().is_none()
}

fn says_close(headers: &HeaderMap) -> bool {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|option| option.trim().eq_ignore_ascii_case("close"))
}

/// The body of a request, which notes that all of it was read.
struct Asked {
    body: Incoming,
    handover: Arc<Handover>,
}

impl hyper::body::Body for Asked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.handover.note_read();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What hyper takes for the body of a stream: it is asked for once the head is in hyper's buffer, and hyper goes before anything comes of it.
struct Behind {
    handover: Arc<Handover>,
}

impl hyper::body::Body for Behind {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.handover.note_begun();
        Poll::Pending
    }
}

impl Drop for Behind {
    fn drop(&mut self) {
        self.handover.forget();
    }
}
