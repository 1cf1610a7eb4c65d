//! One of two GPUs that share a model launches nothing more. In a process of its own: the other one's context fails.

#[path = "../../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use skip::skip;
use stoker_engine::{
    DeviceChoice, EngineConfig, EngineLimits, ModelFiles,
    exec::cuda::{CudaModel, Decodes},
};
use stoker_kernels::Device;

#[test]
fn a_rank_that_stalls_fails_the_others_within_ten_seconds() {
    let test = "a_rank_that_stalls_fails_the_others_within_ten_seconds";
    if !stoker_kernels::built_with_kernels() {
        return skip(test, "built without GPU kernels");
    }
    if let Err(absent) = Device::open(1) {
        return skip(test, &format!("two GPUs are needed: {absent}"));
    }
    let model = ModelFiles::Directory(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember"));
    let limits = EngineLimits { tensor_parallel: 2, kv_cache_tokens: Some(64 * 1024), ..EngineLimits::default() };
    let config = EngineConfig { model, limits, device: DeviceChoice::Cuda(0) };
    let mut opened = CudaModel::open(&config, 0, &|_| {}).expect("the model starts");
    let began = Instant::now();
    // The first rank alone: the second one never comes to the first sum.
    let failure = opened.executor.first().replays_that_differ(Decodes { n: 1, context: 16 }, 1).unwrap_err();
    println!("{:.1} s: {failure}", began.elapsed().as_secs_f32());
    assert!(failure.to_string().contains("one of 2 GPUs that share the model"), "{failure}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}
