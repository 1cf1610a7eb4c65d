//! A GPU that fails under load. In a process of its own: what fails is the context that all tests of a process share.

#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;
mod terminal;

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use skip::skip;
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, FinishReason, ModelFiles, Request, RequestEvent,
    SamplingParams, StopParams,
};
use stoker_kernels::Device;
use terminal::{PATIENCE, terminal};

fn start() -> EngineHandle {
    let model = ModelFiles::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"));
    let limits = EngineLimits { kv_cache_tokens: Some(64 * 1024), ..EngineLimits::default() };
    Engine::start(EngineConfig { model, limits, device: DeviceChoice::Cuda(0) }, |_| {}).expect("the model starts")
}

fn long_request() -> Request {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let stop = StopParams { max_tokens: 100_000, ignore_eos: true, ..StopParams::default() };
    Request { prompt: vec![5, 6, 7], sampling, stop, logprobs: None, ..Request::default() }
}

#[test]
fn a_fault_of_the_gpu_ends_every_request_with_an_error_that_names_the_step_and_refuses_later_ones() {
    let test = "a_fault_of_the_gpu_ends_every_request_with_an_error_that_names_the_step_and_refuses_later_ones";
    match Device::open(0) {
        Ok(_) if stoker_kernels::built_with_kernels() => {}
        Ok(_) => return skip(test, "built without GPU kernels"),
        Err(absent) => return skip(test, &absent.to_string()),
    }
    let engine = start();
    let mut streams: Vec<_> = (0..8).map(|_| engine.submit(long_request()).expect("it is taken")).collect();
    for stream in &mut streams {
        assert!(matches!(stream.blocking_next(), Some(RequestEvent::Delta { .. })), "every one runs");
    }
    stoker_gpu_fault::fail(0).expect("it starts");
    for stream in streams {
        let event = terminal(stream).expect("a terminal, not a hang");
        let RequestEvent::Finished { reason: FinishReason::Error(reason), .. } = event else { panic!("{event:?}") };
        println!("{reason}");
        assert!(reason.contains("cuda:0") && reason.contains("stream 0") && reason.contains("8 sequences"), "{reason}");
    }
    let deadline = Instant::now() + PATIENCE;
    while engine.load().stopped.is_none() && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
    let refusal = engine.submit(long_request()).expect_err("nothing computes any more").to_string();
    assert!(refusal.contains("step failed"), "{refusal}");
    engine.shutdown();
}
