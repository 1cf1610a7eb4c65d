//! Lets the synchronous API of this crate use the asynchronous Kubernetes client, from any thread: also from one that
//! belongs to a tokio runtime, where `block_on` would panic.

use std::future::Future;

/// Runs `future` to its end on a thread of its own.
pub(crate) fn block_on<F>(future: F) -> F::Output
where
    F: Future + Send,
    F::Output: Send,
{
    std::thread::scope(|scope| {
        let run = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime starts");
            runtime.block_on(future)
        };
        scope.spawn(run).join().expect("the future does not panic")
    })
}
