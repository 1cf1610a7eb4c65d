//! `resolve`: takes a step's results in. Appends tokens, ends sequences, and is the only place where the blocks of an
//! ended sequence return to the pool.

use super::{Chunk, SchedLimits, SchedState, StepPlan};
use crate::{
    request::{FinishReason, RequestId, TokenId},
    sequence::Sequence,
};

/// What an executor returns: one sampled token for each chunk that asked, in the plan's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The tokens.
    pub sampled: Vec<SampledToken>,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Whose.
    pub id: RequestId,
    /// The token.
    pub token: TokenId,
    /// Set when the request asked for log-probabilities.
    pub logprobs: Option<RawLogprobs>,
}

/// Log-probabilities at one position, without texts.
#[derive(Clone, Debug, PartialEq)]
pub struct RawLogprobs {
    /// Of the sampled token.
    pub chosen: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(TokenId, f32)>,
}

/// What a step changed, for the world outside the scheduler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepEffects {
    /// Sequences that were computed for the first time.
    pub started: Vec<RequestId>,
    /// Sequences that lost their blocks.
    pub preempted: Vec<RequestId>,
    /// New tokens, at most one a sequence.
    pub tokens: Vec<SampledToken>,
    /// Sequences that ended; their blocks are free again.
    pub ended: Vec<Ended>,
}

/// A sequence that ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Whose.
    pub id: RequestId,
    /// Why.
    pub reason: FinishReason,
    /// It left before its first step.
    pub never_started: bool,
}

/// Applies `output` of `plan` to the state.
pub fn resolve(state: &mut SchedState, plan: StepPlan, output: StepOutput, limits: &SchedLimits) -> StepEffects {
    let StepPlan { chunks, leaving, preempted, started } = plan;
    let mut effects = StepEffects { started, preempted, ..StepEffects::default() };
    let mut sampled = output.sampled.into_iter();
    for chunk in &chunks {
        let token = chunk.sample.as_ref().map(|_| sampled.next().expect("one token for each chunk that samples"));
        advance(state, chunk, token, limits, &mut effects);
    }
    assert!(sampled.next().is_none(), "no token beyond the chunks that sample");
    for id in leaving {
        effects.ended.extend(remove(state, id));
    }
    state.debug_check(limits);
    effects
}

fn advance(
    state: &mut SchedState,
    chunk: &Chunk,
    token: Option<SampledToken>,
    limits: &SchedLimits,
    effects: &mut StepEffects,
) {
    let sequence =
        state.running.iter_mut().find(|s| s.id == chunk.id).expect("a planned sequence stays running until resolve");
    sequence.computed += chunk.tokens.len();
    let Some(token) = token else { return };
    assert_eq!(token.id, chunk.id, "tokens come in the plan's order");
    sequence.tokens.push(token.token);
    sequence.leaving = finish_reason(sequence, token.token, limits);
    let ended = sequence.leaving.is_some();
    effects.tokens.push(token);
    if ended {
        effects.ended.extend(remove(state, chunk.id));
    }
}

/// Whether the sequence ends with the token it just got. Stop strings are not known here: they need text.
fn finish_reason(sequence: &Sequence, token: TokenId, limits: &SchedLimits) -> Option<FinishReason> {
    let stop = &sequence.request.stop;
    let generated = sequence.n_generated();
    if !stop.ignore_eos && generated >= stop.min_tokens as usize && limits.eos.contains(&token) {
        return Some(FinishReason::Stop);
    }
    let is_full = generated >= stop.max_tokens as usize || sequence.tokens.len() >= limits.max_model_len;
    is_full.then_some(FinishReason::Length)
}

fn remove(state: &mut SchedState, id: RequestId) -> Option<Ended> {
    let mut sequence = take(state, id)?;
    sequence.table.release(&mut state.pool);
    let reason = sequence.leaving.expect("only a leaving sequence is removed");
    Some(Ended { id, reason, never_started: !sequence.started })
}

fn take(state: &mut SchedState, id: RequestId) -> Option<Sequence> {
    if let Some(idx) = state.running.iter().position(|s| s.id == id) {
        return Some(state.running.remove(idx));
    }
    let idx = state.waiting.iter().position(|s| s.id == id)?;
    state.waiting.remove(idx)
}
