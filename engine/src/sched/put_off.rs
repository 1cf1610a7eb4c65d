//! A draw that is put off: its mask did not come in time, and the others of its step do not wait. The sequence keeps what it
//! has; its newest token is computed again, in a step that is planned when the mask is there.

use super::{SchedState, StepPlan};
use crate::{
    kv::{BLOCK_TOKENS, BlockPool},
    request::RequestId,
    sequence::Sequence,
};

/// Takes the draw of one sequence back out of the plan that was made last: what comes of it goes nowhere. `false`: it has to be
/// waited for, because another one holds the block that would be written to again. `state` is as the plan left it, but for steps
/// planned before it that were resolved since.
pub fn put_off(state: &mut SchedState, plan: &mut StepPlan, id: RequestId) -> bool {
    let Some(chunk) = plan.chunks.iter_mut().find(|chunk| chunk.id == id && chunk.samples) else { return false };
    let SchedState { running, pool, .. } = state;
    // One that has ended meanwhile draws for nobody already.
    let Some(sequence) = running.iter_mut().find(|sequence| sequence.id == id) else { return false };
    if !reopen_last_block(sequence, pool) {
        return false;
    }
    sequence.computed -= 1;
    sequence.in_flight -= 1;
    // What the executor counts in its slot now includes a token that nobody has.
    sequence.has_sampled_in_slot = false;
    sequence.awaits_mask = true;
    chunk.is_put_off = true;
    true
}

/// The block of the newest computed token is written to again, so nobody may find it.
fn reopen_last_block(sequence: &mut Sequence, pool: &mut BlockPool) -> bool {
    let idx = (sequence.computed - 1) / BLOCK_TOKENS;
    let block = sequence.table.blocks()[idx];
    if pool.refs(block) > 1 {
        return false;
    }
    if idx < sequence.n_named {
        // Of two blocks with the same content, the other one may have the name.
        if pool.find(sequence.names[idx]) == Some(block) {
            pool.forget(sequence.names[idx]);
        }
        sequence.n_named = idx;
    }
    true
}

impl SchedState {
    /// Those whose masks have come may be planned again.
    pub fn note_masks(&mut self, has_mask: impl Fn(RequestId) -> bool) {
        for sequence in self.running.iter_mut().filter(|sequence| sequence.awaits_mask) {
            sequence.awaits_mask = !has_mask(sequence.id);
        }
    }

    /// Whether somebody who runs waits for a mask.
    pub fn awaits_masks(&self) -> bool {
        self.running.iter().any(|sequence| sequence.awaits_mask)
    }
}
