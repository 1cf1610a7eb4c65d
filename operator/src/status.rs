//! The status of a deployment, from what was observed and what was applied. Pure: `now` is an argument.
//!
//! Says nothing about generations it has not seen, and moves only when something a reader would act on has moved.

mod capacity;
mod dated;
mod model;
mod startup;
mod verdicts;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use stoker_crds::{
    conditions::{self, AVAILABLE, DEGRADED, FITS, GRANTED, METRICS_HEALTHY, PROGRESSING, READY, SCALING, STALLED},
    scaling::ScalingMode,
    scaling_status::ScalingStatus,
    status::InferenceDeploymentStatus,
};
use stoker_replica::Trouble;

use self::{
    capacity::capacity,
    dated::{Dated, for_tools},
    model::model,
    startup::startup,
    verdicts::{Counts, Zero, available, by_budget, by_course, degraded, on_trial, progressing, ready},
};
use crate::{
    apply::Applied,
    budgets::{Granted, budget_status, granted_verdict},
    canary::gate::Finding,
    cause::{self, Cause, Severity, root_cause},
    course::Course,
    desired::{Desired, labels, url},
    fits::{self, Opinion},
    observe::Observed,
    plan::Plan,
    prefetch,
    rollback::rollout_status,
    rollout::Strategy,
    scaling::{Latest, metrics_healthy, scaling_status, scaling_verdict},
    standby,
    validate::{SpecError, ValidatedDeployment},
    verdict::Verdict,
};

/// What helps a change that waits for room.
const WAITS_FOR_ROOM: &str =
    "The older replicas go on serving: make room for one more, or allow rollout.maxUnavailable: 1.";

/// What a status is made from.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// What was asked for.
    pub deployment: &'a ValidatedDeployment,
    /// What that renders to.
    pub desired: &'a Desired,
    /// What was seen.
    pub observed: &'a Observed,
    /// What was decided.
    pub plan: &'a Plan,
    /// What was carried out.
    pub applied: &'a Applied,
    /// The last decision on the number of replicas, if it scales and one was made.
    pub decision: Option<&'a Latest>,
    /// What was found of its canary, if it has one that serves.
    pub finding: Option<&'a Finding>,
    /// Whether its model fits, if that was looked at.
    pub fit: Option<&'a fits::Outlook>,
    /// What its namespace's budget grants, if it has one.
    pub granted: Option<&'a Granted>,
}

/// A status, and when time alone changes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outlook {
    /// The status.
    pub status: InferenceDeploymentStatus,
    /// When to compute it again.
    pub look_again: Option<Timestamp>,
}

/// The status after a round.
pub fn status_of(round: &Round<'_>, now: Timestamp) -> Outlook {
    let Round { deployment, desired, observed, plan, applied, decision: _, finding: _, fit, granted } = round;
    let previous = observed.deployment.status.clone().unwrap_or_default();
    let counts = Counts::of(round);
    let strays: Vec<String> = observed.strays.iter().chain(&applied.strays).cloned().collect();
    let deadline = deployment.progress_deadline;
    let scene = cause::Scene { plan, applied, replicas: &observed.replicas, deadline, now };
    let hopeless = fit.and_then(|fit| hopeless(&fit.opinion, deployment));
    let cause = root_cause(&scene).map(|cause| in_hand(cause, round)).or_else(|| hopeless.clone());
    let of_canary = plan.canary.as_ref().and_then(|canary| cause::cause_of(&scene, canary)).or(hopeless);
    let of_asked = if plan.canary.is_some() { of_canary.as_ref() } else { cause.as_ref() };
    let scaling = scaling(round, previous.scaling.as_ref(), now);
    let zero = Zero::of(deployment.scaling.as_ref(), scaling.as_ref());
    let (rollout, judged_at) = rollout_status(round, of_asked, now);
    let verdicts = [
        (READY, zero.said_with(ready(&counts, cause.as_ref(), plan))),
        (AVAILABLE, zero.said_with(available(&counts))),
        (PROGRESSING, progressing(&counts, plan)),
        (DEGRADED, degraded(cause.as_ref(), round, &strays)),
    ];
    let verdicts = verdicts.map(|(type_, verdict)| {
        let verdict = by_budget(type_, verdict, *granted);
        let verdict = if plan.canary.is_some() { on_trial(type_, verdict, &rollout, cause.as_ref()) } else { verdict };
        let verdict = by_course(type_, verdict, &rollout, &deployment.progress_deadline);
        (type_, prefetch::said_with(type_, verdict, rollout.prefetch.as_ref()))
    });
    let dated = Dated { previous: &previous.conditions, generation: deployment.identity.generation, now };
    let of_pods: Vec<Condition> =
        verdicts.into_iter().map(|(type_, verdict)| dated.condition(type_, verdict)).collect();
    // One that was given up had its time.
    let patience = if rollout.rolled_back.is_some() { SignedDuration::ZERO } else { deadline };
    let (of_tools, stalls_at) = for_tools(&of_pods, patience, now);
    let of_scaling = scaling_conditions(round, scaling.as_ref(), &dated);
    let of_budget = granted.map(|granted| dated.condition(GRANTED, granted_verdict(granted)));
    let of_fit = fit.map(|fit| dated.opinion(FITS, &fit.opinion));
    let (capacity, look_again) = capacity(observed, previous.capacity.as_ref(), now);
    let status = InferenceDeploymentStatus {
        observed_generation: Some(deployment.identity.generation),
        conditions: of_pods.into_iter().chain(of_tools).chain(of_fit).chain(of_budget).chain(of_scaling).collect(),
        replicas: as_i32(counts.existing),
        ready_replicas: as_i32(counts.serving),
        updated_replicas: as_i32(counts.updated),
        ready_of_wanted: format!("{}/{}", counts.serving, wanted(round)),
        selector: labels::selector_text(&deployment.identity.name),
        revision: desired.revision.clone(),
        rollout: Some(rollout),
        model: model(round),
        standby: standby::status(&plan.standby, applied.standby_refused.as_ref(), previous.standby.as_ref()),
        url: url(&deployment.identity),
        capacity,
        budget: granted.map(budget_status),
        fit: fit.map(|fit| fit.status.clone()),
        scaling,
        stray_pods: strays,
        startup: startup(&observed.replicas, &desired.revision),
    };
    let moments = [look_again, stalls_at, judged_at, cause::overdue_at(&observed.replicas, deadline, now)];
    Outlook { status, look_again: moments.into_iter().flatten().min() }
}

/// Replicas that are wanted, granted or not.
fn wanted(round: &Round<'_>) -> u32 {
    round.granted.map_or(round.deployment.replicas, |granted| granted.wanted)
}

/// No pod is made of a revision that fits none of the nodes that there are for it. One that is not asked for now is no matter.
fn hopeless(opinion: &Opinion, deployment: &ValidatedDeployment) -> Option<Cause> {
    let is_asked = matches!(deployment.course, Course::AsAsked | Course::Canary(_));
    let Trouble { reason, message } = &opinion.trouble;
    let message = format!("no pod is made that could only fail: {message}");
    let cause = Cause { trouble: Trouble::new(reason.clone(), message), severity: Severity::ModelFailed };
    (opinion.is_hopeless && is_asked && deployment.replicas > 0).then_some(cause)
}

/// The section about scaling, if the object asks for any.
fn scaling(round: &Round<'_>, before: Option<&ScalingStatus>, now: Timestamp) -> Option<ScalingStatus> {
    let spec = round.deployment.scaling.as_ref()?;
    Some(scaling_status(spec, wanted(round), before, round.decision, now))
}

/// Until something is decided, what was said of readings stands.
fn scaling_conditions(round: &Round<'_>, status: Option<&ScalingStatus>, dated: &Dated<'_>) -> Vec<Condition> {
    let Some((spec, status)) = round.deployment.scaling.as_ref().zip(status) else { return Vec::new() };
    let record = round.decision.map(|latest| &*latest.record);
    let readings = match round.decision {
        _ if spec.mode == ScalingMode::External => None,
        Some(latest) => Some(dated.condition(METRICS_HEALTHY, metrics_healthy(&latest.coverage))),
        None => dated.previous.iter().find(|condition| condition.type_ == METRICS_HEALTHY).cloned(),
    };
    let refused = dated.previous.iter().find(|condition| condition.reason == conditions::REASON_NO_GATEWAY);
    let stands = record.is_none() && spec.to_zero.is_some() && spec.mode == ScalingMode::Native;
    let scaling = match refused.filter(|_| stands) {
        // As does what was said of readings.
        Some(refused) => refused.clone(),
        None => dated.condition(SCALING, scaling_verdict(status, spec, record)),
    };
    readings.into_iter().chain([scaling]).collect()
}

/// The status of an object that cannot be deployed. Replicas that run are left alone, so their numbers stay.
pub fn status_of_invalid(
    error: &SpecError,
    generation: Option<i64>,
    previous: &InferenceDeploymentStatus,
    now: Timestamp,
) -> InferenceDeploymentStatus {
    let dated = Dated { previous: &previous.conditions, generation: generation.unwrap_or_default(), now };
    let verdict = |value| Verdict { value, trouble: Trouble::new(conditions::REASON_INVALID_SPEC, error.to_string()) };
    let available = previous.conditions.iter().filter(|condition| condition.type_ == AVAILABLE).cloned();
    let mut status = previous.clone();
    status.conditions = available.collect();
    status.conditions.push(dated.condition(READY, verdict(false)));
    status.conditions.push(dated.condition(PROGRESSING, verdict(false)));
    status.conditions.push(dated.condition(DEGRADED, verdict(true)));
    status.conditions.push(dated.condition(STALLED, verdict(true)));
    status.observed_generation = generation;
    status
}

/// For lack of room a replica is being given up already: nobody else has to do anything.
fn in_hand(cause: Cause, round: &Round<'_>) -> Cause {
    let replicas = round.deployment.replicas as usize;
    let is_last = round.plan.canary.is_some() && replicas < 2;
    let may_replace = round.deployment.replacing.of(replicas).max_unavailable > 0 && !is_last;
    match round.plan.pods.strategy {
        _ if cause.severity != Severity::NoRoom => cause,
        Strategy::ReplaceInPlace => Cause { severity: Severity::Passing, ..cause },
        Strategy::Surge if !may_replace => {
            let Trouble { reason, message } = cause.trouble;
            let message = format!("{message} {WAITS_FOR_ROOM}");
            Cause { trouble: Trouble { reason, message }, ..cause }
        }
        Strategy::Surge | Strategy::Settled | Strategy::Held => cause,
    }
}

fn as_i32(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}
