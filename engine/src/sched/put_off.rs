//! A draw that is put off: its mask did not come in time, and the others of its step do not wait. The sequence keeps what it
//! has; its newest token is computed again, in a step that is planned when the mask is there. Where others have found the block that the
//! token fills, the sequence takes a block of its own and computes or copies all of it again: whoever shares a beginning with others
//! keeps nobody waiting either.

use super::{SchedState, StepPlan};
use crate::{
    kv::{BLOCK_TOKENS, BlockPool},
    request::RequestId,
    sequence::Sequence,
};

/// Takes the draw of one sequence back out of the plan that was made last: what comes of it goes nowhere. `false`: it has to be
/// waited for, because others hold the block that would be written to again, and there is no other one. `state` is as the plan left it,
/// but for steps planned before it that were resolved since.
pub fn put_off(state: &mut SchedState, plan: &mut StepPlan, id: RequestId) -> bool {
    let Some(chunk) = plan.chunks.iter_mut().find(|chunk| chunk.id == id && chunk.samples) else { return false };
    let SchedState { running, pool, .. } = state;
    // One that has ended meanwhile draws for nobody already.
    let Some(sequence) = running.iter_mut().find(|sequence| sequence.id == id) else { return false };
    let Some(n_tokens) = reopen_last_block(sequence, pool) else { return false };
    sequence.computed = n_tokens;
    sequence.n_settled = sequence.n_settled.min(n_tokens);
    sequence.in_flight -= 1;
    // What the executor counts in its slot now includes a token that nobody has.
    sequence.has_sampled_in_slot = false;
    sequence.awaits_mask = true;
    chunk.is_put_off = true;
    true
}

/// Makes the block of the newest computed token one that nobody else has, and that nobody finds, for it is written to again. The tokens
/// that are computed then; `None`: there is no such block.
fn reopen_last_block(sequence: &mut Sequence, pool: &mut BlockPool) -> Option<usize> {
    let newest = sequence.computed - 1;
    let idx = newest / BLOCK_TOKENS;
    let block = sequence.table.blocks()[idx];
    let n_named = sequence.n_named.min(idx);
    if pool.refs(block) > 1 {
        sequence.table.renew(idx, pool).ok()?;
        sequence.n_named = n_named;
        return Some(idx * BLOCK_TOKENS);
    }
    // Of two blocks with the same content, the other one may have the name.
    if n_named < sequence.n_named && pool.find(sequence.names[idx]) == Some(block) {
        pool.forget(sequence.names[idx]);
    }
    sequence.n_named = n_named;
    Some(newest)
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
