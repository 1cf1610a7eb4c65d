//! Log-probabilities of prompts: those that the same model gives when the same tokens are its own.

use stoker_engine::{EngineHandle, EngineLimits, PromptPosition, Request, RequestEvent, TokenId};

use crate::common;

/// What is told of a request's prompt, and the tokens that follow.
pub(crate) fn scored(engine: &EngineHandle, request: Request) -> (Vec<PromptPosition>, Vec<TokenId>) {
    let mut stream = engine.submit(request).unwrap();
    let (mut told, mut generated) = (Vec::new(), Vec::new());
    while let Some(event) = stream.blocking_next() {
        match event {
            RequestEvent::Prompt(positions) => {
                assert!(told.is_empty() && generated.is_empty(), "once, before any token");
                told = positions;
            }
            RequestEvent::Delta { tokens, .. } => generated.extend(tokens),
            RequestEvent::Embedding(_) | RequestEvent::Finished { .. } => {}
        }
    }
    (told, generated)
}

#[test]
fn a_prompt_scores_as_its_tokens_did_when_they_were_drawn() {
    // Three steps a prompt, so that chunks' ends are among the rows.
    let limits = EngineLimits { max_batched_tokens: Some(24), max_num_seqs: Some(8), ..EngineLimits::default() };
    let engine = common::start(&common::ember(), limits);
    let mut drawn = engine.submit(Request { logprobs: Some(3), ..common::greedy((5..20).collect(), 40) }).unwrap();
    let (mut whole, mut expected): (Vec<TokenId>, Vec<_>) = ((5..20).collect(), Vec::new());
    while let Some(event) = drawn.blocking_next() {
        if let RequestEvent::Delta { tokens, logprobs, .. } = event {
            whole.extend(tokens);
            expected.extend(logprobs);
        }
    }
    // Twice: the second time the prefix cache has all of it.
    for _ in 0..2 {
        let asked = Request { prompt_logprobs: Some(3), ..common::greedy(whole.clone(), 1) };
        let (told, _) = scored(&engine, asked);
        assert_eq!(told.len(), whole.len() - 1, "all but the first");
        let generated: Vec<_> = told[14..].iter().map(|position| position.logprobs.clone()).collect();
        assert_eq!(generated, expected);
        assert!(told[14..].iter().all(|position| position.rank == 1), "greedy tokens are the likeliest");
        assert!(told.iter().zip(&whole[1..]).all(|(position, token)| position.logprobs.chosen.token == *token));
    }
}

#[test]
fn a_prompt_is_scored_once_also_when_it_is_computed_again() {
    // Four sequences grow to twice what the cache holds.
    let limits = EngineLimits {
        kv_cache_tokens: Some(256),
        expected_completion: None,
        max_model_len: Some(128),
        ..EngineLimits::default()
    };
    let engine = common::start(&common::ember(), limits);
    let alone = scored(&engine, Request { prompt_logprobs: Some(0), ..common::greedy((0..40).collect(), 1) }).0;
    let asked = || Request { prompt_logprobs: Some(0), ..common::greedy((0..40).collect(), 80) };
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| scored(&engine, asked()))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (told, generated) in together {
        assert_eq!((told, generated.len()), (alone.clone(), 80));
    }
    assert!(engine.load().preemptions > 0, "the cache was too small for all of them");
}

#[test]
fn tokens_that_are_named_are_scored_instead_of_the_likeliest() {
    let engine = common::start(&common::ember(), EngineLimits::default());
    let asked = Request { logprobs: Some(2), logprob_tokens: vec![300, 7], ..common::greedy(vec![5, 6], 1) };
    let likeliest = Request { logprob_tokens: Vec::new(), logprobs: Some(20), ..asked.clone() };
    let top = |request: Request| {
        let mut stream = engine.submit(request).unwrap();
        let Some(RequestEvent::Delta { logprobs, .. }) = stream.blocking_next() else { panic!("a token comes") };
        logprobs[0].top.iter().map(|token| (token.token, token.logprob)).collect::<Vec<_>>()
    };
    let named = top(asked);
    let all = top(likeliest);
    let tokens: Vec<TokenId> = named.iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [300, 7, all[0].0], "and the token that was chosen");
    assert!(named.iter().all(|named| all.contains(named) || all.iter().all(|other| other.1 >= named.1)));
}
