//! Metrics of scaling: what was decided for each deployment, and how long a tick over all of them takes.

use kube::runtime::reflector::ObjectRef;
use prometheus::{GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry};
use stoker_crds::InferenceDeployment;
use stoker_scaling::DecisionRecord;

/// Upper bounds in seconds of a tick over all deployments.
const TICK_BUCKETS: [f64; 10] = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 1.0];
/// Upper bounds in seconds of a start from zero.
const COLD_START_BUCKETS: [f64; 11] = [1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0];
const DEPLOYMENT: [&str; 2] = ["namespace", "name"];

/// See the module.
#[derive(Debug)]
pub struct ScalingMetrics {
    /// Seconds that one tick over all deployments takes.
    pub tick_seconds: Histogram,
    desired: IntGaugeVec,
    pressure: GaugeVec,
    serving: IntGaugeVec,
    fresh: IntGaugeVec,
    held: IntGaugeVec,
    decisions: IntCounterVec,
    cold_starts: IntCounterVec,
    cold_start_seconds: HistogramVec,
}

impl ScalingMetrics {
    /// Registers everything once.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let opts = |name: &str, help: &str| Opts::new(format!("stoker_scaling_{name}"), help);
        let tick = HistogramOpts::new("stoker_scaling_tick_duration_seconds", "One tick over all deployments");
        let cold_start = HistogramOpts::new(
            "stoker_scaling_cold_start_duration_seconds",
            "From the decision that brought the first replica after none until one serves",
        );
        let metrics = Self {
            tick_seconds: Histogram::with_opts(tick.buckets(TICK_BUCKETS.to_vec()))?,
            desired: IntGaugeVec::new(opts("desired_replicas", "Replicas that the last decision wants"), &DEPLOYMENT)?,
            pressure: GaugeVec::new(opts("pressure", "Largest term over the serving replicas"), &DEPLOYMENT)?,
            serving: IntGaugeVec::new(opts("serving_replicas", "Replicas that serve"), &DEPLOYMENT)?,
            fresh: IntGaugeVec::new(opts("fresh_replicas", "Serving replicas with a fresh reading"), &DEPLOYMENT)?,
            held: IntGaugeVec::new(opts("held_requests", "Requests that gateways have in line"), &DEPLOYMENT)?,
            decisions: IntCounterVec::new(
                opts("decisions_total", "Decisions by direction"),
                &["namespace", "name", "direction"],
            )?,
            cold_starts: IntCounterVec::new(
                opts("cold_starts_total", "Decisions that brought the first replica after none"),
                &DEPLOYMENT,
            )?,
            cold_start_seconds: HistogramVec::new(cold_start.buckets(COLD_START_BUCKETS.to_vec()), &DEPLOYMENT)?,
        };
        registry.register(Box::new(metrics.tick_seconds.clone()))?;
        registry.register(Box::new(metrics.desired.clone()))?;
        registry.register(Box::new(metrics.pressure.clone()))?;
        registry.register(Box::new(metrics.serving.clone()))?;
        registry.register(Box::new(metrics.fresh.clone()))?;
        registry.register(Box::new(metrics.held.clone()))?;
        registry.register(Box::new(metrics.decisions.clone()))?;
        registry.register(Box::new(metrics.cold_starts.clone()))?;
        registry.register(Box::new(metrics.cold_start_seconds.clone()))?;
        Ok(metrics)
    }

    /// Shows a decision.
    pub fn decided(&self, deployment: &ObjectRef<InferenceDeployment>, record: &DecisionRecord) {
        let labels = labels(deployment);
        let DecisionRecord { decision, signals, .. } = record;
        self.desired.with_label_values(&labels).set(decision.desired.into());
        self.pressure.with_label_values(&labels).set(decision.pressure);
        self.serving.with_label_values(&labels).set(signals.coverage.serving.into());
        self.fresh.with_label_values(&labels).set(signals.coverage.fresh.into());
        self.held.with_label_values(&labels).set(signals.held_requests.into());
        if decision.previous == 0 && decision.desired > 0 {
            self.cold_starts.with_label_values(&labels).inc();
        }
        if let (Some(woken_ms), None, 1..) = (record.before.woken_ms, record.after.woken_ms, decision.desired) {
            let seconds = record.at_ms.saturating_sub(woken_ms) as f64 / 1000.0;
            self.cold_start_seconds.with_label_values(&labels).observe(seconds);
        }
        let [namespace, name] = labels;
        self.decisions.with_label_values(&[namespace, name, direction(record)]).inc();
    }

    /// Shows nothing more of a deployment that is gone or does not scale any more.
    pub fn forget(&self, deployment: &ObjectRef<InferenceDeployment>) {
        let [namespace, name] = labels(deployment);
        // What was never shown cannot be removed, and that is fine.
        let _ = self.desired.remove_label_values(&[namespace, name]);
        let _ = self.pressure.remove_label_values(&[namespace, name]);
        let _ = self.serving.remove_label_values(&[namespace, name]);
        let _ = self.fresh.remove_label_values(&[namespace, name]);
        let _ = self.held.remove_label_values(&[namespace, name]);
        let _ = self.cold_starts.remove_label_values(&[namespace, name]);
        let _ = self.cold_start_seconds.remove_label_values(&[namespace, name]);
        for direction in ["up", "down", "stay"] {
            let _ = self.decisions.remove_label_values(&[namespace, name, direction]);
        }
    }
}

fn labels(deployment: &ObjectRef<InferenceDeployment>) -> [&str; 2] {
    [deployment.namespace.as_deref().unwrap_or_default(), &deployment.name]
}

fn direction(record: &DecisionRecord) -> &'static str {
    match record.decision.desired.cmp(&record.decision.previous) {
        std::cmp::Ordering::Greater => "up",
        std::cmp::Ordering::Less => "down",
        std::cmp::Ordering::Equal => "stay",
    }
}
