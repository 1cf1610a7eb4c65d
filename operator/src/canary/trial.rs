//! A canary over time: what its status says after a look at what was found. Pure: `now` is an argument.
//!
//! All that is remembered is in the status before: an operator that begins goes on where another one ended. What that one had counted of
//! requests is lost with it, so these are compared anew.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use stoker_crds::status::{CanaryMeasured, CanaryPhase, CanaryStatus};
use stoker_replica::Replica;

use super::{
    Canary,
    gate::{Finding, Verdict, judge, measured},
};
use crate::{clock::SKEW, verdict::whole_seconds};

/// How long a canary may be slower than allowed: agents' medians are of their last minute, and a cold cache is not cold for ever.
const SLOW_PATIENCE: SignedDuration = SignedDuration::from_secs(60);

/// What a canary is looked at by.
#[derive(Clone, Copy, Debug)]
pub struct Trial<'a> {
    /// Its revision.
    pub revision: &'a str,
    /// What is asked of it.
    pub canary: &'a Canary,
    /// Its replica, if that serves.
    pub serving: Option<&'a Replica>,
    /// What was found last, of whatever replica.
    pub finding: Option<&'a Finding>,
    /// Changes are held: it goes on being compared, and the change does not go on.
    pub paused: bool,
}

/// What its status says now, and when time alone changes that.
pub fn look(trial: &Trial<'_>, before: Option<&CanaryStatus>, now: Timestamp) -> (CanaryStatus, Option<Timestamp>) {
    let before = before.filter(|before| before.revision == trial.revision);
    let Some(replica) = trial.serving else { return (trial.starting(), None) };
    let finding = trial.finding.filter(|finding| finding.pod_uid == replica.pod.uid);
    let verdict = finding.map_or(Verdict::Unknown, |finding| judge(&trial.canary.gate, finding));
    let numbers = finding.map(|finding| measured(&trial.canary.gate, finding)).unwrap_or_default();
    match verdict {
        Verdict::Unknown => (trial.unknown(before), None),
        Verdict::Waits(message) => (trial.says(CanaryPhase::Analysing, message, numbers), None),
        Verdict::Fails(message) => (trial.says(CanaryPhase::Failed, message, numbers), None),
        Verdict::Passes(message) => trial.passes(before, message, numbers, now),
        Verdict::Slow(message) => trial.is_slow(before, message, numbers, now),
    }
}

impl Trial<'_> {
    fn says(&self, phase: CanaryPhase, message: String, measured: CanaryMeasured) -> CanaryStatus {
        let revision = self.revision.to_owned();
        CanaryStatus { revision, phase, passing_since: None, slow_since: None, message, measured }
    }

    fn starting(&self) -> CanaryStatus {
        self.says(CanaryPhase::Starting, "its replica does not serve".to_owned(), CanaryMeasured::default())
    }

    /// An operator that has just begun breaks nothing.
    fn unknown(&self, before: Option<&CanaryStatus>) -> CanaryStatus {
        let known = before.filter(|before| before.phase == CanaryPhase::Analysing);
        let message = "its replica serves and is looked at";
        known
            .cloned()
            .unwrap_or_else(|| self.says(CanaryPhase::Analysing, message.to_owned(), CanaryMeasured::default()))
    }

    fn passes(
        &self,
        before: Option<&CanaryStatus>,
        message: String,
        measured: CanaryMeasured,
        now: Timestamp,
    ) -> (CanaryStatus, Option<Timestamp>) {
        let since = since(before.and_then(|before| before.passing_since.as_ref()), now);
        let until = ends(since, self.canary.passes_for);
        let phase = if now >= until && !self.paused { CanaryPhase::Passed } else { CanaryPhase::Analysing };
        let status = CanaryStatus { passing_since: Some(Time(since)), ..self.says(phase, message, measured) };
        (status, Some(until).filter(|until| now < *until))
    }

    fn is_slow(
        &self,
        before: Option<&CanaryStatus>,
        message: String,
        measured: CanaryMeasured,
        now: Timestamp,
    ) -> (CanaryStatus, Option<Timestamp>) {
        let since = since(before.and_then(|before| before.slow_since.as_ref()), now);
        let until = ends(since, SLOW_PATIENCE.min(self.canary.passes_for));
        let phase = if now >= until { CanaryPhase::Failed } else { CanaryPhase::Analysing };
        let status = CanaryStatus { slow_since: Some(Time(since)), ..self.says(phase, message, measured) };
        (status, Some(until).filter(|until| now < *until))
    }
}

/// A date that is to come is of another clock.
fn since(before: Option<&Time>, now: Timestamp) -> Timestamp {
    let before = before.map(|before| before.0).filter(|before| before.duration_since(now) <= SKEW);
    before.unwrap_or_else(|| whole_seconds(now))
}

fn ends(since: Timestamp, after: SignedDuration) -> Timestamp {
    since.checked_add(after).unwrap_or(Timestamp::MAX)
}
