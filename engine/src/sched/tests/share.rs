//! Prompts beside decodes: their share of a step, and how it is divided.

use super::{device::Machine, limits, request, shape};
use crate::{request::RequestId, sched::SchedLimits};

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
