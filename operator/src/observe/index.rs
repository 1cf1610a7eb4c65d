//! Which pods a deployment has: with ten thousand pods in the cache, a round must not look through all of them for its ten.
//!
//! Owns names only; whether there is such a pod now, the cache says. A name that was lost by mistake costs nothing but a
//! reading of the API server, which a round does before it writes anyway.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};

use crate::desired::labels;

/// A pod is noted before the cache has it, in a first list by as long as the list takes. A name without a pod is forgotten
/// after that.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(120);

/// When a name was last noted.
type Noted = HashMap<String, Instant>;

/// Names of pods by namespace and deployment. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct PodIndex {
    names: Arc<Mutex<HashMap<(String, String), Noted>>>,
}

impl PodIndex {
    /// Something happened to this pod.
    pub fn note(&self, pod: &Pod, now: Instant) {
        let Some(deployment) = pod.labels().get(labels::INSTANCE) else { return };
        let place = (pod.namespace().unwrap_or_default(), deployment.clone());
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.entry(place).or_default().insert(pod.name_any(), now);
    }

    /// The pods of a deployment that are in the cache.
    pub fn pods(&self, cache: &Store<Pod>, namespace: &str, deployment: &str, now: Instant) -> Vec<Arc<Pod>> {
        let place = (namespace.to_owned(), deployment.to_owned());
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(of_deployment) = names.get_mut(&place) else { return Vec::new() };
        let mut found = Vec::new();
        of_deployment.retain(|name, noted| match cache.get(&ObjectRef::new(name).within(namespace)) {
            Some(pod) => {
                found.push(pod);
                true
            }
            None => now.duration_since(*noted) < FORGOTTEN_AFTER,
        });
        if of_deployment.is_empty() {
            names.remove(&place);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector::store::Writer, watcher::Event};
    use serde_json::json;

    use super::*;

    fn pod(name: &str, deployment: &str) -> Pod {
        let metadata = json!({"name": name, "namespace": "a", "labels": {"app.kubernetes.io/instance": deployment}});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    fn names(found: &[Arc<Pod>]) -> Vec<String> {
        let mut names: Vec<String> = found.iter().map(|pod| pod.name_any()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_deployment_has_the_pods_that_the_cache_has_and_names_without_a_pod_are_forgotten() {
        let (index, mut writer, begun) = (PodIndex::default(), Writer::default(), Instant::now());
        let cache = writer.as_reader();
        for pod in [pod("x-0", "x"), pod("x-1", "x"), pod("y-0", "y")] {
            index.note(&pod, begun);
            if pod.name_any() != "x-1" {
                writer.apply_watcher_event(&Event::Apply(pod));
            }
        }
        let of_x = |after: u64| names(&index.pods(&cache, "a", "x", begun + Duration::from_secs(after)));
        assert_eq!(of_x(1), ["x-0"]);
        writer.apply_watcher_event(&Event::Apply(pod("x-1", "x")));
        assert_eq!(of_x(2), ["x-0", "x-1"]);
        assert_eq!(names(&index.pods(&cache, "b", "x", begun)), [""; 0]);

        for gone in ["x-0", "x-1"] {
            writer.apply_watcher_event(&Event::Delete(pod(gone, "x")));
        }
        assert_eq!((of_x(3), index.names.lock().unwrap().len()), (vec![], 2));
        assert_eq!((of_x(200), index.names.lock().unwrap().len()), (vec![], 1));
    }
}
