//! The batch-invariant mode on a GPU: a request's logits are the same bits whoever shares its steps, however its prompt is
//! cut, whatever of it is cached, and after a preemption. Skipped where there is no GPU that has the mode.

use std::path::Path;

use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, FinishReason, KvCacheDtype, PositionLogprobs,
    Quantization, Request, RequestEvent, RequestStream, SamplingParams, TokenId, Usage, exec::cuda::CudaModel,
};

use crate::{common, cuda, cuda_quantised};

const N_TOKENS: u32 = 40;

/// What is multiplied and what is cached in fewer bits.
type Formats = (Option<Quantization>, Option<KvCacheDtype>);

const PLAIN: Formats = (None, None);
const ALL_FP8: Formats = (Some(Quantization::Fp8), Some(KvCacheDtype::Fp8));

/// The mode's settings in a context that both models have.
fn limits() -> EngineLimits {
    EngineLimits {
        batch_invariant: true,
        max_model_len: Some(512),
        kv_cache_tokens: Some(64 * 1024),
        ..EngineLimits::default()
    }
}

fn config(model: &Path, limits: EngineLimits) -> EngineConfig {
    EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(model, limits) }
}

fn start(model: &Path, limits: EngineLimits) -> EngineHandle {
    Engine::start(config(model, limits), |_| {}).expect("the model starts")
}

/// Ember, and two layers of random weights.
fn on_each_model(check: impl Fn(&Path)) {
    let directory = tempfile::tempdir().unwrap();
    cuda::write_llama(directory.path());
    check(directory.path());
    check(&common::ember());
}

fn prompt(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (seed * 131 + i * i * 7 + i * 13) % 256).collect()
}

#[test]
fn logits_are_the_same_bits_at_every_chunk_size() {
    if !cuda::has_hopper("logits_are_the_same_bits_at_every_chunk_size") {
        return;
    }
    on_each_model(|model| {
        for formats in [PLAIN, (Some(Quantization::Fp8), None), (None, Some(KvCacheDtype::Fp8)), ALL_FP8] {
            same_bits_at_every_chunk_size(model, formats);
        }
    });
}

/// One row is quantised by the products that read it, all others by who leaves them: by warps that share the depth of a row, and by tiles.
#[test]
fn logits_of_four_bits_are_the_same_bits_at_every_chunk_size() {
    if !cuda::has_hopper("logits_of_four_bits_are_the_same_bits_at_every_chunk_size") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    cuda_quantised::write_four_bits(directory.path());
    for kv_cache_dtype in [None, Some(KvCacheDtype::Fp8)] {
        same_bits_at_every_chunk_size(directory.path(), (None, kv_cache_dtype));
        same_bits_whoever_else_runs(directory.path(), (None, kv_cache_dtype));
    }
}

fn same_bits_at_every_chunk_size(model: &Path, (quantization, kv_cache_dtype): Formats) {
    let limits = EngineLimits { quantization, kv_cache_dtype, ..limits() };
    let mut opened = CudaModel::open(&config(model, limits), 0, &|_| {}).unwrap();
    let tokens = prompt(3, 250);
    let whole = opened.executor.teacher_forced_logits(&tokens, tokens.len()).unwrap();
    for chunk_len in [128, 64, 37, 16, 1] {
        let found = opened.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
        let odd = (0..tokens.len()).find(|&row| bits(&found[row]) != bits(&whole[row]));
        assert_eq!(
            odd, None,
            "the first row that differs in chunks of {chunk_len}, {quantization:?}, {kv_cache_dtype:?}"
        );
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

/// What a request got: tokens, and logarithms of probabilities, which say when a single logit changes.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    tokens: Vec<TokenId>,
    logprobs: Vec<u32>,
}

fn read(mut stream: RequestStream) -> (Answer, Usage) {
    let mut answer = Answer { tokens: Vec::new(), logprobs: Vec::new() };
    while let Some(event) = stream.blocking_next() {
        match event {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { tokens, logprobs, .. } => {
                answer.tokens.extend(tokens);
                answer.logprobs.extend(logprobs.iter().flat_map(logprob_bits));
            }
            RequestEvent::Finished { reason, usage, .. } => {
                assert_eq!(reason, FinishReason::Length);
                return (answer, usage);
            }
        }
    }
    panic!("a stream ends with a terminal");
}

fn logprob_bits(position: &PositionLogprobs) -> impl Iterator<Item = u32> {
    std::iter::once(&position.chosen).chain(&position.top).map(|token| token.logprob.to_bits())
}

pub(crate) fn run(engine: &EngineHandle, request: &Request) -> Answer {
    read(engine.submit(request.clone()).unwrap()).0
}

/// Runs `request` in the middle of `n` others.
fn run_among(engine: &EngineHandle, request: &Request, n: u32) -> Answer {
    let other =
        |seed: u32| engine.submit(common::greedy(prompt(100 + seed, 5 + seed * 3 % 190), 30 + seed % 40)).unwrap();
    let before: Vec<_> = (0..n / 2).map(other).collect();
    let stream = engine.submit(request.clone()).unwrap();
    let after: Vec<_> = (n / 2..n).map(other).collect();
    let answer = read(stream).0;
    before.into_iter().chain(after).for_each(|stream| drop(read(stream)));
    answer
}

fn asked() -> Vec<Request> {
    let seeded = SamplingParams { temperature: 0.9, top_p: 0.95, seed: 11, ..SamplingParams::default() };
    let requests = [
        common::greedy(prompt(1, 230), N_TOKENS),
        common::greedy(prompt(2, 1), N_TOKENS),
        Request { sampling: seeded, ..common::greedy(prompt(5, 90), N_TOKENS) },
    ];
    requests.map(|request| Request { logprobs: Some(3), ..request }).to_vec()
}

#[test]
fn a_request_is_the_same_bits_alone_among_255_others_chunked_cached_and_preempted() {
    if !cuda::has_hopper("a_request_is_the_same_bits_alone_among_255_others_chunked_cached_and_preempted") {
        return;
    }
    on_each_model(|model| {
        [PLAIN, ALL_FP8].into_iter().for_each(|formats| same_bits_whoever_else_runs(model, formats));
    });
}

fn same_bits_whoever_else_runs(model: &Path, (quantization, kv_cache_dtype): Formats) {
    let limits = || EngineLimits { quantization, kv_cache_dtype, ..limits() };
    let uncached = start(model, EngineLimits { prefix_caching: false, ..limits() });
    let cached = start(model, limits());
    let chunks = EngineLimits { max_batched_tokens: Some(16), max_num_seqs: Some(4), ..limits() };
    let chunked = start(model, chunks);
    // 32 sequences of up to 270 tokens do not fit 1024.
    let tight = start(model, EngineLimits { kv_cache_tokens: Some(1024), expected_completion: None, ..limits() });
    for request in asked() {
        let alone = run(&uncached, &request);
        assert_eq!(alone.tokens.len(), N_TOKENS as usize);
        assert_eq!(run_among(&uncached, &request, 255), alone, "among 255 others");
        assert_eq!(run(&chunked, &request), alone, "chunked at 16");
        assert_eq!(run_among(&chunked, &request, 9), alone, "chunked at what three others leave");
        assert_eq!(run(&cached, &request), alone, "with an empty cache");
        assert_eq!(run_among(&cached, &request, 40), alone, "with its prompt cached");
        assert_eq!(run_among(&tight, &request, 32), alone, "after preemptions");
    }
    assert!(tight.load().preemptions > 0, "the tight cache preempted somebody");
    check_second_turn(&uncached, &cached);
}

/// A prompt that holds an earlier answer finds the earlier prompt in the cache, and not what decoding left there.
fn check_second_turn(uncached: &EngineHandle, cached: &EngineHandle) {
    let first = &asked()[0];
    let mut both = first.prompt.clone();
    both.extend(run(cached, first).tokens);
    both.extend(prompt(8, 20));
    let second = Request { prompt: both, ..first.clone() };
    let (answer, usage) = read(cached.submit(second.clone()).unwrap());
    assert_eq!(usage.cached_tokens, first.prompt.len() as u32 / 16 * 16, "whole blocks of the first prompt");
    assert_eq!(answer, run(uncached, &second), "with the first turn cached");
}
