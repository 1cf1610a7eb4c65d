//! Models cut into stages, on the CPU: there one rank computes all of them one behind the other, and steps in parts, as several GPUs do. A
//! stage has the same bits to work with as a model that is whole has between two layers, so what comes out is the same to the last bit.

use std::{path::Path, sync::Arc, thread};

use stoker_engine::{Engine, EngineHandle, EngineLimits, LoadedModel, Request, SamplingParams, StartError, TokenId};

use crate::{
    common,
    families::{self, Stored},
    goldens::Golden,
    jump,
};

/// Ranks of each stage, and stages.
type Parallel = (usize, usize);

fn limits((n_ranks, n_stages): Parallel) -> EngineLimits {
    EngineLimits { tensor_parallel: n_ranks, pipeline_parallel: n_stages, threads: Some(2), ..EngineLimits::default() }
}

fn open(directory: &Path, parallel: Parallel, max_model_len: Option<u32>) -> Result<LoadedModel, StartError> {
    let limits = EngineLimits { max_model_len, ..limits(parallel) };
    LoadedModel::open(&common::config(directory, limits), &|_| {})
}

fn logits(directory: &Path, parallel: Parallel, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let mut model = open(directory, parallel, Some(tokens.len() as u32)).unwrap();
    model.executor.teacher_forced_logits(tokens, 37)
}

#[test]
fn stages_of_every_family_give_the_bits_of_the_whole_model() {
    let mut n_checked = 0;
    for name in families::names() {
        let family = families::Family::new(&name, Stored::F32);
        let tokens = Golden::read(&families::directory(&name)).tokens("/tokens");
        let whole = logits(family.path(), (1, 1), &tokens);
        for n_stages in [2, 3, 4] {
            match open(family.path(), (1, n_stages), Some(tokens.len() as u32)) {
                Ok(mut model) => {
                    let found = model.executor.teacher_forced_logits(&tokens, 37);
                    assert_eq!(found, whole, "{name}: {n_stages} stages");
                    n_checked += 1;
                }
                Err(refusal) => {
                    let refusal = refusal.to_string();
                    assert!(refusal.contains("stages of a pipeline are more than the model's"), "{name}: {refusal}");
                }
            }
        }
    }
    assert!(n_checked >= families::names().len(), "{n_checked} checked");
}

#[test]
fn ranks_in_stages_give_the_bits_of_ranks_without() {
    let tokens = Golden::read(&common::checkpoint("ember")).tokens("/tokens");
    for n_ranks in [2, 4] {
        let whole = logits(&common::ember(), (n_ranks, 1), &tokens);
        for n_stages in [2, 3] {
            assert_eq!(
                logits(&common::ember(), (n_ranks, n_stages), &tokens),
                whole,
                "{n_ranks} ranks, {n_stages} stages"
            );
        }
    }
}

fn prompts(engine: &EngineHandle) -> Vec<Vec<TokenId>> {
    let asked = |n: usize| {
        let question = ["What is the capital of France?", "What is 2 + 3?", "Say something about rivers."][n % 3];
        let text = format!("<|begin|><|user|>{}{question}<|end|><|assistant|>", "well, ".repeat(n * 5 % 23));
        engine.tokenizer().encode(&text, false).unwrap()
    };
    (0..40).map(asked).collect()
}

fn request(prompt: &[TokenId], n: usize) -> Request {
    let sampling = match n % 4 {
        0 => SamplingParams {
            temperature: 0.9,
            top_p: 0.9,
            seed: n as u64,
            repetition_penalty: 1.2,
            ..SamplingParams::default()
        },
        1 => SamplingParams { temperature: 1.1, top_k: 5, seed: n as u64, ..SamplingParams::default() },
        _ => SamplingParams { temperature: 0.0, ..SamplingParams::default() },
    };
    Request { sampling, ..common::greedy(prompt.to_vec(), 5 + n as u32 % 17) }
}

/// Forty requests of many lengths and options, which come and go in steps that are cut into parts: every answer is that of the whole model.
#[test]
fn steps_in_parts_answer_as_whole_ones() {
    let start = |parallel| Engine::start(common::config(&common::ember(), limits(parallel)), |_| {}).unwrap();
    let answers = |parallel| {
        let engine = Arc::new(start(parallel));
        let asking = prompts(&engine).into_iter().enumerate().map(|(n, prompt)| {
            let engine = Arc::clone(&engine);
            thread::spawn(move || common::read_all(engine.submit(request(&prompt, n)).unwrap()))
        });
        let asking: Vec<_> = asking.collect();
        asking.into_iter().map(|asked| asked.join().unwrap()).collect::<Vec<_>>()
    };
    let whole = answers((1, 1));
    for n_stages in [2, 3] {
        assert_eq!(answers((1, n_stages)), whole, "{n_stages} stages");
    }
}

/// Draws that wait for masks keep a step whole; with preemptions, penalties, stops and what is drawn without a pass.
#[test]
fn grammars_are_followed_in_stages_and_told_as_they_are_drawn() {
    let start = |sizes: EngineLimits| {
        let limits = EngineLimits { pipeline_parallel: 2, threads: Some(2), ..sizes };
        Engine::start(common::config(&common::ember(), limits), |_| {}).unwrap()
    };
    jump::assert_grammars_are_followed(&start(jump::roomy()));
    jump::told_as_drawn(&start(jump::roomy()), &start(jump::tight()));
}

#[test]
fn stages_are_named_in_what_computes_and_refused_where_there_are_too_many() {
    let model = open(&common::ember(), (2, 2), None).unwrap();
    let device = &model.parts.model.device;
    assert!(device.starts_with("cpu, 2 ranks of 1 threads, ") && device.ends_with(", 2 stages"), "{device}");
    let many = open(&common::ember(), (1, 99), None).map(drop).unwrap_err().to_string();
    assert!(many.contains("99 stages of a pipeline are more than the model's "), "{many}");
    let none = open(&common::ember(), (1, 0), None).map(drop).unwrap_err().to_string();
    assert_eq!(none, "pipeline_parallel is 0: set it to at least 1");
}
