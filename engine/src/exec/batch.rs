//! A step plan as flat arrays, the form kernels read. Pure.

use crate::{kv::BLOCK_TOKENS, sched::StepPlan};

/// A step's inputs: one row a token, sequences one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchInputs {
    /// Per row: the token.
    pub token_ids: Vec<u32>,
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

impl BatchInputs {
    /// Flattens a plan.
    pub fn new(plan: &StepPlan) -> Self {
        let mut inputs = Self { cu_seqlens: vec![0], ..Self::default() };
        for chunk in &plan.chunks {
            let positions = chunk.start..chunk.start + chunk.tokens.len();
            let slot = |position: usize| {
                chunk.blocks[position / BLOCK_TOKENS].0 * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32
            };
            inputs.slot_mapping.extend(positions.clone().map(slot));
            inputs.positions.extend(positions.map(|position| position as u32));
            inputs.token_ids.extend(&chunk.tokens);
            inputs.sequence_of_row.resize(inputs.token_ids.len(), inputs.block_tables.len() as u32);
            inputs.block_tables.push(chunk.blocks.iter().map(|block| block.0).collect());
            inputs.cu_seqlens.push(inputs.token_ids.len() as u32);
            if chunk.sample.is_some() {
                inputs.sampled_rows.push(inputs.token_ids.len() as u32 - 1);
            }
        }
        inputs
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        kv::BlockId,
        request::{Request, RequestId, SamplingParams, StopParams},
        sched::{Chunk, SampleSpec},
    };

    fn chunk(id: u64, start: usize, tokens: Vec<u32>, blocks: &[u32], samples: bool) -> Chunk {
        let (sampling, stop) = (SamplingParams::default(), StopParams::default());
        let request = Arc::new(Request { prompt: vec![1], sampling, stop, logprobs: None });
        let sample = SampleSpec { request, position: 1, banned: vec![], history: vec![] };
        let blocks = blocks.iter().copied().map(BlockId).collect();
        Chunk { id: RequestId(id), tokens, start, blocks, sample: samples.then_some(sample), is_prefill: true }
    }

    #[test]
    fn rows_follow_the_plan_and_slots_follow_the_block_tables() {
        let chunks = vec![chunk(1, 15, vec![10, 11], &[7, 3], false), chunk(2, 0, vec![20], &[5], true)];
        let inputs = BatchInputs::new(&StepPlan { chunks, ..StepPlan::default() });
        assert_eq!(inputs.token_ids, [10, 11, 20]);
        assert_eq!(inputs.positions, [15, 16, 0]);
        assert_eq!(inputs.slot_mapping, [7 * 16 + 15, 3 * 16, 5 * 16]);
        assert_eq!(inputs.sequence_of_row, [0, 0, 1]);
        assert_eq!(inputs.cu_seqlens, [0, 2, 3]);
        assert_eq!(inputs.block_tables, [vec![7, 3], vec![5]]);
        assert_eq!(inputs.sampled_rows, [2]);
    }
}
