//! What the status says about revisions: which there were, how far the newest one is, and when it is given up. Pure.
//!
//! A revision is given up when, for as long as progress may take, it has not come any further, no replica of it ever served and the
//! fault is its own: want of room and refusals of the API server would meet any revision. One that is tried on one replica counts as
//! having served once that passed its gate, and is given up when it does not. One that was given up is not tried again until the spec
//! asks for another one.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use stoker_crds::{
    contract::AgentPhase,
    status::{CanaryPhase, CanaryStatus, RevisionStatus, RolledBack, RolloutPhase, RolloutStatus},
};
use stoker_replica::{Replica, Stage};

use crate::{
    canary::trial::{Trial, look},
    cause::{Cause, Severity},
    clock::SKEW,
    course::{Course, kept_inputs},
    desired::Desired,
    prefetch,
    status::Round,
    validate::ValidatedDeployment,
    verdict::whole_seconds,
};

/// A share of a fetch, or of a load, that counts as having come further.
const STEPS: u64 = 20;

/// The section about revisions after a round, and when time alone changes it.
pub(crate) fn rollout_status(
    round: &Round<'_>,
    cause: Option<&Cause>,
    now: Timestamp,
) -> (RolloutStatus, Option<Timestamp>) {
    let before = round.observed.deployment.status.as_ref().and_then(|status| status.rollout.clone());
    let asked = asked(round.deployment, round.desired);
    let canary_before = before.as_ref().and_then(|before| before.canary.clone());
    let (canary, canary_moves_at) = canary(round, asked, canary_before.as_ref(), now);
    let is_in = |canary: &Option<CanaryStatus>, phase| canary.as_ref().is_some_and(|canary| canary.phase == phase);
    let mut revisions = revisions(round, before.as_ref(), asked);
    for entry in revisions.iter_mut().filter(|entry| entry.revision == asked) {
        entry.served |= is_in(&canary, CanaryPhase::Passed);
    }
    // While it is compared it is its gate's. One whose replica is lost has as long again.
    let is_analysed = canary.is_some() && !is_in(&canary, CanaryPhase::Starting);
    let is_lost = is_in(&canary, CanaryPhase::Starting) && is_in(&canary_before, CanaryPhase::Analysing);
    let served = is_analysed || revisions.iter().any(|entry| entry.revision == asked && entry.served);
    let seen = if served { 0 } else { progress(&round.observed.replicas, asked) };
    // A date that is to come is of another clock.
    let same = before.filter(|before| before.asked == asked && before.moved_at.0.duration_since(now) <= SKEW);
    let (moved_at, progress) = match &same {
        Some(before) if !is_lost && (served || seen <= before.progress) => {
            (before.moved_at.0, if served { 0 } else { before.progress })
        }
        _ => (whole_seconds(now), seen),
    };
    let proof = Proof { asked, served, moved_at, cause, revisions: &revisions };
    let failed = canary.as_ref().filter(|canary| canary.phase == CanaryPhase::Failed);
    let (rolled_back, judged_at) = match (&round.deployment.course, failed) {
        (Course::RolledBack(given_up), _) => (Some(given_up.clone()), None),
        (_, Some(failed)) => (proof.give_up(round, &failed.message, now), None),
        (_, None) => proof.judge(round, now),
    };
    let status = RolloutStatus {
        asked: asked.to_owned(),
        phase: phase(round, rolled_back.is_some()),
        moved_at: Time(moved_at),
        progress,
        rolled_back,
        canary,
        prefetch: prefetch::status(round),
        revisions,
    };
    (status, [judged_at, canary_moves_at].into_iter().flatten().min())
}

/// The revision that the spec asks for.
pub(crate) fn asked<'a>(deployment: &'a ValidatedDeployment, desired: &'a Desired) -> &'a str {
    let working = desired.revision.as_str();
    match &deployment.course {
        Course::AsAsked => working,
        Course::Held { asked } => asked,
        Course::Canary(_) => desired.canary.as_ref().map_or(working, |canary| &canary.revision),
        Course::RolledBack(given_up) => &given_up.revision,
    }
}

/// How the canary does; what was said of it stands for as long as its revision is asked for.
fn canary(
    round: &Round<'_>,
    asked: &str,
    before: Option<&CanaryStatus>,
    now: Timestamp,
) -> (Option<CanaryStatus>, Option<Timestamp>) {
    let before = before.filter(|before| before.revision == asked);
    let (Course::Canary(_), Some(canary)) = (&round.deployment.course, &round.deployment.canary) else {
        let ended = |before: &&CanaryStatus| matches!(before.phase, CanaryPhase::Passed | CanaryPhase::Failed);
        return (before.filter(ended).cloned(), None);
    };
    let serving = round.observed.replicas.iter().find(|replica| replica.pod.revision == asked && replica.serves());
    let trial = Trial { revision: asked, canary, serving, finding: round.finding, paused: round.deployment.paused };
    let (status, look_again) = look(&trial, before, now);
    (Some(status), look_again)
}

fn phase(round: &Round<'_>, is_rolled_back: bool) -> RolloutPhase {
    let old = |replica: &Replica| replica.is_live() && replica.pod.revision != round.desired.revision;
    let waits = matches!(round.deployment.course, Course::Held { .. });
    let has_old = round.observed.replicas.iter().any(old);
    let updated =
        round.observed.replicas.iter().filter(|pod| pod.serves() && pod.pod.revision == round.desired.revision);
    match () {
        () if is_rolled_back => RolloutPhase::RolledBack,
        () if waits || (round.deployment.paused && has_old) => RolloutPhase::Paused,
        () if matches!(round.deployment.course, Course::Canary(_)) => RolloutPhase::Canary,
        () if has_old || updated.count() < round.deployment.replicas as usize => RolloutPhase::Progressing,
        () => RolloutPhase::Settled,
    }
}

/// All that are kept, oldest first; the one that is asked for last.
fn revisions(round: &Round<'_>, before: Option<&RolloutStatus>, asked: &str) -> Vec<RevisionStatus> {
    let mut revisions = before.map(|before| before.revisions.clone()).unwrap_or_default();
    for revision in unrecorded(round, asked) {
        if revisions.iter().all(|entry| entry.revision != revision) {
            make_newest(&mut revisions, revision);
        }
    }
    if revisions.last().is_none_or(|newest| newest.revision != asked) {
        make_newest(&mut revisions, asked);
    }
    let working = &round.desired.revision;
    // Of another one than that a replica may serve that is only tried, or was given up.
    let serves = round.observed.replicas.iter().any(|pod| pod.serves() && pod.pod.revision == *working);
    for entry in revisions.iter_mut().filter(|entry| entry.revision == *working) {
        entry.served |= serves;
        entry.commit = round.deployment.commit.clone().or(entry.commit.take());
    }
    keep(round, revisions)
}

/// Revisions of pods that another one may have followed before the status of the round that made them was written, older
/// pods first.
fn unrecorded<'a>(round: &'a Round<'_>, asked: &'a str) -> impl Iterator<Item = &'a str> {
    let mut pods: Vec<_> = round.observed.replicas.iter().map(|replica| &replica.pod).collect();
    pods.sort_by_key(|pod| pod.created);
    pods.into_iter().map(|pod| pod.revision.as_str()).filter(move |revision| !revision.is_empty() && *revision != asked)
}

/// Gives it the highest number.
fn make_newest(revisions: &mut Vec<RevisionStatus>, revision: &str) {
    let number = revisions.iter().map(|entry| entry.number).max().unwrap_or_default() + 1;
    let again = revisions.iter().position(|entry| entry.revision == revision).map(|place| revisions.remove(place));
    let entry = again.unwrap_or_else(|| RevisionStatus { revision: revision.to_owned(), ..RevisionStatus::default() });
    revisions.push(RevisionStatus { number, ..entry });
}

/// Those of the pods that there are, the one that is worked towards, and as many others as shall be kept.
fn keep(round: &Round<'_>, revisions: Vec<RevisionStatus>) -> Vec<RevisionStatus> {
    let in_use: BTreeSet<&str> = round.observed.replicas.iter().map(|pod| pod.pod.revision.as_str()).collect();
    let surplus = revisions.len().saturating_sub(round.deployment.keep_revisions as usize + 1);
    let is_needed =
        |entry: &RevisionStatus| in_use.contains(entry.revision.as_str()) || entry.revision == round.desired.revision;
    revisions
        .into_iter()
        .enumerate()
        .filter(|(place, entry)| *place >= surplus || is_needed(entry))
        .map(|(_, entry)| entry)
        .collect()
}

/// How far replicas of a revision are, together. It only says whether they come further.
fn progress(replicas: &[Replica], revision: &str) -> i32 {
    let of_revision = replicas.iter().filter(|pod| pod.pod.revision == revision && pod.is_live());
    let sum: u64 = of_revision.map(steps).sum();
    i32::try_from(sum).unwrap_or(i32::MAX)
}

fn steps(pod: &Replica) -> u64 {
    match &pod.pod.stage {
        Stage::Unscheduled { .. } | Stage::Finished { .. } | Stage::Leaving => 0,
        Stage::Preparing { .. } | Stage::Blocked(_) => 1,
        Stage::Starting | Stage::Serving | Stage::Faltering { .. } => 2 + loaded(pod),
    }
}

fn loaded(pod: &Replica) -> u64 {
    let Some(report) = pod.reading.report() else { return 0 };
    match report.model.as_ref().and_then(|model| model.fetch) {
        Some(fetch) => fetch.bytes_done.saturating_mul(STEPS) / fetch.bytes_total.max(1),
        None if report.phase == AgentPhase::Loading => {
            STEPS + (report.load_progress.clamp(0.0, 1.0) * STEPS as f64) as u64
        }
        None if report.phase == AgentPhase::Failed => 0,
        None => 3 * STEPS,
    }
}

/// A revision that has to show that it can serve.
struct Proof<'a> {
    asked: &'a str,
    served: bool,
    moved_at: Timestamp,
    cause: Option<&'a Cause>,
    revisions: &'a [RevisionStatus],
}

impl Proof<'_> {
    /// Whether it is given up, else when it would be.
    fn judge(&self, round: &Round<'_>, now: Timestamp) -> (Option<RolledBack>, Option<Timestamp>) {
        let deployment = round.deployment;
        let was_made = round.observed.replicas.iter().any(|pod| pod.pod.revision == self.asked);
        let held = !deployment.auto_rollback || deployment.paused || deployment.replicas == 0;
        if self.served || held || !was_made || !self.is_own_fault(round) {
            return (None, None);
        }
        if self.target(round).is_none() {
            return (None, None);
        }
        let Ok(deadline) = self.moved_at.checked_add(deployment.progress_deadline) else { return (None, None) };
        if now < deadline {
            return (None, Some(deadline));
        }
        let why = self.cause.map_or_else(
            || "no replica of it became ready".to_owned(),
            |cause| format!("{}: {}", cause.trouble.reason, cause.trouble.message),
        );
        (self.give_up(round, &why, now), None)
    }

    /// Goes back, if it may and there is something to go back to.
    fn give_up(&self, round: &Round<'_>, why: &str, now: Timestamp) -> Option<RolledBack> {
        let to = self.target(round).filter(|_| round.deployment.auto_rollback)?;
        Some(RolledBack {
            revision: self.asked.to_owned(),
            to,
            at: Time(whole_seconds(now)),
            message: why.chars().take(600).collect(),
        })
    }

    /// While an older replica leaves for it, or its node fetches its model first, it waits for room all the same, although nobody has to act.
    fn is_own_fault(&self, round: &Round<'_>) -> bool {
        let waits =
            |pod: &Replica| pod.pod.revision == self.asked && matches!(pod.pod.stage, Stage::Unscheduled { .. });
        match self.cause.map(|cause| cause.severity) {
            Some(Severity::NoRoom | Severity::Refused) => false,
            Some(Severity::Passing) => !round.observed.replicas.iter().any(waits),
            Some(_) | None => true,
        }
    }

    /// What it is tried beside, else the newest other one that served and can be made again.
    fn target(&self, round: &Round<'_>) -> Option<String> {
        if matches!(round.deployment.course, Course::Canary(_)) {
            return Some(round.desired.revision.clone());
        }
        let others = self.revisions.iter().rev().filter(|entry| entry.served && entry.revision != self.asked);
        let newest = others.into_iter().find(|entry| kept_inputs(round.observed, &entry.revision).is_some());
        newest.map(|entry| entry.revision.clone())
    }
}
