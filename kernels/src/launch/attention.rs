//! Launches of attention over the paged cache.

use super::{BLOCK_SIZE, Entry, Heads, LaunchConfig, count, not_empty, tiles};
use crate::{
    device::Properties,
    error::KernelError,
    plan::{PrefillSplit, SplitPolicy},
};

/// Rows of a decode tile: sequences that are read together times query heads of one KV head.
pub const DECODE_TILE_ROWS: usize = 16;
/// Rows of a prefill tile: tokens times query heads of one KV head.
pub const PREFILL_TILE_ROWS: usize = 128;

/// Decode attention over planned pieces: a block a piece and KV head, or as many as run at once, an odd number that no
/// pattern of long and short pieces falls in step with.
pub fn paged_decode(n_items: usize, heads: Heads, policy: SplitPolicy) -> Result<LaunchConfig, KernelError> {
    heads.check("paged_decode")?;
    not_empty("paged_decode", n_items)?;
    let n_blocks = match policy {
        SplitPolicy::Balanced { .. } => n_items,
        SplitPolicy::Fixed { n_slots, .. } => n_items.min(((n_slots / heads.n_kv).max(2) - 1) | 1),
    };
    tiles("paged_decode", n_blocks)?;
    let entry = if heads.dim == 64 { Entry::PagedDecodeD64 } else { Entry::PagedDecodeD128 };
    // 4 warps x 3 stages x one KV block of K and V.
    let shared_bytes = count(4 * 3 * 2 * BLOCK_SIZE * heads.dim * 2);
    Ok(LaunchConfig { entry, grid: [count(heads.n_kv), count(n_blocks), 1], threads: 128, shared_bytes })
}

/// Which tensor-core instructions prefill attention uses.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PrefillKernel {
    /// mma.sync: every chip that we compile for.
    Mma,
    /// wgmma, one block a multiprocessor: Hopper only.
    Wgmma {
        /// Multiprocessors of the chip.
        n_multiprocessors: u32,
    },
}

impl PrefillKernel {
    /// The faster one that the chip has.
    pub fn for_device(properties: Properties) -> Self {
        let Properties { capability, n_multiprocessors, .. } = properties;
        if capability == (9, 0) { Self::Wgmma { n_multiprocessors } } else { Self::Mma }
    }

    /// How its tiles are cut: only wgmma's are merged again.
    pub fn split(self) -> PrefillSplit {
        match self {
            Self::Mma => PrefillSplit::Never,
            Self::Wgmma { n_multiprocessors } => PrefillSplit::Fill { n_slots: n_multiprocessors as usize },
        }
    }
}

/// Prefill attention over planned tiles.
pub fn paged_prefill(n_tiles: usize, heads: Heads, kernel: PrefillKernel) -> Result<LaunchConfig, KernelError> {
    heads.check("paged_prefill")?;
    tiles("paged_prefill", n_tiles)?;
    let by_width = |narrow, wide| if heads.dim == 64 { narrow } else { wide };
    let bytes = |n_rows: usize| count(n_rows * heads.dim * 2);
    Ok(match kernel {
        PrefillKernel::Mma => LaunchConfig {
            entry: by_width(Entry::PagedPrefillD64, Entry::PagedPrefillD128),
            grid: [count(heads.n_kv), count(n_tiles), 1],
            threads: 128,
            // The tile's queries, and two stages of 64 tokens of K and of V.
            shared_bytes: bytes(PREFILL_TILE_ROWS + 2 * 2 * 64),
        },
        // Two warpgroups consume, one produces.
        PrefillKernel::Wgmma { n_multiprocessors } => LaunchConfig {
            entry: by_width(Entry::PagedPrefillSm90D64, Entry::PagedPrefillSm90D128),
            grid: [count(n_tiles * heads.n_kv).min(n_multiprocessors), 1, 1],
            threads: 384,
            // Two stages of a tile's queries, of K and of V. Swizzled tiles begin at multiples of 1024, wherever the dynamic
            // shared memory begins.
            shared_bytes: bytes(2 * (PREFILL_TILE_ROWS + 2 * 128)) + 1024,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Properties =
        Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };
    const WGMMA: PrefillKernel = PrefillKernel::Wgmma { n_multiprocessors: 132 };
    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
    const BALANCED: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };

    #[test]
    fn only_hopper_prefills_with_warpgroup_products() {
        let kernels = [(8, 0), (8, 9), (9, 0), (10, 0)];
        let kernels = kernels.map(|capability| PrefillKernel::for_device(Properties { capability, ..H200 }));
        assert_eq!(kernels, [PrefillKernel::Mma, PrefillKernel::Mma, WGMMA, PrefillKernel::Mma]);
    }

    #[test]
    fn prefill_on_hopper_takes_one_block_a_multiprocessor_and_no_more_than_there_is_work() {
        let blocks = |n_tiles| paged_prefill(n_tiles, LLAMA_8B, WGMMA).unwrap().grid;
        assert_eq!([1, 16, 17, 500].map(blocks), [[8, 1, 1], [128, 1, 1], [132, 1, 1], [132, 1, 1]]);
    }

    #[test]
    fn fixed_pieces_are_taken_in_turn_by_as_many_blocks_as_run_at_once() {
        let blocks = |n_items, heads| paged_decode(n_items, heads, SplitPolicy::fixed(8192, 264)).unwrap().grid[1];
        assert_eq!((blocks(8192, LLAMA_8B), blocks(3, LLAMA_8B)), (33, 3));
        assert_eq!(blocks(8192, Heads { n_kv: 4, ..LLAMA_8B }), 65);
    }

    #[test]
    fn attention_asks_for_the_shared_memory_its_tiles_need() {
        assert_eq!(paged_decode(3, LLAMA_8B, BALANCED).unwrap().shared_bytes, 96 * 1024);
        assert_eq!(paged_prefill(3, LLAMA_8B, PrefillKernel::Mma).unwrap().shared_bytes, 96 * 1024);
        assert_eq!(paged_prefill(3, LLAMA_8B, WGMMA).unwrap().shared_bytes, 193 * 1024);
        assert_eq!(paged_decode(3, Heads { dim: 64, ..LLAMA_8B }, BALANCED).unwrap().shared_bytes, 48 * 1024);
    }
}
