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

/// Failures that are remembered, newest first.
pub(super) struct Failures<'a> {
    wanted: Vec<(Timestamp, &'a Replica)>,
    canary: Vec<(Timestamp, &'a Replica)>,
}

impl<'a> Failures<'a> {
    /// Those of the wanted revision until `enough` of its replicas serve, and of the canary until that does.
    pub(super) fn of(wanted: &Wanted, enough: usize, replicas: &'a [Replica]) -> Self {
        let canary = wanted.canary.as_ref();
        Self {
            wanted: of_revision(&wanted.revision, enough, replicas),
            canary: canary.map(|canary| of_revision(&canary.revision, 1, replicas)).unwrap_or_default(),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.wanted.len().max(self.canary.len())
    }

    /// When the next pod may be made, if it has to wait.
    pub(super) fn pause_until(&self) -> Option<Timestamp> {
        pause_until(&self.wanted)
    }

    /// The same of a revision that is tried.
    pub(super) fn canary_pause_until(&self) -> Option<Timestamp> {
        pause_until(&self.canary)
    }

    pub(super) fn remembers(&self, replica: &Replica) -> bool {
        self.wanted.iter().chain(&self.canary).any(|(_, failed)| failed.pod.uid == replica.pod.uid)
    }
}

/// Those of a revision, until enough of its replicas serve.
fn of_revision<'a>(revision: &str, enough: usize, replicas: &'a [Replica]) -> Vec<(Timestamp, &'a Replica)> {
    let own = || replicas.iter().filter(|replica| replica.pod.revision == revision);
    if own().filter(|replica| replica.serves()).count() >= enough {
        return Vec::new();
    }
    let failures = own().filter_map(|replica| match replica.pod.stage {
        Stage::Finished { since, .. } => Some((since, replica)),
        _ => None,
    });
    let mut failures: Vec<_> =
        failures.filter(|(since, replica)| since.duration_since(replica.pod.created) < SHORT_LIFE).collect();
    failures.sort_by(|a, b| (b.0, &b.1.pod.name).cmp(&(a.0, &a.1.pod.name)));
    failures.truncate(REMEMBERED);
    failures
}

fn pause_until(failures: &[(Timestamp, &Replica)]) -> Option<Timestamp> {
    let (newest, _) = failures.first()?;
    let doublings = u32::try_from(failures.len().checked_sub(2)?).ok()?;
    newest.checked_add(FIRST_PAUSE * (1 << doublings)).ok()
}
