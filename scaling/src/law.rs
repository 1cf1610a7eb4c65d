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
/// What was seen before weighs at most as much as a memory full of windows like the present one, times this. Otherwise a mix
/// of short stays, whose windows weigh much, would be believed for hours after it went.
const PAST_MAX: f64 = 3.0;
/// One plus the squared coefficient of variation of how long requests stay: a number in flight strays by that much more.
const STAY_SPREAD: f64 = 1.6;
/// A number in flight is read this often; in between nobody knows it.
const READ_SECONDS: f64 = 2.0;
/// Chance that moved usage weighs this many times what usage itself did against believing a slope.
const DOUBT_OF_CHANCE: f64 = 2.0;
/// Fewer requests per window than this say nothing about their mean.
const REQUESTS_MIN: f64 = 10.0;

/// See the module: sums of a weighted least-squares line of residence over usage. A window errs by a share of what it shows,
/// so it counts by the inverse of its square: otherwise `alone` would be what the longest stays happen to leave over.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServiceLaw {
    weight: f64,
    kv: f64,
    residence: f64,
    kv_kv: f64,
    kv_residence: f64,
    /// Variance of usage that is chance of who was in flight when it was read.
    chance: f64,
    learned_ms: u64,
}

impl ServiceLaw {
    /// What has a later date gets this one.
    pub fn not_after(&mut self, now_ms: u64) {
        self.learned_ms = self.learned_ms.min(now_ms);
    }

    /// Takes in what the stable window of so many seconds shows.
    pub fn learn(&mut self, signals: &Signals, stable_seconds: f64, now_ms: u64) {
        let flow = &signals.stable;
        let capacity = flow.serving * signals.blocks_per_replica;
        let is_telling = flow.through_rate * 60.0 >= REQUESTS_MIN && capacity > 0.0 && flow.running > 0.0;
        if !is_telling || signals.coverage.fresh < signals.coverage.serving {
            return;
        }
        let (kv, residence) = (flow.referenced / capacity, flow.running / flow.through_rate);
        let age = (now_ms.saturating_sub(self.learned_ms) as f64 / 1000.0).min(LEARNED_AT_ONCE_SECONDS);
        let (left, worth) = ((-age / MEMORY_SECONDS).exp(), 1.0 / (residence * residence));
        let keep = if self.weight > 0.0 { left.min(PAST_MAX * worth / self.weight) } else { 0.0 };
        let add = |sum: &mut f64, value: f64| *sum = *sum * keep + value * worth * (1.0 - left);
        add(&mut self.weight, 1.0);
        add(&mut self.kv, kv);
        add(&mut self.residence, residence);
        add(&mut self.kv_kv, kv * kv);
        add(&mut self.kv_residence, kv * residence);
        add(&mut self.chance, kv * kv * chance(signals, stable_seconds));
        self.learned_ms = now_ms;
    }

    /// The line; `None` before anything was seen. Chance moves usage and residence alike and so looks like a slope, however
    /// often it is looked at.
    pub fn line(&self) -> Option<Line> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_kv, mean) = (self.kv / self.weight, self.residence / self.weight);
        let variance = (self.kv_kv / self.weight - mean_kv * mean_kv).max(0.0);
        let covariance = self.kv_residence / self.weight - mean_kv * mean;
        let prior = PRIOR_SLOPE * mean / (1.0 + PRIOR_SLOPE * mean_kv);
        let chance = DOUBT_OF_CHANCE * self.chance / self.weight;
        let doubt = (PRIOR_VARIATION * mean_kv * mean_kv).min(PRIOR_VARIANCE_MAX) + chance;
        let slope = if variance + doubt > 0.0 { (covariance + doubt * prior) / (variance + doubt) } else { prior };
        let alone_min = ALONE_SHARE_MIN * mean;
        let slope_max = if mean_kv > 0.0 { (mean - alone_min) / mean_kv } else { f64::MAX };
        let slope = slope.clamp(0.0, slope_max);
        Some(Line { alone: mean - slope * mean_kv, slope })
    }
}

/// Squared coefficient of variation of the mean number in flight of a window: of as many as went through, or as were seen.
fn chance(signals: &Signals, stable_seconds: f64) -> f64 {
    let flow = &signals.stable;
    let seconds = signals.coverage.window_seconds.min(stable_seconds).max(READ_SECONDS);
    STAY_SPREAD / (seconds * flow.through_rate.min(flow.running / READ_SECONDS))
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
    use crate::{
        held::Holders,
        signals::{Arrivals, Coverage, Flow},
    };

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
            standby: None,
            held_requests: 0,
            holders: Holders::All,
            idle_seconds: 0.0,
            dispersion: 1.0,
            work: None,
        }
    }

    fn learned(points: impl IntoIterator<Item = (f64, f64)>) -> Line {
        let mut law = ServiceLaw::default();
        for (tick, (kv, residence)) in points.into_iter().enumerate() {
            law.learn(&signals(kv, residence), 60.0, 1_000_000 + tick as u64 * 2000);
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
        for first in [90.0, 0.6] {
            let mut law = ServiceLaw::default();
            law.learn(&signals(0.3, first), 60.0, BEGUN_MS);
            (1..=450).for_each(|tick| law.learn(&signals(0.3, 6.0), 60.0, BEGUN_MS + tick * 2000));
            let found = law.line().unwrap().residence_seconds(0.3);
            assert!((found / 6.0 - 1.0).abs() < 0.5, "{found} after {first}");
        }
    }

    /// A replica of 128 blocks on a busy machine, with windows of eight seconds: sequences running, blocks referenced,
    /// requests a second that went through.
    type Window = (f64, f64, f64);
    /// One client that asks for 40 tokens again and again, as recorded.
    const CALM: [Window; 4] = [(0.5, 1.5, 2.25), (0.67, 1.7, 2.38), (0.5, 1.2, 2.33), (0.4, 1.0, 2.38)];
    /// Beside it 24 that ask for 200 tokens, as recorded: the stay grows faster than usage, since they began together.
    const CROWD: [Window; 5] =
        [(5.2, 10.6, 3.15), (12.25, 30.5, 2.94), (18.25, 60.5, 2.38), (23.5, 92.0, 1.9), (21.5, 112.0, 1.4)];

    fn learn_windows(law: &mut ServiceLaw, windows: impl IntoIterator<Item = Window>, from_ms: u64) -> u64 {
        let mut at_ms = from_ms;
        for (running, referenced, through_rate) in windows {
            at_ms += 2000;
            let mut seen = signals(0.0, 1.0);
            seen.blocks_per_replica = 128.0;
            seen.stable = Flow { serving: 1.0, referenced, running, waiting: 0.0, through_rate };
            law.learn(&seen, 8.0, at_ms);
        }
        at_ms
    }

    #[test]
    fn a_crowd_of_long_requests_leaves_what_short_ones_take_alone() {
        let mut law = ServiceLaw::default();
        let at_ms = learn_windows(&mut law, CALM.into_iter().chain(CROWD), 1_000_000);
        let line = law.line().unwrap();
        assert!((0.05..0.3).contains(&line.alone), "{line:?}");
        // A minute after they went the client is again what is known best.
        learn_windows(&mut law, CALM.into_iter().cycle().take(30), at_ms);
        let line = law.line().unwrap();
        assert!((0.1..0.3).contains(&line.alone), "{line:?}");
        assert!(line.kv_at_slowdown(20.0) > 0.5, "{line:?}");
    }

    #[test]
    fn chance_of_who_was_in_flight_is_no_slope() {
        // One client of a third of a second, seen four times a window: now once, now three times, each with as many blocks.
        let seen = |times: f64| (times / 4.0, 2.5 * times / 4.0, 2.3);
        let mut law = ServiceLaw::default();
        learn_windows(&mut law, [1.0, 3.0, 2.0, 1.0].into_iter().cycle().take(200).map(seen), 1_000_000);
        let line = law.line().unwrap();
        assert!(line.alone > 0.6 * 0.7 / 4.0 / 2.3, "{line:?}");
        assert!(line.kv_at_slowdown(20.0) > 0.2, "{line:?}");
    }

    #[test]
    fn a_mix_that_stays_longer_is_believed_within_twice_the_memory() {
        let mut law = ServiceLaw::default();
        let at = |tick: u64| 1_000_000 + tick * 2000;
        (0..1800).for_each(|tick| law.learn(&signals(0.3, 0.1), 60.0, at(tick)));
        let ticks = MEMORY_SECONDS as u64;
        (1800..1800 + ticks).for_each(|tick| law.learn(&signals(0.3, 50.0), 60.0, at(tick)));
        let found = law.line().unwrap().residence_seconds(0.3);
        assert!(found > 25.0, "{found}");
    }

    #[test]
    fn a_few_requests_or_a_replica_that_cannot_be_seen_teach_nothing() {
        let mut law = ServiceLaw::default();
        let mut few = signals(0.5, 8.0);
        few.stable.through_rate = 0.1;
        law.learn(&few, 60.0, 1_000_000);
        let mut unseen = signals(0.5, 8.0);
        unseen.coverage.fresh = 0;
        law.learn(&unseen, 60.0, 1_000_000);
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
