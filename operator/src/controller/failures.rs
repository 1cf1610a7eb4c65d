//! Rounds of a deployment that failed in a row.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use kube::runtime::reflector::{ObjectRef, Store};
use stoker_crds::InferenceDeployment;

type Counts = HashMap<ObjectRef<InferenceDeployment>, u32>;

/// Their number by deployment, of those whose last round failed.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<Counts>);

impl Failures {
    /// Counts one, and forgets deployments that are gone. How many there are of this one.
    pub(super) fn count(&self, deployment: &InferenceDeployment, known: &Store<InferenceDeployment>) -> u32 {
        let mut counts = self.counts();
        let in_a_row = counts.entry(ObjectRef::from_obj(deployment)).or_default();
        *in_a_row = in_a_row.saturating_add(1);
        let in_a_row = *in_a_row;
        counts.retain(|object, _| known.get(object).is_some());
        in_a_row
    }

    /// How many there are.
    pub(super) fn of(&self, deployment: &InferenceDeployment) -> u32 {
        self.counts().get(&ObjectRef::from_obj(deployment)).copied().unwrap_or_default()
    }

    /// Its round did not fail.
    pub(super) fn forget(&self, deployment: &InferenceDeployment) {
        self.counts().remove(&ObjectRef::from_obj(deployment));
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
