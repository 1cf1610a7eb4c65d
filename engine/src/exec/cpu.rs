//! The executor on the CPU: forward pass over `CpuOps`, then sampling on the same threads.

use super::{BatchInputs, ExecError, Executor};
use crate::{
    kv::{BLOCK_TOKENS, BlockId, KvDtype, KvLayout, blocks_for},
    model::{Decoder, ModelConfig},
    ops::{CpuCache, CpuOps, Ops},
    request::{Request, RequestId, SamplingParams, StopParams, TokenId},
    sample::choose,
    sched::{Chunk, SampleSpec, SampledToken, SchedLimits, StepOutput, StepPlan},
};

/// A model, its KV cache and the threads that compute it.
#[derive(Debug)]
pub struct CpuExecutor {
    model: Decoder<CpuOps>,
    ops: CpuOps,
    cache: CpuCache,
    vocab_size: usize,
}

impl CpuExecutor {
    /// An executor over an empty cache of that layout.
    pub fn new(ops: CpuOps, model: Decoder<CpuOps>, config: &ModelConfig, layout: KvLayout) -> Self {
        let cache = ops.kv_cache(layout);
        Self { model, ops, cache, vocab_size: config.vocab_size }
    }

    /// One real step over the first KV block, so that the first request finds code and weights paged in. What it
    /// leaves in the block is overwritten by whoever takes it.
    pub fn warm_up(&mut self) {
        let chunk = probe_chunk(&[0], 0, 1);
        self.logits(&BatchInputs::new(&StepPlan { chunks: vec![chunk], ..StepPlan::default() }));
    }

    /// Logits after each of `tokens`, one row a token, computed `chunk_len` tokens at a time on the path requests
    /// take. Uses the first KV blocks: only for an executor that serves nobody.
    pub fn teacher_forced_logits(&mut self, tokens: &[TokenId], chunk_len: usize) -> Vec<Vec<f32>> {
        let n_blocks = blocks_for(tokens.len());
        let mut rows = Vec::with_capacity(tokens.len());
        for (idx, chunk) in tokens.chunks(chunk_len).enumerate() {
            let chunk = probe_chunk(chunk, idx * chunk_len, n_blocks);
            let mut inputs = BatchInputs::new(&StepPlan { chunks: vec![chunk], ..StepPlan::default() });
            inputs.sampled_rows = (0..inputs.token_ids.len() as u32).collect();
            rows.extend(self.logits(&inputs).chunks(self.vocab_size).map(<[f32]>::to_vec));
        }
        rows
    }

    fn logits(&mut self, inputs: &BatchInputs) -> Vec<f32> {
        let Self { model, ops, cache, .. } = self;
        let logits = model.forward(ops, cache, inputs);
        ops.read(&logits)
    }
}

impl Executor for CpuExecutor {
    fn execute(&mut self, plan: &StepPlan) -> Result<StepOutput, ExecError> {
        let logits = self.logits(&BatchInputs::new(plan));
        let specs: Vec<(&Chunk, &SampleSpec)> =
            plan.chunks.iter().filter_map(|chunk| Some((chunk, chunk.sample.as_ref()?))).collect();
        let mut sampled = vec![None; specs.len()];
        self.ops.pool().for_each(&mut sampled, |row, sampled| {
            let (chunk, spec) = specs[row];
            let choice = choose(&logits[row * self.vocab_size..][..self.vocab_size], spec);
            *sampled = Some(SampledToken { id: chunk.id, token: choice.token, logprobs: choice.logprobs });
        });
        Ok(StepOutput { sampled: sampled.into_iter().flatten().collect() })
    }
}

/// The cache of a model.
pub fn kv_layout(config: &ModelConfig, dtype: KvDtype, n_blocks: usize) -> KvLayout {
    KvLayout {
        n_layers: config.num_hidden_layers,
        n_kv_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        n_blocks,
        dtype,
    }
}

/// Intermediate results of the largest step, as the forward pass holds them at its widest point: the residual stream,
/// a normed copy and the feed-forward's three matrices, or attention's four; logits with their copies; the rotary
/// angles. Saturates, so that absurd sizes are refused as too large.
pub fn workspace_bytes(config: &ModelConfig, sched: &SchedLimits) -> u64 {
    let [hidden, inner, vocab] = [config.hidden_size, config.intermediate_size, config.vocab_size].map(|n| n as u64);
    let heads = (config.num_attention_heads + config.num_key_value_heads) as u64;
    let head_dim = config.head_dim as u64;
    let attention = heads.saturating_mul(2 * head_dim).saturating_add(hidden);
    let widest = attention.max(2 * inner + hidden).saturating_add(2 * hidden);
    let rows = widest.saturating_mul(sched.max_batched_tokens as u64);
    let logits = (3 * vocab).saturating_mul(sched.max_num_seqs as u64);
    let angles = head_dim.saturating_mul(sched.max_model_len as u64);
    rows.saturating_add(logits).saturating_add(angles).saturating_mul(size_of::<f32>() as u64)
}

/// Tokens in the KV blocks `0..n_blocks`, greedy, of nobody.
fn probe_chunk(tokens: &[TokenId], start: usize, n_blocks: usize) -> Chunk {
    assert!(start + tokens.len() <= n_blocks * BLOCK_TOKENS, "the tokens fit the blocks");
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let request = Request { prompt: tokens.to_vec(), sampling, stop: StopParams::default(), logprobs: None };
    let position = start + tokens.len();
    let sample = SampleSpec { request: request.into(), position, banned: Vec::new(), history: Vec::new() };
    Chunk {
        id: RequestId(u64::MAX),
        tokens: tokens.to_vec(),
        start,
        blocks: (0..n_blocks as u32).map(BlockId).collect(),
        sample: Some(sample),
        is_prefill: true,
    }
}
