//! Jump ahead: tokens that must come, because a grammar leaves nothing else, become a sequence's own without a draw each.
//! They are computed together, in one step, as a piece of a prompt is; the next token is drawn behind the last of them.
//!
//! ```text
//! one by one   t ► f1    f1 ► f2    f2 ► f3    f3 ► next       a draw under a mask of one token is no choice
//! jumping      t         f1 f2 f3 ► next                       or, before t is planned:   t f1 f2 f3 ► next
//! ```
//! What comes is the same: the draw behind them has the position and the history that it would have had. Nothing that ends a
//! sequence is jumped over, and a sequence never takes its last token so: completions end by draws.

use super::{Chunk, SchedLimits, SchedState, StepPlan};
use crate::{
    request::{RequestId, TokenId},
    sequence::Sequence,
};

/// Tokens that a draw in flight is given up for. One would be drawn in the very same step.
const MIN_OVER_DRAW: usize = 2;

/// Gives a sequence without draws in flight what must come next, as far as it takes it: how many tokens that is.
pub fn jump(state: &mut SchedState, id: RequestId, ahead: &[TokenId], limits: &SchedLimits) -> usize {
    let Some(sequence) = state.sequences_mut().find(|sequence| sequence.id == id) else { return 0 };
    // Blocks for a prompt were taken when it started: behind it is room when it is computed.
    let is_amid_prompt = sequence.slot.is_some() && !sequence.is_decoding();
    if sequence.in_flight > 0 || is_amid_prompt {
        return 0;
    }
    let n_tokens = n_taken(sequence, ahead, limits);
    sequence.take_ahead(&ahead[..n_tokens]);
    n_tokens
}

/// The same for a sequence that draws in the plan that was made last: the draw goes nowhere. `state` is as the plan left it, but
/// for steps planned before it that were resolved since.
pub fn jump_over_draw(
    state: &mut SchedState,
    plan: &mut StepPlan,
    id: RequestId,
    ahead: &[TokenId],
    limits: &SchedLimits,
) -> usize {
    let draws = |chunk: &&mut Chunk| chunk.id == id && chunk.samples && !chunk.is_put_off;
    let Some(chunk) = plan.chunks.iter_mut().find(draws) else { return 0 };
    let Some(sequence) = state.running.iter_mut().find(|sequence| sequence.id == id) else { return 0 };
    let n_tokens = n_taken(sequence, ahead, limits);
    if n_tokens < MIN_OVER_DRAW {
        return 0;
    }
    chunk.is_put_off = true;
    sequence.in_flight -= 1;
    sequence.take_ahead(&ahead[..n_tokens]);
    n_tokens
}

/// How many of these tokens a sequence takes. Where decodes are replayed one by one nothing is gained; and a log-probability is
/// the model's own word about a token, which it says when it draws it.
fn n_taken(sequence: &Sequence, ahead: &[TokenId], limits: &SchedLimits) -> usize {
    let stop = &sequence.request.stop;
    if limits.replays_decodes || sequence.request.logprobs.is_some() || sequence.leaving.is_some() {
        return 0;
    }
    let n_known = sequence.tokens.len();
    let room = (stop.max_tokens as usize + sequence.prompt_len()).min(limits.max_model_len).saturating_sub(n_known + 1);
    let goes_on = |token: &&TokenId| !limits.eos.contains(token) && !stop.stop_token_ids.contains(token);
    ahead.iter().take(room).take_while(goes_on).count()
}

impl Sequence {
    fn take_ahead(&mut self, tokens: &[TokenId]) {
        if tokens.is_empty() {
            return;
        }
        self.tokens.extend(tokens);
        self.n_untold += tokens.len();
        // An executor counts in its slot what it draws: neither these tokens, nor a draw that goes nowhere.
        self.has_sampled_in_slot = false;
        if self.slot.is_some() {
            self.decode_len = self.remaining();
        }
    }
}
