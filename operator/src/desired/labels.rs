//! Labels and annotations that the operator writes and selects by. Pure.

use std::collections::BTreeMap;

/// Value of [`MANAGED_BY`] on everything we make.
pub const MANAGER: &str = "stoker";
/// Who made an object.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Which deployment an object belongs to.
pub const INSTANCE: &str = "app.kubernetes.io/instance";
/// Which revision a pod or ConfigMap belongs to.
pub const REVISION: &str = "stoker.dev/revision";
/// What a replica should do, see [`crate::intent`]: kept on its pod, so that a successor goes on with the same number.
pub const INTENT: &str = "stoker.dev/intent";

/// On which node a pod fetches a model ahead, or keeps it in memory: an annotation, as names of nodes can be too long for a label.
pub const PREFETCH_NODE: &str = "stoker.dev/prefetch-node";
/// Value of [`MANAGED_BY`] on such pods: who looks for replicas finds none of them.
const PREFETCH_MANAGER: &str = "stoker-prefetch";
/// Value of [`COMPONENT`] on those of them that stay.
const STANDBY: &str = "standby";

/// Which Service an EndpointSlice is part of.
pub const SERVICE: &str = "kubernetes.io/service-name";
/// Who writes an EndpointSlice. Labels of its Service are on it whoever does.
const SLICE_MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
const SLICE_MANAGER: &str = "operator.stoker.dev";

const NAME: &str = "app.kubernetes.io/name";
const COMPONENT: &str = "app.kubernetes.io/component";

/// Selects everything the operator made, in a watch.
pub fn managed_selector() -> String {
    format!("{MANAGED_BY}={MANAGER}")
}

/// Selects everything the operator made for one deployment, in a list.
pub fn list_selector(deployment: &str) -> BTreeMap<String, String> {
    owned(&[(MANAGED_BY, MANAGER), (INSTANCE, deployment)])
}

/// [`list_selector`] in the form of a query.
pub fn selector_of(deployment: &str) -> String {
    query(&list_selector(deployment))
}

/// What the Service selects and the scale subresource reports.
pub fn selector(deployment: &str) -> BTreeMap<String, String> {
    owned(&[(MANAGED_BY, MANAGER), (INSTANCE, deployment), (COMPONENT, "agent")])
}

/// What replicas of all deployments have.
pub fn any_replica() -> BTreeMap<String, String> {
    owned(&[(MANAGED_BY, MANAGER), (COMPONENT, "agent")])
}

/// [`selector`] in the form of a query.
pub fn selector_text(deployment: &str) -> String {
    query(&selector(deployment))
}

/// What a Service selects that leads to gateways: no pod. What leads there are EndpointSlices beside those of the selected pods.
pub fn selector_of_nobody(deployment: &str) -> BTreeMap<String, String> {
    owned(&[(MANAGED_BY, MANAGER), (INSTANCE, deployment), (COMPONENT, "gateway")])
}

/// Selects the EndpointSlices that the operator made, in a watch.
pub fn slices_selector() -> String {
    format!("{},{SLICE_MANAGED_BY}={SLICE_MANAGER}", managed_selector())
}

/// The same of one deployment.
pub fn slices_selector_of(deployment: &str) -> String {
    format!("{},{INSTANCE}={deployment}", slices_selector())
}

/// Labels of an EndpointSlice that leads a deployment's Service to gateways.
pub fn slice(deployment: &str) -> BTreeMap<String, String> {
    let mut labels = child(deployment);
    labels.extend(owned(&[(SERVICE, deployment), (SLICE_MANAGED_BY, SLICE_MANAGER)]));
    labels
}

/// Labels of a child that no revision owns.
pub fn child(deployment: &str) -> BTreeMap<String, String> {
    owned(&[(NAME, "stoker-agent"), (MANAGED_BY, MANAGER), (INSTANCE, deployment), (COMPONENT, "agent")])
}

/// Labels of a pod that fetches the model of a revision ahead.
pub fn prefetch(deployment: &str, revision: &str) -> BTreeMap<String, String> {
    let mut labels = child_of_revision(deployment, revision);
    labels.extend(owned(&[(MANAGED_BY, PREFETCH_MANAGER), (COMPONENT, "prefetch")]));
    labels
}

/// Labels of a pod that keeps the model of a revision in a node's memory.
pub fn standby(deployment: &str, revision: &str) -> BTreeMap<String, String> {
    let mut labels = prefetch(deployment, revision);
    labels.insert(COMPONENT.to_owned(), STANDBY.to_owned());
    labels
}

/// Whether a pod is one of these.
pub fn stands_by(labels: &BTreeMap<String, String>) -> bool {
    labels.get(COMPONENT).is_some_and(|component| component == STANDBY)
}

/// Selects pods of both kinds, in a watch.
pub fn prefetch_selector() -> String {
    format!("{MANAGED_BY}={PREFETCH_MANAGER}")
}

/// Labels of a child of a revision.
pub fn child_of_revision(deployment: &str, revision: &str) -> BTreeMap<String, String> {
    let mut labels = child(deployment);
    labels.insert(REVISION.to_owned(), revision.to_owned());
    labels
}

fn query(labels: &BTreeMap<String, String>) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

fn owned(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
}
