//! What all replicas say at this moment, and the GPUs that they hold: for people who look. Talks to nobody.

use std::{collections::HashMap, sync::Arc, time::Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, runtime::reflector::Store};
use stoker_crds::{
    InferenceDeployment,
    endpoints::{DeploymentLoad, FleetLoad, Line, ReplicaLoad, RoutedReplica},
};
use stoker_replica::Stage;

use crate::{
    endpoints::state,
    lines::Waiting,
    observe::{by_owner, observe_replica},
    readings::Readings,
    validate::replicas_wanted,
};

/// Where that is known from.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// The deployments.
    pub deployments: Store<InferenceDeployment>,
    /// Their pods.
    pub pods: Store<Pod>,
    /// What agents said.
    pub readings: Readings,
    /// What gateways said.
    pub waiting: Waiting,
}

impl Fleet {
    /// All of it, as it is now.
    pub fn look(&self) -> FleetLoad {
        let (pods, now) = (by_owner(&self.pods), self.readings.now());
        let deployments = self.deployments.state();
        let mut deployments: Vec<_> = deployments.iter().map(|deployment| self.load(deployment, &pods, now)).collect();
        deployments.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        FleetLoad { deployments }
    }

    fn load(
        &self,
        deployment: &InferenceDeployment,
        pods: &HashMap<String, Vec<Arc<Pod>>>,
        now: Timestamp,
    ) -> DeploymentLoad {
        let own = pods.get(&deployment.uid().unwrap_or_default()).map(Vec::as_slice).unwrap_or_default();
        let resource = deployment.spec.gpu_name().counted_as();
        let (namespace, name) = (deployment.namespace().unwrap_or_default(), deployment.name_any());
        let routed = self.waiting.routed(&namespace, &name, Instant::now());
        let replica = |pod: &Arc<Pod>| {
            let replica = self.replica(pod, &resource, now);
            ReplicaLoad { routed: routed.as_ref().map(|line| routed_to(line, &replica.pod)), ..replica }
        };
        let mut replicas: Vec<_> = own.iter().map(replica).collect();
        replicas.sort_by(|a, b| a.pod.cmp(&b.pod));
        DeploymentLoad {
            namespace,
            name,
            in_line: routed.as_ref().map(|line| line.waiting),
            replicas_wanted: replicas_wanted(deployment),
            replicas,
        }
    }

    fn replica(&self, pod: &Pod, resource: &str, now: Timestamp) -> ReplicaLoad {
        let replica = observe_replica(pod, self.readings.at(pod.metadata.uid.as_deref().unwrap_or_default(), now));
        let held = held_seconds(pod, &replica.pod.stage, now);
        let gpus = held.map_or(0, |_| replica.pod.needs.count(resource));
        ReplicaLoad {
            pod: replica.pod.name.clone(),
            state: state(&replica),
            gpus,
            gpu_seconds: gpus * held.unwrap_or_default(),
            tokens_per_second: replica.reading.report().and_then(|_| replica.reading.tokens_per_second()),
            load: replica.reading.report().cloned(),
            routed: None,
        }
    }
}

/// What gateways have on a pod; they say nothing of one where they have nothing.
fn routed_to(line: &Line, pod: &str) -> RoutedReplica {
    let nothing = || RoutedReplica { pod: pod.to_owned(), ..RoutedReplica::default() };
    line.replicas.iter().find(|replica| replica.pod == pod).cloned().unwrap_or_else(nothing)
}

/// Since when a pod holds what it asks for; `None` while it holds nothing: without a node, or after its end.
fn held_seconds(pod: &Pod, stage: &Stage, now: Timestamp) -> Option<u64> {
    if matches!(stage, Stage::Finished { .. }) {
        return None;
    }
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let placed = conditions.iter().find(|condition| condition.type_ == "PodScheduled" && condition.status == "True")?;
    let since = placed.last_transition_time.as_ref()?.0;
    u64::try_from(now.duration_since(since).as_secs()).ok().or(Some(0))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: &Value) -> Pod {
        let container = json!({"name": "agent", "resources": {"requests": {"nvidia.com/gpu": "2", "cpu": "4"}}});
        let meta = json!({"name": "chat-0a1b2c3d-0", "uid": "u", "creationTimestamp": "2026-01-31T11:00:00Z",
            "labels": {"stoker.dev/revision": "0a1b2c3d", "stoker.dev/ordinal": "0"}});
        serde_json::from_value(json!({"metadata": meta, "spec": {"containers": [container]}, "status": status}))
            .unwrap()
    }

    fn held(status: &Value) -> (u64, u64) {
        let now = "2026-01-31T12:30:00Z".parse().unwrap();
        let writer = kube::runtime::reflector::store::Writer::<InferenceDeployment>::default();
        let pods = kube::runtime::reflector::store::Writer::<Pod>::default();
        let (deployments, pods) = (writer.as_reader(), pods.as_reader());
        let fleet = Fleet { deployments, pods, readings: Readings::default(), waiting: Waiting::default() };
        let ReplicaLoad { gpus, gpu_seconds, load, tokens_per_second, .. } =
            fleet.replica(&pod(status), "nvidia.com/gpu", now);
        assert!(load.is_none() && tokens_per_second.is_none(), "it said nothing");
        (gpus, gpu_seconds)
    }

    #[test]
    fn gpus_are_held_from_the_scheduler_on_until_the_pod_has_ended() {
        let scheduled = |value: &str| json!([{"type": "PodScheduled", "status": value, "lastTransitionTime": "2026-01-31T12:00:00Z"}]);
        // Half an hour, and two of them.
        assert_eq!(held(&json!({"phase": "Pending", "conditions": scheduled("True")})), (2, 3600));
        assert_eq!(held(&json!({"phase": "Running", "conditions": scheduled("True")})), (2, 3600));
        assert_eq!(held(&json!({"phase": "Pending", "conditions": scheduled("False")})), (0, 0));
        assert_eq!(held(&json!({"phase": "Failed", "conditions": scheduled("True")})), (0, 0));
        assert_eq!(held(&json!({"phase": "Pending"})), (0, 0));
    }
}
