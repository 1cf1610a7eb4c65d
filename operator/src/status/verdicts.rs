//! What is said of replicas, in conditions: from what stands, then from what a budget, a canary, a course or zero replicas make of it.

use jiff::SignedDuration;
use stoker_crds::{
    conditions::{self, DEGRADED, PROGRESSING, READY},
    scaling::{ScalingMode, ScalingSpec},
    scaling_status::ScalingStatus,
    status::{CanaryPhase, RolledBack, RolloutPhase, RolloutStatus},
};
use stoker_replica::{Replica, Stage, Trouble};
use stoker_scaling::held_requests_words;

use super::Round;
use crate::{
    budgets::{Granted, granted_verdict},
    cause::Cause,
    plan::Plan,
    release,
    rollout::Strategy,
    verdict::Verdict,
};

/// Pods by what a reader counts.
pub(super) struct Counts {
    wanted: usize,
    /// Neither ended nor being deleted.
    pub existing: usize,
    /// Requests reach them.
    pub serving: usize,
    /// Of the wanted revision, serving.
    pub updated: usize,
    /// Of an older revision, meant to stay for now.
    old: usize,
    /// Draining or being deleted.
    leaving: usize,
}

impl Counts {
    pub(super) fn of(round: &Round<'_>) -> Self {
        let pods = &round.observed.replicas;
        let count = |fits: &dyn Fn(&Replica) -> bool| pods.iter().filter(|pod| fits(pod)).count();
        let current = |pod: &Replica| pod.pod.revision == round.desired.revision;
        Self {
            wanted: round.deployment.replicas as usize,
            existing: count(&Replica::is_live),
            serving: count(&Replica::serves),
            updated: count(&|pod| pod.serves() && current(pod)),
            old: count(&|pod| pod.is_live() && pod.drain_since().is_none() && !current(pod)),
            leaving: count(&|pod| pod.pod.stage == Stage::Leaving || (pod.is_live() && pod.drain_since().is_some())),
        }
    }
}

pub(super) fn ready(counts: &Counts, cause: Option<&Cause>, plan: &Plan) -> Verdict {
    let blocked =
        cause.is_some_and(|cause| cause.is_stuck() && counts.updated < counts.wanted) || !plan.taken.is_empty();
    let complete = counts.updated >= counts.wanted && counts.old == 0 && !blocked;
    let of_wanted = of_wanted(counts, &plan.revision);
    match cause {
        _ if complete && counts.wanted == 0 => {
            Verdict::new(true, conditions::REASON_SCALED_TO_ZERO, "no replica is wanted")
        }
        _ if complete => Verdict::new(true, conditions::REASON_SERVING, of_wanted),
        Some(cause) if cause.is_stuck() => Verdict { value: false, trouble: cause.trouble.clone() },
        _ if counts.old > 0 => Verdict::new(false, rolling_reason(plan), of_wanted),
        Some(cause) => Verdict { value: false, trouble: cause.trouble.clone() },
        None => Verdict::new(false, conditions::REASON_STARTING, of_wanted),
    }
}

pub(super) fn available(counts: &Counts) -> Verdict {
    match (counts.serving, counts.wanted) {
        (0, 0) => Verdict::new(false, conditions::REASON_SCALED_TO_ZERO, "no replica is wanted"),
        (0, _) => Verdict::new(false, conditions::REASON_NO_REPLICA_SERVES, "requests are not answered"),
        _ => Verdict::new(true, conditions::REASON_REPLICA_SERVES, "requests are answered"),
    }
}

pub(super) fn progressing(counts: &Counts, plan: &Plan) -> Verdict {
    let of_wanted = of_wanted(counts, &plan.revision);
    if counts.old > 0 {
        Verdict::new(true, rolling_reason(plan), of_wanted)
    } else if counts.updated < counts.wanted {
        Verdict::new(true, conditions::REASON_STARTING, of_wanted)
    } else if counts.leaving > 0 || plan.pods.moves_replicas() {
        Verdict::new(true, conditions::REASON_DRAINING, "replicas that are not wanted leave")
    } else {
        Verdict::new(false, conditions::REASON_SETTLED, "nothing is on its way")
    }
}

/// How many of those that are wanted serve the revision, in a sentence.
fn of_wanted(counts: &Counts, revision: &str) -> String {
    let Counts { updated, wanted, .. } = *counts;
    let by = |count: usize, one: &'static str, many: &'static str| if count == 1 { one } else { many };
    let (replica, serves) = (|count| by(count, "replica", "replicas"), |count| by(count, "serves", "serve"));
    if updated > wanted {
        let (replica, serves, are) = (replica(updated), serves(updated), by(wanted, "is", "are"));
        return format!("{updated} {replica} {serves} revision {revision}, {wanted} {are} wanted");
    }
    let serves = serves(if wanted == 1 { 1 } else { updated });
    format!("{updated} of {wanted} {} {serves} revision {revision}", replica(wanted))
}

fn rolling_reason(plan: &Plan) -> &'static str {
    match plan.pods.strategy {
        Strategy::ReplaceInPlace => conditions::REASON_REPLACING,
        Strategy::Held => conditions::REASON_PAUSED,
        Strategy::Surge | Strategy::Settled => conditions::REASON_ROLLING,
    }
}

/// A stray and an agent of another release are nobody's lack, and somebody should still know.
pub(super) fn degraded(cause: Option<&Cause>, round: &Round<'_>, strays: &[String]) -> Verdict {
    let of_release = || {
        let replicas = &round.observed.replicas;
        replicas.iter().find_map(|replica| release::of_serving(replica, &round.desired.revision))
    };
    let trouble = cause.filter(|cause| cause.is_stuck()).map(|cause| cause.trouble.clone()).or_else(of_release);
    match (trouble, strays.first()) {
        (Some(trouble), _) => Verdict { value: true, trouble },
        (None, Some(stray)) => Verdict::new(
            true,
            conditions::REASON_STRAY_POD,
            format!(
                "pod {stray} has a replica's name and not its labels, so it is not counted and another one is made: give it \
                 back its labels or delete it"
            ),
        ),
        (None, None) => Verdict::new(false, conditions::REASON_AS_EXPECTED, "nothing is wrong"),
    }
}

/// Fewer than are owed: the one thing that keeps the others from being made. What hinders those that are granted comes first.
pub(super) fn by_budget(type_: &str, verdict: Verdict, granted: Option<&Granted>) -> Verdict {
    let is_fine = verdict.value == (type_ == READY);
    match granted.filter(|granted| granted.grant.replicas < granted.owed) {
        Some(granted) if is_fine && matches!(type_, READY | DEGRADED) => {
            Verdict { value: type_ == DEGRADED, ..granted_verdict(granted) }
        }
        _ => verdict,
    }
}

/// What is said while a revision is tried on one replica. It is not ready, although as many serve as are wanted.
pub(super) fn on_trial(type_: &str, verdict: Verdict, rollout: &RolloutStatus, cause: Option<&Cause>) -> Verdict {
    let Some(canary) = &rollout.canary else { return verdict };
    let has_failed = canary.phase == CanaryPhase::Failed;
    let reason = if has_failed { conditions::REASON_CANARY_FAILED } else { conditions::REASON_CANARY };
    let said = || format!("revision {} is tried on one replica: {}", canary.revision, canary.message);
    match (type_, cause.filter(|cause| cause.is_stuck())) {
        (READY, Some(cause)) => Verdict { value: false, trouble: cause.trouble.clone() },
        (READY, None) => Verdict::new(false, reason, said()),
        (DEGRADED, _) if has_failed => Verdict::new(true, reason, said()),
        (PROGRESSING, _) => Verdict::new(!has_failed, reason, said()),
        _ => verdict,
    }
}

/// What is said of a revision that waits or was given up, before what is said of the one that serves.
pub(super) fn by_course(type_: &str, verdict: Verdict, rollout: &RolloutStatus, deadline: &SignedDuration) -> Verdict {
    let has_failed = rollout.canary.as_ref().is_some_and(|canary| canary.phase == CanaryPhase::Failed);
    let given_up = |gone: &RolledBack| {
        let RolledBack { revision, to, message, .. } = gone;
        let why = if has_failed {
            "did not pass its canary's gate".to_owned()
        } else {
            format!("came no further for {} s", deadline.as_secs())
        };
        format!(
            "revision {revision} {why} and was given up, revision {to} serves instead; change the spec, or undo \
             the change with kubectl stoker rollout undo (the same revision is tried again with rollout.autoRollback: false). {message}"
        )
    };
    match (&rollout.rolled_back, rollout.phase, type_) {
        (Some(gone), _, READY) => Verdict::new(false, conditions::REASON_ROLLED_BACK, given_up(gone)),
        (Some(gone), _, DEGRADED) => Verdict::new(true, conditions::REASON_ROLLED_BACK, given_up(gone)),
        (None, RolloutPhase::Paused, READY) => Verdict::new(
            false,
            conditions::REASON_PAUSED,
            format!("revision {} waits, as rollout.paused says: kubectl stoker rollout resume goes on", rollout.asked),
        ),
        _ => verdict,
    }
}

/// What there is to say about going to zero: whether a request brings a replica, and how many wait for one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Zero {
    wakes: bool,
    held: u32,
}

impl Zero {
    pub(super) fn of(spec: Option<&ScalingSpec>, status: Option<&ScalingStatus>) -> Self {
        let wakes = spec.is_some_and(|spec| spec.to_zero.is_some() && spec.mode == ScalingMode::Native);
        Self { wakes, held: status.map_or(0, |status| status.held.max(0).unsigned_abs()) }
    }

    /// A verdict with what it means for whoever asks.
    pub(super) fn said_with(self, verdict: Verdict) -> Verdict {
        let Verdict { value, trouble: Trouble { reason, message } } = verdict;
        let held = held_requests_words(self.held);
        let message = match self {
            Self { wakes: true, .. } if reason == conditions::REASON_SCALED_TO_ZERO => {
                format!("scaled to zero, {held}; a request brings a replica back")
            }
            Self { held: 0, .. } => message,
            _ => format!("{message}; {held}"),
        };
        Verdict { value, trouble: Trouble { reason, message } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_a_replica_is_counted_where_there_is_none() {
        let said = |wakes, held, reason: &str| {
            let verdict = Verdict::new(true, reason, "no replica is wanted");
            Zero { wakes, held }.said_with(verdict).trouble.message
        };
        let zero = conditions::REASON_SCALED_TO_ZERO;
        assert_eq!(said(false, 0, zero), "no replica is wanted");
        assert_eq!(said(true, 2, zero), "scaled to zero, 2 requests held; a request brings a replica back");
        assert_eq!(said(true, 1, conditions::REASON_STARTING), "no replica is wanted; 1 request held");
        assert_eq!(said(true, 0, conditions::REASON_SERVING), "no replica is wanted");
    }

    #[test]
    fn replicas_are_counted_in_sentences() {
        let said =
            |updated, wanted| of_wanted(&Counts { updated, wanted, existing: 0, serving: 0, old: 0, leaving: 0 }, "r");
        assert_eq!([said(0, 1), said(1, 1)], ["0 of 1 replica serves revision r", "1 of 1 replica serves revision r"]);
        assert_eq!([said(1, 2), said(0, 2)], ["1 of 2 replicas serves revision r", "0 of 2 replicas serve revision r"]);
        assert_eq!(said(3, 3), "3 of 3 replicas serve revision r");
        assert_eq!(said(3, 1), "3 replicas serve revision r, 1 is wanted");
        assert_eq!(said(3, 2), "3 replicas serve revision r, 2 are wanted");
        assert_eq!(said(1, 0), "1 replica serves revision r, 0 are wanted");
    }
}
