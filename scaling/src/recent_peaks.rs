//! The memory of what was needed lately: the largest recent need, in bounded space.
//!
//! Owns the peaks of the stabilisation time, as a few buckets. Never decides.

use serde::{Deserialize, Serialize};

/// Buckets the remembered time is cut into; a peak is remembered up to one bucket too long.
const BUCKETS: u64 = 12;
/// Peaks kept at most, also while the remembered time changes.
const PEAKS_KEPT: usize = 16;

/// See the module.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(transparent)]
pub struct RecentPeaks {
    peaks: Vec<Peak>,
}

/// The largest need within one bucket.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Peak {
    first_ms: u64,
    last_ms: u64,
    replicas: u32,
}

impl RecentPeaks {
    /// What has a later date gets this one.
    pub fn not_after(&mut self, now_ms: u64) {
        for peak in &mut self.peaks {
            (peak.first_ms, peak.last_ms) = (peak.first_ms.min(now_ms), peak.last_ms.min(now_ms));
        }
    }

    /// Remembers a need and returns the largest of the last `hold_ms`.
    pub fn keep(&mut self, replicas: u32, hold_ms: u64, now_ms: u64) -> u32 {
        self.peaks.retain(|peak| peak.last_ms.saturating_add(hold_ms) > now_ms);
        match self.peaks.last_mut() {
            Some(peak) if now_ms.saturating_sub(peak.first_ms) < hold_ms / BUCKETS => {
                // Also a smaller need makes the peak younger: forgetting the small one early would break the promise.
                (peak.replicas, peak.last_ms) = (peak.replicas.max(replicas), now_ms);
            }
            _ => self.peaks.push(Peak { first_ms: now_ms, last_ms: now_ms, replicas }),
        }
        if self.peaks.len() > PEAKS_KEPT {
            let oldest = self.peaks.remove(0);
            self.peaks[0].replicas = self.peaks[0].replicas.max(oldest.replicas);
        }
        self.peaks.iter().map(|peak| peak.replicas).max().unwrap_or(replicas)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOLD_MS: u64 = 120_000;

    #[test]
    fn a_peak_is_remembered_for_the_whole_time_and_then_forgotten() {
        let mut hold = RecentPeaks::default();
        assert_eq!(hold.keep(8, HOLD_MS, 0), 8);
        assert_eq!(hold.keep(2, HOLD_MS, HOLD_MS - 1), 8);
        assert_eq!(hold.keep(2, HOLD_MS, HOLD_MS), 2);
    }

    #[test]
    fn a_need_that_lasts_is_as_old_as_its_last_moment() {
        let mut hold = RecentPeaks::default();
        (0..=30).for_each(|tick| assert_eq!(hold.keep(5, HOLD_MS, tick * 2000), 5));
        assert_eq!(hold.keep(1, HOLD_MS, 60_000 + HOLD_MS - 1), 5);
        assert_eq!(hold.keep(1, HOLD_MS, 60_000 + HOLD_MS), 1);
    }

    #[test]
    fn a_peak_is_forgotten_at_most_one_bucket_late_however_often_is_asked() {
        let mut hold = RecentPeaks::default();
        hold.keep(8, HOLD_MS, 0);
        // The bucket of ten seconds that it shares with smaller needs is as old as the last of them.
        let kept_until = (1..100).map(|tick| tick * 2000).find(|now_ms| hold.keep(2, HOLD_MS, *now_ms) == 2);
        assert_eq!(kept_until, Some(HOLD_MS + 8000));
    }

    #[test]
    fn a_clock_that_went_back_keeps_no_peak_longer() {
        let mut hold = RecentPeaks::default();
        hold.keep(8, HOLD_MS, 10_000 * HOLD_MS);
        hold.not_after(0);
        assert_eq!(hold.keep(2, HOLD_MS, HOLD_MS - 1), 8);
        assert_eq!(hold.keep(2, HOLD_MS, HOLD_MS), 2);
    }

    #[test]
    fn its_size_is_bounded_even_when_the_time_grows() {
        let mut hold = RecentPeaks::default();
        let sizes = (0..10_000_u64).map(|tick| {
            let hold_ms = if tick < 5_000 { HOLD_MS } else { 50 * HOLD_MS };
            hold.keep((tick % 7) as u32, hold_ms, tick * 2000);
            hold.peaks.len()
        });
        assert_eq!(sizes.max(), Some(PEAKS_KEPT));
    }
}
