//! How a replica claims its GPUs of a DeviceClass: a ResourceClaimTemplate, of which Kubernetes makes a claim for each pod. Pure.
//!
//! A template is named after all that it says, so that one that is there is the right one whatever revision made it, and a pod tells by the
//! name what it claims. It goes with the deployment; going back to an older revision finds that revision's.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::{PodResourceClaim, PodSpec, ResourceClaim},
        resource::v1::{
            DeviceClaim, DeviceRequest, ExactDeviceRequest, ResourceClaimSpec, ResourceClaimTemplate,
            ResourceClaimTemplateSpec,
        },
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use stoker_crds::nodes::GpuName;

use super::{labels, owner};
use crate::validate::{Identity, ReplicaInputs};

/// What the claim is called in its pod, and the only request in it.
const GPUS: &str = "gpus";

/// The template of a replica's claim; `None` where GPUs are no claim.
pub(super) fn template(identity: &Identity, inputs: &ReplicaInputs) -> Option<ResourceClaimTemplate> {
    let class = inputs.device_class.clone()?;
    let exactly = ExactDeviceRequest {
        device_class_name: class,
        allocation_mode: Some("ExactCount".to_owned()),
        count: Some(inputs.gpus.into()),
        ..ExactDeviceRequest::default()
    };
    let request = DeviceRequest { name: GPUS.to_owned(), exactly: Some(exactly), first_available: None };
    let devices = DeviceClaim { requests: Some(vec![request]), ..DeviceClaim::default() };
    Some(ResourceClaimTemplate {
        metadata: ObjectMeta {
            name: Some(name(&identity.name, inputs)?),
            namespace: Some(identity.namespace.clone()),
            labels: Some(labels::child(&identity.name)),
            owner_references: Some(vec![owner(identity)]),
            ..ObjectMeta::default()
        },
        spec: ResourceClaimTemplateSpec { metadata: None, spec: ResourceClaimSpec { devices: Some(devices) } },
    })
}

/// DEPLOYMENT.COUNT.CLASS; a deployment has no dot in its name.
fn name(deployment: &str, inputs: &ReplicaInputs) -> Option<String> {
    let class = inputs.device_class.as_ref()?;
    Some(format!("{deployment}.{}.{class}", inputs.gpus))
}

/// The claim of a replica's pod.
pub(super) fn of_pod(deployment: &str, inputs: &ReplicaInputs) -> Option<Vec<PodResourceClaim>> {
    let template = Some(name(deployment, inputs)?);
    let name = GPUS.to_owned();
    Some(vec![PodResourceClaim { name, resource_claim_template_name: template, resource_claim_name: None }])
}

/// The same in the container that computes.
pub(super) fn of_container(inputs: &ReplicaInputs) -> Option<Vec<ResourceClaim>> {
    inputs.device_class.as_ref().map(|_| vec![ResourceClaim { name: GPUS.to_owned(), request: None }])
}

/// What a replica claims, as quantities by resource name.
pub(crate) fn quantities(inputs: &ReplicaInputs) -> BTreeMap<String, String> {
    let claimed =
        inputs.device_class.as_ref().map(|class| (GpuName::Class(class).counted_as(), inputs.gpus.to_string()));
    claimed.into_iter().collect()
}

/// The same of a pod that is there.
pub(crate) fn quantities_of_pod(spec: &PodSpec) -> BTreeMap<String, String> {
    let claims = spec.resource_claims.iter().flatten();
    let templates = claims.filter_map(|claim| claim.resource_claim_template_name.as_deref());
    let claimed = templates.filter_map(|name| name.split_once('.')?.1.split_once('.'));
    claimed.map(|(count, class)| (GpuName::Class(class).counted_as(), count.to_owned())).collect()
}
