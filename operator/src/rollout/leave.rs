//! How pods leave: drained before they are deleted, the least missed first. Pure.

use std::cmp::Reverse;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::contract::{DrainSettings, LoadReport};
use stoker_replica::{Replica, Sight, Stage};

use super::{
    DEADLINE_SLACK, Deletion, FALTER_PATIENCE, PodRef, RolloutPlan, UNREACHABLE_PATIENCE, Wanted, Why,
    failures::Failures,
    fleet::{Fleet, frees_enough},
};

/// Pods that ended go, except those that are remembered.
pub(super) fn bury_finished(pods: &[Replica], failures: &Failures<'_>, plan: &mut RolloutPlan) {
    let finished = pods.iter().filter(|pod| matches!(pod.pod.stage, Stage::Finished { .. }));
    let finished = finished.filter(|pod| !failures.remembers(pod));
    plan.delete.extend(finished.map(|pod| Deletion { pod: PodRef::to(pod), why: Why::Finished }));
}

/// Each draining pod is deleted or waited for. Telling its agent is the probe's.
pub(super) fn settle_draining(wanted: &Wanted, draining: &[&Replica], now: Timestamp, plan: &mut RolloutPlan) {
    for pod in draining {
        if let Some(why) = why_gone(&wanted.drain, pod, now, plan) {
            plan.delete.push(Deletion { pod: PodRef::to(pod), why });
        }
    }
}

/// Why a draining pod may go now.
fn why_gone(drain: &DrainSettings, pod: &Replica, now: Timestamp, plan: &mut RolloutPlan) -> Option<Why> {
    let since = pod.drain_since().unwrap_or(now);
    if !matches!(pod.pod.stage, Stage::Serving | Stage::Faltering { .. } | Stage::Starting) {
        return Some(Why::HoldsNoStreams);
    }
    if !plan.wait_until(deadline(drain, since), now) {
        return Some(Why::DeadlinePassed);
    }
    match pod.reading.sight() {
        // Whatever else it says may be over: one that loaded may serve by now, one that emptied itself may have come back.
        Sight::Fresh(report) if !pod.knows_its_intent() => {
            let patience = told_since(report, since, now) + UNREACHABLE_PATIENCE;
            (!plan.wait_until(patience, now)).then_some(Why::OrderRefused)
        }
        Sight::Fresh(_) => pod.is_drained().then_some(Why::Drained),
        Sight::Unread => None,
        unseen @ (Sight::Stale { .. } | Sight::Absurd(_) | Sight::Missing) => {
            let patience = unseen_since(unseen, since, now) + UNREACHABLE_PATIENCE;
            (!plan.wait_until(patience, now)).then_some(Why::Unreachable)
        }
    }
}

/// Since when a replica that drains since then cannot be seen.
pub(crate) fn unseen_since(sight: Sight<'_>, drain_since: Timestamp, now: Timestamp) -> Timestamp {
    match sight {
        Sight::Stale { age_ms } => drain_since.max(before(now, age_ms).unwrap_or(drain_since)),
        Sight::Fresh(_) | Sight::Absurd(_) | Sight::Missing | Sight::Unread => drain_since,
    }
}

fn before(now: Timestamp, ms: u64) -> Option<Timestamp> {
    now.checked_sub(SignedDuration::from_millis(i64::try_from(ms).ok()?)).ok()
}

/// Since when the process that gave `report` could have been told: a container that started again begins anew.
pub(crate) fn told_since(report: &LoadReport, since: Timestamp, now: Timestamp) -> Timestamp {
    before(now, report.up_ms).map_or(since, |started| started.max(since))
}

/// When a drain that began at `since` has taken long enough.
pub fn deadline(drain: &DrainSettings, since: Timestamp) -> Timestamp {
    let seconds = i64::from(drain.withdraw_seconds) + i64::from(drain.deadline_seconds);
    since + SignedDuration::from_secs(seconds) + DEADLINE_SLACK
}

/// Pods of an older revision that never served are in nobody's way but ours.
pub(super) fn remove_useless_old(fleet: &mut Fleet<'_>, plan: &mut RolloutPlan) {
    fleet.old.retain(|pod| {
        let useless = !pod.may_hold_streams();
        if useless {
            plan.delete.push(Deletion { pod: PodRef::to(pod), why: Why::HoldsNoStreams });
        }
        !useless
    });
}

/// Lets surplus pods go, older revisions first: without serving fewer than wanted, except by `may_go_first`.
pub(super) fn remove_surplus(
    wanted: &Wanted,
    fleet: &mut Fleet<'_>,
    mut may_go_first: usize,
    now: Timestamp,
    plan: &mut RolloutPlan,
) {
    let floor = wanted.replicas.saturating_sub(wanted.may_be_missing());
    let mut serving = fleet.serving();
    let canary = usize::from(fleet.canary_stands_in(wanted));
    let staying = fleet.current.len() + fleet.old.len() + canary;
    // Where no pod may be too many there is no surplus: who goes first makes the place of its successor.
    let of_old = if wanted.replacing.max_surge == 0 { may_go_first } else { 0 };
    let mut surplus = staying.saturating_sub(wanted.replicas).max(of_old);
    // One of the wanted revision goes only for a canary that has no room beside it.
    let for_canary = if fleet.old.is_empty() { canary.min(may_go_first) } else { 0 };
    let surplus_current = fleet.current.len().saturating_sub(wanted.replicas) + for_canary;
    let needs = fleet.replaced(wanted).1;
    sort_by_loss(&mut fleet.old);
    sort_by_loss(&mut fleet.current);
    for pod in fleet.old.iter().chain(fleet.current.iter().take(surplus_current)) {
        let is_spare = serving > wanted.replicas;
        let frees = || of_old > 0 || (frees_enough(&pod.pod.needs, needs) && !plan.prefetch.awaits(pod));
        let goes_first = || may_go_first > 0 && serving > floor && frees();
        let blocked = match &pod.pod.stage {
            Stage::Serving => !is_spare && !goes_first(),
            Stage::Faltering { since, .. } if pod.pod.revision != wanted.revision => {
                plan.wait_until(*since + FALTER_PATIENCE, now)
            }
            _ => false,
        };
        if surplus == 0 || blocked {
            continue;
        }
        surplus -= 1;
        may_go_first -= usize::from(pod.serves() && !is_spare);
        serving -= usize::from(pod.serves());
        let_go(pod, plan);
    }
}

fn let_go(pod: &Replica, plan: &mut RolloutPlan) {
    if pod.may_hold_streams() {
        plan.drain.push(PodRef::to(pod));
    } else {
        plan.delete.push(Deletion { pod: PodRef::to(pod), why: Why::HoldsNoStreams });
    }
}

/// The least missed first: not serving, fewest requests, least KV in use, the youngest.
fn sort_by_loss(pods: &mut [&Replica]) {
    pods.sort_by_key(|pod| {
        let report = pod.reading.report();
        // A serving replica that cannot be read is taken for a busy one.
        let requests = report.map_or(u32::MAX, |report| report.running.saturating_add(report.waiting));
        let referenced = report.map_or(u32::MAX, |report| report.referenced_blocks);
        (pod.may_hold_streams(), pod.serves(), requests, referenced, Reverse(pod.pod.ordinal))
    });
}
