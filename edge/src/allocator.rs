//! Gives memory back to the system that large bodies and many connections leave behind. glibc keeps what was freed in its heaps,
//! where a storm of long prompts leaves some hundred megabytes for good: a buffer raises the size from which it maps buffers by
//! themselves when it is freed. Fixing that size would map every large buffer of a step anew, so what is free is given back instead, when a
//! storm is over, and not before: a long body that came behind another one would fault in each of its pages again, a third of what it takes to
//! refuse it. Of all its heaps glibc gives back the end of the first only, and there is one for each thread that asks at a
//! bad moment: so there is to be one. Other C libraries give it back themselves.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

/// A body of this size leaves something behind.
const LARGE_BYTES: usize = 256 << 10;
/// Memory of a connection, about.
const CONNECTION_BYTES: usize = 20 << 10;
/// What may be free before it is given back: less is soon used again.
const MUCH_BYTES: usize = 8 << 20;
/// What may be free at the heap's end while a storm goes on: a few of the largest bodies and what is made of them. It is also the largest size
/// that glibc takes for buffers of the heap, which it comes to by itself when it frees one of them.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const KEPT_BYTES: std::ffi::c_int = 32 << 20;
/// How often it is looked whether a storm is over.
const QUIET: Duration = Duration::from_secs(1);

/// Bytes that were used and may be free, since the last time that free memory was given back.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Makes all threads use one heap, of which large buffers are parts and whose end stays until storms are over. To be called before there are others.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub fn use_one_heap() {
    /// glibc's numbers for the most heaps that there may be, for the size from which a buffer is mapped by itself, and for what may be free at the
    /// heap's end.
    const M_ARENA_MAX: std::ffi::c_int = -8;
    const M_MMAP_THRESHOLD: std::ffi::c_int = -3;
    const M_TRIM_THRESHOLD: std::ffi::c_int = -1;
    unsafe extern "C" {
        fn mallopt(param: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
    }
    for (param, value) in [(M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, KEPT_BYTES), (M_TRIM_THRESHOLD, KEPT_BYTES)] {
        // SAFETY: glibc's own function by its own signature; it takes two numbers and keeps them.
        let is_set = unsafe { mallopt(param, value) };
        if is_set == 0 {
            tracing::warn!(param, value, "memory of large bodies may stay with this process");
        }
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub fn use_one_heap() {}

/// To be called for every body that was read.
pub fn note_body(n_bytes: usize) {
    if n_bytes >= LARGE_BYTES {
        USED.fetch_add(n_bytes, Ordering::Relaxed);
    }
}

/// To be called for every connection that was closed.
pub fn note_connection() {
    USED.fetch_add(CONNECTION_BYTES, Ordering::Relaxed);
}

/// Gives memory back whenever a storm is over: much was used, and in the last second next to nothing. Runs for ever.
pub async fn give_back_after_storms() {
    let mut before = 0;
    loop {
        tokio::time::sleep(QUIET).await;
        let used = USED.load(Ordering::Relaxed);
        if is_over(before, used) {
            USED.fetch_sub(used, Ordering::Relaxed);
            let _ = tokio::task::spawn_blocking(give_back).await;
        }
        before = USED.load(Ordering::Relaxed);
    }
}

/// Whether a storm is over, by what was used until a second ago and until now.
fn is_over(before: usize, now: usize) -> bool {
    now >= MUCH_BYTES && now - before < MUCH_BYTES / 8
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_when_much_was_used_and_no_more_is() {
        const MB: usize = 1 << 20;
        for (before, now, over) in [
            (0, 0, false),
            // Little: a body of a megabyte every now and then.
            (MB, MB, false),
            // The storm goes on.
            (0, 8 * MB, false),
            (80 * MB, 88 * MB, false),
            (88 * MB, 88 * MB, true),
            // Somebody goes on with his usual work.
            (88 * MB, 88 * MB + MB / 2, true),
        ] {
            assert_eq!(is_over(before, now), over, "{before} {now}");
        }
    }
}
