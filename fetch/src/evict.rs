//! What leaves a cache that is full, models and fetches that nobody goes on with: what was used least recently, never what is
//! used. Pure.

use std::time::{Duration, SystemTime};

/// Between the end of a fetch and the agent that opens the model a container starts; between two tries of a fetch that fails
/// its kubelet waits.
const KEPT_AFTER_USE: Duration = Duration::from_secs(600);

/// A model of the cache, or what is there of one that is fetched.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Entry {
    /// Its directory in the cache.
    pub name: String,
    /// Bytes that are there for it alone.
    pub bytes: u64,
    /// When it was last asked for.
    pub last_used: SystemTime,
    /// Whether somebody holds it now.
    pub in_use: bool,
}

/// Names of models that make `needed` bytes of room when they go, the least recently used first; as many as may go, if
/// that is not enough.
pub fn evictions(entries: &[Entry], needed: u64, now: SystemTime) -> Vec<&str> {
    let rests = |entry: &&Entry| {
        let idle = now.duration_since(entry.last_used).unwrap_or_default();
        !entry.in_use && idle >= KEPT_AFTER_USE
    };
    let mut idle: Vec<&Entry> = entries.iter().filter(rests).collect();
    idle.sort_by_key(|entry| (entry.last_used, &entry.name));
    let mut freed = 0;
    let goes = |entry: &&Entry| {
        let goes = freed < needed;
        freed += entry.bytes;
        goes
    };
    idle.into_iter().take_while(goes).map(|entry| &*entry.name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, minutes_ago: u64, in_use: bool) -> Entry {
        let last_used = now() - Duration::from_secs(60 * minutes_ago);
        Entry { name: name.to_owned(), bytes: 10, last_used, in_use }
    }

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
    }

    #[test]
    fn the_least_recently_used_go_and_no_more_than_needed() {
        let entries = [entry("new", 20, false), entry("old", 60, false), entry("older", 90, false)];
        let gone = |needed| evictions(&entries, needed, now());
        assert_eq!(gone(0), Vec::<&str>::new());
        assert_eq!(gone(10), ["older"]);
        assert_eq!(gone(11), ["older", "old"]);
        assert_eq!(gone(1_000), ["older", "old", "new"]);
    }

    #[test]
    fn what_is_used_or_was_just_asked_for_stays() {
        let entries = [entry("used", 90, true), entry("just", 9, false), entry("idle", 11, false)];
        assert_eq!(evictions(&entries, 1_000, now()), ["idle"]);
        let to_come = [Entry { last_used: now() + Duration::from_secs(5), ..entry("to-come", 0, false) }];
        assert_eq!(evictions(&to_come, 1, now()), Vec::<&str>::new());
    }
}
