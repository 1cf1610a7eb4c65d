//! One replica as this gateway knows it by itself: what it has there, whether that answered, and whether it lives. Shared by all fleets that
//! know the replica, and by the requests on it.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use stoker_routing::Own;
use tokio::sync::{Notify, futures::OwnedNotified};

use crate::{breaker::Breaker, room::Unanswered};

/// Who lives answers that sooner, also while it computes. Whoever does not is sent nothing while there are others: it may have stalled, and that is
/// known later.
const SUSPECT: Duration = Duration::from_millis(100);

/// Why a replica is left that does not live, in words.
pub const DEAD: &str = "it does not say that it lives";

/// Whether a replica lives, as far as is known; the more the less.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Life {
    /// It does.
    #[default]
    Lives,
    /// It says nothing while others do: what can go on elsewhere does.
    LeftBehind,
    /// It has said nothing for too long, whatever others do.
    Stalled,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Vital {
    requests: AtomicU32,
    /// Of these, those of which nothing has come back.
    unanswered: AtomicU32,
    /// The most of them since the last report.
    unanswered_most: AtomicU32,
    prefill_tokens: AtomicU64,
    /// Requests of other gateways, and what they need, as far as these said.
    requests_of_others: AtomicU32,
    prefill_tokens_of_others: AtomicU64,
    /// Told when what this gateway has here changes.
    changed: Arc<Notify>,
    breaker: Mutex<Breaker>,
    /// When something came from it last, by the gateway's clock,
    heard_ms: AtomicU64,
    /// and when something of an answer did.
    said_ms: AtomicU64,
    /// Since when it is asked whether it lives; 0: it is not.
    asked_ms: AtomicU64,
    /// A [`Life`].
    life: AtomicU8,
    /// Told when it does not live any more.
    ends: Arc<Notify>,
}

impl Vital {
    /// One whose changes of what this gateway has there are told so.
    pub fn telling(changed: &Arc<Notify>) -> Self {
        Self { changed: Arc::clone(changed), ..Self::default() }
    }

    /// Something of an answer came from it.
    pub fn heard(&self, now_ms: u64) {
        self.said_ms.store(now_ms, Ordering::Relaxed);
        self.lives(now_ms);
    }

    /// It said that it lives.
    pub fn lives(&self, now_ms: u64) {
        self.heard_ms.fetch_max(now_ms, Ordering::Relaxed);
    }

    /// When something of an answer came last.
    pub fn said_ms(&self) -> u64 {
        self.said_ms.load(Ordering::Relaxed)
    }

    /// When something came last.
    pub fn heard_ms(&self) -> u64 {
        self.heard_ms.load(Ordering::Relaxed)
    }

    /// Whether requests wait for it.
    pub fn has_requests(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    /// Whether it lives.
    pub fn life(&self) -> Life {
        match self.life.load(Ordering::Relaxed) {
            0 => Life::Lives,
            1 => Life::LeftBehind,
            _ => Life::Stalled,
        }
    }

    /// Says so; whether that is new.
    pub fn set_life(&self, life: Life) -> bool {
        let is_new = self.life.swap(life as u8, Ordering::Relaxed) != life as u8;
        if is_new && life != Life::Lives {
            self.ends.notify_waiters();
        }
        is_new
    }

    /// What ends when it lives less than before; to be made before [`Vital::life`] is looked at.
    pub fn lives_less(&self) -> OwnedNotified {
        Arc::clone(&self.ends).notified_owned()
    }

    /// Waits until it lives as little as that.
    pub async fn falls_to(&self, life: Life) {
        loop {
            let less = self.ends.notified();
            if self.life() >= life {
                return;
            }
            less.await;
        }
    }

    /// Whoever gets `true` asks it whether it lives, and nobody else until that has ended.
    pub fn begin_asking(&self, now_ms: u64) -> bool {
        self.asked_ms.compare_exchange(0, now_ms.max(1), Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// See [`Vital::begin_asking`].
    pub fn end_asking(&self) {
        self.asked_ms.store(0, Ordering::Relaxed);
    }

    /// Since when it has been asked and said nothing, if it has.
    pub fn unanswered_since_ms(&self) -> Option<u64> {
        let asked_ms = self.asked_ms.load(Ordering::Relaxed);
        Some(asked_ms).filter(|asked_ms| *asked_ms > 0 && self.heard_ms() <= *asked_ms)
    }

    /// Whether it has not said for so long that it lives.
    pub fn is_silent_for(&self, time: Duration, now_ms: u64) -> bool {
        self.unanswered_since_ms()
            .is_some_and(|since_ms| Duration::from_millis(now_ms.saturating_sub(since_ms)) >= time)
    }

    /// Whether it has not said yet that it lives.
    pub fn is_suspect(&self, now_ms: u64) -> bool {
        self.is_silent_for(SUSPECT, now_ms)
    }

    /// Changes the breaker, or asks it.
    pub fn breaker<T>(&self, with: impl FnOnce(&mut Breaker) -> T) -> T {
        with(&mut self.breaker.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What this gateway has there.
    pub fn own(&self) -> Own {
        Own {
            requests: self.requests.load(Ordering::Relaxed),
            prefill_tokens: self.prefill_tokens.load(Ordering::Relaxed),
        }
    }

    /// What all gateways have there, as far as is known.
    pub fn of_all(&self) -> Own {
        let own = self.own();
        let others = (&self.requests_of_others, &self.prefill_tokens_of_others);
        Own {
            requests: own.requests.saturating_add(others.0.load(Ordering::Relaxed)),
            prefill_tokens: own.prefill_tokens.saturating_add(others.1.load(Ordering::Relaxed)),
        }
    }

    /// The most requests that were unanswered since this was asked last.
    pub(crate) fn begin_most(&self) -> u32 {
        self.unanswered_most.swap(self.unanswered.load(Ordering::Relaxed), Ordering::Relaxed)
    }

    pub(crate) fn unanswered(&self) -> Unanswered {
        Unanswered {
            requests: self.unanswered.load(Ordering::Relaxed),
            tokens: self.prefill_tokens.load(Ordering::Relaxed),
        }
    }
}

/// One request on a replica, until it is dropped.
#[derive(Debug)]
pub struct Flight {
    vital: Arc<Vital>,
    prefill_tokens: u64,
    is_answered: bool,
}

impl Flight {
    /// A request that needs this much prefill begins.
    pub fn begin(vital: &Arc<Vital>, prefill_tokens: u32) -> Self {
        vital.requests.fetch_add(1, Ordering::Relaxed);
        vital.changed.notify_waiters();
        let unanswered = vital.unanswered.fetch_add(1, Ordering::Relaxed) + 1;
        vital.unanswered_most.fetch_max(unanswered, Ordering::Relaxed);
        vital.prefill_tokens.fetch_add(prefill_tokens.into(), Ordering::Relaxed);
        Self { vital: Arc::clone(vital), prefill_tokens: prefill_tokens.into(), is_answered: false }
    }

    /// The replica it is on.
    pub fn vital(&self) -> &Arc<Vital> {
        &self.vital
    }

    /// Something came back: its prompt is computed.
    pub fn prefilled(&mut self) {
        if !std::mem::replace(&mut self.is_answered, true) {
            self.vital.prefill_tokens.fetch_sub(self.prefill_tokens, Ordering::Relaxed);
            self.vital.unanswered.fetch_sub(1, Ordering::Relaxed);
            self.vital.changed.notify_waiters();
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.prefilled();
        self.vital.requests.fetch_sub(1, Ordering::Relaxed);
        self.vital.changed.notify_waiters();
    }
}

/// What another gateway says to have on a replica, until it is dropped.
#[derive(Debug)]
pub struct Theirs {
    vital: Arc<Vital>,
    said: Own,
}

impl Theirs {
    /// Nothing yet.
    pub fn on(vital: &Arc<Vital>) -> Self {
        Self { vital: Arc::clone(vital), said: Own::default() }
    }

    /// Whether it is about what is known of a replica here.
    pub fn is_on(&self, vital: &Arc<Vital>) -> bool {
        Arc::ptr_eq(&self.vital, vital)
    }

    /// It says this now.
    pub fn say(&mut self, now: Own) {
        let Own { requests, prefill_tokens } = std::mem::replace(&mut self.said, now);
        // Atomics wrap around, and so does the difference.
        self.vital.requests_of_others.fetch_add(now.requests.wrapping_sub(requests), Ordering::Relaxed);
        let more = now.prefill_tokens.wrapping_sub(prefill_tokens);
        self.vital.prefill_tokens_of_others.fetch_add(more, Ordering::Relaxed);
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        self.say(Own::default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_does_not_say_that_it_lives_is_suspect_until_it_does() {
        let vital = Vital::default();
        assert!(
            !vital.is_suspect(0) && vital.begin_asking(1000) && !vital.begin_asking(1000),
            "one question at a time"
        );
        assert_eq!([1000, 1099, 1100].map(|now_ms| vital.is_suspect(now_ms)), [false, false, true]);
        vital.heard(1150);
        assert!(!vital.is_suspect(1200), "whatever it said");
        vital.end_asking();
        assert!(!vital.is_suspect(5000) && vital.begin_asking(5000) && vital.is_suspect(5200));
        assert!(Vital::default().begin_asking(0), "also at the first moment");
    }

    #[test]
    fn each_change_of_what_is_here_is_told_at_once() {
        let changed = Arc::new(Notify::new());
        let vital = Arc::new(Vital::telling(&changed));
        let is_told = |change: &mut dyn FnMut()| {
            let told = changed.notified();
            change();
            is_ready(told)
        };
        let mut flight = None;
        assert!(is_told(&mut || flight = Some(Flight::begin(&vital, 100))));
        assert!(is_told(&mut || flight.as_mut().expect("it began").prefilled()));
        assert!(is_told(&mut || flight = None));
        assert!(!is_told(&mut || {}));
    }

    fn is_ready(future: impl Future<Output = ()>) -> bool {
        std::pin::pin!(future).poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_ready()
    }

    #[test]
    fn what_others_have_counts_for_as_long_as_they_say_so() {
        let vital = Arc::new(Vital::default());
        let own = |requests, prefill_tokens| Own { requests, prefill_tokens };
        let flight = Flight::begin(&vital, 100);
        let (mut one, mut other) = (Theirs::on(&vital), Theirs::on(&vital));
        one.say(own(5, 900));
        other.say(own(1, 10));
        assert_eq!((vital.of_all(), vital.own()), (own(7, 1010), own(1, 100)));
        one.say(own(2, 0));
        assert_eq!(vital.of_all(), own(4, 110));
        drop(other);
        assert_eq!(vital.of_all(), own(3, 100));
        drop((one, flight));
        assert_eq!(vital.of_all(), Own::default());
    }

    #[tokio::test]
    async fn whoever_waits_for_a_replica_hears_of_its_end_also_if_that_was_before() {
        let vital = Arc::new(Vital::default());
        let waits = tokio::spawn({
            let vital = Arc::clone(&vital);
            async move { vital.falls_to(Life::LeftBehind).await }
        });
        let less = vital.lives_less();
        assert!(vital.set_life(Life::LeftBehind) && !vital.set_life(Life::LeftBehind));
        less.await;
        waits.await.unwrap();
        vital.falls_to(Life::LeftBehind).await;
        let less = vital.lives_less();
        assert!(vital.set_life(Life::Stalled));
        less.await;
    }
}
