//! Which rows of a planned step say how likely tokens of prompts were. A request that wants them has its prompt computed from
//! its first token, and each of them is given once, also when the prompt is computed again after a preemption.

use super::{SchedState, StepPlan, plan::Chunk};
use crate::{
    exec::ScoreSpec,
    request::{RequestId, TokenId},
    sequence::Sequence,
};

/// The rows of a step that are wanted, and whose they are. Nothing as a rule. `state` is as `schedule` left it.
pub fn scores_wanted(state: &mut SchedState, plan: &StepPlan) -> Vec<(RequestId, ScoreSpec)> {
    let wanted = |(chunk_idx, chunk): (usize, &Chunk)| {
        let sequence = &mut state.running[chunk.running_idx];
        let spec = wanted_of(sequence, chunk_idx, chunk.start..chunk.start + chunk.n_tokens)?;
        Some((sequence.id, spec))
    };
    plan.chunks.iter().enumerate().filter_map(wanted).collect()
}

/// The row of a token tells of the one behind it.
fn wanted_of(sequence: &mut Sequence, chunk_idx: usize, rows: std::ops::Range<usize>) -> Option<ScoreSpec> {
    let k = sequence.request.prompt_logprobs.filter(|_| sequence.awaits_scores())?;
    let scored = sequence.n_scored.max(rows.start + 1)..sequence.prompt_len().min(rows.end + 1);
    if scored.is_empty() {
        return None;
    }
    let (first_row, end) = (scored.start - 1 - rows.start, scored.end);
    let tokens: Vec<TokenId> = sequence.request.prompt[scored].to_vec();
    sequence.n_scored = end;
    Some(ScoreSpec { chunk_idx, first_row, tokens, k })
}
