//! Which revision a deployment is worked towards: the one that its spec asks for, or, while a change is held or was given up, one
//! that served before. Pure.
//!
//! What replicas of a revision are made from lies in the revision's ConfigMap, so going back needs nothing else. That a revision
//! was given up is read from the status, where it was written before anything acts on it.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use stoker_crds::{
    contract::is_commit,
    status::{RevisionStatus, RolledBack, RolloutStatus},
};

use crate::{
    desired::{INPUTS_FILE, config_map_name},
    observe::{Child, Observed},
    revision::revision,
    validate::{ReplicaInputs, ValidatedDeployment},
};

/// How the revision that is worked towards was chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Course {
    /// As the spec asks.
    #[default]
    AsAsked,
    /// The spec asks for this revision, which waits.
    Held {
        /// It.
        asked: String,
    },
    /// The spec asks for this, which is tried on one replica first.
    Canary(Box<ValidatedDeployment>),
    /// The spec asks for a revision that was given up.
    RolledBack(RolledBack),
}

/// The deployment as it is worked towards.
pub fn settle(asked: ValidatedDeployment, observed: &Observed) -> ValidatedDeployment {
    let wanted = revision(&asked.replica);
    let Some(rollout) = observed.deployment.status.as_ref().and_then(|status| status.rollout.as_ref()) else {
        return asked;
    };
    if let Some(given_up) = given_up(&asked, rollout, &wanted)
        && let Some(inputs) = kept_inputs(observed, &given_up.to)
    {
        return on(asked, inputs, rollout, Course::RolledBack(given_up.clone()));
    }
    let is_on_trial = rollout.canary.as_ref().is_some_and(|canary| canary.revision == wanted);
    if (is_on_trial || !asked.paused)
        && let Some(inputs) = tried_beside(&asked, rollout, &wanted, observed)
    {
        let canary = Course::Canary(Box::new(asked.clone()));
        return on(asked, inputs, rollout, canary);
    }
    if asked.paused
        && serving(observed, &wanted) == 0
        && let Some(held) = held(rollout, &wanted)
        && let Some(inputs) = kept_inputs(observed, &held.revision)
    {
        return on(asked, inputs, rollout, Course::Held { asked: wanted });
    }
    asked
}

fn given_up<'a>(asked: &ValidatedDeployment, rollout: &'a RolloutStatus, wanted: &str) -> Option<&'a RolledBack> {
    rollout.rolled_back.as_ref().filter(|given_up| asked.auto_rollback && given_up.revision == wanted)
}

/// What serves while the wanted revision is tried, if it has to be: one that served before need not, and where none did there is nothing
/// to compare with. Of those that served it is the one that most replicas have, so that a change in the middle of another one goes back
/// to where that began; of equals the newest.
fn tried_beside(
    asked: &ValidatedDeployment,
    rollout: &RolloutStatus,
    wanted: &str,
    observed: &Observed,
) -> Option<ReplicaInputs> {
    asked.canary.as_ref()?;
    let served = || rollout.revisions.iter().filter(|entry| entry.served);
    if served().any(|entry| entry.revision == wanted) {
        return None;
    }
    let kept = served().filter_map(|entry| Some((entry, kept_inputs(observed, &entry.revision)?)));
    let most = kept.max_by_key(|(entry, _)| (serving(observed, &entry.revision), entry.number));
    most.map(|(_, inputs)| inputs)
}

/// How many replicas of a revision serve.
fn serving(observed: &Observed, revision: &str) -> usize {
    observed.replicas.iter().filter(|replica| replica.pod.revision == revision && replica.serves()).count()
}

/// The newest revision that served, unless it is the wanted one: then nothing is held.
fn held<'a>(rollout: &'a RolloutStatus, wanted: &str) -> Option<&'a RevisionStatus> {
    rollout.revisions.iter().rev().find(|entry| entry.served).filter(|entry| entry.revision != wanted)
}

fn on(
    asked: ValidatedDeployment,
    replica: ReplicaInputs,
    rollout: &RolloutStatus,
    course: Course,
) -> ValidatedDeployment {
    let wanted = revision(&replica);
    let entry = rollout.revisions.iter().find(|entry| entry.revision == wanted);
    let commit = entry.and_then(|entry| entry.commit.clone()).filter(|commit| is_commit(commit));
    asked.working_on(replica, commit, course)
}

/// What replicas of a revision are made from, if it is kept and this operator makes the same of it.
pub fn kept_inputs(observed: &Observed, wanted: &str) -> Option<ReplicaInputs> {
    let name = config_map_name(&observed.deployment.name_any(), wanted);
    let map = observed.config_maps.iter().find_map(|map| match map {
        Child::Own(map) if map.name_any() == name && map.metadata.deletion_timestamp.is_none() => Some(map.as_ref()),
        Child::Own(_) | Child::Foreign { .. } | Child::Absent => None,
    })?;
    read_inputs(map).filter(|inputs| revision(inputs) == wanted)
}

fn read_inputs(map: &ConfigMap) -> Option<ReplicaInputs> {
    serde_json::from_str(map.data.as_ref()?.get(INPUTS_FILE)?).ok()
}
