//! How long a container that ended waits before it is started again: at once the first time, then 10 s, 20 s, 40 s up
//! to 5 minutes, and from the beginning after a long good run. A kubelet's rule. Pure.

use std::time::Duration;

/// Growth of the waits.
#[derive(Clone, Copy, Debug)]
pub struct BackoffLimits {
    /// The first wait that is not zero.
    pub base: Duration,
    /// The longest wait.
    pub longest: Duration,
}

impl Default for BackoffLimits {
    fn default() -> Self {
        Self { base: Duration::from_secs(10), longest: Duration::from_secs(300) }
    }
}

/// The waits of one container.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    limits: BackoffLimits,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(limits: BackoffLimits) -> Self {
        Self { limits, next: Duration::ZERO }
    }

    /// The wait after a run that lasted `ran`.
    pub(crate) fn after(&mut self, ran: Duration) -> Duration {
        if ran >= self.limits.longest * 2 {
            self.next = Duration::ZERO;
        }
        let wait = self.next;
        self.next = if wait.is_zero() { self.limits.base } else { (wait * 2).min(self.limits.longest) };
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(runs: &[u64]) -> Vec<u64> {
        let mut backoff = Backoff::new(BackoffLimits::default());
        runs.iter().map(|&ran| backoff.after(Duration::from_secs(ran)).as_secs()).collect()
    }

    #[test]
    fn waits_double_up_to_five_minutes() {
        assert_eq!(waits(&[0; 8]), [0, 10, 20, 40, 80, 160, 300, 300]);
    }

    #[test]
    fn a_long_good_run_starts_over() {
        assert_eq!(waits(&[0, 0, 0, 600, 0]), [0, 10, 20, 0, 10]);
    }
}
