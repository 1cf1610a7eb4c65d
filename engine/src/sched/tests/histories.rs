//! Random histories under the invariants, with one step in flight and with two.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use proptest::prelude::*;

use super::{device, device::Machine, limits};
use crate::{
    kv::{BLOCK_TOKENS, BlockHash, BlockPool, PrefixChange},
    request::{FinishReason, PrefixMark, Request, RequestId, SamplingParams, StopParams, TokenId},
    sched::{ItlTarget, SchedLimits, StepEffects, schedule},
};

/// All prompts begin alike, with tokens that are never sampled.
const FIRST_TOKEN: TokenId = 1000;

#[derive(Clone, Debug)]
enum Event {
    Submit(Arc<Request>),
    Abort { nth: u64 },
    Step,
}

fn request() -> impl Strategy<Value = Request> {
    let shape = (1usize..60, 1u32..40, 0u32..6, any::<bool>());
    (shape, 0u64..4, prop::bool::weighted(0.2), -1i32..2).prop_map(
        |((prompt_len, max_tokens, min_tokens, ignore_eos), seed, has_penalty, priority)| {
            let max_tokens = max_tokens.min((limits().max_model_len - prompt_len) as u32);
            let stop = StopParams { max_tokens, min_tokens, ignore_eos, ..StopParams::default() };
            let frequency_penalty = if has_penalty { 1.0 } else { 0.0 };
            let sampling = SamplingParams { seed, frequency_penalty, ..SamplingParams::default() };
            let prompt: Vec<TokenId> = (FIRST_TOKEN..).take(prompt_len).collect();
            let mark = |n_tokens: u32| PrefixMark { name: (n_tokens as usize / BLOCK_TOKENS) as u64, n_tokens };
            let prefix_marks = (0..=prompt_len as u32).step_by(8).map(mark).collect();
            Request { prompt, sampling, stop, priority, prefix_marks, ..Request::default() }
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => request().prop_map(|request| Event::Submit(Arc::new(request))),
        1 => (0u64..30).prop_map(|nth| Event::Abort { nth }),
        6 => Just(Event::Step),
    ]
}

/// What one history led to: per request its tokens and how it ended.
#[derive(Debug, Default)]
struct Outcome {
    tokens: BTreeMap<RequestId, Vec<TokenId>>,
    device_time: BTreeMap<RequestId, Duration>,
    ended: BTreeMap<RequestId, FinishReason>,
}

impl Outcome {
    fn note(&mut self, effects: StepEffects) {
        for token in effects.tokens {
            assert!(!self.ended.contains_key(&token.id), "no token after the end");
            self.tokens.entry(token.id).or_default().push(token.token);
            let before = self.device_time.insert(token.id, token.device_time).unwrap_or_default();
            assert!(before <= token.device_time, "an account only grows");
        }
        for ended in effects.ended {
            assert!(self.ended.insert(ended.id, ended.reason).is_none(), "exactly one end");
        }
    }
}

/// What is told of the beginnings that all prompts share.
#[derive(Debug, Default)]
struct Heard(BTreeSet<u64>);

impl Heard {
    /// Takes in what was told; then whatever is marked can be found, and nothing else.
    fn check(&mut self, pool: &mut BlockPool) {
        for change in pool.take_changes() {
            match change {
                PrefixChange::Stored(name) => assert!(self.0.insert(name), "{name} is stored once"),
                PrefixChange::Removed(name) => assert!(self.0.remove(&name), "{name} was stored before"),
            }
        }
        let mut parent = BlockHash::ROOT;
        for (name, begin) in (1..5).zip((FIRST_TOKEN..).step_by(BLOCK_TOKENS)) {
            parent = parent.then(&(begin..).take(BLOCK_TOKENS).collect::<Vec<_>>());
            assert_eq!(self.0.contains(&name), pool.find(parent).is_some(), "{name} of {self:?}");
        }
    }
}

/// Plays a history to its end.
fn play(mut machine: Machine, events: &[Event]) -> Outcome {
    let (mut outcome, mut heard) = (Outcome::default(), Heard::default());
    let mut n_submitted = 0;
    for event in events {
        match event {
            Event::Submit(request) => {
                machine.state.submit(RequestId(n_submitted), Arc::clone(request));
                n_submitted += 1;
            }
            Event::Abort { nth } => machine.state.end(RequestId(*nth), FinishReason::Abort),
            Event::Step => outcome.note(machine.step().1),
        }
        heard.check(&mut machine.state.pool);
    }
    let mut steps_left = 10_000;
    while !machine.is_idle() {
        outcome.note(machine.step().1);
        heard.check(&mut machine.state.pool);
        steps_left -= 1;
        assert!(steps_left > 0, "every request ends in bounded time: {machine:?}");
    }
    assert_eq!(machine.state.pool.n_referenced(), 0, "every block came back");
    outcome
}

/// Every request got its own completion; an aborted one a beginning of it.
fn check(outcome: &Outcome, requests: &[&Request], limits: &SchedLimits) {
    for (n, request) in requests.iter().enumerate() {
        let id = RequestId(n as u64);
        let expected = device::completion(request, limits);
        let found = outcome.tokens.get(&id).map_or(&[][..], Vec::as_slice);
        match outcome.ended[&id] {
            FinishReason::Abort => assert!(expected.starts_with(found), "{id:?}: {found:?} is no part of {expected:?}"),
            _ => assert_eq!(found, expected, "{id:?}: neither preemption nor company changes a token"),
        }
    }
}

proptest! {
    #[test]
    fn every_request_ends_once_with_its_own_tokens_whatever_happens(
        events in prop::collection::vec(event(), 1..120),
        n_blocks in 4usize..12,
        max_batched_tokens in 4usize..40,
        max_steps_in_flight in 1usize..=2,
        prefix_caching in any::<bool>(),
        replays_decodes in any::<bool>(),
        copies_blocks in any::<bool>(),
        prefill_share in 1usize..40,
        itl_target in prop::option::of(Just(ItlTarget::DEFAULT)),
        tile_rows in 1usize..12,
        expected_completion in prop::option::of(0usize..40),
        late_one_in in prop_oneof![Just(0), 2u64..6],
        ahead_one_in in prop_oneof![Just(0), 1u64..6],
    ) {
        let of_step = SchedLimits { max_batched_tokens, prefill_share, itl_target, tile_rows, ..limits() };
        let limits = SchedLimits { prefix_caching, replays_decodes, copies_blocks, expected_completion, ..of_step };
        let requests: Vec<&Request> =
            events.iter().filter_map(|event| if let Event::Submit(request) = event { Some(&**request) } else { None }).collect();
        let mut machine = Machine::new(n_blocks, limits.clone(), max_steps_in_flight);
        (machine.late_one_in, machine.ahead_one_in) = (late_one_in, ahead_one_in);
        let outcome = play(machine, &events);
        prop_assert_eq!(outcome.ended.len(), requests.len());
        check(&outcome, &requests, &limits);
    }

    #[test]
    fn the_same_state_gives_the_same_plan(prompts in prop::collection::vec(1usize..60, 1..8)) {
        let mut state = Machine::new(64, limits(), 1).state;
        for (n, prompt_len) in prompts.iter().enumerate() {
            state.submit(RequestId(n as u64), super::request(*prompt_len, 4));
        }
        let mut twin = state.clone();
        prop_assert_eq!(schedule(&mut state, &limits()), schedule(&mut twin, &limits()));
        prop_assert_eq!(state, twin);
    }
}
