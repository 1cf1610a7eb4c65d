//! The KV cache of the serving replicas, written when it has moved.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use stoker_crds::{contract::KV_BLOCK_TOKENS, status::CapacityStatus};

use crate::{observe::Observed, verdict::whole_seconds};

/// Percentage points that KV use moves before it is written again.
const KV_STEP_PERCENT: i32 = 5;
/// Least time between two writes of KV use and preemptions.
const KV_PAUSE: SignedDuration = SignedDuration::from_secs(30);

/// KV cache of the serving replicas; kept as it is while it hardly moves or some replica cannot be read.
pub(super) fn capacity(
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
