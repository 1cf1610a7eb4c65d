//! Models cut into stages, each on a GPU of its own; where there is one GPU, beside each other on that.

use stoker_engine::{
    Engine, EngineConfig, EngineHandle, EngineLimits, KvCacheDtype, Quantization, Request, StartError, TokenId,
    exec::cuda::CudaModel,
};
use stoker_kernels::Device;

use crate::{common, cuda, cuda_families, cuda_invariance, jump};

fn limits() -> EngineLimits {
    EngineLimits { kv_cache_tokens: Some(64 * 1024), memory_fraction: 0.2, ..EngineLimits::default() }
}

/// In stages on as many GPUs, or all on the only one.
pub(crate) fn open_staged(config: &EngineConfig) -> Result<CudaModel, StartError> {
    let last = config.limits.pipeline_parallel - 1;
    if Device::open(last).is_ok() {
        println!("{} stages on GPUs of their own", last + 1);
        return CudaModel::open(config, 0, &|_| {});
    }
    println!("{} stages on one GPU", last + 1);
    CudaModel::open_stages_on_one(config, 0, &|_| {})
}

fn open(n_stages: usize, limits: EngineLimits) -> CudaModel {
    let limits = EngineLimits { pipeline_parallel: n_stages, ..limits };
    open_staged(&common::config(&common::ember(), limits)).unwrap()
}

fn start(n_stages: usize, limits: EngineLimits) -> EngineHandle {
    let CudaModel { executor, parts } = open(n_stages, limits);
    Engine::start_with(Box::new(executor), parts)
}

#[test]
fn logits_of_stages_are_the_cpus_within_the_noise_of_bf16() {
    if !cuda::has_gpu("logits_of_stages_are_the_cpus_within_the_noise_of_bf16") {
        return;
    }
    let tokens = cuda::golden().0;
    let expected = common::open(&common::ember()).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
    for n_stages in [2, 3] {
        let mut gpus = open(n_stages, limits());
        for chunk_len in [64, 37, 1] {
            let found = gpus.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
            cuda::check_noise(&format!("{n_stages} stages, chunks of {chunk_len}"), &found, &expected);
        }
    }
}

/// Five hundred at once, in steps of two parts, which come and go.
#[test]
fn answers_of_two_stages_are_those_of_one_gpu_in_every_format() {
    let test = "answers_of_two_stages_are_those_of_one_gpu_in_every_format";
    if !cuda::has_gpu(test) {
        return;
    }
    let formats = [
        (None, None),
        (Some(Quantization::Fp8), None),
        (None, Some(KvCacheDtype::Fp8)),
        (Some(Quantization::Fp8), Some(KvCacheDtype::Fp8)),
    ];
    for (quantization, kv_cache_dtype) in formats {
        if (quantization, kv_cache_dtype) != (None, None) && !cuda::has_hopper(test) {
            return;
        }
        let limits = || EngineLimits { quantization, kv_cache_dtype, ..limits() };
        let (one, two) = (start(1, limits()), start(2, limits()));
        cuda::check_alike(&format!("{quantization:?}, {kv_cache_dtype:?}"), [&one, &two], 0.98);
        cuda::check_repeats(&two);
        assert_eq!(one.load().stopped, None);
    }
}

/// The bits of a request alone and among 255 others, whose steps are cut into parts.
#[test]
fn a_batch_invariant_pipeline_gives_a_request_the_same_bits_in_whatever_part() {
    let test = "a_batch_invariant_pipeline_gives_a_request_the_same_bits_in_whatever_part";
    if !cuda::has_hopper(test) {
        return;
    }
    let engine = start(2, EngineLimits { batch_invariant: true, max_model_len: Some(1024), ..limits() });
    let prompt: Vec<TokenId> = cuda::golden().0;
    let asked = || Request { logprobs: Some(3), ..common::greedy(prompt.clone(), 24) };
    let alone = cuda_invariance::run(&engine, &asked());
    let others: Vec<_> = (0..255)
        .map(|n| engine.submit(common::greedy(prompt[..1 + n % prompt.len()].to_vec(), 10 + n as u32 % 40)).unwrap())
        .collect();
    let among = cuda_invariance::run(&engine, &asked());
    others.into_iter().for_each(|stream| drop(common::read_all(stream)));
    assert_eq!(alone, among);
}

#[test]
fn grammars_are_followed_in_stages_on_gpus() {
    if cuda::has_gpu("grammars_are_followed_in_stages_on_gpus") {
        jump::assert_grammars_are_followed(&start(2, EngineLimits { max_model_len: Some(512), ..limits() }));
    }
}

#[test]
fn families_are_transformers_in_two_stages_too() {
    if !cuda::has_gpu("families_are_transformers_in_two_stages_too") {
        return;
    }
    // One that ranks do not share, ones with norms behind halves, windows, tied heads.
    for name in ["olmo2", "gemma2", "gemma3", "qwen2-windows-yarn", "llama-biases-everywhere", "smollm3"] {
        cuda_families::check_staged(name, 2);
    }
}

#[test]
fn more_stages_than_layers_are_refused_by_their_number() {
    if !cuda::has_gpu("more_stages_than_layers_are_refused_by_their_number") {
        return;
    }
    let many = EngineLimits { pipeline_parallel: 99, ..limits() };
    let refused = CudaModel::open(&common::config(&common::ember(), many), 0, &|_| {}).map(drop);
    let refusal = refused.map_err(|error: StartError| error.to_string()).unwrap_err();
    assert!(refusal.contains("99 stages of a pipeline are more than the model's"), "{refusal}");
}
