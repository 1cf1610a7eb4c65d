//! The PodDisruptionBudget: evictions, as node drains make them, take one replica at a time, or as many as may be missing during a
//! change. Pure.
//!
//! It names a number of pods and follows the replicas that are wanted: `maxUnavailable` would be counted against
//! `spec.replicas`, which deployments that scale do not have. An eviction ends in SIGTERM, on which an agent finishes its
//! streams within the pod's grace period, so also the last replica may be evicted: holding up node drains for good would
//! be worse than the gap.

use k8s_openapi::{
    api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec},
    apimachinery::pkg::{
        apis::meta::v1::{LabelSelector, ObjectMeta},
        util::intstr::IntOrString,
    },
};

use super::{labels, owner};
use crate::validate::{Identity, ValidatedDeployment};

pub(super) fn budget(deployment: &ValidatedDeployment) -> PodDisruptionBudget {
    let Identity { name, namespace, .. } = &deployment.identity;
    PodDisruptionBudget {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            labels: Some(labels::child(name)),
            owner_references: Some(vec![owner(&deployment.identity)]),
            ..ObjectMeta::default()
        },
        spec: Some(PodDisruptionBudgetSpec {
            min_available: Some(IntOrString::Int(least_available(deployment))),
            max_unavailable: None,
            selector: Some(LabelSelector { match_labels: Some(labels::selector(name)), ..LabelSelector::default() }),
            // A replica that serves nobody holds up no node drain.
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
        }),
        status: None,
    }
}

/// All but one, or but those that may be missing.
fn least_available(deployment: &ValidatedDeployment) -> i32 {
    let replicas = deployment.replicas as usize;
    let missing = deployment.replacing.of(replicas).max_unavailable.max(1);
    i32::try_from(replicas.saturating_sub(missing)).unwrap_or(i32::MAX)
}
