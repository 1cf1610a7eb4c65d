//! Grammars on a GPU: its draws keep to masks that arrive while it computes, and in the batch-invariant mode nobody can tell who was
//! drawn beside whom, nor whether what had to come was drawn at all. Skipped where there is no GPU.

use stoker_engine::{DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits};

use crate::{common, cuda, determinism, jump};

/// With a small cache where none is asked for, so that there is room for others.
fn start(limits: EngineLimits) -> EngineHandle {
    let limits = EngineLimits { kv_cache_tokens: limits.kv_cache_tokens.or(Some(64 * 1024)), ..limits };
    let config = EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(&common::ember(), limits) };
    Engine::start(config, |_| {}).expect("the model starts")
}

fn start_invariant(limits: EngineLimits) -> EngineHandle {
    start(EngineLimits { batch_invariant: true, ..limits })
}

#[test]
fn on_a_gpu_every_token_is_one_that_its_grammar_allows() {
    if cuda::has_gpu("on_a_gpu_every_token_is_one_that_its_grammar_allows") {
        jump::assert_grammars_are_followed(&start(jump::roomy()));
    }
}

#[test]
fn on_a_gpu_what_comes_is_what_would_have_been_drawn() {
    if cuda::has_hopper("on_a_gpu_what_comes_is_what_would_have_been_drawn") {
        jump::told_as_drawn(&start_invariant(jump::roomy()), &start_invariant(jump::tight()));
    }
}

#[test]
fn on_a_gpu_a_hundred_greedy_and_thirty_drawn_runs_under_noise_are_one() {
    if cuda::has_hopper("on_a_gpu_a_hundred_greedy_and_thirty_drawn_runs_under_noise_are_one") {
        determinism::assert_runs_are_one(&start_invariant(determinism::limits()));
    }
}
