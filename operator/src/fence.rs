//! Keeps an operator that leads no longer from writing: every request that changes something asks for leadership first and
//! ends before the Lease can have run out. A layer of the client, so that no writer can forget it.
//!
//! A process that is stopped between that question and its write, and wakes later, is met by what its writes are bound to:
//! the version of what was looked at.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use hyper::{Method, Request, Response};
use kube::client::Body;
use thiserror::Error;
use tokio::time::timeout;
use tower::{BoxError, Layer, Service};

use crate::lease::Leadership;

/// How long a write may take. The Lease is renewed early enough that a leader always has more left.
pub const WRITE_TIMEOUT: Duration = Duration::from_secs(4);
/// How long a reading may take to begin. Watches go on after that.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a request was not made, or given up.
#[derive(Clone, Copy, Debug, Error, Eq, PartialEq)]
pub enum Fenced {
    /// Somebody else may lead before it would end.
    #[error("not written: this operator does not lead, or not for long enough")]
    NotLeading,
    /// The API server did not answer.
    #[error("no answer from the API server within {} s", .0.as_secs())]
    Timeout(Duration),
}

/// Puts the fence around a client.
#[derive(Clone, Debug)]
pub struct Fence(pub Leadership);

/// A client inside the fence.
#[derive(Clone, Debug)]
pub struct FencedService<S> {
    inner: S,
    leadership: Leadership,
}

impl<S> Layer<S> for Fence {
    type Service = FencedService<S>;

    fn layer(&self, inner: S) -> FencedService<S> {
        FencedService { inner, leadership: self.0.clone() }
    }
}

impl<S, B> Service<Request<Body>> for FencedService<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Error: Into<BoxError>,
    S::Future: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let reads = matches!(*request.method(), Method::GET | Method::HEAD);
        if !reads && !self.leadership.holds_for(WRITE_TIMEOUT) {
            return Box::pin(async { Err(Fenced::NotLeading.into()) });
        }
        let limit = if reads { READ_TIMEOUT } else { WRITE_TIMEOUT };
        let answer = self.inner.call(request);
        Box::pin(async move {
            match timeout(limit, answer).await {
                Ok(answer) => answer.map_err(Into::into),
                Err(_) => Err(Fenced::Timeout(limit).into()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use tower::service_fn;

    use super::*;

    /// What becomes of a request to a server that answers at once.
    async fn outcome(method: Method, leadership: Leadership) -> Result<(), Fenced> {
        let server = service_fn(|_: Request<Body>| async { Ok::<_, BoxError>(Response::new(())) });
        let request = Request::builder().method(method).body(Body::empty()).unwrap();
        let answer = Fence(leadership).layer(server).call(request).await;
        answer.map(drop).map_err(|error| *error.downcast::<Fenced>().unwrap())
    }

    #[tokio::test]
    async fn who_does_not_lead_reads_and_does_not_write() {
        for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            assert_eq!(outcome(method.clone(), Leadership::default()).await, Err(Fenced::NotLeading));
            assert_eq!(outcome(method, Leadership::always()).await, Ok(()));
        }
        assert_eq!(outcome(Method::GET, Leadership::default()).await, Ok(()));
    }
}
