//! Taking over what a namesake left behind that is gone: a Service keeps its address, and replicas what they have loaded. Pure.

use jiff::{SignedDuration, Timestamp};

use crate::observe::{Leftover, Observed};

/// How long Kubernetes has for taking such things away, counted from when the deployment was made: who makes one anew wants new replicas, and gets
/// them wherever that works.
const PATIENCE: SignedDuration = SignedDuration::from_secs(30);

/// What becomes of leftovers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdoptionPlan {
    /// Objects to take over.
    pub adopt: Vec<Leftover>,
    /// When to look again whether there still are any.
    pub look_again: Option<Timestamp>,
}

/// Decides what to take over now.
pub fn plan(observed: &Observed, now: Timestamp) -> AdoptionPlan {
    let made = observed.deployment.metadata.creation_timestamp.as_ref().map_or(now, |made| made.0);
    let due = made + PATIENCE;
    match &observed.leftovers[..] {
        [] => AdoptionPlan::default(),
        _ if now < due => AdoptionPlan { adopt: Vec::new(), look_again: Some(due) },
        leftovers => AdoptionPlan { adopt: leftovers.to_vec(), look_again: None },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kube::api::{ApiResource, Preconditions};
    use serde_json::json;

    use super::*;
    use crate::pools::InferencePool;

    fn observed(leftovers: Vec<Leftover>) -> Observed {
        let deployment = json!({
            "apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceDeployment",
            "spec": {"model": {"source": "builtin://ember"}},
            "metadata": {"name": "chat", "namespace": "team", "creationTimestamp": "2026-11-29T12:00:00Z"},
        });
        Observed { leftovers, ..Observed::of(Arc::new(serde_json::from_value(deployment).unwrap())) }
    }

    #[test]
    fn leftovers_are_kubernetes_for_half_a_minute_and_then_ours() {
        let resource = ApiResource::erase::<InferencePool>(&());
        let left = Leftover { resource, name: "chat".into(), seen: Preconditions::default() };
        let observed_left = observed(vec![left.clone()]);
        let at = |seconds: &str| plan(&observed_left, format!("2026-11-29T12:00:{seconds}Z").parse().unwrap());
        let due = "2026-11-29T12:00:30Z".parse().unwrap();
        assert_eq!(at("29.9"), AdoptionPlan { adopt: Vec::new(), look_again: Some(due) });
        assert_eq!(at("30"), AdoptionPlan { adopt: vec![left], look_again: None });
        assert_eq!(plan(&observed(Vec::new()), due), AdoptionPlan::default());
    }
}
