//! The load of each deployment over the last day, in memory and bounded: a point every ten seconds for ten minutes, a point a
//! minute for a day. Pure: samples and times come in by argument.

use std::collections::VecDeque;

use stoker_pages::{
    deployment::{History, Point, Range},
    view::{Load, Replicas},
};

/// Between two samples.
pub(super) const SAMPLE_EVERY_MS: u64 = 10_000;
const MINUTE_MS: u64 = 60_000;
/// Samples kept one by one, and minutes kept.
const FINE: usize = 61;
const MINUTES: usize = 24 * 60;
/// Points of a picture at most: more are not seen.
const POINTS: usize = 360;

/// The load at a moment, 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sample {
    at_seconds: u32,
    wanted: f32,
    serving: f32,
    /// What is not known is no number.
    kv: f32,
    running: f32,
    waiting: f32,
    tokens: f32,
    ttft: f32,
    itl: f32,
}

/// One deployment's.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    fine: VecDeque<Sample>,
    minutes: VecDeque<Sample>,
    /// Of the minute that is not over.
    open: Vec<Sample>,
}

impl Sample {
    pub(super) fn of(replicas: &Replicas, load: &Load, now_ms: u64) -> Self {
        let known = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
        Self {
            at_seconds: u32::try_from(now_ms / 1000).unwrap_or(u32::MAX),
            wanted: replicas.wanted as f32,
            serving: replicas.serving as f32,
            kv: known(load.kv),
            running: load.running as f32,
            waiting: load.waiting as f32,
            tokens: known(load.tokens),
            ttft: known(load.ttft.p95),
            itl: known(load.itl.p95),
        }
    }

    fn at_ms(&self) -> u64 {
        u64::from(self.at_seconds) * 1000
    }

    /// Means, of latencies the worst: a bad second must not vanish in a good hour. Dated as the last one.
    fn merged(samples: &[Self]) -> Option<Self> {
        let last = samples.last()?;
        let mean = |of: fn(&Self) -> f32| {
            let known: Vec<f32> = samples.iter().map(of).filter(|value| !value.is_nan()).collect();
            if known.is_empty() { f32::NAN } else { known.iter().sum::<f32>() / known.len() as f32 }
        };
        let worst = |of: fn(&Self) -> f32| samples.iter().map(of).fold(f32::NAN, f32::max);
        Some(Self {
            at_seconds: last.at_seconds,
            wanted: mean(|one| one.wanted),
            serving: mean(|one| one.serving),
            kv: mean(|one| one.kv),
            running: mean(|one| one.running),
            waiting: mean(|one| one.waiting),
            tokens: mean(|one| one.tokens),
            ttft: worst(|one| one.ttft),
            itl: worst(|one| one.itl),
        })
    }

    fn point(&self) -> Point {
        let known = |value: f32| (!value.is_nan()).then_some(f64::from(value));
        Point {
            at_ms: self.at_ms(),
            wanted: f64::from(self.wanted),
            serving: f64::from(self.serving),
            kv: known(self.kv),
            running: f64::from(self.running),
            waiting: f64::from(self.waiting),
            tokens: known(self.tokens),
            ttft: known(self.ttft),
            itl: known(self.itl),
        }
    }
}

impl Ring {
    /// Takes in a sample. Samples are in order of time; one of the past is dropped.
    pub(super) fn push(&mut self, sample: Sample) {
        if self.fine.back().is_some_and(|last| sample.at_seconds <= last.at_seconds) {
            return;
        }
        let minute = |sample: &Sample| sample.at_ms() / MINUTE_MS;
        if self.open.last().is_some_and(|last| minute(last) != minute(&sample)) {
            self.minutes.extend(Sample::merged(&self.open));
            self.open.clear();
        }
        self.open.push(sample);
        self.fine.push_back(sample);
        while self.fine.len() > FINE {
            self.fine.pop_front();
        }
        while self.minutes.len() > MINUTES {
            self.minutes.pop_front();
        }
    }

    /// What a picture of this range shows.
    pub(super) fn over(&self, range: Range, now_ms: u64) -> History {
        let (kept, step_ms) = match range {
            Range::Minutes => (&self.fine, SAMPLE_EVERY_MS),
            Range::Hour | Range::SixHours | Range::Day => (&self.minutes, MINUTE_MS),
        };
        let from_ms = now_ms.saturating_sub(range.ms() + step_ms);
        let mut samples: Vec<Sample> = kept.iter().filter(|sample| sample.at_ms() >= from_ms).copied().collect();
        if range != Range::Minutes {
            samples.extend(Sample::merged(&self.open));
        }
        let at_once = (range.ms() / step_ms).div_ceil(POINTS as u64).max(1);
        let step_ms = step_ms * at_once;
        // By the clock, not by count: a gap stays a gap, and points stay where they are from look to look.
        let grouped = samples.chunk_by(|a, b| a.at_ms() / step_ms == b.at_ms() / step_ms);
        let points = grouped.filter_map(Sample::merged).map(|sample| sample.point()).collect();
        History { points, step_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START_MS: u64 = 1_763_856_000_000;

    fn sample(at_ms: u64, serving: u32, kv: Option<f64>) -> Sample {
        Sample::of(&Replicas { serving, ..Replicas::default() }, &Load { kv, ..Load::default() }, at_ms)
    }

    /// Two days of samples.
    fn full() -> (Ring, u64) {
        let mut ring = Ring::default();
        let ends_ms = START_MS + 2 * 86_400_000;
        for at_ms in (START_MS..=ends_ms).step_by(SAMPLE_EVERY_MS as usize) {
            ring.push(sample(at_ms, 3, Some(0.5)));
        }
        (ring, ends_ms)
    }

    #[test]
    fn a_day_of_a_deployment_takes_less_than_200_bytes_a_minute() {
        let (ring, _) = full();
        let kept = ring.fine.capacity() + ring.minutes.capacity() + ring.open.capacity();
        let bytes = kept * size_of::<Sample>() + size_of::<Ring>();
        assert!(bytes / MINUTES < 200, "{bytes} bytes");
        assert_eq!((ring.fine.len(), ring.minutes.len()), (FINE, MINUTES));
    }

    #[test]
    fn every_range_has_points_enough_and_not_too_many() {
        let (ring, now_ms) = full();
        let counted = Range::ALL.map(|(range, ..)| ring.over(range, now_ms).points.len());
        assert!(counted[0] >= 60 && counted[1] >= 60 && counted[2] >= 355 && counted[3] >= 355, "{counted:?}");
        assert!(counted.iter().all(|count| *count <= POINTS + 3), "{counted:?}");
    }

    #[test]
    fn a_minute_is_the_mean_of_what_is_known_and_the_worst_latency() {
        let mut ring = Ring::default();
        for (idx, (kv, ttft)) in [(Some(0.2), Some(1.0)), (None, Some(9.0)), (Some(0.4), None)].into_iter().enumerate()
        {
            let mut load = Load { kv, ..Load::default() };
            load.ttft.p95 = ttft;
            ring.push(Sample::of(&Replicas::default(), &load, START_MS + 10_000 * idx as u64));
        }
        let points = ring.over(Range::Hour, START_MS + 30_000).points;
        assert_eq!((points.len(), points[0].ttft), (1, Some(9.0)));
        assert!((points[0].kv.unwrap() - 0.3).abs() < 1e-6, "{points:?}");
    }

    #[test]
    fn a_clock_that_goes_back_adds_nothing() {
        let mut ring = Ring::default();
        ring.push(sample(START_MS, 1, None));
        ring.push(sample(START_MS - 50_000, 9, None));
        ring.push(sample(START_MS, 9, None));
        assert_eq!(ring.over(Range::Minutes, START_MS).points.len(), 1);
    }
}
