//! The readings of all agents, by the UID of their pods. Shared: the probe writes, observations and the autoscaler read.
//!
//! Judged by the operator's one clock. Says when a reading has moved in what a plan or a status depends on, so that quiet agents cause no work.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use jiff::Timestamp;
use stoker_crds::{
    contract::{AgentPhase, FetchReport, LoadReport},
    description::Description,
};
use stoker_replica::{Answer, Expected, Judge, OtherRelease, Reading};

use crate::clock::Clock;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    by_pod: Arc<RwLock<HashMap<String, Known>>>,
    clock: Clock,
}

/// What is kept of one agent.
#[derive(Clone, Debug, Default)]
struct Known {
    judge: Judge,
    /// Why the agent took no order when it was last given one.
    refusal: Option<String>,
    /// What a reconciliation was last asked for; readings age between answers, too.
    told: Signature,
    /// What it serves, and as of when.
    described: Option<(Moment, Arc<Description>)>,
}

/// Between two of them what an agent says of its model stays the same: a phase of a process.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Moment {
    start_id: String,
    phase: AgentPhase,
}

impl Moment {
    /// That of a report.
    pub fn of(report: &LoadReport) -> Self {
        Self { start_id: report.start_id.clone(), phase: report.phase }
    }
}

/// The part of a reading that plans and statuses depend on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signature {
    kind: &'static str,
    phase: Option<AgentPhase>,
    error: Option<String>,
    intent: Option<u64>,
    kv_twentieths: u64,
    preempts: bool,
    commit: Option<String>,
    fetched_twentieths: u64,
    other_release: Option<OtherRelease>,
    description: Option<Arc<Description>>,
}

impl Readings {
    /// No readings yet, judged by this clock.
    pub fn by(clock: Clock) -> Self {
        Self { clock, ..Self::default() }
    }

    /// The time by the clock of readings.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// What is known of the agent in the pod with this UID.
    pub fn of(&self, pod_uid: &str) -> Reading {
        self.at(pod_uid, self.now())
    }

    /// The same at a time of the clock of readings.
    pub fn at(&self, pod_uid: &str, now: Timestamp) -> Reading {
        self.read().get(pod_uid).map(|known| known.judge.reading(millis(now))).unwrap_or_default()
    }

    /// Takes in an answer of a pod's agent; how it counts.
    pub fn hear(&self, pod_uid: &str, answer: Answer<'_>, revision: &str, now: Timestamp) -> &'static str {
        let mut by_pod = self.write();
        let judge = &mut by_pod.entry(pod_uid.to_owned()).or_default().judge;
        judge.hear(answer, Expected { revision, now_ms: millis(now) });
        judge.sight(millis(now)).kind()
    }

    /// What a plan or a status would say otherwise than when it was last told, if anything.
    pub fn news(&self, pod_uid: &str, now: Timestamp) -> Option<Signature> {
        let by_pod = self.read();
        let known = by_pod.get(pod_uid)?;
        let description = known.described.as_ref().map(|(_, description)| description.clone());
        let signature = Signature { description, ..Signature::of(&known.judge.reading(millis(now))) };
        Some(signature).filter(|signature| *signature != known.told)
    }

    /// A reconciliation was asked for.
    pub fn told(&self, pod_uid: &str, signature: Signature) {
        self.write().entry(pod_uid.to_owned()).or_default().told = signature;
    }

    /// Keeps what came of an order; true when that is worth a line in the log.
    pub fn note_order(&self, pod_uid: &str, refusal: Option<String>) -> bool {
        let mut by_pod = self.write();
        let before = &mut by_pod.entry(pod_uid.to_owned()).or_default().refusal;
        let news = *before != refusal || refusal.is_none();
        *before = refusal;
        news
    }

    /// Whether nobody asked yet what is served at this moment of an agent.
    pub fn is_new(&self, pod_uid: &str, moment: &Moment) -> bool {
        let by_pod = self.read();
        let described = by_pod.get(pod_uid).and_then(|known| known.described.as_ref());
        described.is_none_or(|(of, _)| of != moment)
    }

    /// Keeps what an agent says of its model.
    pub fn describe(&self, pod_uid: &str, moment: Moment, description: Description) {
        self.write().entry(pod_uid.to_owned()).or_default().described = Some((moment, Arc::new(description)));
    }

    /// What an agent said of its model last.
    pub fn description(&self, pod_uid: &str) -> Option<Arc<Description>> {
        self.read().get(pod_uid)?.described.as_ref().map(|(_, description)| description.clone())
    }

    /// Forgets all other pods.
    pub fn keep_only(&self, pod_uids: &HashSet<&str>) {
        self.write().retain(|uid, _| pod_uids.contains(uid.as_str()));
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, Known>> {
        self.by_pod.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, Known>> {
        self.by_pod.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Signature {
    fn of(reading: &Reading) -> Self {
        let (kind, preempts) = (reading.sight().kind(), reading.preemptions_last_minute() > 0);
        let other_release = reading.other_release();
        let Some(report) = reading.report() else { return Self { kind, preempts, other_release, ..Self::default() } };
        Self {
            kind,
            phase: Some(report.phase),
            error: report.error.clone(),
            intent: report.intent,
            kv_twentieths: u64::from(report.referenced_blocks) * 20 / u64::from(report.total_blocks.max(1)),
            preempts,
            commit: report.model.as_ref().map(|model| model.commit.clone()),
            fetched_twentieths: report.model.as_ref().and_then(|model| model.fetch).map_or(0, twentieths),
            other_release,
            description: None,
        }
    }
}

/// So that a fetch asks for twenty rounds, however long it takes.
fn twentieths(fetch: FetchReport) -> u64 {
    let FetchReport { bytes_done, bytes_total, .. } = fetch;
    u64::try_from(u128::from(bytes_done) * 20 / u128::from(bytes_total.max(1))).unwrap_or(u64::MAX)
}

/// A time as judges count it.
pub fn millis(time: Timestamp) -> u64 {
    u64::try_from(time.as_millisecond()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use stoker_crds::contract::LoadReport;

    use super::*;

    const POD: &str = "uid-0";

    /// What an agent says at a second makes news, or does not.
    fn is_news(readings: &Readings, second: i64, change: impl FnOnce(&mut LoadReport)) -> bool {
        let now = Timestamp::from_second(1_000 + second).unwrap();
        let mut report = LoadReport { up_ms: millis(now), running: 2, ..LoadReport::idle(100) };
        change(&mut report);
        readings.hear(POD, Answer::Report(&report), "", now);
        told(readings, now)
    }

    fn told(readings: &Readings, now: Timestamp) -> bool {
        let news = readings.news(POD, now);
        news.map(|signature| readings.told(POD, signature)).is_some()
    }

    #[test]
    fn a_reading_is_news_only_when_it_matters() {
        let readings = Readings::default();
        assert!(is_news(&readings, 0, |_| {}));
        assert!(!is_news(&readings, 1, |report| (report.running, report.finished) = (3, 9)));
        assert!(is_news(&readings, 2, |report| (report.phase, report.finished) = (AgentPhase::Empty, 9)));
    }

    #[test]
    fn age_is_news_without_an_answer() {
        let readings = Readings::default();
        is_news(&readings, 0, |_| {});
        let at = |second: i64| Timestamp::from_second(1_000 + second).unwrap();
        readings.hear(POD, Answer::Silence, "", at(2));
        assert!(!told(&readings, at(4)));
        assert!(told(&readings, at(5)));
        assert!(!told(&readings, at(6)));
    }

    #[test]
    fn who_is_gone_is_forgotten() {
        let readings = Readings::default();
        is_news(&readings, 0, |_| {});
        readings.keep_only(&HashSet::new());
        assert_eq!(readings.of(POD), Reading::default());
        assert!(readings.read().is_empty());
    }
}
