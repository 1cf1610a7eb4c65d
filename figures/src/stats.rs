//! The few numbers that are made of samples, and which direction of a metric is the good one. Pure.

/// Which of two readings of a metric is the better one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Better {
    /// Rates, shares, gains.
    Higher,
    /// Times, sizes, counts of what should not happen.
    Lower,
}

impl Better {
    /// How many times better `ours` is than `theirs`: above 1 is ahead, whichever direction the metric has.
    pub fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Self::Higher => ours / theirs,
            Self::Lower => theirs / ours,
        }
    }
}

/// Last words of the metrics of docs/benchmarks that are better when they are small: units of time and memory, cores in use, counts of what
/// should not happen, how far off something is, and what a model is surprised by or strays from another.
const LOWER: [&str; 15] = [
    "imbalance",
    "cores",
    "ms",
    "us",
    "seconds",
    "mb",
    "writes",
    "misses",
    "preemptions",
    "hour",
    "hours",
    "loss",
    "off",
    "kl",
    "perplexity",
];

/// The good direction of a metric, by the last word of its name.
pub fn better(metric: &str) -> Better {
    let last = metric.rsplit('_').next().unwrap_or(metric);
    if LOWER.contains(&last) { Better::Lower } else { Better::Higher }
}

/// The middle sample, or the mean of the two middle ones. Panics without samples: a figure that was not obtained does not
/// exist.
pub fn median(samples: &[f64]) -> f64 {
    assert!(!samples.is_empty(), "a median needs a sample");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_the_middle_sample_or_between_the_middle_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn a_ratio_above_one_is_ahead_in_either_direction() {
        assert_eq!(better("tok_s").ratio(240.0, 200.0), 1.2);
        assert_eq!(better("itl_ms").ratio(5.0, 6.0), 1.2);
        for lower in [
            "ttft_ms",
            "seconds",
            "rss_mb",
            "cores",
            "us",
            "host_step_p99_us",
            "api_writes",
            "reversals_per_hour",
            "gpu_hours",
            "worst_off",
        ] {
            assert_eq!(better(lower), Better::Lower, "{lower}");
        }
        for higher in ["gain", "share_of_in_process", "gb_s", "tflop_s", "share_of_ceiling", "share_of_peak"] {
            assert_eq!(better(higher), Better::Higher, "{higher}");
        }
    }
}
