//! The prefix cache changes how much is computed and nothing else: the same text with it and without, on the built-in
//! model, also after preemption.

use stoker_engine::{EngineHandle, EngineLimits, Request, RequestEvent, RequestStream, SamplingParams, TokenId, Usage};

use crate::common;

fn start(limits: EngineLimits) -> EngineHandle {
    common::start(&common::ember(), limits)
}

/// Tokens that all prompts of `len` begin with, then some of their own.
fn asked(n: u32, len: u32) -> Request {
    let shared: Vec<TokenId> = (0..len).map(|i| (i * i * 7 + i * 13) % 256).collect();
    let own = (0..5 + n % 7).map(|i| (n * 31 + i * 11) % 256);
    let request = common::greedy(shared.into_iter().chain(own).collect(), 30 + n);
    let temperature = if n.is_multiple_of(2) { 0.0 } else { 0.8 };
    Request { sampling: SamplingParams { temperature, seed: n.into(), ..SamplingParams::default() }, ..request }
}

fn read_all(mut stream: RequestStream) -> (Vec<TokenId>, Usage) {
    let mut all = Vec::new();
    loop {
        match stream.blocking_next().expect("a terminal comes") {
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { tokens, .. } => all.extend(tokens),
            RequestEvent::Finished { usage, .. } => return (all, usage),
        }
    }
}

fn run(engine: &EngineHandle, requests: &[Request]) -> Vec<(Vec<TokenId>, Usage)> {
    let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    streams.into_iter().map(read_all).collect()
}

fn tokens(answers: &[(Vec<TokenId>, Usage)]) -> Vec<&[TokenId]> {
    answers.iter().map(|(tokens, _)| tokens.as_slice()).collect()
}

#[test]
fn the_text_is_the_same_with_the_prefix_cache_and_without() {
    let requests: Vec<Request> = (0..12).map(|n| asked(n, 100)).collect();
    let (with, without) =
        (start(EngineLimits::default()), start(EngineLimits { prefix_caching: false, ..EngineLimits::default() }));
    let expected = run(&without, &requests);
    for round in 0..2 {
        assert_eq!(tokens(&run(&with, &requests)), tokens(&expected), "round {round}");
    }
    assert!(expected.iter().all(|(_, usage)| usage.cached_tokens == 0));
    assert_eq!((without.load().prefix_query_tokens, without.load().cached_blocks), (0, 0));
}

#[test]
fn usage_and_load_say_what_was_found() {
    let engine = start(EngineLimits::default());
    let request = asked(0, 91);
    assert_eq!(request.prompt.len(), 96);
    let cached: Vec<u32> = (0..2).map(|_| run(&engine, std::slice::from_ref(&request))[0].1.cached_tokens).collect();
    assert_eq!(cached, [0, 80], "of 96 tokens five blocks are taken and one is computed again for its last token");
    // What was generated is found too, by whoever goes on with the conversation.
    let mut longer = request.prompt.clone();
    longer.extend(run(&engine, &[request])[0].0.iter());
    longer.extend([1; 4]);
    let found = run(&engine, &[common::greedy(longer.clone(), 1)])[0].1.cached_tokens as usize;
    assert_eq!((longer.len(), found), (130, 112), "the last sampled token was never computed");
    let load = engine.load();
    assert_eq!((load.prefix_query_tokens, load.prefix_hit_tokens), (3 * 96 + 130, 2 * 80 + 112));
    assert_eq!(load.free_blocks + load.cached_blocks, load.total_blocks);
}

#[test]
fn the_text_is_the_same_after_preemption_and_eviction() {
    let requests: Vec<Request> = (0..24).map(|n| asked(n, [20, 100, 40][n as usize % 3])).collect();
    let tight = EngineLimits {
        kv_cache_tokens: Some(512),
        expected_completion: None,
        max_model_len: Some(256),
        ..EngineLimits::default()
    };
    let with = start(tight.clone());
    let expected = run(&start(EngineLimits { prefix_caching: false, ..tight }), &requests);
    assert_eq!(tokens(&run(&with, &requests)), tokens(&expected));
    let load = with.load();
    assert!(load.preemptions > 0 && load.prefix_evicted_blocks > 0 && load.prefix_hit_tokens > 0, "{load:?}");
}
