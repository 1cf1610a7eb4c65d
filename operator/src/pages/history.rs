//! A deployment's load as a sample, and samples as the points of a picture. Pure: times come in by argument.

use stoker_crds::history::LoadSample;
use stoker_pages::{
    deployment::{Point, Range},
    view::{Load, Replicas},
};
use stoker_replica::history::{Ring, SAMPLE_EVERY, summed_up};

/// Points of a picture at most: more are not seen.
const POINTS: u64 = 240;

/// How it is now.
pub(super) fn sample(replicas: &Replicas, load: &Load, now_ms: u64) -> LoadSample {
    let known = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
    // Of replicas that serve and cannot be read nobody knows what they do: it is not nothing.
    let read = |count: u32| (load.fresh > 0 || replicas.serving == 0).then_some(f64::from(count));
    LoadSample {
        at_seconds: seconds(now_ms),
        wanted: replicas.wanted as f32,
        serving: replicas.serving as f32,
        kv: known(load.kv),
        running: known(read(load.running)),
        waiting: known(read(load.waiting)),
        tokens: known(load.tokens),
        ttft: known(load.ttft.p95),
        itl: known(load.itl.p95),
    }
}

/// As samples count time.
pub(super) fn seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

/// What a picture of this range shows: its points, and the milliseconds between two of them.
pub(super) fn over(ring: &Ring, range: Range, now_ms: u64) -> (Vec<Point>, u64) {
    let (kept, step_ms): (Vec<LoadSample>, u64) = match range {
        Range::Minutes => (ring.fine().collect(), SAMPLE_EVERY.as_secs() * 1000),
        Range::Hour | Range::SixHours | Range::Day => (ring.minutes().collect(), 60_000),
    };
    let at_once = (range.ms() / step_ms).div_ceil(POINTS).max(1);
    let from_ms = now_ms.saturating_sub(range.ms() + step_ms);
    let step_ms = step_ms * at_once;
    let seen: Vec<LoadSample> = kept.into_iter().filter(|sample| at_ms(sample) >= from_ms).collect();
    // By the clock, not by count: a gap stays a gap, and points stay where they are from look to look.
    let grouped = seen.chunk_by(|a, b| at_ms(a) / step_ms == at_ms(b) / step_ms);
    (grouped.filter_map(summed_up).map(|sample| point(&sample)).collect(), step_ms)
}

fn at_ms(sample: &LoadSample) -> u64 {
    u64::from(sample.at_seconds) * 1000
}

fn point(sample: &LoadSample) -> Point {
    let known = |value: f32| (!value.is_nan()).then_some(f64::from(value));
    Point {
        at_ms: at_ms(sample),
        wanted: known(sample.wanted),
        serving: known(sample.serving),
        kv: known(sample.kv),
        running: known(sample.running),
        waiting: known(sample.waiting),
        tokens: known(sample.tokens),
        ttft: known(sample.ttft),
        itl: known(sample.itl),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START_MS: u64 = 1_763_856_000_000;

    #[test]
    fn every_range_has_points_enough_and_not_too_many() {
        let (mut ring, now_ms) = (Ring::default(), START_MS + 2 * 86_400_000);
        for at_ms in (START_MS..=now_ms).step_by(SAMPLE_EVERY.as_millis() as usize) {
            ring.push(sample(&Replicas::default(), &Load::default(), at_ms));
        }
        let counted = Range::ALL.map(|(range, ..)| over(&ring, range, now_ms).0.len());
        assert!(counted[0] >= 60 && counted[1] >= 60 && counted[2] >= 175 && counted[3] >= 235, "{counted:?}");
        assert!(counted.iter().all(|count| *count <= POINTS as usize + 3), "{counted:?}");
    }

    #[test]
    fn what_replicas_that_cannot_be_read_do_is_not_known_and_none_do_nothing() {
        let point = |serving, fresh| {
            let (replicas, load) = (Replicas { serving, ..Replicas::default() }, Load { fresh, ..Load::default() });
            point(&sample(&replicas, &load, START_MS))
        };
        assert_eq!((point(2, 0).running, point(2, 0).serving), (None, Some(2.0)));
        assert_eq!((point(2, 1).running, point(0, 0).running), (Some(0.0), Some(0.0)));
    }
}
