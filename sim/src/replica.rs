//! One simulated replica: paged KV blocks, continuous batching, chunked prefill, preemption by recompute.
//!
//! Owns its queues, its blocks and its own time, which runs ahead of the fleet's by at most one step. Deterministic.
//! Decodes come first, then prefill chunks, then admission from the front of the queue; who came last is preempted.
//!
//! Blocks that no sequence references hold prompts of before, where these say by name what they share ([`HashIds`]): what is found
//! there at admission needs no prefill. A prompt can be found from its first token on, its answer never. As with cached tokens that a
//! trace says itself, each sequence counts all of its blocks, also those that another has too.
//!
//! [`HashIds`]: stoker_workload::HashIds

use std::collections::VecDeque;

use stoker_cost::{CostMeter, Spent, StepCost, StepReport, StepWork};
use stoker_crds::contract::KV_BLOCK_TOKENS;
use stoker_workload::{HASH_BLOCK_TOKENS, Request};

use crate::{cache::PrefixCache, model::ReplicaModel};

/// Seconds for which requests are priced by the same costs.
const COST_SECONDS: f64 = 10.0;
/// KV blocks of a block that has a name.
const BLOCKS_PER_NAME: u32 = HASH_BLOCK_TOKENS / KV_BLOCK_TOKENS;

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// When it arrived.
    pub arrived: f64,
    /// When its last token came.
    pub finished: f64,
    /// Seconds to its first token.
    pub ttft: f64,
    /// Tokens after the first.
    pub gaps: u32,
    /// Seconds its prompt takes on an idle replica: one that holds what the trace calls cached, and nothing of prompts by name, so
    /// that the SLO is the same wherever it is sent.
    pub unloaded: f64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
}

#[derive(Clone, Debug)]
struct Sequence {
    request: Request,
    /// Tokens whose KV is present.
    computed: u32,
    /// Tokens that must be present before the next one can be sampled.
    needed: u32,
    generated: u32,
    blocks: u32,
    first_token: Option<f64>,
    /// Tokens of the prompt that were there.
    cached: u32,
    /// Tokens of it that would have been there when it began to wait.
    foreseen: u32,
    /// The cache keeps its prompt.
    is_held: bool,
}

impl Sequence {
    fn new(request: Request) -> Self {
        let cached = said_cached(&request);
        Self {
            computed: cached,
            needed: request.prompt_tokens,
            generated: 0,
            blocks: 0,
            first_token: None,
            cached,
            foreseen: cached,
            is_held: false,
            request,
        }
    }

    fn names(&self) -> &[u64] {
        self.request.hash_ids.as_slice()
    }

    /// Tokens of the prompt that are there now; the last one is computed in any case, something must be drawn from.
    fn found(&self, cache: &PrefixCache) -> u32 {
        let found = cache.held(self.names()) as u32 * HASH_BLOCK_TOKENS;
        found.min(self.request.prompt_tokens.saturating_sub(1))
    }

    fn is_decoding(&self) -> bool {
        self.needed == self.computed + 1 && self.generated > 0
    }

    /// Throws the KV away. Its blocks are the first to be reused under this pressure, so also the cached prefix goes.
    fn preempt(&mut self) -> u32 {
        self.computed = 0;
        std::mem::take(&mut self.blocks)
    }
}

/// See the module. Times are seconds of virtual time.
#[derive(Clone, Debug)]
pub struct Replica {
    model: ReplicaModel,
    now: f64,
    running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    waiting_tokens: u64,
    waiting_blocks: u64,
    free_blocks: u32,
    preemptions: u64,
    finished: u64,
    outcomes: Vec<Outcome>,
    prefill: PrefillMeter,
    prefill_tokens: u64,
    cache: PrefixCache,
    /// Tokens of the waiting that are not thought to be there.
    waiting_uncached: u64,
    /// As the engine keeps them.
    meter: CostMeter,
    spent: Spent,
    /// What was learned, and when that is looked at again.
    cost: Option<StepCost>,
    cost_until: f64,
}

/// Speed of prefill, forgetting within about a minute of prefill.
#[derive(Clone, Copy, Debug, Default)]
struct PrefillMeter {
    tokens: f64,
    seconds: f64,
}

impl PrefillMeter {
    fn add(&mut self, tokens: u32, seconds: f64) {
        let keep = (-seconds / 60.0).exp();
        self.tokens = self.tokens * keep + f64::from(tokens);
        self.seconds = self.seconds * keep + seconds;
    }

    fn rate(self) -> Option<f64> {
        (self.tokens > 0.0).then(|| self.tokens / self.seconds)
    }
}

/// What a step will compute.
#[derive(Default)]
struct Step {
    decodes: u32,
    context: u64,
    prefill_tokens: u32,
    prefill_pairs: f64,
    prefill_seconds: f64,
    preempted: bool,
}

impl Replica {
    /// An empty replica that serves from `now` on.
    pub fn serving_from(now: f64, model: &ReplicaModel) -> Self {
        Self {
            model: model.clone(),
            now,
            running: Vec::new(),
            waiting: VecDeque::new(),
            waiting_tokens: 0,
            waiting_blocks: 0,
            free_blocks: model.blocks,
            preemptions: 0,
            finished: 0,
            outcomes: Vec::new(),
            prefill: PrefillMeter::default(),
            prefill_tokens: 0,
            cache: PrefixCache::default(),
            waiting_uncached: 0,
            meter: CostMeter::default(),
            spent: Spent::default(),
            cost: None,
            cost_until: 0.0,
        }
    }

    /// Puts a request into the queue at the time it arrives: no step that begins before knows of it.
    pub fn submit(&mut self, request: Request) {
        self.advance(request.arrived);
        self.wait(Sequence::new(request), VecDeque::push_back);
    }

    /// Steps until `until` is reached or nothing is left to do.
    pub fn advance(&mut self, until: f64) {
        while self.now < until && !self.is_empty() {
            self.leap(until);
            self.step();
        }
        self.now = self.now.max(until);
    }

    /// Every request it has, unanswered: what its clients ask again after it is lost.
    pub fn abandon(self) -> impl Iterator<Item = Request> {
        self.running.into_iter().chain(self.waiting).map(|sequence| sequence.request)
    }

    /// Outcomes since the last call.
    pub fn take_outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Nothing runs and nothing waits.
    pub fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Sequences being computed.
    pub fn running(&self) -> u32 {
        self.running.len() as u32
    }

    /// Requests waiting.
    pub fn waiting(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Sequences being computed and requests waiting.
    pub fn open(&self) -> u32 {
        self.running() + self.waiting()
    }

    /// Prompt tokens of waiting requests that still need prefill.
    pub fn waiting_prefill_tokens(&self) -> u64 {
        self.waiting_tokens
    }

    /// Tokens that need prefill before those of another request, without what is cached of them: what a gateway counts that knows
    /// where it sent what.
    pub fn prefill_ahead(&self) -> u64 {
        let begun = self.running.iter().filter(|sequence| !sequence.is_decoding());
        begun.map(|sequence| u64::from(sequence.needed - sequence.computed)).sum::<u64>() + self.waiting_uncached
    }

    /// Tokens whose prefill was computed so far, again and again those of sequences that were thrown out.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// KV blocks referenced.
    pub fn referenced_blocks(&self) -> u32 {
        self.model.blocks - self.free_blocks
    }

    /// KV blocks in all.
    pub fn total_blocks(&self) -> u32 {
        self.model.blocks
    }

    /// Share of the KV blocks that are referenced.
    pub fn kv_usage(&self) -> f64 {
        f64::from(self.referenced_blocks()) / f64::from(self.model.blocks)
    }

    /// Blocks referenced and needed by the waiting: what a router that knows KV looks at.
    pub fn blocks_wanted(&self) -> u64 {
        u64::from(self.referenced_blocks()) + self.waiting_blocks
    }

    /// Preemptions so far.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Requests ended so far.
    pub fn finished(&self) -> u64 {
        self.finished
    }

    /// Prefill speed, tokens per second.
    pub fn prefill_rate(&self) -> Option<f64> {
        self.prefill.rate()
    }

    /// What its steps cost, as it learned.
    pub fn steps(&self) -> StepReport {
        self.meter.report(self.spent)
    }

    /// Takes all steps at once in which nothing happens but one more token for each sequence; the same as taking them
    /// one by one, only faster.
    fn leap(&mut self, until: f64) {
        let (steps, context) = self.uneventful_steps(until);
        if steps < 2 {
            return;
        }
        let extra = self.extra_blocks(steps);
        if extra > self.free_blocks {
            return;
        }
        self.take_blocks(extra);
        let n = self.running.len() as u32;
        let per_step = self.model.decode_seconds(n, context);
        let growth = self.model.context_token_seconds * f64::from(n);
        let k = f64::from(steps);
        let seconds = k * per_step + growth * k * (k - 1.0) / 2.0;
        let mean_context = context as f64 + f64::from(n) * (k - 1.0) / 2.0;
        let work = StepWork { decodes: f64::from(n), context_tokens: mean_context, ..StepWork::default() };
        self.meter.steps(work, seconds / k, k);
        self.spent.step(work.times(k));
        self.now += seconds;
        for sequence in &mut self.running {
            sequence.blocks += extra_blocks(sequence, steps);
            sequence.computed += steps;
            sequence.needed += steps;
            sequence.generated += steps;
        }
    }

    /// Steps that surely end before `until` and before any sequence does, and the context of the first of them.
    fn uneventful_steps(&self, until: f64) -> (u32, u64) {
        let is_short = until - self.now < 2.0 * self.model.step_seconds;
        if is_short || !self.waiting.is_empty() {
            return (0, 0);
        }
        let (mut to_finish, mut context) = (u32::MAX, 0);
        for sequence in &self.running {
            let left = sequence.request.completion_tokens.saturating_sub(sequence.generated + 1);
            if left < 2 || !sequence.is_decoding() {
                return (0, 0);
            }
            to_finish = to_finish.min(left);
            context += u64::from(sequence.computed);
        }
        let n = self.running.len() as u32;
        let most = ((until - self.now) / self.model.decode_seconds(n, context)) as u32;
        let longest = self.model.decode_seconds(n, context + u64::from(n) * u64::from(most));
        (to_finish.min(((until - self.now) / longest) as u32), context)
    }

    fn extra_blocks(&self, steps: u32) -> u32 {
        self.running.iter().map(|sequence| extra_blocks(sequence, steps)).sum()
    }

    fn step(&mut self) {
        let mut step = Step::default();
        self.make_room_for_decodes(&mut step);
        let mut budget = self.model.max_batched_tokens.saturating_sub(step.decodes);
        if (step.decodes as usize) < self.running.len() {
            // Who decodes in this step has nothing left to compute by now.
            for sequence in self.running.iter_mut().filter(|sequence| sequence.computed < sequence.needed) {
                budget -= prefill_chunk(sequence, budget, &self.model, &mut step);
            }
        }
        if !step.preempted {
            self.admit(budget, &mut step);
        }
        self.prefill_tokens += u64::from(step.prefill_tokens);
        let decode = self.model.decode_seconds(step.decodes, step.context);
        let seconds = decode + step.prefill_seconds;
        if step.prefill_tokens > 0 {
            self.prefill.add(step.prefill_tokens, seconds);
        }
        let work = StepWork {
            decodes: f64::from(step.decodes),
            context_tokens: step.context as f64,
            prefill_tokens: f64::from(step.prefill_tokens),
            prefill_pairs: step.prefill_pairs,
        };
        self.meter.step(work, seconds);
        self.spent.step(work);
        self.now += seconds;
        self.sample();
    }

    /// Every decode may need one more block; without one, the youngest sequence goes back to the front of the queue.
    fn make_room_for_decodes(&mut self, step: &mut Step) {
        let mut idx = 0;
        while idx < self.running.len() {
            let sequence = &self.running[idx];
            if !sequence.is_decoding() {
                idx += 1;
                continue;
            }
            let extra = blocks_of(sequence.needed).saturating_sub(sequence.blocks);
            if extra > self.free_blocks {
                self.preempt_youngest();
                step.preempted = true;
                continue;
            }
            self.take_blocks(extra);
            let sequence = &mut self.running[idx];
            sequence.blocks += extra;
            step.decodes += 1;
            step.context += u64::from(sequence.computed);
            sequence.computed += 1;
            idx += 1;
        }
    }

    /// The youngest may be the one that asked; then it waits itself.
    fn preempt_youngest(&mut self) {
        let mut youngest = self.running.pop().expect("a running sequence asked for a block");
        self.leave_prompt(&mut youngest);
        self.free_blocks += youngest.preempt();
        self.preemptions += 1;
        self.wait(youngest, VecDeque::push_front);
    }

    fn wait(&mut self, mut sequence: Sequence, place: fn(&mut VecDeque<Sequence>, Sequence)) {
        sequence.foreseen = sequence.found(&self.cache).max(sequence.computed);
        self.waiting_tokens += u64::from(sequence.needed - sequence.computed);
        self.waiting_uncached += u64::from(sequence.needed - sequence.foreseen);
        self.waiting_blocks += u64::from(blocks_of(sequence.needed));
        place(&mut self.waiting, sequence);
    }

    /// Free blocks become referenced; what they held of prompts of before is gone.
    fn take_blocks(&mut self, n: u32) {
        self.free_blocks -= n;
        let n_idle_max = (self.free_blocks / BLOCKS_PER_NAME) as usize;
        // It is asked for every sequence of every step, and hardly ever has to.
        if self.cache.idle() > n_idle_max {
            self.cache.shrink(n_idle_max);
        }
    }

    /// The blocks of a prompt that was computed are referenced by one sequence less.
    fn leave_prompt(&mut self, sequence: &mut Sequence) {
        if std::mem::take(&mut sequence.is_held) {
            self.cache.release(sequence.names());
        }
    }

    fn admit(&mut self, mut budget: u32, step: &mut Step) {
        while budget > 0 && self.running.len() < self.model.max_num_seqs as usize {
            let Some(next) = self.waiting.front() else { return };
            let blocks = blocks_of(next.needed);
            if blocks > self.free_blocks {
                return;
            }
            let mut sequence = self.waiting.pop_front().expect("a front was seen");
            self.waiting_tokens -= u64::from(sequence.needed - sequence.computed);
            self.waiting_uncached -= u64::from(sequence.needed - sequence.foreseen);
            self.waiting_blocks -= u64::from(blocks);
            if !sequence.request.hash_ids.is_empty() {
                sequence.cached = sequence.found(&self.cache);
                sequence.computed = sequence.cached;
            }
            self.take_blocks(blocks);
            sequence.blocks = blocks;
            budget -= prefill_chunk(&mut sequence, budget, &self.model, step);
            self.running.push(sequence);
        }
    }

    /// Sequences whose KV is complete get their next token; those that are done leave.
    fn sample(&mut self) {
        let mut idx = 0;
        while idx < self.running.len() {
            let sequence = &mut self.running[idx];
            if sequence.computed == sequence.needed {
                sequence.generated += 1;
                sequence.needed += 1;
                sequence.first_token.get_or_insert(self.now);
                if !std::mem::replace(&mut sequence.is_held, true) {
                    self.cache.hold(sequence.names());
                }
                if sequence.generated >= sequence.request.completion_tokens {
                    self.finish(idx);
                    continue;
                }
            }
            idx += 1;
        }
    }

    fn finish(&mut self, idx: usize) {
        let mut sequence = self.running.remove(idx);
        self.leave_prompt(&mut sequence);
        self.free_blocks += sequence.blocks;
        self.take_blocks(0);
        self.finished += 1;
        let Sequence { request, first_token, generated, cached, .. } = sequence;
        let first = first_token.expect("a finished sequence has a token");
        let gaps = generated.saturating_sub(1);
        let uncached = request.prompt_tokens - cached;
        if self.now >= self.cost_until {
            (self.cost, self.cost_until) = (self.meter.cost().map(|(cost, _)| cost), self.now + COST_SECONDS);
        }
        if let Some(cost) = self.cost {
            let work = StepWork::prefill(f64::from(uncached), f64::from(cached))
                + StepWork::answer(f64::from(gaps), f64::from(request.prompt_tokens));
            self.spent.request(cost.work_seconds(work));
        }
        let promised = said_cached(&request);
        self.outcomes.push(Outcome {
            arrived: request.arrived,
            finished: self.now,
            ttft: first - request.arrived,
            gaps,
            unloaded: self.model.step_seconds + self.model.prefill_seconds(request.prompt_tokens - promised, promised),
            prompt_tokens: request.prompt_tokens,
        });
    }
}

/// Tokens that are there because the trace says so: where prompts have names, that is for the cache to say.
fn said_cached(request: &Request) -> u32 {
    let said = if request.hash_ids.is_empty() { request.cached_tokens } else { 0 };
    said.min(request.prompt_tokens.saturating_sub(1))
}

fn prefill_chunk(sequence: &mut Sequence, budget: u32, model: &ReplicaModel, step: &mut Step) -> u32 {
    let tokens = (sequence.needed - sequence.computed).min(budget);
    step.prefill_seconds += model.prefill_seconds(tokens, sequence.computed);
    step.prefill_tokens += tokens;
    step.prefill_pairs += StepWork::prefill(f64::from(tokens), f64::from(sequence.computed)).prefill_pairs;
    sequence.computed += tokens;
    tokens
}

/// Blocks a decoding sequence needs more after some steps.
fn extra_blocks(sequence: &Sequence, steps: u32) -> u32 {
    blocks_of(sequence.needed + steps - 1).saturating_sub(sequence.blocks)
}

fn blocks_of(tokens: u32) -> u32 {
    tokens.div_ceil(KV_BLOCK_TOKENS)
}

#[cfg(test)]
mod tests {
    use stoker_workload::HashIds;

    use super::*;

    fn request(arrived: f64, prompt_tokens: u32, completion_tokens: u32) -> Request {
        Request { arrived, prompt_tokens, cached_tokens: 0, completion_tokens, hash_ids: HashIds::default() }
    }

    fn replica(blocks: u32) -> Replica {
        Replica::serving_from(0.0, &ReplicaModel { blocks, ..ReplicaModel::default() })
    }

    fn run(replica: &mut Replica) -> Vec<Outcome> {
        replica.advance(1e6);
        replica.take_outcomes()
    }

    #[test]
    fn a_request_alone_takes_one_prefill_and_one_step_a_token() {
        let mut replica = replica(1000);
        replica.submit(request(1.0, 640, 101));
        let outcome = run(&mut replica)[0];
        let model = ReplicaModel::default();
        assert!((outcome.ttft - outcome.unloaded).abs() < 1e-9);
        let decoding = outcome.finished - outcome.arrived - outcome.ttft;
        assert!((decoding - 100.0 * model.decode_seconds(1, 690)).abs() < 1e-4, "{decoding}");
        assert_eq!((replica.referenced_blocks(), replica.finished()), (0, 1));
    }

    #[test]
    fn who_comes_while_others_decode_is_not_answered_before() {
        let mut replica = replica(1000);
        replica.submit(request(0.0, 100, 1000));
        replica.submit(request(0.7, 100, 10));
        let second = run(&mut replica)[0];
        assert_eq!(second.arrived, 0.7);
        let model = ReplicaModel::default();
        assert!(second.ttft > model.decode_seconds(1, 100) + model.prefill_seconds(100, 0), "{second:?}");
    }

    #[test]
    fn a_leap_ends_where_single_steps_would() {
        let submit = |replica: &mut Replica| {
            (0..20).for_each(|idx| replica.submit(request(0.0, 100 + 37 * idx, 40 + 13 * idx)));
        };
        let (mut leaping, mut stepping) = (replica(1000), replica(1000));
        submit(&mut leaping);
        submit(&mut stepping);
        while !stepping.is_empty() {
            stepping.step();
        }
        leaping.advance(1e6);
        let close = |a: &Outcome, b: &Outcome| (a.finished - b.finished).abs() < 1e-6 && (a.ttft - b.ttft).abs() < 1e-6;
        let (leapt, stepped) = (leaping.take_outcomes(), stepping.take_outcomes());
        assert_eq!(leapt.len(), 20);
        assert!(leapt.iter().zip(&stepped).all(|(a, b)| close(a, b)));
    }

    #[test]
    fn without_blocks_the_youngest_is_thrown_out_and_all_still_finish() {
        let mut replica = replica(30);
        (0..4).for_each(|_| replica.submit(request(0.0, 100, 100)));
        let outcomes = run(&mut replica);
        assert_eq!(outcomes.len(), 4);
        assert!(replica.preemptions() > 0);
        assert_eq!((replica.referenced_blocks(), replica.waiting_prefill_tokens(), replica.blocks_wanted()), (0, 0, 0));
        assert!(outcomes[0].finished < outcomes[3].finished, "the oldest is never the victim");
    }

    fn named(arrived: f64, prompt_tokens: u32, names: &[u64]) -> Request {
        Request { hash_ids: names.to_vec().into(), ..request(arrived, prompt_tokens, 1) }
    }

    /// Tokens of prefill that each takes, one after the other.
    fn prefill_of(replica: &mut Replica, requests: &[Request]) -> Vec<u64> {
        let prefill = |request: &Request| {
            let before = replica.prefill_tokens();
            replica.submit(request.clone());
            while !replica.is_empty() {
                replica.step();
            }
            replica.prefill_tokens() - before
        };
        requests.iter().map(prefill).collect()
    }

    #[test]
    fn a_prompt_that_begins_as_one_before_takes_the_rest_of_its_prefill() {
        let prompts = [
            named(0.0, 1500, &[1, 2, 3]),
            named(0.0, 1800, &[1, 2, 4, 5]),
            named(0.0, 1500, &[1, 2, 3]),
            named(0.0, 1500, &[7, 2, 3]),
        ];
        assert_eq!(prefill_of(&mut replica(1000), &prompts), [1500, 776, 1, 1500]);
    }

    #[test]
    fn prompts_of_before_lie_in_blocks_that_nobody_references() {
        let prompts = [named(0.0, 1024, &[1, 2]), named(0.0, 1024, &[3, 4]), named(0.0, 1024, &[1, 2])];
        assert_eq!(prefill_of(&mut replica(128), &prompts), [1024, 1024, 1]);
        // 64 of 100 blocks are referenced while the second is there: of the first, 32 are left.
        assert_eq!(prefill_of(&mut replica(100), &prompts), [1024, 1024, 512]);
        assert_eq!(prefill_of(&mut replica(66), &prompts), [1024, 1024, 1024]);
    }

    #[test]
    fn what_a_sequence_references_is_found_and_counts_for_each() {
        let mut replica = replica(200);
        replica.submit(Request { completion_tokens: 1000, ..named(0.0, 1024, &[1, 2]) });
        replica.advance(0.5);
        replica.submit(Request { completion_tokens: 1000, ..named(0.5, 1500, &[1, 2, 3]) });
        assert_eq!((replica.waiting_prefill_tokens(), replica.prefill_ahead()), (1500, 476));
        replica.advance(1.0);
        assert_eq!((replica.prefill_tokens(), replica.prefill_ahead()), (1500, 0));
        assert!(replica.referenced_blocks() > 158);
        run(&mut replica);
        assert_eq!((replica.referenced_blocks(), replica.waiting_prefill_tokens()), (0, 0));
    }

    #[test]
    fn with_names_what_a_trace_calls_cached_does_not_count() {
        let request = Request { cached_tokens: 1000, ..named(0.0, 1024, &[1, 2]) };
        assert_eq!(prefill_of(&mut replica(1000), &[request]), [1024]);
    }

    #[test]
    fn thrown_out_and_named_all_still_finish() {
        let mut replica = replica(130);
        for name in 0..4 {
            replica.submit(Request { completion_tokens: 900, ..named(0.0, 500, &[name]) });
        }
        assert_eq!(run(&mut replica).len(), 4);
        assert!(replica.preemptions() > 0);
        assert_eq!((replica.referenced_blocks(), replica.prefill_ahead(), replica.blocks_wanted()), (0, 0, 0));
    }

    #[test]
    fn cached_tokens_take_blocks_but_no_prefill() {
        let ttft = |cached_tokens| {
            let mut replica = replica(1000);
            replica.submit(Request { cached_tokens, ..request(0.0, 4000, 1) });
            replica.advance(0.001);
            assert_eq!(replica.referenced_blocks(), if replica.is_empty() { 0 } else { 250 });
            run(&mut replica)[0].ttft
        };
        assert!(ttft(3600) < ttft(0) / 4.0);
    }
}
