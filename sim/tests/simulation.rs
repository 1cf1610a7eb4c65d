//! What the defaults promise on the eight named traces, without any rival: those figures are in `docs/autoscaling`.

use stoker_scaling::{Replay, ScalingSpec};
use stoker_sim::{Promise, Setting, named_world, run_ours};
use stoker_workload::TRACE_NAMES;

#[test]
fn with_defaults_less_than_one_percent_is_late_and_the_number_turns_less_than_once_an_hour() {
    let setting = Setting { min: 1, max: 24, seed: 1, promise: Promise::default() };
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

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let setting = Setting { min: 1, max: 12, seed, promise: Promise::default() };
        let world = named_world("step", seed).expect("a named trace");
        let (outcomes, records) = run_ours(&world, &ScalingSpec::between(1, 12), &setting);
        (outcomes.misses, outcomes.preemptions, outcomes.gpu_seconds.to_bits(), records)
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).2, run(4).2);
}
