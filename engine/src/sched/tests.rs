//! The scheduler as a whole: single facts first, then random histories under the invariants.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{
    kv::BLOCK_TOKENS,
    request::{FinishReason, Request, RequestId, SamplingParams, StopParams, TokenId},
};

const EOS: TokenId = 0;

fn limits() -> SchedLimits {
    SchedLimits { max_num_seqs: 4, max_batched_tokens: 32, max_model_len: 64, eos: vec![EOS] }
}

fn request(prompt_len: usize, max_tokens: u32) -> Arc<Request> {
    let stop = StopParams { max_tokens, ..StopParams::default() };
    Arc::new(Request { prompt: vec![1; prompt_len], sampling: SamplingParams::default(), stop, logprobs: None })
}

/// A token that depends on the position only, like seeded sampling does.
fn token_at(position: usize) -> TokenId {
    2 + (position as TokenId * 7) % 50
}

fn step(state: &mut SchedState, limits: &SchedLimits) -> (StepPlan, StepEffects) {
    let plan = schedule(state, limits);
    state.check(limits);
    let sampled = plan.chunks.iter().filter_map(|chunk| {
        let position = chunk.sample.as_ref()?.position;
        Some(SampledToken { id: chunk.id, token: token_at(position), logprobs: None })
    });
    let output = StepOutput { sampled: sampled.collect() };
    let effects = resolve(state, plan.clone(), output, limits);
    state.check(limits);
    (plan, effects)
}

fn shape(plan: &StepPlan) -> Vec<(u64, usize, usize)> {
    plan.chunks.iter().map(|chunk| (chunk.id.0, chunk.start, chunk.tokens.len())).collect()
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_sampled_once() {
    let mut state = SchedState::new(8);
    state.submit(RequestId(1), request(40, 2));
    let (first, effects) = step(&mut state, &limits());
    assert_eq!((shape(&first), effects.tokens.len()), (vec![(1, 0, 32)], 0));
    let (second, effects) = step(&mut state, &limits());
    assert_eq!((shape(&second), effects.tokens.len()), (vec![(1, 32, 8)], 1));
    let (third, effects) = step(&mut state, &limits());
    assert_eq!(shape(&third), [(1, 40, 1)]);
    assert_eq!(effects.ended[0].reason, FinishReason::Length);
    assert!(state.is_idle());
    assert_eq!(state.pool.n_free(), 8);
}

#[test]
fn decodes_come_first_and_a_prompt_takes_what_is_left_of_the_step() {
    let mut state = SchedState::new(16);
    state.submit(RequestId(1), request(4, 9));
    step(&mut state, &limits());
    state.submit(RequestId(2), request(50, 9));
    let (plan, _) = step(&mut state, &limits());
    assert_eq!(shape(&plan), [(1, 4, 1), (2, 0, 31)]);
    assert_eq!((plan.n_tokens(), plan.n_prefill_tokens()), (32, 31));
}

#[test]
fn a_request_without_blocks_keeps_its_place_in_line() {
    let mut state = SchedState::new(4);
    state.submit(RequestId(1), request(40, 20));
    state.submit(RequestId(2), request(40, 20));
    state.submit(RequestId(3), request(1, 20));
    let (plan, _) = step(&mut state, &limits());
    assert_eq!(shape(&plan), [(1, 0, 32)], "request 3 would fit but does not overtake request 2");
    assert_eq!(state.waiting.iter().map(|s| s.id.0).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn a_decode_without_a_block_preempts_the_newest_which_returns_to_the_front() {
    let mut state = SchedState::new(5);
    state.submit(RequestId(1), request(16, 30));
    state.submit(RequestId(2), request(16, 30));
    state.submit(RequestId(3), request(30, 30));
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        preempted = step(&mut state, &limits()).1.preempted;
    }
    assert_eq!(preempted, [RequestId(2)]);
    assert_eq!(state.waiting.iter().map(|s| s.id.0).collect::<Vec<_>>(), [2, 3]);
    let victim = &state.waiting[0];
    assert_eq!(victim.computed, 0);
    assert!(victim.n_generated() > 0, "generated tokens are kept and computed again");
}

#[test]
fn an_aborted_sequence_leaves_at_the_next_step_and_its_blocks_return_in_resolve() {
    let mut state = SchedState::new(4);
    state.submit(RequestId(1), request(20, 20));
    step(&mut state, &limits());
    state.end(RequestId(1), FinishReason::Abort);
    let plan = schedule(&mut state, &limits());
    assert_eq!((plan.chunks.len(), plan.leaving.len(), state.pool.n_free()), (0, 1, 2));
    let effects = resolve(&mut state, plan, StepOutput::default(), &limits());
    assert_eq!(effects.ended, [Ended { id: RequestId(1), reason: FinishReason::Abort, never_started: false }]);
    assert_eq!(state.pool.n_free(), 4);
}

#[test]
fn a_waiting_request_can_leave_before_it_ever_started() {
    let mut state = SchedState::new(4);
    state.submit(RequestId(1), request(20, 20));
    state.end(RequestId(1), FinishReason::Abort);
    state.end(RequestId(9), FinishReason::Abort);
    let (_, effects) = step(&mut state, &limits());
    assert!(effects.ended[0].never_started && effects.started.is_empty());
}

#[test]
fn the_end_token_ends_a_sequence_only_after_min_tokens_and_unless_ignored() {
    let finish = |min_tokens, ignore_eos| {
        let mut state = SchedState::new(4);
        let stop = StopParams { max_tokens: 9, min_tokens, ignore_eos, ..StopParams::default() };
        let request = Request { prompt: vec![1], sampling: SamplingParams::default(), stop, logprobs: None };
        state.submit(RequestId(1), Arc::new(request));
        let plan = schedule(&mut state, &limits());
        let banned = plan.chunks[0].sample.as_ref().unwrap().banned.clone();
        let token = SampledToken { id: RequestId(1), token: EOS, logprobs: None };
        let effects = resolve(&mut state, plan, StepOutput { sampled: vec![token] }, &limits());
        (banned, effects.ended.len())
    };
    assert_eq!(finish(0, false), (vec![], 1));
    assert_eq!(finish(2, false), (vec![EOS], 0));
    assert_eq!(finish(0, true), (vec![], 0));
}

#[derive(Clone, Debug)]
enum Event {
    Submit { prompt_len: usize, max_tokens: u32 },
    Abort { nth: u64 },
    Step,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (1usize..60, 1u32..40).prop_map(|(prompt_len, max_tokens)| Event::Submit { prompt_len, max_tokens }),
        1 => (0u64..30).prop_map(|nth| Event::Abort { nth }),
        6 => Just(Event::Step),
    ]
}

/// What one history led to: per request its tokens and how often it ended.
#[derive(Debug, Default)]
struct Outcome {
    tokens: std::collections::BTreeMap<RequestId, Vec<TokenId>>,
    ended: std::collections::BTreeMap<RequestId, FinishReason>,
}

impl Outcome {
    fn note(&mut self, effects: StepEffects) {
        for token in effects.tokens {
            assert!(!self.ended.contains_key(&token.id), "no token after the end");
            self.tokens.entry(token.id).or_default().push(token.token);
        }
        for ended in effects.ended {
            assert!(self.ended.insert(ended.id, ended.reason).is_none(), "exactly one end");
        }
    }
}

proptest! {
    #[test]
    fn random_histories_keep_the_invariants_and_end_every_request_once(
        events in prop::collection::vec(event(), 1..120),
        n_blocks in 4usize..12,
        max_batched_tokens in 4usize..40,
    ) {
        let limits = SchedLimits { max_batched_tokens, ..limits() };
        let mut state = SchedState::new(n_blocks);
        let mut outcome = Outcome::default();
        let mut submitted = std::collections::BTreeMap::new();
        for event in events {
            match event {
                Event::Submit { prompt_len, max_tokens } => {
                    let id = RequestId(submitted.len() as u64);
                    let max_tokens = max_tokens.min((limits.max_model_len - prompt_len) as u32);
                    state.submit(id, request(prompt_len, max_tokens));
                    submitted.insert(id, (prompt_len, max_tokens as usize));
                }
                Event::Abort { nth } => state.end(RequestId(nth), FinishReason::Abort),
                Event::Step => outcome.note(step(&mut state, &limits).1),
            }
        }
        let mut steps_left = 10_000;
        while !state.is_idle() {
            outcome.note(step(&mut state, &limits).1);
            steps_left -= 1;
            prop_assert!(steps_left > 0, "every request ends in bounded time: {state:?}");
        }
        prop_assert_eq!(state.pool.n_free(), n_blocks);
        for (id, (prompt_len, max_tokens)) in submitted {
            let tokens = outcome.tokens.remove(&id).unwrap_or_default();
            let expected: Vec<TokenId> = (0..tokens.len()).map(|n| token_at(prompt_len + n)).collect();
            prop_assert_eq!(&tokens, &expected, "preemption changes no token");
            if outcome.ended[&id] == FinishReason::Length {
                prop_assert_eq!(tokens.len(), max_tokens);
            }
        }
    }

    #[test]
    fn the_same_state_gives_the_same_plan(prompts in prop::collection::vec(1usize..60, 1..8)) {
        let mut state = SchedState::new(4 * BLOCK_TOKENS);
        for (n, prompt_len) in prompts.iter().enumerate() {
            state.submit(RequestId(n as u64), request(*prompt_len, 4));
        }
        let mut twin = state.clone();
        prop_assert_eq!(schedule(&mut state, &limits()), schedule(&mut twin, &limits()));
        prop_assert_eq!(state, twin);
    }
}
