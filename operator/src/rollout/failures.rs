//! Pods that failed soon after they were made: each one lets its successor wait longer. Pure.
//!
//! The failed pods themselves are the memory: they stay while the replicas are not complete, and hold nothing on any node.
//! A pod that lived for a while is replaced at once, whatever ended it.

use jiff::{SignedDuration, Timestamp};
use stoker_replica::{Replica, Stage};

use super::Wanted;

/// A pod that lived for longer did not fail for how it was made.
const SHORT_LIFE: SignedDuration = SignedDuration::from_mins(10);
/// How long the successor of the second failure waits; twice as long after each further one.
const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
/// Failures that are remembered: the longest pause is 160 s.
const REMEMBERED: usize = 6;

/// Failures of the wanted revision that are remembered, newest first.
pub(super) struct Failures<'a>(Vec<(Timestamp, &'a Replica)>);

impl<'a> Failures<'a> {
    pub(super) fn of(wanted: &Wanted, replicas: &'a [Replica]) -> Self {
        let serving = replicas.iter().filter(|replica| replica.serves() && replica.pod.revision == wanted.revision);
        if serving.count() >= wanted.replicas {
            return Self(Vec::new());
        }
        let failures = replicas.iter().filter_map(|replica| match replica.pod.stage {
            Stage::Finished { since, .. } if replica.pod.revision == wanted.revision => Some((since, replica)),
            _ => None,
        });
        let mut failures: Vec<_> =
            failures.filter(|(since, replica)| since.duration_since(replica.pod.created) < SHORT_LIFE).collect();
        failures.sort_by(|a, b| (b.0, &b.1.pod.name).cmp(&(a.0, &a.1.pod.name)));
        failures.truncate(REMEMBERED);
        Self(failures)
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// When the next pod may be made, if it has to wait.
    pub(super) fn pause_until(&self) -> Option<Timestamp> {
        let (newest, _) = self.0.first()?;
        let doublings = u32::try_from(self.0.len().checked_sub(2)?).ok()?;
        newest.checked_add(FIRST_PAUSE * (1 << doublings)).ok()
    }

    pub(super) fn remembers(&self, replica: &Replica) -> bool {
        self.0.iter().any(|(_, failed)| failed.pod.uid == replica.pod.uid)
    }
}
