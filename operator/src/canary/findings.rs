//! What was found of canaries, by the UID of their deployments. Shared: the examiner writes, rounds read.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::gate::Finding;

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Findings(Arc<Mutex<HashMap<String, Finding>>>);

impl Findings {
    /// What was found last of a deployment's canary.
    pub fn of(&self, deployment: Option<&str>) -> Option<Finding> {
        self.lock().get(deployment?).cloned()
    }

    /// Something was found; whether that is new.
    pub(super) fn note(&self, deployment: &str, finding: Finding) -> bool {
        let before = self.lock().insert(deployment.to_owned(), finding.clone());
        before.is_none_or(|before| before != finding)
    }

    /// Forgets all other deployments.
    pub(super) fn keep_only(&self, deployments: &HashSet<String>) {
        self.lock().retain(|deployment, _| deployments.contains(deployment));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Finding>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
