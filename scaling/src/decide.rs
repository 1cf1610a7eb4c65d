//! The decision: how many replicas from now on, which term wanted them and which bound held them.
//!
//! [`decide_scale`] is a function of its four arguments: it reads no clock, no environment and nothing random, so the
//! operator, the simulator and `explain` get the same answer from the same inputs. It never acts.

use serde::{Deserialize, Serialize};
use stoker_crds::scaling::{ScalingSpec, ToZero};

use crate::{
    demand::{Cause, Demand, Regime, Term, is_jump},
    held::Holders,
    law::ServiceLaw,
    learned::Learned,
    recent_peaks::RecentPeaks,
    regret::Regret,
    rhythm::Rhythm,
    signals::{Signals, growth_half_seconds},
    window::LoadWindow,
    work::WorkTerm,
};

/// A higher number is remembered for so long before regret. Load that comes back does so within minutes: half of that time costs a
/// twentieth less on the worlds of the lottery and turns twice as often.
const HOLD_SECONDS: f64 = 600.0;

/// A higher number is remembered for at least this many stays of a request, up to a bound.
const STAYS_REMEMBERED: f64 = 2.0;
const STAYS_SECONDS_MAX: f64 = 900.0;

/// What one decision leaves for the next. Small enough for the object's status, so that a new operator goes on where
/// the old one stopped.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleState {
    /// Replicas wanted since the last decision.
    pub desired: u32,
    /// When load last jumped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jumped_ms: Option<u64>,
    /// What was needed lately.
    #[serde(default)]
    pub hold: RecentPeaks,
    /// How going down turned out.
    #[serde(default)]
    pub regret: Regret,
    /// What was learned of the replicas' speed.
    #[serde(default)]
    pub law: ServiceLaw,
    /// When load jumped.
    #[serde(default)]
    pub rhythm: Rhythm,
    /// What was known when replicas last served.
    #[serde(default)]
    pub learned: Learned,
    /// When the first replica after none was asked for, until one serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub woken_ms: Option<u64>,
}

impl ScaleState {
    /// The state of a deployment that is seen for the first time with this many replicas.
    pub fn starting_at(desired: u32) -> Self {
        Self {
            desired,
            jumped_ms: None,
            hold: RecentPeaks::default(),
            regret: Regret::default(),
            law: ServiceLaw::default(),
            rhythm: Rhythm::default(),
            learned: Learned::default(),
            woken_ms: None,
        }
    }
}

impl ScaleState {
    /// The state as another process takes it over. Nobody looked in between, so what was wanted counts as needed until now;
    /// what has a date that is to come was written by another clock, and happened now at the latest.
    pub fn resumed(mut self, now_ms: u64) -> Self {
        self.jumped_ms = self.jumped_ms.map(|jumped_ms| jumped_ms.min(now_ms));
        self.woken_ms = self.woken_ms.map(|woken_ms| woken_ms.min(now_ms));
        self.hold.not_after(now_ms);
        self.regret.not_after(now_ms);
        self.law.not_after(now_ms);
        self.rhythm.not_after(now_ms);
        self.hold.keep(self.desired, u64::MAX, now_ms);
        self
    }
}

/// Why the number is not simply what the load wants.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Bound {
    /// It is.
    Nothing,
    /// `scaling.min`.
    Min,
    /// `scaling.max`.
    Max,
    /// `behavior.up`: one decision may not add more.
    UpStep,
    /// `behavior.down`: one decision may not remove more.
    DownStep,
    /// Too few fresh readings to go up.
    QuorumUp,
    /// Not every needed reading is fresh, so nothing goes down.
    QuorumDown,
    /// Less history than the stable window, for instance after a restart of the operator.
    ShortHistory,
    /// A jump was seen within the stable window.
    Panic,
    /// Preemptions: there is no room to give away.
    Preemptions,
    /// The higher number was needed within the stabilisation time.
    Stabilisation,
    /// Fewer would do, but they would be loaded above `behavior.downPressure`.
    DownPressure,
    /// Fewer would do, but not if the slowest replica is one of them.
    Slowest,
    /// Idle, but not yet for `toZero.afterSeconds`.
    NotIdleYet,
    /// Idle, but the last replica would take too long to come back.
    SlowWake,
    /// No gateway leads the Service, so nobody would hold a request while there is no replica.
    NoGateway,
    /// Idle, but a gateway does not say what it has in line.
    GatewaySilent,
    /// The first replica after none is on its way: until it serves there is nobody to read.
    Waking,
}

/// What to do from now on.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScaleDecision {
    /// Replicas wanted from now on.
    pub desired: u32,
    /// Replicas wanted before.
    pub previous: u32,
    /// The load alone wants this many; broken replicas are made up for.
    pub unbounded: u32,
    /// The largest term over the serving replicas; 0 while none serves.
    pub pressure: f64,
    /// The term that wanted most.
    pub cause: Option<Cause>,
    /// What kept the decision from `unbounded`.
    pub bound: Bound,
    /// Every term.
    pub demand: Demand,
}

/// One decision with the inputs it was made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// What to do.
    pub decision: ScaleDecision,
    /// State for the next decision.
    pub next: ScaleState,
    /// What was looked at.
    pub signals: Signals,
}

/// Decides from a window of readings.
pub fn decide_scale(spec: &ScalingSpec, window: &LoadWindow, state: &ScaleState, now_ms: u64) -> Decided {
    let signals = Signals::of(window, spec, now_ms);
    let (decision, next) = decide(spec, &signals, state, now_ms);
    Decided { decision, next, signals }
}

/// Decides from signals: what [`decide_scale`] does once the window is reduced, and what a replay repeats.
pub fn decide(spec: &ScalingSpec, signals: &Signals, state: &ScaleState, now_ms: u64) -> (ScaleDecision, ScaleState) {
    let mut next = state.clone();
    next.law.learn(signals, f64::from(spec.behavior.stable_window_seconds), now_ms);
    let regime = regime(spec, signals, &mut next, now_ms);
    next.rhythm.learn(signals, matches!(regime, Regime::Onset | Regime::Jump), now_ms);
    next.learned.learn(signals);
    let Wanted { demand, lasting } = Wanted::of(spec, signals, &next, regime, now_ms);
    let choice = choose(&Round { spec, signals, demand: &demand, lasting, now_ms }, &mut next);
    let (desired, bound) = within_limits(spec, choice);
    // To go to zero and to come back is what `toZero` is for, and no mistake about how many are needed.
    if state.desired > 0 && desired > 0 {
        next.regret.note(state.desired, desired, now_ms);
    }
    next.desired = desired;
    next.woken_ms = woken_ms(signals, state, desired, now_ms);
    let decision = ScaleDecision {
        desired,
        previous: state.desired,
        unbounded: made_up(demand.replicas(), signals),
        pressure: pressure(&demand, signals),
        cause: demand.largest().map(|term| term.cause),
        bound,
        demand,
    };
    (decision, next)
}

/// What load wants.
pub(crate) struct Wanted {
    /// Every term.
    pub(crate) demand: Demand,
    /// Replicas wanted by what there is, without what is only foreseen, if those that go are not the slowest.
    lasting: f64,
}

impl Wanted {
    /// By what was learned up to now; see [`crate::Standby`] for where some of the next replicas start warm.
    fn of(spec: &ScalingSpec, signals: &Signals, learned: &ScaleState, regime: Regime, now_ms: u64) -> Self {
        let cold = Self::within_a_start(spec, signals, learned, regime, now_ms);
        let Some((standby, warm)) = signals.standby.zip(signals.warm()) else { return cold };
        let warm = Self::within_a_start(spec, &warm, learned, regime, now_ms);
        let lasting = standby.replicas(warm.lasting, cold.lasting);
        Self { demand: cold.demand.with_standby(standby, &warm.demand), lasting }
    }

    /// By what is learned, if all replicas start in the time that these signals say.
    pub(crate) fn within_a_start(
        spec: &ScalingSpec,
        signals: &Signals,
        learned: &ScaleState,
        regime: Regime,
        now_ms: u64,
    ) -> Self {
        let mut demand = Demand::of(signals, &learned.law, spec, regime);
        let lasting = demand.if_the_slowest_stays(signals, spec);
        demand.terms.extend(period_term(spec, signals, &learned.rhythm, now_ms));
        demand.terms.extend(held_term(spec, signals, &learned.learned));
        Self { demand, lasting }
    }
}

/// A jump is remembered as long as it lies within the time that growth is measured over.
fn regime(spec: &ScalingSpec, signals: &Signals, next: &mut ScaleState, now_ms: u64) -> Regime {
    let remembered_ms = (2000.0 * growth_half_seconds(spec, signals.start_seconds)) as u64;
    next.jumped_ms = next.jumped_ms.filter(|jumped_ms| now_ms < jumped_ms.saturating_add(remembered_ms));
    let is_after = next.jumped_ms.is_some();
    let is_rising = is_jump(signals) && has_quorum(signals, spec.behavior.quorum.up);
    if is_rising {
        next.jumped_ms = Some(now_ms);
    }
    match (is_rising, is_after) {
        (true, false) => Regime::Onset,
        (true, true) => Regime::Jump,
        (false, true) => Regime::AfterJump,
        (false, false) => Regime::Calm,
    }
}

/// An edge that is foreseen and does not come is no need that is remembered.
fn period_term(spec: &ScalingSpec, signals: &Signals, rhythm: &Rhythm, now_ms: u64) -> Option<Term> {
    let foreseen = rhythm.foreseen(signals, now_ms)?;
    let replicas = WorkTerm::at_rate(signals, spec, foreseen.rate)?.replicas();
    Some(Term { cause: Cause::Period, replicas })
}

/// What gateways hold wants a replica. While none serves it is all that is known of the load, and wants as many as will do it in the
/// time that what waits elsewhere is done in.
fn held_term(spec: &ScalingSpec, signals: &Signals, learned: &Learned) -> Option<Term> {
    if signals.held_requests == 0 {
        return None;
    }
    let work = learned.work.filter(|_| signals.coverage.serving == 0);
    let by_work = work.and_then(|work| WorkTerm::of_held(signals, spec, work)).map_or(0.0, WorkTerm::replicas);
    Some(Term { cause: Cause::Held, replicas: by_work.max(1.0) })
}

fn woken_ms(signals: &Signals, before: &ScaleState, desired: u32, now_ms: u64) -> Option<u64> {
    match (before.desired, desired) {
        (_, 0) => None,
        _ if signals.coverage.serving > 0 => None,
        (0, _) => Some(now_ms),
        _ => before.woken_ms,
    }
}

struct Round<'a> {
    spec: &'a ScalingSpec,
    signals: &'a Signals,
    demand: &'a Demand,
    /// Replicas wanted by what there is, without what is only foreseen, if those that go are not the slowest.
    lasting: f64,
    now_ms: u64,
}

#[derive(Clone, Copy)]
struct Choice {
    desired: u32,
    bound: Bound,
}

impl Choice {
    fn free(desired: u32) -> Self {
        Self { desired, bound: Bound::Nothing }
    }
}

fn choose(round: &Round<'_>, next: &mut ScaleState) -> Choice {
    let current = next.desired;
    if round.signals.coverage.serving == 0 && (current == 0 || next.woken_ms.is_some()) {
        let choice = wake(round, current);
        // What the line needed is not given back with the first reading.
        next.hold.keep(choice.desired, hold_ms(round, next.regret), round.now_ms);
        return choice;
    }
    if round.signals.coverage.serving == 0 || !has_quorum(round.signals, round.spec.behavior.quorum.up) {
        return Choice { desired: current, bound: Bound::QuorumUp };
    }
    let wanted = made_up(round.demand.replicas(), round.signals);
    let patient = made_up(round.lasting / round.spec.behavior.down_pressure, round.signals).max(1);
    let held = next.hold.keep(patient, hold_ms(round, next.regret), round.now_ms).max(wanted);
    if wanted > current { up(round.spec, current, wanted) } else { down(round, next, held) }
}

/// At zero, or on the way up from there: what gateways hold decides, and nothing is waited for.
fn wake(round: &Round<'_>, current: u32) -> Choice {
    let wanted = whole(round.demand.replicas());
    match &round.signals.holders {
        _ if wanted > current => up(round.spec, current, wanted),
        _ if current > 0 => Choice { desired: current, bound: Bound::Waking },
        Holders::Nobody if round.spec.to_zero.is_some() => Choice { desired: 1, bound: Bound::NoGateway },
        Holders::Nobody | Holders::Silent(_) | Holders::All => Choice::free(0),
    }
}

fn up(spec: &ScalingSpec, current: u32, wanted: u32) -> Choice {
    let most = current.saturating_add(spec.behavior.up.of(current));
    if wanted > most { Choice { desired: most, bound: Bound::UpStep } } else { Choice::free(wanted) }
}

/// Going down has to pass every veto; the first that objects is the bound.
fn down(round: &Round<'_>, state: &ScaleState, held: u32) -> Choice {
    let current = state.desired;
    let stay = |bound| Choice { desired: current, bound };
    if let Some(choice) = to_zero(round, current) {
        return choice;
    }
    if made_up(round.demand.replicas(), round.signals) == current {
        return Choice::free(current);
    }
    if current <= round.spec.min {
        return stay(Bound::Min);
    }
    if let Some(bound) = veto(round, state) {
        return stay(bound);
    }
    if held >= current {
        return stay(why_held(round, current));
    }
    let least = current.saturating_sub(round.spec.behavior.down.of(current));
    if held < least { Choice { desired: least, bound: Bound::DownStep } } else { Choice::free(held) }
}

fn why_held(round: &Round<'_>, current: u32) -> Bound {
    let is_wanted = |replicas: f64| made_up(replicas / round.spec.behavior.down_pressure, round.signals) >= current;
    if is_wanted(round.demand.replicas()) {
        Bound::DownPressure
    } else if is_wanted(round.lasting) {
        Bound::Slowest
    } else {
        Bound::Stabilisation
    }
}

fn veto(round: &Round<'_>, state: &ScaleState) -> Option<Bound> {
    let Round { spec, signals, demand, .. } = round;
    if !has_quorum(signals, spec.behavior.quorum.down) {
        return Some(Bound::QuorumDown);
    }
    if signals.coverage.window_seconds < f64::from(spec.behavior.stable_window_seconds) {
        return Some(Bound::ShortHistory);
    }
    let panic_ms = u64::from(spec.behavior.stable_window_seconds) * 1000;
    if state.jumped_ms.is_some_and(|jumped_ms| round.now_ms < jumped_ms + panic_ms) {
        return Some(Bound::Panic);
    }
    (demand.is_preempting || signals.preemptions_panic > 0).then_some(Bound::Preemptions)
}

/// The last replicas of an idle deployment; `None` when this is not about going to zero. Without a request for as long as the rule
/// says, rates of the minutes before want nothing any more; an edge that is foreseen does.
fn to_zero(round: &Round<'_>, current: u32) -> Option<Choice> {
    let Round { spec, signals, demand, .. } = round;
    let rule = spec.to_zero?;
    let is_idle = signals.idle_seconds >= f64::from(rule.after_seconds);
    let is_foreseen = demand.terms.iter().any(|term| term.cause == Cause::Period && term.replicas > 0.0);
    if current > spec.min.max(1) || is_foreseen || (!is_idle && demand.replicas() > 0.0) {
        return None;
    }
    Some(veto_zero(rule, round.signals).map_or(Choice::free(0), |bound| Choice { desired: current, bound }))
}

/// The last replica goes only if whoever asks next is held, is seen, and does not wait for too long. All that serve must be seen,
/// whatever the quorum: who cannot be may have been asked.
fn veto_zero(rule: ToZero, signals: &Signals) -> Option<Bound> {
    match &signals.holders {
        Holders::Nobody => return Some(Bound::NoGateway),
        Holders::Silent(_) => return Some(Bound::GatewaySilent),
        Holders::All => {}
    }
    // A start of a kind that was never seen stands in nobody's way: while a replica stays up there is none to learn from, and it would stay for good.
    if signals.next_start_seconds().is_some_and(|seconds| seconds > f64::from(rule.max_wake_seconds)) {
        return Some(Bound::SlowWake);
    }
    if signals.idle_seconds < f64::from(rule.after_seconds) {
        return Some(Bound::NotIdleYet);
    }
    (signals.coverage.fresh < signals.coverage.serving).then_some(Bound::QuorumDown)
}

fn within_limits(spec: &ScalingSpec, choice: Choice) -> (u32, Bound) {
    let may_be_zero = spec.to_zero.is_some() && choice.desired == 0;
    if choice.desired > spec.max {
        (spec.max, Bound::Max)
    } else if choice.desired < spec.min && !may_be_zero {
        (spec.min, Bound::Min)
    } else {
        (choice.desired, choice.bound)
    }
}

/// How long a higher number is remembered: the given time, or the usual one and as going down was regretted before. Requests that
/// began together grow together, so that a time in which they do not come and go shows a part of their lives; whoever goes down by
/// it comes back when they have grown.
fn hold_ms(round: &Round<'_>, regret: Regret) -> u64 {
    let patience = regret.patience(round.now_ms);
    let learned = patience * HOLD_SECONDS;
    let seconds = round.spec.behavior.down_stabilization_seconds.map_or(learned, f64::from);
    let window_seconds = f64::from(round.spec.behavior.stable_window_seconds);
    let stay_seconds = round.signals.stable.stay_seconds(window_seconds);
    let whole_lives = (STAYS_REMEMBERED * stay_seconds).min(STAYS_SECONDS_MAX);
    (seconds.max(whole_lives) * 1000.0) as u64
}

fn has_quorum(signals: &Signals, share: f64) -> bool {
    signals.coverage.serving > 0 && signals.coverage.share() >= share
}

fn pressure(demand: &Demand, signals: &Signals) -> f64 {
    let serving = signals.coverage.serving;
    if serving == 0 { 0.0 } else { demand.replicas() / f64::from(serving) }
}

/// Whole replicas for a real demand. While fewer serve, one more for each that is there and carries nothing; once enough
/// serve, those are surplus, and they are what goes first.
fn made_up(replicas: f64, signals: &Signals) -> u32 {
    let wanted = whole(replicas);
    let missing = wanted.saturating_sub(signals.coverage.serving);
    wanted.saturating_add(signals.coverage.broken.min(missing))
}

/// Whole replicas for a real demand. A hair above a whole number is the noise of the mean, not a replica.
fn whole(replicas: f64) -> u32 {
    (replicas - 1e-6).ceil().clamp(0.0, f64::from(u32::MAX)) as u32
}
