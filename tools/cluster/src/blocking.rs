//! Lets the synchronous API of this crate use the asynchronous Kubernetes client, from any thread: also from one that
//! belongs to a tokio runtime, where `block_on` would panic.

use std::{future::Future, io, time::Duration};

use kube::runtime::utils::Backoff;
use tokio::runtime::{Builder, Runtime};

use crate::error::ClusterError;

/// Runs `future` to its end on a thread of its own.
pub(crate) fn block_on<F>(future: F) -> F::Output
where
    F: Future + Send,
    F::Output: Send,
{
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime starts");
    let output = enter(&runtime, future);
    runtime.shutdown_background();
    output
}

/// Runs `future` to its end on `runtime`, whatever thread this is.
pub(crate) fn enter<F>(runtime: &Runtime, future: F) -> F::Output
where
    F: Future + Send,
    F::Output: Send,
{
    std::thread::scope(|scope| scope.spawn(|| runtime.block_on(future)).join().expect("the future does not panic"))
}

/// A runtime for a long-lived part of the cluster.
pub(crate) fn start_runtime(name: &str) -> Result<Runtime, ClusterError> {
    let start = || -> io::Result<Runtime> {
        Builder::new_multi_thread().worker_threads(2).thread_name(name).enable_all().build()
    };
    start().map_err(ClusterError::process("start threads of", name))
}

/// Watches are taken up again twice a second: the API server is near, and fault tests stop it on purpose.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SteadyRetry;

impl Iterator for SteadyRetry {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(500))
    }
}

impl Backoff for SteadyRetry {
    fn reset(&mut self) {}
}
