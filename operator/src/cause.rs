//! The root cause: of everything that keeps a deployment from serving, the one thing to look at first. Pure.
//!
//! Words of the API server, scheduler, kubelet and agent are passed on as they are.

use std::cmp::Reverse;

use jiff::{SignedDuration, Timestamp};
use stoker_crds::{
    conditions,
    contract::{AgentPhase, FetchReport},
};
use stoker_replica::{Replica, Stage, Trouble};

use crate::{
    apply::{Applied, Refusal},
    observe::Holder,
    plan::Plan,
    release,
};

/// What keeps a deployment from serving.
#[derive(Clone, Debug, PartialEq)]
pub struct Cause {
    /// Reason and message, as conditions carry them.
    pub trouble: Trouble,
    /// How bad it is.
    pub severity: Severity,
}

/// How bad a cause is; the worst is the root.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Severity {
    /// It passes by itself: a replica starts.
    Passing,
    /// A replica that served does not.
    Faltering,
    /// The cluster has no room.
    NoRoom,
    /// The agent dies again and again.
    Crashing,
    /// The container cannot be made.
    CannotStart,
    /// The model cannot be loaded.
    ModelFailed,
    /// The API server refuses a child.
    Refused,
}

impl Cause {
    /// True when it stays until somebody, or the cluster, changes something.
    pub fn is_stuck(&self) -> bool {
        self.severity > Severity::Passing
    }
}

/// What a cause is looked for in.
#[derive(Clone, Copy, Debug)]
pub struct Scene<'a> {
    /// What was decided.
    pub plan: &'a Plan,
    /// What was carried out.
    pub applied: &'a Applied,
    /// What was seen.
    pub replicas: &'a [Replica],
    /// How long waiting is no fault.
    pub deadline: SignedDuration,
    /// The time.
    pub now: Timestamp,
}

/// The worst of what was met while applying and of what blocks pods of the wanted revision; else of what blocks others.
pub fn root_cause(scene: &Scene<'_>) -> Option<Cause> {
    let of_others = || worst_of_pods(scene, |revision| revision != scene.plan.revision);
    cause_of(scene, &scene.plan.revision).or_else(of_others)
}

/// The worst of what was met while applying and of what blocks pods of a revision.
pub fn cause_of(scene: &Scene<'_>, revision: &str) -> Option<Cause> {
    let Scene { plan, applied, replicas, .. } = *scene;
    let met = plan.taken.iter().map(taken).chain(applied.refusals.iter().map(refused));
    worst(met.chain(failing(plan, replicas))).or_else(|| worst_of_pods(scene, |of_pod| of_pod == revision))
}

fn worst_of_pods(scene: &Scene<'_>, is_of: impl Fn(&str) -> bool) -> Option<Cause> {
    let staying = scene.replicas.iter().filter(|pod| pod.is_live() && pod.drain_since().is_none());
    let own = staying.filter(|pod| is_of(&pod.pod.revision));
    worst(own.filter_map(|pod| pod_cause(pod, scene)))
}

/// When time alone turns waiting into a fault.
pub fn overdue_at(replicas: &[Replica], deadline: SignedDuration, now: Timestamp) -> Option<Timestamp> {
    let moments = replicas.iter().filter_map(|replica| match &replica.pod.stage {
        Stage::Preparing { since, .. } => since.checked_add(deadline).ok(),
        _ => None,
    });
    moments.filter(|moment| now < *moment).min()
}

/// Pods fail soon after they are made, until enough serve.
fn failing(plan: &Plan, replicas: &[Replica]) -> Option<Cause> {
    let count = plan.pods.failures;
    if count < 2 {
        return None;
    }
    let is_made = |revision: &String| *revision == plan.revision || Some(revision) == plan.canary.as_ref();
    let failed = replicas.iter().filter(|replica| is_made(&replica.pod.revision));
    let failed = failed.filter_map(|replica| match &replica.pod.stage {
        Stage::Finished { trouble, since } => Some((since, &replica.pod.name, trouble)),
        _ => None,
    });
    let (_, name, trouble) = failed.max_by_key(|(since, name, _)| (**since, *name))?;
    let Trouble { reason, message } = trouble;
    let message = format!(
        "{count} pods failed soon after they were made, each lets the next one wait longer; {name}: {reason}: {message}"
    );
    Some(Cause { trouble: Trouble::new(conditions::REASON_PODS_FAIL, message), severity: Severity::CannotStart })
}

/// The worst; of equals the first.
fn worst(causes: impl Iterator<Item = Cause>) -> Option<Cause> {
    causes.enumerate().max_by_key(|(place, cause)| (cause.severity, Reverse(*place))).map(|(_, cause)| cause)
}

fn taken(taken: &crate::plan::Taken) -> Cause {
    let (kind, name) = (taken.kind, &taken.name);
    let (message, severity) = match taken.holder {
        Holder::Leaving => (format!("waiting for {kind} {name} of a deleted namesake to go"), Severity::Passing),
        Holder::Namesake => {
            let message = format!(
                "{kind} {name} of a deleted namesake is still there: it goes, or is taken over after half a minute"
            );
            (message, Severity::Passing)
        }
        Holder::Other => {
            let fix = "delete it or choose another metadata.name";
            (format!("{kind} {name} exists and belongs to somebody else: {fix}"), Severity::Refused)
        }
    };
    Cause { trouble: Trouble::new(conditions::REASON_NAME_TAKEN, message), severity }
}

fn refused(refusal: &Refusal) -> Cause {
    let message = format!("{}: {}", refusal.what, refusal.message);
    Cause { trouble: Trouble::new(conditions::REASON_REFUSED, message), severity: Severity::Refused }
}

fn pod_cause(pod: &Replica, scene: &Scene<'_>) -> Option<Cause> {
    let of_release = release::of_starting(pod).map(|trouble| (trouble, Severity::CannotStart));
    let (trouble, severity) = of_release.or_else(|| of_stage(pod, scene))?;
    let message = format!("pod {}: {}", pod.pod.name, trouble.message);
    Some(Cause { trouble: Trouble::new(trouble.reason, message), severity })
}

fn of_stage(pod: &Replica, scene: &Scene<'_>) -> Option<(Trouble, Severity)> {
    Some(match &pod.pod.stage {
        Stage::Serving | Stage::Finished { .. } | Stage::Leaving => return None,
        Stage::Unscheduled { trouble, .. } => (trouble.clone(), Severity::NoRoom),
        Stage::Blocked(trouble) => (trouble.clone(), blocked_severity(trouble)),
        Stage::Preparing { trouble, since } => preparing(trouble, *since, scene),
        Stage::Starting => starting(pod),
        Stage::Faltering { trouble, .. } => {
            (Trouble::new(conditions::REASON_NOT_READY, &trouble.message), Severity::Faltering)
        }
    })
}

fn preparing(trouble: &Trouble, since: Timestamp, scene: &Scene<'_>) -> (Trouble, Severity) {
    let Trouble { reason, message } = trouble;
    if scene.now.duration_since(since) < scene.deadline {
        return (Trouble::new(conditions::REASON_STARTING, "image and volumes"), Severity::Passing);
    }
    let seconds = scene.deadline.as_secs();
    let message = format!("{reason} for more than {seconds} s: {message}; kubectl describe names what its kubelet met");
    (Trouble::new(conditions::REASON_DEADLINE_EXCEEDED, message), Severity::CannotStart)
}

fn starting(pod: &Replica) -> (Trouble, Severity) {
    let report = pod.reading.report();
    match report.map(|report| (report.phase, report.error.as_deref())) {
        Some((AgentPhase::Failed, error)) => {
            let message = error.unwrap_or("the agent gives no reason");
            (Trouble::new(conditions::REASON_MODEL_LOAD_FAILED, message), Severity::ModelFailed)
        }
        _ => match report.and_then(|report| report.model.as_ref()?.fetch) {
            Some(fetch) => (Trouble::new(conditions::REASON_FETCHING, so_far(fetch)), Severity::Passing),
            None => (Trouble::new(conditions::REASON_STARTING, "the model is being loaded"), Severity::Passing),
        },
    }
}

/// `35 % of 16.06 GB fetched, 410 MB/s`: coarse, as every change of a status is a write.
fn so_far(fetch: FetchReport) -> String {
    let FetchReport { bytes_done, bytes_total, bytes_per_second, bytes_from_replicas } = fetch;
    if bytes_total == 0 {
        return "its source is being asked what the model is".to_owned();
    }
    let percent = u128::from(bytes_done) * 20 / u128::from(bytes_total) * 5;
    let mb = bytes_per_second / 1_000_000;
    let step = 10_u64.pow(mb.checked_ilog10().unwrap_or(0).saturating_sub(1));
    let mb = mb / step * step;
    let whence = match bytes_from_replicas {
        0 => "",
        bytes if bytes * 2 < bytes_done => ", a part of it from other replicas",
        _ => ", most of it from other replicas",
    };
    format!("{percent} % of {:.2} GB fetched, {mb} MB/s{whence}", bytes_total as f64 / 1e9)
}

fn blocked_severity(trouble: &Trouble) -> Severity {
    match trouble.reason.as_str() {
        release::CRASHES => Severity::Crashing,
        conditions::REASON_MODEL_FETCH_FAILED => Severity::ModelFailed,
        _ => Severity::CannotStart,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_a_fetch_is_moves_in_steps() {
        let said = |bytes_done, bytes_per_second| {
            so_far(FetchReport { bytes_done, bytes_total: 16_060_000_000, bytes_per_second, bytes_from_replicas: 0 })
        };
        assert_eq!(said(0, 0), "0 % of 16.06 GB fetched, 0 MB/s");
        assert_eq!(said(5_700_000_000, 412_345_678), "35 % of 16.06 GB fetched, 410 MB/s");
        assert_eq!(said(5_800_000_000, 418_000_000), "35 % of 16.06 GB fetched, 410 MB/s");
        assert_eq!(said(16_060_000_000, 7_900_000), "100 % of 16.06 GB fetched, 7 MB/s");
        let from = |bytes_from_replicas| {
            so_far(FetchReport { bytes_done: 1_000, bytes_total: 1_000, bytes_from_replicas, ..FetchReport::default() })
        };
        assert!(from(1).ends_with("MB/s, a part of it from other replicas"), "{}", from(1));
        assert!(from(500).ends_with("MB/s, most of it from other replicas"), "{}", from(500));
        assert!(so_far(FetchReport::default()).contains("is being asked"));
    }
}
