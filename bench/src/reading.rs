//! One number of one sample, and how a case's numbers come from the two times that every system can tell: until all first
//! tokens, until all last ones.

use stoker_engine::StepTimes;
use stoker_figures::median;

use crate::case::Case;

/// One number of one sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// Its metric, by the names of docs/benchmarks.
    pub metric: &'static str,
    /// In the metric's unit.
    pub value: f64,
}

impl Reading {
    /// A value of a metric.
    pub fn new(metric: &'static str, value: f64) -> Self {
        Self { metric, value }
    }
}

/// Seconds from the beginning of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phases {
    /// Until every prompt was computed and had its first token.
    pub first: f64,
    /// Until every request had its last token.
    pub last: f64,
}

impl Phases {
    /// The metrics of a case that prefills, then decodes; none for the others.
    pub fn readings(self, case: Case) -> Vec<Reading> {
        let size = case.size();
        let itl = || (self.last - self.first) / f64::from(size.completion_tokens - 1);
        match case {
            Case::Prefill(n) => vec![Reading::new("tok_s", f64::from(n) / self.first)],
            Case::Ttft(_) | Case::PrefixWarm => vec![Reading::new("ttft_ms", self.first * 1e3)],
            Case::Decode(_) | Case::SingleStream => {
                vec![Reading::new("tok_s", 1.0 / itl()), Reading::new("itl_ms", itl() * 1e3)]
            }
            Case::Concurrent(_) => vec![
                Reading::new("tok_s", size.all_completion_tokens() / self.last),
                Reading::new("itl_ms", itl() * 1e3),
            ],
            Case::Offline(_) | Case::Balanced(_) => vec![
                Reading::new("tok_s", size.all_completion_tokens() / self.last),
                Reading::new("seconds", self.last),
            ],
            Case::Start
            | Case::Idle
            | Case::SharedPrefix
            | Case::Sampled(..)
            | Case::Neighbour(_)
            | Case::Constrained(_)
            | Case::Read(..)
            | Case::Required(_)
            | Case::Mix(_)
            | Case::Beside(_)
            | Case::Http(_) => Vec::new(),
        }
    }
}

/// Of the steps that only decode: the host's time for one (deciding it, handing it over, taking its results in), and the
/// device's idle time between two. Steps of a prefill have hundreds of launches and hide them behind a longer computation.
pub fn step_readings(steps: &[StepTimes]) -> Vec<Reading> {
    let decodes = || steps.iter().filter(|step| step.n_prefill_tokens == 0);
    let host = |step: &StepTimes| step.schedule_seconds + step.launch_seconds + step.resolve_seconds;
    let mut hosts: Vec<f64> = decodes().map(host).collect();
    hosts.sort_by(f64::total_cmp);
    let idle: Vec<f64> = decodes().filter_map(|step| step.idle_seconds).collect();
    let mut readings = Vec::new();
    if !hosts.is_empty() {
        readings.push(Reading::new("host_step_p99_us", hosts[(hosts.len() * 99).div_ceil(100) - 1] * 1e6));
    }
    if !idle.is_empty() {
        readings.push(Reading::new("gap_us", median(&idle) * 1e6));
    }
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_prefill_say_nothing_of_decoding() {
        let step = |n_prefill_tokens, us: f64| StepTimes {
            n_prefill_tokens,
            launch_seconds: us / 1e6,
            idle_seconds: Some(us / 2e6),
            ..StepTimes::default()
        };
        let steps = [step(8192, 1500.0), step(0, 40.0), step(1, 900.0), step(0, 60.0), step(0, 50.0)];
        let found: Vec<_> =
            step_readings(&steps).iter().map(|reading| (reading.metric, reading.value.round())).collect();
        assert_eq!(found, [("host_step_p99_us", 60.0), ("gap_us", 25.0)]);
        assert_eq!(step_readings(&[step(8192, 1500.0)]), []);
    }

    fn values(case: Case, first: f64, last: f64) -> Vec<f64> {
        Phases { first, last }.readings(case).iter().map(|reading| reading.value).collect()
    }

    #[test]
    fn one_stream_counts_decoding_only() {
        assert_eq!(values(Case::Decode(100), 5.0, 6.0), [100.0, 10.0]);
        assert_eq!(values(Case::Prefill(512), 0.5, 0.5), [1024.0]);
    }

    #[test]
    fn many_streams_count_all_their_tokens_over_the_whole_time() {
        let values = values(Case::Concurrent(8), 1.0, 3.55);
        assert!((values[0] - 8.0 * 256.0 / 3.55).abs() < 1e-9);
        assert!((values[1] - 10.0).abs() < 1e-9);
    }
}
