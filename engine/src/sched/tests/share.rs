//! Prompts beside decodes: their share of a step, and how it is divided.

use super::{device::Machine, limits, request, shape};
use crate::{
    request::RequestId,
    sched::{ItlTarget, SchedLimits},
};

fn machine(prefill_share: usize) -> Machine {
    let limits = SchedLimits { prefill_share, max_batched_tokens: 32, max_model_len: 256, ..limits() };
    Machine::new(64, limits, 1)
}

#[test]
fn beside_decodes_a_prompt_has_its_share_and_alone_the_whole_step() {
    let mut machine = machine(10);
    machine.state.submit(RequestId(1), request(40, 20));
    assert_eq!(shape(&machine.step().0), [(1, 0, 32)]);
    machine.step();
    machine.state.submit(RequestId(2), request(40, 20));
    assert_eq!(shape(&machine.step().0), [(1, 40, 1), (2, 0, 10)]);
}

#[test]
fn a_long_prompt_leaves_half_to_those_behind_it_and_ends_all_the_same() {
    let mut machine = machine(8);
    machine.state.submit(RequestId(1), request(4, 100));
    machine.step();
    machine.state.submit(RequestId(2), request(100, 5));
    assert_eq!(shape(&machine.step().0), [(1, 4, 1), (2, 0, 8)]);
    machine.state.submit(RequestId(3), request(6, 5));
    assert_eq!(shape(&machine.step().0), [(1, 5, 1), (2, 8, 4), (3, 0, 4)]);
    assert_eq!(shape(&machine.step().0), [(1, 6, 1), (2, 12, 4), (3, 4, 2)]);
    assert_eq!(shape(&machine.step().0), [(1, 7, 1), (3, 6, 1), (2, 16, 8)]);
    let mut n_steps = 0;
    while machine.tokens(2).len() == 100 {
        machine.step();
        n_steps += 1;
    }
    assert!(n_steps <= 11, "84 tokens in eights: {n_steps}");
}

#[test]
fn a_step_with_a_part_of_a_prompt_has_whole_tiles_of_rows_if_it_has_one() {
    let first_share = |prefill_share, tile_rows| {
        let mut machine = machine(prefill_share);
        machine.limits.tile_rows = tile_rows;
        machine.state.submit(RequestId(1), request(4, 100));
        machine.step();
        machine.state.submit(RequestId(2), request(100, 5));
        shape(&machine.step().0)
    };
    assert_eq!(first_share(10, 4), [(1, 4, 1), (2, 0, 7)]);
    assert_eq!(first_share(11, 4), [(1, 4, 1), (2, 0, 11)]);
    assert_eq!(first_share(10, 16), [(1, 4, 1), (2, 0, 10)]);
}

/// One that decodes in steps of 32, with a share of 8, and then two more with prompts of 12.
fn beside_one_two_more(itl_target: Option<ItlTarget>, max_num_seqs: usize) -> Vec<(u64, usize, usize)> {
    let mut machine = machine(8);
    machine.limits = SchedLimits { itl_target, max_num_seqs, ..machine.limits };
    machine.state.submit(RequestId(1), request(4, 100));
    machine.step();
    for id in [2, 3] {
        machine.state.submit(RequestId(id), request(12, 5));
    }
    shape(&machine.step().0)
}

#[test]
fn while_more_wait_for_a_first_token_than_decode_prompts_fill_the_step_unless_a_target_was_asked_for() {
    let all = [(1, 4, 1), (2, 0, 12), (3, 0, 12)];
    assert_eq!(beside_one_two_more(Some(ItlTarget::DEFAULT), 4), all);
    let share = [(1, 4, 1), (2, 0, 8)];
    assert_eq!(beside_one_two_more(Some(ItlTarget::asked(ItlTarget::DEFAULT.time)), 4), share);
    assert_eq!(beside_one_two_more(None, 4), share);
}

#[test]
fn who_waits_without_a_place_is_not_among_them() {
    assert_eq!(beside_one_two_more(Some(ItlTarget::DEFAULT), 2), [(1, 4, 1), (2, 0, 8)]);
}

#[test]
fn a_burst_fills_steps_however_many_decode() {
    let n_prompts = |n_waiting: u64| {
        let mut machine = Machine::new(512, SchedLimits { max_num_seqs: 100, max_batched_tokens: 256, ..limits() }, 1);
        (1..=30).for_each(|id| machine.state.submit(RequestId(id), request(4, 40)));
        machine.step();
        machine.limits = SchedLimits { prefill_share: 8, itl_target: Some(ItlTarget::DEFAULT), ..machine.limits };
        (31..31 + n_waiting).for_each(|id| machine.state.submit(RequestId(id), request(4, 40)));
        machine.step().0.chunks.iter().filter(|chunk| chunk.is_prefill).count()
    };
    assert_eq!([n_prompts(23), n_prompts(24)], [2, 24]);
}
