//! A replica of a deployment: what the operator says of it, joined with what this gateway has there and saw.

use std::sync::Arc;

use stoker_crds::endpoints::{EndpointLoad, EndpointState, ReplicaEndpoint, RoutedReplica};
use stoker_routing::{Own, ReplicaView, Reported, hash, load};

use crate::{
    room::{BURST, Told, places, window},
    vital::{Life, Vital},
};

/// A load that has not changed for so long is not believed: the agents' clocks go on in every report.
const STALE_MS: u64 = 10_000;
/// A replica that has not computed anything for so long while work waited is as one that does not answer.
const STALLED_SECONDS: f64 = 10.0;

/// One replica.
#[derive(Debug)]
pub struct Member {
    /// By which the prefix index knows it.
    pub slot: u32,
    /// Name of its pod.
    pub pod: String,
    /// `IP:PORT`.
    pub address: Option<String>,
    /// `IP:PORT` where it says what its prefix cache holds, if it does.
    pub events: Option<String>,
    /// Whether it takes requests.
    pub state: EndpointState,
    /// What this gateway has there and saw.
    pub vital: Arc<Vital>,
    /// UID of its pod.
    pub uid: String,
    seed: u64,
    weight: u32,
    pub(super) serving_since_ms: u64,
    report: Option<Report>,
}

/// A load, when it came and what was there then.
#[derive(Clone, Debug)]
struct Report {
    load: EndpointLoad,
    seen_ms: u64,
    own_then: Own,
    /// With what other gateways said to have there.
    of_all_then: Own,
    /// Requests that may be there without an answer until the next one.
    window: u32,
}

impl Member {
    pub(super) fn takes_requests(&self) -> bool {
        self.state == EndpointState::Serving && self.address.is_some()
    }

    /// Requests that it takes now.
    pub(super) fn places(&self, now_ms: u64) -> u32 {
        let told = self.fresh(now_ms).map(|report| Told {
            window: report.window,
            waiting_tokens: report.load.waiting_prefill_tokens,
            unanswered_tokens: report.own_then.prefill_tokens,
        });
        places(told, self.vital.unanswered())
    }

    pub(super) fn view(&self, now_ms: u64) -> ReplicaView {
        let report = self.fresh(now_ms);
        let reported = report.map(|report| report.reported());
        let then = report.map(|report| report.of_all_then).unwrap_or_default();
        ReplicaView {
            slot: self.slot,
            seed: self.seed,
            weight: self.weight,
            serving_since_ms: self.serving_since_ms,
            is_healthy: self.is_healthy(now_ms),
            load: load(reported, then, self.vital.of_all()),
        }
    }

    /// Whether it answers and computes.
    pub fn is_healthy(&self, now_ms: u64) -> bool {
        self.is_up(now_ms) && !self.vital.is_suspect(now_ms)
    }

    /// Whether it should serve and is not asked, because it does not answer.
    pub fn is_broken(&self, now_ms: u64) -> bool {
        self.state == EndpointState::Serving && !self.is_healthy(now_ms)
    }

    /// What this gateway has there, if it has something or gets no answer.
    pub fn routed(&self, now_ms: u64) -> Option<RoutedReplica> {
        let (requests, circuit_open) = (self.vital.own().requests, self.is_broken(now_ms));
        (requests > 0 || circuit_open).then(|| RoutedReplica { pod: self.pod.clone(), requests, circuit_open })
    }

    /// The same of one that may be silent for a moment.
    pub(super) fn is_up(&self, now_ms: u64) -> bool {
        let stalls = self.fresh(now_ms).is_some_and(|report| report.load.stalled_seconds > STALLED_SECONDS);
        !stalls && self.vital.life() == Life::Lives && self.vital.breaker(|breaker| breaker.admits(now_ms))
    }

    /// KV blocks that its cache has; as many as can be where that is not known.
    pub(crate) fn kv_blocks(&self) -> u32 {
        self.report.as_ref().map_or(u32::MAX, |report| report.load.total_blocks)
    }

    fn fresh(&self, now_ms: u64) -> Option<&Report> {
        self.report.as_ref().filter(|report| now_ms.saturating_sub(report.seen_ms) < STALE_MS)
    }
}

impl Report {
    fn after(before: Option<&Self>, load: EndpointLoad, vital: &Vital, now_ms: u64) -> Self {
        let before = before.map_or(BURST, |before| before.window);
        let window = window(before, load.waiting, vital.begin_most());
        Self { load, seen_ms: now_ms, own_then: vital.own(), of_all_then: vital.of_all(), window }
    }

    fn reported(&self) -> Reported {
        let EndpointLoad { running, waiting, waiting_prefill_tokens, total_blocks, referenced_blocks, .. } = self.load;
        Reported {
            running,
            waiting,
            prefill_tokens: waiting_prefill_tokens,
            kv_share: referenced_blocks as f32 / total_blocks.max(1) as f32,
        }
    }
}

impl Member {
    pub(super) fn after(
        before: Option<&Self>,
        vital: Arc<Vital>,
        replica: ReplicaEndpoint,
        slot: u32,
        serving_if_new_ms: u64,
        now_ms: u64,
    ) -> Self {
        let known = before.and_then(|before| before.report.as_ref());
        let report = replica.load.map(|load| match known.filter(|known| known.load == load) {
            Some(known) => known.clone(),
            None => Report::after(known, load, &vital, now_ms),
        });
        let served = before.filter(|before| before.state == EndpointState::Serving);
        Self {
            slot,
            seed: hash(0, replica.uid.as_bytes()),
            serving_since_ms: served.map_or(serving_if_new_ms, |before| before.serving_since_ms),
            pod: replica.pod,
            address: replica.address,
            events: replica.events,
            state: replica.state,
            uid: replica.uid,
            weight: replica.weight,
            vital,
            report,
        }
    }

    pub(super) fn restarted(&self, now: &ReplicaEndpoint) -> bool {
        let start = |load: &EndpointLoad| load.start_id.clone();
        let before = self.report.as_ref().map(|report| start(&report.load));
        before.zip(now.load.as_ref().map(start)).is_some_and(|(before, now)| before != now)
    }
}
