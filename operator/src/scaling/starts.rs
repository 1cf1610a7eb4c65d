//! How long replicas take to start, learned from their pods: from creation to the first readiness, by model and node; apart from
//! others those that began on a node which had the model in memory.
//!
//! Owns bounded memories for each model on each node and which pods were counted. Reads no clock: all moments are the
//! cluster's own.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use stoker_scaling::StartTimes;

use crate::desired::labels;

/// A first readiness later than this after creation is none: the pod lost and regained it before we looked.
const START_SECONDS_MAX: f64 = 3600.0;
/// Models and nodes remembered at most; beyond it everything is learned anew.
const PAIRS_KEPT: usize = 4096;

/// See the module.
#[derive(Clone, Debug, Default)]
pub(super) struct Starts {
    cold: Times,
    warm: Times,
    /// How starts began, by the UID of their pods. What is counted stays, so that it is counted once.
    begun: HashMap<String, Begun>,
}

/// The pods of a deployment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pods<'a> {
    /// Its replicas.
    pub(super) replicas: &'a [Arc<Pod>],
    /// Those that bring its model ahead or keep it in memory; `None` where no node is asked to stand by.
    pub(super) ahead: Option<&'a [Arc<Pod>]>,
}

/// How a start began. It is judged when its pod is first seen on its node: later the pod that stood by there may be gone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Begun {
    Cold,
    Warm,
    /// Counted, or over before anybody looked where nodes stand by.
    Over,
}

impl Starts {
    /// Forgets which pods were counted, of those that are gone.
    pub(super) fn keep_only(&mut self, pods: &HashMap<String, Vec<Arc<Pod>>>) {
        let uids: HashSet<String> = pods.values().flatten().filter_map(|pod| pod.uid()).collect();
        self.begun.retain(|uid, _| uids.contains(uid));
    }

    /// Counts the starts of pods that serve for the first time.
    pub(super) fn learn(&mut self, model: &str, pods: Pods<'_>) {
        for pod in pods.replicas {
            let Some((uid, node)) = pod.uid().zip(node(pod)) else { continue };
            let took = start_seconds(pod);
            let begun = self.begun.entry(uid).or_insert_with(|| begun(pod, node, took.is_some(), pods.ahead));
            let Some(seconds) = took else { continue };
            let times = match std::mem::replace(begun, Begun::Over) {
                Begun::Cold => &mut self.cold,
                Begun::Warm => &mut self.warm,
                Begun::Over => continue,
            };
            times.record(model, node, seconds);
        }
    }

    /// 90th percentile of the start time of this model on its slowest node: nobody knows where the next one lands.
    /// `None`: none was seen.
    pub(super) fn p90_seconds(&self, model: &str) -> Option<f64> {
        self.cold.p90_seconds(model)
    }

    /// The same on nodes that had it in memory.
    pub(super) fn warm_p90_seconds(&self, model: &str) -> Option<f64> {
        self.warm.p90_seconds(model)
    }
}

/// Start times by model, then by node.
#[derive(Clone, Debug, Default)]
struct Times(HashMap<String, BTreeMap<String, StartTimes>>);

impl Times {
    fn record(&mut self, model: &str, node: &str, seconds: f64) {
        if seconds > START_SECONDS_MAX {
            return;
        }
        if self.0.values().map(BTreeMap::len).sum::<usize>() >= PAIRS_KEPT {
            self.0.clear();
        }
        let nodes = self.0.entry(model.to_owned()).or_default();
        nodes.entry(node.to_owned()).or_default().record(seconds);
    }

    fn p90_seconds(&self, model: &str) -> Option<f64> {
        let nodes = self.0.get(model).into_iter().flat_map(BTreeMap::values);
        nodes.filter_map(StartTimes::p90_seconds).reduce(f64::max)
    }
}

/// A start that is over when it is first seen began nobody knows how: who stood by may be gone since.
fn begun(pod: &Pod, node: &str, is_over: bool, ahead: Option<&[Arc<Pod>]>) -> Begun {
    let Some(ahead) = ahead else { return Begun::Cold };
    if ahead.iter().any(|standby| had_model(standby, pod, node)) {
        Begun::Warm
    } else if is_over {
        Begun::Over
    } else {
        Begun::Cold
    }
}

/// True if this pod had kept a replica's model in its node's memory before the replica was made.
fn had_model(standby: &Pod, replica: &Pod, node: &str) -> bool {
    let revision = |pod: &Pod| pod.labels().get(labels::REVISION).cloned();
    let is_of_it = labels::stands_by(standby.labels()) && revision(standby) == revision(replica);
    let before = ready_since(standby).zip(replica.creation_timestamp()).is_some_and(|(ready, made)| ready <= made.0);
    is_of_it && before && self::node(standby) == Some(node)
}

fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Since when it is ready; `None` while it is not.
fn ready_since(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().find(|condition| condition.type_ == "Ready" && condition.status == "True")?;
    Some(ready.last_transition_time.as_ref()?.0)
}

/// How long its start took. `None` while it starts, and when its agent was started more than once.
fn start_seconds(pod: &Pod) -> Option<f64> {
    let containers = pod.status.as_ref()?.container_statuses.iter().flatten();
    let restarts: i32 = containers.map(|container| container.restart_count).sum();
    let (made, ready) = (pod.creation_timestamp()?.0, ready_since(pod)?);
    (restarts == 0).then(|| ready.duration_since(made).as_secs_f64())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Made at ten; `None`: not ready yet.
    fn pod(uid: &str, node: &str, ready: Option<&str>) -> Arc<Pod> {
        made(uid, json!({"stoker.dev/revision": "0a"}), node, ready)
    }

    fn standby(node: &str, revision: &str, ready: Option<&str>) -> Arc<Pod> {
        made(node, serde_json::to_value(labels::standby("chat", revision)).unwrap(), node, ready)
    }

    fn made(uid: &str, labels: Value, node: &str, ready: Option<&str>) -> Arc<Pod> {
        let conditions = ready.map(
            |time| json!({"type": "Ready", "status": "True", "lastTransitionTime": format!("2026-11-21T{time}Z")}),
        );
        let pod = json!({
            "metadata": {"name": uid, "uid": uid, "labels": labels, "creationTimestamp": "2026-11-21T10:00:00Z"},
            "spec": {"nodeName": node, "containers": []},
            "status": {"conditions": conditions.into_iter().collect::<Vec<_>>()},
        });
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn alone(replicas: &[Arc<Pod>]) -> Pods<'_> {
        Pods { replicas, ahead: None }
    }

    #[test]
    fn the_slowest_node_of_the_model_counts() {
        let mut starts = Starts::default();
        assert_eq!(starts.p90_seconds("m"), None);
        starts.learn("m", alone(&[pod("a", "fast", Some("10:00:05")), pod("b", "slow", Some("10:00:30"))]));
        assert_eq!(starts.p90_seconds("m"), Some(30.0));
        assert_eq!(starts.p90_seconds("other"), None);
    }

    #[test]
    fn a_pod_is_counted_once_and_a_late_readiness_is_no_start() {
        let mut starts = Starts::default();
        starts.learn("m", alone(&[pod("a", "n", Some("10:00:05"))]));
        starts.learn("m", alone(&[pod("a", "n", Some("10:00:50")), pod("b", "n", Some("12:00:00"))]));
        assert_eq!(starts.p90_seconds("m"), Some(5.0));
    }

    /// What is learned of cold and of warm starts of one replica that was first seen while it started, and was ready at 10:00:07.
    fn learned(standby: Arc<Pod>) -> (Option<f64>, Option<f64>) {
        let (mut starts, ahead) = (Starts::default(), [standby]);
        starts.learn("m", Pods { replicas: &[pod("a", "n", None)], ahead: Some(&ahead) });
        // Once it serves, who stood by for it goes.
        starts.learn("m", Pods { replicas: &[pod("a", "n", Some("10:00:07"))], ahead: Some(&[]) });
        (starts.p90_seconds("m"), starts.warm_p90_seconds("m"))
    }

    #[test]
    fn a_start_is_warm_on_a_node_that_had_the_model_before_the_replica_was_made() {
        let (cold, warm) = ((Some(7.0), None), (None, Some(7.0)));
        assert_eq!(learned(standby("n", "0a", Some("09:59:00"))), warm);
        assert_eq!(learned(standby("n", "0a", Some("10:00:01"))), cold, "it fetched beside");
        assert_eq!(learned(standby("n", "0a", None)), cold, "it had not fetched all");
        assert_eq!(learned(standby("n", "0b", Some("09:59:00"))), cold, "another revision's model");
        assert_eq!(learned(standby("other", "0a", Some("09:59:00"))), cold);
        let fetched_ahead = made("p", json!(labels::prefetch("chat", "0a")), "n", Some("09:59:00"));
        assert_eq!(learned(fetched_ahead), cold, "on its disk only");
    }

    #[test]
    fn where_nodes_stand_by_a_start_that_was_over_when_first_seen_is_counted_if_it_was_warm() {
        let over = [pod("a", "n", Some("10:00:07")), pod("b", "other", Some("10:00:40"))];
        let mut starts = Starts::default();
        let ahead = [standby("n", "0a", Some("09:59:00"))];
        starts.learn("m", Pods { replicas: &over, ahead: Some(&ahead) });
        assert_eq!((starts.p90_seconds("m"), starts.warm_p90_seconds("m")), (None, Some(7.0)));
        starts.learn("m", alone(&over));
        assert_eq!(starts.p90_seconds("m"), None, "they stay as they were judged");
    }
}
