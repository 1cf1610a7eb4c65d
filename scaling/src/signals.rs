//! What the decision looks at: a load window reduced to a few numbers.
//!
//! Owns the reduction and nothing else. The numbers are all a replay needs, so a record carries them whole.

use serde::{Deserialize, Serialize};
use stoker_cost::{Spent, StepCost};
use stoker_crds::scaling::{STABLE_WINDOW_SECONDS_MAX, ScalingSpec};
use stoker_replica::NotFresh;

use crate::{
    held::Holders,
    standby::Standby,
    startup::ASSUMED_START_SECONDS,
    window::{LoadWindow, Standing, Totals},
};

/// Replicas named in a record as not fresh; more are only counted.
const NAMED_NOT_FRESH: usize = 4;
/// Arrivals are counted in stretches of this many ticks, as long as a panic window, over so many seconds.
const DISPERSION_TICKS: usize = 3;
const DISPERSION_SECONDS: f64 = 600.0;
/// Growth is what is left of a difference beyond so many standard deviations.
const DEVIATIONS_OF_GROWTH: f64 = 2.0;
/// Stretches that Poisson arrivals are taken to have shown already.
const DISPERSION_DOUBT: f64 = 10.0;

/// Arrivals of so long are the past that the last minute is compared with.
const LONG_SECONDS: f64 = 600.0;
/// What a request takes is looked at over so long, and over so many requests.
const WORK_SECONDS: f64 = 300.0;
const REQUESTS_MIN: f64 = 5.0;
/// The largest spread of what requests take that is believed, and the one assumed before any ended.
const SPREAD_MAX: f64 = 10.0;
const SPREAD_ASSUMED: f64 = 2.0;

/// The inputs of one decision.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Signals {
    /// Who was there and who could be believed.
    pub coverage: Coverage,
    /// KV blocks one replica has.
    pub blocks_per_replica: f64,
    /// What ran over the stable window.
    pub stable: Flow,
    /// What ran over the panic window.
    pub panic: Flow,
    /// How requests arrive.
    pub arrivals: Arrivals,
    /// What requests take, as the engines say; `None` while one of them does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
    /// Seconds of prefill waiting in front of each replica, mean of the panic window.
    pub queue_seconds: f64,
    /// Preemptions within the stable window.
    pub preemptions_stable: u64,
    /// Preemptions within the panic window.
    pub preemptions_panic: u64,
    /// 95th percentile of the time to first token, milliseconds, of the replica where it is largest.
    pub ttft_p95_ms: Option<f64>,
    /// 95th percentile of the inter-token latency, milliseconds, of the replica where it is largest.
    pub itl_p95_ms: Option<f64>,
    /// Learned 90th percentile of the start time; where nodes stand by, of starts elsewhere.
    pub start_seconds: f64,
    /// Nodes that stand by; `None` where none is asked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<Standby>,
    /// Requests that gateways have in line, because replicas have no room for them or nothing serves.
    pub held_requests: u32,
    /// Who would hold requests while nothing serves.
    #[serde(default)]
    pub holders: Holders,
    /// Seconds since a request was last seen, or could have been missed.
    pub idle_seconds: f64,
    /// Variance of the counts of arrivals over their mean: 1 for Poisson arrivals, 16 where gaps vary by four times their mean.
    pub dispersion: f64,
}

/// How many replicas there are, and how many of the serving ones could be believed.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Coverage {
    /// Replicas that serve.
    pub serving: u32,
    /// Of those, replicas whose reading is fresh.
    pub fresh: u32,
    /// Replicas on their way in.
    pub starting: u32,
    /// Replicas on their way out.
    pub draining: u32,
    /// Replicas that served and do not any more: they have a pod and carry nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub broken: u32,
    /// Some of the serving replicas that are not fresh, with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_fresh: Vec<(String, NotFresh)>,
    /// Fresh replicas that do not say what their steps cost, as agents of before; `None` where all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untold: Option<Untold>,
    /// Seconds of history there are.
    pub window_seconds: f64,
}

/// Replicas that serve and do not say what their steps cost.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Untold {
    /// How many, at least one.
    pub replicas: u32,
    /// One of them.
    pub example: String,
}

impl Untold {
    /// `None` of none.
    fn of<'a>(mut names: impl Iterator<Item = &'a str>) -> Option<Self> {
        let example = names.next()?.to_owned();
        Some(Self { replicas: 1 + u32::try_from(names.count()).expect("fewer than 2^32 replicas"), example })
    }
}

impl Coverage {
    /// Share of the serving replicas whose reading is fresh.
    pub fn share(&self) -> f64 {
        if self.serving == 0 { 0.0 } else { f64::from(self.fresh) / f64::from(self.serving) }
    }
}

/// What ran, over all serving replicas, as means of a window.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Flow {
    /// Replicas that served.
    pub serving: f64,
    /// KV blocks referenced.
    pub referenced: f64,
    /// Sequences being computed.
    pub running: f64,
    /// Requests waiting.
    pub waiting: f64,
    /// Requests per second that went through: the mean of those that began to run and those that ended.
    pub through_rate: f64,
}

impl Flow {
    /// Seconds that requests stay, by Little's law. While none goes through, at least as long as the window.
    pub(crate) fn stay_seconds(&self, window_seconds: f64) -> f64 {
        if self.running < 1.0 {
            0.0
        } else if self.through_rate > 0.0 {
            self.running / self.through_rate
        } else {
            window_seconds
        }
    }
}

/// How requests arrive, in requests per second.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Arrivals {
    /// Over the panic window.
    pub panic_rate: f64,
    /// Over the stable window.
    pub stable_rate: f64,
    /// Seconds the stable window really covers.
    pub stable_seconds: f64,
    /// Over the last ten minutes.
    pub long_rate: f64,
    /// Seconds the panic window really covers.
    pub panic_seconds: f64,
    /// Relative growth per second over the last minutes, 0 when it is within chance.
    pub growth_per_second: f64,
}

/// What the requests of the last minutes took of the replicas, by what steps cost there.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Work {
    /// What a step costs, mean of the replicas.
    pub cost: StepCost,
    /// Seconds of work of one request.
    pub request_seconds: f64,
    /// Mean of their squares over the square of their mean: 1 where all are alike.
    pub spread: f64,
    /// Tokens of an answer.
    pub answer_tokens: f64,
    /// How many times as long as the mean replica the slowest one takes for it.
    #[serde(default = "as_long")]
    pub slowest: f64,
}

impl Work {
    /// The same on the slowest replica.
    pub(crate) fn of_the_slowest(self) -> Self {
        let Self { cost, request_seconds, slowest, .. } = self;
        Self { cost: cost.times(slowest), request_seconds: request_seconds * slowest, slowest: as_long(), ..self }
    }
}

/// Of what was written when nobody asked.
fn as_long() -> f64 {
    1.0
}

impl Signals {
    /// Reduces a window.
    pub fn of(window: &LoadWindow, spec: &ScalingSpec, now_ms: u64) -> Self {
        let start_seconds = window.start_seconds().unwrap_or(ASSUMED_START_SECONDS);
        let past = Past { window, now_ms };
        let panic = past.last(spec.behavior.panic_window_seconds);
        let stable = past.last(spec.behavior.stable_window_seconds);
        let newest = panic.last();
        Self {
            coverage: past.coverage(),
            blocks_per_replica: newest.map_or(0.0, |totals| totals.blocks_per_replica),
            stable: past.flow(stable),
            panic: past.flow(panic),
            arrivals: past.arrivals(spec, start_seconds),
            work: past.work(),
            queue_seconds: mean(panic, |totals| totals.queue_seconds),
            preemptions_stable: stable.iter().map(|totals| totals.preemptions).sum(),
            preemptions_panic: panic.iter().map(|totals| totals.preemptions).sum(),
            ttft_p95_ms: newest.and_then(|totals| totals.ttft_p95_seconds).map(|seconds| seconds * 1000.0),
            itl_p95_ms: newest.and_then(|totals| totals.itl_p95_seconds).map(|seconds| seconds * 1000.0),
            start_seconds,
            standby: window.standby(),
            held_requests: window.held().requests,
            holders: window.held().by.clone(),
            idle_seconds: window.busy_ms().map_or(0.0, |busy_ms| seconds_between(busy_ms, now_ms)),
            dispersion: past.dispersion(),
        }
    }

    /// The same if starts are warm; `None` where the next one is not, or none was seen.
    pub(crate) fn warm(&self) -> Option<Self> {
        let start_seconds = self.standby?.next_start_seconds()?;
        Some(Self { start_seconds, ..self.clone() })
    }

    /// How long the next replica takes to start, as it was seen; `None` where a node stands by for it and no start on such a node was seen.
    pub fn next_start_seconds(&self) -> Option<f64> {
        match self.standby {
            Some(Standby { nodes: 1.., start_seconds }) => start_seconds,
            Some(Standby { nodes: 0, .. }) | None => Some(self.start_seconds),
        }
    }
}

/// Growth compares two halves of this length: at least as long as a start takes, which is how far ahead it is used.
pub(crate) fn growth_half_seconds(spec: &ScalingSpec, start_seconds: f64) -> f64 {
    f64::from(spec.behavior.stable_window_seconds).max(start_seconds).min(f64::from(STABLE_WINDOW_SECONDS_MAX))
}

struct Past<'a> {
    window: &'a LoadWindow,
    now_ms: u64,
}

impl<'a> Past<'a> {
    fn ticks(&self) -> &'a [Totals] {
        self.window.ticks()
    }

    /// Ticks younger than `seconds`.
    fn last(&self, seconds: u32) -> &'a [Totals] {
        self.between(f64::from(seconds), 0.0)
    }

    /// Ticks younger than `from` and at least `to` seconds old.
    fn between(&self, from: f64, to: f64) -> &'a [Totals] {
        let ticks = self.ticks();
        let older_than =
            |seconds: f64| ticks.partition_point(|totals| seconds_between(totals.at_ms, self.now_ms) >= seconds);
        let (first, end) = (older_than(from), if to > 0.0 { older_than(to) } else { ticks.len() });
        &ticks[first.min(end)..end]
    }

    fn coverage(&self) -> Coverage {
        let serving = self.window.count(Standing::Serving);
        let not_fresh = self.window.not_fresh(self.now_ms).count();
        let named = self.window.not_fresh(self.now_ms).take(NAMED_NOT_FRESH);
        Coverage {
            serving,
            fresh: serving - u32::try_from(not_fresh).expect("fewer than 2^32 replicas"),
            starting: self.window.count(Standing::Starting),
            draining: self.window.count(Standing::Draining),
            broken: self.window.count(Standing::Broken),
            not_fresh: named.map(|(id, why)| (id.to_owned(), why)).collect(),
            untold: Untold::of(self.window.untold(self.now_ms)),
            window_seconds: self.ticks().first().map_or(0.0, |oldest| seconds_between(oldest.at_ms, self.now_ms)),
        }
    }

    fn arrivals(&self, spec: &ScalingSpec, start_seconds: f64) -> Arrivals {
        let (panic_rate, panic_seconds) = self.rate(f64::from(spec.behavior.panic_window_seconds), 0.0);
        let (stable_rate, stable_seconds) = self.rate(f64::from(spec.behavior.stable_window_seconds), 0.0);
        Arrivals {
            panic_rate,
            stable_rate,
            stable_seconds,
            long_rate: self.rate(LONG_SECONDS, 0.0).0,
            panic_seconds,
            growth_per_second: self.growth(growth_half_seconds(spec, start_seconds)),
        }
    }

    /// Work of the last minutes over the requests that went through. Until enough ended, and where one engine does not say what
    /// steps cost, nothing.
    fn work(&self) -> Option<Work> {
        let newest = self.ticks().last()?;
        let cost = newest.cost.filter(|_| self.window.untold(self.now_ms).next().is_none())?;
        let ticks = self.between(WORK_SECONDS, 0.0);
        let (first, last) = (ticks.first()?, ticks.last()?);
        let spent = ticks.iter().fold(Spent::default(), |sum, totals| sum.and(&totals.spent));
        let finished: u64 = ticks.iter().map(|totals| totals.finished).sum();
        let through = finished as f64 + (last.running - first.running) / 2.0;
        if through < REQUESTS_MIN {
            return None;
        }
        let work_seconds = cost.work_seconds(spent.work());
        let each = self.window.costs(self.now_ms).map(|cost| cost.work_seconds(spent.work()));
        let (done, ended) = (work_seconds / through, spent.request_seconds / spent.requests.max(1.0));
        let mean_of_squares = spent.request_seconds_squared / spent.requests.max(1.0);
        Some(Work {
            cost,
            request_seconds: done,
            spread: if ended > 0.0 {
                (mean_of_squares / (ended * ended)).clamp(1.0, SPREAD_MAX)
            } else {
                SPREAD_ASSUMED
            },
            answer_tokens: spent.decodes / through,
            slowest: if work_seconds > 0.0 { each.fold(work_seconds, f64::max) / work_seconds } else { as_long() },
        })
    }

    /// Arrivals per second between two ages, and the seconds this covers.
    fn rate(&self, from: f64, to: f64) -> (f64, f64) {
        let ticks = self.between(from, to);
        let covered = self.covered(ticks);
        let arrivals: i64 = ticks.iter().map(|totals| totals.arrivals).sum();
        if covered > 0.0 { (arrivals.max(0) as f64 / covered, covered) } else { (0.0, 0.0) }
    }

    /// A tick's arrivals came between the tick before and itself; the very first tick has no such time.
    fn covered(&self, ticks: &[Totals]) -> f64 {
        let (Some(first), Some(last)) = (ticks.first(), ticks.last()) else { return 0.0 };
        let idx = self.ticks().partition_point(|totals| totals.at_ms < first.at_ms);
        let since = if idx == 0 { first.at_ms } else { self.ticks()[idx - 1].at_ms };
        seconds_between(since, last.at_ms)
    }

    fn flow(&self, ticks: &[Totals]) -> Flow {
        let (Some(first), Some(last)) = (ticks.first(), ticks.last()) else { return Flow::default() };
        let finished: u64 = ticks.iter().map(|totals| totals.finished).sum();
        let covered = self.covered(ticks);
        // Those that began are those that ended plus the growth of those that run.
        let through = finished as f64 + (last.running - first.running) / 2.0;
        Flow {
            serving: mean(ticks, |totals| f64::from(totals.serving)),
            referenced: mean(ticks, |totals| totals.referenced),
            running: mean(ticks, |totals| totals.running),
            waiting: mean(ticks, |totals| totals.waiting),
            through_rate: if covered > 0.0 { (through / covered).max(0.0) } else { 0.0 },
        }
    }

    /// How much more counts of arrivals vary than those of a Poisson process. Neighbouring counts are compared, so that
    /// growth hardly shows and a step only once; the largest difference is left out for that one.
    fn dispersion(&self) -> f64 {
        let ticks = self.between(DISPERSION_SECONDS, 0.0);
        let count = |ticks: &[Totals]| ticks.iter().map(|totals| totals.arrivals).sum::<i64>().max(0) as f64;
        let counts: Vec<f64> = ticks.chunks_exact(DISPERSION_TICKS).map(count).collect();
        let mean = counts.iter().sum::<f64>() / counts.len().max(1) as f64;
        if mean <= 0.0 {
            return 1.0;
        }
        let differences = counts.windows(2).map(|pair| (pair[1] - pair[0]).powi(2) / 2.0 / mean);
        let (n, sum, most) = differences.fold((0.0_f64, 0.0_f64, 0.0_f64), |(n, sum, most), difference| {
            (n + 1.0, sum + difference, most.max(difference))
        });
        let n = (n - 1.0).max(0.0);
        ((sum - most + DISPERSION_DOUBT) / (n + DISPERSION_DOUBT)).max(1.0)
    }

    /// Relative growth per second from the half window before to the last one, as far as the counts differ by more than chance
    /// would have it.
    fn growth(&self, half: f64) -> f64 {
        let ((late, late_seconds), (early, early_seconds)) = (self.rate(half, 0.0), self.rate(2.0 * half, half));
        let is_covered = late_seconds >= 0.8 * half && early_seconds >= 0.8 * half;
        let variance = self.dispersion() * (late / late_seconds.max(1.0) + early / early_seconds.max(1.0));
        let doubt = DEVIATIONS_OF_GROWTH * variance.sqrt();
        // Without a late arrival there is no rate that could grow, and a division by it would not survive a record.
        if !is_covered || early <= 0.0 || late <= 0.0 || (late - early).abs() < doubt {
            return 0.0;
        }
        (late - early - doubt.copysign(late - early)) / (late * half)
    }
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn mean(ticks: &[Totals], of: fn(&Totals) -> f64) -> f64 {
    if ticks.is_empty() { 0.0 } else { ticks.iter().map(of).sum::<f64>() / ticks.len() as f64 }
}

fn seconds_between(from_ms: u64, to_ms: u64) -> f64 {
    to_ms.saturating_sub(from_ms) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_as_long_as_littles_law_says_and_a_window_while_none_goes_through() {
        let stay = |running, through_rate| Flow { running, through_rate, ..Flow::default() }.stay_seconds(60.0);
        assert_eq!([stay(60.0, 6.0), stay(1.0, 2.0)], [10.0, 0.5]);
        assert_eq!([stay(60.0, 0.0), stay(0.5, 0.001)], [60.0, 0.0]);
    }
}
