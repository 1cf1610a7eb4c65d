//! What drivers of Dynamic Resource Allocation publish, and what claims hold of it, watched where the cluster has it
//! (`resource.k8s.io/v1`) and lets the operator look. Writes nothing; what it means is in `stoker_crds::devices`.

use futures::{Stream, stream};
use k8s_openapi::{
    api::resource::v1::{
        AllocationResult, DeviceAllocationResult, DeviceClass, DeviceClassSpec, ResourceClaim, ResourceClaimStatus,
        ResourceSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Client};
use stoker_crds::{
    InferenceDeploymentSpec,
    devices::{self, Gpus, Published},
};

use crate::watched::{Seen, Watched};

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    slices: Watched<ResourceSlice>,
    claims: Watched<ResourceClaim>,
    classes: Watched<DeviceClass>,
}

impl Devices {
    /// Begins to watch them and waits for the first lists. The stream has an item whenever there are other devices than before; who takes and
    /// leaves one is known, and no event.
    pub async fn watch(client: &Client) -> (Self, impl Stream<Item = ()> + Send + use<>) {
        let ((slices, slices_changed), (claims, _), (classes, classes_changed)) = tokio::join!(
            Watched::watch(Api::all(client.clone()), slim_slice),
            Watched::watch(Api::all(client.clone()), slim_claim),
            Watched::watch(Api::all(client.clone()), slim_class),
        );
        (Self { slices, claims, classes }, stream::select(slices_changed, classes_changed))
    }

    /// All of it; `None` where a part is not known: without claims every device would be free.
    pub fn seen(&self) -> Option<Published> {
        match (self.slices.seen(), self.claims.seen(), self.classes.seen()) {
            (Seen::All(slices), Seen::All(claims), Seen::All(classes)) => Some(Published { slices, claims, classes }),
            _ => None,
        }
    }
}

/// The GPUs that pods of this spec mean, or why nobody can tell; none are looked for where none are asked for.
pub fn gpus<'a>(published: Option<&'a Published>, spec: &InferenceDeploymentSpec) -> Result<Gpus<'a>, String> {
    if spec.gpus() == 0 { Ok(Gpus::default()) } else { devices::gpus(published, spec.gpu_name()) }
}

fn slim_slice(slice: ResourceSlice) -> ResourceSlice {
    ResourceSlice { metadata: slim(slice.metadata), spec: slice.spec }
}

/// Only who holds what.
fn slim_claim(claim: ResourceClaim) -> ResourceClaim {
    let allocated = claim.status.and_then(|status| status.allocation?.devices?.results);
    let devices = allocated.map(|results| DeviceAllocationResult { results: Some(results), config: None });
    let allocation = devices.map(|devices| AllocationResult { devices: Some(devices), ..AllocationResult::default() });
    ResourceClaim {
        metadata: slim(claim.metadata),
        status: Some(ResourceClaimStatus { allocation, ..ResourceClaimStatus::default() }),
        ..ResourceClaim::default()
    }
}

fn slim_class(class: DeviceClass) -> DeviceClass {
    let DeviceClassSpec { selectors, extended_resource_name, config: _ } = class.spec;
    DeviceClass {
        metadata: slim(class.metadata),
        spec: DeviceClassSpec { selectors, extended_resource_name, config: None },
    }
}

fn slim(metadata: ObjectMeta) -> ObjectMeta {
    let ObjectMeta { name, namespace, creation_timestamp, .. } = metadata;
    ObjectMeta { name, namespace, creation_timestamp, ..ObjectMeta::default() }
}

#[cfg(test)]
mod tests {
    use kube::runtime::watcher::Event;
    use serde_json::{Value, json};

    use super::*;
    use crate::watched::Known;

    fn claim(status: Value) -> ResourceClaim {
        let metadata = json!({"name": "chat-0", "namespace": "a", "resourceVersion": "7", "managedFields": []});
        serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).unwrap()
    }

    #[test]
    fn a_claim_is_news_when_it_holds_something_else() {
        let mut known = Known::default();
        let mut take = |status| known.take(Event::Apply(claim(status)), slim_claim);
        let held = |device: &str, more: Value| {
            let result = json!({"driver": "gpu.nvidia.com", "pool": "a", "device": device, "request": "gpus"});
            json!({"allocation": {"devices": {"results": [result]}}, "reservedFor": more})
        };
        assert!(take(json!({})));
        assert!(take(held("gpu-0", json!([]))));
        assert!(!take(held("gpu-0", json!([{"resource": "pods", "name": "p", "uid": "u"}]))));
        assert!(take(held("gpu-1", json!([]))));
        assert!(take(json!({})), "it was given back");
    }
}
