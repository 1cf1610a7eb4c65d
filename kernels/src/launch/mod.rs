//! Launch shapes: from the description of an operation to entry point, grid, block and shared memory. Pure; nothing here
//! touches the device. A shape that the kernels do not cover is refused here, with what they do cover.

mod attention;
mod pointwise;
mod product;
mod sampling;

pub use self::{
    attention::{DECODE_TILE_ROWS, PREFILL_TILE_ROWS, PrefillKernel, paged_decode, paged_prefill},
    pointwise::{GATE_UP_GROUP, Residual, embed, feed_tokens, rms_norm, rope_kv, silu_mul},
    product::{
        CHAINED_ROWS_MAX, Left, LinearKernel, NORM_TILE, SKINNY_ROWS_MAX, SkinnyForm, SkinnyKernel, norm_tiles,
        skinny_gemm,
    },
    sampling::{SAMPLE_PIECES_MAX, edit_logits, sample, sampling_floor},
};
pub use crate::entry::Entry;
use crate::error::KernelError;

/// Tokens of one KV block; the same constant as in `csrc/common.cuh`.
pub const BLOCK_SIZE: usize = 16;
/// Most query heads a KV head may serve: the rows of a tensor-core tile.
pub const GROUP_MAX: usize = 16;
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

/// Attention heads of one rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub n_q: usize,
    /// KV heads.
    pub n_kv: usize,
    /// Dimensions of a head.
    pub dim: usize,
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

/// How y is stored.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum OutputType {
    /// Activations.
    Bf16,
    /// Logits: bf16 would make ties of distinct tokens.
    F32,
    /// Activations of gate and up: half as many as rows of w, of which [`GATE_UP_GROUP`] are gate and as many up in turn.
    Activated,
    /// Added to the residual stream, and what the norm behind it needs: see [`crate::skinny::Update`].
    Updated,
}

impl Heads {
    /// Query heads that share a KV head.
    pub fn group(self) -> usize {
        self.n_q / self.n_kv
    }

    /// Width of a fused QKV row.
    pub fn qkv_width(self) -> usize {
        (self.n_q + 2 * self.n_kv) * self.dim
    }

    /// Values of one KV block of one layer, in each of the two caches.
    pub fn block_values(self) -> usize {
        self.n_kv * BLOCK_SIZE * self.dim
    }

    fn check(self, op: &'static str) -> Result<(), KernelError> {
        if !matches!(self.dim, 64 | 128) {
            return Err(refused(op, format!("head dimension {} is not supported: 64 and 128 are", self.dim)));
        }
        if self.n_kv == 0 || self.n_q == 0 || !self.n_q.is_multiple_of(self.n_kv) || self.group() > GROUP_MAX {
            let Self { n_q, n_kv, .. } = self;
            return Err(refused(
                op,
                format!("{n_q} query heads do not share {n_kv} KV heads in groups of 1 to {GROUP_MAX}"),
            ));
        }
        Ok(())
    }
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
    use crate::plan::SplitPolicy;

    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
    const BALANCED: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };
    const WGMMA: PrefillKernel = PrefillKernel::Wgmma { n_multiprocessors: 132 };

    fn rows(n_rows: usize, width: usize) -> Rows {
        Rows { n_rows, width }
    }

    #[test]
    fn every_entry_may_have_the_shared_memory_it_is_launched_with() {
        let heads = [64, 128].map(|dim| Heads { dim, ..LLAMA_8B });
        let ring = SkinnyKernel::Ring { n_multiprocessors: 1 };
        let mut configs = vec![skinny_gemm(GemmShape { m: 1, n: 16, k: 8 }, SkinnyForm::Update, ring).unwrap()];
        for heads in heads {
            configs.push(paged_decode(1, heads, BALANCED).unwrap());
            configs.extend([PrefillKernel::Mma, WGMMA].map(|kernel| paged_prefill(1, heads, kernel).unwrap()));
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
            (rope_kv(1, Heads { dim: 96, ..LLAMA_8B }), "rope_kv: head dimension 96 is not supported: 64 and 128 are"),
            (
                paged_decode(1, Heads { n_q: 32, n_kv: 1, dim: 64 }, BALANCED),
                "paged_decode: 32 query heads do not share 1 KV heads in groups of 1 to 16",
            ),
            (
                paged_prefill(70_000, LLAMA_8B, PrefillKernel::Mma),
                "paged_prefill: 70000 planned pieces are more than 65535 in one launch",
            ),
        ];
        for (refusal, text) in refusals {
            assert_eq!(refusal.unwrap_err().to_string(), text);
        }
    }
}
