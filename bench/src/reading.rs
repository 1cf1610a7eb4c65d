//! One number of one sample, and how a case's numbers come from the two times that every system can tell: until all first
//! tokens, until all last ones.

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
            Case::Offline(_) => vec![
                Reading::new("tok_s", size.all_completion_tokens() / self.last),
                Reading::new("seconds", self.last),
            ],
            Case::Start | Case::Idle | Case::SharedPrefix | Case::Http(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
