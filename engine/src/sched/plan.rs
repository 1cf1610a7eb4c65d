//! `schedule`: which tokens the next step computes. Decodes first, then prefill chunks of what runs, then new
//! sequences from the line, preempting the last when a decode finds no block. Beside decodes, prompts have a share of the step
//! unless they are more, and a long one leaves half of it to those behind it. What several begin with, one computes (`follow`).

use super::{
    SchedLimits, SchedState, Slots,
    follow::{Turn, follows, is_amid_prompt, turn},
    forecast::{Growing, peak_blocks},
    pace::BURST,
    prefix,
};
use crate::{
    kv::{BLOCK_TOKENS, BlockCopy, BlockId, BlockPool, blocks_for},
    request::RequestId,
    sequence::Sequence,
};

/// One step, decided. Small and without borrows: it is kept while the step is in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// What to compute, one entry a sequence.
    pub chunks: Vec<Chunk>,
    /// Blocks to copy before that.
    pub copies: Vec<BlockCopy>,
    /// Sequences that lost their blocks and went back to the front of the line.
    pub preempted: Vec<RequestId>,
    /// Sequences of which something is computed for the first time.
    pub started: Vec<Started>,
}

/// A sequence that starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Started {
    /// Whose.
    pub id: RequestId,
    /// Tokens of its prompt in blocks that it found by then; `None` without a prefix cache.
    pub cached_tokens: Option<usize>,
}

/// Consecutive tokens of one sequence to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// Whose.
    pub id: RequestId,
    /// Its place in the running queue, until `resolve` or `schedule` is called again.
    pub running_idx: usize,
    /// Position of the first token.
    pub start: usize,
    /// Tokens.
    pub n_tokens: usize,
    /// Set when the only token is not known yet: the sampling chunk of the step before that samples it.
    pub fed_entry: Option<usize>,
    /// The chunk reaches the sequence's end: sample the next token.
    pub samples: bool,
    /// The first one to sample since the sequence has its slot: all of its tokens are known, nothing of it is in flight.
    pub enters_slot: bool,
    /// Part of a prompt (or of a recomputation) rather than a decode.
    pub is_prefill: bool,
    /// What it samples goes nowhere, see [`put_off`](super::put_off()) and [`jump_over_draw`](super::jump_over_draw()).
    pub is_put_off: bool,
}

impl StepPlan {
    /// Tokens this step computes.
    pub fn n_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.n_tokens).sum()
    }

    /// Whether a sequence draws in it.
    pub(crate) fn draws(&self, id: RequestId) -> bool {
        self.chunks.iter().any(|chunk| chunk.id == id && chunk.samples && !chunk.is_put_off)
    }

    /// Tokens of prefill among them.
    pub fn n_prefill_tokens(&self) -> usize {
        self.chunks.iter().filter(|chunk| chunk.is_prefill).map(|chunk| chunk.n_tokens).sum()
    }
}

/// A plan in the making.
struct Draft<'a> {
    plan: StepPlan,
    limits: &'a SchedLimits,
    /// Tokens the step may still take.
    budget: usize,
    n_sampling: usize,
}

/// Decides the next step, takes the blocks it needs and counts its tokens as computed.
pub fn schedule(state: &mut SchedState, limits: &SchedLimits) -> StepPlan {
    let mut draft = Draft { plan: StepPlan::default(), limits, budget: limits.max_batched_tokens, n_sampling: 0 };
    state.sort_running();
    state.running.iter_mut().for_each(|sequence| sequence.n_settled = sequence.computed);
    plan_decodes(state, &mut draft);
    let n_decoded = draft.plan.n_tokens();
    if n_decoded > 0 && !yields_to_burst(state, &draft) {
        draft.budget = of_whole_tiles(draft.budget.min(limits.prefill_share), n_decoded, limits.tile_rows);
    }
    plan_running_prefills(state, &mut draft);
    admit_waiting(state, Newcomers::All, &mut draft);
    state.debug_check(limits);
    draft.plan
}

/// In order, so that the victim of a missing block, which is one of the last, is never one already planned.
fn plan_decodes(state: &mut SchedState, draft: &mut Draft<'_>) {
    let limits = draft.limits;
    let decodes = |sequence: &Sequence| sequence.is_decoding() && goes_on(sequence, limits);
    let mut n_behind = state.running.iter().filter(|sequence| decodes(sequence)).count();
    let mut idx = 0;
    while idx < state.running.len() && draft.budget > 0 {
        if !decodes(&state.running[idx]) {
            idx += 1;
            continue;
        }
        n_behind = n_behind.saturating_sub(1);
        match make_room(state, idx, draft) {
            Room::Made => {
                let SchedState { running, pool, .. } = state;
                // Who jumps ahead leaves those behind it their tokens.
                let held_back = n_behind.min(draft.budget - 1);
                draft.budget -= held_back;
                draft.push(&mut running[idx], idx, pool);
                draft.budget += held_back;
                idx += 1;
            }
            Room::Later => idx += 1,
            Room::Gone => {}
        }
    }
}

/// What became of a sequence that needs a block.
enum Room {
    /// It has one.
    Made,
    /// It waits for one where it is, while others decode.
    Later,
    /// It went back to the line.
    Gone,
}

/// Whether a sequence may be planned: it is not on its way out, it does not surely end with a token in flight, and its mask is not
/// late.
fn goes_on(sequence: &Sequence, limits: &SchedLimits) -> bool {
    sequence.leaving.is_none() && !sequence.awaits_mask && !sequence.is_full(limits.max_model_len)
}

/// Finds blocks for the next tokens of `running[idx]`, preempting from the end of the queue.
fn make_room(state: &mut SchedState, idx: usize, draft: &mut Draft<'_>) -> Room {
    loop {
        let SchedState { running, pool, .. } = state;
        let sequence = &mut running[idx];
        if sequence.table.grow_to(sequence.len(), pool).is_ok() {
            return Room::Made;
        }
        let Some(victim) = state.victim(idx) else { return Room::Later };
        preempt(state, victim, draft);
        if victim == idx {
            return Room::Gone;
        }
    }
}

/// Takes all blocks of a running sequence and puts it back into the line. Its prompt and generated tokens are computed again
/// later; sampling depends on (seed, position) only, so its text does not change. A token of it that is in flight still
/// arrives: the blocks are given to later steps only.
fn preempt(state: &mut SchedState, idx: usize, draft: &mut Draft<'_>) {
    let mut victim = state.running.remove(idx);
    victim.table.release(&mut state.pool);
    victim.leave_slot(&mut state.slots);
    (victim.computed, victim.n_settled, victim.n_named, victim.n_found) = (0, 0, 0, 0);
    victim.awaits_mask = false;
    victim.decode_len = 1;
    // One that is about to end anyway is not a preemption: it only gave its blocks back a little earlier.
    if victim.leaving.is_none() && !victim.is_full(draft.limits.max_model_len) {
        draft.plan.preempted.push(victim.id);
        state.last_victim = Some(victim.id);
    }
    state.enter_line(victim);
}

fn plan_running_prefills(state: &mut SchedState, draft: &mut Draft<'_>) {
    if !state.running.iter().any(is_amid_prompt) {
        return;
    }
    admit_waiting(state, Newcomers::WhoFollow, draft);
    let next_fits = head_fits(state, draft.limits);
    let SchedState { running, pool, .. } = state;
    let prefills: Vec<usize> = (0..running.len()).filter(|idx| is_amid_prompt(&running[*idx])).collect();
    prefills.iter().for_each(|idx| prefix::catch_up(&mut running[*idx], pool, draft.limits));
    let computes = |idx: &&usize| turn(running, **idx, draft.limits) != Turn::Follows;
    let last = prefills.iter().rfind(computes).copied();
    for idx in prefills {
        if draft.budget == 0 {
            return;
        }
        let is_awaited = next_fits || last > Some(idx);
        // A prompt that takes several steps must not keep short ones behind it from their first tokens.
        let is_long = state.running[idx].remaining() > draft.budget;
        let held_back = if is_awaited && is_long { draft.budget / 2 } else { 0 };
        draft.budget -= held_back;
        plan_prefill(state, idx, draft);
        draft.budget += held_back;
    }
}

/// Plans a piece of what `running[idx]` has to compute before it draws, if it is not another one's to compute.
fn plan_prefill(state: &mut SchedState, idx: usize, draft: &mut Draft<'_>) {
    let SchedState { running, pool, .. } = state;
    prefix::catch_up(&mut running[idx], pool, draft.limits);
    match turn(running, idx, draft.limits) {
        Turn::Follows => return,
        Turn::Computes => {}
        Turn::Copies { copy, n_tokens } => {
            draft.plan.copies.push(copy);
            running[idx].computed = n_tokens;
        }
    }
    draft.push(&mut running[idx], idx, pool);
}

/// A share of so many rows or somewhat fewer, so that with the decodes no tile is computed for a part of its rows.
fn of_whole_tiles(share: usize, n_decoded: usize, tile_rows: usize) -> usize {
    let n_over = (n_decoded + share) % tile_rows;
    if n_over < share { share - n_over } else { share }
}

/// Whether prompts may fill a step beside its decodes: the target yields, and those who wait for a first token, and could have it if
/// the step took them, are a burst or more than those who get a further one.
fn yields_to_burst(state: &SchedState, draft: &Draft<'_>) -> bool {
    let SchedState { running, waiting, .. } = state;
    let n_begun = || running.iter().filter(|sequence| is_amid_prompt(sequence)).count();
    let n_places = || draft.limits.max_num_seqs - running.len();
    let n_next = || if head_fits(state, draft.limits) { waiting.len().min(n_places()) } else { 0 };
    let yields = draft.limits.itl_target.is_some_and(|target| target.yields_to_bursts);
    yields && n_begun() + n_next() > draft.plan.chunks.len().min(BURST - 1)
}

/// Whether the first in the line could start now.
fn head_fits(state: &SchedState, limits: &SchedLimits) -> bool {
    let n_running = state.running.len();
    let has_room = |head: &Sequence| n_running < limits.max_num_seqs && fits(head, &[], n_running, &state.pool);
    state.waiting.front().is_some_and(|head| head.leaving.is_none() && has_room(head))
}

/// Who may start.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Newcomers {
    /// All.
    All,
    /// Those at the front of the line that begin as somebody does who is computing that: they take no share of the step, and leave the
    /// front to those that do.
    WhoFollow,
}

/// Moves sequences from the line into the running queue, strictly in order: one without blocks keeps its place and
/// nobody overtakes it.
fn admit_waiting(state: &mut SchedState, whom: Newcomers, draft: &mut Draft<'_>) {
    let limits = draft.limits;
    // What was just preempted must not come straight back with the blocks its displacer is about to need.
    if !draft.plan.preempted.is_empty() {
        return;
    }
    let mut idx = 0;
    while idx < state.waiting.len() && draft.budget > 0 && state.running.len() < limits.max_num_seqs {
        let SchedState { waiting, running, pool, .. } = state;
        let sequence = &mut waiting[idx];
        if sequence.leaving.is_some() || sequence.is_full(limits.max_model_len) {
            idx += 1;
            continue;
        }
        // All its tokens are computed again, so all of them must be known.
        if sequence.in_flight > 0 {
            return;
        }
        let found = prefix::find(sequence, pool, limits);
        if whom == Newcomers::WhoFollow && !follows(sequence, found.len(), running, limits) {
            return;
        }
        if !fits(sequence, &found, running.len(), pool) || !can_stay(idx, &found, state, limits) {
            return;
        }
        let SchedState { waiting, .. } = state;
        let sequence = waiting.remove(idx).expect("idx is inside the line");
        start(sequence, &found, state, draft);
    }
}

/// Blocks for all known tokens are taken at admission as a whole, so a half-computed prompt never waits for blocks and
/// two prompts cannot hold each other up. One block a running sequence stays free: each may need one soon, and
/// admitting into them would preempt the newcomer at once. A found block that others hold too costs nothing.
fn fits(sequence: &Sequence, found: &[BlockId], n_running: usize, pool: &BlockPool) -> bool {
    let n_held = found.iter().filter(|block| pool.refs(**block) > 0).count();
    blocks_for(sequence.len()) - n_held + n_running <= pool.n_available()
}

/// Whether a sequence that waits can be expected to end without anybody being preempted for it. Alone it always may.
fn can_stay(idx: usize, found: &[BlockId], state: &SchedState, limits: &SchedLimits) -> bool {
    let SchedState { waiting, running, pool, lengths, .. } = state;
    let Some(at_first) = limits.expected_completion.filter(|_| !running.is_empty()) else { return true };
    let growing = |sequence: &Sequence| Growing::new(sequence, lengths, at_first, limits.max_model_len);
    let mut all: Vec<Growing> = running.iter().map(growing).collect();
    let n_own: usize = all.iter().map(|one| blocks_for(one.own_tokens)).sum();
    let n_shared = pool.n_referenced().saturating_sub(n_own);
    let newcomer = growing(&waiting[idx]);
    let n_found = found.len() * BLOCK_TOKENS;
    all.push(Growing { own_tokens: newcomer.own_tokens.saturating_sub(n_found), ..newcomer });
    let n_revived = found.iter().filter(|block| pool.refs(**block) == 0).count();
    n_shared + n_revived + peak_blocks(all) <= pool.n_total()
}

fn start(mut sequence: Sequence, found: &[BlockId], state: &mut SchedState, draft: &mut Draft<'_>) {
    prefix::attach(&mut sequence, found, &mut state.pool);
    sequence.table.grow_to(sequence.len(), &mut state.pool).expect("fits() counted the blocks");
    sequence.slot = Some(state.slots.take());
    state.running.push(sequence);
    plan_prefill(state, state.running.len() - 1, draft);
}

impl Sequence {
    /// Gives the slot back, if it has one.
    pub(super) fn leave_slot(&mut self, slots: &mut Slots) {
        self.has_sampled_in_slot = false;
        self.slot.take().into_iter().for_each(|slot| slots.release(slot));
    }
}

impl Draft<'_> {
    /// Tokens that the next chunk of a sequence may have. After a preemption, generated tokens are among them.
    fn chunk_tokens(&self, sequence: &Sequence) -> usize {
        let n_prompt = sequence.request.prompt.len();
        match self.limits.replays_decodes {
            false => sequence.remaining(),
            true if sequence.computed < n_prompt => sequence.remaining().min(n_prompt - sequence.computed),
            true => 1,
        }
    }

    fn note_start(&mut self, sequence: &mut Sequence) {
        if !std::mem::replace(&mut sequence.started, true) {
            // It may have jumped ahead, but what is told of is the prompt; and not what it copied, which is there only while another runs.
            let cached_tokens = self.limits.prefix_caching.then_some(sequence.n_found.min(sequence.prompt_len()));
            self.plan.started.push(Started { id: sequence.id, cached_tokens });
        }
    }

    /// Plans as much of a sequence as the step still takes.
    fn push(&mut self, sequence: &mut Sequence, running_idx: usize, pool: &mut BlockPool) {
        self.note_start(sequence);
        let n_tokens = self.chunk_tokens(sequence).min(self.budget);
        let (start, samples) = (sequence.computed, n_tokens == sequence.remaining());
        let is_prefill = if self.limits.replays_decodes {
            start < sequence.request.prompt.len()
        } else {
            sequence.n_generated() == 0 || !sequence.is_decoding()
        };
        let fed_entry = (start >= sequence.tokens.len()).then_some(sequence.sampled_entry);
        let (id, enters_slot) = (sequence.id, samples && !sequence.has_sampled_in_slot);
        let chunk =
            Chunk { id, running_idx, start, n_tokens, fed_entry, samples, enters_slot, is_prefill, is_put_off: false };
        self.plan.chunks.push(chunk);
        self.budget -= n_tokens;
        sequence.computed += n_tokens;
        if self.limits.prefix_caching {
            prefix::name_full_blocks(sequence, pool, self.limits);
        }
        if samples {
            sequence.in_flight += 1;
            sequence.has_sampled_in_slot = true;
            sequence.decode_len = 1;
            sequence.sampled_entry = self.n_sampling;
            self.n_sampling += 1;
        }
    }
}
