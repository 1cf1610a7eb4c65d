//! Every deployment that there is, read from the watched objects whenever Prometheus asks: nothing has to be forgotten.

use kube::{ResourceExt, runtime::reflector::Store};
use prometheus::{
    IntGaugeVec, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};
use stoker_crds::InferenceDeployment;

use crate::validate::replicas_wanted;

/// `stoker_operator_replicas{namespace, name, state}`; states are `wanted` (what the spec asks for), `existing` and `serving`.
pub(super) struct FleetMetrics {
    deployments: Store<InferenceDeployment>,
    replicas: IntGaugeVec,
}

impl FleetMetrics {
    /// Of the deployments of a store.
    pub(super) fn new(deployments: Store<InferenceDeployment>) -> prometheus::Result<Self> {
        let opts = Opts::new("stoker_operator_replicas", "Replicas of every deployment by state");
        Ok(Self { deployments, replicas: IntGaugeVec::new(opts, &["namespace", "name", "state"])? })
    }

    fn show(&self, deployment: &InferenceDeployment) {
        let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
        let status = deployment.status.as_ref();
        let counts = [
            ("wanted", replicas_wanted(deployment) as i32),
            ("existing", status.map_or(0, |status| status.replicas)),
            ("serving", status.map_or(0, |status| status.ready_replicas)),
        ];
        for (state, count) in counts {
            self.replicas.with_label_values(&[&*namespace, &*name, state]).set(count.into());
        }
    }
}

impl Collector for FleetMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.replicas.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.replicas.reset();
        self.deployments.state().iter().for_each(|deployment| self.show(deployment));
        self.replicas.collect()
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector, watcher};
    use serde_json::json;

    use super::*;
    use crate::metrics::Metrics;

    fn deployment(name: &str) -> InferenceDeployment {
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "metadata": {"name": name, "namespace": "team"},
            "spec": {"model": {"source": "builtin://ember"}, "replicas": 3},
            "status": {"replicas": 2, "readyReplicas": 1},
        }))
        .unwrap()
    }

    #[test]
    fn deployments_are_shown_as_they_are_and_those_that_are_gone_no_more() {
        let (store, mut writer) = reflector::store();
        let metrics = Metrics::new().unwrap();
        metrics.watch(store).unwrap();
        writer.apply_watcher_event(&watcher::Event::Apply(deployment("chat")));
        let text = metrics.render().unwrap();
        for line in ["wanted\"} 3", "existing\"} 2", "serving\"} 1"] {
            assert!(text.contains(&format!("{{name=\"chat\",namespace=\"team\",state=\"{line}")), "{text}");
        }
        writer.apply_watcher_event(&watcher::Event::Delete(deployment("chat")));
        assert!(!metrics.render().unwrap().contains("chat"));
    }
}
