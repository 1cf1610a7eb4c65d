//! The Kubernetes HPA on the number of waiting requests per pod, the setting most guides for vLLM recommend.
//!
//! Source: kubernetes/kubernetes `pkg/controller/podautoscaler/replica_calculator.go` (`calcPlainMetricReplicas`) and
//! `horizontal.go` (stabilisation, rate limits) with their defaults: sync every 15 s, tolerance 0.1, up by the larger
//! of 4 pods and 100 % per 15 s, down only to the largest recommendation of 300 s. In its favour the metric arrives
//! without delay, where a scrape interval and an adapter would add up to a minute.

use crate::sim::{Rule, View};

const SYNC_SECONDS: f64 = 15.0;
const TOLERANCE: f64 = 0.1;
const DOWN_STABILISATION_SECONDS: f64 = 300.0;
const UP_PODS: u32 = 4;

/// See the module.
#[derive(Clone, Debug)]
pub struct HpaQueue {
    /// Waiting requests per pod that are wanted.
    target: f64,
    recommendations: Vec<(f64, u32)>,
}

impl HpaQueue {
    /// A rule with this target.
    pub fn new(target: f64) -> Self {
        Self { target, recommendations: Vec::new() }
    }

    fn recommendation(&self, view: &View<'_>) -> u32 {
        let waiting: Vec<f64> = view.serving().map(|member| f64::from(member.replica.waiting())).collect();
        let (ready, unready) = (waiting.len() as f64, view.starting() as f64);
        if ready == 0.0 {
            return view.desired;
        }
        let total: f64 = waiting.iter().sum();
        let ratio = total / ready / self.target;
        if (ratio - 1.0).abs() <= TOLERANCE {
            return view.desired;
        }
        if ratio < 1.0 || unready == 0.0 {
            return (ratio * ready).ceil() as u32;
        }
        // Going up, pods that are not ready count as idle; if that turns the answer around, nothing is done.
        let with_unready = total / (ready + unready) / self.target;
        let turns_around = with_unready < 1.0 || (with_unready - 1.0).abs() <= TOLERANCE;
        if turns_around { view.desired } else { (with_unready * (ready + unready)).ceil() as u32 }
    }
}

impl Rule for HpaQueue {
    fn look(&mut self, view: &View<'_>) -> Option<u32> {
        if view.now % SYNC_SECONDS != 0.0 {
            return None;
        }
        let recommendation = self.recommendation(view);
        self.recommendations.retain(|(at, _)| view.now - at < DOWN_STABILISATION_SECONDS);
        self.recommendations.push((view.now, recommendation));
        let held = self.recommendations.iter().map(|(_, replicas)| *replicas).max().unwrap_or(recommendation);
        let most = view.desired + view.desired.max(UP_PODS);
        Some(if recommendation > view.desired { recommendation.min(most) } else { held.min(view.desired) })
    }
}
