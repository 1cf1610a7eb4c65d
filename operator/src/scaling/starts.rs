//! How long replicas take to start, learned from their pods: from creation to the first readiness, by model and node.
//!
//! Owns one bounded memory for each model on each node and which pods were counted. Reads no clock: both moments are the
//! cluster's own.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use stoker_scaling::StartTimes;

/// A first readiness later than this after creation is none: the pod lost and regained it before we looked.
const START_SECONDS_MAX: f64 = 3600.0;
/// Models and nodes remembered at most; beyond it everything is learned anew.
const PAIRS_KEPT: usize = 4096;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Starts {
    /// By model, then by node.
    times: HashMap<String, BTreeMap<String, StartTimes>>,
    counted: HashSet<String>,
}

impl Starts {
    /// Forgets which pods were counted, of those that are gone.
    pub(super) fn keep_only(&mut self, pods: &HashMap<String, Vec<Arc<Pod>>>) {
        let uids: HashSet<String> = pods.values().flatten().filter_map(|pod| pod.uid()).collect();
        self.counted.retain(|uid| uids.contains(uid));
    }

    /// Counts the starts of pods that serve for the first time.
    pub(super) fn learn(&mut self, model: &str, pods: &[Arc<Pod>]) {
        for pod in pods {
            let Some((uid, start)) = pod.uid().zip(Start::of(pod)) else { continue };
            if !self.counted.insert(uid) || start.seconds > START_SECONDS_MAX {
                continue;
            }
            if self.times.values().map(BTreeMap::len).sum::<usize>() >= PAIRS_KEPT {
                self.times.clear();
            }
            let nodes = self.times.entry(model.to_owned()).or_default();
            nodes.entry(start.node).or_default().record(start.seconds);
        }
    }

    /// 90th percentile of the start time of this model on its slowest node: nobody knows where the next one lands.
    /// `None`: none was seen.
    pub(super) fn p90_seconds(&self, model: &str) -> Option<f64> {
        let nodes = self.times.get(model).into_iter().flat_map(BTreeMap::values);
        nodes.map(StartTimes::p90_seconds).reduce(f64::max)
    }
}

/// One start that is over.
struct Start {
    node: String,
    seconds: f64,
}

impl Start {
    /// `None` while it starts, and when its agent was started more than once.
    fn of(pod: &Pod) -> Option<Self> {
        let status = pod.status.as_ref()?;
        let restarts: i32 = status.container_statuses.iter().flatten().map(|container| container.restart_count).sum();
        let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready")?;
        let begun = pod.creation_timestamp()?.0;
        let done = ready.last_transition_time.as_ref()?.0;
        let node = pod.spec.as_ref()?.node_name.clone()?;
        let seconds = done.duration_since(begun).as_secs_f64();
        (ready.status == "True" && restarts == 0).then_some(Self { node, seconds })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, node: &str, ready: &str) -> Arc<Pod> {
        let pod = json!({
            "metadata": {"name": uid, "uid": uid, "creationTimestamp": "2026-11-21T10:00:00Z"},
            "spec": {"nodeName": node, "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": ready}]},
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn the_slowest_node_of_the_model_counts() {
        let mut starts = Starts::default();
        assert_eq!(starts.p90_seconds("m"), None);
        starts.learn("m", &[pod("a", "fast", "2026-11-21T10:00:05Z"), pod("b", "slow", "2026-11-21T10:00:30Z")]);
        assert_eq!(starts.p90_seconds("m"), Some(30.0));
        assert_eq!(starts.p90_seconds("other"), None);
    }

    #[test]
    fn a_pod_is_counted_once_and_a_late_readiness_is_no_start() {
        let mut starts = Starts::default();
        starts.learn("m", &[pod("a", "n", "2026-11-21T10:00:05Z")]);
        starts.learn("m", &[pod("a", "n", "2026-11-21T10:00:50Z"), pod("b", "n", "2026-11-21T12:00:00Z")]);
        assert_eq!(starts.p90_seconds("m"), Some(5.0));
    }
}
