//! How long to wait before something that failed is tried again. Knows nothing of what is tried.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Of a watch. An API server that comes back has a few of them from us; what it must not find is an operator that sleeps
/// for a minute more. Two attempts pass before such a watch is whole: one learns that its version is too old, one lists.
const WATCH: Pause = Pause { first: Duration::from_millis(200), longest: Duration::from_secs(5) };

/// Twice as long after each failure in a row.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// After the first failure.
    pub first: Duration,
    /// Never longer.
    pub longest: Duration,
}

impl Pause {
    /// After so many failures in a row.
    pub fn after(self, failures: u32) -> Duration {
        self.first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(self.longest)
    }
}

/// Pauses of one watch. It has recovered as soon as anything arrives.
#[derive(Debug, Default)]
pub struct WatchPauses {
    failures: u32,
}

impl Iterator for WatchPauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.failures = self.failures.saturating_add(1);
        Some(WATCH.after(self.failures))
    }
}

impl Backoff for WatchPauses {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Of the stream that joins all watches: none. Each watch pauses for itself, and a pause here would keep back what the
/// watches that are whole have to say. The library's default grows to half a minute and remembers errors for two.
#[derive(Clone, Copy, Debug)]
pub struct NoPause;

impl Iterator for NoPause {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::ZERO)
    }
}

impl Backoff for NoPause {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_tried_again_at_least_every_five_seconds_and_starts_over_when_something_arrives() {
        let mut pauses = WatchPauses::default();
        let millis: Vec<u128> = pauses.by_ref().take(7).map(|pause| pause.as_millis()).collect();
        assert_eq!(millis, [200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(pauses.nth(100), Some(Duration::from_secs(5)));
        pauses.reset();
        assert_eq!(pauses.next(), Some(Duration::from_millis(200)));
    }
}
