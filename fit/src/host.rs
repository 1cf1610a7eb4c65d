//! Memory that a model takes on the CPU.

use crate::{
    format::WeightFormat,
    model::{ModelConfig, ModelSpec, spec::Rank},
};

/// Rows of a prompt whose logits are held at once.
pub const SCORED_ROWS: usize = 32;

/// What a process holds whatever its model: code and libraries, threads, connections.
const PROCESS_BYTES: u64 = 20 << 20;

/// Sizes of the largest step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct HostStep {
    /// Tokens computed in one step at most.
    pub max_batched_tokens: usize,
    /// Sequences that run together at most.
    pub max_num_seqs: usize,
    /// Tokens of one sequence at most.
    pub max_model_len: usize,
}

/// Intermediate results of the largest step, as the forward pass holds them at its widest point: the residual stream,
/// a normed copy and the feed-forward's three matrices, or attention's four, and what enters the widest product in the order of its
/// kernel; logits, with copies of those that are drawn from; the rotary angles; the process itself. Saturates, so that absurd
/// sizes are refused as too large.
pub fn workspace_bytes(config: &ModelConfig, step: HostStep) -> u64 {
    let [hidden, inner, vocab] = [config.hidden_size, config.intermediate_size, config.vocab_size].map(|n| n as u64);
    let heads = (config.num_attention_heads + config.num_key_value_heads) as u64;
    let head_dim = config.head_dim as u64;
    let attention = heads.saturating_mul(2 * head_dim).saturating_add(hidden);
    let widest = attention.max(2 * inner + hidden).saturating_add(2 * hidden);
    let packed = inner.max(hidden);
    let rows = widest.saturating_add(packed).saturating_mul(step.max_batched_tokens as u64);
    let logit_rows = step.max_num_seqs.max(SCORED_ROWS).saturating_add(step.max_num_seqs.saturating_mul(2));
    let logits = vocab.saturating_mul(logit_rows as u64);
    let angles = head_dim.saturating_mul(step.max_model_len as u64);
    let numbers = rows.saturating_add(logits).saturating_add(angles);
    numbers.saturating_mul(size_of::<f32>() as u64).saturating_add(PROCESS_BYTES)
}

/// Keys and values of one token on all ranks, of numbers of so many bytes. Saturates, too.
pub fn kv_bytes_per_token(spec: &ModelSpec, n_ranks: usize, number_bytes: usize) -> u64 {
    let heads = spec.layers.first().map(|layer| layer.attention.attention.heads);
    let of_rank = |rank| {
        let heads = heads.map(|heads| heads.of_rank(rank));
        let sizes = heads.map_or([0, 0], |heads| [heads.n_kv_heads, heads.head_dim]);
        [spec.layers.len(), number_bytes]
            .into_iter()
            .chain(sizes)
            .fold(2, |bytes: u64, n| bytes.saturating_mul(n as u64))
    };
    Rank::all(n_ranks).map(of_rank).fold(0, u64::saturating_add)
}

/// Bytes of a weight as it is kept: blocks of four bits as they are, others as blocks of eight, where a matrix is in any; else numbers.
pub fn weight_bytes(format: WeightFormat, shape: &[usize]) -> u64 {
    let kept = match (format, shape.len()) {
        (plain, _) if plain.is_plain() => plain,
        (WeightFormat::Q4_0, 2) => WeightFormat::Q4_0,
        (_, 2) => WeightFormat::Q8_0,
        (_, _) => WeightFormat::F32,
    };
    kept.bytes_of(shape.iter().product()) as u64
}
