//! `resolve`: takes a step's results in. Appends tokens, ends sequences, and is the only place where the blocks of an
//! ended sequence return to the pool.
//!
//! A sequence may end while a later step that computes it is in flight. It leaves at once: steps take effect in the
//! order of their launch, so what the step in flight still writes into its blocks is overwritten by whoever gets them
//! next. The token that step samples for it is thrown away when it comes.

use std::{collections::VecDeque, time::Duration};

use super::{SchedLimits, SchedState, Started, StepPlan, prefix};
use crate::{
    exec::RowsRead,
    kv::BlockPool,
    request::{FinishReason, RequestId, TokenId},
    sequence::Sequence,
};

/// What an executor returns: one entry for each chunk that samples, in the plan's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// The entries.
    pub sampled: Vec<Sampled>,
}

/// The outcome of sampling one chunk's next token.
#[derive(Clone, Debug, PartialEq)]
pub enum Sampled {
    /// A token.
    Token {
        /// The token.
        token: TokenId,
        /// Set when the request asked for log-probabilities.
        logprobs: Option<RawLogprobs>,
    },
    /// The logits held a NaN: there is nothing to choose from.
    NotANumber,
}

impl Sampled {
    /// The token, if there is one.
    pub fn token(&self) -> Option<TokenId> {
        match self {
            Self::Token { token, .. } => Some(*token),
            Self::NotANumber => None,
        }
    }
}

/// One new token of a sequence: a draw, or one before it that had to come.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Whose.
    pub id: RequestId,
    /// The token.
    pub token: TokenId,
    /// Set when the request asked for log-probabilities.
    pub logprobs: Option<RawLogprobs>,
    /// Of its sequence, until and with the step that drew it.
    pub device_time: Duration,
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
    pub started: Vec<Started>,
    /// Sequences that lost their blocks.
    pub preempted: Vec<RequestId>,
    /// New tokens, in the order of each sequence: what it drew, behind what had to come before.
    pub tokens: Vec<SampledToken>,
    /// What rows of prompts hold, in the order of their tokens.
    pub read: Vec<(RequestId, RowsRead)>,
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

/// Why a request ends whose logits held a NaN.
const NOT_A_NUMBER: &str = "the model's output is not a number: its weights or the device are damaged";

/// Applies `output` of `plan` to the state. Plans are resolved in the order in which they were made.
pub fn resolve(state: &mut SchedState, plan: StepPlan, output: StepOutput, limits: &SchedLimits) -> StepEffects {
    let StepPlan { chunks, copies: _, preempted, started } = plan;
    let mut effects = StepEffects { started, preempted, ..StepEffects::default() };
    let mut sampled = output.sampled.into_iter();
    let mut finder = Finder::default();
    for chunk in chunks.iter().filter(|chunk| chunk.samples) {
        let sampled = sampled.next().expect("one entry for each chunk that samples");
        if !chunk.is_put_off
            && let Some((sequence, pool)) = finder.find(state, chunk.id)
        {
            take_in(sequence, sampled, (pool, limits), &mut effects.tokens);
        }
    }
    assert!(sampled.next().is_none(), "no entry beyond the chunks that sample");
    remove_leaving(state, &mut effects.ended);
    state.debug_check(limits);
    effects
}

/// Finds sequences by id. The plan's order is nearly the queue's, so the search begins where the last one ended: a
/// whole step costs about one pass.
#[derive(Default)]
pub(super) struct Finder {
    next_idx: usize,
}

impl Finder {
    /// `None`: the sequence has ended.
    pub(super) fn find<'a>(
        &mut self,
        state: &'a mut SchedState,
        id: RequestId,
    ) -> Option<(&'a mut Sequence, &'a mut BlockPool)> {
        let SchedState { running, waiting, pool, .. } = state;
        let (before, after) = running.split_at(self.next_idx.min(running.len()));
        let found = after.iter().position(|s| s.id == id).map(|idx| idx + before.len());
        if let Some(idx) = found.or_else(|| before.iter().position(|s| s.id == id)) {
            self.next_idx = idx + 1;
            return Some((&mut running[idx], pool));
        }
        Some((waiting.iter_mut().find(|s| s.id == id)?, pool))
    }
}

/// The token goes nowhere when its sequence was told to leave meanwhile.
fn take_in(
    sequence: &mut Sequence,
    sampled: Sampled,
    (pool, limits): (&mut BlockPool, &SchedLimits),
    told: &mut Vec<SampledToken>,
) {
    sequence.in_flight -= 1;
    match sampled {
        Sampled::NotANumber => {
            prefix::forget_blocks(sequence, pool);
            sequence.leaving.get_or_insert_with(|| FinishReason::Error(NOT_A_NUMBER.into()));
        }
        // What had to come has come, also where nothing can come behind it.
        Sampled::Token { .. }
            if matches!(sequence.leaving, Some(FinishReason::Unfollowed(_) | FinishReason::Error(_))) =>
        {
            tell_untold(sequence, told)
        }
        Sampled::Token { .. } if sequence.leaving.is_some() => {}
        Sampled::Token { token, logprobs } => {
            tell_untold(sequence, told);
            sequence.tokens.push(token);
            if limits.prefix_caching {
                prefix::name_full_blocks(sequence, pool, limits);
            }
            sequence.leaving = finish_reason(sequence, token, limits);
            told.push(SampledToken { id: sequence.id, token, logprobs, device_time: sequence.device_time });
        }
    }
}

/// What had to come is told with the draw behind it: then its prompt has been read, and it has been computed itself.
fn tell_untold(sequence: &mut Sequence, told: &mut Vec<SampledToken>) {
    let n_untold = std::mem::take(&mut sequence.n_untold);
    let (id, device_time) = (sequence.id, sequence.device_time);
    let untold = &sequence.tokens[sequence.tokens.len() - n_untold..];
    told.extend(untold.iter().map(|token| SampledToken { id, token: *token, logprobs: None, device_time }));
}

/// Whether the sequence ends with the token it just got. Stop strings are not known here: they need text.
fn finish_reason(sequence: &Sequence, token: TokenId, limits: &SchedLimits) -> Option<FinishReason> {
    let stop = &sequence.request.stop;
    let generated = sequence.tokens.len() - sequence.prompt_len();
    let is_end = (!stop.ignore_eos && limits.eos.contains(&token)) || stop.stop_token_ids.contains(&token);
    if is_end && generated >= stop.min_tokens as usize {
        return Some(FinishReason::Stop);
    }
    let is_full = generated >= stop.max_tokens as usize || sequence.tokens.len() >= limits.max_model_len;
    is_full.then_some(FinishReason::Length)
}

/// One pass over each queue, however many leave.
fn remove_leaving(state: &mut SchedState, ended: &mut Vec<Ended>) {
    let SchedState { running, waiting, pool, slots, lengths, .. } = state;
    let mut end = |mut sequence: Sequence| {
        // Who left early tells nothing of how long completions are.
        if matches!(sequence.leaving, Some(FinishReason::Stop | FinishReason::Length)) {
            lengths.note(sequence.n_generated());
        }
        sequence.table.release(pool);
        sequence.leave_slot(slots);
        let reason = sequence.leaving.expect("only a leaving sequence is removed");
        ended.push(Ended { id: sequence.id, reason, never_started: !sequence.started });
    };
    running.extract_if(.., |s| s.leaving.is_some()).for_each(&mut end);
    if waiting.iter().any(|s| s.leaving.is_some()) {
        let (left, kept): (VecDeque<_>, VecDeque<_>) = waiting.drain(..).partition(|s| s.leaving.is_some());
        *waiting = kept;
        left.into_iter().for_each(end);
    }
}
