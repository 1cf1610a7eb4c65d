//! Each bound and each step of the decision, from signals to number.

use stoker_cost::StepCost;
use stoker_scaling::{
    ArrivalTerm, Arrivals, Bound, Cause, Coverage, Decided, DecisionRecord, Flow, Holders, Learned, Regime, Replay,
    ScaleState, ScalingSpec, Signals, Standby, StepLimit, ToZero, Work, decide, explain,
};

const NOW_MS: u64 = 10_000_000;

/// A calm deployment: three replicas, all fresh, loaded to 1.5 replicas' worth of KV and nothing learned yet.
fn calm() -> Signals {
    let flow = Flow { serving: 3.0, referenced: 1200.0, ..Flow::default() };
    Signals {
        coverage: Coverage { serving: 3, fresh: 3, window_seconds: 60.0, ..Coverage::default() },
        blocks_per_replica: 1000.0,
        stable: flow,
        panic: flow,
        arrivals: Arrivals { panic_seconds: 6.0, ..Arrivals::default() },
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

fn spec() -> ScalingSpec {
    ScalingSpec::between(1, 10)
}

/// One request a second, and so many of late.
fn jumping(panic_rate: f64) -> Arrivals {
    Arrivals { panic_rate, stable_rate: 1.0, panic_seconds: 6.0, ..Arrivals::default() }
}

fn with_kv(replicas: f64) -> Signals {
    let mut signals = calm();
    signals.stable.referenced = replicas * 800.0;
    signals
}

fn check(spec: &ScalingSpec, signals: &Signals, current: u32, expected: (u32, Bound)) -> ScaleState {
    check_from(spec, signals, &ScaleState::starting_at(current), NOW_MS, expected)
}

fn check_from(
    spec: &ScalingSpec,
    signals: &Signals,
    state: &ScaleState,
    now_ms: u64,
    expected: (u32, Bound),
) -> ScaleState {
    let (decision, next) = decide(spec, signals, state, now_ms);
    assert_eq!((decision.desired, decision.bound), expected, "{decision:?}");
    assert_eq!((decision.previous, next.desired), (state.desired, decision.desired));
    next
}

#[test]
fn kv_above_the_target_adds_what_is_missing() {
    check(&spec(), &with_kv(4.2), 3, (5, Bound::Nothing));
    check(&spec(), &with_kv(3.0), 3, (3, Bound::Nothing));
}

#[test]
fn the_bounds_of_the_specification_hold_even_without_readings() {
    check(&spec(), &with_kv(40.0), 9, (10, Bound::Max));
    check(&spec(), &with_kv(10.0), 9, (10, Bound::Nothing));
    let mut blind = calm();
    blind.coverage.fresh = 0;
    check(&ScalingSpec::between(5, 10), &blind, 3, (5, Bound::Min));
    check(&ScalingSpec::between(1, 2), &blind, 3, (2, Bound::Max));
}

#[test]
fn one_decision_adds_and_removes_at_most_its_step() {
    let mut spec = ScalingSpec::between(1, 100);
    spec.behavior.up = StepLimit { replicas: 2, percent: 0 };
    check(&spec, &with_kv(9.0), 3, (5, Bound::UpStep));
    check(&spec, &with_kv(5.0), 3, (5, Bound::Nothing));
    spec.behavior.down = StepLimit { replicas: 2, percent: 0 };
    check(&spec, &with_kv(1.0), 9, (7, Bound::DownStep));
    check(&spec, &with_kv(1.6), 4, (2, Bound::Nothing));
}

#[test]
fn too_few_fresh_readings_hold_everything() {
    let mut signals = with_kv(9.0);
    signals.coverage.fresh = 1;
    check(&spec(), &signals, 3, (3, Bound::QuorumUp));
    signals.coverage.fresh = 2;
    check(&spec(), &signals, 3, (9, Bound::Nothing));
    signals.coverage = Coverage { starting: 3, window_seconds: 60.0, ..Coverage::default() };
    check(&spec(), &signals, 3, (3, Bound::QuorumUp));
}

#[test]
fn one_replica_that_cannot_be_seen_stops_going_down() {
    let mut signals = with_kv(0.5);
    signals.coverage.fresh = 2;
    check(&spec(), &signals, 3, (3, Bound::QuorumDown));
    let mut tolerant = spec();
    tolerant.behavior.quorum.down = 0.6;
    check(&tolerant, &signals, 3, (2, Bound::DownStep));
}

#[test]
fn what_was_needed_is_remembered_while_those_that_needed_it_may_still_grow() {
    let mut impatient = spec();
    impatient.behavior.down_stabilization_seconds = Some(1);
    let state = check(&impatient, &with_kv(3.0), 3, (3, Bound::Nothing));
    let mut lower = with_kv(0.5);
    check_from(&impatient, &lower, &state, NOW_MS + 30_000, (2, Bound::DownStep));
    // Thirty run and one ends a second: each stays for half a minute, and a higher number counts for twice that.
    (lower.stable.running, lower.stable.through_rate) = (30.0, 1.0);
    check_from(&impatient, &lower, &state, NOW_MS + 59_999, (3, Bound::Stabilisation));
    check_from(&impatient, &lower, &state, NOW_MS + 60_000, (2, Bound::DownStep));
}

#[test]
fn a_broken_replica_is_made_up_for_and_stops_nobody_from_going_down() {
    let mut signals = with_kv(4.0);
    signals.coverage.broken = 1;
    check(&spec(), &signals, 4, (5, Bound::Nothing));
    check(&ScalingSpec::between(1, 4), &signals, 4, (4, Bound::Max));
    (signals.coverage.serving, signals.coverage.fresh) = (4, 4);
    check(&spec(), &signals, 5, (5, Bound::DownPressure));
    let mut light = with_kv(1.5);
    light.coverage.broken = 1;
    check(&spec(), &light, 4, (2, Bound::Nothing));
}

#[test]
fn nothing_goes_down_on_less_history_than_the_stable_window() {
    let mut signals = with_kv(0.5);
    signals.coverage.window_seconds = 59.0;
    check(&spec(), &signals, 3, (3, Bound::ShortHistory));
    signals.coverage.window_seconds = 60.0;
    check(&spec(), &signals, 2, (1, Bound::Nothing));
}

#[test]
fn a_jump_forbids_going_down_for_one_stable_window() {
    let mut jump = with_kv(0.5);
    jump.arrivals = jumping(10.0);
    let state = check(&spec(), &jump, 3, (3, Bound::Panic));
    assert_eq!(state.jumped_ms, Some(NOW_MS));
    let calm = with_kv(0.5);
    let state = check_from(&spec(), &calm, &state, NOW_MS + 59_999, (3, Bound::Panic));
    let mut impatient = spec();
    impatient.behavior.down_stabilization_seconds = Some(1);
    check_from(&impatient, &calm, &state, NOW_MS + 60_000, (2, Bound::DownStep));
}

#[test]
fn a_jump_is_four_standard_deviations_beyond_the_last_minute() {
    let regime = |panic_rate| {
        let mut signals = calm();
        // Six are expected in six seconds, give or take 2.45.
        signals.arrivals = jumping(panic_rate);
        decide(&spec(), &signals, &ScaleState::starting_at(3), NOW_MS).0.demand.regime
    };
    assert_eq!([regime(15.7 / 6.0), regime(15.9 / 6.0)], [Regime::Calm, Regime::Onset]);
}

#[test]
fn spare_replicas_are_a_number_and_fewer_the_smaller_the_load_is() {
    let term = |rate| ArrivalTerm {
        rate,
        waiting_rate: 0.0,
        blocks_per_request: 10.0,
        kv: 0.5,
        residence_seconds: 10.0,
        carried: 100.0,
        spare: 2.0,
    };
    assert_eq!([0.0, 0.5, 2.0, 6.0, 38.0].map(|rate| term(rate).spare_replicas()), [0.0, 0.4, 1.0, 1.5, 1.9]);
    assert_eq!([0.5, 3.0].map(|rate| term(rate).mean_replicas()), [0.5, 3.0]);
    assert_eq!(term(6.0).replicas(), 6.0 + 2.0 * (6.0 * 1.6 / 10.0_f64).sqrt() + 1.5);
}

#[test]
fn a_jump_that_too_few_saw_is_none() {
    let mut jump = with_kv(0.5);
    jump.arrivals = jumping(10.0);
    jump.coverage.fresh = 1;
    let (decision, next) = decide(&spec(), &jump, &ScaleState::starting_at(3), NOW_MS);
    assert_eq!((decision.demand.regime, next.jumped_ms), (Regime::Calm, None));
}

#[test]
fn the_regimes_follow_each_other() {
    let mut jump = calm();
    jump.arrivals = jumping(10.0);
    let regime = |signals: &Signals, state: &ScaleState, now_ms| {
        let (decision, next) = decide(&spec(), signals, state, now_ms);
        (decision.demand.regime, next)
    };
    let (onset, state) = regime(&jump, &ScaleState::starting_at(3), NOW_MS);
    let (goes_on, state) = regime(&jump, &state, NOW_MS + 2000);
    let (after, state) = regime(&calm(), &state, NOW_MS + 4000);
    let (still, state) = regime(&calm(), &state, NOW_MS + 2000 + 119_999);
    let (over, _) = regime(&calm(), &state, NOW_MS + 2000 + 120_000);
    assert_eq!([onset, goes_on, after], [Regime::Onset, Regime::Jump, Regime::AfterJump]);
    assert_eq!([still, over], [Regime::AfterJump, Regime::Calm], "growth is measured over twice a minute");
}

#[test]
fn preemptions_give_nothing_away() {
    let mut signals = with_kv(0.5);
    signals.preemptions_panic = 1;
    check(&spec(), &signals, 3, (3, Bound::Preemptions));
    let mut slow = with_kv(0.5);
    slow.stable.serving = 4.0;
    slow.coverage.serving = 4;
    slow.coverage.fresh = 4;
    slow.coverage.starting = 1;
    slow.preemptions_stable = 25;
    check(&spec(), &slow, 5, (5, Bound::Preemptions));
    slow.preemptions_stable = 23;
    check(&spec(), &slow, 5, (5, Bound::DownPressure));
}

#[test]
fn a_burst_of_preemptions_scales_up_below_the_kv_target() {
    let mut signals = with_kv(2.0);
    signals.preemptions_panic = 6;
    let (decision, _) = decide(&spec(), &signals, &ScaleState::starting_at(3), NOW_MS);
    assert_eq!((decision.desired, decision.cause), (5, Some(Cause::Preemptions)));
    signals.coverage.starting = 2;
    check(&spec(), &signals, 5, (5, Bound::Preemptions));
}

#[test]
fn the_higher_number_is_kept_for_the_stabilisation_time() {
    let mut spec = spec();
    spec.behavior.down_stabilization_seconds = Some(120);
    let state = check(&spec, &with_kv(3.6), 3, (4, Bound::Nothing));
    let state = check_from(&spec, &with_kv(1.5), &state, NOW_MS + 119_000, (4, Bound::Stabilisation));
    check_from(&spec, &with_kv(1.5), &state, NOW_MS + 121_000, (2, Bound::Nothing));
}

#[test]
fn without_a_stabilisation_time_a_higher_number_is_kept_for_ten_minutes() {
    let state = check(&spec(), &with_kv(3.6), 3, (4, Bound::Nothing));
    let state = check_from(&spec(), &with_kv(1.5), &state, NOW_MS + 599_000, (4, Bound::Stabilisation));
    check_from(&spec(), &with_kv(1.5), &state, NOW_MS + 601_000, (2, Bound::Nothing));
}

#[test]
fn a_regretted_step_down_makes_the_next_one_wait_longer() {
    let state = check(&spec(), &with_kv(1.5), 3, (2, Bound::Nothing));
    let state = check_from(&spec(), &with_kv(3.6), &state, NOW_MS + 10_000, (4, Bound::Nothing));
    let state = check_from(&spec(), &with_kv(1.5), &state, NOW_MS + 1_100_000, (4, Bound::Stabilisation));
    check_from(&spec(), &with_kv(1.5), &state, NOW_MS + 1_180_000, (2, Bound::Nothing));
}

#[test]
fn those_that_stay_are_not_loaded_above_the_down_pressure() {
    check(&spec(), &with_kv(1.95), 3, (3, Bound::DownPressure));
    check(&spec(), &with_kv(1.89), 3, (2, Bound::Nothing));
}

/// Two replicas of which one takes so many times as long as the other; the operator takes away the one that has least to do, and that may be
/// the faster.
#[test]
fn a_replica_that_went_is_not_wanted_back_because_the_slower_one_stayed() {
    let spec = ScalingSpec { min: 1, ..spec() };
    let with = |serving: u32, seconds: f64, slowest: f64, rate: f64| {
        let cost = StepCost { step_seconds: 0.01 * seconds, ..StepCost::default() };
        let work = Work { cost, request_seconds: 0.1 * seconds, spread: 2.0, answer_tokens: 50.0, slowest };
        let flow = Flow { serving: f64::from(serving), ..with_kv(0.1).stable };
        let arrivals = Arrivals { stable_rate: rate, long_rate: rate, panic_rate: rate, ..with_kv(0.1).arrivals };
        let coverage = Coverage { serving, fresh: serving, untold: None, ..with_kv(0.1).coverage };
        Signals { coverage, stable: flow, panic: flow, arrivals, work: Some(work), ..with_kv(0.1) }
    };
    let (mut seen, mut n_in_vain) = ([0, 0], 0);
    for slower in [1.0, 1.1, 1.4, 2.0, 3.0] {
        for rate in (1..100).map(|tenths| f64::from(tenths) / 10.0) {
            let mean = (1.0 + slower) / 2.0;
            let both = with(2, mean, slower / mean, rate);
            let (decision, next) = decide(&spec, &both, &ScaleState::starting_at(2), NOW_MS);
            let (after, _) = decide(&spec, &with(1, slower, 1.0, rate), &next, NOW_MS + 60_000);
            let is_kept = decision.bound == Bound::Slowest;
            if decision.desired == 1 {
                assert_eq!(after.desired, 1, "{rate} requests/s, one {slower} times slower: {after:?}");
            }
            seen[usize::from(is_kept)] += 1;
            n_in_vain += usize::from(is_kept && after.desired == 1);
        }
    }
    assert!(seen[0] > 100 && seen[1] > 10 && 3 * n_in_vain < seen[1], "{seen:?}, {n_in_vain} in vain");
}

#[test]
fn an_idle_deployment_goes_to_zero_only_when_asked_and_in_time() {
    let idle = |idle_seconds| Signals { idle_seconds, ..with_kv(0.0) };
    let mut sleepy = spec();
    sleepy.to_zero = Some(ToZero { after_seconds: 100, max_wake_seconds: 60 });
    check(&spec(), &idle(1e6), 1, (1, Bound::Min));
    check(&sleepy, &idle(99.0), 1, (1, Bound::NotIdleYet));
    check(&sleepy, &idle(100.0), 1, (0, Bound::Nothing));
    check(&sleepy, &idle(1e6), 2, (1, Bound::Nothing));
    let held_by = |holders| Signals { holders, ..idle(1e6) };
    check(&sleepy, &held_by(Holders::Nobody), 1, (1, Bound::NoGateway));
    check(&sleepy, &held_by(Holders::Silent("10.0.0.1".into())), 1, (1, Bound::GatewaySilent));
    check(&sleepy, &Signals { start_seconds: 61.0, ..idle(1e6) }, 1, (1, Bound::SlowWake));
    check(&sleepy, &Signals { start_seconds: 60.0, ..idle(1e6) }, 1, (0, Bound::Nothing));
    check(&sleepy, &Signals { idle_seconds: 99.0, ..with_kv(0.5) }, 1, (1, Bound::Nothing));
    // What ran within the window of the load is over.
    check(&sleepy, &Signals { idle_seconds: 100.0, ..with_kv(0.5) }, 1, (0, Bound::Nothing));
}

#[test]
fn an_idle_deployment_goes_from_its_minimum_to_zero() {
    let mut sleepy = ScalingSpec::between(2, 10);
    sleepy.to_zero = Some(ToZero::default());
    let idle = Signals { idle_seconds: 1e6, ..with_kv(0.0) };
    check(&sleepy, &idle, 3, (2, Bound::DownStep));
    check(&sleepy, &idle, 2, (0, Bound::Nothing));
}

#[test]
fn a_jump_counts_the_blocks_of_its_own_window() {
    let mut jump = with_kv(0.5);
    jump.arrivals = jumping(10.0);
    jump.panic.referenced = 2900.0;
    check(&spec(), &jump, 3, (4, Bound::Nothing));
}

#[test]
fn the_last_replica_stays_when_it_cannot_be_seen() {
    let mut sleepy = spec();
    sleepy.behavior.quorum.down = 0.1;
    sleepy.to_zero = Some(ToZero::default());
    let mut signals = Signals { idle_seconds: 1e6, ..with_kv(0.0) };
    signals.coverage.serving = 2;
    signals.coverage.fresh = 1;
    check(&sleepy, &signals, 1, (1, Bound::QuorumDown));
}

#[test]
fn a_held_request_wakes_a_sleeping_deployment() {
    let mut sleepy = spec();
    sleepy.to_zero = Some(ToZero::default());
    let asleep = Signals { coverage: Coverage::default(), ..with_kv(0.0) };
    check(&sleepy, &asleep, 0, (0, Bound::Nothing));
    check(&sleepy, &Signals { held_requests: 2, ..asleep.clone() }, 0, (1, Bound::Nothing));
    check(&spec(), &asleep, 0, (1, Bound::Min));
    check(&sleepy, &Signals { holders: Holders::Silent("10.0.0.1".into()), ..asleep.clone() }, 0, (0, Bound::Nothing));
    let nobody = Signals { holders: Holders::Nobody, ..asleep };
    check(&sleepy, &nobody, 0, (1, Bound::NoGateway));
    check(&spec(), &nobody, 0, (1, Bound::Min));
}

#[test]
fn what_waits_at_gateways_while_some_serve_keeps_one() {
    let term = |held_requests| {
        let signals = Signals { held_requests, ..with_kv(0.0) };
        let (decision, _) = decide(&spec(), &signals, &ScaleState::starting_at(3), NOW_MS);
        decision.demand.terms.iter().find(|term| term.cause == Cause::Held).map(|term| term.replicas)
    };
    assert_eq!([term(0), term(1), term(7)], [None, Some(1.0), Some(1.0)]);
}

/// Nobody serves, so many are held, and requests took this much before.
fn held(requests: u32, request_seconds: f64) -> (Signals, ScaleState) {
    let signals = Signals { coverage: Coverage::default(), held_requests: requests, ..with_kv(0.0) };
    let cost = StepCost { step_seconds: 0.01, ..StepCost::default() };
    let work = Work { cost, request_seconds, spread: 1.0, answer_tokens: 100.0, slowest: 1.0 };
    let learned = Learned { work: Some(work), start_seconds: Some(30.0), warm_start_seconds: None };
    (signals, ScaleState { learned, ..ScaleState::starting_at(0) })
}

#[test]
fn a_line_brings_as_many_replicas_as_it_needs_by_what_requests_took_before() {
    let sleepy = ScalingSpec { to_zero: Some(ToZero::default()), ..spec() };
    for (requests, request_seconds, expected) in [
        (1, 1.0, (1, Bound::Nothing)),
        (20, 1.0, (4, Bound::Nothing)),
        (20, 0.1, (1, Bound::Nothing)),
        (100, 1.0, (4, Bound::UpStep)),
    ] {
        let (signals, asleep) = held(requests, request_seconds);
        check_from(&sleepy, &signals, &asleep, NOW_MS, expected);
    }
    let (signals, asleep) = held(100, 1.0);
    let nothing_learned = ScaleState { learned: Learned::default(), ..asleep };
    check_from(&sleepy, &signals, &nothing_learned, NOW_MS, (1, Bound::Nothing));
}

#[test]
fn while_the_first_replica_starts_the_line_may_ask_for_more_and_nothing_goes_down() {
    let sleepy = ScalingSpec { to_zero: Some(ToZero::default()), ..spec() };
    let idle = Signals { idle_seconds: 1e6, ..with_kv(0.0) };
    let gone = check_from(&sleepy, &idle, &ScaleState::starting_at(1), NOW_MS - 2000, (0, Bound::Nothing));
    let (few, asleep) = held(1, 1.0);
    let asleep = ScaleState { learned: asleep.learned, ..gone };
    let woken = check_from(&sleepy, &few, &asleep, NOW_MS, (1, Bound::Nothing));
    assert_eq!(woken.woken_ms, Some(NOW_MS));
    let nobody = Signals { held_requests: 0, ..few.clone() };
    let woken = check_from(&sleepy, &nobody, &woken, NOW_MS + 2000, (1, Bound::Waking));
    let (many, _) = held(100, 1.0);
    let woken = check_from(&sleepy, &many, &woken, NOW_MS + 4000, (5, Bound::UpStep));
    assert_eq!(woken.woken_ms, Some(NOW_MS), "it is one wake");
    assert_eq!(woken.regret.patience(NOW_MS + 5000), 1.0, "and no regret");
    let serves = Signals { coverage: Coverage { starting: 4, serving: 1, fresh: 1, ..Coverage::default() }, ..few };
    let (_, next) = decide(&sleepy, &serves, &woken, NOW_MS + 30_000);
    assert_eq!(next.woken_ms, None, "one serves");
}

#[test]
fn what_was_learned_stands_while_nobody_serves() {
    let (asleep, state) = held(0, 0.5);
    let (_, next) = decide(&spec(), &asleep, &state, NOW_MS);
    assert_eq!(next.learned, state.learned);
    let serving = Signals { start_seconds: 12.0, ..with_kv(0.5) };
    let (_, next) = decide(&spec(), &serving, &state, NOW_MS);
    assert_eq!(next.learned, Learned { start_seconds: Some(12.0), ..state.learned }, "too few ended to say more");
    let other = Work { request_seconds: 2.0, ..state.learned.work.unwrap() };
    let (_, next) = decide(&spec(), &Signals { work: Some(other), ..serving }, &state, NOW_MS);
    assert_eq!(next.learned.work, Some(other));
}

#[test]
fn an_explanation_says_who_is_held_and_what_comes() {
    let sleepy = ScalingSpec { to_zero: Some(ToZero::default()), ..spec() };
    let words = |signals: &Signals, state: &ScaleState, at_ms| {
        let (decision, next) = decide(&sleepy, signals, state, at_ms);
        let decided = Decided { decision, next: next.clone(), signals: signals.clone() };
        (explain(&DecisionRecord::new(&sleepy, state, decided, at_ms)), next)
    };
    let (nobody, asleep) = held(0, 1.0);
    let (text, asleep) = words(&nobody, &asleep, NOW_MS);
    assert!(text.starts_with("stays at 0 replicas"), "{text}");
    assert!(
        text.contains("scaled to zero, 0 requests held; the next one brings a replica, which takes 30 s"),
        "{text}"
    );
    let (text, woken) = words(&held(3, 1.0).0, &asleep, NOW_MS);
    assert!(text.starts_with("0 -> 1 replica: pressure 0.00 from held, bound by nothing"), "{text}");
    assert!(text.contains("3 requests held by gateways x 1.000 s of work, by what requests took before"), "{text}");
    let (text, _) = words(&held(1, 1.0).0, &woken, NOW_MS + 7000);
    assert!(text.contains("woken 7 s ago, 1 request held; a start takes 30 s"), "{text}");
    let silent = Signals { holders: Holders::Silent("10.0.0.7".into()), idle_seconds: 1e6, ..with_kv(0.0) };
    let (text, _) = words(&silent, &ScaleState::starting_at(1), NOW_MS);
    assert!(text.contains("gateway 10.0.0.7 does not say what it has in line"), "{text}");
}

#[test]
fn pressure_is_the_largest_term_over_those_that_serve() {
    let (decision, _) = decide(&spec(), &with_kv(4.5), &ScaleState::starting_at(3), NOW_MS);
    assert_eq!((decision.pressure, decision.unbounded, decision.cause), (1.5, 5, Some(Cause::Kv)));
    let nobody = Signals { coverage: Coverage::default(), ..with_kv(4.5) };
    let (decision, _) = decide(&spec(), &nobody, &ScaleState::starting_at(3), NOW_MS);
    assert_eq!(decision.pressure, 0.0);
}

#[test]
fn an_explanation_names_each_term_and_the_bound_that_held() {
    let state = ScaleState::starting_at(3);
    let signals = Signals { queue_seconds: 0.5, ..with_kv(12.5) };
    let (decision, next) = decide(&spec(), &signals, &state, NOW_MS);
    let decided = Decided { decision, next, signals };
    let text = explain(&DecisionRecord::new(&spec(), &state, decided, NOW_MS));
    let expected = "\
3 -> 10 replicas: pressure 4.17 from kv, bound by max
  readings    3 of 3 serving replicas fresh, 0 starting, 0 draining, 60 s of history
* kv            12.50  10000 blocks referenced / (1000 blocks per replica x 0.8 kv target)
  queue          1.50  0.50 s of prefill wait per replica / 1 s target
  preemptions    0.00  0.0 preemptions per minute and replica / 6 target
  wanted      13 by load alone, 12.50 before rounding; between min 1 and max 10
  bound       scaling.max keeps it down: raise it to follow the load; without it: 13 replicas
";
    assert_eq!(text, expected);
}

/// Load that grows, on replicas that start in 300 s, or in 5 s on so many nodes.
fn growing(standby: Option<Standby>) -> Signals {
    let flow = Flow { serving: 3.0, referenced: 300.0, running: 60.0, waiting: 0.0, through_rate: 10.0 };
    let cost = StepCost { step_seconds: 0.01, ..StepCost::default() };
    Signals {
        stable: flow,
        panic: flow,
        arrivals: Arrivals {
            panic_rate: 10.0,
            stable_rate: 10.0,
            long_rate: 10.0,
            panic_seconds: 6.0,
            stable_seconds: 60.0,
            growth_per_second: 0.002,
        },
        work: Some(Work { cost, request_seconds: 0.1, spread: 1.0, answer_tokens: 200.0, slowest: 1.0 }),
        start_seconds: 300.0,
        standby,
        ..calm()
    }
}

fn recorded(signals: &Signals) -> DecisionRecord {
    let state = ScaleState::starting_at(3);
    let (decision, next) = decide(&spec(), signals, &state, NOW_MS);
    DecisionRecord::new(&spec(), &state, Decided { decision, next, signals: signals.clone() }, NOW_MS)
}

fn stand_by(nodes: u32, start_seconds: Option<f64>) -> Option<Standby> {
    Some(Standby { nodes, start_seconds })
}

#[test]
fn what_nodes_that_stand_by_can_still_start_is_not_asked_for_yet() {
    let wanted = |signals: &Signals| recorded(signals).decision.demand.replicas();
    let cold = wanted(&growing(None));
    let warm = wanted(&Signals { start_seconds: 5.0, ..growing(None) });
    assert!(cold > warm + 1.5 && cold < warm + 2.5, "{cold} and {warm}");
    for (nodes, expected) in [(0, cold), (1, cold - 1.0), (3, warm), (16, warm)] {
        assert_eq!(wanted(&growing(stand_by(nodes, Some(5.0)))), expected, "{nodes}");
    }
    assert_eq!(wanted(&growing(stand_by(3, None))), cold, "no start was seen to be warm");
    // Blocks that are referenced now want what they want.
    let full = |signals: Signals| Signals { stable: Flow { referenced: 8000.0, ..signals.stable }, ..signals };
    assert_eq!(wanted(&full(growing(stand_by(3, Some(5.0))))), 10.0);
}

#[test]
fn a_record_says_who_stands_by_and_one_of_before_is_replayed_as_it_was() {
    for standby in [None, stand_by(0, None), stand_by(1, Some(5.0)), stand_by(3, Some(5.0))] {
        let line = recorded(&growing(standby)).to_line();
        assert_eq!(line.contains("standby\":{"), standby.is_some(), "{line}");
        assert_eq!(DecisionRecord::parse(&line).unwrap().replay(), Replay::Identical);
    }
}

#[test]
fn the_time_to_come_back_is_that_of_the_first_to_start() {
    let sleepy = ScalingSpec { to_zero: Some(ToZero { after_seconds: 100, max_wake_seconds: 60 }), ..spec() };
    for (standby, expected) in [
        (None, (1, Bound::SlowWake)),
        (stand_by(0, Some(5.0)), (1, Bound::SlowWake)),
        // Nobody saw one, and who never goes never sees one.
        (stand_by(1, None), (0, Bound::Nothing)),
        (stand_by(0, None), (1, Bound::SlowWake)),
        (stand_by(1, Some(61.0)), (1, Bound::SlowWake)),
        (stand_by(1, Some(5.0)), (0, Bound::Nothing)),
    ] {
        check(&sleepy, &Signals { start_seconds: 300.0, standby, idle_seconds: 1e6, ..with_kv(0.0) }, 1, expected);
    }
}

#[test]
fn the_time_of_warm_starts_is_remembered_beside_that_of_others() {
    let after = |standby| recorded(&growing(standby)).after.learned;
    let warm = after(stand_by(1, Some(5.0)));
    assert_eq!((warm.start_seconds, warm.warm_start_seconds), (Some(300.0), Some(5.0)));
    assert_eq!(after(stand_by(1, None)).warm_start_seconds, None);
    let state = ScaleState { learned: warm, ..ScaleState::starting_at(3) };
    let (_, next) = decide(&spec(), &growing(stand_by(0, None)), &state, NOW_MS);
    assert_eq!(next.learned.warm_start_seconds, Some(5.0));
}

#[test]
fn an_explanation_says_by_which_start_time_and_why() {
    let said = |standby| explain(&recorded(&growing(standby)));
    assert!(!said(None).contains("  start "), "nobody asked for it");
    for (standby, expected) in [
        (stand_by(0, Some(5.0)), "300 s, cold: no node has the model in memory and room for a replica"),
        (stand_by(2, None), "300 s, cold: 2 nodes have the model in memory, but no start there was seen yet"),
        (
            stand_by(1, Some(5.0)),
            "300 s, cold: 1 node has the model in memory (starts of 5 s), and more are wanted than can start there",
        ),
        (
            stand_by(3, Some(5.0)),
            "5 s, warm: 3 nodes have the model in memory, enough for what would be wanted beyond that if starts took 300 s",
        ),
    ] {
        let text = said(standby);
        assert!(text.contains(&format!("  start       {expected}\n")), "{text}");
        let is_put_off = text.contains("; 1 of them put off, for which nodes stand by\n");
        assert_eq!(is_put_off, standby == stand_by(1, Some(5.0)), "{text}");
    }
}
