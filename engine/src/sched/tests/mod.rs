//! The scheduler as a whole: single facts here, random histories beside.

mod device;
mod device_time;
mod follow;
mod histories;
mod order;
mod share;
mod storm;

use std::sync::Arc;

use self::device::{EOS, Machine};
use super::*;
use crate::request::{FinishReason, Request, RequestId, SamplingParams, StopParams};

fn limits() -> SchedLimits {
    SchedLimits {
        max_num_seqs: 4,
        max_batched_tokens: 32,
        max_model_len: 64,
        eos: vec![EOS],
        prefix_caching: false,
        replays_decodes: false,
        copies_blocks: false,
        prefill_share: usize::MAX,
        tile_rows: 1,
        itl_target: None,
        expected_completion: None,
    }
}

/// A request that ends by length only.
fn request(prompt_len: usize, max_tokens: u32) -> Arc<Request> {
    let stop = StopParams { max_tokens, ignore_eos: true, ..StopParams::default() };
    Arc::new(Request {
        prompt: vec![1; prompt_len],
        sampling: SamplingParams::default(),
        stop,
        logprobs: None,
        ..Request::default()
    })
}

fn machine(n_blocks: usize) -> Machine {
    Machine::new(n_blocks, limits(), 1)
}

fn shape(plan: &StepPlan) -> Vec<(u64, usize, usize)> {
    plan.chunks.iter().map(|chunk| (chunk.id.0, chunk.start, chunk.n_tokens)).collect()
}

#[test]
fn a_long_prompt_is_computed_in_chunks_and_sampled_once() {
    let mut machine = machine(8);
    machine.state.submit(RequestId(1), request(40, 2));
    let (first, effects) = machine.step();
    assert_eq!((shape(&first), effects.tokens.len()), (vec![(1, 0, 32)], 0));
    let (second, effects) = machine.step();
    assert_eq!((shape(&second), effects.tokens.len()), (vec![(1, 32, 8)], 1));
    let (third, effects) = machine.step();
    assert_eq!(shape(&third), [(1, 40, 1)]);
    assert_eq!(effects.ended[0].reason, FinishReason::Length);
    assert!(machine.is_idle());
    assert_eq!(machine.state.pool.n_free(), 8);
}

#[test]
fn a_draw_that_is_put_off_is_made_later_and_its_neighbours_go_on() {
    let mut machine = machine(8);
    machine.state.submit(RequestId(1), request(15, 4));
    machine.state.submit(RequestId(2), request(5, 4));
    machine.step();
    let mut plan = machine.launch();
    assert_eq!(shape(&plan), [(1, 15, 1), (2, 5, 1)]);
    assert!(put_off(&mut machine.state, &mut plan, RequestId(1)));
    assert!(!put_off(&mut machine.state, &mut plan, RequestId(9)), "nobody's draw cannot be put off");
    let output = StepOutput { sampled: [7, 8].map(|token| Sampled::Token { token, logprobs: None }).to_vec() };
    let effects = resolve(&mut machine.state, plan, output, &machine.limits);
    assert_eq!(effects.tokens.iter().map(|token| (token.id.0, token.token)).collect::<Vec<_>>(), [(2, 8)]);
    assert!(machine.state.awaits_masks());
    assert_eq!(shape(&schedule(&mut machine.state, &machine.limits)), [(2, 6, 1)]);
    machine.state.note_masks(|id| id == RequestId(1));
    let again = schedule(&mut machine.state, &machine.limits);
    assert_eq!(shape(&again)[0], (1, 15, 1), "its newest token is computed again");
    assert!(again.chunks[0].enters_slot, "and the executor counts its tokens anew");
}

#[test]
fn what_must_come_is_computed_in_one_step_and_told_with_the_draw_behind_it() {
    let mut machine = machine(8);
    machine.state.submit(RequestId(1), request(3, 9));
    machine.state.submit(RequestId(2), request(5, 9));
    machine.step();
    let mut plan = machine.launch();
    assert_eq!(shape(&plan), [(1, 3, 1), (2, 5, 1)]);
    let Machine { state, limits, .. } = &mut machine;
    assert_eq!(jump_over_draw(state, &mut plan, RequestId(1), &[11], limits), 0, "one token is drawn in the same step");
    assert_eq!(jump_over_draw(state, &mut plan, RequestId(1), &[11, 12, 13], limits), 3);
    assert_eq!(jump_over_draw(state, &mut plan, RequestId(1), &[11, 12], limits), 0, "a draw is given up once");
    let output = StepOutput { sampled: [7, 8].map(|token| Sampled::Token { token, logprobs: None }).to_vec() };
    let effects = resolve(state, plan, output, limits);
    assert_eq!(told(&effects), [(2, 8)], "the draw that was given up goes nowhere");
    let plan = schedule(state, limits);
    assert_eq!(shape(&plan), [(1, 4, 3), (2, 6, 1)]);
    assert_eq!((plan.n_prefill_tokens(), plan.chunks[0].enters_slot), (0, true));
    let output = StepOutput { sampled: [9, 10].map(|token| Sampled::Token { token, logprobs: None }).to_vec() };
    let effects = resolve(state, plan, output, limits);
    assert_eq!(told(&effects), [(1, 11), (1, 12), (1, 13), (1, 9), (2, 10)]);
}

#[test]
fn a_sequence_that_waits_computes_what_must_come_with_its_prompt() {
    let limits = SchedLimits { prefix_caching: true, ..limits() };
    let mut machine = Machine::new(8, limits, 1);
    machine.state.submit(RequestId(1), request(16, 9));
    machine.step();
    machine.state.submit(RequestId(2), request(16, 9));
    let Machine { state, limits, .. } = &mut machine;
    assert_eq!(jump(state, RequestId(2), &[11, 12], limits), 2);
    let plan = schedule(state, limits);
    assert_eq!(shape(&plan), [(1, 16, 1), (2, 16, 2)]);
    assert_eq!(plan.started, [Started { id: RequestId(2), cached_tokens: Some(16) }], "of the prompt, no more");
}

#[test]
fn nothing_is_jumped_over_that_may_end_a_sequence() {
    let taken = |edit: fn(&mut Request), ahead: &[u32]| {
        let mut machine = machine(8);
        let mut asked = Request::clone(&request(3, 5));
        edit(&mut asked);
        machine.state.submit(RequestId(1), Arc::new(asked));
        jump(&mut machine.state, RequestId(1), ahead, &machine.limits)
    };
    assert_eq!(taken(|_| {}, &[11; 9]), 4, "the last token is drawn");
    assert_eq!(taken(|_| {}, &[11, EOS, 11]), 1);
    assert_eq!(taken(|asked| asked.stop.stop_token_ids = vec![12], &[11, 11, 12, 11]), 2);
    assert_eq!(taken(|asked| asked.stop.max_tokens = 1, &[11; 9]), 0);
    assert_eq!(taken(|asked| asked.logprobs = Some(0), &[11; 9]), 0, "what is told of a token is the model's own");
    assert_eq!(taken(|asked| (asked.prompt = vec![1; 60], asked.stop.max_tokens = 99).1, &[11; 9]), 3);
}

#[test]
fn who_jumps_ahead_leaves_those_behind_it_their_tokens() {
    let mut machine = machine(8);
    (1..=3).for_each(|id| machine.state.submit(RequestId(id), request(3, 60)));
    machine.step();
    let Machine { state, limits, .. } = &mut machine;
    assert_eq!(jump(state, RequestId(1), &[11; 40], limits), 40);
    assert_eq!(shape(&schedule(state, limits)), [(1, 3, 30), (2, 3, 1), (3, 3, 1)]);
}

fn told(effects: &StepEffects) -> Vec<(u64, u32)> {
    effects.tokens.iter().map(|token| (token.id.0, token.token)).collect()
}

#[test]
fn who_has_a_block_in_common_is_put_off_with_one_of_its_own() {
    for (n_blocks, copies_blocks, again) in [(8, false, (1, 0, 16)), (8, true, (1, 15, 1)), (3, false, (1, 16, 1))] {
        let limits = SchedLimits { prefix_caching: true, copies_blocks, ..limits() };
        let mut machine = Machine::new(n_blocks, limits, 1);
        machine.state.submit(RequestId(1), request(16, 4));
        machine.state.submit(RequestId(2), request(17, 4));
        let mut plan = machine.launch();
        assert_eq!(shape(&plan), [(1, 0, 16), (2, 16, 1)], "the second one found the first one's block");
        let found = machine.state.running[1].table.blocks()[0];
        let last = (n_blocks == 3).then(|| machine.state.pool.take().expect("one is left"));
        let is_put_off = put_off(&mut machine.state, &mut plan, RequestId(1));
        assert_eq!(is_put_off, last.is_none(), "there has to be a block");
        last.into_iter().for_each(|block| machine.state.pool.release(block));
        machine.state.check(&machine.limits);
        let output = StepOutput { sampled: [7, 8].map(|token| Sampled::Token { token, logprobs: None }).to_vec() };
        let effects = resolve(&mut machine.state, plan, output, &machine.limits);
        assert_eq!(effects.tokens.len(), if is_put_off { 1 } else { 2 });
        assert_eq!(machine.state.running[1].table.blocks()[0], found, "which it keeps");
        machine.state.note_masks(|_| true);
        let planned = shape(&schedule(&mut machine.state, &machine.limits));
        assert_eq!(planned.into_iter().find(|(id, ..)| *id == 1), Some(again));
    }
}

#[test]
fn decodes_come_first_and_a_prompt_takes_what_is_left_of_the_step() {
    let mut machine = machine(16);
    machine.state.submit(RequestId(1), request(4, 9));
    machine.step();
    machine.state.submit(RequestId(2), request(50, 9));
    let (plan, _) = machine.step();
    assert_eq!(shape(&plan), [(1, 4, 1), (2, 0, 31)]);
    assert_eq!((plan.n_tokens(), plan.n_prefill_tokens()), (32, 31));
}

#[test]
fn a_request_without_blocks_keeps_its_place_in_line() {
    let mut machine = machine(4);
    machine.state.submit(RequestId(1), request(40, 20));
    machine.state.submit(RequestId(2), request(40, 20));
    machine.state.submit(RequestId(3), request(1, 20));
    let (plan, _) = machine.step();
    assert_eq!(shape(&plan), [(1, 0, 32)], "request 3 would fit but does not overtake request 2");
    assert_eq!(machine.state.waiting.iter().map(|s| s.id.0).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn a_decode_without_a_block_preempts_the_newest_which_returns_to_the_front() {
    let mut machine = machine(5);
    machine.state.submit(RequestId(1), request(16, 30));
    machine.state.submit(RequestId(2), request(16, 30));
    machine.state.submit(RequestId(3), request(30, 30));
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        preempted = machine.step().1.preempted;
    }
    assert_eq!(preempted, [RequestId(2)]);
    assert_eq!(machine.state.waiting.iter().map(|s| s.id.0).collect::<Vec<_>>(), [2, 3]);
    let victim = &machine.state.waiting[0];
    assert_eq!(victim.computed, 0);
    assert!(victim.n_generated() > 0, "generated tokens are kept and computed again");
}

#[test]
fn an_aborted_sequence_leaves_at_the_next_step_and_its_blocks_return_in_resolve() {
    let mut machine = machine(4);
    machine.state.submit(RequestId(1), request(20, 20));
    machine.step();
    machine.state.end(RequestId(1), FinishReason::Abort);
    let plan = machine.launch();
    assert_eq!((plan.chunks.len(), machine.state.pool.n_free()), (0, 2));
    let effects = machine.take_in();
    assert_eq!(effects.ended, [Ended { id: RequestId(1), reason: FinishReason::Abort, never_started: false }]);
    assert_eq!(machine.state.pool.n_free(), 4);
}

#[test]
fn a_waiting_request_can_leave_before_it_ever_started() {
    let mut machine = machine(4);
    machine.state.submit(RequestId(1), request(20, 20));
    machine.state.end(RequestId(1), FinishReason::Abort);
    machine.state.end(RequestId(9), FinishReason::Abort);
    let (_, effects) = machine.step();
    assert!(effects.ended[0].never_started && effects.started.is_empty());
}

#[test]
fn a_cache_of_one_context_serves_sequences_that_fill_it_one_after_the_other() {
    for (max_steps_in_flight, prefix_caching) in [(1, false), (1, true), (2, false), (2, true)] {
        let limits = SchedLimits { prefix_caching, ..limits() };
        let mut machine = Machine::new(limits.max_model_len / 16, limits, max_steps_in_flight);
        // Prompts that leave one token, half and almost all of the context to the completion.
        for (id, prompt_len) in [(1, 63), (2, 32), (3, 1)] {
            machine.state.submit(RequestId(id), request(prompt_len, 1000));
        }
        let mut ended = Vec::new();
        for _ in 0..400 {
            ended.extend(machine.step().1.ended.into_iter().map(|ended| (ended.id.0, ended.reason)));
        }
        ended.sort_by_key(|(id, _)| *id);
        assert_eq!(ended, [1, 2, 3].map(|id| (id, FinishReason::Length)), "{max_steps_in_flight} {prefix_caching}");
        assert!(machine.is_idle());
    }
}

/// A scheduler with one request, planned once, and the output of that step.
fn planned(request: Request, sampled: Sampled) -> (SchedState, StepPlan, StepOutput) {
    let mut state = SchedState::new(4);
    state.submit(RequestId(1), Arc::new(request));
    let plan = schedule(&mut state, &limits());
    (state, plan, StepOutput { sampled: vec![sampled] })
}

#[test]
fn the_end_token_ends_a_sequence_only_after_min_tokens_and_unless_ignored() {
    let finish = |min_tokens, ignore_eos| {
        let stop = StopParams { max_tokens: 9, min_tokens, ignore_eos, ..StopParams::default() };
        let request = Request {
            prompt: vec![1],
            sampling: SamplingParams::default(),
            stop,
            logprobs: None,
            ..Request::default()
        };
        let (mut state, plan, output) = planned(request, Sampled::Token { token: EOS, logprobs: None });
        let limits = limits();
        let banned = plan.step(&state, &limits).chunks[0].sample.unwrap().banned.to_vec();
        (banned, resolve(&mut state, plan, output, &limits).ended.len())
    };
    assert_eq!(finish(0, false), (vec![], 1));
    assert_eq!(finish(2, false), (vec![EOS], 0));
    assert_eq!(finish(0, true), (vec![], 0));
}

#[test]
fn a_sequence_whose_logits_are_not_numbers_ends_with_an_error_and_without_a_token() {
    let (mut state, plan, output) = planned(Request::clone(&request(3, 5)), Sampled::NotANumber);
    let effects = resolve(&mut state, plan, output, &limits());
    assert!(effects.tokens.is_empty() && state.is_idle());
    assert!(matches!(&effects.ended[0].reason, FinishReason::Error(text) if text.contains("not a number")));
}

#[test]
fn a_second_step_is_planned_on_tokens_that_the_first_one_samples() {
    let mut machine = Machine::new(8, limits(), 2);
    machine.state.submit(RequestId(1), request(20, 9));
    machine.state.submit(RequestId(2), request(3, 9));
    let entries = |plan: StepPlan| plan.chunks.iter().map(|chunk| chunk.fed_entry).collect::<Vec<_>>();
    assert_eq!(entries(machine.launch()), [None, None]);
    assert_eq!(entries(machine.launch()), [Some(0), Some(1)]);
    assert_eq!((machine.tokens(1).len(), machine.take_in().tokens.len(), machine.tokens(1).len()), (20, 2, 21));
}

#[test]
fn a_sequence_that_surely_ends_with_a_token_in_flight_is_not_planned_again() {
    let mut machine = Machine::new(8, limits(), 2);
    machine.state.submit(RequestId(1), request(5, 1));
    machine.state.submit(RequestId(2), request(5, 2));
    assert_eq!(shape(&machine.launch()), [(1, 0, 5), (2, 0, 5)]);
    assert_eq!(shape(&machine.launch()), [(2, 5, 1)]);
}

#[test]
fn a_sequence_with_penalties_is_planned_on_tokens_that_are_not_known_and_enters_its_slot_once() {
    let mut machine = Machine::new(8, limits(), 2);
    let sampling = SamplingParams { repetition_penalty: 1.1, ..SamplingParams::default() };
    machine.state.submit(RequestId(1), Arc::new(Request { sampling, ..Request::clone(&request(5, 9)) }));
    let first = machine.launch();
    assert_eq!((shape(&first), first.chunks[0].enters_slot), (vec![(1, 0, 5)], true));
    let second = machine.launch();
    assert_eq!((shape(&second), second.chunks[0].enters_slot), (vec![(1, 5, 1)], false));
}

#[test]
fn a_sequence_that_ends_while_a_step_computes_it_leaves_at_once_and_that_token_goes_nowhere() {
    let stop = StopParams { max_tokens: 9, ..StopParams::default() };
    let asked = Request { stop, ..Request::clone(&request(5, 9)) };
    let (mut state, first, output) = planned(asked, Sampled::Token { token: EOS, logprobs: None });
    let second = schedule(&mut state, &limits());
    assert_eq!(second.chunks[0].fed_entry, Some(0));
    let effects = resolve(&mut state, first, output, &limits());
    assert_eq!((effects.tokens.len(), effects.ended.len(), state.pool.n_free()), (1, 1, 4));
    let late = StepOutput { sampled: vec![Sampled::Token { token: 7, logprobs: None }] };
    assert_eq!(resolve(&mut state, second, late, &limits()), StepEffects::default());
}

#[test]
fn a_preempted_sequence_keeps_the_token_that_was_in_flight() {
    let mut machine = Machine::new(4, limits(), 2);
    machine.state.submit(RequestId(1), request(16, 30));
    machine.state.submit(RequestId(2), request(15, 30));
    machine.launch();
    let (mut before, mut preempted) = (0, Vec::new());
    while preempted.is_empty() {
        before = machine.tokens(2).len();
        preempted = machine.launch().preempted;
        machine.take_in();
    }
    assert_eq!(preempted, [RequestId(2)]);
    let victim = &machine.state.waiting[0];
    assert_eq!((victim.computed, victim.in_flight, victim.tokens.len()), (0, 0, before + 1));
}

fn caching() -> SchedLimits {
    SchedLimits { prefix_caching: true, ..limits() }
}

#[test]
fn a_second_request_starts_behind_the_full_blocks_of_the_first_even_in_the_same_step() {
    let mut machine = Machine::new(12, SchedLimits { max_batched_tokens: 64, ..caching() }, 1);
    machine.state.submit(RequestId(1), request(40, 9));
    machine.state.submit(RequestId(2), request(35, 9));
    let plan = machine.launch();
    assert_eq!(shape(&plan), [(1, 0, 40), (2, 32, 3)]);
    assert_eq!(plan.started.iter().map(|started| started.cached_tokens).collect::<Vec<_>>(), [Some(0), Some(32)]);
    assert_eq!(machine.state.pool.n_referenced(), 4, "two blocks are shared, one more each is not");
}

#[test]
fn one_token_of_a_prompt_is_always_computed() {
    let mut machine = Machine::new(12, caching(), 1);
    for id in 1..3 {
        machine.state.submit(RequestId(id), request(32, 1));
        machine.step();
    }
    machine.state.submit(RequestId(3), request(32, 1));
    assert_eq!(shape(&machine.launch()), [(3, 16, 16)], "32 of 32 tokens are cached, 16 of them are used");
}

#[test]
fn blocks_of_ended_sequences_are_cached_until_others_need_them() {
    let mut machine = Machine::new(4, caching(), 1);
    machine.state.submit(RequestId(1), request(40, 1));
    machine.step();
    machine.step();
    let pool = &machine.state.pool;
    assert_eq!((pool.n_free(), pool.n_cached(), pool.n_referenced()), (2, 2, 0));
    let other = Request { prompt: vec![2; 60], ..Request::clone(&request(60, 1)) };
    machine.state.submit(RequestId(2), Arc::new(other));
    machine.step();
    let pool = &machine.state.pool;
    assert_eq!((pool.n_free(), pool.n_cached(), pool.n_referenced(), pool.n_evicted()), (0, 0, 4, 2));
}

#[test]
fn a_shared_prefix_needs_no_blocks_of_its_own() {
    let mut machine = Machine::new(5, SchedLimits { max_batched_tokens: 64, ..caching() }, 1);
    machine.state.submit(RequestId(1), request(50, 9));
    machine.state.submit(RequestId(2), request(50, 9));
    assert_eq!(machine.launch().started.len(), 1, "one block is left, which the first one may need");
    let mut machine = Machine::new(6, SchedLimits { max_batched_tokens: 64, ..caching() }, 1);
    machine.state.submit(RequestId(1), request(50, 9));
    machine.state.submit(RequestId(2), request(50, 9));
    assert_eq!(machine.launch().started.len(), 2, "4 + 4 blocks, 3 of them shared, and one in reserve");
}

#[test]
fn a_preempted_sequence_finds_its_own_blocks_again() {
    let mut machine = Machine::new(5, caching(), 1);
    for id in 1..3 {
        let asked = Request { prompt: vec![id; 16], ..Request::clone(&request(16, 40)) };
        machine.state.submit(RequestId(id.into()), Arc::new(asked));
    }
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        preempted = machine.step().1.preempted;
    }
    assert_eq!(preempted, [RequestId(2)]);
    let computed_again = loop {
        let (plan, _) = machine.step();
        if let Some(chunk) = plan.chunks.iter().find(|chunk| chunk.id == RequestId(2)) {
            break chunk.start;
        }
    };
    assert!(computed_again >= 16, "{computed_again}: at least the first block was still there");
}

#[test]
fn where_decodes_are_replayed_generated_tokens_are_computed_one_at_a_time_and_found_by_nobody() {
    let limits = SchedLimits { replays_decodes: true, max_batched_tokens: 64, ..caching() };
    let mut machine = Machine::new(5, limits, 1);
    for id in 1..3 {
        let asked = Request { prompt: vec![id; 18], ..Request::clone(&request(18, 40)) };
        machine.state.submit(RequestId(id.into()), Arc::new(asked));
    }
    let mut chunks = Vec::new();
    while machine.tokens(2).len() < 40 {
        let (plan, _) = machine.step();
        chunks.extend(plan.chunks.into_iter().filter(|chunk| chunk.id == RequestId(2)));
    }
    let again = chunks.iter().skip(1).position(|chunk| chunk.start < 18).expect("it was preempted") + 1;
    let (before, after) = chunks.split_at(again);
    let n_computed = before.last().expect("it had decoded").start + 1;
    assert!(n_computed >= 32, "{n_computed}: a second block was full, of generated tokens for the most");
    assert_eq!((after[0].start, after[0].n_tokens, after[0].is_prefill), (16, 2, true), "the rest of the prompt");
    assert!(after[1..].iter().all(|chunk| chunk.n_tokens == 1 && !chunk.is_prefill));
}

#[test]
fn blocks_of_a_sequence_that_met_a_nan_are_not_found() {
    let limits = caching();
    let mut state = SchedState::new(4);
    state.submit(RequestId(1), request(20, 9));
    let plan = schedule(&mut state, &limits);
    resolve(&mut state, plan, StepOutput { sampled: vec![Sampled::NotANumber] }, &limits);
    assert_eq!((state.pool.n_free(), state.pool.n_cached()), (4, 0));
}
