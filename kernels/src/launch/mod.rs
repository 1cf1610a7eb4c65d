//! Launch shapes: from the description of an operation to entry point, grid, block and shared memory. Pure; nothing here
//! touches the device. A shape that the kernels do not cover is refused here, with what they do cover.

mod attention;
mod pointwise;
mod product;
mod reduce;
mod sampling;
mod unpack;

pub use self::{
    attention::{AttentionSpec, PrefillKernel, paged_decode, paged_prefill},
    pointwise::{
        GATE_UP_GROUP, NormWeight, Residual, RotaryForm, add_bias, any_norm, embed, feed_tokens, gelu_mul,
        quantise_rows, rms_norm, rms_norm_e4m3, rope_kv, silu_mul, softcap,
    },
    product::{
        SKINNY_INT4_ROWS_MAX, SKINNY_ROWS_MAX, SkinnyForm, SkinnyKernel, fits_quantising_ring, quantising_ring,
        skinny_gemm, skinny_gemm_e4m3, skinny_gemm_int4,
    },
    reduce::{Reduced, Way, gather_logits, meet_ranks, reduce, reduce_shares, shares_rows},
    sampling::{mark_tokens, sample, sample_options, sampling_floor, score_tokens, sum_rows},
    unpack::{CodeLines, repack_int4, unpack_blocks, widen_int4},
};
pub use stoker_fit::gpu::{
    BLOCK_SIZE, DECODE_TILE_ROWS, Heads, LOGIT_CHUNKS, NORM_TILE, PREFILL_TILE_ROWS, Push, SAMPLE_PIECES_MAX,
    UPDATE_ROWS_MAX, norm_tiles,
};

pub use crate::entry::Entry;
use crate::error::KernelError;

/// Most query heads a KV head may serve: the rows of a tensor-core tile.
pub const GROUP_MAX: usize = 16;
/// Widest head.
pub const HEAD_DIM_MAX: usize = 256;
/// Widths of heads are multiples of this.
pub const HEAD_DIM_STEP: usize = 16;
/// Everything the driver needs to start a kernel, besides its arguments.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LaunchConfig {
    /// What is started.
    pub entry: Entry,
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Rows of equal width.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Rows {
    /// Number of rows.
    pub n_rows: usize,
    /// Values of a row.
    pub width: usize,
}

/// y = x * w^T, with x of `m` rows, w of `n` rows, both `k` wide.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct GemmShape {
    /// Rows of x and y.
    pub m: usize,
    /// Rows of w, columns of y.
    pub n: usize,
    /// Width of x and w.
    pub k: usize,
}

/// What a GEMM does with its sums.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Epilogue {
    /// Stores activations.
    Bf16,
    /// Stores logits: bf16 would make ties of distinct tokens.
    F32,
    /// Adds to the residual stream, before it is rounded.
    Sum,
    /// Stores activations of gate and up: half as many as rows of w, of which [`GATE_UP_GROUP`] are gate and as many up in turn.
    Gated,
    /// Adds to the residual stream, and leaves what the norm behind it needs: see [`crate::skinny::Update`].
    Update,
}

/// Whether the kernels take them.
fn check_heads(heads: Heads, op: &'static str) -> Result<(), KernelError> {
    if !heads.dim.is_multiple_of(HEAD_DIM_STEP) || heads.dim == 0 || heads.dim > HEAD_DIM_MAX {
        let problem = format!("head dimension {} is no multiple of {HEAD_DIM_STEP} up to {HEAD_DIM_MAX}", heads.dim);
        return Err(refused(op, problem));
    }
    if heads.n_kv == 0 || heads.n_q == 0 || !heads.n_q.is_multiple_of(heads.n_kv) || heads.group() > GROUP_MAX {
        let Heads { n_q, n_kv, .. } = heads;
        return Err(refused(
            op,
            format!("{n_q} query heads do not share {n_kv} KV heads in groups of 1 to {GROUP_MAX}"),
        ));
    }
    Ok(())
}

fn config(entry: Entry, grid: [u32; 3], threads: u32) -> LaunchConfig {
    LaunchConfig { entry, grid, threads, shared_bytes: 0 }
}

/// 16-byte vectors of a row.
fn vectors(op: &'static str, rows: Rows) -> Result<usize, KernelError> {
    not_empty(op, rows.n_rows.min(rows.width))?;
    if !rows.width.is_multiple_of(8) {
        return Err(refused(op, format!("width {} is not a multiple of 8", rows.width)));
    }
    Ok(rows.width / 8)
}

fn tiles(op: &'static str, n: usize) -> Result<(), KernelError> {
    not_empty(op, n)?;
    if n > 65535 {
        return Err(refused(op, format!("{n} planned pieces are more than 65535 in one launch")));
    }
    Ok(())
}

fn not_empty(op: &'static str, n: usize) -> Result<(), KernelError> {
    if n == 0 { Err(refused(op, "nothing to do: a dimension is 0".to_owned())) } else { Ok(()) }
}

/// Threads for `n` vectors, in whole warps.
fn warps_for(n: usize, most: u32) -> u32 {
    count(n.div_ceil(32) * 32).min(most)
}

pub(crate) fn refused(op: &'static str, problem: String) -> KernelError {
    KernelError::Shape { op, problem }
}

/// Dimensions of a launch fit u32: they come from buffers that fit a GPU.
pub(crate) fn count(n: usize) -> u32 {
    u32::try_from(n).expect("a dimension of a launch is below 2^32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cache::KvFormat, plan::SplitPolicy};

    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
    const BALANCED: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };
    const WGMMA: PrefillKernel = PrefillKernel::Wgmma { n_multiprocessors: 132 };

    fn rows(n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width }
    }

    #[test]
    fn every_entry_may_have_the_shared_memory_it_is_launched_with() {
        let heads = [64, 96, 128, 256].map(|dim| Heads { dim, ..LLAMA_8B });
        let ring = SkinnyKernel::Ring { n_multiprocessors: 1 };
        let mut configs = vec![skinny_gemm(GemmShape { m: 1, n: 16, k: 8 }, SkinnyForm::Update, ring).unwrap()];
        for heads in heads {
            let spec = AttentionSpec::plain(heads, 1.0);
            for cache in KvFormat::ALL {
                configs.push(paged_decode(1, spec, BALANCED, cache).unwrap());
            }
            let both =
                [PrefillKernel::Mma, WGMMA].into_iter().flat_map(|kernel| KvFormat::ALL.map(|cache| (kernel, cache)));
            configs.extend(both.map(|(kernel, cache)| paged_prefill(1, spec, kernel, cache).unwrap()));
        }
        for config in configs {
            let allowed = config.entry.shared_bytes_asked().unwrap_or(48 << 10);
            assert!(config.shared_bytes <= allowed, "{config:?}");
        }
    }

    #[test]
    fn every_refusal_names_the_operation_the_value_and_the_limit() {
        let refusals = [
            (rms_norm(rows(1, 100), Residual::None), "rms_norm: width 100 is not a multiple of 8"),
            (embed(rows(0, 64)), "embed: nothing to do: a dimension is 0"),
            (
                skinny_gemm(GemmShape { m: 9, n: 1, k: 8 }, SkinnyForm::Update, SkinnyKernel::Registers),
                "skinny_gemm: 9 rows are more than 8",
            ),
            (
                rope_kv(1, RotaryForm::plain(Heads { dim: 100, ..LLAMA_8B }), KvFormat::Bf16),
                "rope_kv: head dimension 100 is no multiple of 16 up to 256",
            ),
            (
                rope_kv(1, RotaryForm { n_pairs: 20, ..RotaryForm::plain(LLAMA_8B) }, KvFormat::Bf16),
                "rope_kv: 40 numbers of each head turn, of 128: multiples of 16 can",
            ),
            (
                paged_decode(
                    1,
                    AttentionSpec::plain(Heads { n_q: 32, n_kv: 1, dim: 64 }, 1.0),
                    BALANCED,
                    KvFormat::Bf16,
                ),
                "paged_decode: 32 query heads do not share 1 KV heads in groups of 1 to 16",
            ),
            (
                paged_prefill(70_000, AttentionSpec::plain(LLAMA_8B, 1.0), PrefillKernel::Mma, KvFormat::Bf16),
                "paged_prefill: 70000 planned pieces are more than 65535 in one launch",
            ),
            (
                paged_decode(
                    1,
                    AttentionSpec { window: Some(0), ..AttentionSpec::plain(LLAMA_8B, 1.0) },
                    BALANCED,
                    KvFormat::E4m3,
                ),
                "paged_decode: a window of 0 tokens sees nothing",
            ),
        ];
        for (refusal, text) in refusals {
            assert_eq!(refusal.unwrap_err().to_string(), text);
        }
    }
}
