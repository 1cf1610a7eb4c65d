//! How far a replica is that starts.

use stoker_crds::{
    contract::AgentPhase,
    status::{StartupPhase, StartupStatus},
};
use stoker_replica::{Replica, Stage};

/// The starting replica of the wanted revision that is furthest behind.
pub(super) fn startup(pods: &[Replica], revision: &str) -> Option<StartupStatus> {
    let phases =
        pods.iter().filter(|pod| pod.pod.revision == revision).filter_map(|pod| Some((startup_phase(pod)?, pod)));
    let (phase, pod) = phases.min_by_key(|(phase, _)| *phase)?;
    Some(StartupStatus { pod: pod.pod.name.clone(), phase })
}

fn is_fetching(pod: &Replica) -> bool {
    let model = pod.reading.report().and_then(|report| report.model.as_ref());
    model.is_some_and(|model| model.fetch.is_some())
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
