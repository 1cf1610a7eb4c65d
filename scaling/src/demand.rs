//! The formula: signals in, wanted replicas out, one number for each reason.
//!
//! Owns the terms and their constants. Every term says how many replicas *it* would want as a real number; the largest
//! decides. Dividing by the replicas that serve gives the pressure. Knows nothing of limits, windows of patience or
//! readings.

use serde::{Deserialize, Serialize};
use stoker_crds::scaling::ScalingSpec;

use crate::{
    law::ServiceLaw,
    signals::{Arrivals, Flow, Signals},
    standby::Standby,
    work::WorkTerm,
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
/// How a rate differs from that of the last minutes is believed as far as its square exceeds the variance of chance times this.
const DOUBT_OF_DIFFERENCE: f64 = 2.0;
/// Requests that wait are to be gone after this many seconds.
const DRAIN_SECONDS: f64 = 60.0;
/// Room is kept for this many standard deviations of the number in flight.
const DEVIATIONS_OF_CHANCE: f64 = 2.0;
/// One plus the squared coefficient of variation of blocks per request; 0.6 for log-normal sizes as they are observed.
const SIZE_SPREAD: f64 = 1.6;
/// How many times as long as alone a request may stay, and how many replicas are kept spare, where engines do not say what their
/// steps cost and nobody says otherwise.
const SLOWDOWN: f64 = 4.0;
const SPARE_REPLICAS: u32 = 2;
/// Load of so many replicas keeps half of the spare ones.
const HALF_SPARE_REPLICAS: f64 = 2.0;
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
    /// The work of those arriving, by what steps cost.
    Work,
    /// Prefill that waits.
    Queue,
    /// Sequences thrown out for lack of blocks.
    Preemptions,
    /// Time to first token above its target.
    Ttft,
    /// Inter-token latency above its target.
    Itl,
    /// Requests that gateways hold.
    Held,
    /// The work of those that come with the next edge of a load that jumps at even intervals.
    Period,
}

/// Which part of the past tells what comes.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Regime {
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
    /// Which part of the past was looked at; `mood` in records of before 2026-11-29.
    #[serde(alias = "mood")]
    pub regime: Regime,
    /// Preemptions have come in a burst.
    pub is_preempting: bool,
}

impl Demand {
    /// Applies the formula.
    pub fn of(signals: &Signals, law: &ServiceLaw, spec: &ScalingSpec, regime: Regime) -> Self {
        let targets = &spec.targets;
        let mut terms = Vec::with_capacity(6);
        let mut term = |cause, replicas: Option<f64>| terms.extend(replicas.map(|replicas| Term { cause, replicas }));
        term(Cause::Kv, kv_replicas(signals, targets.kv, regime));
        let work = WorkTerm::of(signals, spec, regime);
        term(Cause::Work, work.map(WorkTerm::replicas));
        let by_law = ArrivalTerm::of(signals, law, spec, regime).filter(|_| signals.coverage.untold.is_some());
        term(Cause::Arrivals, by_law.map(ArrivalTerm::replicas));
        let preemptions = preemptions_per_minute(signals) / targets.preemptions_per_minute;
        let blind = |times_target: f64| blind(times_target, signals);
        let ratio = |measured: Option<f64>, target: Option<f64>| Some(blind(measured? / target?));
        // Where it is known what requests take, those that wait are part of the work.
        let queue = blind(signals.queue_seconds / targets.queue_seconds);
        term(Cause::Queue, work.is_none().then_some(queue));
        term(Cause::Preemptions, Some(blind(preemptions)));
        term(Cause::Ttft, ratio(signals.ttft_p95_ms, targets.ttft_ms));
        term(Cause::Itl, ratio(signals.itl_p95_ms, targets.itl_ms));
        Self { terms, regime, is_preempting: preemptions > 1.0 }
    }

    /// The term that wants most; the first of equals.
    pub fn largest(&self) -> Option<Term> {
        self.terms.iter().copied().reduce(|most, term| if term.replicas > most.replicas { term } else { most })
    }

    /// Replicas that do what is wanted if the slowest one is among them, which does less than the mean one. Those that go may be the faster
    /// ones, and where the rest then could not do it, one that went would be wanted back at once.
    pub fn if_the_slowest_stays(&self, signals: &Signals, spec: &ScalingSpec) -> f64 {
        let lack = WorkTerm::lack_of_the_slowest(signals, spec, self.regime);
        let of = |term: &Term| term.replicas + if term.cause == Cause::Work { lack } else { 0.0 };
        self.terms.iter().map(of).fold(0.0, f64::max)
    }

    /// The same where nodes stand by, and this is wanted within a warm start: a term that looks ahead wants what the longer of both
    /// looks ahead for, less what they can still start by then.
    #[must_use]
    pub(crate) fn with_standby(mut self, standby: Standby, warm: &Self) -> Self {
        for term in &mut self.terms {
            term.replicas = standby.replicas(warm.replicas_of(term.cause), term.replicas);
        }
        self
    }

    /// Replicas that a term wants; 0 where it does not apply.
    pub(crate) fn replicas_of(&self, cause: Cause) -> f64 {
        self.terms.iter().find(|term| term.cause == cause).map_or(0.0, |term| term.replicas)
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
fn kv_replicas(signals: &Signals, target: f64, regime: Regime) -> Option<f64> {
    let carried = signals.blocks_per_replica * target;
    (carried > 0.0).then(|| referenced(signals, regime) / carried)
}

/// Blocks referenced; while load jumps, the stable window would still show the calm before.
pub(crate) fn referenced(signals: &Signals, regime: Regime) -> f64 {
    match regime {
        Regime::Calm | Regime::AfterJump => signals.stable.referenced,
        Regime::Onset | Regime::Jump => signals.stable.referenced.max(signals.panic.referenced),
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
    pub fn of(signals: &Signals, law: &ServiceLaw, spec: &ScalingSpec, regime: Regime) -> Option<Self> {
        let (line, targets) = (law.line()?, &spec.targets);
        let kv = targets.kv.min(line.kv_at_slowdown(targets.slowdown.unwrap_or(SLOWDOWN)));
        let carried = signals.blocks_per_replica * kv;
        let blocks_per_request = blocks_per_request(signals, regime)?;
        (carried > 0.0).then(|| Self {
            rate: arrival_rate(signals, regime),
            waiting_rate: signals.panic.waiting / DRAIN_SECONDS,
            blocks_per_request,
            kv,
            residence_seconds: line.residence_seconds(kv),
            carried,
            spare: f64::from(spec.behavior.spare_replicas.unwrap_or(SPARE_REPLICAS)),
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
    /// A number and not a share: what a jump brings does not grow with what was there before. But what it makes late does,
    /// while a spare replica always costs the same, so the smaller the load the less of it is kept.
    pub fn spare_replicas(self) -> f64 {
        let mean = self.mean_replicas();
        self.spare * mean / (mean + HALF_SPARE_REPLICAS)
    }

    /// What the term wants.
    pub fn replicas(self) -> f64 {
        self.mean_replicas() + self.chance_replicas() + self.spare_replicas()
    }
}

/// Blocks a request references; while load jumps, what the newcomers bring counts too.
pub(crate) fn blocks_per_request(signals: &Signals, regime: Regime) -> Option<f64> {
    let of = |flow: &Flow| (flow.running > 0.0 && flow.referenced > 0.0).then(|| flow.referenced / flow.running);
    let stable = of(&signals.stable)?;
    match regime {
        Regime::Calm | Regime::AfterJump => Some(stable),
        Regime::Onset | Regime::Jump => Some(of(&signals.panic).map_or(stable, |panic| panic.max(stable))),
    }
}

/// Requests per second to be ready for.
pub(crate) fn arrival_rate(signals: &Signals, regime: Regime) -> f64 {
    let arrivals = &signals.arrivals;
    let lead = signals.start_seconds.min(LEAD_SECONDS_MAX) + LAG_SECONDS;
    let growth = (1.0 + arrivals.growth_per_second.max(0.0) * lead).min(LEAD_FACTOR_MAX);
    let stable = settled_rate(signals);
    match regime {
        Regime::Calm => stable * growth,
        Regime::Onset => arrivals.panic_rate.max(stable * growth),
        // A step that is half inside the stable window looks like steep growth; it is not.
        Regime::Jump => arrivals.panic_rate.max(stable),
        Regime::AfterJump => stable,
    }
}

/// The rate of the stable window as far as chance does not explain how it differs from that of the last minutes (James and Stein,
/// 1961): otherwise the highest of many noisy readings would be followed.
fn settled_rate(signals: &Signals) -> f64 {
    let Arrivals { stable_rate, long_rate, stable_seconds, .. } = signals.arrivals;
    let chance = signals.dispersion * long_rate / stable_seconds.max(1.0);
    let difference = stable_rate - long_rate;
    let believed = (1.0 - DOUBT_OF_DIFFERENCE * chance / (difference * difference).max(f64::MIN_POSITIVE)).max(0.0);
    long_rate + believed * difference
}

/// Arrivals beyond [`DEVIATIONS_OF_A_JUMP`] of what the stable window predicts, for arrivals as bursty as these are.
pub(crate) fn is_jump(signals: &Signals) -> bool {
    let arrivals = &signals.arrivals;
    let expected = arrivals.stable_rate * arrivals.panic_seconds;
    let arrived = arrivals.panic_rate * arrivals.panic_seconds;
    arrived > expected + DEVIATIONS_OF_A_JUMP * (signals.dispersion * expected.max(1.0)).sqrt()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        held::Holders,
        signals::{Arrivals, Coverage, Untold},
    };

    fn untold() -> Untold {
        Untold { replicas: 1, example: "r".to_owned() }
    }

    /// Three replicas of 1000 blocks: 60 requests of 20 blocks each run, six come and go a second.
    fn signals() -> Signals {
        let flow = Flow { serving: 3.0, referenced: 1200.0, running: 60.0, waiting: 0.0, through_rate: 6.0 };
        Signals {
            coverage: Coverage {
                serving: 3,
                fresh: 3,
                untold: Some(untold()),
                window_seconds: 60.0,
                ..Coverage::default()
            },
            blocks_per_replica: 1000.0,
            stable: flow,
            panic: flow,
            arrivals: Arrivals {
                panic_rate: 6.0,
                stable_rate: 6.0,
                panic_seconds: 6.0,
                growth_per_second: 0.0,
                ..Arrivals::default()
            },
            queue_seconds: 0.0,
            preemptions_stable: 0,
            preemptions_panic: 0,
            ttft_p95_ms: None,
            itl_p95_ms: None,
            start_seconds: 30.0,
            standby: None,
            held_requests: 0,
            holders: Holders::All,
            idle_seconds: 0.0,
            dispersion: 1.0,
            work: None,
        }
    }

    /// What those signals teach: ten seconds of stay at 40 % KV, so `alone` is 10 / 3.4 with the prior slope of six.
    fn law() -> ServiceLaw {
        let mut law = ServiceLaw::default();
        law.learn(&signals(), 60.0, 10_000_000);
        law
    }

    fn spec() -> ScalingSpec {
        ScalingSpec::between(1, 10)
    }

    fn arrival_term(signals: &Signals) -> Option<ArrivalTerm> {
        ArrivalTerm::of(signals, &law(), &spec(), Regime::Calm)
    }

    fn wanted(signals: &Signals, spec: &ScalingSpec, cause: Cause) -> Option<f64> {
        let demand = Demand::of(signals, &law(), spec, Regime::Calm);
        demand.terms.iter().find(|term| term.cause == cause).map(|term| term.replicas)
    }

    fn check(found: Option<f64>, expected: f64) {
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-9), "{found:?}, not {expected}");
    }

    #[test]
    fn arrivals_want_what_littles_law_says_for_the_usage_that_slows_down_four_times() {
        let mut signals = signals();
        signals.panic.waiting = 30.0;
        let term = arrival_term(&signals).unwrap();
        assert_eq!((term.rate, term.waiting_rate, term.blocks_per_request, term.spare), (6.0, 0.5, 20.0, 2.0));
        check(Some(term.kv), 0.5);
        check(Some(term.residence_seconds), 40.0 / 3.4);
        check(Some(term.carried), 500.0);
        let mean = 6.5 * 20.0 * (40.0 / 3.4) / 500.0;
        check(Some(term.mean_replicas()), mean);
        let chance = 2.0 * (mean * 1.6 / 25.0).sqrt();
        check(Some(term.chance_replicas()), chance);
        check(wanted(&signals, &spec(), Cause::Arrivals), mean + chance + 2.0 * mean / (mean + 2.0));
    }

    #[test]
    fn a_kv_target_below_the_slowdown_counts() {
        let mut spec = spec();
        spec.targets.kv = 0.3;
        let term = ArrivalTerm::of(&signals(), &law(), &spec, Regime::Calm).unwrap();
        assert_eq!((term.kv, term.carried), (0.3, 300.0));
    }

    #[test]
    fn arrivals_want_nothing_before_something_is_known() {
        assert_eq!(ArrivalTerm::of(&signals(), &ServiceLaw::default(), &spec(), Regime::Calm), None);
        assert_eq!(arrival_term(&Signals { blocks_per_replica: 0.0, ..signals() }), None);
        for idle in [Flow { running: 0.0, ..signals().stable }, Flow { referenced: 0.0, ..signals().stable }] {
            assert_eq!(arrival_term(&Signals { stable: idle, ..signals() }), None);
        }
    }

    #[test]
    fn growth_is_followed_until_a_replica_asked_for_now_would_serve() {
        let rate = |growth_per_second, start_seconds| {
            let arrivals = Arrivals { growth_per_second, ..signals().arrivals };
            arrival_rate(&Signals { arrivals, start_seconds, ..signals() }, Regime::Calm)
        };
        check(Some(rate(0.001, 30.0)), 6.0 * 1.06);
        check(Some(rate(0.001, 5000.0)), 6.0 * 1.63);
        assert_eq!([rate(0.1, 30.0), rate(-0.1, 30.0)], [12.0, 6.0], "at most twice, and a fall is not foreseen");
    }

    #[test]
    fn a_rate_is_followed_as_far_as_chance_does_not_explain_how_it_differs_from_the_last_minutes() {
        let rate = |stable_rate, dispersion| {
            let arrivals = Arrivals { stable_rate, long_rate: 10.0, stable_seconds: 60.0, ..signals().arrivals };
            arrival_rate(&Signals { arrivals, dispersion, ..signals() }, Regime::Calm)
        };
        // Chance is 0.25 requests/s squared: of a difference of 2, squared 4, an eighth is not believed, of one of 0.5 nothing is.
        check(Some(rate(12.0, 1.5)), 11.75);
        check(Some(rate(8.0, 1.5)), 8.25);
        check(Some(rate(10.5, 1.5)), 10.0);
        check(Some(rate(12.0, 3.0)), 11.5);
    }

    #[test]
    fn each_regime_has_its_rate() {
        let rate = |panic_rate, regime| {
            let arrivals = Arrivals { panic_rate, growth_per_second: 0.01, ..signals().arrivals };
            arrival_rate(&Signals { arrivals, ..signals() }, regime)
        };
        check(Some(rate(7.0, Regime::Onset)), 6.0 * 1.6);
        assert_eq!(rate(20.0, Regime::Onset), 20.0);
        assert_eq!([rate(5.0, Regime::Jump), rate(7.0, Regime::Jump)], [6.0, 7.0]);
        assert_eq!([rate(20.0, Regime::AfterJump), rate(5.0, Regime::AfterJump)], [6.0, 6.0]);
    }

    #[test]
    fn larger_requests_of_a_jump_count_as_such() {
        let blocks = |panic: Flow, regime| blocks_per_request(&Signals { panic, ..signals() }, regime);
        let flow = |referenced, running| Flow { referenced, running, ..signals().panic };
        for regime in [Regime::Onset, Regime::Jump] {
            assert_eq!(blocks(flow(1500.0, 50.0), regime), Some(30.0));
            assert_eq!(blocks(flow(500.0, 50.0), regime), Some(20.0));
            assert_eq!(blocks(flow(500.0, 0.0), regime), Some(20.0));
        }
        for regime in [Regime::Calm, Regime::AfterJump] {
            assert_eq!(blocks(flow(1500.0, 50.0), regime), Some(20.0));
        }
    }

    #[test]
    fn kv_wants_the_blocks_of_the_larger_window_while_load_jumps() {
        let mut signals = signals();
        signals.panic.referenced = 2000.0;
        let replicas = |regime| kv_replicas(&signals, 0.8, regime);
        assert_eq!(
            [Regime::Calm, Regime::Onset, Regime::Jump, Regime::AfterJump].map(replicas),
            [1.5, 2.5, 2.5, 1.5].map(Some)
        );
        assert_eq!(kv_replicas(&Signals { blocks_per_replica: 0.0, ..signals.clone() }, 0.8, Regime::Calm), None);
    }

    #[test]
    fn terms_that_know_only_too_much_ask_for_half_more_and_then_wait_for_it() {
        let queue = |signals: &Signals| {
            let mut spec = spec();
            spec.targets.queue_seconds = 2.0;
            wanted(signals, &spec, Cause::Queue)
        };
        let waiting = |queue_seconds| Signals { queue_seconds, ..signals() };
        check(queue(&waiting(1.0)), 1.5);
        check(queue(&waiting(2.6)), 3.9);
        check(queue(&waiting(9.0)), 4.5);
        let mut on_their_way = waiting(9.0);
        on_their_way.coverage.starting = 1;
        check(queue(&on_their_way), 3.0);
        let mut just_joined = waiting(9.0);
        just_joined.panic.serving = 2.9;
        check(queue(&just_joined), 3.0);
    }

    #[test]
    fn latency_counts_only_against_a_target() {
        let slow = Signals { ttft_p95_ms: Some(1200.0), itl_p95_ms: Some(26.0), ..signals() };
        assert_eq!([Cause::Ttft, Cause::Itl].map(|cause| wanted(&slow, &spec(), cause)), [None, None]);
        let mut promised = spec();
        (promised.targets.ttft_ms, promised.targets.itl_ms) = (Some(1000.0), Some(20.0));
        check(wanted(&slow, &promised, Cause::Ttft), 3.6);
        check(wanted(&slow, &promised, Cause::Itl), 3.9);
        assert_eq!(wanted(&signals(), &promised, Cause::Ttft), None);
    }

    #[test]
    fn preemptions_are_counted_a_minute_and_replica() {
        let per_minute = |preemptions_stable, window_seconds| {
            let coverage = Coverage { window_seconds, ..signals().coverage };
            preemptions_per_minute(&Signals { preemptions_stable, coverage, ..signals() })
        };
        check(Some(per_minute(12, 60.0)), 4.0);
        check(Some(per_minute(12, 30.0)), 8.0);
        check(Some(per_minute(12, 600.0)), 4.0);
        let mut joined = Signals { preemptions_stable: 12, ..signals() };
        joined.stable.serving = 2.0;
        assert_eq!(preemptions_per_minute(&joined), 0.0, "before they joined");
    }

    #[test]
    fn three_preemptions_in_the_panic_window_are_a_burst() {
        let per_minute = |preemptions_panic, panic_seconds| {
            let arrivals = Arrivals { panic_seconds, ..signals().arrivals };
            preemptions_per_minute(&Signals { preemptions_panic, arrivals, ..signals() })
        };
        check(Some(per_minute(2, 6.0)), 0.0);
        check(Some(per_minute(3, 6.0)), 10.0);
        check(Some(per_minute(3, 12.0)), 5.0);
    }

    #[test]
    fn preempting_begins_above_the_target() {
        let demand = |preemptions_stable| {
            Demand::of(&Signals { preemptions_stable, ..signals() }, &law(), &spec(), Regime::Calm).is_preempting
        };
        assert_eq!([demand(17), demand(18), demand(19)], [false, false, true]);
        check(wanted(&Signals { preemptions_stable: 9, ..signals() }, &spec(), Cause::Preemptions), 1.5);
    }

    #[test]
    fn the_largest_term_decides_and_the_first_of_equals_is_named() {
        let term = |cause, replicas| Term { cause, replicas };
        let demand = |terms| Demand { terms, regime: Regime::Calm, is_preempting: false };
        let terms = vec![term(Cause::Kv, 1.0), term(Cause::Queue, 2.5), term(Cause::Ttft, 2.5), term(Cause::Itl, 2.0)];
        let several = demand(terms);
        assert_eq!((several.largest(), several.replicas()), (Some(term(Cause::Queue, 2.5)), 2.5));
        assert_eq!([Cause::Itl, Cause::Held].map(|cause| several.replicas_of(cause)), [2.0, 0.0]);
        assert_eq!((demand(Vec::new()).largest(), demand(Vec::new()).replicas()), (None, 0.0));
    }

    #[test]
    fn a_jump_is_beyond_four_deviations_and_beyond_four_requests() {
        let jumps = |stable_rate, panic_rate| {
            let arrivals =
                Arrivals { panic_rate, stable_rate, panic_seconds: 8.0, growth_per_second: 0.0, ..Arrivals::default() };
            is_jump(&Signals { arrivals, ..signals() })
        };
        // 16 expected, give or take 4.
        assert_eq!([jumps(2.0, 4.0), jumps(2.0, 4.01)], [false, true]);
        assert_eq!([jumps(0.0, 0.5), jumps(0.0, 0.51)], [false, true]);
    }

    #[test]
    fn what_is_a_jump_for_steady_arrivals_is_none_for_bursty_ones() {
        let jumps = |dispersion| {
            let arrivals = Arrivals {
                panic_rate: 5.0,
                stable_rate: 2.0,
                panic_seconds: 8.0,
                growth_per_second: 0.0,
                ..Arrivals::default()
            };
            is_jump(&Signals { arrivals, dispersion, ..signals() })
        };
        // 24 more than 16 expected: six deviations of Poisson, three of arrivals four times as rough.
        assert_eq!([1.0, 4.0].map(jumps), [true, false]);
    }

    #[test]
    fn a_record_of_before_is_read() {
        let demand: Demand =
            serde_json::from_str(r#"{"terms": [], "mood": "afterJump", "isPreempting": false}"#).unwrap();
        assert_eq!(demand, Demand { terms: vec![], regime: Regime::AfterJump, is_preempting: false });
        assert!(serde_json::to_string(&demand).unwrap().contains(r#""regime":"afterJump""#));
    }
}
