//! What the API server refused, and when it is asked again: later each time, at once when something else is to be written.
//!
//! A memory without a clock. Own status writes, readings and events of pods cause rounds all the time; without it each of
//! them would ask again what was refused a moment ago, and for the same answer.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use kube::ResourceExt;
use stoker_crds::InferenceDeployment;

use crate::{
    apply::{Applied, Refusal},
    error::ReconcileError,
    pause::Pause,
    plan::Plan,
    rollout::RolloutPlan,
};

/// Between two times that the same is asked for. Nothing says when a quota or a webhook has changed.
const PAUSE: Pause = Pause { first: Duration::from_secs(10), longest: Duration::from_secs(80) };
/// Internal errors in a row that are said in the status: a webhook that cannot be called is answered with one.
const ERRORS_TOLD: u32 = 5;

/// See the module.
#[derive(Debug, Default)]
pub struct RefusedWrites {
    by_deployment: Mutex<HashMap<String, Standing>>,
}

/// What is to be written for a deployment.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    uid: String,
    /// A user who changes the object wants it tried now.
    generation: Option<i64>,
    writes: String,
}

/// What was refused last.
#[derive(Clone, Debug)]
struct Standing {
    attempt: Attempt,
    refusals: Vec<Refusal>,
    in_a_row: u32,
    again: Instant,
}

impl Attempt {
    /// To carry out `plan`. That time passes makes it no other one.
    pub fn of(deployment: &InferenceDeployment, plan: &Plan) -> Self {
        let pods = RolloutPlan { look_again: None, held_until: None, ..plan.pods.clone() };
        Self {
            uid: deployment.uid().unwrap_or_default(),
            generation: deployment.metadata.generation,
            writes: Plan { pods, ..plan.clone() }.to_string(),
        }
    }
}

impl RefusedWrites {
    /// What came of it when it was tried, while it is not to be tried again.
    pub fn standing(&self, attempt: &Attempt, now: Instant) -> Option<Applied> {
        let known = self.known();
        let standing =
            known.get(&attempt.uid).filter(|standing| standing.attempt == *attempt && now < standing.again)?;
        Some(Applied { refusals: standing.refusals.clone(), ..Applied::default() })
    }

    /// How long the deployment waits until it is tried again, if anything was refused.
    pub fn wait(&self, attempt: &Attempt, now: Instant) -> Option<Duration> {
        self.known().get(&attempt.uid).map(|standing| standing.again.saturating_duration_since(now))
    }

    /// Keeps what came of an attempt.
    pub fn note(&self, attempt: Attempt, refusals: &[Refusal], now: Instant) {
        let mut known = self.known();
        if refusals.is_empty() {
            known.remove(&attempt.uid);
            return;
        }
        let in_a_row = known.get(&attempt.uid).map_or(1, |before| before.in_a_row.saturating_add(1));
        let again = now + PAUSE.after(in_a_row);
        known.insert(attempt.uid.clone(), Standing { attempt, refusals: refusals.to_vec(), in_a_row, again });
    }

    /// The refusal in an error that has come so often that somebody should know: the API server itself is well, and what
    /// it asks before it writes is not.
    pub fn in_error(&self, attempt: &Attempt, error: &ReconcileError, in_a_row: u32) -> Option<Refusal> {
        let ReconcileError::Apply { what, source: kube::Error::Api(answer) } = error else { return None };
        let known = in_a_row >= ERRORS_TOLD || self.known().contains_key(&attempt.uid);
        let refusal = || Refusal { what: what.clone(), message: answer.message.clone() };
        (answer.code == 500 && known).then(refusal)
    }

    /// Forgets all other deployments.
    pub fn keep_only(&self, uids: &HashSet<String>) {
        self.known().retain(|uid, _| uids.contains(uid));
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Standing>> {
        self.by_deployment.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn attempt(writes: &str) -> Attempt {
        Attempt { uid: "amber".into(), generation: Some(1), writes: writes.into() }
    }

    fn refusals() -> Vec<Refusal> {
        vec![Refusal { what: "Pod amber-0".into(), message: "exceeded quota".into() }]
    }

    #[test]
    fn the_same_is_asked_again_later_each_time_and_something_else_at_once() {
        let (refused, mut now) = (RefusedWrites::default(), Instant::now());
        let mut pauses = Vec::new();
        for _ in 0..6 {
            refused.note(attempt("create"), &refusals(), now);
            let wait = refused.wait(&attempt("create"), now).unwrap();
            let before = now + wait - Duration::from_millis(1);
            assert_eq!(refused.standing(&attempt("create"), before).unwrap().refusals, refusals());
            assert_eq!(refused.standing(&attempt("delete"), before), None);
            assert_eq!(refused.standing(&Attempt { generation: Some(2), ..attempt("create") }, before), None);
            now += wait;
            assert_eq!(refused.standing(&attempt("create"), now), None);
            pauses.push(wait.as_secs());
        }
        assert_eq!(pauses, [10, 20, 40, 80, 80, 80]);
    }

    #[test]
    fn what_was_allowed_at_last_is_forgotten() {
        let (refused, now) = (RefusedWrites::default(), Instant::now());
        refused.note(attempt("create"), &refusals(), now);
        refused.note(attempt("create"), &[], now);
        assert_eq!((refused.standing(&attempt("create"), now), refused.wait(&attempt("create"), now)), (None, None));
        refused.note(attempt("create"), &refusals(), now);
        assert_eq!(refused.wait(&attempt("create"), now), Some(Duration::from_secs(10)));
        refused.keep_only(&HashSet::new());
        assert_eq!(refused.wait(&attempt("create"), now), None);
    }

    #[test]
    fn only_an_internal_error_that_comes_again_and_again_is_told() {
        let error = |code: u16| {
            let answer = Status { message: "failed calling webhook".into(), code, ..Status::default() };
            ReconcileError::Apply { what: "Pod amber-0".into(), source: kube::Error::Api(Box::new(answer)) }
        };
        let refused = RefusedWrites::default();
        assert_eq!(refused.in_error(&attempt("create"), &error(500), 4), None);
        let told = refused.in_error(&attempt("create"), &error(500), 5).unwrap();
        assert_eq!(told.message, "failed calling webhook");
        for passing in [409, 429, 503] {
            assert_eq!(refused.in_error(&attempt("create"), &error(passing), 50), None);
        }
        // Once it was told it is not told off again by another five.
        refused.note(attempt("create"), &refusals(), Instant::now());
        assert!(refused.in_error(&attempt("create"), &error(500), 1).is_some());
    }
}
