//! llm-d's workload variant autoscaler, second version (tokens against capacity), for one variant: the default since 0.9.
//!
//! Source: llm-d workload-variant-autoscaler, `internal/engines/analyzers/saturation_v2`. What a replica carries is the
//! smaller of `kvCacheThreshold` of its KV and of what it held when its queue was last at `queueLengthThreshold` (mean of
//! the last ten such moments, kept by how long answers are); demand is the tokens in use and the prompts that wait. Up to
//! `demand / scaleUpThreshold`, replicas on their way counted; down while `demand / scaleDownBoundary` fits. Every 15 s.
//! In its favour the number is applied directly, without the HPA that follows it in practice, and readings are not old.

use std::collections::VecDeque;

use stoker_crds::contract::KV_BLOCK_TOKENS;

use crate::{Replica, Rule, View, peer_rule::Knobs};

/// Moments of saturation that are remembered.
const SATURATIONS_KEPT: usize = 10;

/// See the module.
#[derive(Clone, Debug)]
pub struct WvaV2 {
    kv_threshold: f64,
    up_threshold: f64,
    down_boundary: f64,
    queue_threshold: f64,
    interval_seconds: f64,
    saturated_at: VecDeque<f64>,
}

impl WvaV2 {
    /// Its knobs and their defaults; the target is `kvCacheThreshold`.
    pub const KNOBS: &[(&str, f64)] = &[
        ("target", 0.80),
        ("scaleUpThreshold", 0.85),
        ("scaleDownBoundary", 0.70),
        ("queueLengthThreshold", 5.0),
        ("interval", 15.0),
    ];

    /// A rule with these knobs.
    pub(crate) fn new(knobs: Knobs<'_>) -> Self {
        Self {
            kv_threshold: knobs.get("target"),
            up_threshold: knobs.get("scaleUpThreshold").max(1e-3),
            down_boundary: knobs.get("scaleDownBoundary").max(1e-3),
            queue_threshold: knobs.get("queueLengthThreshold"),
            interval_seconds: knobs.get("interval").max(1.0).round(),
            saturated_at: VecDeque::new(),
        }
    }

    /// Tokens that this replica carries.
    fn capacity(&mut self, replica: &Replica) -> f64 {
        let by_memory = self.kv_threshold * tokens(replica.total_blocks());
        let in_use = tokens(replica.referenced_blocks());
        if f64::from(replica.waiting()) >= self.queue_threshold && in_use > 0.0 {
            if self.saturated_at.len() == SATURATIONS_KEPT {
                self.saturated_at.pop_front();
            }
            self.saturated_at.push_back(in_use);
            return by_memory.min(in_use);
        }
        let n = self.saturated_at.len();
        if n == 0 { by_memory } else { by_memory.min(self.saturated_at.iter().sum::<f64>() / n as f64) }
    }

    fn decide(&mut self, view: &View<'_>) -> u32 {
        let serving: Vec<&Replica> = view.serving().map(|member| &member.replica).collect();
        let mut capacities: Vec<f64> = serving.iter().map(|replica| self.capacity(replica)).collect();
        capacities.sort_by(f64::total_cmp);
        let n = capacities.len();
        let each =
            if n.is_multiple_of(2) { (capacities[n / 2 - 1] + capacities[n / 2]) / 2.0 } else { capacities[n / 2] };
        let demand: f64 = serving.iter().map(|replica| demand(replica)).sum();
        let anticipated = (n + view.starting()) as f64 * each;
        let required = demand / self.up_threshold - anticipated;
        if required > 0.0 {
            return view.desired + (required / each).ceil() as u32;
        }
        let spare = n as f64 * each - demand / self.down_boundary;
        let is_settled = view.starting() == 0 && n as u32 == view.desired;
        let surplus = if is_settled && spare > 0.0 { (spare / each) as u32 } else { 0 };
        view.desired.saturating_sub(surplus).max(1)
    }
}

fn tokens(blocks: u32) -> f64 {
    f64::from(blocks) * f64::from(KV_BLOCK_TOKENS)
}

fn demand(replica: &Replica) -> f64 {
    tokens(replica.referenced_blocks()) + replica.waiting_prefill_tokens() as f64
}

impl Rule for WvaV2 {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        let is_moment = view.now % self.interval_seconds == 0.0 && view.serving().count() > 0;
        is_moment.then(|| self.decide(view))
    }
}
