//! What a deployment left behind that is gone, when another one has its name. Kubernetes' garbage collector takes such things away within
//! seconds; but where somebody replaced the CRD, the kind may have been away and back between two of its looks, and then it never
//! hears that the owner is gone and leaves them for ever: a Service in our way, pods that hold GPUs. Decides nothing.

use jiff::Timestamp;
use kube::{
    Resource, ResourceExt,
    api::{ApiResource, Preconditions},
};
use stoker_crds::InferenceDeployment;

/// An object whose owner is gone.
#[derive(Clone, Debug, PartialEq)]
pub struct Leftover {
    /// Its kind.
    pub resource: ApiResource,
    /// Its name.
    pub name: String,
    /// The object and the version of it that was looked at.
    pub seen: Preconditions,
}

impl Leftover {
    /// `object`, if a namesake of `deployment` left it behind.
    pub(super) fn of<K: Resource<DynamicType = ()>>(object: &K, deployment: &InferenceDeployment) -> Option<Self> {
        let meta = object.meta();
        is_left(object, deployment).then(|| Self {
            resource: ApiResource::erase::<K>(&()),
            name: object.name_any(),
            seen: Preconditions { uid: meta.uid.clone(), resource_version: meta.resource_version.clone() },
        })
    }
}

/// True when the deployment that controls an object had this one's name and was there before it. One that was there after it is none that is
/// gone: then it is this one that is looked at too late.
pub(super) fn is_left<K: Resource>(object: &K, deployment: &InferenceDeployment) -> bool {
    let made = |meta: &kube::api::ObjectMeta| meta.creation_timestamp.as_ref().map_or(Timestamp::MAX, |time| time.0);
    let of_namesake = object.owner_references().iter().any(|owner| {
        owner.controller == Some(true)
            && owner.kind == InferenceDeployment::kind(&())
            && owner.api_version == InferenceDeployment::api_version(&())
            && owner.name == deployment.name_any()
            && Some(&owner.uid) != deployment.metadata.uid.as_ref()
    });
    let is_beside = object.meta().namespace == deployment.metadata.namespace;
    is_beside
        && of_namesake
        && object.meta().deletion_timestamp.is_none()
        && made(object.meta()) < made(&deployment.metadata)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use serde_json::{Value, json};

    use super::*;

    fn deployment() -> InferenceDeployment {
        let object = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "spec": {"model": {"source": "builtin://ember"}},
            "metadata": {"name": "chat", "namespace": "team", "uid": "second", "creationTimestamp": "2026-11-29T12:00:10Z"},
        });
        serde_json::from_value(object).unwrap()
    }

    fn service(changes: &Value) -> Service {
        let mut owner = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment", "name": "chat", "uid": "first", "controller": true,
        });
        let mut metadata = json!({
            "name": "chat", "namespace": "team", "uid": "s", "resourceVersion": "7", "creationTimestamp": "2026-11-29T12:00:09Z",
        });
        for (of, place) in [("owner", &mut owner), ("metadata", &mut metadata)] {
            for (key, value) in changes[of].as_object().into_iter().flatten() {
                place[key] = value.clone();
            }
        }
        metadata["ownerReferences"] = json!([owner]);
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    #[test]
    fn what_a_namesake_left_that_is_gone_is_known_with_its_version() {
        let leftover = Leftover::of(&service(&json!({})), &deployment()).unwrap();
        assert_eq!((leftover.resource.kind.as_str(), leftover.name.as_str()), ("Service", "chat"));
        assert_eq!(leftover.seen, Preconditions { uid: Some("s".into()), resource_version: Some("7".into()) });
    }

    #[test]
    fn what_is_anybody_else_s_is_not() {
        for (name, changes) in [
            ("ours", json!({"owner": {"uid": "second"}})),
            ("of a deployment of another name", json!({"owner": {"name": "other"}})),
            ("of another kind", json!({"owner": {"kind": "ReplicaSet"}})),
            ("of somebody's kind of the same name", json!({"owner": {"apiVersion": "example.com/v1"}})),
            ("in another namespace", json!({"metadata": {"namespace": "other"}})),
            ("of an owner that does not control it", json!({"owner": {"controller": false}})),
            ("going already", json!({"metadata": {"deletionTimestamp": "2026-11-29T12:00:11Z"}})),
            (
                "of a successor, which this deployment does not know",
                json!({"metadata": {"creationTimestamp": "2026-11-29T12:00:11Z"}}),
            ),
            (
                "made in the same second: whose, nobody knows",
                json!({"metadata": {"creationTimestamp": "2026-11-29T12:00:10Z"}}),
            ),
        ] {
            assert_eq!(Leftover::of(&service(&changes), &deployment()), None, "{name}");
        }
    }
}
