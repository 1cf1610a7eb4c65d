//! One replica: what rollout, scaling and status look at, and later the gateway.

use jiff::{SignedDuration, Timestamp};
use stoker_crds::{contract::AgentPhase, intent::Want};

use crate::{
    intent::Intent,
    pod::{ObservedPod, Stage},
    reading::{Reading, Sight},
};

/// See the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Replica {
    /// Its pod, as last read and possibly stale.
    pub pod: ObservedPod,
    /// What its agent said.
    pub reading: Reading,
    /// What it should do, as it was written down last.
    pub intent: Option<Intent>,
}

impl Replica {
    /// The same with dates that can be: a pod's stages are dated by kubelets and schedulers, each by its own clock. None
    /// began before the API server made the pod. One that begins later than `now` by more than clocks differ began nobody
    /// knows when, and what waits for its end would wait for as long as that clock is ahead: as old as the pod.
    pub fn dated_by(mut self, now: Timestamp, skew: SignedDuration) -> Self {
        let created = self.pod.created;
        if let Some(since) = self.pod.stage.since_mut() {
            *since = if since.duration_since(now) > skew { created } else { (*since).max(created) };
        }
        self
    }

    /// True when its pod exists for good: neither ended nor being deleted.
    pub fn is_live(&self) -> bool {
        !matches!(self.pod.stage, Stage::Finished { .. } | Stage::Leaving)
    }

    /// Since when it should drain, if it should.
    pub fn drain_since(&self) -> Option<Timestamp> {
        self.intent.as_ref().and_then(Intent::drain_since)
    }

    /// What it should do.
    pub fn want(&self) -> Want {
        self.intent.map_or(Want::Serve, |intent| intent.want)
    }

    /// True when requests reach it and it is meant to stay. The kubelet is slower than the agent: one that was drained and
    /// taken back may still be shown as ready although it is not told yet, so what it says counts more.
    pub fn serves(&self) -> bool {
        let is_in_service = match self.reading.sight() {
            Sight::Fresh(report) => report.phase == AgentPhase::Ready,
            Sight::Unread => self.intent.is_none(),
            Sight::Stale { .. } | Sight::Absurd(_) | Sight::Missing => true,
        };
        self.pod.stage == Stage::Serving && self.drain_since().is_none() && is_in_service
    }

    /// True when its agent may be computing answers.
    pub fn may_hold_streams(&self) -> bool {
        match &self.pod.stage {
            Stage::Serving | Stage::Faltering { .. } => true,
            Stage::Starting => self.reading.report().is_some_and(|report| report.running + report.waiting > 0),
            _ => false,
        }
    }

    /// The number of the next intent: above what was written and above what its agent says it took.
    pub fn next_number(&self) -> u64 {
        self.echoed().max(self.written()).unwrap_or_default() + 1
    }

    /// True when its agent took an order that is not written on the pod: somebody took the annotation away, or the
    /// cluster was restored from a copy.
    pub fn agent_is_ahead(&self) -> bool {
        self.echoed() > self.written()
    }

    /// True when its agent knows what is written.
    pub fn knows_its_intent(&self) -> bool {
        self.reading.report().zip(self.intent).is_some_and(|(report, intent)| intent.is_known_to(report))
    }

    /// True when its agent took the intent to drain and is empty. One that is ready cannot be: it started again since it
    /// was read.
    pub fn is_drained(&self) -> bool {
        let is_empty = self.reading.report().is_some_and(|report| report.phase == AgentPhase::Empty);
        is_empty && self.knows_its_intent() && self.pod.stage != Stage::Serving
    }

    fn echoed(&self) -> Option<u64> {
        self.reading.report().and_then(|report| report.intent)
    }

    fn written(&self) -> Option<u64> {
        self.intent.map(|intent| intent.number)
    }
}
