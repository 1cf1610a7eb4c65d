//! Prometheus metrics of the operator. Names carry `stoker_operator_` and their unit.

mod fleet;
mod scaling;

use kube::runtime::reflector::Store;
use prometheus::{Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

use stoker_crds::InferenceDeployment;

use self::fleet::FleetMetrics;
pub use self::scaling::ScalingMetrics;

/// Upper bounds in seconds: fine around the few milliseconds that a settled round takes.
const RECONCILE_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// All metrics of the operator.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Seconds of one reconciliation, failed ones included.
    pub reconcile_seconds: Histogram,
    /// Failed reconciliations by step.
    pub reconcile_errors: IntCounterVec,
    /// Writes to the API server by kind and verb, refused ones included.
    pub api_writes: IntCounterVec,
    /// Pods deleted, by reason.
    pub pods_deleted: IntCounterVec,
    /// Readings of agents by outcome.
    pub probe_reads: IntCounterVec,
    /// Plans that the linter refused.
    pub plans_refused: IntCounter,
    /// 1 while this process leads.
    pub leader: IntGauge,
    /// Decisions on numbers of replicas.
    pub scaling: ScalingMetrics,
}

impl Metrics {
    /// Registers everything once.
    pub fn new() -> prometheus::Result<Self> {
        let registry = Registry::new();
        let counters = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntCounterVec> {
            let counter = IntCounterVec::new(Opts::new(format!("stoker_operator_{name}"), help), labels)?;
            registry.register(Box::new(counter.clone()))?;
            Ok(counter)
        };
        let metrics = Self {
            reconcile_seconds: Histogram::with_opts(
                HistogramOpts::new("stoker_operator_reconcile_duration_seconds", "Duration of one reconciliation")
                    .buckets(RECONCILE_BUCKETS.to_vec()),
            )?,
            reconcile_errors: counters("reconcile_errors_total", "Failed reconciliations by step", &["step"])?,
            api_writes: counters("api_writes_total", "Writes to the API server", &["kind", "verb"])?,
            pods_deleted: counters("pods_deleted_total", "Pods deleted by reason", &["why"])?,
            probe_reads: counters("probe_reads_total", "Readings of agents by outcome", &["outcome"])?,
            plans_refused: IntCounter::new("stoker_operator_plans_refused_total", "Plans that the linter refused")?,
            leader: IntGauge::new("stoker_operator_leader", "1 while this process leads")?,
            scaling: ScalingMetrics::new(&registry)?,
            registry: registry.clone(),
        };
        registry.register(Box::new(metrics.reconcile_seconds.clone()))?;
        registry.register(Box::new(metrics.plans_refused.clone()))?;
        registry.register(Box::new(metrics.leader.clone()))?;
        Ok(metrics)
    }

    /// Shows the deployments of a store from now on, once.
    pub fn watch(&self, deployments: Store<InferenceDeployment>) -> prometheus::Result<()> {
        self.registry.register(Box::new(FleetMetrics::new(deployments)?))
    }

    /// Counts one write to the API server.
    pub fn wrote(&self, kind: &str, verb: &str) {
        self.api_writes.with_label_values(&[kind, verb]).inc();
    }

    /// The text that Prometheus scrapes.
    pub fn render(&self) -> prometheus::Result<String> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
