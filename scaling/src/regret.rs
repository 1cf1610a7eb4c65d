//! The memory of having gone down too early: patience grows when it is regretted and comes back slowly.
//!
//! Owns one factor and when it was learned. Load that returns every few minutes teaches the deployment to wait for it;
//! load that goes for good costs the learned wait once. Never decides.

use serde::{Deserialize, Serialize};

/// Going up this soon after going down means that going down was a mistake.
const REGRET_SECONDS: f64 = 900.0;
/// Patience after a regret: twenty minutes instead of ten. More of it costs more than the turns that it spares.
const PATIENCE_MAX: f64 = 2.0;
/// Seconds after which a third of the extra patience is left.
const MEMORY_SECONDS: f64 = 4.0 * 3600.0;

/// See the module.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Regret {
    /// Patience beyond 1 when it was last learned.
    #[serde(default)]
    extra: f64,
    #[serde(default)]
    learned_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    went_down_ms: Option<u64>,
}

impl Regret {
    /// What has a later date gets this one.
    pub fn not_after(&mut self, now_ms: u64) {
        self.learned_ms = self.learned_ms.min(now_ms);
        self.went_down_ms = self.went_down_ms.map(|went_down_ms| went_down_ms.min(now_ms));
    }

    /// Factor on the stabilisation time, at least 1.
    pub fn patience(self, now_ms: u64) -> f64 {
        let age = now_ms.saturating_sub(self.learned_ms) as f64 / 1000.0;
        1.0 + self.extra * (-age / MEMORY_SECONDS).exp()
    }

    /// Learns from a decision.
    pub fn note(&mut self, previous: u32, desired: u32, now_ms: u64) {
        if desired < previous {
            self.went_down_ms = Some(now_ms);
        }
        if desired > previous
            && let Some(went_down_ms) = self.went_down_ms.take()
            && now_ms.saturating_sub(went_down_ms) as f64 <= REGRET_SECONDS * 1000.0
        {
            self.extra = PATIENCE_MAX - 1.0;
            self.learned_ms = now_ms;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE_MS: u64 = 60_000;

    #[test]
    fn a_regret_doubles_the_patience_and_another_one_keeps_it_so() {
        let mut regret = Regret::default();
        let mut seen = Vec::new();
        for round in 0..3 {
            regret.note(4, 2, round * 10 * MINUTE_MS);
            regret.note(2, 4, (round * 10 + 5) * MINUTE_MS);
            seen.push(regret.patience((round * 10 + 5) * MINUTE_MS));
        }
        assert_eq!(seen, [2.0, 2.0, 2.0]);
    }

    #[test]
    fn going_up_long_after_or_twice_is_no_regret() {
        let mut regret = Regret::default();
        regret.note(4, 2, 0);
        regret.note(2, 3, 16 * MINUTE_MS);
        regret.note(3, 4, 17 * MINUTE_MS);
        assert_eq!(regret.patience(17 * MINUTE_MS), 1.0);
    }

    #[test]
    fn standing_still_is_neither_going_down_nor_a_regret() {
        let mut still = Regret::default();
        still.note(4, 4, 0);
        still.note(4, 5, MINUTE_MS);
        assert_eq!(still.patience(MINUTE_MS), 1.0);
        let mut regret = Regret::default();
        regret.note(4, 2, 0);
        regret.note(2, 2, MINUTE_MS);
        regret.note(2, 3, 2 * MINUTE_MS);
        assert_eq!(regret.patience(2 * MINUTE_MS), PATIENCE_MAX);
    }

    #[test]
    fn a_clock_that_went_back_keeps_patience_no_longer() {
        let mut regret = Regret::default();
        regret.note(4, 2, 10_000 * 60 * MINUTE_MS);
        regret.note(2, 4, 10_000 * 60 * MINUTE_MS);
        regret.not_after(0);
        assert_eq!(regret.patience(0), PATIENCE_MAX);
        assert!(regret.patience(24 * 60 * MINUTE_MS) < 1.02);
        regret.note(4, 2, 10_000 * 60 * MINUTE_MS);
        regret.not_after(24 * 60 * MINUTE_MS);
        regret.note(2, 4, 25 * 60 * MINUTE_MS);
        assert!(regret.patience(25 * 60 * MINUTE_MS) < 1.02, "an hour later is no regret");
    }

    #[test]
    fn patience_comes_back_over_hours() {
        let mut regret = Regret::default();
        regret.note(4, 2, 0);
        regret.note(2, 4, MINUTE_MS);
        assert!(regret.patience(61 * MINUTE_MS) > 1.7);
        assert!(regret.patience(24 * 60 * MINUTE_MS) < 1.02);
    }
}
