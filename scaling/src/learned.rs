//! What was known when replicas last served: what a request takes and how long a start does. At zero nobody is left to ask, and
//! the first decision up from there is made by it.
//!
//! Owns the memory. Never decides.

use serde::{Deserialize, Serialize};

use crate::signals::{Signals, Work};

/// See the module.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Learned {
    /// What requests took; `None` until enough ended, or where engines do not say what steps cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// 90th percentile of the time that starts took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_seconds: Option<f64>,
    /// The same of starts on nodes that had the model in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_start_seconds: Option<f64>,
}

impl Learned {
    /// Takes in what is known now. Without requests for some minutes nothing is known of them any more, and what was stands.
    pub fn learn(&mut self, signals: &Signals) {
        if signals.coverage.fresh > 0 {
            self.work = signals.work.or(self.work);
            self.start_seconds = Some(signals.start_seconds);
            let warm = signals.standby.and_then(|standby| standby.start_seconds);
            self.warm_start_seconds = warm.or(self.warm_start_seconds);
        }
    }
}
