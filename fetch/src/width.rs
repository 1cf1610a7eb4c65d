//! How many connections a download has: one for each processor at first, and twice as many as long as they mostly wait.
//!
//! A source that is far away or slow makes each of them wait, and more bring more. One that is near keeps the processors busy: bytes of
//! further connections would only lie until they have left the processors' caches, and come out of their files' order, so that they are read
//! back to be hashed.

use std::{num::NonZero, thread::available_parallelism, time::Duration};

/// Between two looks.
pub(crate) const LOOK_PAUSE: Duration = Duration::from_millis(250);
/// Share of its time that a connection writes and hashes, from which on it does not wait. What the kernel does for it is not in it, so a
/// processor may be busy with nothing else.
const BUSY: f64 = 0.25;

/// Of `most`, at first.
pub(crate) fn at_first(most: usize) -> usize {
    available_parallelism().map_or(1, NonZero::get).clamp(1, most.max(1))
}

/// Of `most`, after `open` connections together have worked for `worked` in a pause.
pub(crate) fn next(open: usize, most: usize, worked: Duration) -> usize {
    let is_busy = worked.as_secs_f64() >= BUSY * open as f64 * LOOK_PAUSE.as_secs_f64();
    let next = if is_busy { open } else { 2 * open };
    next.clamp(1, most.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_wait_become_more_and_those_that_work_do_not() {
        let after = |open: usize, worked_ms: u64| next(open, 8, Duration::from_millis(worked_ms));
        assert_eq!([after(2, 0), after(2, 124), after(2, 125), after(2, 500)], [4, 4, 2, 2]);
        assert_eq!([after(4, 249), after(4, 250), after(8, 0), after(6, 0)], [8, 4, 8, 8]);
        assert_eq!([after(0, 0), next(3, 0, Duration::ZERO)], [1, 1], "one at least");
    }

    #[test]
    fn at_first_there_are_no_more_than_may_be() {
        assert_eq!([at_first(1), at_first(0)], [1, 1]);
        assert_eq!(at_first(usize::MAX), available_parallelism().unwrap().get());
    }
}
