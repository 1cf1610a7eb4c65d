//! Which rows of a planned step are read beside what it samples: those that say how likely tokens of prompts were, and those that
//! embeddings are made of. Each of them is read once, also when the prompt is computed again after a preemption.

use std::ops::Range;

use super::{SchedState, StepPlan, plan::Chunk};
use crate::{
    exec::{RowsSpec, RowsWanted},
    request::RequestId,
    sequence::Sequence,
};

/// The rows of a step that are wanted, and whose they are. Nothing as a rule. `state` is as `schedule` left it.
pub fn rows_wanted(state: &mut SchedState, plan: &StepPlan) -> Vec<(RequestId, RowsSpec)> {
    let wanted = |(chunk_idx, chunk): (usize, &Chunk)| {
        let sequence = &mut state.running[chunk.running_idx];
        let spec = wanted_of(sequence, chunk_idx, chunk.start..chunk.start + chunk.n_tokens)?;
        Some((sequence.id, spec))
    };
    plan.chunks.iter().enumerate().filter_map(wanted).collect()
}

fn wanted_of(sequence: &mut Sequence, chunk_idx: usize, rows: Range<usize>) -> Option<RowsSpec> {
    let unread = sequence.rows_unread();
    let read = unread.start.max(rows.start)..unread.end.min(rows.end);
    if read.is_empty() {
        return None;
    }
    sequence.n_read = read.end;
    let first_row = read.start - rows.start;
    let wanted = match sequence.request.prompt_logprobs {
        // The row of a token tells of the one behind it.
        Some(k) => RowsWanted::Scores { tokens: sequence.request.prompt[read.start + 1..=read.end].to_vec(), k },
        None => RowsWanted::Outputs { n_rows: read.len() },
    };
    Some(RowsSpec { chunk_idx, first_row, wanted })
}
