//! Rows of prompts that a GPU reads beside its draws: embeddings and log-probabilities of prompts. What is read is what the same rows
//! give when they are drawn after, whoever shares the step, and who shares it draws what it would have drawn. Skipped where there is
//! no GPU.

use std::thread;

use serde_json::Value;
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, Pooling, Request, TokenId, exec::cuda::CudaModel,
};

use crate::{
    common, cuda,
    embeddings::{asked, model, vector},
    goldens::Golden,
    scores::scored,
};

/// Passes of no more rows than sequences, and a prompt of several steps.
fn limits(max_batched_tokens: u32, batch_invariant: bool) -> EngineLimits {
    EngineLimits {
        max_batched_tokens: Some(max_batched_tokens),
        max_num_seqs: Some(24),
        max_model_len: Some(512),
        kv_cache_tokens: Some(16 * 1024),
        batch_invariant,
        ..EngineLimits::default()
    }
}

fn config(limits: EngineLimits) -> EngineConfig {
    EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(&common::ember(), limits) }
}

fn start(limits: EngineLimits) -> EngineHandle {
    Engine::start(config(limits), |_| {}).expect("the model starts")
}

/// How likely a token is after these logits, and its rank.
fn score(logits: &[f32], token: TokenId) -> (f64, u32) {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum::<f64>().ln() + max;
    let own = logits[token as usize];
    (f64::from(own) - total, 1 + logits.iter().filter(|logit| **logit > own).count() as u32)
}

/// In the batch-invariant mode they are the same bits, so the ranks are, too.
#[test]
fn a_prompt_s_tokens_are_as_likely_as_the_logits_in_front_of_them_say() {
    if !cuda::has_hopper("a_prompt_s_tokens_are_as_likely_as_the_logits_in_front_of_them_say") {
        return;
    }
    let tokens = cuda::golden().0;
    let logits =
        CudaModel::open(&config(limits(64, true)), 0, &|_| {}).unwrap().executor.teacher_forced_logits(&tokens, 24);
    let logits = logits.unwrap();
    for max_batched_tokens in [32, 64, 512] {
        let engine = start(limits(max_batched_tokens, true));
        // Twice: the second time the prefix cache has all of it.
        for k in [5, 20] {
            let (told, drawn) =
                scored(&engine, Request { prompt_logprobs: Some(k), ..common::greedy(tokens.clone(), 1) });
            assert_eq!((told.len(), drawn.len()), (tokens.len() - 1, 1));
            for ((position, logits), token) in told.iter().zip(&logits).zip(&tokens[1..]) {
                let (logprob, rank) = score(logits, *token);
                assert_eq!((position.rank, position.logprobs.chosen.token), (rank, *token));
                assert!(
                    (f64::from(position.logprobs.chosen.logprob) - logprob).abs() < 1e-4,
                    "{position:?}, {logprob}"
                );
                let top: Vec<TokenId> = position.logprobs.top.iter().map(|likely| likely.token).collect();
                let mut likeliest: Vec<TokenId> = (0..logits.len() as TokenId).collect();
                likeliest.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
                assert_eq!(top, likeliest[..usize::from(k)]);
            }
        }
    }
}

#[test]
fn vectors_are_those_of_sentence_transformers_within_the_noise_of_bf16() {
    if !cuda::has_gpu("vectors_are_those_of_sentence_transformers_within_the_noise_of_bf16") {
        return;
    }
    let noise = 2.0 * cuda::golden().1;
    for (name, pooling) in [("qwen3-last", Pooling::LastToken), ("llama-mean", Pooling::Mean)] {
        let golden = Golden::read(&model(name));
        let limits = EngineLimits { max_batched_tokens: Some(32), ..EngineLimits::default() };
        let config = EngineConfig { device: DeviceChoice::Cuda(0), ..common::config(&model(name), limits) };
        let engine = Engine::start(config, |_| {}).expect("the model starts");
        let texts = golden.0["texts"].as_array().unwrap().iter().filter_map(Value::as_str);
        for (text, theirs) in texts.zip(golden.0["vectors"].as_array().unwrap()) {
            let theirs: Vec<f32> =
                theirs.as_array().unwrap().iter().map(|value| value.as_f64().unwrap() as f32).collect();
            let prompt = engine.tokenizer().encode(text, true).unwrap();
            let mut ours = vector(&engine, asked(prompt, pooling));
            if engine.model().embedding.normalizes {
                let length = ours.iter().map(|value| value * value).sum::<f32>().sqrt();
                ours.iter_mut().for_each(|value| *value /= length);
            }
            let distance = cuda::difference(&ours, &theirs);
            println!("{name}, {} bytes: {distance:.2e} of the largest value; bound {noise:.2e}", text.len());
            assert!(distance < noise, "{name}, {text}: {distance}");
        }
    }
}

#[test]
fn a_vector_on_a_gpu_has_the_same_bits_however_its_prompt_is_cut_found_or_accompanied() {
    if !cuda::has_hopper("a_vector_on_a_gpu_has_the_same_bits_however_its_prompt_is_cut_found_or_accompanied") {
        return;
    }
    let prompt: Vec<TokenId> = (0..90).map(|n| 5 + n * 7 % 400).collect();
    let cpu = common::start(&common::ember(), EngineLimits::default());
    for pooling in [Pooling::LastToken, Pooling::Mean] {
        let (whole, cut) = (start(limits(512, true)), start(limits(32, true)));
        let alone = vector(&whole, asked(prompt.clone(), pooling));
        let distance = cuda::difference(&alone, &vector(&cpu, asked(prompt.clone(), pooling)));
        println!("{pooling:?}: {distance:.2e} of the largest value beside the CPU");
        assert!(distance < 2.0 * cuda::golden().1, "{pooling:?}: {distance}");
        for engine in [&whole, &cut] {
            for _ in 0..2 {
                assert_eq!(vector(engine, asked(prompt.clone(), pooling)), alone, "{pooling:?}");
            }
            let together: Vec<_> = thread::scope(|scope| {
                let others = (0..40).map(|n| if n % 2 == 0 { prompt.clone() } else { (n..n + 60).collect() });
                let threads: Vec<_> =
                    others.map(|prompt| scope.spawn(|| vector(engine, asked(prompt, pooling)))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            for (n, vector) in together.into_iter().enumerate() {
                assert_eq!(vector == alone, n % 2 == 0, "{pooling:?} {n}");
            }
        }
    }
}

#[test]
fn who_shares_steps_that_are_read_draws_what_it_draws_alone() {
    if !cuda::has_hopper("who_shares_steps_that_are_read_draws_what_it_draws_alone") {
        return;
    }
    let engine = start(limits(64, true));
    let prompt = |n: TokenId| -> Vec<TokenId> { (0..20 + n).map(|at| (n * 31 + at * at) % 256).collect() };
    let drawn = |n: TokenId| {
        let temperature = if n.is_multiple_of(2) { 0.0 } else { 0.8 };
        let mut request = common::greedy(prompt(n), 60);
        request.sampling.temperature = temperature;
        request.sampling.seed = u64::from(n);
        common::read_all(engine.submit(request).unwrap())
    };
    let read = |n: TokenId| {
        let long: Vec<TokenId> = prompt(n).into_iter().cycle().take(150).collect();
        match n % 2 {
            0 => assert_eq!(vector(&engine, asked(long, Pooling::Mean)).len(), engine.model().hidden_size as usize),
            _ => assert_eq!(
                scored(&engine, Request { prompt_logprobs: Some(2), ..common::greedy(long, 3) }).0.len(),
                149
            ),
        }
    };
    let alone: Vec<_> = (0..8).map(drawn).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let readers: Vec<_> = (0..8).map(|n| scope.spawn(move || (0..6).for_each(|time| read(n + 8 * time)))).collect();
        let drawn = &drawn;
        let drawers: Vec<_> = (0..8).map(|n| scope.spawn(move || drawn(n))).collect();
        let answers = drawers.into_iter().map(|thread| thread.join().unwrap()).collect();
        readers.into_iter().for_each(|thread| thread.join().unwrap());
        answers
    });
    assert_eq!(together, alone);
}

#[test]
fn a_prompt_on_a_gpu_is_read_once_also_when_it_is_computed_again() {
    if !cuda::has_hopper("a_prompt_on_a_gpu_is_read_once_also_when_it_is_computed_again") {
        return;
    }
    // Four sequences grow to twice what the cache holds.
    let engine = start(EngineLimits {
        kv_cache_tokens: Some(256),
        expected_completion: None,
        max_model_len: Some(128),
        batch_invariant: true,
        ..EngineLimits::default()
    });
    let prompt = || (0..40).collect();
    let vector_alone = vector(&engine, asked(prompt(), Pooling::Mean));
    let scores_alone = scored(&engine, Request { prompt_logprobs: Some(1), ..common::greedy(prompt(), 1) }).0;
    thread::scope(|scope| {
        for n in 0..4 {
            let (engine, vector_alone, scores_alone) = (&engine, &vector_alone, &scores_alone);
            scope.spawn(move || match n % 2 {
                0 => {
                    let long = Request { pooling: Some(Pooling::Mean), ..common::greedy(prompt(), 80) };
                    assert_eq!(vector(engine, long), *vector_alone);
                }
                _ => {
                    let long = Request { prompt_logprobs: Some(1), ..common::greedy(prompt(), 80) };
                    assert_eq!(scored(engine, long).0, *scores_alone);
                }
            });
        }
    });
    assert!(engine.load().preemptions > 0, "the cache was too small for all of them");
}
