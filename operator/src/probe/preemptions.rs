//! Preemptions of one agent within the last minute, from the counter that it reports. Bounded; reads no clock.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use stoker_crds::contract::LoadReport;

const WINDOW: Duration = Duration::from_secs(60);
/// Counts kept at most are one for each of these.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Preemptions {
    start_id: String,
    /// Counter values at moments of the last minute, oldest first.
    samples: VecDeque<(Instant, u64)>,
    newest: u64,
}

impl Preemptions {
    /// Takes in a believed report. A new process counts from zero; what was counted before we looked is left out.
    pub(super) fn take(&mut self, report: &LoadReport, now: Instant) {
        if self.start_id != report.start_id {
            let first = if self.start_id.is_empty() { report.preemptions } else { 0 };
            *self = Self { start_id: report.start_id.clone(), samples: [(now, first)].into(), newest: 0 };
        }
        self.newest = report.preemptions;
        if self.samples.back().is_none_or(|(at, _)| now.duration_since(*at) >= SAMPLE_EVERY) {
            self.samples.push_back((now, report.preemptions));
        }
        while self.samples.len() > 1 && now.duration_since(self.samples[0].0) > WINDOW {
            self.samples.pop_front();
        }
    }

    /// Preemptions within the last minute.
    pub(super) fn last_minute(&self) -> u64 {
        self.samples.front().map_or(0, |(_, oldest)| self.newest.saturating_sub(*oldest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::tests::report;

    #[test]
    fn only_the_last_minute_of_one_process_counts() {
        let (mut preemptions, begun) = (Preemptions::default(), Instant::now());
        let mut take = |seconds: u64, start_id: &str, count: u64| {
            let report = LoadReport { start_id: start_id.into(), preemptions: count, ..report() };
            preemptions.take(&report, begun + Duration::from_secs(seconds));
            preemptions.last_minute()
        };
        assert_eq!(take(0, "a", 500), 0, "counted before we looked");
        assert_eq!(take(2, "a", 507), 7);
        assert_eq!(take(58, "a", 510), 10);
        assert_eq!(take(120, "a", 510), 0);
        assert_eq!(take(122, "b", 3), 3, "a new process counts from zero");
    }

    #[test]
    fn its_size_is_bounded() {
        let (mut preemptions, begun) = (Preemptions::default(), Instant::now());
        (0..1000).for_each(|half| preemptions.take(&report(), begun + Duration::from_millis(500 * half)));
        assert!(preemptions.samples.len() <= 14);
    }
}
