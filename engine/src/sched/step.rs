//! A step as an executor sees it: the plan's chunks with everything needed to compute them, borrowed from the
//! scheduler's state. It lives only for the launch; what an executor needs later it copies.

use std::sync::Arc;

use super::{SchedLimits, SchedState, StepPlan, plan::Chunk};
use crate::{
    kv::{BlockCopy, BlockId},
    request::{Request, RequestId, TokenId},
    sequence::Sequence,
};

/// One step to compute.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step<'a> {
    /// What to compute, one entry a sequence.
    pub chunks: Vec<StepChunk<'a>>,
    /// Blocks to copy before that, which no other of these copies writes to. Nothing where the executor
    /// [copies none](crate::exec::Executor::copies_blocks).
    pub copies: &'a [BlockCopy],
}

/// Consecutive tokens of one sequence to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepChunk<'a> {
    /// Whose.
    pub id: RequestId,
    /// The tokens.
    pub input: ChunkInput<'a>,
    /// Position of the first one.
    pub start: usize,
    /// The sequence's KV blocks, enough for the chunk's end.
    pub blocks: &'a [BlockId],
    /// Set when the chunk reaches the sequence's end: sample the next token.
    pub sample: Option<SampleSpec<'a>>,
    /// Part of a prompt (or of a recomputation) rather than a decode.
    pub is_prefill: bool,
}

/// The tokens of a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ChunkInput<'a> {
    /// These.
    Known(&'a [TokenId]),
    /// The one token that the step launched just before this one samples.
    Fed {
        /// Which of that step's sampling chunks, counted from 0 in its order.
        entry: usize,
    },
}

/// How to sample the token that follows a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleSpec<'a> {
    /// What the client asked for.
    pub request: &'a Arc<Request>,
    /// Position the sampled token will have; with the seed it fixes all randomness (D9).
    pub position: usize,
    /// Tokens that must not be sampled: the end tokens while `min_tokens` is not reached.
    pub banned: &'a [TokenId],
    /// Prompt and generated tokens, as far as they are known: all but those that steps in flight sample.
    pub history: &'a [TokenId],
    /// The sequence's number among the running ones; below the most that may run, and its own until it leaves or is
    /// preempted.
    pub slot: usize,
    /// Its first draw with this slot: what an executor keeps there is another's. Then the history is complete.
    pub enters_slot: bool,
}

impl SampleSpec<'_> {
    /// Whether the draw waits for a mask of allowed tokens, see [`Executor::constrain`](crate::exec::Executor::constrain).
    pub fn is_constrained(&self) -> bool {
        self.request.sampling.constraint.is_some()
    }
}

impl ChunkInput<'_> {
    /// Tokens.
    pub fn n_tokens(&self) -> usize {
        match self {
            Self::Known(tokens) => tokens.len(),
            Self::Fed { .. } => 1,
        }
    }
}

impl<'a> Step<'a> {
    /// One that copies nothing.
    pub fn of(chunks: Vec<StepChunk<'a>>) -> Self {
        Self { chunks, copies: &[] }
    }

    /// Tokens this step computes.
    pub fn n_tokens(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.input.n_tokens()).sum()
    }
}

impl StepPlan {
    /// What an executor computes for this plan. `state` is as `schedule` left it.
    pub fn step<'a>(&'a self, state: &'a SchedState, limits: &'a SchedLimits) -> Step<'a> {
        let view = |chunk: &Chunk| {
            let sequence = &state.running[chunk.running_idx];
            assert_eq!(sequence.id, chunk.id, "the state is as it was planned on");
            view(chunk, sequence, limits)
        };
        Step { chunks: self.chunks.iter().map(view).collect(), copies: &self.copies }
    }
}

fn view<'a>(chunk: &Chunk, sequence: &'a Sequence, limits: &'a SchedLimits) -> StepChunk<'a> {
    let end = chunk.start + chunk.n_tokens;
    let input = match chunk.fed_entry {
        Some(entry) => ChunkInput::Fed { entry },
        None => ChunkInput::Known(&sequence.tokens[chunk.start..end]),
    };
    StepChunk {
        id: chunk.id,
        input,
        start: chunk.start,
        blocks: sequence.table.blocks(),
        sample: chunk.samples.then(|| sample_spec(chunk, sequence, limits)),
        is_prefill: chunk.is_prefill,
    }
}

fn sample_spec<'a>(chunk: &Chunk, sequence: &'a Sequence, limits: &'a SchedLimits) -> SampleSpec<'a> {
    let position = chunk.start + chunk.n_tokens;
    SampleSpec {
        request: &sequence.request,
        position,
        banned: if sequence.is_below_minimum(position) { &limits.eos } else { &[] },
        history: &sequence.tokens,
        slot: sequence.slot.expect("a sequence that is planned runs"),
        enters_slot: chunk.enters_slot,
    }
}
