//! One of two GPUs that compute a model fails under load, or stalls. In processes of their own: what fails is the context that all tests of a
//! process share.

#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;
#[path = "../gpu_fault/terminal.rs"]
mod terminal;

use std::{
    env,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use skip::skip;
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineLimits, FinishReason, ModelFiles, Request, RequestEvent, SamplingParams,
    StopParams,
};
use stoker_kernels::Device;
use terminal::{PATIENCE, terminal};

/// From the fault to an engine that says that it has stopped.
const WITHIN: Duration = Duration::from_secs(10);
/// How long a GPU stalls: longer than anybody waits for it.
const STALL: Duration = Duration::from_secs(14);
/// Set for a process that has a fault of its own.
const IN_CHILD: &str = "STOKER_TEST_IN_CHILD";

/// Runs a test in a process of its own; true in that process, where it is to go on.
fn is_child(test: &str) -> bool {
    if !stoker_kernels::built_with_kernels() {
        skip(test, "built without GPU kernels");
        return false;
    }
    if let Err(absent) = Device::open(1) {
        skip(test, &format!("two GPUs are needed: {absent}"));
        return false;
    }
    if env::var_os(IN_CHILD).is_some() {
        return true;
    }
    let program = env::current_exe().expect("a test is a program");
    let child = Command::new(program).args(["--exact", test, "--nocapture"]).env(IN_CHILD, "1").output();
    let child = child.expect("it starts");
    let said = String::from_utf8_lossy(&child.stdout);
    println!("{said}{}", String::from_utf8_lossy(&child.stderr));
    // Of a name that no test has none would fail.
    assert!(child.status.success() && said.contains("1 passed"), "{test}");
    false
}

/// Eight requests run on two GPUs; what `disturb` does ends all of them, with a reason that says `expected`, and the engine.
fn check(limits: EngineLimits, disturb: impl FnOnce(), expected: &str) {
    let model = ModelFiles::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"));
    let limits = EngineLimits { kv_cache_tokens: Some(64 * 1024), ..limits };
    let config = EngineConfig { model, limits, device: DeviceChoice::Cuda(0) };
    let engine = Engine::start(config, |_| {}).expect("the model starts");
    let request = || {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let stop = StopParams { max_tokens: 100_000, ignore_eos: true, ..StopParams::default() };
        Request { prompt: vec![5, 6, 7], sampling, stop, ..Request::default() }
    };
    let mut streams: Vec<_> = (0..8).map(|_| engine.submit(request()).expect("it is taken")).collect();
    for stream in &mut streams {
        assert!(matches!(stream.blocking_next(), Some(RequestEvent::Delta { .. })), "every one runs");
    }
    let failed = Instant::now();
    disturb();
    for stream in streams {
        let event = terminal(stream).expect("a terminal, not a hang");
        let RequestEvent::Finished { reason: FinishReason::Error(reason), .. } = event else { panic!("{event:?}") };
        println!("{:.1} s: {reason}", failed.elapsed().as_secs_f32());
        assert!(reason.contains("cuda:") && reason.contains(expected), "{reason}");
    }
    while engine.load().stopped.is_none() && failed.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(failed.elapsed() < WITHIN, "{:?}", failed.elapsed());
    engine.submit(request()).expect_err("nothing computes any more");
}

fn ranks() -> EngineLimits {
    EngineLimits { tensor_parallel: 2, ..EngineLimits::default() }
}

fn stages() -> EngineLimits {
    EngineLimits { pipeline_parallel: 2, ..EngineLimits::default() }
}

#[test]
fn a_fault_of_one_rank_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_fault_of_one_rank_ends_every_request_and_stops_the_engine_within_seconds") {
        check(ranks(), || stoker_gpu_fault::fail(1).expect("it starts"), "one of 2 GPUs");
    }
}

#[test]
fn a_fault_of_the_first_stage_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_fault_of_the_first_stage_ends_every_request_and_stops_the_engine_within_seconds") {
        check(stages(), || stoker_gpu_fault::fail(0).expect("it starts"), "one of 2 GPUs");
    }
}

#[test]
fn a_fault_of_the_last_stage_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_fault_of_the_last_stage_ends_every_request_and_stops_the_engine_within_seconds") {
        check(stages(), || stoker_gpu_fault::fail(1).expect("it starts"), "one of 2 GPUs");
    }
}

#[test]
fn a_rank_that_stalls_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_rank_that_stalls_ends_every_request_and_stops_the_engine_within_seconds") {
        check(ranks(), || stoker_gpu_fault::stall(1, STALL).expect("it starts"), "one of 2 GPUs");
    }
}

#[test]
fn a_first_stage_that_stalls_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_first_stage_that_stalls_ends_every_request_and_stops_the_engine_within_seconds") {
        check(stages(), || stoker_gpu_fault::stall(0, STALL).expect("it starts"), "has not answered");
    }
}

#[test]
fn a_last_stage_that_stalls_ends_every_request_and_stops_the_engine_within_seconds() {
    if is_child("a_last_stage_that_stalls_ends_every_request_and_stops_the_engine_within_seconds") {
        check(stages(), || stoker_gpu_fault::stall(1, STALL).expect("it starts"), "has not answered");
    }
}
