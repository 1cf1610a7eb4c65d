//! The root cause: of everything that keeps a deployment from serving, the one thing to look at first. Pure.
//!
//! Words of the API server, scheduler, kubelet and agent are passed on as they are.

use std::cmp::Reverse;

use stoker_crds::{conditions, contract::AgentPhase};
use stoker_replica::{Replica, Stage, Trouble};

use crate::{apply::Refusal, plan::Plan};

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

/// The worst of what was met while applying and of what blocks pods of the wanted revision.
pub fn root_cause(plan: &Plan, refusals: &[Refusal], pods: &[Replica]) -> Option<Cause> {
    let taken = plan.taken.iter().map(taken);
    let refused = refusals.iter().map(refused);
    let staying = pods.iter().filter(|pod| pod.is_live() && pod.drain_since().is_none());
    let (current, old): (Vec<_>, Vec<_>) = staying.partition(|pod| pod.pod.revision == plan.revision);
    let worst_of = |pods: &[&Replica]| worst(pods.iter().filter_map(|pod| pod_cause(pod)));
    worst(taken.chain(refused)).or_else(|| worst_of(&current)).or_else(|| worst_of(&old))
}

/// The worst; of equals the first.
fn worst(causes: impl Iterator<Item = Cause>) -> Option<Cause> {
    causes.enumerate().max_by_key(|(place, cause)| (cause.severity, Reverse(*place))).map(|(_, cause)| cause)
}

fn taken(taken: &crate::plan::Taken) -> Cause {
    let (kind, name) = (taken.kind, &taken.name);
    let (message, severity) = if taken.leaving {
        (format!("waiting for {kind} {name} of a deleted namesake to go"), Severity::Passing)
    } else {
        let fix = "delete it or choose another metadata.name";
        (format!("{kind} {name} exists and belongs to somebody else: {fix}"), Severity::Refused)
    };
    Cause { trouble: Trouble::new(conditions::REASON_NAME_TAKEN, message), severity }
}

fn refused(refusal: &Refusal) -> Cause {
    let message = format!("{}: {}", refusal.what, refusal.message);
    Cause { trouble: Trouble::new(conditions::REASON_REFUSED, message), severity: Severity::Refused }
}

fn pod_cause(pod: &Replica) -> Option<Cause> {
    let (trouble, severity) = match &pod.pod.stage {
        Stage::Serving | Stage::Finished(_) | Stage::Leaving => return None,
        Stage::Unscheduled { trouble, .. } => (trouble.clone(), Severity::NoRoom),
        Stage::Blocked(trouble) => (trouble.clone(), blocked_severity(trouble)),
        Stage::Preparing => (Trouble::new(conditions::REASON_STARTING, "image and volumes"), Severity::Passing),
        Stage::Starting => starting(pod),
        Stage::Faltering { trouble, .. } => {
            (Trouble::new(conditions::REASON_NOT_READY, &trouble.message), Severity::Faltering)
        }
    };
    let message = format!("pod {}: {}", pod.pod.name, trouble.message);
    Some(Cause { trouble: Trouble::new(trouble.reason, message), severity })
}

fn starting(pod: &Replica) -> (Trouble, Severity) {
    let report = pod.reading.report();
    match report.map(|report| (report.phase, report.error.as_deref())) {
        Some((AgentPhase::Failed, error)) => {
            let message = error.unwrap_or("the agent gives no reason");
            (Trouble::new(conditions::REASON_MODEL_LOAD_FAILED, message), Severity::ModelFailed)
        }
        _ => (Trouble::new(conditions::REASON_STARTING, "the model is being loaded"), Severity::Passing),
    }
}

fn blocked_severity(trouble: &Trouble) -> Severity {
    if trouble.reason == "CrashLoopBackOff" { Severity::Crashing } else { Severity::CannotStart }
}
