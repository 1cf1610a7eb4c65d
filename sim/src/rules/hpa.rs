//! The Kubernetes HPA on the number of waiting requests per pod, the setting most guides for vLLM recommend.
//!
//! Source: kubernetes/kubernetes `pkg/controller/podautoscaler/replica_calculator.go` (`calcPlainMetricReplicas`) and
//! `horizontal.go` (stabilisation, rate limits) with their defaults as knobs: sync every 15 s, tolerance 0.1, up by the larger
//! of 4 pods and 100 % per 15 s, down only to the largest recommendation of 300 s. In its favour the metric arrives
//! without delay, where a scrape interval and an adapter would add up to a minute.

use crate::{Rule, View, peer_rule::Knobs};

/// See the module.
#[derive(Clone, Debug)]
pub struct HpaQueue {
    /// Waiting requests per pod that are wanted.
    target: f64,
    sync_seconds: f64,
    tolerance: f64,
    stabilization_seconds: f64,
    up_pods: u32,
    up_percent: f64,
    recommendations: Vec<(f64, u32)>,
}

impl HpaQueue {
    /// Its knobs and their defaults.
    pub const KNOBS: &[(&str, f64)] = &[
        ("target", 5.0),
        ("syncPeriod", 15.0),
        ("tolerance", 0.1),
        ("stabilizationWindow", 300.0),
        ("upPods", 4.0),
        ("upPercent", 100.0),
    ];

    /// A rule with these knobs.
    pub(crate) fn new(knobs: Knobs<'_>) -> Self {
        Self {
            target: knobs.get("target"),
            sync_seconds: knobs.get("syncPeriod").max(1.0).round(),
            tolerance: knobs.get("tolerance"),
            stabilization_seconds: knobs.get("stabilizationWindow"),
            up_pods: knobs.get("upPods") as u32,
            up_percent: knobs.get("upPercent"),
            recommendations: Vec::new(),
        }
    }

    fn recommendation(&self, view: &View<'_>) -> u32 {
        let waiting: Vec<f64> = view.serving().map(|member| f64::from(member.replica.waiting())).collect();
        let (ready, unready) = (waiting.len() as f64, view.starting() as f64);
        if ready == 0.0 {
            return view.desired;
        }
        let total: f64 = waiting.iter().sum();
        let ratio = total / ready / self.target;
        if (ratio - 1.0).abs() <= self.tolerance {
            return view.desired;
        }
        if ratio < 1.0 || unready == 0.0 {
            return (ratio * ready).ceil() as u32;
        }
        // Going up, pods that are not ready count as idle; if that turns the answer around, nothing is done.
        let with_unready = total / (ready + unready) / self.target;
        let turns_around = with_unready < 1.0 || (with_unready - 1.0).abs() <= self.tolerance;
        if turns_around { view.desired } else { (with_unready * (ready + unready)).ceil() as u32 }
    }
}

impl Rule for HpaQueue {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        if view.now % self.sync_seconds != 0.0 {
            return None;
        }
        let recommendation = self.recommendation(view);
        self.recommendations.retain(|(at, _)| view.now - at < self.stabilization_seconds.max(1.0));
        self.recommendations.push((view.now, recommendation));
        let held = self.recommendations.iter().map(|(_, replicas)| *replicas).max().unwrap_or(recommendation);
        let most = view.desired + self.up_pods.max((f64::from(view.desired) * self.up_percent / 100.0) as u32);
        Some(if recommendation > view.desired { recommendation.min(most) } else { held.min(view.desired) })
    }
}
