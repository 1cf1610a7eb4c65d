//! Readings over the last minute: latency percentiles and prefill speed. Time comes in by argument, in whole seconds
//! since the engine started.

/// Seconds a reading counts.
const WINDOW_SECONDS: u64 = 60;
/// Histogram buckets grow by a tenth from 0.1 ms: 160 reach 400 s, and a percentile is at most 10 % above the truth.
const N_BUCKETS: usize = 160;
const FIRST_BOUND_SECONDS: f64 = 1e-4;
const GROWTH: f64 = 1.1;

/// Latencies of the last minute, counted per second and bucket: memory is fixed however many come.
#[derive(Clone, Debug)]
pub(crate) struct LatencyWindow {
    seconds: Vec<LatencySecond>,
}

#[derive(Clone, Debug)]
struct LatencySecond {
    second: u64,
    counts: [u32; N_BUCKETS],
}

impl LatencyWindow {
    pub(crate) fn new() -> Self {
        let empty = LatencySecond { second: 0, counts: [0; N_BUCKETS] };
        Self { seconds: vec![empty; WINDOW_SECONDS as usize] }
    }

    pub(crate) fn record(&mut self, now: u64, latency_seconds: f64) {
        let slot = &mut self.seconds[(now % WINDOW_SECONDS) as usize];
        if slot.second != now {
            *slot = LatencySecond { second: now, counts: [0; N_BUCKETS] };
        }
        slot.counts[bucket_of(latency_seconds)] += 1;
    }

    /// Upper bound of the bucket that holds this percentile.
    pub(crate) fn percentile(&self, percent: u64, now: u64) -> Option<f64> {
        let fresh = || self.seconds.iter().filter(|slot| is_fresh(slot.second, now));
        let total: u64 = fresh().flat_map(|slot| slot.counts).map(u64::from).sum();
        let rank = (total * percent).div_ceil(100);
        let mut seen = 0;
        (0..N_BUCKETS)
            .find(|idx| {
                seen += fresh().map(|slot| u64::from(slot.counts[*idx])).sum::<u64>();
                total > 0 && seen >= rank
            })
            .map(bound_of)
    }
}

/// Prefill speed over the last minute.
#[derive(Clone, Debug)]
pub(crate) struct RateWindow {
    seconds: Vec<RateSecond>,
}

#[derive(Clone, Copy, Debug, Default)]
struct RateSecond {
    second: u64,
    tokens: f64,
    busy_seconds: f64,
}

impl RateWindow {
    pub(crate) fn new() -> Self {
        Self { seconds: vec![RateSecond::default(); WINDOW_SECONDS as usize] }
    }

    /// `tokens` took `busy_seconds`.
    pub(crate) fn record(&mut self, now: u64, tokens: f64, busy_seconds: f64) {
        let slot = &mut self.seconds[(now % WINDOW_SECONDS) as usize];
        if slot.second != now {
            *slot = RateSecond { second: now, ..RateSecond::default() };
        }
        slot.tokens += tokens;
        slot.busy_seconds += busy_seconds;
    }

    /// Tokens a second of work; `None` without work.
    pub(crate) fn per_second(&self, now: u64) -> Option<f64> {
        let fresh = self.seconds.iter().filter(|slot| is_fresh(slot.second, now));
        let (tokens, busy) = fresh.fold((0.0, 0.0), |(t, b), slot| (t + slot.tokens, b + slot.busy_seconds));
        (busy > 0.0).then(|| tokens / busy)
    }
}

fn is_fresh(second: u64, now: u64) -> bool {
    now.saturating_sub(second) < WINDOW_SECONDS
}

fn bucket_of(latency_seconds: f64) -> usize {
    let steps = (latency_seconds / FIRST_BOUND_SECONDS).ln() / GROWTH.ln();
    (steps.ceil().max(0.0) as usize).min(N_BUCKETS - 1)
}

fn bound_of(bucket: usize) -> f64 {
    FIRST_BOUND_SECONDS * GROWTH.powi(bucket as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_at_most_a_tenth_above_the_truth() {
        let mut window = LatencyWindow::new();
        for n in 1..=100 {
            window.record(1, f64::from(n) * 0.01);
        }
        let p95 = window.percentile(95, 1).unwrap();
        assert!((0.95..0.95 * GROWTH).contains(&p95), "{p95}");
    }

    #[test]
    fn readings_older_than_a_minute_do_not_count() {
        let mut window = LatencyWindow::new();
        window.record(10, 5.0);
        assert!(window.percentile(95, 69).is_some());
        assert_eq!(window.percentile(95, 70), None);
        window.record(70, 0.001);
        assert!(window.percentile(95, 70).unwrap() < 0.01, "second 70 reuses the place of second 10");
    }

    #[test]
    fn no_reading_is_no_percentile_and_no_speed() {
        assert_eq!(LatencyWindow::new().percentile(95, 5), None);
        assert_eq!(RateWindow::new().per_second(5), None);
    }

    #[test]
    fn speed_counts_busy_time_only() {
        let mut window = RateWindow::new();
        window.record(1, 100.0, 0.5);
        window.record(40, 100.0, 0.5);
        assert_eq!(window.per_second(41), Some(200.0));
        assert_eq!(window.per_second(70), Some(200.0));
        assert_eq!(window.per_second(130), None);
    }

    #[test]
    fn absurd_latencies_stay_inside_the_histogram() {
        assert_eq!((bucket_of(0.0), bucket_of(-1.0), bucket_of(1e9)), (0, 0, N_BUCKETS - 1));
    }
}
