//! Prompts that begin alike: what is computed of them, and by whom.

use std::{ops::Range, sync::Arc};

use proptest::prelude::*;

use super::{
    device::{self, Machine},
    limits, request, shape,
};
use crate::{
    kv::BLOCK_TOKENS,
    request::{FinishReason, Request, RequestId, TokenId},
    sched::{SchedLimits, StepPlan},
};

/// Room for all, and steps that long prompts take several of.
fn roomy() -> SchedLimits {
    let sizes = SchedLimits { max_num_seqs: 128, max_batched_tokens: 512, max_model_len: 2048, ..limits() };
    SchedLimits { prefix_caching: true, copies_blocks: true, ..sizes }
}

fn machine(limits: SchedLimits) -> Machine {
    Machine::new(20_000, limits, 1)
}

/// What a plan computes of positions, over all sequences.
fn n_computed(plan: &StepPlan, positions: &Range<usize>) -> usize {
    let within = |start: usize, end: usize| end.min(positions.end).saturating_sub(start.max(positions.start));
    plan.chunks.iter().map(|chunk| within(chunk.start, chunk.start + chunk.n_tokens)).sum()
}

/// Tokens of prompts that are computed for so many completions of one, all there before the first step.
fn prefilled(prompt_len: usize, n: u64, limits: SchedLimits) -> usize {
    let mut machine = machine(limits);
    (0..n).for_each(|id| machine.state.submit(RequestId(id), request(prompt_len, 4)));
    let mut prefilled = 0;
    while !machine.is_idle() {
        prefilled += n_computed(&machine.step().0, &(0..prompt_len));
    }
    prefilled
}

#[test]
fn a_prompt_of_many_completions_is_computed_once() {
    let not_copied = SchedLimits { copies_blocks: false, ..roomy() };
    let not_cached = SchedLimits { prefix_caching: false, ..roomy() };
    for (prompt_len, n_in_last_block) in [(100, 4), (112, 16), (113, 1), (1000, 8), (1500, 12)] {
        for n in [1, 8, 128] {
            let others = n as usize - 1;
            let of = |limits: &SchedLimits| prefilled(prompt_len, n, limits.clone());
            println!("{prompt_len} tokens, n = {n}: {} computed", of(&roomy()));
            assert_eq!(of(&roomy()), prompt_len + others, "{n} of {prompt_len}: one token each");
            assert_eq!(
                of(&not_copied),
                prompt_len + others * n_in_last_block,
                "{n} of {prompt_len}: the last block each"
            );
            assert_eq!(of(&not_cached), prompt_len * n as usize, "{n} of {prompt_len}: nothing is shared");
        }
    }
}

#[test]
fn who_follows_waits_without_a_share_of_the_step_and_has_its_blocks_from_the_first() {
    let limits = SchedLimits { max_batched_tokens: 32, max_model_len: 128, ..roomy() };
    let mut machine = Machine::new(32, limits, 1);
    (1..=2).for_each(|id| machine.state.submit(RequestId(id), request(70, 9)));
    let other = Request { prompt: vec![2; 40], ..Request::clone(&request(40, 9)) };
    machine.state.submit(RequestId(3), Arc::new(other));
    assert_eq!(shape(&machine.step().0), [(1, 0, 32)]);
    assert_eq!(shape(&machine.step().0), [(1, 32, 16), (3, 0, 16)], "half of it is for who has a prompt of its own");
    assert_eq!(machine.state.pool.n_referenced(), 5 + 2 + 3, "the second one has three blocks of the first");
    let (end, _) = machine.step();
    assert_eq!(
        (shape(&end), end.copies),
        (vec![(1, 48, 22), (3, 16, 10)], vec![]),
        "nothing is copied while it is computed"
    );
    assert_eq!(machine.state.pool.n_referenced(), 5 + 1 + 3);
    let (plan, _) = machine.step();
    assert_eq!((shape(&plan), plan.copies.len()), (vec![(1, 70, 1), (2, 69, 1), (3, 26, 14)], 1));
    let started: Vec<_> = plan.started.iter().map(|started| (started.id.0, started.cached_tokens)).collect();
    assert_eq!(started, [(2, Some(64))], "who waits for another has not started");
}

#[test]
fn who_comes_later_copies_the_end_of_its_prompt_from_one_that_goes_on() {
    let mut machine = machine(roomy());
    machine.state.submit(RequestId(1), request(40, 30));
    (0..5).for_each(|_| drop(machine.step()));
    machine.state.submit(RequestId(2), request(40, 30));
    let (plan, _) = machine.step();
    assert_eq!((shape(&plan), plan.copies.len()), (vec![(1, 44, 1), (2, 39, 1)], 1));
    machine.state.submit(RequestId(3), request(37, 30));
    assert_eq!(shape(&machine.step().0)[2], (3, 36, 1), "its prompt ends inside of theirs");
    let other = Request { cache_salt: Some("another tenant's".into()), ..Request::clone(&request(10, 30)) };
    machine.state.submit(RequestId(4), request(10, 30));
    machine.state.submit(RequestId(5), Arc::new(other));
    let (plan, _) = machine.step();
    assert_eq!(shape(&plan)[3..], [(4, 9, 1), (5, 0, 10)], "nobody copies what it may not know");
}

#[test]
fn nothing_is_copied_from_a_block_that_is_copied_into() {
    let mut machine = machine(SchedLimits { prefill_share: 2, ..roomy() });
    let first = request(33, 30);
    let all = [&*first.prompt, &*device::completion(&first, &roomy())].concat();
    let begins = |n: usize, priority: i32| Request { prompt: all[..n].to_vec(), priority, ..Request::clone(&first) };
    machine.state.submit(RequestId(1), Arc::clone(&first));
    (0..12).for_each(|_| drop(machine.step()));
    // It generates what the second has to read, and is overtaken by nobody who reads two tokens a step.
    machine.state.submit(RequestId(2), Arc::new(begins(47, -1)));
    assert_eq!(shape(&machine.step().0), [(1, 44, 1), (2, 32, 2)]);
    assert_eq!(shape(&machine.step().0), [(1, 45, 1), (2, 34, 2)]);
    machine.state.submit(RequestId(3), Arc::new(begins(35, 0)));
    let (plan, _) = machine.step();
    assert_eq!(shape(&plan), [(1, 46, 1), (2, 46, 1), (3, 34, 1)]);
    let furthest = machine.state.running.iter().find(|sequence| sequence.id == RequestId(1)).expect("it goes on");
    let from: Vec<_> = plan.copies.iter().map(|copy| copy.from).collect();
    assert_eq!(from, [furthest.table.blocks()[2]; 2], "though the second has the beginning, too");
}

#[test]
fn nothing_is_copied_from_who_has_found_it_while_it_is_computed() {
    let mut machine = machine(roomy());
    [16, 17, 2].into_iter().zip(1..).for_each(|(len, id)| machine.state.submit(RequestId(id), request(len, 9)));
    let (plan, _) = machine.step();
    assert_eq!((shape(&plan), plan.copies), (vec![(1, 0, 16), (2, 16, 1)], vec![]));
    let (plan, _) = machine.step();
    assert_eq!((shape(&plan)[2], plan.copies.len()), ((3, 1, 1), 1));
}

#[test]
fn when_the_first_leaves_the_next_goes_on_where_it_was() {
    let limits = SchedLimits { max_batched_tokens: 32, ..roomy() };
    let mut machine = machine(limits);
    (1..=3).for_each(|id| machine.state.submit(RequestId(id), request(100, 9)));
    machine.step();
    assert_eq!(shape(&machine.step().0), [(1, 32, 32)]);
    machine.state.end(RequestId(1), FinishReason::Abort);
    assert_eq!(shape(&machine.step().0), [(2, 64, 32)]);
    assert_eq!(shape(&machine.step().0), [(2, 96, 4)]);
    assert_eq!(shape(&machine.step().0), [(2, 100, 1), (3, 99, 1)]);
}

#[test]
fn who_is_more_urgent_computes_and_the_other_one_follows() {
    let limits = SchedLimits { max_batched_tokens: 32, ..roomy() };
    let mut machine = machine(limits);
    machine.state.submit(RequestId(1), request(100, 9));
    machine.step();
    let urgent = Request { priority: -1, ..Request::clone(&request(100, 9)) };
    machine.state.submit(RequestId(2), Arc::new(urgent));
    assert_eq!(shape(&machine.step().0), [(1, 32, 32)], "it has just come, and has no place yet");
    assert_eq!(shape(&machine.step().0), [(2, 64, 32)]);
    assert_eq!(shape(&machine.step().0), [(2, 96, 4)]);
    assert_eq!(shape(&machine.step().0), [(2, 100, 1), (1, 99, 1)]);
}

#[test]
fn whose_prompt_is_read_computes_all_of_it() {
    let mut machine = machine(roomy());
    let read = Request { prompt_logprobs: Some(0), ..Request::clone(&request(40, 9)) };
    machine.state.submit(RequestId(1), request(40, 9));
    machine.state.submit(RequestId(2), Arc::new(read.clone()));
    machine.state.submit(RequestId(3), Arc::new(read));
    assert_eq!(shape(&machine.step().0), [(1, 0, 40), (2, 0, 40), (3, 0, 40)]);
}

#[test]
fn where_decodes_are_replayed_no_prompt_is_copied_from_what_was_generated() {
    for (replays_decodes, expected) in [(false, (23, 1)), (true, (16, 8))] {
        let mut machine = machine(SchedLimits { replays_decodes, ..roomy() });
        machine.state.submit(RequestId(1), request(18, 30));
        (0..10).for_each(|_| drop(machine.step()));
        let prompt: Vec<TokenId> = machine.tokens(1)[..24].to_vec();
        machine.state.submit(RequestId(2), Arc::new(Request { prompt, ..Request::clone(&request(1, 9)) }));
        let plan = machine.step().0;
        assert_eq!(shape(&plan)[1], (2, expected.0, expected.1), "replayed: {replays_decodes}");
    }
}

proptest! {
    #[test]
    fn whenever_completions_of_a_prompt_begin_it_is_computed_once(
        prompt_len in 1usize..90,
        begin_at in prop::collection::vec(0usize..12, 0..8),
        max_batched_tokens in 12usize..60,
        max_steps_in_flight in 1usize..=2,
        copies_blocks in any::<bool>(),
    ) {
        let limits = SchedLimits { max_num_seqs: 9, max_batched_tokens, max_model_len: 256, copies_blocks, ..roomy() };
        let mut machine = Machine::new(256, limits, max_steps_in_flight);
        machine.state.submit(RequestId(0), request(prompt_len, 100));
        let (mut prefilled, mut n_copies) = (0, 0);
        for step in 0..90 {
            for (id, _) in (1..).zip(&begin_at).filter(|(_, at)| **at == step) {
                machine.state.submit(RequestId(id), request(prompt_len, 100));
            }
            let plan = machine.step().0;
            prefilled += n_computed(&plan, &(0..prompt_len));
            n_copies += plan.copies.len();
        }
        let n_in_last_block = (prompt_len - 1) % BLOCK_TOKENS + 1;
        let each = if copies_blocks { 1 } else { n_in_last_block };
        prop_assert_eq!(prefilled, prompt_len + begin_at.len() * each);
        let is_copied = copies_blocks && n_in_last_block > 1;
        prop_assert_eq!(n_copies, if is_copied { begin_at.len() } else { 0 });
    }
}
