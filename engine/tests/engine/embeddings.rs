//! Vectors of texts: those that sentence-transformers makes with the same files, however prompts are cut, found in a cache or computed
//! again. The goldens are made by `tests/tools/make_embedding_goldens.py`, which explains them.

use std::path::{Path, PathBuf};

use serde_json::Value;
use stoker_engine::{EngineHandle, EngineLimits, Pooling, Request, RequestEvent, TokenId};

use crate::{
    common,
    goldens::{F32_TOLERANCE, Golden},
};

pub(crate) fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/embeddings").join(name)
}

pub(crate) fn asked(prompt: Vec<TokenId>, pooling: Pooling) -> Request {
    Request { pooling: Some(pooling), ..common::greedy(prompt, 1) }
}

/// What is told of a request, once and before its token.
pub(crate) fn vector(engine: &EngineHandle, request: Request) -> Vec<f32> {
    let mut stream = engine.submit(request).unwrap();
    let Some(RequestEvent::Embedding(vector)) = stream.blocking_next() else { panic!("a vector comes first") };
    while let Some(event) = stream.blocking_next() {
        assert!(matches!(event, RequestEvent::Delta { .. } | RequestEvent::Finished { .. }), "{event:?}");
    }
    vector
}

fn length(vector: &[f32]) -> f64 {
    vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
}

/// The golden's vectors, and ours: as the engine gives them, of length 1 where the model's files say so.
fn check(name: &str, pooling: Pooling, normalizes: bool) {
    let golden = Golden::read(&model(name));
    let engine = common::start(&model(name), EngineLimits { max_batched_tokens: Some(32), ..EngineLimits::default() });
    let form = engine.model().embedding;
    assert_eq!((form.pooling, form.normalizes), (pooling, normalizes), "as its files say");
    let texts = golden.0["texts"].as_array().unwrap();
    assert!(texts.len() > 3);
    for (text, theirs) in texts.iter().zip(golden.0["vectors"].as_array().unwrap()) {
        let prompt = engine.tokenizer().encode(text.as_str().unwrap(), true).unwrap();
        let ours = vector(&engine, asked(prompt, pooling));
        let scale = if normalizes { length(&ours) } else { 1.0 };
        let theirs: Vec<f64> = theirs.as_array().unwrap().iter().filter_map(Value::as_f64).collect();
        assert_eq!(ours.len(), theirs.len());
        let largest = theirs.iter().fold(0.0f64, |max, value| max.max(value.abs()));
        let pairs = ours.iter().zip(&theirs);
        let difference = pairs.map(|(ours, theirs)| (f64::from(*ours) / scale - theirs).abs()).fold(0.0, f64::max);
        assert!(difference <= F32_TOLERANCE * largest, "{name}, {text}: {difference} of {largest}");
    }
}

#[test]
fn the_last_token_is_the_vector_that_sentence_transformers_makes() {
    check("qwen3-last", Pooling::LastToken, true);
}

#[test]
fn the_mean_of_all_tokens_is_the_vector_that_sentence_transformers_makes() {
    check("llama-mean", Pooling::Mean, false);
}

#[test]
fn a_vector_has_the_same_bits_however_its_prompt_is_cut_found_or_accompanied() {
    let prompt: Vec<TokenId> = (0..90).map(|n| 5 + n * 7 % 400).collect();
    for pooling in [Pooling::LastToken, Pooling::Mean] {
        let with = |max_batched_tokens| {
            let limits = EngineLimits {
                max_batched_tokens: Some(max_batched_tokens),
                max_num_seqs: Some(8),
                ..EngineLimits::default()
            };
            common::start(&common::ember(), limits)
        };
        let (whole, cut) = (with(256), with(24));
        let alone = vector(&whole, asked(prompt.clone(), pooling));
        assert!(length(&alone) > 0.0);
        for engine in [&whole, &cut] {
            // The second time the cache has all of the prompt.
            for _ in 0..2 {
                assert_eq!(vector(engine, asked(prompt.clone(), pooling)), alone, "{pooling:?}");
            }
            let together: Vec<_> = std::thread::scope(|scope| {
                let ask = |n: TokenId| {
                    let other = (n..n + 60).collect();
                    let prompt = if n.is_multiple_of(2) { prompt.clone() } else { other };
                    (n, scope.spawn(|| vector(engine, asked(prompt, pooling))))
                };
                let threads: Vec<_> = (0..6).map(ask).collect();
                threads.into_iter().map(|(n, thread)| (n, thread.join().unwrap())).collect()
            });
            for (n, vector) in together {
                assert_eq!(vector == alone, n % 2 == 0, "{pooling:?} {n}");
            }
        }
    }
}

#[test]
fn a_prompt_is_pooled_once_also_when_it_is_computed_again() {
    // Four sequences grow to twice what the cache holds.
    let limits = EngineLimits {
        kv_cache_tokens: Some(256),
        expected_completion: None,
        max_model_len: Some(128),
        ..EngineLimits::default()
    };
    let engine = common::start(&common::ember(), limits);
    let alone = vector(&engine, asked((0..40).collect(), Pooling::Mean));
    let long = || Request { pooling: Some(Pooling::Mean), ..common::greedy((0..40).collect(), 80) };
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| vector(&engine, long()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(together.iter().all(|vector| *vector == alone));
    assert!(engine.load().preemptions > 0, "the cache was too small for all of them");
}
