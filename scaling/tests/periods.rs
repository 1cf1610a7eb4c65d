//! Load that jumps at even intervals is met before it does so for the fourth time, and no other load is.

use proptest::prelude::*;
use stoker_cost::StepCost;
use stoker_scaling::{
    Arrivals, Cause, Coverage, Decided, DecisionRecord, Flow, Holders, Replay, ScaleState, ScalingSpec, Signals,
    ToZero, Work, decide, explain,
};
use stoker_workload::Rng;

const TICK_SECONDS: f64 = 2.0;
const START_SECONDS: f64 = 60.0;
const EPOCH_MS: u64 = 10_000_000;

/// What an edge was met with.
#[derive(Clone, Debug)]
struct Tick {
    at: f64,
    /// Replicas that the foreseen edge wants, and all else.
    foreseen: Option<f64>,
    present: f64,
    record: DecisionRecord,
}

/// Every decision over Poisson arrivals of this rate: a tenth of a second of work each.
fn decisions(rate: impl Fn(f64) -> f64, seconds: f64, seed: u64) -> Vec<Tick> {
    let spec = ScalingSpec::between(1, 40);
    let (mut rng, mut state, mut counts) = (Rng::seeded(seed), ScaleState::starting_at(1), Vec::new());
    let (mut ticks, mut next) = (Vec::new(), 0.0);
    for tick in 1..(seconds / TICK_SECONDS) as usize {
        let at = tick as f64 * TICK_SECONDS;
        let mut count = 0.0;
        while next < at {
            next += rng.exponential() / rate(next);
            count += 1.0;
        }
        counts.push(count);
        let signals = signals(&counts);
        let now_ms = EPOCH_MS + (at * 1000.0) as u64;
        let (decision, after) = decide(&spec, &signals, &state, now_ms);
        let is_foreseen = |cause: Cause| cause == Cause::Period;
        let of = |foreseen: bool| {
            let terms = decision.demand.terms.iter().filter(|term| is_foreseen(term.cause) == foreseen);
            terms.map(|term| term.replicas).reduce(f64::max)
        };
        let (foreseen, present) = (of(true), of(false).unwrap_or_default());
        let decided = Decided { decision, next: after.clone(), signals };
        ticks.push(Tick { at, foreseen, present, record: DecisionRecord::new(&spec, &state, decided, now_ms) });
        state = after;
    }
    ticks
}

fn signals(counts: &[f64]) -> Signals {
    let rate = |n: usize| {
        let last = &counts[counts.len().saturating_sub(n)..];
        (last.iter().sum::<f64>() / (last.len() as f64 * TICK_SECONDS), last.len() as f64 * TICK_SECONDS)
    };
    let ((panic_rate, panic_seconds), (stable_rate, stable_seconds)) = (rate(3), rate(30));
    let flow = Flow { serving: 3.0, referenced: 300.0, running: 30.0, waiting: 0.0, through_rate: stable_rate };
    let cost = StepCost { step_seconds: 0.01, ..StepCost::default() };
    Signals {
        coverage: Coverage { serving: 3, fresh: 3, window_seconds: 900.0, ..Coverage::default() },
        blocks_per_replica: 50_000.0,
        stable: flow,
        panic: flow,
        arrivals: Arrivals {
            panic_rate,
            stable_rate,
            stable_seconds,
            long_rate: rate(300).0,
            panic_seconds,
            growth_per_second: 0.0,
        },
        work: Some(Work { cost, request_seconds: 0.1, spread: 2.0, answer_tokens: 200.0, slowest: 1.0 }),
        queue_seconds: 0.0,
        preemptions_stable: 0,
        preemptions_panic: 0,
        ttft_p95_ms: None,
        itl_p95_ms: None,
        start_seconds: START_SECONDS,
        standby: None,
        held_requests: 0,
        holders: Holders::All,
        idle_seconds: 0.0,
        dispersion: 1.0,
    }
}

/// A load of so much, three times as high for four tenths of every period.
fn wave(edges: &[f64], period: f64, low: f64) -> impl Fn(f64) -> f64 {
    move |at| {
        let is_on = edges.iter().any(|edge| (*edge..edge + 0.4 * period).contains(&at));
        if is_on { 3.0 * low } else { low }
    }
}

fn edges(n: usize, period: f64, noise: f64, seed: u64) -> Vec<f64> {
    let mut rng = Rng::seeded(seed);
    let mut at = 0.5 * period;
    let mut next = || {
        let this = at;
        at += period * (1.0 + noise * (2.0 * rng.uniform() - 1.0));
        this
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn an_idle_deployment_does_not_go_to_zero_before_an_edge_that_is_foreseen() {
    let edges = edges(4, 1200.0, 0.0, 1);
    let ticks = decisions(wave(&edges, 1200.0, 8.0), edges[3], 1);
    let goes = |tick: &Tick| {
        let mut spec = ScalingSpec::between(40, 40);
        spec.to_zero = Some(ToZero { after_seconds: 10, max_wake_seconds: 600 });
        // As if nothing had come for a while, and only what is kept anyway were left.
        let state = ScaleState { desired: 40, ..tick.record.before.clone() };
        let idle = Signals { idle_seconds: 60.0, ..tick.record.signals.clone() };
        let calm = Signals { arrivals: Arrivals::default(), work: None, ..idle.clone() };
        let before = decide(&spec, &calm, &state, tick.record.at_ms).0.desired;
        (before, decide(&spec, &idle, &state, tick.record.at_ms).0.desired)
    };
    let last = ticks.iter().rev().find(|tick| tick.foreseen.is_some()).expect("the fourth edge is foreseen");
    let (unforeseen, foreseen) = goes(last);
    assert_eq!(unforeseen, 0, "without what requests take nothing is foreseen");
    assert_eq!(foreseen, 40, "{last:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_constant_load_has_no_period(seed in 0_u64..1 << 40, rate in 0.2_f64..30.0) {
        let ticks = decisions(|_| rate, 4.0 * 3600.0, seed);
        prop_assert!(ticks.iter().all(|tick| tick.foreseen.is_none()));
    }

    #[test]
    fn the_fourth_edge_is_met_with_an_even_and_with_a_noisy_period(
        seed in 0_u64..1 << 40, period in 600.0_f64..3000.0, low in 4.0_f64..12.0, noise in 0.0_f64..0.05
    ) {
        let edges = edges(6, period, noise, seed);
        let ticks = decisions(wave(&edges, period, low), edges[5] + 60.0, seed);
        prop_assert!(ticks.iter().all(|tick| tick.at > edges[2] || tick.foreseen.is_none()));
        for edge in &edges[3..] {
            let starts_by = edge - START_SECONDS;
            let before = ticks.iter().rev().find(|tick| tick.at <= starts_by).unwrap();
            let foreseen = before.foreseen.unwrap_or_default();
            // The load of after the edge is 0.3 times `low` replicas without room for chance.
            prop_assert!(foreseen > before.present && foreseen > 0.3 * low, "{edge}: {before:?}");
            prop_assert!(f64::from(before.record.decision.desired) >= foreseen.floor());
        }
        prop_assert!(ticks.iter().step_by(61).all(|tick| tick.record.replay() == Replay::Identical));
        prop_assert!(ticks.iter().all(|tick| serde_json::to_string(&tick.record.after.rhythm).unwrap().len() < 512));
    }

    #[test]
    fn an_edge_that_does_not_come_makes_it_forgotten(
        seed in 0_u64..1 << 40, period in 600.0_f64..3000.0, low in 4.0_f64..12.0
    ) {
        // Four edges, then the phase is another, then it is over.
        let mut edges = edges(4, period, 0.0, seed);
        edges.push(edges[3] + 1.5 * period);
        let ticks = decisions(wave(&edges, period, low), edges[4] + 3.0 * period, seed);
        let is_quiet_from = |from: f64| ticks.iter().all(|tick| tick.at < from || tick.foreseen.is_none());
        prop_assert!(ticks.iter().any(|tick| tick.at > edges[3] + 0.5 * period && tick.foreseen.is_some()));
        // A jump by chance is given two minutes to last.
        prop_assert!(is_quiet_from(edges[3] + 1.1 * period + 130.0));
    }
}

#[test]
fn it_is_said_in_a_sentence() {
    let edges = edges(4, 1200.0, 0.0, 1);
    let ticks = decisions(wave(&edges, 1200.0, 8.0), edges[3], 1);
    let raised = ticks.iter().find(|tick| tick.record.decision.cause == Some(Cause::Period)).unwrap();
    let text = explain(&raised.record);
    let line = text.lines().find(|line| line.starts_with("* period")).unwrap();
    assert!(line.contains("load jumps every 20.0 minutes, next in"), "{line}");
    let parsed = DecisionRecord::parse(&raised.record.to_line()).unwrap();
    assert_eq!((parsed.replay(), parsed), (Replay::Identical, raised.record.clone()));
}
