//! Models that several GPUs share, of which each holds a rank. Skipped where there are fewer.

use stoker_engine::{
    Engine, EngineHandle, EngineLimits, KvCacheDtype, Quantization, Request, StartError, TokenId, exec::cuda::CudaModel,
};
use stoker_fit::gpu::BESIDE_E4M3_ROWS;
use stoker_kernels::Device;

use crate::{
    common, cuda, cuda_families, cuda_invariance,
    cuda_quantised::{self, N_ROWS},
    skip::skip,
};

/// As many GPUs; else the reason why not is recorded.
fn has_gpus(n_ranks: usize, test: &str) -> bool {
    let n_gpus = (0..n_ranks).filter(|ordinal| Device::open(*ordinal).is_ok()).count();
    if n_gpus > 0 && n_gpus < n_ranks {
        skip(test, &format!("{n_ranks} GPUs are needed, {n_gpus} there"));
    }
    (n_gpus == 0 || n_gpus == n_ranks) && cuda::has_gpu(test)
}

fn limits() -> EngineLimits {
    EngineLimits { kv_cache_tokens: Some(64 * 1024), memory_fraction: 0.45, ..EngineLimits::default() }
}

fn open(n_ranks: usize, limits: EngineLimits) -> CudaModel {
    let limits = EngineLimits { tensor_parallel: n_ranks, ..limits };
    CudaModel::open(&common::config(&common::ember(), limits), 0, &|_| {}).unwrap()
}

fn start(n_ranks: usize, limits: EngineLimits) -> EngineHandle {
    let CudaModel { executor, parts } = open(n_ranks, limits);
    Engine::start_with(Box::new(executor), parts)
}

#[test]
fn logits_of_several_gpus_are_the_cpus_within_the_noise_of_bf16() {
    if !has_gpus(2, "logits_of_several_gpus_are_the_cpus_within_the_noise_of_bf16") {
        return;
    }
    let tokens = cuda::golden().0;
    let expected = common::open(&common::ember()).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
    // Four ranks are more than ember's KV heads.
    let has_four = has_gpus(4, "logits of four GPUs");
    for n_ranks in [2, 4].into_iter().filter(|n_ranks| *n_ranks == 2 || has_four) {
        let mut gpus = open(n_ranks, limits());
        for chunk_len in [64, 37, 1] {
            let found = gpus.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
            cuda::check_noise(&format!("{n_ranks} ranks, chunks of {chunk_len}"), &found, &expected);
        }
    }
}

#[test]
fn greedy_answers_of_two_gpus_are_right_as_often_and_a_request_gets_the_same_every_time() {
    if !has_gpus(2, "greedy_answers_of_two_gpus_are_right_as_often_and_a_request_gets_the_same_every_time") {
        return;
    }
    let (one, two) = (start(1, limits()), start(2, limits()));
    cuda::check_alike("one and two GPUs", [&one, &two], 0.99);
    cuda::check_repeats(&two);
    assert_eq!(one.load().stopped, None);
}

#[test]
fn quantised_weights_and_caches_of_two_gpus_answer_as_those_of_one() {
    let test = "quantised_weights_and_caches_of_two_gpus_answer_as_those_of_one";
    if !cuda::has_hopper(test) || !has_gpus(2, test) {
        return;
    }
    for (quantization, kv_cache_dtype) in [
        (Some(Quantization::Fp8), None),
        (None, Some(KvCacheDtype::Fp8)),
        (Some(Quantization::Fp8), Some(KvCacheDtype::Fp8)),
    ] {
        let limits = || EngineLimits { quantization, kv_cache_dtype, ..limits() };
        let (one, two) = (start(1, limits()), start(2, limits()));
        cuda::check_alike(&format!("{quantization:?}, {kv_cache_dtype:?}"), [&one, &two], 0.98);
    }
}

/// Codes, scales and sums of products by codes are cut between ranks, and so is what many rows are multiplied with.
#[test]
fn four_bits_of_two_gpus_answer_as_those_of_one() {
    let test = "four_bits_of_two_gpus_answer_as_those_of_one";
    if !cuda::has_hopper(test) || !has_gpus(2, test) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    cuda_quantised::write_four_bits(directory.path());
    let open = |n_ranks, limits| {
        let limits = EngineLimits { tensor_parallel: n_ranks, ..limits };
        CudaModel::open(&common::config(directory.path(), limits), 0, &|_| {}).unwrap()
    };
    // With more rows one GPU has these in e4m3, and several do not.
    let few_rows = BESIDE_E4M3_ROWS.start - 1;
    let [one, two] = [1, 2].map(|n_ranks| {
        let few = EngineLimits { max_num_seqs: Some(few_rows as u32), ..limits() };
        let CudaModel { executor, parts } = open(n_ranks, few);
        Engine::start_with(Box::new(executor), parts)
    });
    assert!(one.model().memory.weights_bytes < one.model().n_params, "they are held as codes");
    cuda::check_alike("four bits", [&one, &two], 0.98);
    drop((one, two));

    let tokens: Vec<TokenId> = cuda::golden().0.into_iter().cycle().take(N_ROWS).collect();
    let rows = Some(N_ROWS as u32);
    let many = || EngineLimits { max_model_len: rows, max_num_seqs: rows, max_batched_tokens: rows, ..limits() };
    let [[few_one, many_one], [few_two, many_two]] = [1, 2].map(|n_ranks| {
        let mut model = open(n_ranks, many());
        [few_rows, N_ROWS].map(|chunk_len| model.executor.teacher_forced_logits(&tokens, chunk_len).unwrap())
    });
    let mean = |found: &[Vec<f32>], wanted: &[Vec<f32>]| {
        found.iter().zip(wanted).map(|(a, b)| cuda::difference(a, b)).sum::<f64>() / found.len() as f64
    };
    let (codes, widened) = (mean(&few_two, &few_one), mean(&many_two, &many_one));
    let (cost_one, cost_two) = (mean(&many_one, &few_one), mean(&many_two, &few_one));
    println!(
        "by codes {codes:.2e} of the largest logit from one GPU, widened {widened:.2e}; widening costs {cost_one:.2e}, {cost_two:.2e}"
    );
    // The order of sums in bf16; rows and weights in e4m3 are scaled by what a rank holds.
    assert!(codes < 2.0 * cuda::golden().1, "{codes}");
    assert!(cost_one > codes && cost_two < 1.5 * cost_one, "{cost_one} {cost_two}");
}

#[test]
fn a_batch_invariant_group_gives_the_same_bits_at_every_chunk_size() {
    let test = "a_batch_invariant_group_gives_the_same_bits_at_every_chunk_size";
    if !cuda::has_hopper(test) || !has_gpus(2, test) {
        return;
    }
    let tokens: Vec<TokenId> = cuda::golden().0;
    let mut gpus = open(2, EngineLimits { batch_invariant: true, max_model_len: Some(512), ..limits() });
    let mut bits = |chunk_len: usize| -> Vec<Vec<u32>> {
        let rows = gpus.executor.teacher_forced_logits(&tokens, chunk_len).unwrap();
        rows.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
    };
    let whole = bits(64);
    for chunk_len in [37, 16, 1] {
        let found = bits(chunk_len);
        let odd = (0..tokens.len()).find(|&row| found[row] != whole[row]);
        assert_eq!(odd, None, "the first row that differs in chunks of {chunk_len}");
    }
}

/// A step of more rows than may be drawn is shared out by rows; the pieces are not.
#[test]
fn a_prompt_whose_rows_ranks_share_out_is_answered_with_the_bits_of_one_in_pieces() {
    let test = "a_prompt_whose_rows_ranks_share_out_is_answered_with_the_bits_of_one_in_pieces";
    if !cuda::has_hopper(test) || !has_gpus(2, test) {
        return;
    }
    let words = cuda::golden().0;
    let prompt: Vec<TokenId> = words.iter().copied().cycle().take(1100).collect();
    let has_four = has_gpus(4, "rows shared out by four GPUs");
    for (n_ranks, quantization) in [(2, Some(Quantization::Fp8)), (4, None), (4, Some(Quantization::Fp8))] {
        if n_ranks == 4 && !has_four {
            continue;
        }
        let answer = |most: u32| {
            let (max_num_seqs, max_batched_tokens) = (Some(8), Some(most));
            let sizes = EngineLimits { max_num_seqs, max_batched_tokens, ..limits() };
            let engine = start(n_ranks, EngineLimits { batch_invariant: true, quantization, ..sizes });
            cuda_invariance::run(&engine, &Request { logprobs: Some(3), ..common::greedy(prompt.clone(), 8) })
        };
        assert_eq!(answer(2048), answer(64), "{n_ranks} ranks, {quantization:?}");
    }
}

#[test]
fn every_family_that_ranks_can_share_is_transformers_on_two_gpus_too() {
    if !has_gpus(2, "every_family_that_ranks_can_share_is_transformers_on_two_gpus_too") {
        return;
    }
    for name in [
        "llama-heads-of-80",
        "llama-biases-everywhere",
        "mistral-window",
        "qwen2-windows-yarn",
        "qwen3",
        "smollm3",
        "phi3-heads-of-96",
        "phi4-longrope",
        "gemma2",
        "gemma3",
    ] {
        cuda_families::check_shared(name, 2);
    }
}

/// What is normed over a whole row is not a rank's to norm.
#[test]
fn a_family_or_a_number_of_gpus_that_does_not_divide_is_refused_by_name() {
    if !cuda::has_gpu("a_family_or_a_number_of_gpus_that_does_not_divide_is_refused_by_name") {
        return;
    }
    let refusal = |error: StartError| error.to_string();
    let olmo = refusal(cuda_families::open_shared("olmo2", 2).unwrap_err());
    assert!(olmo.contains("q_norm.weight: Olmo2ForCausalLM norms all heads of a row together"), "{olmo}");
    let three = EngineLimits { tensor_parallel: 3, ..limits() };
    let three = CudaModel::open(&common::config(&common::ember(), three), 0, &|_| {}).unwrap_err();
    let three = refusal(three);
    assert!(three.contains("3 ranks do not divide its 4 heads of 64"), "{three}");
}
