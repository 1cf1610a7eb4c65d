//! A request's tokens are its own: they do not depend on who shares its steps, how its prompt is cut, or whether it
//! lost its blocks on the way.

use std::{
    path::Path,
    sync::mpsc::{Receiver, Sender, channel},
};

use stoker_engine::{
    Engine, EngineHandle, EngineLimits, LoadedModel, Request, SamplingParams, TokenId,
    constraint::Masks,
    exec::{CpuExecutor, ExecError, Executor},
    sched::{Step, StepOutput},
};

use crate::common;

const MODELS: [&str; 3] = ["gqa-f32", "llama3-rope-tied-bf16", "sharded-bf16"];
const N_TOKENS: u32 = 60;

fn prompt(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (seed * 131 + i * i * 7 + i * 13) % 256).collect()
}

fn asked() -> Vec<Request> {
    let seeded = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 11, ..SamplingParams::default() };
    let sampled = Request { sampling: seeded, ..common::greedy(prompt(5, 90), N_TOKENS) };
    vec![common::greedy(prompt(1, 90), N_TOKENS), common::greedy(prompt(2, 3), N_TOKENS), sampled]
}

fn run(engine: &EngineHandle, request: Request) -> (Vec<TokenId>, String) {
    common::read_all(engine.submit(request).unwrap())
}

/// Runs `request` in the middle of 31 others.
fn run_in_company(engine: &EngineHandle, request: Request) -> (Vec<TokenId>, String) {
    let other = |seed: u32| engine.submit(common::greedy(prompt(100 + seed, 5 + seed * 3), 40 + seed)).unwrap();
    let before: Vec<_> = (0..16).map(other).collect();
    let stream = engine.submit(request).unwrap();
    let after: Vec<_> = (16..31).map(other).collect();
    let result = common::read_all(stream);
    before.into_iter().chain(after).for_each(|stream| drop(common::read_all(stream)));
    result
}

/// Runs each request in every way there is and expects the same tokens and text.
fn check(model: &Path, requests: Vec<Request>) {
    let alone = common::start(model, EngineLimits::default());
    let chunked = EngineLimits { max_batched_tokens: Some(16), max_num_seqs: Some(4), ..EngineLimits::default() };
    let chunked = common::start(model, chunked);
    let threaded = common::start(model, EngineLimits { threads: Some(3), ..EngineLimits::default() });
    // 32 sequences of 40 to 200 tokens do not fit 768: somebody is preempted.
    let tight = EngineLimits {
        kv_cache_tokens: Some(768),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    };
    let tight = common::start(model, tight);
    for request in requests {
        let expected = run(&alone, request.clone());
        assert_eq!(expected.0.len(), N_TOKENS as usize);
        assert_eq!(run(&chunked, request.clone()), expected, "chunked at 16");
        assert_eq!(run(&threaded, request.clone()), expected, "with 3 threads");
        assert_eq!(run_in_company(&alone, request.clone()), expected, "with 31 others");
        assert_eq!(run_in_company(&tight, request), expected, "after preemption");
    }
    assert!(tight.load().preemptions > 0, "the tight cache preempted somebody");
    assert_eq!(alone.load().preemptions, 0);
}

#[test]
fn tokens_are_the_same_alone_in_company_chunked_and_after_preemption() {
    for model in MODELS {
        check(&common::checkpoint(model), asked());
    }
}

#[test]
fn the_built_in_model_too_gives_the_same_tokens_in_every_way() {
    check(&common::ember(), asked().into_iter().take(1).collect());
}

/// The CPU's executor, whose first step waits until the other end is dropped: whoever is submitted before that shares
/// the engine with the first request, however slow the machine is.
struct Held {
    executor: CpuExecutor,
    hold: Receiver<()>,
}

impl Executor for Held {
    fn copies_blocks(&self) -> bool {
        self.executor.copies_blocks()
    }

    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        let _ = self.hold.recv();
        self.executor.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.executor.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.executor.finish()
    }
}

fn start_held(model: &Path, limits: EngineLimits) -> (EngineHandle, Sender<()>) {
    let LoadedModel { executor, parts } = LoadedModel::open(&common::config(model, limits), &|_| {}).unwrap();
    let (release, hold) = channel();
    (Engine::start_with(Box::new(Held { executor, hold }), parts), release)
}

#[test]
fn a_preempted_request_goes_on_with_the_same_tokens() {
    let directory = common::checkpoint("gqa-f32");
    let alone = common::start(&directory, EngineLimits::default());
    // Two sequences of 90 + 60 tokens need 20 blocks; 16 let both start and only one finish at a time.
    let limits = EngineLimits { kv_cache_tokens: Some(256), expected_completion: None, ..EngineLimits::default() };
    let (tight, release) = start_held(&directory, limits);
    let requests = [common::greedy(prompt(1, 90), N_TOKENS), common::greedy(prompt(9, 90), N_TOKENS)];
    let expected: Vec<_> = requests.iter().map(|request| run(&alone, request.clone())).collect();
    let streams: Vec<_> = requests.into_iter().map(|request| tight.submit(request).unwrap()).collect();
    drop(release);
    let found: Vec<_> = streams.into_iter().map(common::read_all).collect();
    assert_eq!(found, expected);
    let preempted: Vec<u32> = tight.take_samples().requests.iter().map(|sample| sample.preemptions).collect();
    assert_eq!(preempted.iter().filter(|n| **n > 0).count(), 1, "{preempted:?}: the newer one was preempted");
}
