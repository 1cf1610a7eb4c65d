//! The service law: how long a request stays in a replica, as a function of how full its KV cache is.
//!
//! A decode step takes a fixed time plus a time proportional to the KV it reads, and prefill takes a share of the
//! steps proportional to throughput. Both together give, for a replica in balance,
//!
//! ```text
//!     residence = alone + slope × kv            (seconds; kv = share of the blocks referenced)
//! ```
//!
//! so KV usage is *not* proportional to load: with a slope of six times `alone`, half the replicas do not use twice
//! the KV each but seven times, or saturate. A rule that divides usage by a target therefore gives away far too much
//! when load is low and flaps around the edge. This module owns the two numbers, learned from what the deployment
//! itself showed, with a prior until it has shown enough. It never decides.

use serde::{Deserialize, Serialize};

use crate::signals::Signals;

/// Seconds after which an observation counts a third: the mix of requests changes within a day.
const MEMORY_SECONDS: f64 = 1200.0;
/// Slope in units of `alone` assumed before usage has varied: the ratio of an 8B model on one H200, whose step goes from
/// 4.9 ms alone to about 35 ms with a full cache.
const PRIOR_SLOPE: f64 = 6.0;
/// Squared coefficient of variation of usage at which observations weigh as much as the prior. Relative, because a mix of
/// short answers fills compute at a few percent of KV: in shares of the cache its usage would never vary enough to tell.
const PRIOR_VARIATION: f64 = 0.1;
/// Variance of usage that weighs as much as the prior whatever the mean: a tenth of the cache tells by itself.
const PRIOR_VARIANCE_MAX: f64 = 0.01;
/// `alone` is at least this share of the mean residence, whatever the regression says.
const ALONE_SHARE_MIN: f64 = 0.05;
/// A window counts as if this much had passed since the one before, at most. Otherwise the first one ever, whose
/// predecessor is as old as the clock, would outweigh the next quarter of an hour.
const LEARNED_AT_ONCE_SECONDS: f64 = 10.0;
/// Fewer requests per window than this say nothing about their mean.
const REQUESTS_MIN: f64 = 10.0;

/// See the module: sums of a weighted least-squares line of residence over usage.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServiceLaw {
    weight: f64,
    kv: f64,
    residence: f64,
    kv_kv: f64,
    kv_residence: f64,
    learned_ms: u64,
}

impl ServiceLaw {
    /// Takes in what the stable window shows.
    pub fn learn(&mut self, signals: &Signals, now_ms: u64) {
        let flow = &signals.stable;
        let capacity = flow.serving * signals.blocks_per_replica;
        let is_telling = flow.through_rate * 60.0 >= REQUESTS_MIN && capacity > 0.0 && flow.running > 0.0;
        if !is_telling || signals.coverage.fresh < signals.coverage.serving {
            return;
        }
        let (kv, residence) = (flow.referenced / capacity, flow.running / flow.through_rate);
        let age = (now_ms.saturating_sub(self.learned_ms) as f64 / 1000.0).min(LEARNED_AT_ONCE_SECONDS);
        let keep = (-age / MEMORY_SECONDS).exp();
        let add = |sum: &mut f64, value: f64| *sum = *sum * keep + value * (1.0 - keep);
        add(&mut self.weight, 1.0);
        add(&mut self.kv, kv);
        add(&mut self.residence, residence);
        add(&mut self.kv_kv, kv * kv);
        add(&mut self.kv_residence, kv * residence);
        self.learned_ms = now_ms;
    }

    /// The line; `None` before anything was seen.
    pub fn line(&self) -> Option<Line> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_kv, mean) = (self.kv / self.weight, self.residence / self.weight);
        let variance = (self.kv_kv / self.weight - mean_kv * mean_kv).max(0.0);
        let covariance = self.kv_residence / self.weight - mean_kv * mean;
        let prior = PRIOR_SLOPE * mean / (1.0 + PRIOR_SLOPE * mean_kv);
        let doubt = (PRIOR_VARIATION * mean_kv * mean_kv).min(PRIOR_VARIANCE_MAX);
        let slope = if variance + doubt > 0.0 { (covariance + doubt * prior) / (variance + doubt) } else { prior };
        let alone_min = ALONE_SHARE_MIN * mean;
        let slope_max = if mean_kv > 0.0 { (mean - alone_min) / mean_kv } else { f64::MAX };
        let slope = slope.clamp(0.0, slope_max);
        Some(Line { alone: mean - slope * mean_kv, slope })
    }
}

/// Residence over usage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Seconds a request stays in an otherwise empty replica.
    pub alone: f64,
    /// Seconds more that it stays when all blocks are referenced.
    pub slope: f64,
}

impl Line {
    /// Seconds a request stays at this usage.
    pub fn residence_seconds(self, kv: f64) -> f64 {
        self.alone + self.slope * kv
    }

    /// Usage at which requests stay this many times as long as alone.
    pub fn kv_at_slowdown(self, times: f64) -> f64 {
        if self.slope > 0.0 { (times - 1.0) * self.alone / self.slope } else { f64::INFINITY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::{Arrivals, Coverage, Flow};

    /// One replica of 1,000 blocks at this usage, through which requests pass in `residence` seconds.
    fn signals(kv: f64, residence: f64) -> Signals {
        let running = kv * 50.0;
        let stable =
            Flow { serving: 1.0, referenced: kv * 1000.0, running, waiting: 0.0, through_rate: running / residence };
        Signals {
            coverage: Coverage { serving: 1, fresh: 1, window_seconds: 60.0, ..Coverage::default() },
            blocks_per_replica: 1000.0,
            stable,
            panic: stable,
            arrivals: Arrivals::default(),
            queue_seconds: 0.0,
            preemptions_stable: 0,
            preemptions_panic: 0,
            ttft_p95_ms: None,
            itl_p95_ms: None,
            start_seconds: 30.0,
            held_requests: 0,
            idle_seconds: 0.0,
            dispersion: 1.0,
        }
    }

    fn learned(points: impl IntoIterator<Item = (f64, f64)>) -> Line {
        let mut law = ServiceLaw::default();
        for (tick, (kv, residence)) in points.into_iter().enumerate() {
            law.learn(&signals(kv, residence), 1_000_000 + tick as u64 * 2000);
        }
        law.line().expect("something was learned")
    }

    #[test]
    fn one_point_alone_gets_the_slope_of_the_prior() {
        let line = learned([(0.5, 8.0)]);
        assert!((line.alone - 2.0).abs() < 1e-9, "{line:?}");
        assert!((line.slope - 12.0).abs() < 1e-9, "{line:?}");
    }

    #[test]
    fn varied_usage_overrules_the_prior() {
        let truth = |kv: f64| 3.0 + 2.0 * kv;
        let line = learned((0..2000).map(|tick| f64::from(tick % 90) / 100.0 + 0.05).map(|kv| (kv, truth(kv))));
        assert!((line.residence_seconds(0.8) - truth(0.8)).abs() < 0.4, "{line:?}");
        assert!((line.alone - 3.0).abs() < 0.4, "{line:?}");
    }

    #[test]
    fn the_line_stays_above_zero_whatever_was_seen() {
        let line = learned((0..200).map(|tick| if tick % 2 == 0 { (0.2, 0.1) } else { (0.9, 90.0) }));
        assert!(line.alone > 0.0 && line.slope >= 0.0, "{line:?}");
        let falling = learned((0..200).map(|tick| if tick % 2 == 0 { (0.2, 9.0) } else { (0.9, 1.0) }));
        assert!(falling.slope >= 0.0, "{falling:?}");
    }

    #[test]
    fn the_first_window_does_not_outweigh_the_next_minutes() {
        // Whatever the clock says: a Unix time is no age.
        const BEGUN_MS: u64 = 1_763_700_000_000;
        let mut law = ServiceLaw::default();
        law.learn(&signals(0.9, 90.0), BEGUN_MS);
        (1..=150).for_each(|tick| law.learn(&signals(0.3, 6.0), BEGUN_MS + tick * 2000));
        // The first counts for ten seconds out of three hundred and ten.
        let line = law.line().unwrap();
        assert!(line.residence_seconds(0.3) < 6.0 + 2.0 * 84.0 * 10.0 / 310.0, "{line:?}");
    }

    #[test]
    fn a_few_requests_or_a_replica_that_cannot_be_seen_teach_nothing() {
        let mut law = ServiceLaw::default();
        let mut few = signals(0.5, 8.0);
        few.stable.through_rate = 0.1;
        law.learn(&few, 1_000_000);
        let mut unseen = signals(0.5, 8.0);
        unseen.coverage.fresh = 0;
        law.learn(&unseen, 1_000_000);
        assert_eq!(law, ServiceLaw::default());
        assert_eq!(law.line(), None);
    }

    #[test]
    fn usage_at_a_slowdown_is_where_requests_stay_that_long() {
        let line = Line { alone: 2.0, slope: 10.0 };
        let kv = line.kv_at_slowdown(2.5);
        assert!((line.residence_seconds(kv) - 5.0).abs() < 1e-9);
        assert_eq!(Line { alone: 2.0, slope: 0.0 }.kv_at_slowdown(2.5), f64::INFINITY);
    }
}
