//! What the status says about scaling, from the last decision and from what it said before. Pure.
//!
//! Written seldom: at once when the number or the sight changes, otherwise only after a pause and when a reader would
//! notice. A deployment without load writes nothing.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Serialize;
use stoker_crds::{
    conditions,
    scaling::{ScalingMode, ScalingSpec},
    scaling_status::{DecisionStatus, ScalingStatus},
};
use stoker_scaling::{Coverage, DecisionRecord, Holders, NotFresh, ScaleState, fresh_words, untold_words};

use super::ledger::{CoverageSummary, Latest};
use crate::verdict::{Verdict, whole_seconds};

/// Least time between two writes that do not change the number.
const PAUSE: SignedDuration = SignedDuration::from_secs(30);
/// Under load, what was learned is written down this often.
const REFRESH: SignedDuration = SignedDuration::from_secs(300);
/// Percentage points that the pressure moves before it is written again.
const PRESSURE_STEP: i32 = 20;

/// The section of the status. Without a decision, what it said before.
pub fn scaling_status(
    spec: &ScalingSpec,
    replicas: u32,
    before: Option<&ScalingStatus>,
    latest: Option<&Latest>,
    now: Timestamp,
) -> ScalingStatus {
    let unread = ScalingStatus {
        mode: spec.mode,
        desired: as_i32(replicas),
        coverage: String::new(),
        held: 0,
        last: None,
        decisions: Vec::new(),
        state: String::new(),
    };
    let before = ScalingStatus { mode: spec.mode, desired: as_i32(replicas), ..before.cloned().unwrap_or(unread) };
    if spec.mode == ScalingMode::External {
        return ScalingStatus { coverage: String::new(), held: 0, ..before };
    }
    let Some(latest) = latest else { return before };
    let current = in_short(&latest.record, now);
    // Before the first replica serves there is nothing to tell.
    let is_telling = latest.record.signals.coverage.serving > 0 || !latest.changes.is_empty();
    let held = held(&latest.record);
    let write = is_telling && (line_moved(before.held, held) || is_worth_writing(before.last.as_ref(), &current, now));
    ScalingStatus {
        mode: spec.mode,
        desired: if spec.mode == ScalingMode::Native { current.to } else { as_i32(replicas) },
        coverage: format!("{}/{}", latest.coverage.fresh, latest.coverage.serving),
        held: if write { held } else { before.held },
        decisions: latest.changes.clone(),
        state: if write { state_text(&latest.record.after) } else { before.state },
        last: if write { Some(current) } else { before.last },
    }
}

/// Requests that wait for somebody to serve at all; others are load like any.
fn held(record: &DecisionRecord) -> i32 {
    if record.signals.coverage.serving > 0 { 0 } else { as_i32(record.signals.held_requests) }
}

/// Somebody waits or nobody does, or so many more that a reader would notice.
fn line_moved(before: i32, held: i32) -> bool {
    (held > 0) != (before > 0) || (held > 0 && held / 2 >= before)
}

fn is_worth_writing(before: Option<&DecisionStatus>, current: &DecisionStatus, now: Timestamp) -> bool {
    let Some(before) = before else { return true };
    // A date that is to come is of another clock, and as good as an old one.
    let age = now.duration_since(before.at.0).abs();
    let differs = (&before.cause, &before.bound) != (&current.cause, &current.bound)
        || (before.pressure_percent - current.pressure_percent).abs() >= PRESSURE_STEP;
    before.to != current.to || (age >= PAUSE && differs) || (age >= REFRESH && current.pressure_percent > 0)
}

fn state_text(state: &ScaleState) -> String {
    serde_json::to_string(state).expect("a state is plain data")
}

/// A decision as the status shows it.
pub(super) fn in_short(record: &DecisionRecord, now: Timestamp) -> DecisionStatus {
    let DecisionRecord { decision, signals, .. } = record;
    DecisionStatus {
        at: Time(whole_seconds(now)),
        from: as_i32(decision.previous),
        to: as_i32(decision.desired),
        pressure_percent: (decision.pressure * 100.0).round() as i32,
        cause: decision.cause.map_or_else(|| "none".to_owned(), |cause| word(&cause)),
        bound: word(&decision.bound),
        coverage: share(&signals.coverage),
    }
}

fn share(coverage: &Coverage) -> String {
    format!("{}/{}", coverage.fresh, coverage.serving)
}

/// The word that an enumeration's value has in records.
pub(crate) fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).expect("an enumeration is plain data");
    value.as_str().unwrap_or_default().to_owned()
}

/// The condition MetricsHealthy. Who was given up is no lack of readings; it is named so that the count can be understood.
pub fn metrics_healthy(coverage: &CoverageSummary) -> Verdict {
    let CoverageSummary { serving, fresh, example, broken, untold } = coverage;
    let given_up = if *broken > 0 { format!("; {broken} crashed and given up") } else { String::new() };
    let seen = fresh_words(*fresh, *serving);
    match (example, untold) {
        _ if *serving == 0 => {
            Verdict::new(true, conditions::REASON_NOTHING_TO_READ, format!("no replica serves yet{given_up}"))
        }
        (Some((replica, why)), _) => Verdict::new(
            false,
            conditions::REASON_NOT_ALL_FRESH,
            format!("{seen}; nothing goes down; {replica} {}{given_up}", complaint(*why)),
        ),
        (None, Some(untold)) => Verdict::new(
            true,
            conditions::REASON_COSTS_UNTOLD,
            format!("{seen}; {}{given_up}", untold_words(untold, *serving)),
        ),
        (None, None) => Verdict::new(true, conditions::REASON_ALL_FRESH, format!("{seen}{given_up}")),
    }
}

/// Without the age: what is written must not change with every tick.
fn complaint(why: NotFresh) -> &'static str {
    match why {
        NotFresh::Missing => "never answered",
        NotFresh::Stale { .. } => "is silent",
        NotFresh::Absurd { why } => why.words(),
    }
}

/// The condition Scaling, from what the status says and the last decision was made of.
pub fn scaling_verdict(status: &ScalingStatus, spec: &ScalingSpec, latest: Option<&DecisionRecord>) -> Verdict {
    match status.mode {
        ScalingMode::External => Verdict::new(
            false,
            conditions::REASON_EXTERNAL,
            "scaling.mode is external: the number is spec.replicas, set through the scale subresource",
        ),
        ScalingMode::Advisory => Verdict::new(
            false,
            conditions::REASON_ADVISORY,
            format!("scaling.mode is advisory: spec.replicas stands; {}", words(status)),
        ),
        ScalingMode::Native if refuses_zero(spec, latest) => Verdict::new(
            false,
            conditions::REASON_NO_GATEWAY,
            format!(
                "scaling.toZero is refused: no gateway leads this deployment's Service, so nobody would hold the first request; \
                 enable the gateway (Helm: gateway.enabled=true) or remove scaling.toZero; {} wanted meanwhile",
                status.desired
            ),
        ),
        ScalingMode::Native => native(status, spec, latest),
    }
}

/// In full seconds, which change with a start and not with every tick.
fn slow_wake(status: &ScalingStatus, spec: &ScalingSpec, latest: Option<&DecisionRecord>) -> String {
    let seen = latest.and_then(|record| record.signals.next_start_seconds());
    let takes = seen.map_or_else(|| "longer".to_owned(), |seconds| format!("{seconds:.0} s"));
    let most = spec.to_zero.unwrap_or_default().max_wake_seconds;
    format!(
        "{}; idle, but a replica takes {takes} to come back and scaling.toZero.maxWakeSeconds is {most}: raise it, and gateway.holdSeconds of the chart with it, or have nodes keep the model in memory (scaling.standby)",
        words(status)
    )
}

fn refuses_zero(spec: &ScalingSpec, latest: Option<&DecisionRecord>) -> bool {
    spec.to_zero.is_some() && latest.is_some_and(|record| record.signals.holders == Holders::Nobody)
}

fn native(status: &ScalingStatus, spec: &ScalingSpec, latest: Option<&DecisionRecord>) -> Verdict {
    let (max, bound) = (spec.max, status.last.as_ref().map_or("", |last| last.bound.as_str()));
    match bound {
        "slowWake" => Verdict::new(true, conditions::REASON_SLOW_WAKE, slow_wake(status, spec, latest)),
        "max" => Verdict::new(
            true,
            conditions::REASON_AT_MAX,
            format!("{}; scaling.max is {max}: raise it to follow the load", words(status)),
        ),
        "quorumUp" => Verdict::new(
            false,
            conditions::REASON_BLIND,
            format!("too few fresh readings to move from {}; see MetricsHealthy", status.desired),
        ),
        _ => Verdict::new(true, conditions::REASON_NATIVE, words(status)),
    }
}

fn words(status: &ScalingStatus) -> String {
    let Some(last) = &status.last else { return format!("{} wanted, nothing decided yet", status.desired) };
    let DecisionStatus { from, to, pressure_percent, cause, bound, .. } = last;
    format!("{from} -> {to}: pressure {pressure_percent} % from {cause}, bound by {bound}")
}

fn as_i32(count: u32) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_told_of_when_it_begins_doubles_and_ends() {
        let moved = |before, held| line_moved(before, held);
        assert_eq!([moved(0, 0), moved(3, 3), moved(3, 5), moved(3, 1)], [false; 4]);
        assert_eq!([moved(0, 1), moved(3, 6), moved(3, 40), moved(3, 0)], [true; 4]);
    }
}
