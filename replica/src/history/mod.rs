//! Load over the last day, in memory and bounded: a sample every ten seconds for ten minutes, a sample a minute for a day. An agent
//! keeps its own ([`Memory`]), an operator that of a deployment; one that begins to lead makes the past of a deployment from those of
//! its agents (`recall`).
//!
//! Reads no clock: samples say when they were taken, by whatever clock their keeper has.

mod memory;
mod recall;

use std::{collections::VecDeque, time::Duration};

use stoker_crds::history::{LoadHistory, LoadSample};

pub use self::{
    memory::Memory,
    recall::{is_believable, reaches_back},
};

/// Between two samples.
pub const SAMPLE_EVERY: Duration = Duration::from_secs(FINE_SECONDS as u64);
const FINE_SECONDS: u32 = 10;
const MINUTE_SECONDS: u32 = 60;
/// Samples kept one by one, and minutes kept.
const FINE: usize = 61;
const MINUTES: usize = 24 * 60;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    fine: VecDeque<LoadSample>,
    minutes: VecDeque<LoadSample>,
    /// Of the minute that is not over.
    open: Vec<LoadSample>,
}

impl Ring {
    /// Takes in a sample. Samples are in order of time; one of the past is dropped.
    pub fn push(&mut self, sample: LoadSample) {
        if self.fine.back().is_some_and(|last| sample.at_seconds <= last.at_seconds) {
            return;
        }
        let minute = |sample: &LoadSample| sample.at_seconds / MINUTE_SECONDS;
        if self.open.last().is_some_and(|last| minute(last) != minute(&sample)) {
            self.minutes.extend(summed_up(&self.open));
            self.open.clear();
        }
        self.open.push(sample);
        self.fine.push_back(sample);
        self.forget();
    }

    /// The last ten minutes, a sample every ten seconds; oldest first.
    pub fn fine(&self) -> impl Iterator<Item = LoadSample> + '_ {
        self.fine.iter().copied()
    }

    /// The last day, a sample a minute and one of the minute that is not over; oldest first.
    pub fn minutes(&self) -> impl Iterator<Item = LoadSample> + '_ {
        self.minutes.iter().copied().chain(summed_up(&self.open))
    }

    /// Puts in front of the first sample what replicas remember of the time before it. They said so at `now_seconds`, by the clock of
    /// this ring's samples.
    pub fn recall(&mut self, told: &[LoadHistory], now_seconds: u32) {
        let first = self.fine.front().map_or(now_seconds, |sample| sample.at_seconds);
        let (fine, minutes) = recall::of_all(told, now_seconds);
        put_in_front(&mut self.fine, fine, first);
        put_in_front(&mut self.minutes, minutes, first - first % MINUTE_SECONDS);
        self.forget();
    }

    /// Bytes that it takes, with room that is not used yet.
    pub fn bytes(&self) -> usize {
        let kept = self.fine.capacity() + self.minutes.capacity() + self.open.capacity();
        kept * size_of::<LoadSample>() + size_of::<Self>()
    }

    fn forget(&mut self) {
        self.fine.drain(..self.fine.len().saturating_sub(FINE));
        self.minutes.drain(..self.minutes.len().saturating_sub(MINUTES));
    }
}

fn put_in_front(samples: &mut VecDeque<LoadSample>, older: Vec<LoadSample>, until_seconds: u32) {
    let older = older.into_iter().filter(|sample| sample.at_seconds < until_seconds);
    older.rev().for_each(|sample| samples.push_front(sample));
}

/// One sample of a time from those of its parts: means, of latencies the worst, because a bad second must not vanish in a good hour.
/// Dated as the last one.
pub fn summed_up(samples: &[LoadSample]) -> Option<LoadSample> {
    let last = samples.last()?;
    let mean = |of: fn(&LoadSample) -> f32| mean(known(samples, of));
    Some(LoadSample {
        at_seconds: last.at_seconds,
        wanted: mean(|one| one.wanted),
        serving: mean(|one| one.serving),
        kv: mean(|one| one.kv),
        running: mean(|one| one.running),
        waiting: mean(|one| one.waiting),
        tokens: mean(|one| one.tokens),
        ttft: worst(known(samples, |one| one.ttft)),
        itl: worst(known(samples, |one| one.itl)),
    })
}

fn known(samples: &[LoadSample], of: fn(&LoadSample) -> f32) -> impl Iterator<Item = f32> + '_ {
    samples.iter().map(of).filter(|value| !value.is_nan())
}

/// Of nothing it is no number, as what is not known.
fn mean(values: impl Iterator<Item = f32>) -> f32 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    sum / count
}

fn worst(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(f32::NAN, f32::max)
}

fn whole_seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u32 = 1_763_856_000;
    const DAY: u32 = 86_400;

    fn sample(at_seconds: u32, running: f32) -> LoadSample {
        LoadSample {
            at_seconds,
            wanted: 1.0,
            serving: 1.0,
            kv: 0.5,
            running,
            waiting: 0.0,
            tokens: 10.0,
            ttft: f32::NAN,
            itl: f32::NAN,
        }
    }

    /// Samples from a time on, for as long.
    fn ring(from_seconds: u32, seconds: u32) -> Ring {
        let mut ring = Ring::default();
        for at_seconds in (from_seconds..=from_seconds + seconds).step_by(FINE_SECONDS as usize) {
            ring.push(sample(at_seconds, 1.0));
        }
        ring
    }

    /// What a replica that has run for so long remembers.
    fn memory(up_seconds: u32) -> LoadHistory {
        let ring = ring(0, up_seconds);
        LoadHistory {
            start_id: "a".to_owned(),
            up_ms: u64::from(up_seconds) * 1000,
            fine: ring.fine().collect(),
            minutes: ring.minutes().collect(),
        }
    }

    #[test]
    fn a_day_takes_less_than_200_bytes_a_minute() {
        let mut kept = ring(START, 2 * DAY);
        assert_eq!((kept.fine.len(), kept.minutes.len()), (FINE, MINUTES));
        assert!(kept.bytes() / MINUTES < 200, "{} bytes", kept.bytes());
        kept = ring(START, 60);
        kept.recall(&vec![memory(2 * DAY); 10], START + 60);
        assert_eq!((kept.fine.len(), kept.minutes.len()), (FINE, MINUTES));
        assert!(kept.bytes() / MINUTES < 200, "{} bytes", kept.bytes());
    }

    #[test]
    fn a_minute_is_the_mean_of_what_is_known_and_the_worst_latency() {
        let of = |kv, ttft| LoadSample { kv, ttft, ..sample(START, 1.0) };
        let whole = summed_up(&[of(0.2, 1.0), of(f32::NAN, 9.0), of(0.4, f32::NAN)]).unwrap();
        assert!((whole.kv - 0.3).abs() < 1e-6 && whole.ttft == 9.0 && whole.itl.is_nan(), "{whole:?}");
        assert!(summed_up(&[]).is_none());
    }

    #[test]
    fn a_clock_that_goes_back_adds_nothing() {
        let mut kept = ring(START, 0);
        kept.push(sample(START - 50, 9.0));
        kept.push(sample(START, 9.0));
        assert_eq!(kept.fine().count(), 1);
    }

    #[test]
    fn what_replicas_remember_stands_before_the_first_sample_and_none_counts_twice() {
        let mut kept = ring(START, 10);
        // Two of them ran for an hour, one for five minutes.
        kept.recall(&[memory(3600), memory(3607), memory(300)], START + 15);
        let samples: Vec<LoadSample> = kept.minutes().collect();
        assert!(samples.is_sorted_by(|a, b| a.at_seconds < b.at_seconds), "{samples:?}");
        let running: Vec<f32> = samples.iter().map(|one| one.running).collect();
        assert_eq!(running[running.len() - 1], 1.0, "what is seen now stands");
        assert_eq!(running[running.len() - 4..running.len() - 1], [3.0; 3]);
        assert_eq!(running[5..50], [2.0; 45]);
        assert!(samples[..50].iter().all(|one| one.kv == 0.5 && one.serving == 2.0 && one.wanted.is_nan()));
        assert_eq!(kept.fine().filter(|one| one.at_seconds == START).count(), 1);
    }

    #[test]
    fn a_replica_that_is_younger_is_no_witness() {
        assert!(reaches_back(&memory(300), 299) && !reaches_back(&memory(300), 300));
        assert!(!reaches_back(&LoadHistory::default(), 0));
    }

    #[test]
    fn nothing_remembered_changes_nothing() {
        let mut kept = ring(START, 30);
        kept.recall(&[], START + 30);
        kept.recall(&[LoadHistory::default()], START + 30);
        assert_eq!((kept.fine().count(), kept.minutes().count()), (4, 1));
    }
}
