//! llm-d's workload variant autoscaler, first version (saturation based), for one variant.
//!
//! Source: llm-d workload-variant-autoscaler, `docs/saturation-analyzer.md` and `docs/saturation-scaling-config.md`
//! with the defaults as knobs: every 15 s, per replica the largest KV usage and queue length of the last minute; saturated at KV
//! 0.80 or a queue of 5; over replicas that are not saturated, one more when the mean spare KV falls under 0.10 or the
//! mean spare queue under 3; one less when the load of N - 1 would still leave both spares; nothing while a replica is
//! on its way. In its favour the number is applied directly, without the HPA that follows it in practice.

use std::collections::{BTreeMap, VecDeque};

use crate::{Rule, View, peer_rule::Knobs};

const PEAK_SECONDS: usize = 60;

/// See the module.
#[derive(Clone, Debug)]
pub struct Wva {
    /// KV usage from which a replica is saturated.
    kv_threshold: f64,
    interval_seconds: f64,
    kv_spare: f64,
    queue_threshold: f64,
    queue_spare: f64,
    seen: BTreeMap<u32, VecDeque<Load>>,
}

#[derive(Clone, Copy, Debug)]
struct Load {
    kv: f64,
    queue: f64,
}

impl Wva {
    /// Its knobs and their defaults; the target is `kvCacheThreshold`.
    pub const KNOBS: &[(&str, f64)] = &[
        ("target", 0.80),
        ("kvSpareTrigger", 0.10),
        ("queueLengthThreshold", 5.0),
        ("queueSpareTrigger", 3.0),
        ("interval", 15.0),
    ];

    /// A rule with these knobs.
    pub(crate) fn new(knobs: Knobs<'_>) -> Self {
        Self {
            kv_threshold: knobs.get("target"),
            interval_seconds: knobs.get("interval").max(1.0).round(),
            kv_spare: knobs.get("kvSpareTrigger"),
            queue_threshold: knobs.get("queueLengthThreshold"),
            queue_spare: knobs.get("queueSpareTrigger"),
            seen: BTreeMap::new(),
        }
    }

    fn sample(&mut self, view: &View<'_>) {
        let mut seen = std::mem::take(&mut self.seen);
        for member in view.serving() {
            let mut loads = seen.remove(&member.id).unwrap_or_default();
            let replica = &member.replica;
            loads.push_back(Load { kv: replica.kv_usage(), queue: f64::from(replica.waiting()) });
            if loads.len() > PEAK_SECONDS {
                loads.pop_front();
            }
            self.seen.insert(member.id, loads);
        }
    }

    fn peaks(&self) -> Vec<Load> {
        let peak = |loads: &VecDeque<Load>| {
            loads.iter().fold(Load { kv: 0.0, queue: 0.0 }, |peak, load| Load {
                kv: peak.kv.max(load.kv),
                queue: peak.queue.max(load.queue),
            })
        };
        self.seen.values().map(peak).collect()
    }

    fn is_short(&self, kv: f64, queue: f64) -> bool {
        self.kv_threshold - kv < self.kv_spare || self.queue_threshold - queue < self.queue_spare
    }

    fn decide(&self, desired: u32) -> u32 {
        let is_free = |load: &Load| load.kv < self.kv_threshold && load.queue < self.queue_threshold;
        let free: Vec<Load> = self.peaks().into_iter().filter(is_free).collect();
        let n = free.len() as f64;
        let (kv, queue): (f64, f64) = (free.iter().map(|load| load.kv).sum(), free.iter().map(|load| load.queue).sum());
        if free.is_empty() || self.is_short(kv / n, queue / n) {
            return desired + 1;
        }
        let may_go = free.len() >= 2 && !self.is_short(kv / (n - 1.0), queue / (n - 1.0));
        if may_go { desired - 1 } else { desired }
    }
}

impl Rule for Wva {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        self.sample(view);
        let is_moment = view.now % self.interval_seconds == 0.0;
        let is_pending = view.starting() > 0 || view.serving().count() == 0;
        if !is_moment || is_pending { None } else { Some(self.decide(view.desired)) }
    }
}
