//! The formula: signals in, wanted replicas out, one number for each reason.
//!
//! Owns the terms and their constants. Every term says how many replicas *it* would want as a real number; the largest
//! decides. Dividing by the replicas that serve gives the pressure. Knows nothing of limits, windows of patience or
//! readings.

use serde::{Deserialize, Serialize};
use stoker_crds::scaling::ScalingSpec;

use crate::{
    law::ServiceLaw,
    signals::{Flow, Signals},
};

/// A sudden rise is believed when it is this many standard deviations beyond chance. It is looked for every two seconds:
/// beyond three, chance alone would find one every half hour; beyond four, every other day.
const DEVIATIONS_OF_A_JUMP: f64 = 4.0;
/// Terms that only know "too much" (queue, preemptions, latency) ask for at most this multiple of what serves: they
/// cannot tell how much is missing, and the replicas they asked for must arrive before they may ask again.
const BLIND_FACTOR_MAX: f64 = 1.5;
/// Growth is followed this far ahead at most: a line drawn through two minutes means little ten minutes later.
const LEAD_SECONDS_MAX: f64 = 600.0;
/// Foreseen load is at most this multiple of the present one.
const LEAD_FACTOR_MAX: f64 = 2.0;
/// The middle of the stable window lies this far back: a growing rate is already that much higher.
const LAG_SECONDS: f64 = 30.0;
/// Requests that wait are to be gone after this many seconds.
const DRAIN_SECONDS: f64 = 60.0;
/// Room is kept for this many standard deviations of the number in flight.
const DEVIATIONS_OF_CHANCE: f64 = 2.0;
/// One plus the squared coefficient of variation of blocks per request; 0.6 for log-normal sizes as they are observed.
const SIZE_SPREAD: f64 = 1.6;
/// Preemptions in the panic window below which no burst is seen: one unlucky sequence is not a trend.
const BURST_PREEMPTIONS_MIN: u64 = 3;

/// Why replicas are wanted.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    /// Blocks referenced and needed by the waiting.
    Kv,
    /// Blocks that those arriving will reference once they are in flight.
    Arrivals,
    /// Prefill that waits.
    Queue,
    /// Sequences thrown out for lack of blocks.
    Preemptions,
    /// Time to first token above its target.
    Ttft,
    /// Inter-token latency above its target.
    Itl,
    /// Requests held at the gateway while nothing serves.
    Held,
}

/// Which part of the past tells what comes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Mood {
    /// The stable window and its growth.
    Calm,
    /// The first moment of a jump: both windows, whichever says more.
    Onset,
    /// The panic window: load goes on rising beyond chance.
    Jump,
    /// The stable window without its growth: a jump is within it.
    AfterJump,
}

/// One reason and how many replicas it wants.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Term {
    /// The reason.
    pub cause: Cause,
    /// Replicas it wants.
    pub replicas: f64,
}

/// What the load wants, before any limit.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Demand {
    /// Every term that applied, in a fixed order.
    pub terms: Vec<Term>,
    /// Which part of the past was looked at.
    pub mood: Mood,
    /// Preemptions have come in a burst.
    pub is_preempting: bool,
}

impl Demand {
    /// Applies the formula.
    pub fn of(signals: &Signals, law: &ServiceLaw, spec: &ScalingSpec, mood: Mood) -> Self {
        let targets = &spec.targets;
        let mut terms = Vec::with_capacity(6);
        let mut term = |cause, replicas: Option<f64>| terms.extend(replicas.map(|replicas| Term { cause, replicas }));
        term(Cause::Kv, kv_replicas(signals, targets.kv, mood));
        term(Cause::Arrivals, ArrivalTerm::of(signals, law, spec, mood).map(ArrivalTerm::replicas));
        let preemptions = preemptions_per_minute(signals) / targets.preemptions_per_minute;
        let blind = |times_target: f64| blind(times_target, signals);
        let ratio = |measured: Option<f64>, target: Option<f64>| Some(blind(measured? / target?));
        term(Cause::Queue, Some(blind(signals.queue_seconds / targets.queue_seconds)));
        term(Cause::Preemptions, Some(blind(preemptions)));
        term(Cause::Ttft, ratio(signals.ttft_p95_ms, targets.ttft_ms));
        term(Cause::Itl, ratio(signals.itl_p95_ms, targets.itl_ms));
        term(Cause::Held, (signals.held_requests > 0).then_some(1.0));
        Self { terms, mood, is_preempting: preemptions > 1.0 }
    }

    /// The term that wants most; the first of equals.
    pub fn largest(&self) -> Option<Term> {
        self.terms.iter().copied().reduce(|most, term| if term.replicas > most.replicas { term } else { most })
    }

    /// Replicas wanted, as a real number.
    pub fn replicas(&self) -> f64 {
        self.largest().map_or(0.0, |term| term.replicas)
    }
}

/// Replicas wanted by a term that knows only how many times its target is exceeded. While replicas are on their way, or
/// have just arrived, it waits for what they bring.
fn blind(times_target: f64, signals: &Signals) -> f64 {
    let serving = f64::from(signals.coverage.serving);
    let is_settled = signals.coverage.starting == 0 && signals.panic.serving >= serving;
    serving * times_target.min(if is_settled { BLIND_FACTOR_MAX } else { 1.0 })
}

/// Replicas that would bring the referenced blocks to the target if usage were shared out.
fn kv_replicas(signals: &Signals, target: f64, mood: Mood) -> Option<f64> {
    let carried = signals.blocks_per_replica * target;
    (carried > 0.0).then(|| referenced(signals, mood) / carried)
}

/// Blocks referenced; while load jumps, the stable window would still show the calm before.
pub(crate) fn referenced(signals: &Signals, mood: Mood) -> f64 {
    match mood {
        Mood::Calm | Mood::AfterJump => signals.stable.referenced,
        Mood::Onset | Mood::Jump => signals.stable.referenced.max(signals.panic.referenced),
    }
}

/// The arrivals term taken apart: Little's law with the residence that the service law gives for the target usage
/// instead of the one seen now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArrivalTerm {
    /// Requests per second to be ready for.
    pub rate: f64,
    /// Requests per second that those already waiting add, so that they are gone within a minute.
    pub waiting_rate: f64,
    /// KV blocks a request references.
    pub blocks_per_request: f64,
    /// Usage each replica is meant to have: the KV target, or less where requests would be slowed down too much.
    pub kv: f64,
    /// Seconds a request stays in a replica at that usage.
    pub residence_seconds: f64,
    /// KV blocks a replica references at that usage.
    pub carried: f64,
    /// `behavior.spareReplicas`.
    pub spare: f64,
}

impl ArrivalTerm {
    /// Takes the term apart; `None` before anything was learned or while nothing runs.
    pub fn of(signals: &Signals, law: &ServiceLaw, spec: &ScalingSpec, mood: Mood) -> Option<Self> {
        let (line, targets) = (law.line()?, &spec.targets);
        let kv = targets.kv.min(line.kv_at_slowdown(targets.slowdown));
        let carried = signals.blocks_per_replica * kv;
        let blocks_per_request = blocks_per_request(signals, mood)?;
        (carried > 0.0).then(|| Self {
            rate: arrival_rate(signals, mood),
            waiting_rate: signals.panic.waiting / DRAIN_SECONDS,
            blocks_per_request,
            kv,
            residence_seconds: line.residence_seconds(kv),
            carried,
            spare: f64::from(spec.behavior.spare_replicas),
        })
    }

    /// Replicas that carry the mean.
    pub fn mean_replicas(self) -> f64 {
        (self.rate + self.waiting_rate) * self.blocks_per_request * self.residence_seconds / self.carried
    }

    /// Replicas more for chance: the number in flight wanders by its square root, more when sizes differ, and the fewer
    /// there are the more that is. A large fleet pools it.
    pub fn chance_replicas(self) -> f64 {
        let requests_per_replica = (self.carried / self.blocks_per_request).max(1.0);
        DEVIATIONS_OF_CHANCE * (self.mean_replicas() * SIZE_SPREAD / requests_per_replica).sqrt()
    }

    /// Replicas more for what nobody foresees: load that jumps, or a replica that is lost, until another has started.
    /// A number and not a share: what a jump brings does not grow with what was there before. A load that needs less
    /// than one replica gets as much less, so that a trickle does not keep three.
    pub fn spare_replicas(self) -> f64 {
        self.spare * self.mean_replicas().min(1.0)
    }

    /// What the term wants.
    pub fn replicas(self) -> f64 {
        self.mean_replicas() + self.chance_replicas() + self.spare_replicas()
    }
}

/// Blocks a request references; while load jumps, what the newcomers bring counts too.
fn blocks_per_request(signals: &Signals, mood: Mood) -> Option<f64> {
    let of = |flow: &Flow| (flow.running > 0.0 && flow.referenced > 0.0).then(|| flow.referenced / flow.running);
    let stable = of(&signals.stable)?;
    match mood {
        Mood::Calm | Mood::AfterJump => Some(stable),
        Mood::Onset | Mood::Jump => Some(of(&signals.panic).map_or(stable, |panic| panic.max(stable))),
    }
}

/// Requests per second to be ready for.
fn arrival_rate(signals: &Signals, mood: Mood) -> f64 {
    let arrivals = &signals.arrivals;
    let lead = signals.start_seconds.min(LEAD_SECONDS_MAX) + LAG_SECONDS;
    let growth = (1.0 + arrivals.growth_per_second.max(0.0) * lead).min(LEAD_FACTOR_MAX);
    match mood {
        Mood::Calm => arrivals.stable_rate * growth,
        Mood::Onset => arrivals.panic_rate.max(arrivals.stable_rate * growth),
        // A step that is half inside the stable window looks like steep growth; it is not.
        Mood::Jump => arrivals.panic_rate.max(arrivals.stable_rate),
        Mood::AfterJump => arrivals.stable_rate,
    }
}

/// Arrivals beyond [`DEVIATIONS_OF_A_JUMP`] of what the stable window predicts.
pub(crate) fn is_jump(signals: &Signals) -> bool {
    let arrivals = &signals.arrivals;
    let expected = arrivals.stable_rate * arrivals.panic_seconds;
    let arrived = arrivals.panic_rate * arrivals.panic_seconds;
    arrived > expected + DEVIATIONS_OF_A_JUMP * expected.max(1.0).sqrt()
}

/// Preemptions per minute and serving replica: the burst of the panic window if there is one, else the rate of the
/// stable window, which tells nothing about now when replicas have joined within it.
pub(crate) fn preemptions_per_minute(signals: &Signals) -> f64 {
    let serving = f64::from(signals.coverage.serving.max(1));
    let is_unchanged = signals.stable.serving >= serving;
    let window_minutes = signals.coverage.window_seconds.clamp(1.0, 60.0) / 60.0;
    let stable = if is_unchanged { signals.preemptions_stable as f64 / window_minutes } else { 0.0 };
    let panic_minutes = signals.arrivals.panic_seconds.max(1.0) / 60.0;
    let is_burst = signals.preemptions_panic >= BURST_PREEMPTIONS_MIN;
    let burst = if is_burst { signals.preemptions_panic as f64 / panic_minutes } else { 0.0 };
    stable.max(burst) / serving
}
