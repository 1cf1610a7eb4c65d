//! One deployment in a row, from the object and its replicas. Pure.

use kube::ResourceExt;
use stoker_crds::{
    InferenceDeployment,
    conditions::{DEGRADED, PROGRESSING, READY, REASON_SCALED_TO_ZERO},
    contract::LoadReport,
    status::InferenceDeploymentStatus,
};
use stoker_pages::view::{Gpus, Latency, Load, Replicas, State, Summary, Tone};
use stoker_replica::{Replica, Stage};

use crate::validate::replicas_wanted;

/// The row.
pub(super) fn summary(deployment: &InferenceDeployment, replicas: &[Replica]) -> Summary {
    Summary {
        namespace: deployment.namespace().unwrap_or_default(),
        name: deployment.name_any(),
        model: deployment.spec.model.source.clone(),
        state: state(deployment),
        replicas: counts(replicas_wanted(deployment), replicas),
        load: load(replicas),
        gpus: gpus(deployment, replicas),
    }
}

/// The words of `Ready`; where all is ready and something is wrong all the same, those of `Degraded`.
fn state(deployment: &InferenceDeployment) -> State {
    let of = |tone, word: &str, message: &str| State { tone, word: word.to_owned(), message: message.to_owned() };
    if deployment.metadata.deletion_timestamp.is_some() {
        return of(Tone::Wait, "Deleting", "it is being deleted; what its replicas answer ends first");
    }
    let Some(status) = &deployment.status else { return of(Tone::Wait, "New", "nothing was decided about it yet") };
    let condition = |type_: &str| status.conditions.iter().find(|condition| condition.type_ == type_);
    let Some(ready) = condition(READY) else { return of(Tone::Wait, "New", "nothing was decided about it yet") };
    let is = |type_: &str| is_true(status, type_);
    let degraded = condition(DEGRADED).filter(|degraded| degraded.status == "True");
    match (ready.status == "True", degraded) {
        (true, Some(degraded)) => of(Tone::Bad, &degraded.reason, &degraded.message),
        (true, None) if ready.reason == REASON_SCALED_TO_ZERO => of(Tone::Idle, &ready.reason, &ready.message),
        (true, None) => of(Tone::Good, &ready.reason, &ready.message),
        (false, Some(_)) => of(Tone::Bad, &ready.reason, &ready.message),
        (false, None) if is(PROGRESSING) => of(Tone::Wait, &ready.reason, &ready.message),
        (false, None) => of(Tone::Wait, &ready.reason, &ready.message),
    }
}

/// True when the status says so.
pub(super) fn is_true(status: &InferenceDeploymentStatus, type_: &str) -> bool {
    status.conditions.iter().any(|condition| condition.type_ == type_ && condition.status == "True")
}

/// Replicas by what a reader counts.
pub(super) fn counts(wanted: u32, replicas: &[Replica]) -> Replicas {
    let count = |fits: &dyn Fn(&Replica) -> bool| {
        u32::try_from(replicas.iter().filter(|replica| fits(replica)).count()).unwrap_or(u32::MAX)
    };
    Replicas { wanted, serving: count(&Replica::serves), starting: count(&starts), leaving: count(&leaves) }
}

pub(super) fn starts(replica: &Replica) -> bool {
    let on_its_way = matches!(
        replica.pod.stage,
        Stage::Unscheduled { .. } | Stage::Preparing { .. } | Stage::Blocked(_) | Stage::Starting
    );
    on_its_way && replica.drain_since().is_none()
}

pub(super) fn leaves(replica: &Replica) -> bool {
    replica.pod.stage == Stage::Leaving || (replica.is_live() && replica.drain_since().is_some())
}

/// What serving replicas carry, by readings that can be believed.
fn load(replicas: &[Replica]) -> Load {
    let serving = || replicas.iter().filter(|replica| replica.serves());
    let fresh: Vec<&LoadReport> = serving().filter_map(|replica| replica.reading.report()).collect();
    let sum = |of: fn(&LoadReport) -> u32| fresh.iter().map(|report| u64::from(of(report))).sum::<u64>();
    let total = sum(|report| report.total_blocks);
    let rates: Vec<f64> = serving().filter_map(|replica| replica.reading.tokens_per_second()).collect();
    let values =
        |of: fn(&LoadReport) -> Option<f64>| fresh.iter().filter_map(|report| of(report)).collect::<Vec<f64>>();
    let most = |values: Vec<f64>| values.into_iter().reduce(f64::max);
    let as_u32 = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
    Load {
        kv: (total > 0).then(|| sum(|report| report.referenced_blocks) as f64 / total as f64),
        running: as_u32(sum(|report| report.running)),
        waiting: as_u32(sum(|report| report.waiting)),
        tokens: (!rates.is_empty()).then(|| rates.iter().sum()),
        ttft: Latency {
            p50: middle(values(|report| report.ttft_p50_seconds)),
            p95: most(values(|report| report.ttft_p95_seconds)),
        },
        itl: Latency {
            p50: middle(values(|report| report.itl_p50_seconds)),
            p95: most(values(|report| report.itl_p95_seconds)),
        },
        preemptions: serving().map(|replica| replica.reading.preemptions_last_minute()).sum(),
        fresh: u32::try_from(fresh.len()).unwrap_or(u32::MAX),
    }
}

fn middle(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn gpus(deployment: &InferenceDeployment, replicas: &[Replica]) -> Gpus {
    let resource = deployment.spec.gpu_name().counted_as();
    let of = |replica: &Replica| replica.pod.needs.count(&resource);
    replicas.iter().fold(Gpus::default(), |mut gpus, replica| {
        match replica.pod.stage {
            Stage::Unscheduled { .. } => gpus.waiting += of(replica),
            Stage::Finished { .. } => {}
            _ => gpus.used += of(replica),
        }
        gpus
    })
}
