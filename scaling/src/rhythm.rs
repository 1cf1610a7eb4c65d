//! The memory of when load jumped: load that jumps at even intervals is met before it does so for the fourth time.
//!
//! Owns the last few edges, each with the rate before and after it. An edge that was announced and did not come makes all of them
//! forgotten. Only ever a reason for more replicas, and only for the minutes around an edge; never decides.

use serde::{Deserialize, Serialize};

use crate::signals::Signals;

/// Edges remembered: as many as must be seen before the next one is believed.
const EDGES: usize = 3;
/// Arrivals that rise again after so long are another jump if the rate is still at most this many times what it was before: the first
/// was chance then.
const APART_SECONDS: f64 = 20.0;
const STILL: f64 = 1.2;
/// A jump that lasts does so within this time, twice that over which rates are measured.
const LASTS_SECONDS: f64 = 120.0;
/// The rate after an edge is the highest of so long.
const AFTER_SECONDS: f64 = 300.0;
/// An edge makes the rate at least this many times what it was, by at least so many standard deviations of a minute's arrivals.
const TIMES: f64 = 1.5;
const DEVIATIONS: f64 = 4.0;
/// Two intervals are the same if the longer is longer by at most this part.
const UNEVEN: f64 = 0.12;
/// The next edge is waited for from this part of an interval before its time to as long after it.
const EARLY_OR_LATE: f64 = 0.1;
/// Shorter ones are met by replicas that are kept anyway.
const PERIOD_SECONDS_MIN: f64 = 300.0;
/// A new replica is asked for this much earlier than a start takes.
const MARGIN_SECONDS: f64 = 10.0;

/// See the module.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Rhythm {
    /// The oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    edges: Vec<Edge>,
    /// A jump of which it is not known yet whether it lasts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    jump: Option<Edge>,
    /// When arrivals last rose as in a jump.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rose_ms: Option<u64>,
}

/// A jump that lasted.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Edge {
    at_ms: u64,
    /// Requests per second before and after.
    before: f64,
    after: f64,
}

/// An edge that is expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Foreseen {
    /// Seconds between the last edges.
    pub period_seconds: f64,
    /// Seconds until the next one, below 0 when it is late.
    pub in_seconds: f64,
    /// Requests per second after it.
    pub rate: f64,
}

impl Rhythm {
    /// What has a later date gets this one.
    pub fn not_after(&mut self, now_ms: u64) {
        for edge in self.edges.iter_mut().chain(&mut self.jump) {
            edge.at_ms = edge.at_ms.min(now_ms);
        }
        self.rose_ms = self.rose_ms.map(|rose_ms| rose_ms.min(now_ms));
    }

    /// Learns from a decision's signals; `is_rising` says that load jumps right now.
    pub fn learn(&mut self, signals: &Signals, is_rising: bool, now_ms: u64) {
        let rate = signals.arrivals.stable_rate;
        let is_apart = self.rose_ms.is_none_or(|rose_ms| seconds(rose_ms, now_ms) > APART_SECONDS);
        self.jump = self.jump.filter(|jump| seconds(jump.at_ms, now_ms) < LASTS_SECONDS);
        let is_new = self.edges.last().is_none_or(|edge| seconds(edge.at_ms, now_ms) > LASTS_SECONDS);
        let is_another = self.jump.map_or(is_new, |jump| is_apart && rate <= STILL * jump.before);
        self.rose_ms = if is_rising { Some(now_ms) } else { self.rose_ms };
        if is_rising && is_another {
            self.jump = Some(Edge { at_ms: now_ms, before: rate, after: rate });
        }
        if let Some(jump) = &mut self.jump {
            jump.after = jump.after.max(rate);
            if jump.lasts(signals) {
                self.edges.extend(self.jump.take());
                if self.edges.len() > EDGES {
                    self.edges.remove(0);
                }
            }
        }
        if let Some(edge) = self.edges.last_mut().filter(|edge| seconds(edge.at_ms, now_ms) <= AFTER_SECONDS) {
            edge.after = edge.after.max(rate);
        }
        // What was announced did not come, unless this jump turns out to be it.
        let is_due =
            |at_ms| self.next(at_ms).is_some_and(|next| next.in_seconds >= -EARLY_OR_LATE * next.period_seconds);
        if !is_due(self.jump.map_or(now_ms, |jump| jump.at_ms)) && self.next(now_ms).is_some() {
            self.edges.clear();
        }
    }

    /// The edge for which replicas are to start now or to wait.
    pub fn foreseen(&self, signals: &Signals, now_ms: u64) -> Option<Foreseen> {
        let next = self.next(now_ms)?;
        let ahead = EARLY_OR_LATE * next.period_seconds + signals.start_seconds + MARGIN_SECONDS;
        (next.in_seconds <= ahead).then_some(next)
    }

    fn next(&self, now_ms: u64) -> Option<Foreseen> {
        let [first, second, third] = self.edges[..] else { return None };
        let (early, late) = (seconds(first.at_ms, second.at_ms), seconds(second.at_ms, third.at_ms));
        let period_seconds = (early + late) / 2.0;
        let is_even = early.max(late) <= (1.0 + UNEVEN) * early.min(late) && period_seconds >= PERIOD_SECONDS_MIN;
        is_even.then(|| Foreseen {
            period_seconds,
            in_seconds: period_seconds - seconds(third.at_ms, now_ms),
            rate: (first.after + second.after + third.after) / 3.0,
        })
    }
}

impl Edge {
    fn lasts(&self, signals: &Signals) -> bool {
        let seconds = signals.arrivals.stable_seconds.max(1.0);
        let chance = (signals.dispersion * self.before.max(1.0 / seconds) * seconds).sqrt();
        self.after >= TIMES * self.before && (self.after - self.before) * seconds > DEVIATIONS * chance
    }
}

fn seconds(from_ms: u64, to_ms: u64) -> f64 {
    to_ms.saturating_sub(from_ms) as f64 / 1000.0
}
