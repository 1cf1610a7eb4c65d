//! The one replica of a revision that is tried first. Pure.

use jiff::Timestamp;

use super::{RolloutPlan, Wanted, failures::Failures, fleet::Fleet};

/// Makes it, once all others are there and nobody is on the way out.
pub(super) fn create(
    wanted: &Wanted,
    fleet: &Fleet<'_>,
    failures: &Failures<'_>,
    now: Timestamp,
    plan: &mut RolloutPlan,
) {
    let Some(canary) = wanted.canary.as_ref().filter(|canary| canary.is_announced && !wanted.paused) else { return };
    let is_missing = fleet.canary.is_none() && fleet.old.is_empty();
    let others_stay = fleet.leaving == 0 && fleet.current.len() == wanted.replicas && !plan.moves_replicas();
    if !is_missing || !others_stay {
        return;
    }
    match failures.canary_pause_until() {
        Some(until) if plan.wait_until(until, now) => plan.held_until = Some(until),
        _ => plan.create_canary = fleet.free_ordinals(&canary.revision).next(),
    }
}
