//! What the engine's prefix cache holds, by the names that gateways gave to beginnings of prompts: all of it, and the last changes with
//! their numbers, for gateways that ask what is new. Takes the engine's news in on a thread of its own, so that neither waits for
//! the other.

use std::{
    collections::{HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use prometheus::IntCounterVec;
use stoker_crds::kv_events::{EVENTS_MAX, KvEvent, KvEvents};
use stoker_engine::{PrefixNews, kv::PrefixChange};
use tokio::sync::{mpsc::Receiver, watch};

/// Changes that are kept: minutes of a busy replica in a megabyte. Who knows less is told all that is held.
const RECENT_MAX: usize = 65_536;
/// A change waits so long for others: an answer for each step would cost more than the steps do good.
const GATHER: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug)]
pub struct KvLog {
    start_id: String,
    kept: Mutex<Kept>,
    /// Of the last change.
    number: watch::Sender<u64>,
    counts: IntCounterVec,
}

impl KvLog {
    /// An empty one of this start of the process. It counts changes by their kind.
    pub fn new(start_id: String, counts: IntCounterVec) -> Self {
        Self { start_id, kept: Mutex::new(Kept::keeping(RECENT_MAX)), number: watch::Sender::new(0), counts }
    }

    /// Takes in what the engine tells, until it is gone.
    pub fn follow(self: &Arc<Self>, mut news: Receiver<PrefixNews>) {
        let log = Arc::clone(self);
        let follow = move || {
            while let Some(news) = news.blocking_recv() {
                log.take(&news);
            }
        };
        if let Err(error) = thread::Builder::new().name("kv-log".to_owned()).spawn(follow) {
            tracing::warn!(%error, "gateways are not told what the prefix cache holds");
        }
    }

    /// What is new to somebody who knows everything up to `after` of the start `start_id`: as soon as there is something, or
    /// nothing after the wait.
    pub async fn told(&self, start_id: &str, after: u64, wait: Duration) -> KvEvents {
        if start_id != self.start_id {
            return self.events(None);
        }
        let mut number = self.number.subscribe();
        let is_new = tokio::time::timeout(wait, number.wait_for(|number| *number != after)).await.is_ok();
        if is_new && wait > Duration::ZERO {
            tokio::time::sleep(GATHER).await;
        }
        self.events(Some(after))
    }

    fn take(&self, news: &PrefixNews) {
        for kind in kinds(news) {
            self.counts.with_label_values(&[kind]).inc();
        }
        let number = self.kept().take(news);
        self.number.send_replace(number);
    }

    fn events(&self, after: Option<u64>) -> KvEvents {
        KvEvents { start_id: self.start_id.clone(), ..self.kept().after(after, EVENTS_MAX) }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn kinds(news: &PrefixNews) -> Vec<&'static str> {
    let kind = |change: &PrefixChange| match change {
        PrefixChange::Stored(_) => "stored",
        PrefixChange::Removed(_) => "removed",
    };
    match news {
        PrefixNews::Changes(changes) => changes.iter().map(kind).collect(),
        PrefixNews::Whole(_) => vec!["lost"],
    }
}

/// What is held, and how it came to be.
#[derive(Debug, Default)]
struct Kept {
    held: HashSet<u64>,
    /// The last changes, the newest of them `number`.
    recent: VecDeque<KvEvent>,
    number: u64,
    n_recent_max: usize,
}

impl Kept {
    fn keeping(n_recent_max: usize) -> Self {
        Self { n_recent_max, ..Self::default() }
    }

    /// Takes news in; the number of the last change.
    fn take(&mut self, news: &PrefixNews) -> u64 {
        match news {
            PrefixNews::Changes(changes) => changes.iter().for_each(|change| self.change(*change)),
            // What changed since the last news nobody knows: readers of any number before this one are told all.
            PrefixNews::Whole(held) => {
                self.held = held.iter().copied().collect();
                self.recent.clear();
                self.number += 1;
            }
        }
        self.number
    }

    fn change(&mut self, change: PrefixChange) {
        let event = match change {
            PrefixChange::Stored(name) => {
                self.held.insert(name);
                KvEvent::Stored(name)
            }
            PrefixChange::Removed(name) => {
                self.held.remove(&name);
                KvEvent::Removed(name)
            }
        };
        if self.recent.len() == self.n_recent_max {
            self.recent.pop_front();
        }
        self.recent.push_back(event);
        self.number += 1;
    }

    /// At most so many changes behind a number, or all that is held where these do not follow any more.
    fn after(&self, after: Option<u64>, n_max: usize) -> KvEvents {
        let n_behind = after.and_then(|after| self.number.checked_sub(after)).unwrap_or(u64::MAX);
        match usize::try_from(n_behind).ok().and_then(|n_behind| self.recent.len().checked_sub(n_behind)) {
            Some(n_known) => {
                let events: Vec<KvEvent> = self.recent.iter().skip(n_known).take(n_max).copied().collect();
                let after = self.number - n_behind;
                KvEvents { after, number: after + events.len() as u64, events, ..KvEvents::default() }
            }
            None => {
                let events = self.held.iter().map(|name| KvEvent::Stored(*name)).collect();
                KvEvents { number: self.number, is_whole: true, events, ..KvEvents::default() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Opts;

    use super::{
        PrefixChange::{Removed, Stored},
        *,
    };

    fn changes(changes: &[PrefixChange]) -> PrefixNews {
        PrefixNews::Changes(changes.to_vec())
    }

    fn told(events: &KvEvents) -> (u64, u64, bool, Vec<String>) {
        let mut names: Vec<String> = events.events.iter().map(|event| event.to_string().replace('0', "")).collect();
        if events.is_whole {
            names.sort_unstable();
        }
        (events.after, events.number, events.is_whole, names)
    }

    #[test]
    fn who_knows_a_number_is_told_what_came_since_and_who_knows_too_little_all() {
        let mut kept = Kept::keeping(3);
        assert_eq!(kept.take(&changes(&[Stored(1), Stored(2)])), 2);
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(told(&kept.after(Some(0), 9)), (0, 2, false, words(&["+1", "+2"])));
        assert_eq!(told(&kept.after(Some(0), 1)), (0, 1, false, words(&["+1"])), "the rest next time");
        assert_eq!(told(&kept.after(Some(2), 9)), (2, 2, false, vec![]));
        kept.take(&changes(&[Removed(1), Stored(3)]));
        assert_eq!(told(&kept.after(Some(1), 9)), (1, 4, false, words(&["+2", "-1", "+3"])));
        for unknown in [Some(0), Some(5), None] {
            assert_eq!(told(&kept.after(unknown, 1)), (0, 4, true, words(&["+2", "+3"])), "{unknown:?}");
        }
        kept.take(&PrefixNews::Whole(vec![7]));
        assert_eq!(told(&kept.after(Some(4), 9)), (0, 5, true, words(&["+7"])), "who knew all knows nothing now");
        assert_eq!(told(&kept.after(Some(5), 9)), (5, 5, false, vec![]));
    }

    #[tokio::test]
    async fn an_answer_comes_with_the_first_change_or_after_the_wait() {
        let counts = IntCounterVec::new(Opts::new("n", "n"), &["kind"]).unwrap();
        let log = KvLog::new("s".into(), counts.clone());
        let minute = Duration::from_secs(60);
        assert!(log.told("another", 0, minute).await.is_whole, "at once");
        assert_eq!(log.told("s", 0, Duration::ZERO).await.events, []);
        let change = async { log.take(&changes(&[Stored(1)])) };
        let (answer, ()) = tokio::join!(log.told("s", 0, minute), change);
        assert_eq!((answer.events, answer.number), (vec![KvEvent::Stored(1)], 1));
        assert_eq!(counts.with_label_values(&["stored"]).get(), 1);
    }
}
