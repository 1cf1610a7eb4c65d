//! How fast a counter rises, over the last five to ten seconds. Three marks, no history; reads no clock.

/// Between two marks.
const MARK_EVERY_MS: u64 = 5_000;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rate {
    /// Before the recent one.
    earlier: Option<Mark>,
    recent: Option<Mark>,
    newest: Option<Mark>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Mark {
    at_ms: u64,
    count: u64,
}

impl Rate {
    /// Takes in the counter's value. Values never fall.
    pub(crate) fn take(&mut self, count: u64, now_ms: u64) {
        let mark = Mark { at_ms: now_ms, count };
        if self.recent.is_none_or(|recent| now_ms.saturating_sub(recent.at_ms) >= MARK_EVERY_MS) {
            self.earlier = self.recent;
            self.recent = Some(mark);
        }
        self.newest = Some(mark);
    }

    /// A second; `None` before two values.
    pub(crate) fn per_second(&self) -> Option<f64> {
        let (from, to) = (self.earlier.or(self.recent)?, self.newest?);
        per_second(to.count.saturating_sub(from.count), to.at_ms.saturating_sub(from.at_ms))
    }
}

/// So many in so many milliseconds; `None` in no time.
pub(crate) fn per_second(count: u64, ms: u64) -> Option<f64> {
    (ms > 0).then(|| count as f64 * 1000.0 / ms as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_seconds_count_and_what_was_before_does_not() {
        let mut rate = Rate::default();
        let mut take = |second: u64, count: u64| {
            rate.take(count, 1000 * second);
            rate.per_second()
        };
        assert_eq!([take(0, 1_000), take(2, 1_200)], [None, Some(100.0)]);
        for second in 3..20 {
            take(second, 1_200 + 10 * (second - 2));
        }
        assert_eq!(take(20, 1_380), Some(10.0), "the burst at the beginning is over");
    }

    #[test]
    fn silence_is_no_rate_of_its_own() {
        let mut rate = Rate::default();
        rate.take(0, 0);
        rate.take(100, 10_000);
        rate.take(700, 70_000);
        assert_eq!(rate.per_second(), Some(10.0));
    }
}
