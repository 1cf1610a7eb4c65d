//! The status of a deployment, from what was observed and what was applied. Pure: `now` is an argument.
//!
//! Says nothing about generations it has not seen, and moves only when something a reader would act on has moved.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use stoker_crds::{
    conditions::{
        self, AVAILABLE, DEGRADED, FITS, GRANTED, METRICS_HEALTHY, PROGRESSING, READY, RECONCILING, SCALING, STALLED,
    },
    contract::{AgentPhase, KV_BLOCK_TOKENS, ModelReport, is_commit},
    scaling::{ScalingMode, ScalingSpec},
    scaling_status::ScalingStatus,
    status::{
        CanaryPhase, CapacityStatus, InferenceDeploymentStatus, ModelStatus, RolledBack, RolloutPhase, RolloutStatus,
        StartupPhase, StartupStatus,
    },
};
use stoker_replica::{Replica, Stage, Trouble};
use stoker_scaling::held_requests_words;

use crate::{
    apply::Applied,
    budgets::{Granted, budget_status, granted_verdict},
    canary::gate::Finding,
    cause::{self, Cause, Severity, root_cause},
    clock::SKEW,
    course::Course,
    desired::{Desired, labels, preference::NODES_WITH_MODEL_MAX, url},
    fits::{self, Opinion},
    observe::Observed,
    plan::Plan,
    prefetch,
    rollback::rollout_status,
    rollout::Strategy,
    scaling::{Latest, metrics_healthy, scaling_status, scaling_verdict},
    standby,
    validate::{SpecError, ValidatedDeployment},
    verdict::{Verdict, whole_seconds},
};

/// Percentage points that KV use moves before it is written again.
const KV_STEP_PERCENT: i32 = 5;
/// What helps a change that waits for room.
const WAITS_FOR_ROOM: &str =
    "The older replicas go on serving: make room for one more, or allow rollout.maxUnavailable: 1.";
/// Least time between two writes of KV use and preemptions.
const KV_PAUSE: SignedDuration = SignedDuration::from_secs(30);

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
        (DEGRADED, degraded(cause.as_ref(), &strays)),
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

/// Fewer than are owed: the one thing that keeps the others from being made. What hinders those that are granted comes first.
fn by_budget(type_: &str, verdict: Verdict, granted: Option<&Granted>) -> Verdict {
    let is_fine = verdict.value == (type_ == READY);
    match granted.filter(|granted| granted.grant.replicas < granted.owed) {
        Some(granted) if is_fine && matches!(type_, READY | DEGRADED) => {
            Verdict { value: type_ == DEGRADED, ..granted_verdict(granted) }
        }
        _ => verdict,
    }
}

/// No pod is made of a revision that fits none of the nodes that there are for it. One that is not asked for now is no matter.
fn hopeless(opinion: &Opinion, deployment: &ValidatedDeployment) -> Option<Cause> {
    let is_asked = matches!(deployment.course, Course::AsAsked | Course::Canary(_));
    let Trouble { reason, message } = &opinion.trouble;
    let message = format!("no pod is made that could only fail: {message}");
    let cause = Cause { trouble: Trouble::new(reason.clone(), message), severity: Severity::ModelFailed };
    (opinion.is_hopeless && is_asked && deployment.replicas > 0).then_some(cause)
}

/// What is said while a revision is tried on one replica. It is not ready, although as many serve as are wanted.
fn on_trial(type_: &str, verdict: Verdict, rollout: &RolloutStatus, cause: Option<&Cause>) -> Verdict {
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
fn by_course(type_: &str, verdict: Verdict, rollout: &RolloutStatus, deadline: &SignedDuration) -> Verdict {
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

/// What tools that wait for objects look at: Stalled or Reconciling while the object is not what was asked for, and
/// nothing else. A fault has as long as progress may take before it counts as the end; also when that will be.
fn for_tools(
    conditions: &[Condition],
    deadline: SignedDuration,
    now: Timestamp,
) -> (Option<Condition>, Option<Timestamp>) {
    let is = |type_: &str| conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True");
    if is(READY).is_some() && is(PROGRESSING).is_none() {
        return (None, None);
    }
    let stalls_at = is(DEGRADED).and_then(|degraded| degraded.last_transition_time.0.checked_add(deadline).ok());
    let stalls_at = stalls_at.filter(|_| is(READY).is_none());
    let (type_, like) = match (is(DEGRADED), stalls_at) {
        (Some(degraded), Some(moment)) if moment <= now => (STALLED, Some(degraded)),
        _ => (RECONCILING, is(PROGRESSING).or_else(|| conditions.first())),
    };
    let said = like.map(|like| Condition { type_: type_.to_owned(), status: "True".to_owned(), ..like.clone() });
    (said, stalls_at.filter(|moment| now < *moment))
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

/// What there is to say about going to zero: whether a request brings a replica, and how many wait for one.
#[derive(Clone, Copy, Debug)]
struct Zero {
    wakes: bool,
    held: u32,
}

impl Zero {
    fn of(spec: Option<&ScalingSpec>, status: Option<&ScalingStatus>) -> Self {
        let wakes = spec.is_some_and(|spec| spec.to_zero.is_some() && spec.mode == ScalingMode::Native);
        Self { wakes, held: status.map_or(0, |status| status.held.max(0).unsigned_abs()) }
    }

    /// A verdict with what it means for whoever asks.
    fn said_with(self, verdict: Verdict) -> Verdict {
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

/// Pods by what a reader counts.
struct Counts {
    wanted: usize,
    /// Neither ended nor being deleted.
    existing: usize,
    /// Requests reach them.
    serving: usize,
    /// Of the wanted revision, serving.
    updated: usize,
    /// Of an older revision, meant to stay for now.
    old: usize,
    /// Draining or being deleted.
    leaving: usize,
}

impl Counts {
    fn of(round: &Round<'_>) -> Self {
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

fn ready(counts: &Counts, cause: Option<&Cause>, plan: &Plan) -> Verdict {
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

fn available(counts: &Counts) -> Verdict {
    match (counts.serving, counts.wanted) {
        (0, 0) => Verdict::new(false, conditions::REASON_SCALED_TO_ZERO, "no replica is wanted"),
        (0, _) => Verdict::new(false, conditions::REASON_NO_REPLICA_SERVES, "requests are not answered"),
        _ => Verdict::new(true, conditions::REASON_REPLICA_SERVES, "requests are answered"),
    }
}

fn progressing(counts: &Counts, plan: &Plan) -> Verdict {
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

/// A stray is nobody's lack, and somebody should still know.
fn degraded(cause: Option<&Cause>, strays: &[String]) -> Verdict {
    match (cause.filter(|cause| cause.is_stuck()), strays.first()) {
        (Some(cause), _) => Verdict { value: true, trouble: cause.trouble.clone() },
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

/// Makes conditions that remember when their status last changed.
struct Dated<'a> {
    previous: &'a [Condition],
    generation: i64,
    now: Timestamp,
}

impl Dated<'_> {
    fn condition(&self, type_: &str, verdict: Verdict) -> Condition {
        self.said(type_, if verdict.value { "True" } else { "False" }, &verdict.trouble)
    }

    fn opinion(&self, type_: &str, opinion: &Opinion) -> Condition {
        let status = opinion.fits.map_or("Unknown", |fits| if fits { "True" } else { "False" });
        self.said(type_, status, &opinion.trouble)
    }

    fn said(&self, type_: &str, status: &str, trouble: &Trouble) -> Condition {
        let before = self.previous.iter().find(|condition| condition.type_ == type_ && condition.status == status);
        // Nothing turned in times to come: another clock says so, and what follows after a while never would.
        let before = before.filter(|before| before.last_transition_time.0.duration_since(self.now) <= SKEW);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: camel_case(&trouble.reason),
            message: bounded(&trouble.message),
            observed_generation: Some(self.generation),
            last_transition_time: before
                .map_or(Time(whole_seconds(self.now)), |before| before.last_transition_time.clone()),
        }
    }
}

/// A reason as conditions may carry it: others coined some of ours.
fn camel_case(reason: &str) -> String {
    let kept: String = reason.chars().filter(char::is_ascii_alphanumeric).take(128).collect();
    if kept.is_empty() { conditions::REASON_NOT_READY.to_owned() } else { kept }
}

/// The first 1000 characters: last words of a process can be long.
fn bounded(message: &str) -> String {
    message.chars().take(1000).collect()
}

/// KV cache of the serving replicas; kept as it is while it hardly moves or some replica cannot be read.
fn capacity(
    observed: &Observed,
    previous: Option<&CapacityStatus>,
    now: Timestamp,
) -> (Option<CapacityStatus>, Option<Timestamp>) {
    let serving: Vec<_> = observed.replicas.iter().filter(|pod| pod.serves()).collect();
    if serving.is_empty() {
        return (None, None);
    }
    let reports: Option<Vec<_>> = serving.iter().map(|pod| pod.reading.report()).collect();
    let Some(reports) = reports else { return (previous.cloned(), None) };
    let total: u64 = reports.iter().map(|report| u64::from(report.total_blocks)).sum();
    let referenced: u64 = reports.iter().map(|report| u64::from(report.referenced_blocks)).sum();
    let preemptions: u64 = serving.iter().map(|pod| pod.reading.preemptions_last_minute()).sum();
    let measured = CapacityStatus {
        kv_tokens: i64::try_from(total * u64::from(KV_BLOCK_TOKENS)).unwrap_or(i64::MAX),
        kv_used_percent: i32::try_from(referenced * 100 / total.max(1)).unwrap_or(100),
        preemptions_per_minute: i32::try_from(preemptions).unwrap_or(i32::MAX),
        observed_at: Time(whole_seconds(now)),
    };
    keep_or_replace(previous, measured, now)
}

fn keep_or_replace(
    previous: Option<&CapacityStatus>,
    measured: CapacityStatus,
    now: Timestamp,
) -> (Option<CapacityStatus>, Option<Timestamp>) {
    let Some(previous) = previous.filter(|previous| previous.kv_tokens == measured.kv_tokens) else {
        return (Some(measured), None);
    };
    // A date that is to come is of another clock, and as good as an old one.
    let age = now.duration_since(previous.observed_at.0).abs();
    let kv_moved = (previous.kv_used_percent - measured.kv_used_percent).abs() >= KV_STEP_PERCENT;
    let preempts = [previous, &measured].map(|capacity| capacity.preemptions_per_minute > 0);
    if !kv_moved && preempts[0] == preempts[1] {
        (Some(previous.clone()), None)
    } else if age < KV_PAUSE {
        (Some(previous.clone()), Some(now + (KV_PAUSE - age)))
    } else {
        (Some(measured), None)
    }
}

/// The starting replica of the wanted revision that is furthest behind.
fn startup(pods: &[Replica], revision: &str) -> Option<StartupStatus> {
    let phases =
        pods.iter().filter(|pod| pod.pod.revision == revision).filter_map(|pod| Some((startup_phase(pod)?, pod)));
    let (phase, pod) = phases.min_by_key(|(phase, _)| *phase)?;
    Some(StartupStatus { pod: pod.pod.name.clone(), phase })
}

fn is_fetching(pod: &Replica) -> bool {
    let model = pod.reading.report().and_then(|report| report.model.as_ref());
    model.is_some_and(|model| model.fetch.is_some())
}

/// The commit of a source that is fetched: what was written down stands, else what a replica of the revision says first.
fn model(round: &Round<'_>) -> Option<ModelStatus> {
    let fetch = round.deployment.replica.fetch.as_ref()?;
    let of_revision = |replica: &&Replica| replica.pod.revision == round.desired.revision;
    let replicas = round.observed.replicas.iter().filter(of_revision);
    let said: Vec<&ModelReport> = replicas
        .filter_map(|replica| replica.reading.report()?.model.as_ref())
        .filter(|said| is_commit(&said.commit))
        .collect();
    let told = || said.first().map(|said| said.commit.clone());
    let of_image = || round.deployment.mounted().map(|image| image.digest.clone());
    let commit = round.deployment.commit.clone().or_else(told).or_else(of_image)?;
    let bytes = said.iter().filter(|said| said.commit == commit).map(|said| said.bytes).find(|bytes| *bytes > 0);
    let before = round.deployment.nodes_with_model();
    let nodes = match round.deployment.kept_by_nodes() {
        Some(_) => nodes_with(&commit, before, &round.observed.replicas),
        None => Vec::new(),
    };
    let bytes = round.deployment.model_bytes().or(bytes).and_then(|bytes| i64::try_from(bytes).ok());
    let delivery = round.deployment.delivery.as_ref().map(ToString::to_string);
    Some(ModelStatus { source: fetch.source.clone(), commit, bytes, nodes, delivery })
}

/// Nodes that had the model before, and those where a replica serves it now at the end; of too many the first ones go.
fn nodes_with(commit: &str, before: &[String], replicas: &[Replica]) -> Vec<String> {
    let serves_it = |replica: &&Replica| {
        let model = replica.reading.report().and_then(|report| report.model.as_ref());
        replica.serves() && model.is_some_and(|model| model.commit == commit)
    };
    let mut nodes = before.to_vec();
    for node in replicas.iter().filter(serves_it).filter_map(|replica| replica.pod.node.as_ref()) {
        if !nodes.contains(node) {
            nodes.push(node.clone());
        }
    }
    nodes.split_off(nodes.len().saturating_sub(NODES_WITH_MODEL_MAX))
}

fn startup_phase(pod: &Replica) -> Option<StartupPhase> {
    match &pod.pod.stage {
        Stage::Unscheduled { .. } => Some(StartupPhase::Scheduling),
        Stage::Preparing { .. } | Stage::Blocked(_) => Some(StartupPhase::Preparing),
        Stage::Starting => Some(match pod.reading.report().map(|report| report.phase) {
            Some(AgentPhase::Ready) => StartupPhase::BecomingReady,
            _ if is_fetching(pod) => StartupPhase::Fetching,
            _ => StartupPhase::Loading,
        }),
        Stage::Serving | Stage::Faltering { .. } | Stage::Finished { .. } | Stage::Leaving => None,
    }
}

fn as_i32(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod tests {
    use stoker_crds::contract::LoadReport;
    use stoker_replica::{Needs, ObservedPod, Reading};

    use super::*;

    const DEADLINE: SignedDuration = SignedDuration::from_secs(600);

    /// What tools see at a second, with conditions that are True since second 0, and when it turns.
    fn seen(true_ones: &[&str], second: i64) -> (Option<String>, Option<i64>) {
        let at = |second| Timestamp::from_second(second).unwrap();
        let condition = |type_: &&str| Condition {
            type_: (*type_).to_owned(),
            status: if true_ones.contains(type_) { "True" } else { "False" }.to_owned(),
            reason: format!("Why{type_}"),
            message: String::new(),
            observed_generation: Some(1),
            last_transition_time: Time(at(0)),
        };
        let conditions: Vec<Condition> = [READY, AVAILABLE, PROGRESSING, DEGRADED].iter().map(condition).collect();
        let (said, turns) = for_tools(&conditions, DEADLINE, at(second));
        (said.map(|said| format!("{} {}", said.type_, said.reason)), turns.map(Timestamp::as_second))
    }

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

    fn serving(node: &str, commit: &str) -> Replica {
        let model = Some(ModelReport { commit: commit.to_owned(), ..ModelReport::default() });
        let report = LoadReport { model, ..LoadReport::idle(10) };
        let pod = ObservedPod {
            name: "chat-a-0".into(),
            uid: "u".into(),
            revision: "a".into(),
            ordinal: 0,
            resource_version: "1".into(),
            created: Timestamp::UNIX_EPOCH,
            stage: Stage::Serving,
            lost: false,
            gone_by: None,
            node: Some(node.to_owned()),
            needs: Needs::default(),
        };
        Replica { pod, reading: Reading::of(&report), intent: None }
    }

    #[test]
    fn nodes_with_a_model_are_those_that_served_it_the_latest_last() {
        let nodes = |before: &[&str], replicas: &[Replica]| {
            let before: Vec<String> = before.iter().map(|node| (*node).to_owned()).collect();
            nodes_with("c", &before, replicas)
        };
        let here = [serving("b", "c"), serving("c", "c"), serving("d", "another"), serving("c", "c")];
        assert_eq!(nodes(&["a", "b"], &here), ["a", "b", "c"], "who had it stays, and keeps its place");
        let starting = Replica { reading: Reading::missing(), ..serving("e", "c") };
        assert_eq!(nodes(&[], &[starting]), [""; 0]);
        let many: Vec<Replica> = (0..20).map(|idx| serving(&format!("n{idx}"), "c")).collect();
        assert_eq!(nodes(&["a"], &many).len(), NODES_WITH_MODEL_MAX);
        assert_eq!(nodes(&["a"], &many).last().unwrap(), "n19");
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

    #[test]
    fn tools_see_what_is_on_its_way_what_stalls_and_nothing_of_what_is_done() {
        let said = |words: &str| Some(words.to_owned());
        assert_eq!(seen(&[READY], 10), (None, None));
        assert_eq!(seen(&[READY, DEGRADED], 10_000), (None, None), "all replicas serve");
        assert_eq!(seen(&[PROGRESSING], 10_000), (said("Reconciling WhyProgressing"), None));
        assert_eq!(seen(&[READY, PROGRESSING], 10), (said("Reconciling WhyProgressing"), None));
        assert_eq!(seen(&[PROGRESSING, DEGRADED], 10), (said("Reconciling WhyProgressing"), Some(600)));
        assert_eq!(seen(&[PROGRESSING, DEGRADED], 600), (said("Stalled WhyDegraded"), None));
        assert_eq!(seen(&[], 10), (said("Reconciling WhyReady"), None));
    }
}
