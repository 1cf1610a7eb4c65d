//! The work term: how many replicas do the work that comes, by what engines say their steps cost.
//!
//! A step takes `step` seconds by itself and those of the work in it besides. A replica that does `u` seconds of work a second has
//! steps of `step / (1 - u)` seconds, so steps last as long as promised, `itl`, where
//!
//! ```text
//!     u = usable = 1 - step / itl
//! ```
//!
//! With `work` seconds of it coming in a second, `n` replicas do `u = work / n` each. Three things want some:
//!
//! - **the mean**: `n = work / usable`;
//! - **chance**: work comes in with the variance `v` a second. Shared out, it stands in front of each replica for longer than `b`
//!   seconds once in `e^k` if `usable n - work = k v / (2 b n)` (heavy traffic, Kingman 1961, of a backlog of `b n`). Solved for `n`,
//!   that is `(work + sqrt(work^2 + 2 usable k v / b)) / (2 usable)`;
//! - **KV**: a sequence stays for as many steps as its answer has tokens. If steps did no work, `held` replicas would hold the
//!   blocks of all in flight; as they do, each holds `held / (n (1 - work / n))` of what it may, which is all of it at
//!   `n = held + work`.
//!
//! Pure; decides nothing.

use stoker_crds::scaling::ScalingSpec;

use crate::{
    demand::{Regime, arrival_rate, blocks_per_request},
    signals::{Arrivals, Flow, Signals, Work},
};

/// Seconds between tokens that users are promised where nobody says otherwise: faster than people read.
const ITL_SECONDS: f64 = 0.05;
/// A replica does work for at least this share of the time, however slow its steps are.
const USABLE_MIN: f64 = 0.5;
/// Work stands in front of a replica for too long once in `e` to the power of this: once in 55.
const CHANCE: f64 = 4.0;
/// What may stand there: seconds, and a share of what is in flight at the promised pace, which is done side by side anyway.
const BACKLOG_SECONDS: f64 = 1.0;
const BACKLOG_OF_STAY: f64 = 0.5;
/// Requests that wait are to be gone after this many seconds.
const DRAIN_SECONDS: f64 = 10.0;
/// What came beyond the usual in the seconds of a jump is shared out over this part of the time that requests stay.
const JUMP_OF_STAY: f64 = 0.5;
/// Room is kept for this many standard deviations of the blocks in flight, and variance of their number that is of their sizes.
const DEVIATIONS_OF_BLOCKS: f64 = 2.0;
const SIZE_SPREAD: f64 = 0.6;
/// Once an hour load jumps or a replica is lost, and what comes until another has started, this long at most, is late.
const START_SECONDS_MAX: f64 = 600.0;
/// Replicas that such a jump is worth in the mean, and what is spared at most. A share of those there are besides, which large fleets would
/// keep for good, helps as often as it is in the way.
const JUMP_REPLICAS: f64 = 0.6;
const SPARE_MAX: f64 = 2.0;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkTerm {
    /// Requests per second to be ready for.
    pub rate: f64,
    /// Requests per second that those already waiting add.
    pub waiting_rate: f64,
    /// Seconds of work of one request.
    pub request_seconds: f64,
    /// Seconds that a step may last.
    pub itl_seconds: f64,
    /// Seconds of work that a replica is given a second, at most.
    pub usable: f64,
    /// Variance of the work that comes in, seconds² a second.
    pub variance: f64,
    /// Seconds of work that may stand in front of a replica.
    pub backlog_seconds: f64,
    /// Replicas that hold the blocks of all in flight if steps do no work.
    pub held: f64,
    /// Of these, for chance.
    pub held_by_chance: f64,
    /// Replicas kept beyond: as the user says, or as prices do.
    pub spare: f64,
}

impl WorkTerm {
    /// Takes the term apart; `None` where an engine does not say what steps cost, or too little went through.
    pub fn of(signals: &Signals, spec: &ScalingSpec, regime: Regime) -> Option<Self> {
        let work = signals.work?;
        let itl_seconds = itl_seconds(&work, spec);
        let stay = work.answer_tokens * itl_seconds;
        let (rate, waiting_rate) = (rate(signals, regime, stay), signals.panic.waiting / DRAIN_SECONDS);
        let usable = 1.0 - work.cost.step_seconds / itl_seconds;
        let bunching = signals.dispersion + work.spread - 1.0;
        let (held, held_by_chance) = held(signals, &work, spec, regime, rate + waiting_rate);
        let term = Self {
            rate,
            waiting_rate,
            request_seconds: work.request_seconds,
            itl_seconds,
            usable,
            variance: (rate + waiting_rate) * work.request_seconds * work.request_seconds * bunching,
            backlog_seconds: BACKLOG_SECONDS + BACKLOG_OF_STAY * usable * stay,
            held,
            held_by_chance,
            spare: 0.0,
        };
        let spare = spec.behavior.spare_replicas.map_or_else(|| term.worth_sparing(signals, spec), f64::from);
        Some(Self { spare, ..term })
    }

    /// The term at another rate of arrivals, once those that wait are gone.
    pub fn at_rate(signals: &Signals, spec: &ScalingSpec, rate: f64) -> Option<Self> {
        let arrivals = Arrivals {
            panic_rate: rate,
            stable_rate: rate,
            long_rate: rate,
            growth_per_second: 0.0,
            ..signals.arrivals
        };
        let panic = Flow { waiting: 0.0, ..signals.panic };
        Self::of(&Signals { arrivals, panic, ..signals.clone() }, spec, Regime::Calm)
    }

    /// The term for requests that gateways hold while none serves, where one took so much.
    pub fn of_held(signals: &Signals, spec: &ScalingSpec, work: Work) -> Option<Self> {
        let panic = Flow { waiting: f64::from(signals.held_requests), ..Flow::default() };
        let asleep = Signals { work: Some(work), panic, arrivals: Arrivals::default(), ..signals.clone() };
        Self::of(&asleep, spec, Regime::Calm)
    }

    /// By how much of a mean replica the slowest one does less of what comes: of a load that is far from filling it, next to nothing.
    pub(crate) fn lack_of_the_slowest(signals: &Signals, spec: &ScalingSpec, regime: Regime) -> f64 {
        let Some(work) = signals.work.filter(|work| work.slowest > 1.0) else { return 0.0 };
        let loaded = |work: Work| {
            let term = Self::of(&Signals { work: Some(work), ..signals.clone() }, spec, regime);
            term.map_or(0.0, Self::loaded_replicas)
        };
        let (mean, slow) = (loaded(work), loaded(work.of_the_slowest()));
        ((slow - mean) / slow.max(1.0)).max(0.0)
    }

    /// Seconds of work that come in a second.
    pub fn work(self) -> f64 {
        (self.rate + self.waiting_rate) * self.request_seconds
    }

    /// Replicas that do the mean of what comes.
    pub fn mean_replicas(self) -> f64 {
        self.work() / self.usable
    }

    /// Replicas that do what comes, chance included.
    pub fn busy_replicas(self) -> f64 {
        let work = self.work();
        let chance = 2.0 * self.usable * CHANCE * self.variance / self.backlog_seconds;
        (work + (work * work + chance).sqrt()) / (2.0 * self.usable)
    }

    /// Replicas whose blocks hold what is in flight, chance included.
    pub fn holding_replicas(self) -> f64 {
        self.work() + self.held + self.held_by_chance
    }

    /// Replicas that do and hold what comes.
    fn loaded_replicas(self) -> f64 {
        self.busy_replicas().max(self.holding_replicas())
    }

    /// What the term wants.
    pub fn replicas(self) -> f64 {
        self.loaded_replicas() + self.spare
    }

    /// Replicas that cost less than the late answers without them. Jumps of exponential size, `jump` in the mean, leave `e^(-s / jump)`
    /// of the late answers to `s` spare replicas; the sum of both prices is least at `s = jump ln(worth / jump)`, where `worth` is
    /// what those late answers cost without any, in replicas. One more in the logarithm, so that little worth spares little.
    fn worth_sparing(self, signals: &Signals, spec: &ScalingSpec) -> f64 {
        let late_an_hour = self.rate * signals.start_seconds.min(START_SECONDS_MAX);
        let worth = late_an_hour * spec.prices.late_answer / spec.prices.replica_hour;
        (JUMP_REPLICAS * (1.0 + worth / JUMP_REPLICAS).ln()).min(SPARE_MAX)
    }
}

/// How long a step may last: as promised, or as many times as long as alone as the user says, but never so short that nothing is done.
fn itl_seconds(work: &Work, spec: &ScalingSpec) -> f64 {
    let promised = spec.targets.itl_ms.map_or(ITL_SECONDS, |ms| ms / 1000.0);
    let slowed = spec.targets.slowdown.map_or(f64::INFINITY, |times| times * work.cost.step_seconds);
    promised.min(slowed).max(work.cost.step_seconds / (1.0 - USABLE_MIN))
}

/// Requests a second to be ready for. Long answers take long to become a load, and until then it is seen whether more of them come:
/// what is sudden counts the less the longer they stay.
fn rate(signals: &Signals, regime: Regime, stay: f64) -> f64 {
    let (calm, now) = (arrival_rate(signals, Regime::Calm), arrival_rate(signals, regime));
    let seconds = signals.arrivals.panic_seconds.max(f64::MIN_POSITIVE);
    let share = seconds / (JUMP_OF_STAY * stay).max(seconds);
    if now > calm { calm + (now - calm) * share } else { now }
}

/// Replicas that hold the blocks of what is in flight if steps do no work, and how many more for chance.
fn held(signals: &Signals, work: &Work, spec: &ScalingSpec, regime: Regime, rate: f64) -> (f64, f64) {
    let room = signals.blocks_per_replica * spec.targets.kv;
    let Some(blocks) = blocks_per_request(signals, regime).filter(|_| room > 0.0) else { return (0.0, 0.0) };
    let in_flight = rate * work.answer_tokens * work.cost.step_seconds;
    // Those that came together are in flight together, for as long as they stay: less bunched than they came.
    let deviation = (in_flight * (SIZE_SPREAD + signals.dispersion.sqrt())).sqrt();
    (in_flight * blocks / room, DEVIATIONS_OF_BLOCKS * deviation * blocks / room)
}

#[cfg(test)]
mod tests {
    use stoker_cost::StepCost;

    use super::*;
    use crate::{held::Holders, signals::Coverage};

    /// Ten requests a second of a tenth of a second of work each, answers of 200 tokens, in steps of 10 ms by themselves.
    fn signals() -> Signals {
        let flow = Flow { serving: 3.0, referenced: 3000.0, running: 60.0, waiting: 0.0, through_rate: 10.0 };
        let cost = StepCost { step_seconds: 0.01, ..StepCost::default() };
        Signals {
            coverage: Coverage { serving: 3, fresh: 3, window_seconds: 60.0, ..Coverage::default() },
            blocks_per_replica: 5000.0,
            stable: flow,
            panic: flow,
            arrivals: Arrivals {
                panic_rate: 10.0,
                stable_rate: 10.0,
                long_rate: 10.0,
                panic_seconds: 6.0,
                stable_seconds: 60.0,
                growth_per_second: 0.0,
            },
            work: Some(Work { cost, request_seconds: 0.1, spread: 2.0, answer_tokens: 200.0, slowest: 1.0 }),
            queue_seconds: 0.0,
            preemptions_stable: 0,
            preemptions_panic: 0,
            ttft_p95_ms: None,
            itl_p95_ms: None,
            start_seconds: 100.0,
            standby: None,
            held_requests: 0,
            holders: Holders::All,
            idle_seconds: 0.0,
            dispersion: 1.0,
        }
    }

    fn spec() -> ScalingSpec {
        ScalingSpec::between(1, 10)
    }

    fn term(change: impl FnOnce(&mut Signals, &mut ScalingSpec)) -> WorkTerm {
        let (mut signals, mut spec) = (signals(), spec());
        change(&mut signals, &mut spec);
        WorkTerm::of(&signals, &spec, Regime::Calm).expect("engines say what steps cost")
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn the_mean_is_work_over_what_a_replica_does_within_the_promise() {
        let term = term(|_, _| {});
        close(term.usable, 0.8);
        close(term.work(), 1.0);
        close(term.mean_replicas(), 1.25);
    }

    #[test]
    fn chance_is_what_makes_a_backlog_rare() {
        let term = term(|_, _| {});
        close(term.variance, 10.0 * 0.01 * 2.0);
        close(term.backlog_seconds, 1.0 + 0.5 * 0.8 * 10.0);
        let n = term.busy_replicas();
        close(term.usable * n - term.work(), 4.0 * term.variance / (2.0 * term.backlog_seconds * n));
        assert!(n > term.mean_replicas());
    }

    #[test]
    fn what_is_in_flight_fits_at_the_pace_that_so_many_have() {
        let term = term(|signals, _| signals.blocks_per_replica = 1000.0);
        let n = term.holding_replicas();
        let step = 0.01 / (1.0 - term.work() / n);
        // Two seconds of ten a second are twenty, with 0.6 and one of variance.
        let in_flight = 10.0 * 200.0 * step;
        let by_chance = 2.0 * (20.0 * 1.6_f64).sqrt() * step / 0.01;
        close((in_flight + by_chance) * 50.0, n * 800.0);
        close(term.replicas(), n + term.spare);
    }

    #[test]
    fn a_step_may_last_as_promised_and_never_less_than_twice_itself() {
        close(term(|_, spec| spec.targets.itl_ms = Some(100.0)).usable, 0.9);
        close(term(|_, spec| spec.targets.itl_ms = Some(5.0)).itl_seconds, 0.02);
        close(term(|_, spec| spec.targets.slowdown = Some(3.0)).itl_seconds, 0.03);
        close(term(|_, spec| spec.targets.slowdown = Some(30.0)).itl_seconds, 0.05);
    }

    #[test]
    fn those_that_wait_are_to_be_gone_soon() {
        let term = term(|signals, _| signals.panic.waiting = 30.0);
        assert_eq!((term.rate, term.waiting_rate), (10.0, 3.0));
        close(term.work(), 1.3);
    }

    #[test]
    fn a_jump_of_long_answers_counts_less() {
        let rate = |answer_tokens, regime| {
            let mut signals = signals();
            signals.arrivals.panic_rate = 30.0;
            signals.work = signals.work.map(|work| Work { answer_tokens, ..work });
            WorkTerm::of(&signals, &spec(), regime).map(|term| term.rate)
        };
        // Of 50 ms each: half of 12 s are the six of the window, half of 60 s are thirty.
        assert_eq!([rate(240.0, Regime::Jump), rate(1200.0, Regime::Jump)], [Some(30.0), Some(14.0)]);
        assert_eq!(rate(240.0, Regime::Calm), Some(10.0));
    }

    #[test]
    fn spare_replicas_follow_from_prices_and_starts() {
        let spare = |start_seconds, late_answer, replica_hour| {
            let change = |signals: &mut Signals, spec: &mut ScalingSpec| {
                signals.start_seconds = start_seconds;
                (spec.prices.late_answer, spec.prices.replica_hour) = (late_answer, replica_hour);
            };
            term(change).spare
        };
        // A thousand answers in a hundred seconds are worth ten hours of a replica.
        close(spare(100.0, 0.03, 3.0), 0.6 * (1.0 + 10.0 / 0.6_f64).ln());
        assert_eq!(spare(100.0, 3.0, 3.0), SPARE_MAX);
        assert_eq!(spare(100.0, 0.0, 3.0), 0.0);
        assert!(spare(10.0, 0.03, 3.0) < spare(100.0, 0.03, 3.0) && spare(100.0, 0.03, 30.0) < spare(100.0, 0.03, 3.0));
        close(spare(6000.0, 0.03, 3.0), spare(600.0, 0.03, 3.0));
        close(term(|_, spec| spec.behavior.spare_replicas = Some(3)).spare, 3.0);
    }

    #[test]
    fn without_blocks_or_anybody_running_only_work_counts() {
        for change in [(|signals: &mut Signals| signals.blocks_per_replica = 0.0) as fn(&mut Signals), |signals| {
            signals.stable.running = 0.0
        }] {
            let term = term(|signals, _| change(signals));
            assert_eq!((term.held, term.held_by_chance), (0.0, 0.0));
        }
        assert_eq!(WorkTerm::of(&Signals { work: None, ..signals() }, &spec(), Regime::Calm), None);
    }
}
