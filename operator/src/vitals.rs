//! Whether the operator makes progress: what `/healthz` says. Each part that must go on beats; a round that began must end.
//! Decides nothing about deployments.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// How long a part may be without a beat, and a round without an end, before a restart is the better hope. Longer than any
/// pause of an API server that is away: requests end by their own time limits.
const PATIENCE: Duration = Duration::from_secs(120);

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Vitals {
    signs: Arc<Mutex<Signs>>,
}

#[derive(Debug, Default)]
struct Signs {
    /// Last beat of each part.
    beats: BTreeMap<&'static str, Instant>,
    /// Beginnings of rounds that have not ended, by their number.
    rounds: BTreeMap<u64, Instant>,
    rounds_begun: u64,
}

/// A round under way; it ends when this is dropped.
#[derive(Debug)]
pub struct RoundUnderWay {
    vitals: Vitals,
    number: u64,
}

impl Vitals {
    /// A part goes on. From its first beat on it is expected to.
    pub fn beat(&self, part: &'static str) {
        self.signs().beats.insert(part, Instant::now());
    }

    /// A round begins.
    pub fn round(&self) -> RoundUnderWay {
        let mut signs = self.signs();
        signs.rounds_begun += 1;
        let number = signs.rounds_begun;
        signs.rounds.insert(number, Instant::now());
        RoundUnderWay { vitals: self.clone(), number }
    }

    /// What stands still at `now`, if anything does.
    pub fn complaint(&self, now: Instant) -> Option<String> {
        let signs = self.signs();
        let silent = |since: Instant| Some(now.saturating_duration_since(since)).filter(|silent| *silent > PATIENCE);
        let part = signs.beats.iter().find_map(|(part, beat)| Some((*part, silent(*beat)?)));
        if let Some((part, silent)) = part {
            return Some(format!("{part} has not moved for {} s", silent.as_secs()));
        }
        let oldest = silent(*signs.rounds.values().next()?)?;
        Some(format!("a round has not ended for {} s", oldest.as_secs()))
    }

    fn signs(&self) -> MutexGuard<'_, Signs> {
        self.signs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RoundUnderWay {
    fn drop(&mut self) {
        self.vitals.signs().rounds.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_still_is_named_and_what_never_began_is_not_missed() {
        let (vitals, later) = (Vitals::default(), PATIENCE + Duration::from_secs(1));
        assert_eq!(vitals.complaint(Instant::now() + later), None);
        vitals.beat("probe");
        assert_eq!(vitals.complaint(Instant::now()), None);
        let complaint = vitals.complaint(Instant::now() + later).unwrap();
        assert!(complaint.starts_with("probe has not moved for 12"), "{complaint}");
    }

    #[test]
    fn a_round_that_does_not_end_is_a_complaint_until_it_does() {
        let (vitals, later) = (Vitals::default(), PATIENCE + Duration::from_secs(1));
        let (first, second) = (vitals.round(), vitals.round());
        drop(first);
        assert!(vitals.complaint(Instant::now() + later).unwrap().starts_with("a round has not ended"));
        drop(second);
        assert_eq!(vitals.complaint(Instant::now() + later), None);
    }
}
