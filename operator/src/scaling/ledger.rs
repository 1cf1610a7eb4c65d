//! The last decisions of each deployment with all their inputs, in memory: what rounds act on and `explain` reads.
//!
//! Bounded: [`RECORDS_KEPT`] records over all deployments. Owns no history beyond that; the status has the short one.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, PoisonError, RwLock},
};

use kube::{ResourceExt, runtime::reflector::ObjectRef};
use stoker_crds::{
    InferenceDeployment,
    scaling_status::{DECISIONS_KEPT, DecisionStatus},
};
use stoker_scaling::{Coverage, DecisionRecord, NotFresh, Untold};

/// Records kept over all deployments, about 2 KB each.
const RECORDS_KEPT: usize = 20_000;
/// Records kept of one deployment: at least for half a minute, at most for ten.
const RECORDS_OF_ONE: (usize, usize) = (16, 300);

/// The last decision about a deployment.
#[derive(Clone, Debug)]
pub struct Latest {
    /// The decision with all its inputs.
    pub record: Arc<DecisionRecord>,
    /// Decisions that changed the number, oldest first.
    pub changes: Vec<DecisionStatus>,
    /// What the status says of readings.
    pub coverage: CoverageSummary,
}

/// Coverage as the status has it: coarse in time, so that it can be written.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CoverageSummary {
    /// Serving replicas.
    pub serving: u32,
    /// Of those, replicas with a fresh reading.
    pub fresh: u32,
    /// One replica that is not fresh, and why.
    pub example: Option<(String, NotFresh)>,
    /// Replicas that were given up: their process is gone for good.
    pub broken: u32,
    /// Replicas that do not say what their steps cost.
    pub untold: Option<Untold>,
}

impl CoverageSummary {
    pub(super) fn of(coverage: &Coverage) -> Self {
        let Coverage { serving, fresh, not_fresh, broken, untold, .. } = coverage;
        Self {
            serving: *serving,
            fresh: *fresh,
            example: not_fresh.first().cloned(),
            broken: *broken,
            untold: untold.clone(),
        }
    }

    /// True when no serving replica is out of sight.
    pub fn is_complete(&self) -> bool {
        self.fresh == self.serving
    }
}

/// See the module. Shared: the autoscaler writes, rounds and the HTTP server read.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    by_deployment: Arc<RwLock<HashMap<ObjectRef<InferenceDeployment>, Entry>>>,
}

#[derive(Debug)]
struct Entry {
    uid: String,
    latest: Latest,
    records: VecDeque<Arc<DecisionRecord>>,
    /// Those that changed the number, as many as the status has.
    changed: VecDeque<Arc<DecisionRecord>>,
}

impl Ledger {
    /// Takes in a decision.
    pub(super) fn record(&self, deployment: &InferenceDeployment, latest: Latest) {
        let uid = deployment.uid().unwrap_or_default();
        let mut entries = self.by_deployment.write().unwrap_or_else(PoisonError::into_inner);
        let (least, most) = RECORDS_OF_ONE;
        let room = (RECORDS_KEPT / entries.len().max(1)).clamp(least, most);
        let fresh =
            || Entry { uid: uid.clone(), latest: latest.clone(), records: VecDeque::new(), changed: VecDeque::new() };
        let entry = entries.entry(key(deployment)).or_insert_with(fresh);
        if entry.uid != uid {
            *entry = fresh();
        }
        while entry.records.len() >= room {
            entry.records.pop_front();
        }
        entry.records.push_back(latest.record.clone());
        if latest.record.decision.desired != latest.record.decision.previous {
            if entry.changed.len() == DECISIONS_KEPT {
                entry.changed.pop_front();
            }
            entry.changed.push_back(latest.record.clone());
        }
        entry.latest = latest;
    }

    /// Forgets deployments of other UIDs, and says whom.
    pub(super) fn keep_only(&self, uids: &HashSet<String>) -> Vec<ObjectRef<InferenceDeployment>> {
        let mut entries = self.by_deployment.write().unwrap_or_else(PoisonError::into_inner);
        let gone: Vec<_> =
            entries.iter().filter(|(_, entry)| !uids.contains(&entry.uid)).map(|(key, _)| key.clone()).collect();
        gone.iter().for_each(|key| drop(entries.remove(key)));
        gone
    }

    /// The last decision about this deployment.
    pub fn latest(&self, deployment: &InferenceDeployment) -> Option<Latest> {
        let entries = self.by_deployment.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(&key(deployment))?;
        (Some(&entry.uid) == deployment.uid().as_ref()).then(|| entry.latest.clone())
    }

    /// All full records of this deployment, and of those that changed its number the last ones; each oldest first.
    pub(crate) fn kept(&self, deployment: &InferenceDeployment) -> Option<Kept> {
        let entries = self.by_deployment.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(&key(deployment)).filter(|entry| Some(&entry.uid) == deployment.uid().as_ref())?;
        Some((entry.records.iter().cloned().collect(), entry.changed.iter().cloned().collect()))
    }

    /// Full records made after `after_ms`, oldest first; `None` when nothing is decided about this deployment here.
    pub fn records(&self, namespace: &str, name: &str, after_ms: u64) -> Option<Vec<Arc<DecisionRecord>>> {
        let entries = self.by_deployment.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.get(&ObjectRef::new(name).within(namespace))?;
        Some(entry.records.iter().filter(|record| record.at_ms > after_ms).cloned().collect())
    }
}

/// Records, and those of them and before them that changed the number.
pub(crate) type Kept = (Vec<Arc<DecisionRecord>>, Vec<Arc<DecisionRecord>>);

fn key(deployment: &InferenceDeployment) -> ObjectRef<InferenceDeployment> {
    ObjectRef::new(&deployment.name_any()).within(&deployment.namespace().unwrap_or_default())
}
