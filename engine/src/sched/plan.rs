//! `schedule`: which tokens the next step computes. Decodes first, then prefill chunks of what runs, then new
//! sequences from the line, preempting last-in when a decode finds no block.

use std::sync::Arc;

use super::{SchedLimits, SchedState};
use crate::{
    kv::{BlockId, blocks_for},
    request::{Request, RequestId, SamplingParams, TokenId},
    sequence::Sequence,
};

/// One step, decided. Holds everything an executor needs, so executing never reads scheduler state.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// What to compute, one entry a sequence.
    pub chunks: Vec<Chunk>,
    /// Sequences that leave in this step; `resolve` frees them.
    pub leaving: Vec<RequestId>,
    /// Sequences that lost their blocks and went back to the front of the line.
    pub preempted: Vec<RequestId>,
    /// Sequences that enter the running queue for the first time.
    pub started: Vec<RequestId>,
}

/// Consecutive tokens of one sequence to compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Chunk {
    /// Whose.
    pub id: RequestId,
    /// The tokens.
    pub tokens: Vec<TokenId>,
    /// Position of the first one.
    pub start: usize,
    /// The sequence's KV blocks, enough for `start + tokens.len()`.
    pub blocks: Vec<BlockId>,
    /// Set when the chunk reaches the sequence's end: sample the next token.
    pub sample: Option<SampleSpec>,
    /// Part of a prompt (or of a recomputation) rather than a decode.
    pub is_prefill: bool,
}

/// How to sample the token that follows a chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleSpec {
    /// What the client asked for.
    pub request: Arc<Request>,
    /// Position the sampled token will have; with the seed it fixes all randomness (D9).
    pub position: usize,
    /// Tokens that must not be sampled: the end tokens while `min_tokens` is not reached.
    pub banned: Vec<TokenId>,
    /// Prompt and generated tokens; left empty unless a penalty reads them.
    pub history: Vec<TokenId>,
}

impl StepPlan {
    /// Tokens this step computes.
    pub fn n_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.tokens.len()).sum()
    }

    /// Tokens of prefill among them.
    pub fn n_prefill_tokens(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.is_prefill).map(|chunk| chunk.tokens.len()).sum()
    }
}

/// Decides the next step and takes the blocks it needs.
pub fn schedule(state: &mut SchedState, limits: &SchedLimits) -> StepPlan {
    let mut plan = StepPlan { leaving: leaving(state), ..StepPlan::default() };
    let mut budget = limits.max_batched_tokens;
    plan_decodes(state, limits, &mut budget, &mut plan);
    plan_running_prefills(state, limits, &mut budget, &mut plan);
    admit_waiting(state, limits, &mut budget, &mut plan);
    state.debug_check(limits);
    plan
}

fn leaving(state: &SchedState) -> Vec<RequestId> {
    state.running.iter().chain(&state.waiting).filter(|s| s.leaving.is_some()).map(|s| s.id).collect()
}

/// Oldest first, so that the victim of a missing block (the last running sequence) is never one already planned.
fn plan_decodes(state: &mut SchedState, limits: &SchedLimits, budget: &mut usize, plan: &mut StepPlan) {
    let mut idx = 0;
    while idx < state.running.len() && *budget > 0 {
        let sequence = &state.running[idx];
        if sequence.leaving.is_some() || !sequence.is_decoding() {
            idx += 1;
            continue;
        }
        if make_room(state, idx, plan) {
            plan.chunks.push(chunk_of(&state.running[idx], 1, limits));
            *budget -= 1;
            idx += 1;
        }
    }
}

/// Finds a block for the next token of `running[idx]`, preempting from the end of the queue.
/// `false`: the sequence itself was the last one and went back to the line.
fn make_room(state: &mut SchedState, idx: usize, plan: &mut StepPlan) -> bool {
    loop {
        let SchedState { running, pool, .. } = state;
        let sequence = &mut running[idx];
        if sequence.table.grow_to(sequence.tokens.len(), pool).is_ok() {
            return true;
        }
        preempt_last(state, plan);
        if idx == state.running.len() {
            return false;
        }
    }
}

/// Takes all blocks of the newest running sequence and puts it at the front of the line. Its prompt and generated
/// tokens are computed again later; sampling depends on (seed, position) only, so its text does not change.
fn preempt_last(state: &mut SchedState, plan: &mut StepPlan) {
    let mut victim = state.running.pop().expect("the sequence that needs a block is still running");
    victim.table.release(&mut state.pool);
    victim.computed = 0;
    // One that leaves in this step anyway is not a preemption: it only gave its blocks back a little earlier.
    if victim.leaving.is_none() {
        plan.preempted.push(victim.id);
    }
    state.waiting.push_front(victim);
}

fn plan_running_prefills(state: &SchedState, limits: &SchedLimits, budget: &mut usize, plan: &mut StepPlan) {
    for sequence in state.running.iter().filter(|s| s.leaving.is_none() && !s.is_decoding()) {
        let n = sequence.remaining().min(*budget);
        if n == 0 {
            return;
        }
        plan.chunks.push(chunk_of(sequence, n, limits));
        *budget -= n;
    }
}

/// Moves sequences from the line into the running queue, strictly in order: one without blocks keeps its place and
/// nobody overtakes it.
fn admit_waiting(state: &mut SchedState, limits: &SchedLimits, budget: &mut usize, plan: &mut StepPlan) {
    // What was just preempted must not come straight back with the blocks its displacer is about to need.
    if !plan.preempted.is_empty() {
        return;
    }
    let mut idx = 0;
    while idx < state.waiting.len() && *budget > 0 && state.running.len() < limits.max_num_seqs {
        if state.waiting[idx].leaving.is_some() {
            idx += 1;
            continue;
        }
        if !fits(&state.waiting[idx], state) {
            return;
        }
        let sequence = state.waiting.remove(idx).expect("idx is inside the line");
        start(sequence, state, limits, budget, plan);
    }
}

/// Blocks for all known tokens are taken at admission as a whole, so a half-computed prompt never waits for blocks and
/// two prompts cannot hold each other up. One block a running sequence stays free: each may need one soon, and
/// admitting into them would preempt the newcomer at once.
fn fits(sequence: &Sequence, state: &SchedState) -> bool {
    blocks_for(sequence.tokens.len()) + state.running.len() <= state.pool.n_free()
}

fn start(
    mut sequence: Sequence,
    state: &mut SchedState,
    limits: &SchedLimits,
    budget: &mut usize,
    plan: &mut StepPlan,
) {
    sequence.table.grow_to(sequence.tokens.len(), &mut state.pool).expect("fits() counted the blocks");
    if !sequence.started {
        sequence.started = true;
        plan.started.push(sequence.id);
    }
    let n = sequence.remaining().min(*budget);
    plan.chunks.push(chunk_of(&sequence, n, limits));
    *budget -= n;
    state.running.push(sequence);
}

fn chunk_of(sequence: &Sequence, n: usize, limits: &SchedLimits) -> Chunk {
    let end = sequence.computed + n;
    let is_last = end == sequence.tokens.len();
    Chunk {
        id: sequence.id,
        tokens: sequence.tokens[sequence.computed..end].to_vec(),
        start: sequence.computed,
        blocks: sequence.table.blocks().to_vec(),
        sample: is_last.then(|| sample_spec(sequence, limits)),
        is_prefill: sequence.n_generated() == 0 || !sequence.is_decoding(),
    }
}

fn sample_spec(sequence: &Sequence, limits: &SchedLimits) -> SampleSpec {
    let request = &sequence.request;
    let below_minimum = sequence.n_generated() < request.stop.min_tokens as usize;
    SampleSpec {
        request: Arc::clone(request),
        position: sequence.tokens.len(),
        banned: if below_minimum { limits.eos.clone() } else { Vec::new() },
        history: if reads_history(&request.sampling) { sequence.tokens.clone() } else { Vec::new() },
    }
}

fn reads_history(params: &SamplingParams) -> bool {
    params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 || params.repetition_penalty != 1.0
}
