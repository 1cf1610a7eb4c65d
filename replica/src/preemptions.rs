//! How many of a counter's events fell into the last minute. Bounded; reads no clock.

use std::collections::VecDeque;

const WINDOW_MS: u64 = 60_000;
/// Counts kept at most are one for each of these.
const SAMPLE_EVERY_MS: u64 = 5_000;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LastMinute {
    /// Counter values at moments of the last minute, oldest first.
    samples: VecDeque<(u64, u64)>,
    newest: u64,
}

impl LastMinute {
    /// Takes in the counter's value. Values never fall.
    pub(crate) fn take(&mut self, count: u64, now_ms: u64) {
        self.newest = count;
        let rested = |(at_ms, _): &(u64, u64)| now_ms.saturating_sub(*at_ms) >= SAMPLE_EVERY_MS;
        if self.samples.back().is_none_or(rested) {
            self.samples.push_back((now_ms, count));
        }
        while self.samples.len() > 1 && now_ms.saturating_sub(self.samples[0].0) > WINDOW_MS {
            self.samples.pop_front();
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.samples.front().map_or(0, |(_, oldest)| self.newest.saturating_sub(*oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_minute_counts() {
        let mut minute = LastMinute::default();
        let mut take = |seconds: u64, count: u64| {
            minute.take(count, 1000 * seconds);
            minute.count()
        };
        assert_eq!([take(0, 0), take(2, 7), take(58, 10), take(120, 10), take(122, 13)], [0, 7, 10, 0, 3]);
    }

    #[test]
    fn its_size_is_bounded() {
        let mut minute = LastMinute::default();
        (0..1000).for_each(|half| minute.take(half, 500 * half));
        assert!(minute.samples.len() <= 14);
    }
}
