//! Launches of the operations that treat rows one by one: embedding, norms, activation, rotation.

use super::{Entry, Heads, LaunchConfig, Rows, config, count, not_empty, refused, vectors, warps_for};
use crate::error::KernelError;

/// Embedding gather of `rows`.
pub fn embed(rows: Rows) -> Result<LaunchConfig, KernelError> {
    let n_vecs = vectors("embed", rows)?;
    Ok(config(Entry::Embed, [count(rows.n_rows), 1, 1], warps_for(n_vecs, 256)))
}

/// Tokens of `n_rows`, one a thread.
pub fn feed_tokens(n_rows: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("feed_tokens", n_rows)?;
    Ok(config(Entry::FeedTokens, [count(n_rows.div_ceil(256)), 1, 1], 256))
}

/// RMSNorm of `rows`, after adding to the residual if `adds`.
pub fn rms_norm(rows: Rows, adds: Residual) -> Result<LaunchConfig, KernelError> {
    let n_vecs = vectors("rms_norm", rows)?;
    let entry = match (adds, n_vecs) {
        (Residual::None, 0..=1024) => Entry::RmsNormV1,
        (Residual::Added, 0..=1024) => Entry::AddRmsNormV1,
        (Residual::None, 1025..=4096) => Entry::RmsNormV4,
        (Residual::Added, 1025..=4096) => Entry::AddRmsNormV4,
        _ => return Err(refused("rms_norm", format!("width {} is more than 32768", rows.width))),
    };
    let per_thread = if n_vecs <= 1024 { 1 } else { 4 };
    Ok(config(entry, [count(rows.n_rows), 1, 1], warps_for(n_vecs.div_ceil(per_thread), 1024)))
}

/// Whether a norm adds its input to the residual first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Residual {
    /// The norm of the input alone.
    None,
    /// The input is added to the residual, and the norm is of the sum.
    Added,
}

/// Rows of gate that lie together in the fused weights of gate and up, and the rows of up of the same features behind them:
/// of 16 rows that a tensor core multiplies, a thread holds rows g and g + 8, so it has both and can activate what it has.
pub const GATE_UP_GROUP: usize = 8;

/// Gated activation to `rows`.
pub fn silu_mul(rows: Rows) -> Result<LaunchConfig, KernelError> {
    let n_vecs = vectors("silu_mul", rows)?;
    let threads = warps_for(n_vecs, 256);
    if rows.n_rows > 65535 {
        return Err(refused("silu_mul", format!("{} rows are more than 65535", rows.n_rows)));
    }
    Ok(config(Entry::SiluMul, [count(n_vecs.div_ceil(threads as usize)), count(rows.n_rows), 1], threads))
}

/// Rotary embedding and KV write of `n_rows` fused rows: 16 dimensions of a head a thread, blocks of 128 threads so that
/// few rows still spread over the chip.
pub fn rope_kv(n_rows: usize, heads: Heads) -> Result<LaunchConfig, KernelError> {
    heads.check("rope_kv")?;
    not_empty("rope_kv", n_rows)?;
    let entry = if heads.dim == 64 { Entry::RopeKvD64 } else { Entry::RopeKvD128 };
    const THREADS: usize = 128;
    let heads_per_block = THREADS / (heads.dim / 16);
    let n_heads = heads.n_q + 2 * heads.n_kv;
    Ok(config(entry, [count(n_rows), count(n_heads.div_ceil(heads_per_block)), 1], count(THREADS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };

    fn rows(n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width }
    }

    #[test]
    fn a_norm_takes_one_block_a_row_and_one_vector_a_thread() {
        let config = rms_norm(rows(7, 4096), Residual::Added).unwrap();
        assert_eq!((config.entry, config.grid, config.threads), (Entry::AddRmsNormV1, [7, 1, 1], 512));
    }

    #[test]
    fn rotation_takes_sixteen_heads_of_128_a_block() {
        assert_eq!(rope_kv(7, LLAMA_8B).unwrap().grid, [7, 3, 1]);
        assert_eq!(rope_kv(7, Heads { dim: 64, ..LLAMA_8B }).unwrap().grid, [7, 2, 1]);
    }

    #[test]
    fn a_wide_norm_takes_four_vectors_a_thread() {
        let config = rms_norm(rows(1, 16384), Residual::None).unwrap();
        assert_eq!((config.entry, config.threads), (Entry::RmsNormV4, 512));
    }

    #[test]
    fn threads_are_whole_warps() {
        assert_eq!(rms_norm(rows(1, 328), Residual::None).unwrap().threads, 64);
        assert_eq!(embed(rows(1, 8)).unwrap().threads, 32);
    }
}
