//! The same request is the same answer, with the same log-probabilities to the last bit, whatever runs beside it: a hundred times
//! greedy and thirty times drawn, free and under grammars.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use serde_json::json;
use stoker_engine::{
    EngineHandle, EngineLimits, FinishReason, PositionLogprobs, Request, RequestEvent, RequestStream, SamplingParams,
    StopParams, TokenId,
    constraint::Constraint,
    grammar::{GrammarCompiler, GrammarSpec},
};

use crate::common;

/// An answer: its text, its tokens and their log-probabilities.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer {
    text: String,
    tokens: Vec<TokenId>,
    logprobs: Vec<PositionLogprobs>,
}

pub(crate) fn answer(mut stream: RequestStream) -> Answer {
    let mut answer = Answer { text: String::new(), tokens: Vec::new(), logprobs: Vec::new() };
    loop {
        match stream.blocking_next().expect("a terminal comes") {
            RequestEvent::Delta { text, tokens, logprobs } => {
                answer.text.push_str(&text);
                answer.tokens.extend(tokens);
                answer.logprobs.extend(logprobs);
            }
            RequestEvent::Finished { reason: FinishReason::Stop | FinishReason::Length, .. } => return answer,
            other => panic!("{other:?}"),
        }
    }
}

/// Prompts of other lengths, some with a common beginning, each drawn in its own way.
fn noise(n: u32) -> Request {
    let prompt = (0..4 + n * 7 % 90).map(|i| 300 + (n / 3 * 131 + i * i * 7) % 1500).collect();
    let sampling = SamplingParams { temperature: (n % 3) as f32, seed: n.into(), ..SamplingParams::default() };
    let stop = StopParams { max_tokens: 1 + n * 11 % 60, ..StopParams::default() };
    Request { prompt, sampling, stop, ..Request::default() }
}

/// Answers to many of the same request, some at a time, in a stream of others.
fn many(engine: &EngineHandle, request: &Request, n_runs: usize) -> Vec<Answer> {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        for first in [0, 1] {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut n = first;
                while !is_over.load(Ordering::Relaxed) {
                    let streams: Vec<_> = (0..3).map(|i| engine.submit(noise(n + 2 * i)).unwrap()).collect();
                    streams.into_iter().for_each(|stream| drop(answer(stream)));
                    n += 6;
                }
            });
        }
        let mut answers = Vec::new();
        while answers.len() < n_runs {
            let streams: Vec<_> = (0..5).map(|_| engine.submit(request.clone()).unwrap()).collect();
            answers.extend(streams.into_iter().map(answer));
        }
        is_over.store(true, Ordering::Relaxed);
        answers
    })
}

fn grammars(engine: &EngineHandle) -> Vec<Option<Constraint>> {
    let compiler = GrammarCompiler::new(engine.tokenizer(), &engine.model().eos).unwrap();
    let schema = json!({"type": "object", "required": ["customer", "quantity"], "additionalProperties": false,
                        "properties": {"customer": {"type": "string", "maxLength": 20}, "quantity": {"type": "integer"}}});
    let call = "<tool_call>\\{\"name\": \"(add|now)\", \"arguments\": \\{\"a\": [0-9]{1,3}\\}\\}</tool_call>";
    let specs = [GrammarSpec::Json(schema), GrammarSpec::Regex(call.into())];
    let compiled = specs.into_iter().map(|spec| Some(compiler.compile(&spec).unwrap().0));
    std::iter::once(None).chain(compiled).collect()
}

/// Prompts are cut, and more are asked than run.
pub(crate) fn limits() -> EngineLimits {
    EngineLimits {
        max_num_seqs: Some(8),
        max_batched_tokens: Some(40),
        kv_cache_tokens: Some(640),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    }
}

#[test]
fn a_hundred_greedy_and_thirty_drawn_runs_under_noise_are_one_text_and_one_set_of_log_probabilities() {
    assert_runs_are_one(&common::start(&common::ember(), limits()));
}

/// A hundred greedy runs and thirty drawn ones under noise, free and under grammars.
pub(crate) fn assert_runs_are_one(engine: &EngineHandle) {
    for constraint in grammars(engine) {
        for (temperature, n_runs) in [(0.0, 100), (0.9, 30)] {
            let sampling =
                SamplingParams { temperature, seed: 7, constraint: constraint.clone(), ..SamplingParams::default() };
            let prompt = engine.tokenizer().encode("Order from Vefe: 17 x vube, total 31 euros.", true).unwrap();
            let stop = StopParams { max_tokens: 40, ..StopParams::default() };
            let request = Request { prompt, sampling, stop, logprobs: Some(3), ..Request::default() };
            let alone = answer(engine.submit(request.clone()).unwrap());
            assert_eq!(alone.logprobs.len(), alone.tokens.len());
            for (run, one) in many(engine, &request, n_runs).iter().enumerate() {
                assert_eq!(*one, alone, "run {run} at temperature {temperature} under {constraint:?}");
            }
        }
    }
}
