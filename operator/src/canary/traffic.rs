//! What agents said of the requests of one side of a comparison, the canary's or the older replicas', added up. Pure.
//!
//! An agent says a median of its last minute; here is the geometric mean of these, weighted by the requests that ended meanwhile. Medians, because
//! a replica with few requests has no other percentile that could be compared with that of one with many. What was said long ago, in
//! requests, counts less and less: a cache that was cold at first is forgotten.

use stoker_crds::contract::LoadReport;

/// Requests after which what was said before counts half.
const HALF_LIFE: f64 = 100.0;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    /// Requests that ended.
    pub requests: u64,
    /// Of these, those that ended in an error.
    pub failed: u64,
    /// Those whose latencies are known.
    pub timed: u64,
    ttft: LogMean,
    itl: LogMean,
}

/// What happened in a replica between two looks at it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Requests that ended.
    pub ended: u64,
    /// Of these, those that ended in an error.
    pub failed: u64,
    /// Median time to first token of its last minute, in seconds.
    pub ttft_seconds: Option<f64>,
    /// Median inter-token latency of its last minute, in seconds.
    pub itl_seconds: Option<f64>,
}

impl Sample {
    /// Between two reports of one replica. A process that replaced another one counts from zero; of one that is seen for the first time
    /// nobody knows when what it counts was.
    pub fn between(before: Option<&LoadReport>, now: &LoadReport) -> Self {
        let failed = |report: &LoadReport| report.failed.unwrap_or_default();
        let (ended_before, failed_before) = match before {
            None => (now.finished, failed(now)),
            Some(before) if before.start_id == now.start_id => (before.finished, failed(before)),
            Some(_) => (0, 0),
        };
        let ended = now.finished.saturating_sub(ended_before);
        Self {
            ended,
            failed: failed(now).saturating_sub(failed_before).min(ended),
            ttft_seconds: now.ttft_p50_seconds,
            itl_seconds: now.itl_p50_seconds,
        }
    }

    /// The same without latencies.
    pub fn untimed(self) -> Self {
        Self { ttft_seconds: None, itl_seconds: None, ..self }
    }
}

impl Tally {
    /// Takes in what happened in one replica.
    pub fn note(&mut self, sample: Sample) {
        self.requests = self.requests.saturating_add(sample.ended);
        self.failed = self.failed.saturating_add(sample.failed);
        self.timed = self.timed.saturating_add(if sample.ttft_seconds.is_some() { sample.ended } else { 0 });
        self.ttft.note(sample.ttft_seconds, sample.ended);
        self.itl.note(sample.itl_seconds, sample.ended);
    }

    /// Percent of requests that ended in an error, if any ended.
    pub fn error_percent(&self) -> Option<f64> {
        (self.requests > 0).then(|| self.failed as f64 * 100.0 / self.requests as f64)
    }

    /// Its time to first token as a multiple of another's, if both are known.
    pub fn ttft_ratio(&self, other: &Self) -> Option<f64> {
        self.ttft.over(&other.ttft)
    }

    /// The same of inter-token latencies.
    pub fn itl_ratio(&self, other: &Self) -> Option<f64> {
        self.itl.over(&other.itl)
    }
}

/// A geometric mean that forgets.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct LogMean {
    weight: f64,
    sum: f64,
}

impl LogMean {
    fn note(&mut self, seconds: Option<f64>, requests: u64) {
        let Some(seconds) = seconds.filter(|seconds| *seconds > 0.0 && requests > 0) else { return };
        let requests = requests as f64;
        let kept = (-requests / HALF_LIFE).exp2();
        self.weight = self.weight * kept + requests;
        self.sum = self.sum * kept + requests * seconds.ln();
    }

    fn over(&self, other: &Self) -> Option<f64> {
        let known = self.weight > 0.0 && other.weight > 0.0;
        known.then(|| (self.sum / self.weight - other.sum / other.weight).exp())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(ended: u64, ttft: f64) -> Sample {
        Sample { ended, failed: 0, ttft_seconds: Some(ttft), itl_seconds: Some(ttft / 10.0) }
    }

    fn tally(samples: impl IntoIterator<Item = Sample>) -> Tally {
        samples.into_iter().fold(Tally::default(), |mut tally, sample| {
            tally.note(sample);
            tally
        })
    }

    #[test]
    fn only_what_happened_since_the_look_before_counts() {
        let report = |start: &str, finished, failed| LoadReport {
            start_id: start.into(),
            finished,
            failed: Some(failed),
            ..LoadReport::idle(8)
        };
        let ended = |before: Option<&LoadReport>, now: &LoadReport| {
            let sample = Sample::between(before, now);
            (sample.ended, sample.failed)
        };
        let (first, second) = (report("a", 10, 2), report("a", 15, 3));
        assert_eq!(ended(None, &first), (0, 0), "nobody knows when");
        assert_eq!(ended(Some(&first), &second), (5, 1));
        assert_eq!(ended(Some(&second), &report("b", 4, 1)), (4, 1), "another process");
        assert_eq!(ended(Some(&second), &first), (0, 0));
        let untold = LoadReport { failed: None, ..report("a", 20, 0) };
        assert_eq!(ended(Some(&second), &untold), (5, 0), "an agent of before");
    }

    #[test]
    fn who_ended_more_requests_counts_more_and_who_ended_none_does_not() {
        let older = tally([sample(30, 0.1), sample(10, 0.1), sample(0, 900.0)]);
        let untimed = tally([sample(30, 9.0).untimed()]);
        assert_eq!((older.requests, older.timed, untimed.requests, untimed.timed), (40, 40, 30, 0));
        assert_eq!(untimed.ttft_ratio(&older), None);
        let canary = tally([sample(3, 0.2), sample(3, 0.2)]);
        assert!((canary.ttft_ratio(&older).unwrap() - 2.0).abs() < 1e-9);
        assert!((canary.itl_ratio(&older).unwrap() - 2.0).abs() < 1e-9);
        assert_eq!(tally([]).ttft_ratio(&older), None);
    }

    #[test]
    fn a_cold_cache_is_forgotten() {
        let older = tally([sample(1000, 0.1)]);
        let warmed = tally((0..100).map(|look| sample(10, if look < 5 { 1.0 } else { 0.1 })));
        assert!(warmed.ttft_ratio(&older).unwrap() < 1.01, "{warmed:?}");
    }

    proptest! {
        #[test]
        fn a_ratio_is_within_what_was_said(samples in prop::collection::vec((1..50u64, 0.001..10.0f64), 1..40)) {
            let canary = tally(samples.iter().map(|(ended, ttft)| sample(*ended, *ttft)));
            let ratio = canary.ttft_ratio(&tally([sample(1, 1.0)])).unwrap();
            let least = samples.iter().map(|(_, ttft)| *ttft).fold(f64::INFINITY, f64::min);
            let most = samples.iter().map(|(_, ttft)| *ttft).fold(0.0, f64::max);
            prop_assert!(ratio >= least * 0.999_999 && ratio <= most * 1.000_001, "{ratio} of {least} to {most}");
        }
    }
}
