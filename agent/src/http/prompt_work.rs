//! Where prompts are made: parsing a body, rendering a template and tokenizing a text take from microseconds to seconds. What
//! takes longer runs a few at a time on threads of its own, so that probes and streams are served meanwhile and memory stays
//! bounded, and ends early when its client has left. Knows neither templates nor tokens.

use std::{
    num::NonZero,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::Semaphore;

use crate::http::error::ApiError;

/// A prompt made of less is ready sooner than another thread would begin: about five milliseconds at most.
const INLINE_BYTES: usize = 16 * 1024;

/// Prompts that are made at once; more wait in line, and leave it with their clients.
static PLACES: LazyLock<Semaphore> = LazyLock::new(|| {
    let n_cpus = std::thread::available_parallelism().map_or(2, NonZero::get);
    Semaphore::new(n_cpus.clamp(2, 4))
});

/// Tells the work when nobody waits for it any more.
#[derive(Default)]
struct Leaving(Arc<AtomicBool>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does work on a prompt made of `n_bytes`. The work can ask whether it is abandoned, which it is when this future is dropped.
pub(crate) async fn run<T: Send + 'static>(
    n_bytes: usize,
    work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if n_bytes <= INLINE_BYTES {
        return work(&|| false);
    }
    let place = PLACES.acquire().await.expect("the line is never closed");
    let leaving = Leaving::default();
    let left = Arc::clone(&leaving.0);
    let working = tokio::task::spawn_blocking(move || {
        let _place = place;
        work(&|| left.load(Ordering::Relaxed))
    });
    working.await.map_err(|error| ApiError::engine_failed(&format!("making the prompt failed: {error}")))?
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn work_whose_client_left_hears_of_it() {
        let (tell, told) = mpsc::channel();
        let work = move |is_abandoned: &dyn Fn() -> bool| {
            tell.send("began").unwrap();
            while !is_abandoned() {
                std::thread::sleep(Duration::from_millis(1));
            }
            tell.send("ended").unwrap();
            Ok(())
        };
        let running = tokio::spawn(run(INLINE_BYTES + 1, work));
        let told = tokio::task::spawn_blocking(move || {
            assert_eq!(told.recv(), Ok("began"));
            running.abort();
            told.recv_timeout(Duration::from_secs(20))
        });
        assert_eq!(told.await.unwrap(), Ok("ended"));
    }

    #[tokio::test]
    async fn work_that_waits_for_a_place_is_gone_with_its_client() {
        let all = PLACES.acquire_many(PLACES.available_permits() as u32).await.unwrap();
        let waiting = tokio::time::timeout(
            Duration::from_millis(20),
            run(INLINE_BYTES + 1, |_| -> Result<(), _> { panic!("its client has left") }),
        );
        assert!(waiting.await.is_err(), "it waits for a place");
        drop(all);
        assert_eq!(run(INLINE_BYTES + 1, |_| Ok(1)).await, Ok(1));
    }
}
