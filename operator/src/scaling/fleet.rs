//! Which pods count as replicas, and how. Pure.
//!
//! A replica that served and cannot be asked any more still counts as serving, with a reading that is not fresh: a
//! crashed agent must look like lost sight, never like lost load. Once its process is gone for a whole stable window, its
//! clients have come back to the others and show there; then it is broken, and nobody waits for it.

use std::collections::HashMap;

use stoker_replica::{Replica, Stage};
use stoker_scaling::Standing;

/// How long a pod that just became ready may be without a believable reading before that is a complaint.
const FIRST_READING_MS: u64 = 6_000;
/// How long a pod may wait for its image, volumes or network and still be capacity on its way.
const PREPARING_MS: u64 = 600_000;

/// What is remembered of the pods, by UID.
#[derive(Clone, Debug, Default)]
pub(super) struct Fleet {
    known: HashMap<String, Known>,
}

#[derive(Clone, Debug, Default)]
struct Known {
    /// When it was first seen ready.
    ready_ms: Option<u64>,
    /// Since when it waits for its image, volumes or network.
    preparing_ms: Option<u64>,
    /// When its process was last seen to run after it had been ready.
    ran_ms: Option<u64>,
    /// The process whose reading was last believed.
    start_id: Option<String>,
}

impl Fleet {
    /// Each replica with its standing; pods that ended, or cannot start, are none. A process that is gone is waited for
    /// `patience_ms`.
    pub(super) fn standings<'a>(
        &mut self,
        replicas: &'a [Replica],
        patience_ms: u64,
        now_ms: u64,
    ) -> Vec<(&'a str, Standing)> {
        let mut before = std::mem::take(&mut self.known);
        for Replica { pod, .. } in replicas {
            let mut known = before.remove(&pod.uid).unwrap_or_default();
            if pod.stage == Stage::Serving {
                known.ready_ms.get_or_insert(now_ms);
            }
            let preparing_ms = known.preparing_ms.unwrap_or(now_ms);
            known.preparing_ms = matches!(pod.stage, Stage::Preparing { .. }).then_some(preparing_ms);
            if matches!(pod.stage, Stage::Serving | Stage::Faltering { .. }) {
                known.ran_ms = Some(now_ms);
            }
            self.known.insert(pod.uid.clone(), known);
        }
        let standing = |replica| self.standing(replica, patience_ms, now_ms);
        replicas.iter().filter_map(|replica| Some((replica.pod.name.as_str(), standing(replica)?))).collect()
    }

    /// A reading of this process in the pod was believed.
    pub(super) fn believe(&mut self, replica: &Replica, start_id: &str) {
        if let Some(known) = self.known.get_mut(&replica.pod.uid) {
            known.start_id = Some(start_id.to_owned());
        }
    }

    /// True when it served and its process ended since: it is not ready again, or another process is, for which this tick
    /// is the first. However short, that was lost sight.
    pub(super) fn is_down(&mut self, replica: &Replica) -> bool {
        let Some(known) = self.known.get_mut(&replica.pod.uid) else { return false };
        let Some(believed) = &known.start_id else { return false };
        if !matches!(replica.pod.stage, Stage::Serving | Stage::Faltering { .. }) {
            return true;
        }
        let report = replica.reading.report();
        let Some(other) = report.map(|report| &report.start_id).filter(|start_id| *start_id != believed) else {
            return false;
        };
        known.start_id = Some(other.clone());
        true
    }

    fn standing(&self, replica: &Replica, patience_ms: u64, now_ms: u64) -> Option<Standing> {
        let known = self.known.get(&replica.pod.uid);
        let believed = known.is_some_and(|known| known.start_id.is_some());
        let ready_ms = known.and_then(|known| known.ready_ms);
        let overdue = ready_ms.is_some_and(|ready_ms| now_ms >= ready_ms + FIRST_READING_MS);
        let ran_ms = known.and_then(|known| known.ran_ms);
        let gone = ran_ms.is_some_and(|ran_ms| now_ms >= ran_ms + patience_ms);
        let preparing_ms = known.and_then(|known| known.preparing_ms);
        let overdue_to_start = preparing_ms.is_some_and(|since_ms| now_ms >= since_ms + PREPARING_MS);
        match replica.pod.stage {
            Stage::Finished { .. } => None,
            Stage::Leaving => Some(Standing::Draining),
            _ if replica.drain_since().is_some() => Some(Standing::Draining),
            _ if gone => Some(Standing::Broken),
            _ if believed || overdue => Some(Standing::Serving),
            Stage::Faltering { .. } => Some(Standing::Serving),
            // Nothing to wait for: what is missing may ask for others.
            Stage::Blocked(_) => None,
            Stage::Preparing { .. } if overdue_to_start => None,
            Stage::Serving | Stage::Unscheduled { .. } | Stage::Preparing { .. } | Stage::Starting => {
                Some(Standing::Starting)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use stoker_crds::intent::Want;
    use stoker_replica::{Intent, Needs, ObservedPod, Reading, Trouble};

    use super::*;

    fn pod(stage: Stage) -> Replica {
        let pod = ObservedPod {
            name: "chat-0a-0".into(),
            uid: "uid-0".into(),
            revision: "0a".into(),
            ordinal: 0,
            resource_version: String::new(),
            created: jiff::Timestamp::UNIX_EPOCH,
            stage,
            lost: false,
            gone_by: None,
            node: None,
            needs: Needs::default(),
        };
        Replica { pod, reading: Reading::default(), intent: None }
    }

    fn preparing() -> Stage {
        Stage::Preparing { trouble: Trouble::default(), since: jiff::Timestamp::UNIX_EPOCH }
    }

    #[test]
    fn who_waits_for_its_volumes_for_ever_is_no_capacity_on_its_way() {
        let (mut fleet, waits) = (Fleet::default(), pod(preparing()));
        let at = |fleet: &mut Fleet, now_ms| standing(fleet, &waits, now_ms);
        assert_eq!(at(&mut fleet, 1_000), Some(Standing::Starting));
        assert_eq!(at(&mut fleet, PREPARING_MS), Some(Standing::Starting));
        assert_eq!(at(&mut fleet, PREPARING_MS + 1_000), None);
    }

    const PATIENCE_MS: u64 = 60_000;

    fn standing(fleet: &mut Fleet, pod: &Replica, now_ms: u64) -> Option<Standing> {
        fleet.standings(std::slice::from_ref(pod), PATIENCE_MS, now_ms).first().map(|(_, standing)| *standing)
    }

    #[test]
    fn a_pod_that_became_ready_serves_with_its_first_believed_reading() {
        let (mut fleet, pod) = (Fleet::default(), pod(Stage::Serving));
        assert_eq!(standing(&mut fleet, &pod, 0), Some(Standing::Starting));
        fleet.believe(&pod, "a");
        assert_eq!(standing(&mut fleet, &pod, 2_000), Some(Standing::Serving));
    }

    #[test]
    fn a_ready_pod_that_is_never_believed_is_missed_after_three_ticks() {
        let (mut fleet, pod) = (Fleet::default(), pod(Stage::Serving));
        assert_eq!(standing(&mut fleet, &pod, 0), Some(Standing::Starting));
        assert_eq!(standing(&mut fleet, &pod, FIRST_READING_MS), Some(Standing::Serving));
    }

    #[test]
    fn a_crashed_replica_is_lost_sight_and_not_lost_load() {
        let mut fleet = Fleet::default();
        let serving = pod(Stage::Serving);
        standing(&mut fleet, &serving, 0);
        fleet.believe(&serving, "a");
        let crashed = pod(Stage::Blocked(Trouble::new("CrashLoopBackOff", "")));
        assert_eq!(standing(&mut fleet, &crashed, 2_000), Some(Standing::Serving));
        assert_eq!(standing(&mut fleet, &pod(Stage::Starting), 4_000), Some(Standing::Serving));
        assert!(fleet.is_down(&crashed) && !fleet.is_down(&serving));
    }

    #[test]
    fn a_replica_that_crashes_without_end_is_broken_after_the_patience_and_serves_again_when_it_does() {
        let mut fleet = Fleet::default();
        let serving = pod(Stage::Serving);
        standing(&mut fleet, &serving, 0);
        fleet.believe(&serving, "a");
        let crashed = pod(Stage::Blocked(Trouble::new("CrashLoopBackOff", "")));
        assert_eq!(standing(&mut fleet, &crashed, PATIENCE_MS - 1), Some(Standing::Serving));
        assert_eq!(standing(&mut fleet, &crashed, PATIENCE_MS), Some(Standing::Broken));
        assert_eq!(standing(&mut fleet, &pod(Stage::Starting), PATIENCE_MS + 2_000), Some(Standing::Broken));
        assert_eq!(standing(&mut fleet, &serving, PATIENCE_MS + 4_000), Some(Standing::Serving));
    }

    #[test]
    fn a_replica_that_runs_and_is_silent_is_never_given_up() {
        let mut fleet = Fleet::default();
        let serving = pod(Stage::Serving);
        standing(&mut fleet, &serving, 0);
        fleet.believe(&serving, "a");
        let since = jiff::Timestamp::UNIX_EPOCH;
        let frozen = pod(Stage::Faltering { trouble: Trouble::default(), since });
        for minute in 0..100 {
            assert_eq!(standing(&mut fleet, &frozen, minute * 60_000), Some(Standing::Serving));
        }
    }

    #[test]
    fn who_cannot_start_and_never_served_is_not_waited_for() {
        let blocked = pod(Stage::Blocked(Trouble::new("ErrImagePull", "")));
        assert_eq!(standing(&mut Fleet::default(), &blocked, 0), None);
    }

    #[test]
    fn who_never_served_starts_and_who_leaves_drains() {
        let mut fleet = Fleet::default();
        assert_eq!(standing(&mut fleet, &pod(preparing()), 0), Some(Standing::Starting));
        assert_eq!(standing(&mut fleet, &pod(Stage::Leaving), 0), Some(Standing::Draining));
        let drain = Intent { number: 1, want: Want::Drain(Default::default()), since: jiff::Timestamp::UNIX_EPOCH };
        let finished = Stage::Finished { trouble: Trouble::default(), since: jiff::Timestamp::UNIX_EPOCH };
        let draining = Replica { intent: Some(drain), ..pod(Stage::Serving) };
        assert_eq!(standing(&mut fleet, &draining, 60_000), Some(Standing::Draining));
        assert_eq!(standing(&mut fleet, &pod(finished), 0), None);
    }
}
