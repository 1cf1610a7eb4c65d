//! What whoever listens to the API server may believe: which pods serve, and how few replicas may. An operator's writes are held against it.
//!
//! News takes a moment, so what was true a moment ago excuses a write, and nothing before does. Pure: hears what it is told, and when.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::Value;
use stoker_crds::{InferenceDeployment, conditions::READY};
use stoker_operator::validate::{Defaults, validate};

use crate::operator::{AGENT_IMAGE, intent_of, revision_of, serves};

/// See the module.
#[derive(Debug, Default)]
pub struct Witness {
    pods: HashMap<String, Known>,
    floors: HashMap<String, Vec<Floor>>,
}

/// A pod.
#[derive(Debug)]
struct Known {
    name: String,
    /// UID of its deployment.
    deployment: String,
    revision: String,
    /// Since when requests reach it and it was not told to leave.
    serves_since: Option<Instant>,
    /// When that ended.
    served_until: Option<Instant>,
    /// It was told to leave.
    leaves: bool,
}

/// How few replicas of a deployment may serve while others are replaced.
#[derive(Debug)]
struct Floor {
    generation: i64,
    fewest: usize,
    /// When another one was asked for.
    until: Option<Instant>,
}

impl Known {
    fn hear(&mut self, serves: bool, now: Instant) {
        match (self.serves_since, serves) {
            (None, true) => (self.serves_since, self.served_until) = (Some(now), None),
            (Some(_), false) => (self.serves_since, self.served_until) = (None, Some(now)),
            _ => {}
        }
    }

    /// Whether who hears of everything within so long may count on it.
    fn is_counted_on(&self, heard_within: Duration, now: Instant) -> bool {
        let served = self.served_until.is_some_and(|until| now.duration_since(until) < heard_within);
        !self.leaves && (self.serves_since.is_some() || served)
    }
}

impl Witness {
    /// A pod is like this now.
    pub fn hear_pod(&mut self, pod: &Pod, now: Instant) {
        let Some((uid, deployment)) = pod.uid().zip(owner(pod)) else { return };
        let known = self.pods.entry(uid).or_insert_with(|| Known {
            name: pod.name_any(),
            deployment,
            revision: revision_of(pod),
            serves_since: None,
            served_until: None,
            leaves: false,
        });
        // Who deletes one may be a user, of whom an operator hears later.
        if pod.metadata.deletion_timestamp.is_none() {
            known.leaves = is_told_to_leave(pod);
        }
        known.hear(serves(pod) && !is_told_to_leave(pod), now);
    }

    /// A pod is gone.
    pub fn hear_gone(&mut self, pod: &Pod, now: Instant) {
        if let Some(known) = pod.uid().and_then(|uid| self.pods.get_mut(&uid)) {
            known.hear(false, now);
        }
    }

    /// A deployment asks for this now.
    pub fn hear_deployment(&mut self, deployment: &InferenceDeployment, now: Instant) {
        let Some((uid, generation)) = deployment.uid().zip(deployment.metadata.generation) else { return };
        let floors = self.floors.entry(uid).or_default();
        if let Some(last) = floors.last_mut() {
            if generation <= last.generation {
                return;
            }
            last.until = Some(now);
            if generation > last.generation + 1 {
                // What was asked for in between is not known.
                floors.push(Floor { generation: generation - 1, fewest: 0, until: Some(now) });
            }
        }
        floors.push(Floor { generation, fewest: fewest(deployment), until: None });
    }

    /// The last generation of a deployment that was heard of.
    pub fn generation(&self, uid: &str) -> Option<i64> {
        Some(self.floors.get(uid)?.last()?.generation)
    }

    /// What is wrong with telling this pod to leave, or deleting it, for who hears of everything within so long.
    pub fn wrong_departure(&self, pod: &Pod, heard_within: Duration, now: Instant) -> Option<String> {
        if !serves(pod) || is_told_to_leave(pod) {
            return None;
        }
        let (uid, deployment) = pod.uid().zip(owner(pod))?;
        let floors = self.floors.get(&deployment)?;
        let is_known = |floor: &&Floor| floor.until.is_none_or(|until| now.duration_since(until) < heard_within);
        let fewest = floors.iter().filter(is_known).map(|floor| floor.fewest).min()?;
        let others = self.pods.iter().filter(|(other, known)| **other != uid && known.deployment == deployment);
        let left = others.filter(|(_, known)| known.is_counted_on(heard_within, now)).count();
        (left < fewest).then(|| format!("{left} replicas would serve, {fewest} must"))
    }

    /// What is wrong with calling a deployment ready whose revision is this one.
    pub fn wrong_ready(
        &self,
        deployment: &str,
        revision: &str,
        heard_within: Duration,
        now: Instant,
    ) -> Option<String> {
        let of_other = |known: &&Known| known.deployment == deployment && known.revision != revision;
        let serves = |known: &&Known| known.serves_since.is_some_and(|since| now.duration_since(since) >= heard_within);
        let other = self.pods.values().filter(of_other).find(serves)?;
        Some(format!("{} serves, which is of revision {}", other.name, other.revision))
    }
}

/// What is wrong with this status of a deployment of this generation, by itself.
pub fn wrong_generation(status: &Value, generation: Option<i64>) -> Option<String> {
    let of_ready = ready(status)?["observedGeneration"].as_i64();
    let of_all = status["observedGeneration"].as_i64();
    (of_ready != generation || of_all != generation)
        .then(|| format!("ready of generation {of_ready:?} in a status of {of_all:?}, where {generation:?} is"))
}

/// Whether this status calls its deployment ready.
pub fn is_ready(status: &Value) -> bool {
    ready(status).is_some()
}

/// The condition that calls it ready.
fn ready(status: &Value) -> Option<&Value> {
    let mut conditions = status["conditions"].as_array()?.iter();
    conditions.find(|condition| condition["type"] == READY && condition["status"] == "True")
}

fn is_told_to_leave(pod: &Pod) -> bool {
    intent_of(pod).is_some_and(|(_, drains)| drains)
}

fn owner(pod: &Pod) -> Option<String> {
    Some(pod.owner_references().first()?.uid.clone())
}

/// How few may serve while others are replaced; none where the operator decides how many there are, or cannot.
fn fewest(deployment: &InferenceDeployment) -> usize {
    let defaults = Defaults { agent_image: AGENT_IMAGE.to_owned(), ..Defaults::default() };
    match validate(deployment, &defaults) {
        Ok(valid) if valid.scaling.is_none() => {
            let replicas = valid.replicas as usize;
            replicas.saturating_sub(valid.replacing.of(replicas).max_unavailable)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const HEARD_WITHIN: Duration = Duration::from_secs(10);

    fn deployment(generation: i64, spec: Value) -> InferenceDeployment {
        let mut spec = spec;
        spec["model"] = json!({"source": "builtin://ember"});
        serde_json::from_value(json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec,
            "metadata": {"name": "chat", "namespace": "default", "uid": "chat", "generation": generation},
        }))
        .unwrap()
    }

    fn pod(uid: &str, revision: &str, ready: bool, drains: bool) -> Pod {
        let want = if drains { json!({"drain": {"deadlineSeconds": 5, "withdrawSeconds": 1}}) } else { json!("serve") };
        let intent = json!({"number": 1, "want": want, "since": "2026-11-22T10:00:00Z"}).to_string();
        serde_json::from_value(json!({
            "metadata": {
                "name": format!("chat-{revision}-{uid}"), "uid": uid, "labels": {"stoker.dev/revision": revision},
                "annotations": {"stoker.dev/intent": intent},
                "ownerReferences": [{"apiVersion": "v1", "kind": "InferenceDeployment", "name": "chat", "uid": "chat"}],
            },
            "status": {"conditions": [{"type": "Ready", "status": if ready { "True" } else { "False" }}]},
        }))
        .unwrap()
    }

    /// Two that serve, of a deployment that asks for so much; all heard of at a moment.
    fn witness(spec: Value, began: Instant) -> Witness {
        let mut witness = Witness::default();
        witness.hear_deployment(&deployment(1, spec), began);
        for uid in ["a", "b"] {
            witness.hear_pod(&pod(uid, "r1", true, false), began);
        }
        witness
    }

    #[test]
    fn no_more_leave_than_a_deployment_allows() {
        let (began, a) = (Instant::now(), pod("a", "r1", true, false));
        let wrong = |spec| witness(spec, began).wrong_departure(&a, HEARD_WITHIN, began);
        assert_eq!(wrong(json!({"replicas": 1})), None);
        assert_eq!(wrong(json!({"replicas": 2})), Some("1 replicas would serve, 2 must".to_owned()));
        assert_eq!(wrong(json!({"replicas": 2, "rollout": {"maxUnavailable": 1}})), None);
        assert_eq!(wrong(json!({"replicas": 2, "rollout": {"minAvailable": "50%"}})), None);
        assert!(wrong(json!({"replicas": 2, "rollout": {"minAvailable": "90%"}})).is_some());
        assert_eq!(wrong(json!({"scaling": {"min": 2, "max": 3}})), None, "others decide");
        for gone in [pod("a", "r1", false, false), pod("a", "r1", true, true)] {
            let witness = witness(json!({"replicas": 2}), began);
            assert_eq!(witness.wrong_departure(&gone, HEARD_WITHIN, began), None, "it does not serve any more");
        }
    }

    #[test]
    fn what_was_asked_or_served_a_moment_ago_excuses() {
        let (began, a) = (Instant::now(), pod("a", "r1", true, false));
        let after = |seconds| began + Duration::from_secs(seconds);
        let mut asked = witness(json!({"replicas": 1}), began);
        asked.hear_deployment(&deployment(2, json!({"replicas": 2})), after(1));
        assert_eq!(asked.wrong_departure(&a, HEARD_WITHIN, after(10)), None);
        assert!(asked.wrong_departure(&a, HEARD_WITHIN, after(11)).is_some());
        // Of the generation in between nobody heard.
        asked.hear_deployment(&deployment(4, json!({"replicas": 2})), after(20));
        assert_eq!(asked.wrong_departure(&a, HEARD_WITHIN, after(21)), None);

        let mut served = witness(json!({"replicas": 1}), began);
        served.hear_gone(&pod("b", "r1", true, false), after(1));
        assert_eq!(served.wrong_departure(&a, HEARD_WITHIN, after(10)), None);
        assert!(served.wrong_departure(&a, HEARD_WITHIN, after(11)).is_some());
        // Whoever told one to leave knows.
        let mut told = witness(json!({"replicas": 1}), began);
        told.hear_pod(&pod("b", "r1", true, true), after(1));
        assert!(told.wrong_departure(&a, HEARD_WITHIN, after(1)).is_some());
    }

    #[test]
    fn nobody_is_ready_while_another_revision_serves_or_of_another_generation() {
        let began = Instant::now();
        let witness = witness(json!({"replicas": 2}), began);
        let wrong = |revision, seconds| {
            witness.wrong_ready("chat", revision, HEARD_WITHIN, began + Duration::from_secs(seconds))
        };
        assert_eq!((wrong("r1", 100), wrong("r2", 9)), (None, None));
        assert!(wrong("r2", 10).is_some());
        let status = |value: &str, of_ready: i64, of_all: i64| {
            let ready = json!({"type": "Ready", "status": value, "observedGeneration": of_ready});
            wrong_generation(&json!({"observedGeneration": of_all, "conditions": [ready]}), Some(2))
        };
        assert_eq!((status("True", 2, 2), status("False", 1, 1)), (None, None));
        assert!(status("True", 1, 2).is_some() && status("True", 1, 1).is_some() && status("True", 2, 1).is_some());
    }
}
