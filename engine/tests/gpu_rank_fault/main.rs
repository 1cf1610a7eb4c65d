//! One of two GPUs that share a model fails under load. In a process of its own: what fails is the context that all tests of a process share.

#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;
#[path = "../gpu_fault/terminal.rs"]
mod terminal;

use std::{
    path::Path,
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

#[test]
fn a_fault_of_one_rank_ends_every_request_and_stops_the_engine_within_seconds() {
    let test = "a_fault_of_one_rank_ends_every_request_and_stops_the_engine_within_seconds";
    if !stoker_kernels::built_with_kernels() {
        return skip(test, "built without GPU kernels");
    }
    if let Err(absent) = Device::open(1) {
        return skip(test, &format!("two GPUs are needed: {absent}"));
    }
    let model = ModelFiles::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"));
    let limits = EngineLimits { tensor_parallel: 2, kv_cache_tokens: Some(64 * 1024), ..EngineLimits::default() };
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
    stoker_gpu_fault::fail(1).expect("it starts");
    for stream in streams {
        let event = terminal(stream).expect("a terminal, not a hang");
        let RequestEvent::Finished { reason: FinishReason::Error(reason), .. } = event else { panic!("{event:?}") };
        println!("{:.1} s: {reason}", failed.elapsed().as_secs_f32());
        assert!(reason.contains("cuda:") && reason.contains("one of 2 GPUs"), "{reason}");
    }
    while engine.load().stopped.is_none() && failed.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(failed.elapsed() < WITHIN, "{:?}", failed.elapsed());
    engine.submit(request()).expect_err("nothing computes any more");
}
