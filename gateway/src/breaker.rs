//! Whether a replica answered when it was asked last: a circuit breaker. After some failures in a row nobody is sent there for a
//! while, each time twice as long. One answer closes it. Pure: its owner says what time it is.

/// Failures in a row that open it.
const FAILURES: u32 = 3;
const FIRST_PAUSE_MS: u64 = 1_000;
const LONGEST_PAUSE_MS: u64 = 30_000;

/// See the module.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Breaker {
    failures: u32,
    /// Until when nobody is sent there.
    open_until_ms: u64,
}

impl Breaker {
    /// Whether requests may go there.
    pub fn admits(&self, now_ms: u64) -> bool {
        now_ms >= self.open_until_ms
    }

    /// It answered.
    pub fn answered(&mut self) {
        *self = Self::default();
    }

    /// It did not.
    pub fn failed(&mut self, now_ms: u64) {
        // Requests that were on their way when it opened say nothing new.
        if !self.admits(now_ms) {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        if let Some(opened) = self.failures.checked_sub(FAILURES) {
            self.open_until_ms = now_ms + (FIRST_PAUSE_MS << opened.min(5)).min(LONGEST_PAUSE_MS);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_three_failures_in_a_row_and_each_time_for_longer() {
        let mut breaker = Breaker::default();
        breaker.failed(0);
        breaker.failed(0);
        breaker.answered();
        breaker.failed(10);
        breaker.failed(10);
        assert!(breaker.admits(10), "two in a row");
        let mut now_ms = 10;
        for pause_ms in [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000] {
            breaker.failed(now_ms);
            assert!(!breaker.admits(now_ms + pause_ms - 1) && breaker.admits(now_ms + pause_ms), "{pause_ms}");
            breaker.failed(now_ms + 1);
            now_ms += pause_ms;
        }
        breaker.answered();
        assert_eq!(breaker, Breaker::default());
    }
}
