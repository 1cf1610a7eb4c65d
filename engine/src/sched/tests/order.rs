//! Who runs first and who gives way: single facts, and a long random history.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{device::Machine, limits, request};
use crate::{
    request::{FinishReason, Request, RequestId},
    sched::{Ended, SchedLimits, StepPlan},
    sequence::Sequence,
};

fn urgent(priority: i32, prompt_len: usize, max_tokens: u32) -> Arc<Request> {
    Arc::new(Request { priority, ..Request::clone(&request(prompt_len, max_tokens)) })
}

fn ids<'a>(sequences: impl IntoIterator<Item = &'a Sequence>) -> Vec<u64> {
    sequences.into_iter().map(|sequence| sequence.id.0).collect()
}

#[test]
fn the_line_is_ordered_by_priority_and_then_by_arrival() {
    let mut machine = Machine::new(64, limits(), 1);
    for (id, priority) in [(1, 0), (2, 5), (3, -1), (4, 0), (5, -1)] {
        machine.state.submit(RequestId(id), urgent(priority, 3, 5));
    }
    assert_eq!(ids(&machine.state.waiting), [3, 5, 1, 4, 2]);
    assert_eq!(machine.launch().started.iter().map(|started| started.id.0).collect::<Vec<_>>(), [3, 5, 1, 4]);
}

#[test]
fn of_one_priority_the_earliest_deadline_comes_first_and_whoever_has_none_last() {
    let now = Instant::now();
    let due = |seconds| Some(now + Duration::from_secs(seconds));
    let mut machine = Machine::new(64, limits(), 1);
    for (id, priority, deadline) in
        [(1, 0, None), (2, 0, due(9)), (3, 0, due(5)), (4, -1, None), (5, 0, due(5)), (6, 1, due(1))]
    {
        machine.state.submit(RequestId(id), due_by(deadline, urgent(priority, 3, 5)));
    }
    assert_eq!(ids(&machine.state.waiting), [4, 3, 5, 2, 1, 6]);
    machine.step();
    assert_eq!(ids(&machine.state.running), [4, 3, 5, 2], "the last is the victim");
}

#[test]
fn who_has_not_begun_by_its_deadline_ends_by_that_name_and_nobody_else_does() {
    let now = Instant::now();
    let mut machine = Machine::new(64, SchedLimits { max_num_seqs: 1, ..limits() }, 1);
    for (id, deadline) in [(1, now), (2, now + Duration::from_secs(1)), (3, now + Duration::from_secs(2))] {
        machine.state.submit(RequestId(id), due_by(Some(deadline), urgent(0, 3, 50)));
    }
    machine.step();
    // The first has begun, the second is late, the third is not.
    machine.state.expire(now + Duration::from_millis(1500));
    let (_, effects) = machine.step();
    let ended: Vec<_> = effects.ended.iter().map(|ended| (ended.id.0, &ended.reason, ended.never_started)).collect();
    assert_eq!(ended, [(2, &FinishReason::Expired, true)]);
    assert_eq!((ids(&machine.state.running), ids(&machine.state.waiting)), (vec![1], vec![3]));
    // What another engine began goes on.
    let resume = Some(crate::request::Resume { tokens: vec![1], ..Default::default() });
    let resumed = Request { resume, ..Request::clone(&due_by(Some(now), urgent(-1, 3, 50))) };
    machine.state.submit(RequestId(4), Arc::new(resumed));
    machine.state.expire(now + Duration::from_secs(1));
    assert!(machine.state.waiting.iter().all(|waiting| waiting.leaving.is_none()));
}

fn due_by(deadline: Option<Instant>, request: Arc<Request>) -> Arc<Request> {
    Arc::new(Request { deadline, ..Request::clone(&request) })
}

#[test]
fn the_least_urgent_gives_way_however_long_it_runs() {
    let mut machine = Machine::new(5, limits(), 1);
    machine.state.submit(RequestId(1), urgent(7, 16, 40));
    machine.step();
    machine.state.submit(RequestId(2), urgent(0, 16, 40));
    let mut preempted = Vec::new();
    while preempted.is_empty() {
        preempted = machine.step().1.preempted;
    }
    assert_eq!((preempted, ids(&machine.state.running)), (vec![RequestId(1)], vec![2]));
}

#[test]
fn nobody_gives_way_twice_in_a_row_while_an_equal_runs() {
    let mut machine = Machine::new(64, limits(), 1);
    for (id, priority) in [(1, 0), (2, 0), (3, 0)] {
        machine.state.submit(RequestId(id), urgent(priority, 3, 9));
    }
    machine.step();
    let victims = |machine: &Machine| [0, 1, 2].map(|idx| machine.state.victim(idx));
    assert_eq!(victims(&machine), [Some(2); 3], "the last one");
    machine.state.last_victim = Some(RequestId(3));
    assert_eq!(victims(&machine), [Some(1), Some(1), None], "the one before, or it waits where that one is planned");
    machine.state.last_victim = Some(RequestId(2));
    assert_eq!(victims(&machine), [Some(2); 3], "another one gave way since");
    machine.state.submit(RequestId(4), urgent(5, 3, 9));
    machine.step();
    machine.state.last_victim = Some(RequestId(4));
    assert_eq!(machine.state.victim(0), Some(3), "no equal of it runs");
}

const OF_A_STEP: Duration = Duration::from_millis(1);
/// Steps between two empty machines.
const STEPS_A_ROUND: usize = 2500;

/// Numbers as random as a test needs.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// What must hold of a plan, beside what the state checks itself.
fn check(machine: &Machine, ran: &BTreeSet<RequestId>, plan: &StepPlan, last_victim: &mut Option<RequestId>) {
    let running = &machine.state.running;
    for id in &plan.preempted {
        let victim = machine.state.waiting.iter().find(|waiting| waiting.id == *id).expect("it went back to the line");
        let priority = victim.request.priority;
        assert!(running.iter().all(|other| other.request.priority <= priority), "the least urgent gives way");
        let has_equal = running.iter().any(|other| other.request.priority == priority);
        assert!(*last_victim != Some(*id) || !has_equal, "{id:?} gives way twice while an equal runs");
        *last_victim = Some(*id);
    }
    // One that comes back from the line may lack no more than a token, but nobody waited for that one.
    let decodes = plan.chunks.iter().any(|chunk| !chunk.is_prefill && ran.contains(&chunk.id));
    let share = if decodes { machine.limits.prefill_share } else { usize::MAX };
    // The last token of a prompt is computed as a decode is.
    let prompts = plan.chunks.iter().filter(|chunk| chunk.is_prefill && chunk.n_tokens > 1);
    let n_tokens: usize = prompts.map(|chunk| chunk.n_tokens).sum();
    assert!(
        n_tokens <= share,
        "prompts keep to their share: {plan:?}
{:#?}",
        machine.state.running
    );
}

/// The line is in order, and whoever is in it for the first time is in time.
fn check_line(machine: &Machine, now: Instant) {
    let place = |waiting: &Sequence| {
        let Request { priority, deadline, .. } = *waiting.request;
        (priority, deadline.is_none(), deadline, waiting.id)
    };
    let waiting = &machine.state.waiting;
    assert!(waiting.iter().is_sorted_by_key(place), "{waiting:?}");
    let is_late = |one: &Sequence| !one.started && one.request.deadline.is_some_and(|deadline| deadline <= now);
    // One step in flight may be planned on it still.
    let stays = |one: &&Sequence| is_late(one) && one.leaving.is_none();
    assert_eq!(waiting.iter().find(stays), None, "nobody is forgotten");
}

/// A request that expired has had nothing of the machine.
fn is_expired(ended: &Ended) -> bool {
    let is_expired = ended.reason == FinishReason::Expired;
    assert!(!is_expired || ended.never_started, "{ended:?}");
    is_expired
}

#[test]
fn a_hundred_thousand_steps_keep_order_shares_and_every_invariant_and_the_most_urgent_never_waits_long() {
    // STOKER_SCHED_STEPS=10000000 takes a hundred times as long; the invariants are checked in debug builds.
    let n_steps =
        std::env::var("STOKER_SCHED_STEPS").map_or(100_000, |steps| steps.parse().expect("a number of steps"));
    let of_step = SchedLimits { max_num_seqs: 6, max_batched_tokens: 24, prefill_share: 12, ..limits() };
    let mut dice = Dice(7);
    let (mut next_id, mut last_victim, mut n_preempted, mut n_expired) = (0, None, 0, 0);
    let mut now = Instant::now();
    for round in 0..n_steps / STEPS_A_ROUND {
        let expected_completion = [None, Some(0), Some(20)][round % 3];
        let limits = SchedLimits { prefix_caching: round % 2 == 0, expected_completion, ..of_step.clone() };
        let mut machine = Machine::new(8 + round % 9, limits, 1 + round % 2);
        // The urgent one that is open, and the steps it has waited to start.
        let mut urgent_one: Option<(RequestId, u32)> = None;
        for _ in 0..STEPS_A_ROUND {
            if machine.state.waiting.len() < 12 && dice.below(3) == 0 {
                next_id += 1;
                let is_urgent = urgent_one.is_none() && dice.below(8) == 0;
                let priority = if is_urgent { -9 } else { dice.below(3) as i32 };
                let (prompt_len, max_tokens) = (1 + dice.below(40) as usize, 1 + dice.below(23) as u32);
                let after = [None, Some(30), Some(120)][dice.below(3) as usize];
                let deadline = after.map(|steps| now + steps * OF_A_STEP).filter(|_| !is_urgent);
                machine.state.submit(RequestId(next_id), due_by(deadline, urgent(priority, prompt_len, max_tokens)));
                urgent_one = urgent_one.or(is_urgent.then_some((RequestId(next_id), 0)));
            }
            let ran = machine.state.running.iter().map(|sequence| sequence.id).collect();
            now += OF_A_STEP;
            machine.state.expire(now);
            let (plan, effects) = machine.step();
            check_line(&machine, now);
            n_expired += effects.ended.iter().filter(|ended| is_expired(ended)).count();
            check(&machine, &ran, &plan, &mut last_victim);
            n_preempted += plan.preempted.len();
            if let Some((id, waited)) = &mut urgent_one {
                *waited += u32::from(machine.state.waiting.iter().any(|waiting| waiting.id == *id));
                // Whoever runs may end first: 23 tokens, and the prompts of five others before.
                assert!(*waited < 120, "{id:?} waits: {machine:?}");
                if effects.ended.iter().any(|ended| ended.id == *id) {
                    urgent_one = None;
                }
            }
        }
    }
    assert!(n_preempted > 20, "{n_preempted}: the caches were small");
    assert!(n_expired > 20, "{n_expired}: some waited long");
}
