//! How far a fetch is: bytes, speed, in words and as JSON. Shared between who fetches and who tells.

use std::{
    collections::VecDeque,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};

/// The speed is that of the last while.
const WINDOW: Duration = Duration::from_secs(10);

/// How far it is, at one moment.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Snapshot {
    /// The commit that is fetched, once it is known.
    pub commit: Option<String>,
    /// Bytes that are there.
    pub bytes_done: u64,
    /// Bytes in all; 0 while nobody knows.
    pub bytes_total: u64,
    /// Speed of the last ten seconds.
    pub bytes_per_second: u64,
    /// Bytes of them that replicas gave.
    #[serde(default)]
    pub bytes_given: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    given: AtomicU64,
    notices: Mutex<Vec<String>>,
    commit: Mutex<Option<String>>,
    samples: Mutex<VecDeque<(Instant, u64)>>,
}

impl Progress {
    /// More bytes are there.
    pub fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Replicas gave so many of them.
    pub fn given(&self, bytes: u64) {
        self.given.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes turned out to be wrong; replicas gave so many of them.
    pub fn take_back(&self, bytes: u64, given: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
        self.given.fetch_sub(given, Ordering::Relaxed);
    }

    /// Something that a person may want to know went otherwise than it should, and the fetch goes on.
    pub fn notice(&self, words: String) {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner).push(words);
    }

    /// What was noticed since the last call.
    pub fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.notices.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What somebody else who fetches the same says.
    pub fn follow(&self, other: &Snapshot) {
        self.done.store(other.bytes_done, Ordering::Relaxed);
        self.total.store(other.bytes_total, Ordering::Relaxed);
        self.given.store(other.bytes_given, Ordering::Relaxed);
    }

    /// Begins to count.
    pub fn begin(&self, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// What the revision turned out to be.
    pub fn resolved(&self, commit: &str) {
        *self.commit.lock().unwrap_or_else(PoisonError::into_inner) = Some(commit.to_owned());
    }

    /// How far it is now. To be asked every second or so: the speed is computed from what was seen when it was asked.
    pub fn at(&self, now: Instant) -> Snapshot {
        let bytes_done = self.done.load(Ordering::Relaxed);
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.push_back((now, bytes_done));
        while samples.len() > 2 && now.duration_since(samples[0].0) > WINDOW {
            samples.pop_front();
        }
        Snapshot {
            commit: self.commit.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            bytes_done,
            bytes_total: self.total.load(Ordering::Relaxed),
            bytes_per_second: speed(&samples),
            bytes_given: self.given.load(Ordering::Relaxed),
        }
    }
}

fn speed(samples: &VecDeque<(Instant, u64)>) -> u64 {
    let (Some((first, before)), Some((last, after))) = (samples.front(), samples.back()) else { return 0 };
    let seconds = last.duration_since(*first).as_secs_f64();
    if seconds > 0.0 { (after.saturating_sub(*before) as f64 / seconds) as u64 } else { 0 }
}

impl Snapshot {
    /// Share of all bytes, 0 to 1.
    pub fn fraction(&self) -> f64 {
        if self.bytes_total == 0 { 0.0 } else { (self.bytes_done as f64 / self.bytes_total as f64).min(1.0) }
    }

    /// What replicas gave, for a person; nothing if they gave nothing.
    pub fn given(&self) -> String {
        match self.bytes_given {
            0 => String::new(),
            bytes => format!(", {} GB of it from other replicas", gb(bytes)),
        }
    }

    /// For a person: `1.25 of 16.06 GB (8 %), 412 MB/s, 36 s left, 1.10 GB of it from other replicas`.
    pub fn line(&self) -> String {
        if self.bytes_total == 0 {
            return "asking what there is".to_owned();
        }
        let (done, total) = (gb(self.bytes_done), gb(self.bytes_total));
        let (percent, mb) = (self.fraction() * 100.0, self.bytes_per_second as f64 / 1e6);
        let left = self.bytes_total.saturating_sub(self.bytes_done).checked_div(self.bytes_per_second);
        let left = left.filter(|_| self.bytes_done < self.bytes_total);
        let left = left.map(|seconds| format!(", {seconds} s left")).unwrap_or_default();
        format!("{done} of {total} GB ({percent:.0} %), {mb:.0} MB/s{left}{}", self.given())
    }
}

fn gb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_speed_is_that_of_the_last_while() {
        let (progress, start) = (Progress::default(), Instant::now());
        progress.begin(2_000_000_000);
        let seen = |second, more| {
            progress.add(more);
            progress.at(start + Duration::from_secs(second))
        };
        assert_eq!(seen(0, 0).bytes_per_second, 0);
        assert_eq!(seen(1, 100_000_000).bytes_per_second, 100_000_000);
        assert_eq!(seen(2, 300_000_000).line(), "0.40 of 2.00 GB (20 %), 200 MB/s, 8 s left");
        assert_eq!(seen(100, 0).bytes_per_second, 0, "nothing came for a while");
        progress.given(250_000_000);
        assert!(seen(101, 0).line().ends_with(", 0.25 GB of it from other replicas"));
        assert_eq!(Progress::default().at(start).line(), "asking what there is");
    }
}
