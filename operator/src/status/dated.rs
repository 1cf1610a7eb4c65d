//! Conditions that remember when they turned, and those of tools that wait for objects.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use stoker_crds::conditions::{self, DEGRADED, PROGRESSING, READY, RECONCILING, STALLED};
use stoker_replica::Trouble;

use crate::{
    clock::SKEW,
    fits::Opinion,
    verdict::{Verdict, whole_seconds},
};

/// Makes conditions that remember when their status last changed.
pub(super) struct Dated<'a> {
    pub previous: &'a [Condition],
    pub generation: i64,
    pub now: Timestamp,
}

impl Dated<'_> {
    pub(super) fn condition(&self, type_: &str, verdict: Verdict) -> Condition {
        self.said(type_, if verdict.value { "True" } else { "False" }, &verdict.trouble)
    }

    pub(super) fn opinion(&self, type_: &str, opinion: &Opinion) -> Condition {
        let status = opinion.fits.map_or("Unknown", |fits| if fits { "True" } else { "False" });
        self.said(type_, status, &opinion.trouble)
    }

    fn said(&self, type_: &str, status: &str, trouble: &Trouble) -> Condition {
        let before = self.previous.iter().find(|condition| condition.type_ == type_ && condition.status == status);
        // Nothing turned in times to come: another clock says so, and what follows after a while never would.
        let before = before.filter(|before| before.last_transition_time.0.duration_since(self.now) <= SKEW);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: camel_case(&trouble.reason),
            message: bounded(&trouble.message),
            observed_generation: Some(self.generation),
            last_transition_time: before
                .map_or(Time(whole_seconds(self.now)), |before| before.last_transition_time.clone()),
        }
    }
}

/// A reason as conditions may carry it: others coined some of ours.
fn camel_case(reason: &str) -> String {
    let kept: String = reason.chars().filter(char::is_ascii_alphanumeric).take(128).collect();
    if kept.is_empty() { conditions::REASON_NOT_READY.to_owned() } else { kept }
}

/// The first 1000 characters: last words of a process can be long.
fn bounded(message: &str) -> String {
    message.chars().take(1000).collect()
}

/// What tools that wait for objects look at: Stalled or Reconciling while the object is not what was asked for, and
/// nothing else. A fault has as long as progress may take before it counts as the end; also when that will be.
pub(super) fn for_tools(
    conditions: &[Condition],
    deadline: SignedDuration,
    now: Timestamp,
) -> (Option<Condition>, Option<Timestamp>) {
    let is = |type_: &str| conditions.iter().find(|condition| condition.type_ == type_ && condition.status == "True");
    if is(READY).is_some() && is(PROGRESSING).is_none() {
        return (None, None);
    }
    let stalls_at = is(DEGRADED).and_then(|degraded| degraded.last_transition_time.0.checked_add(deadline).ok());
    let stalls_at = stalls_at.filter(|_| is(READY).is_none());
    let (type_, like) = match (is(DEGRADED), stalls_at) {
        (Some(degraded), Some(moment)) if moment <= now => (STALLED, Some(degraded)),
        _ => (RECONCILING, is(PROGRESSING).or_else(|| conditions.first())),
    };
    let said = like.map(|like| Condition { type_: type_.to_owned(), status: "True".to_owned(), ..like.clone() });
    (said, stalls_at.filter(|moment| now < *moment))
}

#[cfg(test)]
mod tests {
    use stoker_crds::conditions::AVAILABLE;

    use super::*;

    const DEADLINE: SignedDuration = SignedDuration::from_secs(600);

    /// What tools see at a second, with conditions that are True since second 0, and when it turns.
    fn seen(true_ones: &[&str], second: i64) -> (Option<String>, Option<i64>) {
        let at = |second| Timestamp::from_second(second).unwrap();
        let condition = |type_: &&str| Condition {
            type_: (*type_).to_owned(),
            status: if true_ones.contains(type_) { "True" } else { "False" }.to_owned(),
            reason: format!("Why{type_}"),
            message: String::new(),
            observed_generation: Some(1),
            last_transition_time: Time(at(0)),
        };
        let conditions: Vec<Condition> = [READY, AVAILABLE, PROGRESSING, DEGRADED].iter().map(condition).collect();
        let (said, turns) = for_tools(&conditions, DEADLINE, at(second));
        (said.map(|said| format!("{} {}", said.type_, said.reason)), turns.map(Timestamp::as_second))
    }

    #[test]
    fn tools_see_what_is_on_its_way_what_stalls_and_nothing_of_what_is_done() {
        let said = |words: &str| Some(words.to_owned());
        assert_eq!(seen(&[READY], 10), (None, None));
        assert_eq!(seen(&[READY, DEGRADED], 10_000), (None, None), "all replicas serve");
        assert_eq!(seen(&[PROGRESSING], 10_000), (said("Reconciling WhyProgressing"), None));
        assert_eq!(seen(&[READY, PROGRESSING], 10), (said("Reconciling WhyProgressing"), None));
        assert_eq!(seen(&[PROGRESSING, DEGRADED], 10), (said("Reconciling WhyProgressing"), Some(600)));
        assert_eq!(seen(&[PROGRESSING, DEGRADED], 600), (said("Stalled WhyDegraded"), None));
        assert_eq!(seen(&[], 10), (said("Reconciling WhyReady"), None));
    }
}
