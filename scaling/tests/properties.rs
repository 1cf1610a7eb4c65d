//! What must hold whatever happens to a deployment: random load, lost answers, lies, restarts.

mod history;

use history::{Event, History};
use proptest::prelude::*;
use stoker_cost::StepCost;
use stoker_scaling::{
    Arrivals, Bound, Coverage, DecisionRecord, Flow, Holders, Replay, ScaleState, ScalingSpec, Signals, Standby,
    Untold, Work, decide,
};

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases(2_000))]

    #[test]
    fn the_number_never_leaves_its_bounds(seed: u64) {
        for Event { record, .. } in History::new(seed).run(60) {
            let desired = record.decision.desired;
            let is_asleep = desired == 0 && record.spec.to_zero.is_some();
            prop_assert!(is_asleep || (record.spec.min..=record.spec.max).contains(&desired), "{desired}");
        }
    }

    #[test]
    fn nothing_goes_down_while_a_serving_replica_cannot_be_believed(seed: u64) {
        for Event { record, doubtful, .. } in History::new(seed).run(60) {
            let decision = &record.decision;
            prop_assert!(decision.desired >= decision.previous || doubtful == 0, "{} -> {} with {doubtful} in doubt",
                decision.previous, decision.desired);
        }
    }

    #[test]
    fn what_went_up_stays_for_the_stabilisation_time(seed: u64) {
        let mut went_up_ms = None;
        for Event { record, .. } in History::new(seed).run(120) {
            let decision = &record.decision;
            let hold_ms = u64::from(record.spec.behavior.down_stabilization_seconds.expect("histories set it")) * 1000;
            let is_reversal = decision.desired < decision.previous
                && decision.desired > 0
                && went_up_ms.is_some_and(|at_ms| record.at_ms < at_ms + hold_ms);
            prop_assert!(!is_reversal, "{} -> {} after {:?}", decision.previous, decision.desired, went_up_ms);
            if decision.desired > decision.previous && decision.bound != Bound::Min && decision.previous > 0 {
                went_up_ms = Some(record.at_ms);
            }
        }
    }

    #[test]
    fn the_last_replica_goes_only_when_all_is_seen_and_nobody_waits(seed: u64) {
        for Event { record, doubtful, .. } in History::new(seed).run(120) {
            let DecisionRecord { decision, signals, spec, .. } = &record;
            if decision.desired == 0 && decision.previous > 0 {
                let rule = spec.to_zero.expect("nobody else goes to zero");
                prop_assert!(signals.holders == Holders::All && signals.held_requests == 0 && doubtful == 0);
                prop_assert!(signals.idle_seconds >= f64::from(rule.after_seconds));
            }
        }
    }

    #[test]
    fn who_is_held_is_never_left_without_a_replica(seed: u64) {
        for Event { record, .. } in History::new(seed).run(120) {
            let DecisionRecord { decision, signals, .. } = &record;
            let is_owed = signals.held_requests > 0 || signals.holders == Holders::Nobody;
            prop_assert!(decision.desired > 0 || !is_owed, "{decision:?}");
        }
    }

    #[test]
    fn a_new_operator_goes_on_where_the_old_one_stopped(seed: u64) {
        let mut history = History::new(seed);
        let before = history.run(40).last().map(|event| event.record.decision.desired);
        history.restart_operator();
        let after: Vec<_> = history.run(5).collect();
        prop_assert_eq!(Some(after[0].record.decision.previous), before);
        for Event { record, .. } in after {
            let window_seconds = record.signals.coverage.window_seconds;
            let has_history = window_seconds >= f64::from(record.spec.behavior.stable_window_seconds);
            let is_asleep = record.decision.desired == 0;
            prop_assert!(has_history || is_asleep || record.decision.desired >= record.decision.previous);
        }
    }
}

proptest! {
    #![proptest_config(cases(100_000))]

    #[test]
    fn a_replay_is_identical_to_the_last_bit(seed: u64) {
        let event = History::new(seed).run(6).last().expect("six events");
        let line = event.record.to_line();
        let read = DecisionRecord::parse(&line).expect("our own line");
        prop_assert_eq!(read.to_line(), line);
        prop_assert_eq!(read.replay(), Replay::Identical);
    }
}

/// Signals in their plausible ranges.
fn signals() -> impl Strategy<Value = Signals> {
    let counts = (1_u32..12, 0_u32..4, 0_u64..30, any::<bool>());
    let nodes = (any::<bool>(), 0_u32..4);
    let flows = (0.0..60_000.0, 0.0..200.0, 0.0..50.0, 0.0..20.0);
    let arrivals = (0.0..30.0, 0.0..30.0, -0.01..0.01, 0.0..3.0);
    (counts, flows, arrivals, nodes).prop_map(|((serving, starting, preemptions, tells), flow, arrivals, standby)| {
        let (referenced, running, waiting, through_rate) = flow;
        let (panic_rate, stable_rate, growth_per_second, queue_seconds) = arrivals;
        let cost = StepCost { step_seconds: 8e-3, ..StepCost::default() };
        let work = Work {
            cost,
            request_seconds: 0.01 + waiting / 20.0,
            spread: 2.0,
            answer_tokens: running,
            slowest: 1.0 + waiting / 10.0,
        };
        let flow = Flow { serving: f64::from(serving), referenced, running, waiting, through_rate };
        Signals {
            coverage: Coverage {
                serving,
                fresh: serving,
                starting,
                untold: (!tells).then(|| Untold { replicas: 1, example: "r".to_owned() }),
                window_seconds: 120.0,
                ..Coverage::default()
            },
            blocks_per_replica: 10_000.0,
            stable: flow,
            panic: flow,
            arrivals: Arrivals {
                panic_rate,
                stable_rate,
                panic_seconds: 6.0,
                growth_per_second,
                ..Arrivals::default()
            },
            queue_seconds,
            preemptions_stable: preemptions,
            preemptions_panic: preemptions / 3,
            ttft_p95_ms: Some(100.0 * queue_seconds),
            itl_p95_ms: None,
            start_seconds: 30.0,
            standby: standby.0.then_some(Standby { nodes: standby.1, start_seconds: Some(3.0) }),
            held_requests: 0,
            holders: Holders::All,
            idle_seconds: 0.0,
            dispersion: 1.0,
            work: tells.then_some(work),
        }
    })
}

/// One signal raised, all others kept.
fn raised(signals: &Signals, which: u8, by: f64) -> Signals {
    let mut raised = signals.clone();
    match which {
        0 => raised.arrivals.panic_rate += by,
        1 => raised.panic.waiting += by,
        2 => raised.queue_seconds += by,
        3 => raised.preemptions_stable += by as u64,
        4 => raised.preemptions_panic += by as u64,
        _ => raised.ttft_p95_ms = raised.ttft_p95_ms.map(|ms| ms + 100.0 * by),
    }
    raised
}

proptest! {
    #![proptest_config(cases(20_000))]

    #[test]
    fn more_pressure_never_means_fewer_replicas(
        signals in signals(), desired in 1_u32..12, panics: bool, which in 0_u8..6, by in 0.0..40.0,
    ) {
        let mut spec = ScalingSpec::between(1, 40);
        spec.targets.ttft_ms = Some(150.0);
        let mut state = ScaleState::starting_at(desired);
        state.jumped_ms = panics.then_some(990_000);
        let (calm, _) = decide(&spec, &signals, &state, 1_000_000);
        let (pressed, _) = decide(&spec, &raised(&signals, which, by), &state, 1_000_000);
        prop_assert!(pressed.desired >= calm.desired, "{} then {}", calm.desired, pressed.desired);
    }
}

proptest! {
    #![proptest_config(cases(5_000))]

    #[test]
    fn one_more_node_on_standby_wants_at_most_one_replica_less_and_never_less_than_warm_starts_would(
        signals in signals(), nodes in 0_u32..4, desired in 1_u32..12,
    ) {
        let wanted = |nodes: u32, cold: f64| {
            let standby = (nodes > 0).then_some(Standby { nodes, start_seconds: Some(3.0) });
            let signals = Signals { standby, start_seconds: cold, ..signals.clone() };
            decide(&ScalingSpec::between(1, 40), &signals, &ScaleState::starting_at(desired), 1_000_000).0.demand.replicas()
        };
        let (fewer, more, warm) = (wanted(nodes, 30.0), wanted(nodes + 1, 30.0), wanted(0, 3.0));
        prop_assert!(more <= fewer && more >= fewer - 1.0 && more >= warm, "{fewer}, {more}, {warm}");
    }
}

/// What is said of going to zero would hold of histories that never do.
#[test]
fn histories_go_to_zero_and_come_back_with_one_replica_and_with_several() {
    let (mut down, mut to_one, mut to_several) = (0, 0, 0);
    for decision in (0..1000).flat_map(|seed| History::new(seed).run(120)).map(|event| event.record.decision) {
        match (decision.previous, decision.desired) {
            (1.., 0) => down += 1,
            (0, 1) => to_one += 1,
            (0, 2..) => to_several += 1,
            _ => {}
        }
    }
    assert!(down > 20 && to_one > 5 && to_several > 5, "{down} {to_one} {to_several}");
}
