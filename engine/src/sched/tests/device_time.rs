//! Whose a step's time is. That no history of the scheduler loses any of it is checked by the machine of `device.rs` at each of its steps.

use std::time::Duration;

use proptest::prelude::*;

use super::{device::Machine, machine, request};
use crate::{
    request::RequestId,
    sched::{Chunk, StepPlan, charge, shares},
};

const STEP: Duration = Duration::from_millis(10);

fn plan(lengths: &[usize]) -> StepPlan {
    let chunk = |(idx, n_tokens): (usize, &usize)| Chunk {
        id: RequestId(idx as u64),
        running_idx: idx,
        start: 0,
        n_tokens: *n_tokens,
        fed_entry: None,
        samples: true,
        enters_slot: true,
        is_prefill: true,
        is_put_off: false,
    };
    StepPlan { chunks: lengths.iter().enumerate().map(chunk).collect(), ..StepPlan::default() }
}

#[test]
fn a_step_s_time_is_shared_by_its_tokens_those_of_prompts_and_one_a_decode() {
    let mut machine = machine(16);
    machine.state.submit(RequestId(1), request(4, 9));
    machine.step();
    machine.state.submit(RequestId(2), request(50, 9));
    let plan = machine.launch();
    let shares: Vec<_> = shares(&plan, Duration::from_millis(32)).collect();
    assert_eq!(shares, [(RequestId(1), Duration::from_millis(1)), (RequestId(2), Duration::from_millis(31))]);
}

#[test]
fn who_is_preempted_pays_again_for_what_is_computed_again() {
    let mut machine = machine(5);
    for id in 1..=2 {
        machine.state.submit(RequestId(id), request(16, 40));
    }
    let account = |machine: &Machine, id| {
        let mut all = machine.state.running.iter().chain(&machine.state.waiting);
        all.find(|sequence| sequence.id == RequestId(id)).expect("it is open").device_time
    };
    let preempted = loop {
        let preempted = machine.step().1.preempted;
        if let [id] = preempted[..] {
            break id.0;
        }
    };
    let before = account(&machine, preempted);
    let n_known = machine.tokens(preempted).len();
    let plan = loop {
        let plan = machine.launch();
        if plan.chunks.iter().any(|chunk| chunk.id.0 == preempted) {
            break plan;
        }
        assert_eq!(account(&machine, preempted), before, "who waits pays nothing");
        machine.take_in();
    };
    let again: usize = plan.chunks.iter().filter(|chunk| chunk.id.0 == preempted).map(|chunk| chunk.n_tokens).sum();
    assert!(again > 16 && again <= n_known, "{again} of {n_known} tokens, generated ones among them");
    charge(&mut machine.state, &plan, STEP * plan.n_tokens() as u32);
    assert_eq!(account(&machine, preempted) - before, STEP * again as u32);
}

proptest! {
    #[test]
    fn shares_of_a_step_are_its_time_and_as_its_tokens_are(
        lengths in prop::collection::vec(1usize..9000, 1..300),
        nanos in 0u64..8 * 60_000_000_000,
    ) {
        let (plan, time) = (plan(&lengths), Duration::from_nanos(nanos));
        let shares: Vec<Duration> = shares(&plan, time).map(|(_, share)| share).collect();
        prop_assert_eq!(shares.iter().sum::<Duration>(), time);
        for (share, n_tokens) in shares.iter().zip(&lengths) {
            let (exact, total) = (u128::from(nanos) * *n_tokens as u128, plan.n_tokens() as u128);
            prop_assert!((share.as_nanos() * total).abs_diff(exact) <= total, "{:?} for {} tokens", share, n_tokens);
        }
    }
}
