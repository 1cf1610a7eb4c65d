//! Nodes of a simulated world that keep the model in memory for the next replicas.
//!
//! Owns when each of them has it. A replica that starts takes one; another node fetches the model in its place, which takes as long as a
//! cold start.

use stoker_workload::Rng;

use crate::model::ReplicaModel;

/// See the module.
#[derive(Debug)]
pub(crate) struct Standby {
    /// When each has the model in memory.
    ready: Vec<f64>,
    /// A generator of its own, so that replicas draw the same start times with and without.
    fetches: Rng,
}

impl Standby {
    /// So many nodes, which all have it when the world begins.
    pub(crate) fn of(nodes: u32, seed: u64) -> Self {
        Self { ready: vec![0.0; nodes as usize], fetches: Rng::seeded(seed ^ 0xfe7c) }
    }

    /// Nodes that have it.
    pub(crate) fn warm(&self, now: f64) -> u32 {
        self.ready.iter().filter(|ready| **ready <= now).count() as u32
    }

    /// A replica starts: true if it does so on one of them.
    pub(crate) fn take(&mut self, now: f64, model: &ReplicaModel) -> bool {
        let Some(ready) = self.ready.iter_mut().find(|ready| **ready <= now) else { return false };
        *ready = now + self.fetches.log_normal(model.start_seconds, model.start_sigma);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_was_taken_is_made_up_for_by_one_that_fetches() {
        let model = ReplicaModel { start_seconds: 100.0, start_sigma: 0.0, ..ReplicaModel::default() };
        let mut standby = Standby::of(2, 1);
        assert_eq!([1.0, 2.0, 3.0].map(|now| standby.take(now, &model)), [true, true, false]);
        assert_eq!([3.0, 100.9, 101.1, 102.1].map(|now| standby.warm(now)), [0, 0, 1, 2]);
        assert!(!Standby::of(0, 1).take(0.0, &model));
    }
}
