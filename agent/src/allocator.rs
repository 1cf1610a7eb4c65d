//! Gives memory back to the system that large bodies leave behind. glibc keeps what was freed in its heaps, where a storm of long
//! prompts leaves some hundred megabytes for good: a buffer raises the size from which it maps buffers by themselves when it is
//! freed. Fixing that size would map every large buffer of a step anew, so what is free is given back instead, when a
//! storm is over. Other C libraries give it back themselves.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// A body of this size leaves something behind.
const LARGE_BYTES: usize = 1 << 20;
/// Without a large body for so long, a storm is over.
const QUIET: Duration = Duration::from_secs(1);

/// Large bodies so far.
static N_LARGE: AtomicU64 = AtomicU64::new(0);

/// To be called for every body that was read.
pub(crate) fn note_body(n_bytes: usize) {
    if n_bytes < LARGE_BYTES {
        return;
    }
    let number = N_LARGE.fetch_add(1, Ordering::Relaxed) + 1;
    tokio::spawn(async move {
        tokio::time::sleep(QUIET).await;
        if N_LARGE.load(Ordering::Relaxed) == number {
            let _ = tokio::task::spawn_blocking(give_back).await;
        }
    });
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn give_back() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: glibc's own function by its own signature, safe to call from any thread; it takes a number and keeps nothing.
    let gave = unsafe { malloc_trim(0) };
    tracing::debug!(gave, "free memory was given back to the system");
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn give_back() {}
