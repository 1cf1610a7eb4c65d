//! What the scheduler knows: who waits, who runs, which blocks are held. The engine thread is its only owner.

use std::{collections::VecDeque, sync::Arc};

use super::{ItlTarget, Lengths, Slots};
use stoker_fit::host::HostStep;

use crate::{
    kv::BlockPool,
    request::{FinishReason, Request, RequestId, TokenId},
    sequence::Sequence,
};

/// Bounds of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedLimits {
    /// Sequences in the running queue at most.
    pub max_num_seqs: usize,
    /// Tokens computed in one step at most; at least `max_num_seqs`, so that every decode fits.
    pub max_batched_tokens: usize,
    /// Tokens of one sequence at most, prompt and completion.
    pub max_model_len: usize,
    /// Tokens that end a completion.
    pub eos: Vec<TokenId>,
    /// Keep the blocks of prompts and completions for other sequences to find.
    pub prefix_caching: bool,
    /// Generated tokens are always computed one at a time and their blocks are not found by others: for an executor whose
    /// kernels for prompts and for decoding add up in different orders, and that promises the same bits nevertheless.
    pub replays_decodes: bool,
    /// Its executor copies blocks: see [`Step::copies`](super::Step::copies).
    pub copies_blocks: bool,
    /// Tokens of prompts in a step that also decodes, at most. Changes from step to step, see [`Pace`](super::Pace).
    pub prefill_share: usize,
    /// Rows that the executor's products compute together: steps that do not take all prompts have a multiple of it, if they have as
    /// many. 1 where it makes no difference.
    pub tile_rows: usize,
    /// What a step beside decodes may take, if it may not take as long as it likes: see [`Pace`](super::Pace).
    pub itl_target: Option<ItlTarget>,
    /// Let a sequence in only if all that run can be expected to end without preemption; a completion is taken for so long
    /// before any has ended. `None`: let in whoever fits now.
    pub expected_completion: Option<usize>,
}

impl SchedLimits {
    /// What the memory plan of a CPU takes of them.
    pub fn host_step(&self) -> HostStep {
        let Self { max_batched_tokens, max_num_seqs, max_model_len, .. } = *self;
        HostStep { max_batched_tokens, max_num_seqs, max_model_len }
    }
}

/// The scheduler's whole state.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedState {
    /// Requests without blocks, in the order they will start: by priority, deadline, then as they were submitted.
    pub waiting: VecDeque<Sequence>,
    /// Sequences that hold blocks, in the same order when a step is planned; the last one is preempted first.
    pub running: Vec<Sequence>,
    /// The KV blocks.
    pub pool: BlockPool,
    /// Numbers of running sequences.
    pub slots: Slots,
    /// How long completions were.
    pub lengths: Lengths,
    /// Who was preempted last.
    pub last_victim: Option<RequestId>,
}

impl SchedState {
    /// An idle scheduler over `n_blocks` KV blocks.
    pub fn new(n_blocks: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            running: Vec::new(),
            pool: BlockPool::new(n_blocks),
            slots: Slots::default(),
            lengths: Lengths::default(),
            last_victim: None,
        }
    }

    /// Puts a request into the line, behind all that are as urgent.
    pub fn submit(&mut self, id: RequestId, request: Arc<Request>) {
        self.enter_line(Sequence::new(id, request));
    }

    /// Marks one sequence to leave at the next step. An unknown id has already left: nothing happens.
    pub fn end(&mut self, id: RequestId, reason: FinishReason) {
        if let Some(sequence) = self.sequences_mut().find(|sequence| sequence.id == id) {
            sequence.leaving.get_or_insert(reason);
        }
    }

    /// Marks every sequence to leave at the next step.
    pub fn end_all(&mut self, reason: &FinishReason) {
        for sequence in self.sequences_mut() {
            sequence.leaving.get_or_insert_with(|| reason.clone());
        }
    }

    /// Nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Tokens of waiting sequences whose KV must be computed before they can go on.
    pub fn waiting_prefill_tokens(&self) -> usize {
        self.waiting.iter().map(Sequence::remaining).sum()
    }

    pub(super) fn sequences_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.running.iter_mut().chain(&mut self.waiting)
    }
}
