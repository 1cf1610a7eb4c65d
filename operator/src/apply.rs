//! Carries out a plan: the only writer of children, of what replicas should do, and of `spec.replicas` when the number
//! changes hands. No policy here, and no agent is asked: the probe tells them what is written.
//!
//! Order: what a namesake left becomes ours before anything is made; configuration and Service before pods, and before the InferencePool that names it; what a Service is led to before it leads there, and away only after it; taking back and deleting before creating, so that room and names are
//! free; the NetworkPolicy before pods that it is about, the budget for disruptions after them, so that a cluster that
//! refuses it still gets its replicas; what is fetched ahead last, as nothing else waits for it. Deletes and intents are bound to the
//! version of the object that the plan saw: one that was changed since, or made anew under its name, stays. What the API server refuses for good becomes a [`Refusal`] for
//! the status; what may pass is an error, and the round is tried again.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::{NamespaceResourceScope, api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::OwnerReference};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use stoker_crds::{InferenceDeployment, contract::DrainSettings, intent::Want};
use stoker_replica::Intent;
use tracing::{info, warn};

use crate::{
    desired::{Desired, labels},
    error::ReconcileError,
    metrics::Metrics,
    observe::{Child, Leftover, Observed, is_stray},
    plan::{Handover, Plan, Upkeep},
    pools::InferencePool,
    rollout::{
        Deletion, PodRef, RolloutPlan, Why,
        prefetch::{PrefetchPlan, PrefetchPod},
    },
    standby::StandbyPlan,
};

/// Owner of every field we write.
pub const FIELD_MANAGER: &str = "stoker-operator";

/// What was carried out.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Applied {
    /// Names of created pods.
    pub created: Vec<String>,
    /// Names of pods that were told to drain for the first time.
    pub draining: Vec<String>,
    /// Names of pods taken back into service.
    pub undrained: Vec<String>,
    /// Names of deleted pods, and why they could go.
    pub deleted: Vec<(String, Why)>,
    /// Names of pods that fetch a model ahead.
    pub prefetching: Vec<String>,
    /// Names of pods that keep a model in a node's memory.
    pub standing_by: Vec<String>,
    /// What the API server said when it refused such a pod: nothing else is kept from being done for it.
    pub prefetch_refused: Option<String>,
    /// The same of one that was to stand by.
    pub standby_refused: Option<String>,
    /// Names that could not be given to new pods: pods without our labels have them.
    pub strays: Vec<String>,
    /// What the API server refused for good.
    pub refusals: Vec<Refusal>,
}

/// A write that the API server refused, in its own words.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// What was written.
    pub what: String,
    /// The API server's answer.
    pub message: String,
}

/// Writes one deployment's children.
#[derive(Clone)]
pub struct Apply {
    /// The API server.
    pub client: Client,
    /// Counts writes.
    pub metrics: Arc<Metrics>,
    /// Namespace of the deployment.
    pub namespace: String,
    /// How its replicas leave.
    pub drain: DrainSettings,
}

impl Apply {
    /// Carries out `plan`, which was made from `observed`. `now` is when intents begin.
    pub async fn run(
        &self,
        plan: &Plan,
        desired: &Desired,
        observed: &Observed,
        now: Timestamp,
    ) -> Result<Applied, ReconcileError> {
        let Plan {
            apply_service,
            apply_slices,
            prune_slices,
            apply_config_map,
            apply_canary_map,
            apply_keys,
            apply_budget,
            pool,
            network_policy,
            pods,
            standby,
            revision: _,
            canary: _,
            prune_config_maps,
            handover,
            taken: _,
            adoption,
        } = plan;
        let RolloutPlan {
            create,
            create_canary,
            drain,
            undrain,
            reassert,
            delete,
            failures: _,
            held_until: _,
            strategy: _,
            prefetch,
            look_again: _,
        } = pods;
        let mut applied = Applied::default();
        for leftover in &adoption.adopt {
            self.adopt(leftover, desired.service.owner_references(), &mut applied).await?;
        }
        if *apply_config_map {
            self.apply_child(&desired.config_map, &mut applied).await?;
        }
        for canary in desired.canary.iter().filter(|_| *apply_canary_map) {
            self.apply_child(&canary.config_map, &mut applied).await?;
        }
        if *apply_keys {
            self.apply_child(&desired.keys, &mut applied).await?;
        }
        for slice in desired.slices.iter().filter(|slice| apply_slices.contains(&slice.name_any())) {
            self.apply_child(slice, &mut applied).await?;
        }
        if *apply_service {
            self.apply_child(&desired.service, &mut applied).await?;
        }
        self.keep_up_pool(*pool, desired.pool.as_ref(), &observed.pool, &mut applied).await?;
        for slice in observed.slices.iter().filter(|slice| prune_slices.contains(&slice.name_any())) {
            self.remove(&**slice, &mut applied).await?;
        }
        self.keep_up(*network_policy, desired.network_policy.as_ref(), &observed.network_policy, &mut applied).await?;
        for pod in undrain {
            if self.intend(pod, Want::Serve, now, &mut applied).await? {
                applied.undrained.push(pod.name.clone());
            }
        }
        for deletion in delete {
            self.delete(deletion, &mut applied).await?;
        }
        if !create.is_empty() {
            self.apply_claim(desired, &mut applied).await?;
        }
        for ordinal in create {
            self.create(desired.pod(*ordinal), &mut applied).await?;
        }
        for (canary, ordinal) in desired.canary.iter().zip(create_canary) {
            self.apply_claim(canary, &mut applied).await?;
            self.create(canary.pod(*ordinal), &mut applied).await?;
        }
        for pod in drain {
            if self.intend(pod, Want::Drain(self.drain), now, &mut applied).await? {
                applied.draining.push(pod.name.clone());
            }
        }
        for pod in reassert {
            let written =
                observed.replicas.iter().find(|replica| replica.pod.uid == pod.uid).and_then(|replica| replica.intent);
            let (want, since) = written.map_or((Want::Serve, now), |intent| (intent.want, intent.since.min(now)));
            self.intend(pod, want, since, &mut applied).await?;
        }
        if *apply_budget {
            self.apply_child(&desired.budget, &mut applied).await?;
        }
        let maps = observed.config_maps.iter().filter_map(Child::own);
        for map in maps.filter(|map| prune_config_maps.contains(&map.name_any())) {
            self.remove(map, &mut applied).await?;
        }
        if let Some(handover) = handover {
            self.hand_over(handover, &mut applied).await?;
        }
        self.prefetch(prefetch, desired, &mut applied).await?;
        self.stand_by(standby, desired, &mut applied).await?;
        Ok(applied)
    }

    async fn apply_child<K>(&self, child: &K, applied: &mut Applied) -> Result<(), ReconcileError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Serialize,
        K: Clone + std::fmt::Debug,
    {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let kind = K::kind(&());
        self.metrics.wrote(&kind, "apply");
        let result = self.api::<K>().patch(&child.name_any(), &params, &Patch::Apply(child)).await;
        outcome(result, || format!("{kind} {}", child.name_any()), applied).map(drop)
    }

    /// What claims are made from, before the pods that name it. Nobody looks whether it is there: it is written whenever pods are made, which costs
    /// less than to watch it.
    async fn apply_claim(&self, desired: &Desired, applied: &mut Applied) -> Result<(), ReconcileError> {
        let Some(claim) = &desired.claim else { return Ok(()) };
        match self.apply_child(claim, applied).await {
            Err(ReconcileError::Apply { source: kube::Error::Api(answer), what }) if answer.code == 404 => {
                let message =
                    "the cluster serves no resource.k8s.io/v1, which is there from Kubernetes 1.34 on: remove \
                    resources.deviceClass where a device plugin gives GPUs"
                        .to_owned();
                applied.refusals.push(Refusal { what, message });
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// Somebody may take the whole kind away at any time: then there are no pools.
    async fn keep_up_pool(
        &self,
        upkeep: Upkeep,
        pool: Option<&InferencePool>,
        seen: &Child<InferencePool>,
        applied: &mut Applied,
    ) -> Result<(), ReconcileError> {
        match self.keep_up(upkeep, pool, seen, applied).await {
            Err(ReconcileError::Apply { source: kube::Error::Api(answer), .. }) if answer.code == 404 => {
                warn!(message = answer.message, "no InferencePool");
                Ok(())
            }
            outcome => outcome,
        }
    }

    /// A child of the deployment's name; `seen`: the one that there is.
    async fn keep_up<K>(
        &self,
        upkeep: Upkeep,
        child: Option<&K>,
        seen: &Child<K>,
        applied: &mut Applied,
    ) -> Result<(), ReconcileError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + DeserializeOwned + Serialize,
        K: Clone + std::fmt::Debug,
    {
        match (upkeep, child, seen.own()) {
            (Upkeep::Apply, Some(child), _) => self.apply_child(child, applied).await,
            (Upkeep::Delete, None, Some(seen)) => self.remove(seen, applied).await,
            (Upkeep::Leave | Upkeep::Apply | Upkeep::Delete, ..) => Ok(()),
        }
    }

    async fn create(&self, pod: Pod, applied: &mut Applied) -> Result<(), ReconcileError> {
        if !applied.refusals.is_empty() {
            return Ok(());
        }
        self.metrics.wrote("Pod", "create");
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), dry_run: false };
        let result = self.api::<Pod>().create(&params, &pod).await;
        if matches!(&result, Err(kube::Error::Api(answer)) if answer.code == 409) && self.is_stray(&pod).await? {
            applied.strays.push(pod.name_any());
            return Ok(());
        }
        if outcome(result, || format!("Pod {}", pod.name_any()), applied)?.is_some() {
            applied.created.push(pod.name_any());
        }
        Ok(())
    }

    async fn prefetch(
        &self,
        plan: &PrefetchPlan,
        desired: &Desired,
        applied: &mut Applied,
    ) -> Result<(), ReconcileError> {
        self.end_ahead(&plan.end, applied).await?;
        let pods = plan.begin.iter().filter_map(|node| desired.prefetch(&plan.revision, node));
        applied.prefetch_refused = self.begin_ahead(pods, &mut applied.prefetching).await?;
        Ok(())
    }

    async fn stand_by(
        &self,
        plan: &StandbyPlan,
        desired: &Desired,
        applied: &mut Applied,
    ) -> Result<(), ReconcileError> {
        self.end_ahead(&plan.end, applied).await?;
        let pods = plan.begin.iter().filter_map(|node| desired.standby(node));
        applied.standby_refused = self.begin_ahead(pods, &mut applied.standing_by).await?;
        Ok(())
    }

    async fn end_ahead(&self, pods: &[PrefetchPod], applied: &mut Applied) -> Result<(), ReconcileError> {
        for pod in pods {
            let seen = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
            self.delete_seen::<Pod>(&pod.name, seen, applied).await?;
        }
        Ok(())
    }

    /// Makes pods that bring a model where no replica waits for it, up to the first that the API server refuses; returns what it said. A
    /// refusal keeps nothing else from being done. One that is there already, which the cache did not know yet, is as good.
    async fn begin_ahead(
        &self,
        pods: impl Iterator<Item = Pod>,
        made: &mut Vec<String>,
    ) -> Result<Option<String>, ReconcileError> {
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), dry_run: false };
        for pod in pods {
            self.metrics.wrote("Pod", "create");
            match self.api::<Pod>().create(&params, &pod).await {
                Ok(_) => made.push(pod.name_any()),
                Err(kube::Error::Api(answer)) if answer.code == 409 => {}
                Err(kube::Error::Api(answer)) if matches!(answer.code, 400 | 403 | 422) => {
                    return Ok(Some(answer.message));
                }
                Err(source) => return Err(ReconcileError::Apply { what: format!("Pod {}", pod.name_any()), source }),
            }
        }
        Ok(None)
    }

    /// True when somebody took its labels from the pod that has this name: the next round gives another name. A pod that
    /// has them was made since we looked.
    async fn is_stray(&self, pod: &Pod) -> Result<bool, ReconcileError> {
        let deployment = pod.labels().get(labels::INSTANCE).cloned().unwrap_or_default();
        is_stray(&self.api::<Pod>(), &pod.name_any(), &deployment).await.map_err(ReconcileError::Observe)
    }

    /// Writes down what the replica should do, under the version that was looked at; false when the pod is gone. Somebody
    /// who changed the pod meanwhile makes it an error: the round is tried again on what there is then.
    async fn intend(
        &self,
        pod: &PodRef,
        want: Want,
        since: Timestamp,
        applied: &mut Applied,
    ) -> Result<bool, ReconcileError> {
        let intent = Intent { number: pod.next_number, want, since };
        let metadata = json!({
            "uid": pod.uid, "resourceVersion": pod.resource_version, "annotations": {labels::INTENT: intent.to_text()},
        });
        self.metrics.wrote("Pod", "patch");
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(json!({"metadata": metadata}));
        match self.api::<Pod>().patch_metadata(&pod.name, &params, &patch).await {
            Ok(_) => {
                info!(pod = pod.name, number = intent.number, ?want, "intent written");
                Ok(true)
            }
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(false),
            refused => outcome(refused, || format!("Pod {}", pod.name), applied).map(|_| false),
        }
    }

    async fn delete(&self, deletion: &Deletion, applied: &mut Applied) -> Result<(), ReconcileError> {
        let Deletion { pod, why } = deletion;
        let seen = Preconditions { uid: Some(pod.uid.clone()), resource_version: Some(pod.resource_version.clone()) };
        if self.delete_seen::<Pod>(&pod.name, seen, applied).await? {
            self.metrics.pods_deleted.with_label_values(&[why.as_str()]).inc();
            info!(pod = pod.name, why = why.as_str(), "pod deleted");
            applied.deleted.push((pod.name.clone(), *why));
        }
        Ok(())
    }

    /// Deletes a child as it was seen.
    async fn remove<K>(&self, seen: &K, applied: &mut Applied) -> Result<(), ReconcileError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let version = Preconditions { uid: seen.uid(), resource_version: seen.resource_version() };
        self.delete_seen::<K>(&seen.name_any(), version, applied).await.map(drop)
    }

    /// Deletes what was seen and nothing else that has its name by now; whether it did.
    async fn delete_seen<K>(
        &self,
        name: &str,
        seen: Preconditions,
        applied: &mut Applied,
    ) -> Result<bool, ReconcileError>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + std::fmt::Debug,
    {
        let kind = K::kind(&());
        self.metrics.wrote(&kind, "delete");
        let params = DeleteParams { preconditions: Some(seen), ..DeleteParams::default() };
        let result = self.api::<K>().delete(name, &params).await;
        found(result.map(drop), || format!("{kind} {name}"), applied)
    }

    /// Makes what was left behind ours, as it was seen: what was changed since, or has gone, asks for the next round.
    async fn adopt(
        &self,
        leftover: &Leftover,
        owners: &[OwnerReference],
        applied: &mut Applied,
    ) -> Result<(), ReconcileError> {
        let Leftover { resource, name, seen: Preconditions { uid, resource_version } } = leftover;
        let patch = json!({"metadata": {"uid": uid, "resourceVersion": resource_version, "ownerReferences": owners}});
        self.metrics.wrote(&resource.kind, "patch");
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let objects = Api::<DynamicObject>::namespaced_with(self.client.clone(), &self.namespace, resource);
        let result = objects.patch_metadata(name, &params, &Patch::Merge(&patch)).await;
        if found(result.map(drop), || format!("{} {name}", resource.kind), applied)? {
            info!(kind = resource.kind, name, "taken over from a namesake that is gone");
        }
        Ok(())
    }

    /// Somebody who changed the object meanwhile causes the next round.
    async fn hand_over(&self, handover: &Handover, applied: &mut Applied) -> Result<(), ReconcileError> {
        let Handover { name, resource_version, replicas } = handover;
        let patch = json!({"metadata": {"resourceVersion": resource_version}, "spec": {"replicas": replicas}});
        self.metrics.wrote("InferenceDeployment", "patch");
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let result = self.api::<InferenceDeployment>().patch(name, &params, &Patch::Merge(&patch)).await;
        if found(result.map(drop), || format!("InferenceDeployment {name}"), applied)? {
            info!(?replicas, "spec.replicas changed hands");
        }
        Ok(())
    }

    fn api<K: Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

/// `None` when the API server refused for good; the refusal is kept.
fn outcome<K>(
    result: kube::Result<K>,
    what: impl Fn() -> String,
    applied: &mut Applied,
) -> Result<Option<K>, ReconcileError> {
    match result {
        Ok(object) => Ok(Some(object)),
        Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 422) => {
            applied.refusals.push(Refusal { what: what(), message: status.message });
            Ok(None)
        }
        Err(source) => Err(ReconcileError::Apply { what: what(), source }),
    }
}

/// False when the object is gone, is another one, or changed since: its change asks for the next round. Also when the API
/// server refused for good.
fn found(result: kube::Result<()>, what: impl Fn() -> String, applied: &mut Applied) -> Result<bool, ReconcileError> {
    match result {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(false),
        result => Ok(outcome(result, what, applied)?.is_some()),
    }
}
