//! A step as flat arrays, the form kernels read. Pure.

use crate::{
    kv::BLOCK_TOKENS,
    sched::{ChunkInput, Step, StepChunk},
};

/// A step's inputs: one row a token, sequences one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchInputs {
    /// Per row: the token; 0 for a fed one.
    pub token_ids: Vec<u32>,
    /// Rows whose token the step before samples.
    pub fed_rows: Vec<FedRow>,
    /// Per row: its position in the sequence.
    pub positions: Vec<u32>,
    /// Per row: where its keys and values go, `block x 16 + offset`.
    pub slot_mapping: Vec<u32>,
    /// Per row: the sequence it belongs to.
    pub sequence_of_row: Vec<u32>,
    /// Per sequence: its KV blocks.
    pub block_tables: Vec<Vec<u32>>,
    /// Rows before each sequence, and the number of rows: sequence `s` has the rows `cu_seqlens[s]..cu_seqlens[s+1]`.
    pub cu_seqlens: Vec<u32>,
    /// Rows whose next token is sampled, in the plan's order.
    pub sampled_rows: Vec<u32>,
}

/// A row whose token is not known to the host yet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FedRow {
    /// The row.
    pub row: u32,
    /// The entry of the step before, see [`ChunkInput::Fed`].
    pub entry: u32,
}

impl BatchInputs {
    /// Flattens a step.
    pub fn new(step: &Step<'_>) -> Self {
        let mut inputs = Self { cu_seqlens: vec![0], ..Self::default() };
        step.chunks.iter().for_each(|chunk| inputs.push(chunk));
        inputs
    }

    fn push(&mut self, chunk: &StepChunk<'_>) {
        let positions = chunk.start..chunk.start + chunk.input.n_tokens();
        let slot = |position: usize| {
            chunk.blocks[position / BLOCK_TOKENS].0 * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32
        };
        self.slot_mapping.extend(positions.clone().map(slot));
        self.positions.extend(positions.map(|position| position as u32));
        self.push_tokens(chunk.input);
        self.sequence_of_row.resize(self.token_ids.len(), self.block_tables.len() as u32);
        self.block_tables.push(chunk.blocks.iter().map(|block| block.0).collect());
        self.cu_seqlens.push(self.token_ids.len() as u32);
        if chunk.sample.is_some() {
            self.sampled_rows.push(self.token_ids.len() as u32 - 1);
        }
    }

    fn push_tokens(&mut self, input: ChunkInput<'_>) {
        match input {
            ChunkInput::Known(tokens) => self.token_ids.extend(tokens),
            ChunkInput::Fed { entry } => {
                self.fed_rows.push(FedRow { row: self.token_ids.len() as u32, entry: entry as u32 });
                self.token_ids.push(0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        kv::BlockId,
        request::{Request, RequestId, SamplingParams, StopParams},
        sched::SampleSpec,
    };

    fn request() -> Arc<Request> {
        let (sampling, stop) = (SamplingParams::default(), StopParams::default());
        Arc::new(Request { prompt: vec![1], sampling, stop, logprobs: None, ..Request::default() })
    }

    fn chunk<'a>(start: usize, input: ChunkInput<'a>, blocks: &'a [BlockId]) -> StepChunk<'a> {
        StepChunk { id: RequestId(1), input, start, blocks, sample: None, is_prefill: true }
    }

    #[test]
    fn rows_follow_the_plan_and_slots_follow_the_block_tables() {
        let request = request();
        let sample =
            SampleSpec { request: &request, position: 1, banned: &[], history: &[], slot: 0, enters_slot: false };
        let first = chunk(15, ChunkInput::Known(&[10, 11]), &[BlockId(7), BlockId(3)]);
        let second = StepChunk { sample: Some(sample), ..chunk(0, ChunkInput::Known(&[20]), &[BlockId(5)]) };
        let third = StepChunk { sample: Some(sample), ..chunk(2, ChunkInput::Fed { entry: 4 }, &[BlockId(6)]) };
        let inputs = BatchInputs::new(&Step::of(vec![first, second, third]));
        assert_eq!(inputs.token_ids, [10, 11, 20, 0]);
        assert_eq!(inputs.fed_rows, [FedRow { row: 3, entry: 4 }]);
        assert_eq!(inputs.positions, [15, 16, 0, 2]);
        assert_eq!(inputs.slot_mapping, [7 * 16 + 15, 3 * 16, 5 * 16, 6 * 16 + 2]);
        assert_eq!(inputs.sequence_of_row, [0, 0, 1, 2]);
        assert_eq!(inputs.cu_seqlens, [0, 2, 3, 4]);
        assert_eq!(inputs.block_tables, [vec![7, 3], vec![5], vec![6]]);
        assert_eq!(inputs.sampled_rows, [2, 3]);
    }
}
