//! Models that ranks share, on the CPU: a rank there is some threads with its part of heads, feed-forward and vocabulary, as on a GPU.
//! What they compute is what one computes, but for the order of a sum over ranks.

use std::path::Path;

use stoker_engine::{Engine, EngineLimits, LoadedModel, StartError, TokenId, ops::Isa};

use crate::{
    common,
    families::{self, Stored},
    goldens::{F32_TOLERANCE, Golden, difference},
    quantised,
};

/// Threads of all ranks.
const THREADS: usize = 4;

fn open(directory: &Path, n_ranks: usize, max_model_len: Option<u32>) -> Result<LoadedModel, StartError> {
    let limits =
        EngineLimits { tensor_parallel: n_ranks, threads: Some(THREADS), max_model_len, ..EngineLimits::default() };
    LoadedModel::open(&common::config(directory, limits), &|_| {})
}

/// The golden's difference from what so many ranks compute, the same bits however the input is cut; or why they do not share the model.
fn difference_of(golden: &Golden, directory: &Path, n_ranks: usize) -> Result<f64, String> {
    let tokens = golden.tokens("/tokens");
    let context = Some(tokens.len() as u32);
    let mut model = open(directory, n_ranks, context).map_err(|error| error.to_string())?;
    let whole = model.executor.teacher_forced_logits(&tokens, tokens.len());
    for chunk_len in [37, 1] {
        let found = model.executor.teacher_forced_logits(&tokens, chunk_len);
        assert_eq!(found, whole, "{}: chunks of {chunk_len} of {n_ranks} ranks", directory.display());
    }
    Ok(difference(&whole, &golden.0["rows"], &golden.tokens("/ids")))
}

#[test]
fn every_family_that_ranks_can_share_agrees_with_transformers() {
    let mut n_shared = 0;
    for name in families::names() {
        let family = families::Family::new(&name, Stored::F32);
        let golden = Golden::read(&families::directory(&name));
        for n_ranks in [2, 4] {
            match difference_of(&golden, family.path(), n_ranks) {
                Ok(difference) => {
                    println!("{name}: {n_ranks} ranks, {difference:.1e}");
                    assert!(difference < F32_TOLERANCE, "{name}: {n_ranks} ranks: {difference}");
                    n_shared += 1;
                }
                Err(refusal) => {
                    println!("{name}: {refusal}");
                    let is_named = refusal.contains("ranks do not divide") || refusal.contains("norms all heads");
                    assert!(is_named, "{name}: {refusal}");
                }
            }
        }
    }
    assert!(n_shared >= families::names().len(), "{n_shared} shared");
}

#[test]
fn checkpoints_of_every_number_format_agree_with_transformers() {
    for name in ["gqa-f32", "llama3-rope-tied-bf16", "yarn-biases-f32", "sharded-bf16", "mqa-f16"] {
        let golden = Golden::read(&common::checkpoint(name));
        let limit = golden.0["noise_floor"].as_f64().unwrap_or(F32_TOLERANCE);
        let difference = difference_of(&golden, &common::checkpoint(name), 2).unwrap();
        println!("{name}: {difference:.1e}");
        assert!(difference < limit, "{name}: {difference}");
    }
    let golden = Golden::read(&common::checkpoint("ember"));
    for n_ranks in [2, 4] {
        let difference = difference_of(&golden, &common::ember(), n_ranks).unwrap();
        assert!(difference < golden.0["noise_floor"].as_f64().unwrap(), "ember: {difference}");
    }
}

/// Codes, scales, zero points and groups are cut where weights are; a share that would end inside of a block is refused.
#[test]
fn quantised_checkpoints_are_cut_with_their_scales() {
    let mut names: Vec<_> = std::fs::read_dir(quantised::directory("")).unwrap().map(|entry| entry.unwrap()).collect();
    names.retain(|entry| entry.path().is_dir());
    let mut n_shared = 0;
    for name in names.iter().map(|entry| entry.file_name().into_string().unwrap()) {
        let checkpoint = quantised::Checkpoint::of(&name);
        let tokens = checkpoint.golden.tokens("/tokens");
        let context = Some(tokens.len() as u32);
        let alone = open(checkpoint.path(), 1, context).unwrap().executor.teacher_forced_logits(&tokens, tokens.len());
        match open(checkpoint.path(), 2, context) {
            Ok(mut model) => {
                let shared = model.executor.teacher_forced_logits(&tokens, tokens.len());
                let worst = worst(&shared, &alone);
                println!("{name}: {worst:.1e}");
                // Activations of integer products are rounded to eight bits; what one sum's order moves may move such a digit.
                assert!(worst < 5e-2, "{name}: {worst}");
                n_shared += 1;
            }
            Err(refusal) => {
                let refusal = refusal.to_string();
                println!("{name}: {refusal}");
                assert!(refusal.contains("take fewer ranks") || refusal.contains("ranks"), "{name}: {refusal}");
            }
        }
    }
    assert!(n_shared >= names.len() / 2, "{n_shared} of {}", names.len());
}

/// The largest difference of a row, relative to its largest logit.
fn worst(found: &[Vec<f32>], wanted: &[Vec<f32>]) -> f64 {
    let of_row = |(found, wanted): (&Vec<f32>, &Vec<f32>)| {
        let scale = wanted.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        found.iter().zip(wanted).map(|(a, b)| f64::from((a - b).abs() / scale)).fold(0.0, f64::max)
    };
    found.iter().zip(wanted).map(of_row).fold(0.0, f64::max)
}

#[test]
fn ranks_write_the_text_that_one_writes() {
    let limits = |n_ranks| EngineLimits { tensor_parallel: n_ranks, threads: Some(THREADS), ..EngineLimits::default() };
    let start = |n_ranks| Engine::start(common::config(&common::ember(), limits(n_ranks)), |_| {}).unwrap();
    let engines = [1, 2, 4].map(start);
    assert_eq!(engines[1].model().device, format!("cpu, 2 ranks of 2 threads, {}", Isa::best()));
    let text = "<|begin|><|user|>What is the capital of France?<|end|><|assistant|>";
    let prompt: Vec<TokenId> = engines[0].tokenizer().encode(text, false).unwrap();
    let answers = engines.each_ref().map(|engine| {
        let streams = (0..6).map(|_| engine.submit(common::greedy(prompt.clone(), 12)).unwrap());
        streams.collect::<Vec<_>>().into_iter().map(|stream| common::read_all(stream).1).collect::<Vec<_>>()
    });
    assert_eq!(answers[0], answers[1]);
    assert_eq!(answers[0], answers[2]);
}

#[test]
fn a_number_of_ranks_that_does_not_divide_the_model_is_refused_by_the_weight() {
    let refusal = open(&common::ember(), 3, None).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("q_proj.weight: 3 ranks do not divide its 4 heads of 64"), "{refusal}");
    let none = open(&common::ember(), 0, None).map(drop).unwrap_err().to_string();
    assert_eq!(none, "tensor_parallel is 0: set it to at least 1");
}
