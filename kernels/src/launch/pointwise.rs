//! Launches of the operations that treat rows one by one: embedding, norms, activation, rotation.

use super::{Entry, Heads, LaunchConfig, Rows, check_heads, config, count, not_empty, refused, vectors, warps_for};
use crate::{cache::KvFormat, error::KernelError};

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

/// The same to rows of e4m3.
pub fn rms_norm_e4m3(rows: Rows, adds: Residual) -> Result<LaunchConfig, KernelError> {
    let config = rms_norm(rows, adds)?;
    let entry = match config.entry {
        Entry::RmsNormV1 => Entry::RmsNormE4m3V1,
        Entry::RmsNormV4 => Entry::RmsNormE4m3V4,
        Entry::AddRmsNormV1 => Entry::AddRmsNormE4m3V1,
        _ => Entry::AddRmsNormE4m3V4,
    };
    Ok(LaunchConfig { entry, ..config })
}

/// `rows` to e4m3.
pub fn quantise_rows(rows: Rows) -> Result<LaunchConfig, KernelError> {
    let n_vecs = vectors("quantise_rows", rows)?;
    let (entry, per_thread) = match n_vecs {
        0..=1024 => (Entry::QuantiseRowsV1, 1),
        1025..=2048 => (Entry::QuantiseRowsV2, 2),
        2049..=4096 => (Entry::QuantiseRowsV4, 4),
        _ => return Err(refused("quantise_rows", format!("width {} is more than 32768", rows.width))),
    };
    Ok(config(entry, [count(rows.n_rows), 1, 1], warps_for(n_vecs.div_ceil(per_thread), 1024)))
}

/// A chain of norms and an addition of `rows`; see `csrc/rms_norm.cu`.
pub fn any_norm(rows: Rows) -> Result<LaunchConfig, KernelError> {
    let config = rms_norm(rows, Residual::None)?;
    let entry = if config.entry == Entry::RmsNormV1 { Entry::AnyNormV1 } else { Entry::AnyNormV4 };
    Ok(LaunchConfig { entry, ..config })
}

/// How a norm's weight is stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NormWeight {
    /// As the factor itself.
    Factor,
    /// As the factor less one.
    OnePlusFactor,
}

impl NormWeight {
    /// What is added to a stored weight.
    pub(crate) fn offset(self) -> f32 {
        match self {
            Self::Factor => 0.0,
            Self::OnePlusFactor => 1.0,
        }
    }
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
    a_vector_a_thread("silu_mul", Entry::SiluMul, rows)
}

/// The same with GELU.
pub fn gelu_mul(rows: Rows) -> Result<LaunchConfig, KernelError> {
    a_vector_a_thread("gelu_mul", Entry::GeluMul, rows)
}

/// A bias added to `rows`.
pub fn add_bias(rows: Rows) -> Result<LaunchConfig, KernelError> {
    a_vector_a_thread("add_bias", Entry::AddBias, rows)
}

fn a_vector_a_thread(op: &'static str, entry: Entry, rows: Rows) -> Result<LaunchConfig, KernelError> {
    let n_vecs = vectors(op, rows)?;
    let threads = warps_for(n_vecs, 256);
    if rows.n_rows > 65535 {
        return Err(refused(op, format!("{} rows are more than 65535", rows.n_rows)));
    }
    Ok(config(entry, [count(n_vecs.div_ceil(threads as usize)), count(rows.n_rows), 1], threads))
}

/// The bound of `n` logits.
pub fn softcap(n: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("softcap", n)?;
    Ok(config(Entry::Softcap, [count(n.div_ceil(256)), 1, 1], 256))
}

/// What is done to queries and keys before they are used.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RotaryForm {
    /// The rank's heads.
    pub heads: Heads,
    /// Pairs of a head that turn: its first `2 * n_pairs` numbers, none where the layer does not turn.
    pub n_pairs: usize,
    /// How the weights of its norms are stored, if it has any.
    pub norm_weight: NormWeight,
}

impl RotaryForm {
    /// Whole heads turn: what most families do.
    pub fn plain(heads: Heads) -> Self {
        Self { heads, n_pairs: heads.dim / 2, norm_weight: NormWeight::Factor }
    }

    fn check(self) -> Result<(), KernelError> {
        let Self { heads, n_pairs, .. } = self;
        check_heads(heads, "rope_kv")?;
        if n_pairs.is_multiple_of(8) && 2 * n_pairs <= heads.dim {
            return Ok(());
        }
        let problem = format!("{} numbers of each head turn, of {}: multiples of 16 can", 2 * n_pairs, heads.dim);
        Err(refused("rope_kv", problem))
    }
}

/// Rotary embedding and KV write of `n_rows` fused rows: 16 dimensions of a head a thread, blocks of 128 threads so that
/// few rows still spread over the chip.
pub fn rope_kv(n_rows: usize, form: RotaryForm, cache: KvFormat) -> Result<LaunchConfig, KernelError> {
    form.check()?;
    not_empty("rope_kv", n_rows)?;
    let heads = form.heads;
    const THREADS: usize = 128;
    let is_plain = form == RotaryForm::plain(heads);
    let (entry, head_lanes) = match (heads.dim, cache) {
        (64, KvFormat::Bf16) if is_plain => (Entry::RopeKvD64, 4),
        (64, KvFormat::E4m3) if is_plain => (Entry::RopeKvE4m3D64, 4),
        (128, KvFormat::Bf16) if is_plain => (Entry::RopeKvD128, 8),
        (128, KvFormat::E4m3) if is_plain => (Entry::RopeKvE4m3D128, 8),
        (_, KvFormat::Bf16) => (Entry::RopeKvAny, 16),
        (_, KvFormat::E4m3) => (Entry::RopeKvE4m3Any, 16),
    };
    let heads_per_block = THREADS / head_lanes;
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
        let plain = |dim| rope_kv(7, RotaryForm::plain(Heads { dim, ..LLAMA_8B }), KvFormat::Bf16).unwrap();
        assert_eq!([plain(128).grid, plain(64).grid, plain(96).grid], [[7, 3, 1], [7, 2, 1], [7, 6, 1]]);
    }

    #[test]
    fn heads_that_turn_in_part_or_have_weights_around_zero_take_the_kernel_for_any() {
        let plain = RotaryForm::plain(LLAMA_8B);
        let entry = |form| rope_kv(1, form, KvFormat::Bf16).unwrap().entry;
        assert_eq!(entry(plain), Entry::RopeKvD128);
        assert_eq!(entry(RotaryForm { n_pairs: 48, ..plain }), Entry::RopeKvAny);
        assert_eq!(entry(RotaryForm { n_pairs: 0, ..plain }), Entry::RopeKvAny);
        assert_eq!(entry(RotaryForm { norm_weight: NormWeight::OnePlusFactor, ..plain }), Entry::RopeKvAny);
        assert_eq!(rope_kv(1, plain, KvFormat::E4m3).unwrap().entry, Entry::RopeKvE4m3D128);
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
