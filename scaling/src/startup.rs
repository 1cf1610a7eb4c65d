//! The learned start time of replicas: how long from the decision until a new one serves.
//!
//! Owns the last few start times of one (model, node kind) and their 90th percentile. Never measures anything itself.

use serde::{Deserialize, Serialize};

/// Starts remembered; older ones are forgotten so that a warmed image cache shows.
const STARTS_KEPT: usize = 16;

/// Assumed until the first start was seen. An engine of this class takes 41 s from import to serving when it compiles
/// and captures its graphs, plus scheduling and reading 16 GB of weights.
pub const ASSUMED_START_SECONDS: f64 = 60.0;

/// Start times seen so far, newest last.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StartTimes {
    seconds: Vec<f64>,
}

impl StartTimes {
    /// Remembers one start. A negative or non-finite duration is a clock's mistake and is ignored.
    pub fn record(&mut self, seconds: f64) {
        if !seconds.is_finite() || seconds < 0.0 {
            return;
        }
        if self.seconds.len() == STARTS_KEPT {
            self.seconds.remove(0);
        }
        self.seconds.push(seconds);
    }

    /// 90th percentile (nearest rank) of the remembered starts; `None` without any.
    pub fn p90_seconds(&self) -> Option<f64> {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * 9).div_ceil(10);
        sorted.get(rank.checked_sub(1)?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(seconds: impl IntoIterator<Item = f64>) -> StartTimes {
        let mut times = StartTimes::default();
        seconds.into_iter().for_each(|start| times.record(start));
        times
    }

    #[test]
    fn without_a_start_nothing_is_known() {
        assert_eq!(StartTimes::default().p90_seconds(), None);
    }

    #[test]
    fn the_ninetieth_percentile_is_a_start_that_happened() {
        assert_eq!(times((1..=10).map(f64::from)).p90_seconds(), Some(9.0));
        assert_eq!(times([5.0]).p90_seconds(), Some(5.0));
        assert_eq!(times([5.0, 7.0]).p90_seconds(), Some(7.0));
    }

    #[test]
    fn old_starts_are_forgotten() {
        let cold_then_warm = [300.0; 4].into_iter().chain([10.0; STARTS_KEPT]);
        assert_eq!(times(cold_then_warm).p90_seconds(), Some(10.0));
    }

    #[test]
    fn a_clocks_mistake_is_not_a_start() {
        assert_eq!(times([-1.0, f64::NAN, f64::INFINITY]), StartTimes::default());
    }
}
