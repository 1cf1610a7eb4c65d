//! What no write may do, whatever went wrong before it, and what is heard of the cluster so that it can be told.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Bytes,
    http::{Method, header, request::Parts},
};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{
    ResourceExt,
    api::ListParams,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde_json::Value;
use stoker_crds::{InferenceDeployment, intent::Want};
use stoker_operator::{
    desired::labels,
    observe,
    rollout::{UNREACHABLE_PATIENCE, deadline},
};
use stoker_replica::Intent;

use super::{Fault, Shared, lock};
use crate::{operator::serves, witness};

/// The Lease, as the chart names it.
const LEASE: (&str, &str) = ("stoker-system", "stoker-operator");
/// How long a generation is waited for that was asked for already.
const WITNESS_PATIENCE: Duration = Duration::from_secs(2);

impl Shared {
    /// What no write may do, whatever went wrong before it.
    pub(super) async fn watch_over(&self, method: &Method, path: &str, body: &Bytes) {
        let Some(name) = path.strip_suffix('/').unwrap_or(path).split("/pods/").nth(1) else { return };
        let words: Value = serde_json::from_slice(body).unwrap_or_default();
        let version = match *method {
            Method::DELETE => &words["preconditions"]["resourceVersion"],
            Method::PATCH => &words["metadata"]["resourceVersion"],
            _ => return,
        };
        let Some(version) = version.as_str() else {
            return self.violation(format!("{method} of {name} is not bound to a version"));
        };
        let pod = match kube::Api::<Pod>::default_namespaced(self.observer.clone()).get_opt(name).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return,
            Err(error) => return self.violation(format!("{method} of {name} is not watched over: {error}")),
        };
        if pod.resource_version().as_deref() != Some(version) {
            // Refused by the API server.
            return;
        }
        let wrong = match *method {
            Method::DELETE => wrong_deletion(&pod, Timestamp::now()),
            _ => wrong_intent(&pod, &words),
        };
        let takes_away = *method == Method::DELETE || drains(&words);
        let wrong = if takes_away { wrong.or(self.wrong_departure(&pod).await) } else { wrong };
        if let Some(wrong) = wrong {
            self.violation(format!("{method} of {name}: {wrong}"));
        }
    }

    /// Replicas leave one by one, so that enough of them serve.
    async fn wrong_departure(&self, pod: &Pod) -> Option<String> {
        let heard_within = (*lock(&self.heard_within))?;
        let deployment = pod.labels().get(labels::INSTANCE)?;
        let pods = kube::Api::<Pod>::default_namespaced(self.observer.clone());
        let of_deployment = ListParams::default().labels(&format!("{}={deployment}", labels::INSTANCE));
        let deployments = kube::Api::<InferenceDeployment>::default_namespaced(self.observer.clone());
        let (others, deployment) = match (pods.list(&of_deployment).await, deployments.get_opt(deployment).await) {
            (Ok(others), Ok(Some(deployment))) => (others, deployment),
            (Ok(_), Ok(None)) => return None,
            (Err(error), _) | (_, Err(error)) => return Some(format!("not watched over: {error}")),
        };
        if !self.has_heard_of(&deployment).await {
            return None;
        }
        let (mut witness, now) = (lock(&self.witness), Instant::now());
        others.iter().for_each(|other| witness.hear_pod(other, now));
        witness.wrong_departure(pod, heard_within, now)
    }

    /// The witness hears of each generation, and may be a moment late.
    async fn has_heard_of(&self, deployment: &InferenceDeployment) -> bool {
        let asked = Instant::now();
        loop {
            if lock(&self.witness).generation(&deployment.uid().unwrap_or_default()) >= deployment.metadata.generation {
                return true;
            }
            if asked.elapsed() > WITNESS_PATIENCE {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Who is called ready is so for all to see: of its present generation, and served by no other revision.
    pub(super) async fn watch_over_status(&self, path: &str, body: &Bytes) {
        let words: Value = serde_json::from_slice(body).unwrap_or_default();
        let (status, metadata) = (&words["status"], &words["metadata"]);
        let Some(name) = path.strip_suffix("/status").and_then(|path| path.rsplit('/').next()) else { return };
        let deployments = kube::Api::<InferenceDeployment>::default_namespaced(self.observer.clone());
        if !witness::is_ready(status) {
            return;
        }
        // Under an older CRD it may not be read, nor written.
        let Ok(deployment) = deployments.get(name).await else { return };
        let Some(version) = metadata["resourceVersion"].as_str() else {
            return self.violation(format!("{name} is called ready, bound to no version"));
        };
        if deployment.resource_version().as_deref() != Some(version) {
            // Refused by the API server.
            return;
        }
        let (uid, revision) = (deployment.uid().unwrap_or_default(), status["revision"].as_str().unwrap_or_default());
        let of_pods = (*lock(&self.heard_within))
            .and_then(|heard_within| lock(&self.witness).wrong_ready(&uid, revision, heard_within, Instant::now()));
        let wrong = witness::wrong_generation(status, deployment.metadata.generation).or(of_pods);
        if let Some(wrong) = wrong {
            self.violation(format!("{name} is called ready: {wrong}"));
        }
    }

    /// Of two operators only the one that holds the Lease writes. Events say what has been.
    pub(super) async fn watch_over_leader(&self, parts: &Parts) {
        let path = parts.uri.path();
        if lock(&self.script).fault() != Fault::Paused || path.contains("/events") {
            return;
        }
        let leases = kube::Api::<Lease>::namespaced(self.observer.clone(), LEASE.0);
        let Ok(lease) = leases.get(LEASE.1).await else { return };
        let holder = lease.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        let writer = parts.headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
        if !writer.contains(&format!("({holder})")) {
            self.violation(format!("{} {path} by {writer}, while {holder:?} leads", parts.method));
        }
    }
}

/// Tells the witness of pods.
pub(super) async fn hear_pods(shared: Arc<Shared>) {
    let pods = watcher(kube::Api::<Pod>::default_namespaced(shared.observer.clone()), watcher::Config::default());
    let heard = pods.default_backoff().for_each(|event| {
        let (mut witness, now) = (lock(&shared.witness), Instant::now());
        match event {
            Ok(Event::Apply(pod) | Event::InitApply(pod)) => witness.hear_pod(&pod, now),
            Ok(Event::Delete(pod)) => witness.hear_gone(&pod, now),
            Ok(Event::Init | Event::InitDone) | Err(_) => {}
        }
        std::future::ready(())
    });
    heard.await;
}

/// Tells the witness of deployments.
pub(super) async fn hear_deployments(shared: Arc<Shared>) {
    let deployments = kube::Api::<InferenceDeployment>::default_namespaced(shared.observer.clone());
    let heard = watcher(deployments, watcher::Config::default()).default_backoff().for_each(|event| {
        if let Ok(Event::Apply(deployment) | Event::InitApply(deployment)) = event {
            lock(&shared.witness).hear_deployment(&deployment, Instant::now());
        }
        std::future::ready(())
    });
    heard.await;
}

fn wrong_deletion(pod: &Pod, now: Timestamp) -> Option<String> {
    if !serves(pod) {
        return None;
    }
    match observe::intent_of(pod) {
        Some(Intent { want: Want::Drain(drain), since, .. }) => {
            // Its agent cannot be empty while it is ready: it may go at its deadline, or before it if it does not obey.
            let may_go = deadline(&drain, since).min(since + UNREACHABLE_PATIENCE);
            (now < may_go).then(|| format!("it still serves, {:#} before it may go", may_go - now))
        }
        _ => Some("it serves and was never told to drain".to_owned()),
    }
}

/// The intent that these words put on a pod.
fn intent_in(words: &Value) -> Option<Intent> {
    Intent::parse(words["metadata"]["annotations"][labels::INTENT].as_str()?)
}

fn drains(words: &Value) -> bool {
    intent_in(words).is_some_and(|intent| intent.drain_since().is_some())
}

fn wrong_intent(pod: &Pod, words: &Value) -> Option<String> {
    let (before, after) = (observe::intent_of(pod)?, intent_in(words)?);
    (after.number <= before.number).then(|| format!("number {} after {}", after.number, before.number))
}
