//! What the defaults promise on the eight named traces, without any rival: those figures are in `docs/autoscaling`.

use stoker_scaling::{Cause, Replay, ScalingSpec, Standby, ToZero};
use stoker_sim::{ReplicaModel, Setting, Slo, World, named_world, run_ours};
use stoker_workload::{HashIds, Request, TRACE_NAMES, Trace};

#[test]
fn with_defaults_less_than_one_percent_is_late_and_the_number_turns_less_than_once_an_hour() {
    let setting = Setting { min: 1, max: 24, seed: 1, slo: Slo::default() };
    for name in TRACE_NAMES {
        let world = named_world(name, 1).expect("a named trace");
        let (outcomes, records) = run_ours(&world, &ScalingSpec::between(1, 24), &setting);
        let late = outcomes.misses as f64 / outcomes.requests as f64;
        assert_eq!(outcomes.requests, world.trace.requests.len() as u64, "{name}: every request is answered");
        assert!(late < 0.01, "{name}: {late}");
        assert!(outcomes.reversals_per_hour() <= 1.0, "{name}: {}", outcomes.reversals_per_hour());
        assert!(records.iter().all(|record| record.replay() == Replay::Identical), "{name}");
        assert!(records.iter().all(|record| record.to_line().len() < 8192), "{name}: a record fits into a status");
    }
}

/// Sixty requests, one a second, from each of these times on.
fn crowds(begun: &[f64]) -> Trace {
    let crowd = |begun: &f64| (0..60).map(|idx| begun + f64::from(idx)).collect::<Vec<_>>();
    let request = |arrived| Request {
        arrived,
        prompt_tokens: 500,
        cached_tokens: 0,
        completion_tokens: 100,
        hash_ids: HashIds::default(),
    };
    let requests: Vec<_> = begun.iter().flat_map(crowd).map(request).collect();
    Trace { name: "crowds".to_owned(), seconds: begun.last().expect("there is a crowd") + 100.0, requests }
}

#[test]
fn between_two_crowds_that_lie_far_apart_nothing_runs_and_the_first_of_the_second_wait_for_a_start() {
    let mut world = named_world("step", 1).expect("a named trace");
    world.trace = crowds(&[0.0, 6000.0]);
    let setting = Setting { min: 1, max: 4, seed: 1, slo: Slo::default() };
    let run = |to_zero| {
        let (outcomes, records) = run_ours(&world, &ScalingSpec { to_zero, ..ScalingSpec::between(1, 4) }, &setting);
        assert!(records.iter().all(|record| record.replay() == Replay::Identical));
        assert_eq!(outcomes.requests, 120, "every request is answered");
        (outcomes, records)
    };
    let (awake, _) = run(None);
    let (asleep, records) = run(Some(ToZero { after_seconds: 120, max_wake_seconds: 600 }));
    let woken = records.iter().find(|record| record.decision.previous == 0 && record.decision.desired > 0);
    assert!(woken.is_some_and(|record| record.decision.cause == Some(Cause::Held)));
    assert!(asleep.gpu_seconds < awake.gpu_seconds / 2.0, "{} of {}", asleep.gpu_seconds, awake.gpu_seconds);
    let late = asleep.misses - awake.misses;
    assert!((1..=60).contains(&late), "{late} more are late: those who came while the first replica started");
}

/// Three crowds, an hour and more apart, and replicas that take five minutes to start cold. The numbers of replicas to which it went down
/// in each of the gaps, once who waited for a start was served.
fn least_between_crowds(standby: u32, warm_start_seconds: f64) -> [u32; 2] {
    let named = named_world("step", 1).expect("a named trace");
    let trace = crowds(&[0.0, 6000.0, 12_000.0]);
    let replica =
        ReplicaModel { start_seconds: 300.0, warm_start_seconds: Some(warm_start_seconds), ..named.replica.clone() };
    let world = World { trace, replica, standby, initial: 1, ..named };
    let to_zero = Some(ToZero { after_seconds: 120, max_wake_seconds: 40 });
    let spec = ScalingSpec { to_zero, standby, ..ScalingSpec::between(1, 4) };
    let setting = Setting { min: 1, max: 4, seed: 1, slo: Slo::default() };
    let (outcomes, records) = run_ours(&world, &spec, &setting);
    assert!(records.iter().all(|record| record.replay() == Replay::Identical));
    assert_eq!(outcomes.requests, 180, "every request is answered");
    [(600.0, 6000.0), (6600.0, 12_000.0)].map(|(from, to)| {
        let within = outcomes.samples.iter().filter(|sample| (from..to).contains(&sample.at));
        within.map(|sample| sample.desired).min().expect("it was looked at")
    })
}

#[test]
fn a_start_that_was_never_seen_is_tried_once_and_what_it_took_decides_from_then_on() {
    assert_eq!(least_between_crowds(1, 5.0), [0, 0], "a node stands by, and starts there are quick");
    assert_eq!(least_between_crowds(1, 100.0), [0, 1], "they are not, which the first one shows");
    assert_eq!(least_between_crowds(0, 5.0), [1, 1], "starts are cold, and taken to be too long");
}

#[test]
fn the_first_replicas_of_a_step_start_warm_as_many_as_nodes_stand_by_and_what_they_took_is_learned() {
    let setting = Setting { min: 1, max: 12, seed: 1, slo: Slo::default() };
    let named = named_world("step", 1).expect("a named trace");
    let replica = ReplicaModel { start_seconds: 300.0, warm_start_seconds: Some(5.0), ..named.replica };
    let (_, records) = run_ours(
        &World { replica, standby: 2, ..named.clone() },
        &ScalingSpec { standby: 2, ..ScalingSpec::between(1, 12) },
        &setting,
    );
    assert!(records.iter().all(|record| record.replay() == Replay::Identical));
    let standby = records.iter().map(|record| record.signals.standby.expect("nodes are asked to stand by"));
    let standby: Vec<Standby> = standby.collect();
    assert_eq!(standby[0], Standby { nodes: 2, start_seconds: None });
    assert!(standby.iter().any(|standby| standby.nodes == 0), "a step takes all of them");
    let learned = standby.last().expect("it decided");
    assert!(learned.nodes == 2 && learned.start_seconds.is_some_and(|seconds| seconds < 10.0), "{learned:?}");
    let cold = records.last().expect("it decided").signals.start_seconds;
    assert!((200.0..450.0).contains(&cold), "{cold}");
    let (_, without) = run_ours(&named, &ScalingSpec::between(1, 12), &setting);
    assert!(without.iter().all(|record| record.signals.standby.is_none()));
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let setting = Setting { min: 1, max: 12, seed, slo: Slo::default() };
        let world = named_world("step", seed).expect("a named trace");
        let (outcomes, records) = run_ours(&world, &ScalingSpec::between(1, 12), &setting);
        (outcomes.misses, outcomes.preemptions, outcomes.gpu_seconds.to_bits(), records)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).2, run(4).2);
}
