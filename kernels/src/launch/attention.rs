//! Launches of attention over the paged cache.

use stoker_fit::gpu;

use super::{BLOCK_SIZE, Entry, Heads, LaunchConfig, PREFILL_TILE_ROWS, check_heads, count, not_empty, refused, tiles};
use crate::{
    cache::KvFormat,
    device::Properties,
    error::KernelError,
    plan::{PrefillSplit, SplitPolicy},
};

/// How one layer attends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// The rank's heads.
    pub heads: Heads,
    /// What scores are multiplied by; usually 1 / sqrt(dim).
    pub scale: f32,
    /// Tokens that a query sees, itself included; `None`: all up to itself.
    pub window: Option<usize>,
    /// Scores go through `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
}

/// A kernel's tiles.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Tile {
    /// For heads of exactly this width, no window, no soft-cap.
    Plain64,
    Plain128,
    /// For heads up to this width.
    Any64,
    Any128,
    Any256,
}

impl AttentionSpec {
    /// Every token is seen and scores are not bounded: what most families do.
    pub fn plain(heads: Heads, scale: f32) -> Self {
        Self { heads, scale, window: None, softcap: None }
    }

    /// The window as kernels want it: far above any context where there is none.
    pub(crate) fn window_tokens(self) -> usize {
        const NO_WINDOW: usize = 1 << 30;
        self.window.unwrap_or(NO_WINDOW).min(NO_WINDOW)
    }

    fn check(self, op: &'static str) -> Result<(), KernelError> {
        check_heads(self.heads, op)?;
        if self.window == Some(0) {
            return Err(refused(op, "a window of 0 tokens sees nothing".to_owned()));
        }
        Ok(())
    }

    fn tile(self) -> Tile {
        let is_plain = self.window.is_none() && self.softcap.is_none();
        match self.heads.dim {
            64 if is_plain => Tile::Plain64,
            128 if is_plain => Tile::Plain128,
            ..=64 => Tile::Any64,
            65..=128 => Tile::Any128,
            129.. => Tile::Any256,
        }
    }
}

impl Tile {
    /// Columns.
    fn dim(self) -> usize {
        match self {
            Self::Plain64 | Self::Any64 => 64,
            Self::Plain128 | Self::Any128 => 128,
            Self::Any256 => 256,
        }
    }
}

/// Decode attention over planned pieces: a block a piece and KV head, or as many as run at once, an odd number that no
/// pattern of long and short pieces falls in step with.
pub fn paged_decode(
    n_items: usize,
    spec: AttentionSpec,
    policy: SplitPolicy,
    cache: KvFormat,
) -> Result<LaunchConfig, KernelError> {
    spec.check("paged_decode")?;
    not_empty("paged_decode", n_items)?;
    let (n_kv, tile) = (spec.heads.n_kv, spec.tile());
    let n_blocks = match policy {
        SplitPolicy::Balanced { .. } => n_items,
        SplitPolicy::Fixed { n_slots, .. } => n_items.min(((n_slots / n_kv).max(2) - 1) | 1),
    };
    tiles("paged_decode", n_blocks)?;
    let entry = match (tile, cache) {
        (Tile::Plain64, KvFormat::Bf16) => Entry::PagedDecodeD64,
        (Tile::Plain128, KvFormat::Bf16) => Entry::PagedDecodeD128,
        (Tile::Any64, KvFormat::Bf16) => Entry::PagedDecodeAny64,
        (Tile::Any128, KvFormat::Bf16) => Entry::PagedDecodeAny128,
        (Tile::Any256, KvFormat::Bf16) => Entry::PagedDecodeAny256,
        (Tile::Plain64, KvFormat::E4m3) => Entry::PagedDecodeE4m3D64,
        (Tile::Plain128, KvFormat::E4m3) => Entry::PagedDecodeE4m3D128,
        (Tile::Any64, KvFormat::E4m3) => Entry::PagedDecodeE4m3Any64,
        (Tile::Any128, KvFormat::E4m3) => Entry::PagedDecodeE4m3Any128,
        (Tile::Any256, KvFormat::E4m3) => Entry::PagedDecodeE4m3Any256,
    };
    // Warps x stages x one KV block of K and V.
    let n_warps = if tile.dim() > 128 { 2 } else { 4 };
    let n_stages = match cache {
        KvFormat::Bf16 => 3,
        KvFormat::E4m3 => 4,
    };
    let shared_bytes = count(n_warps * n_stages * 2 * BLOCK_SIZE * tile.dim() * cache.bytes());
    Ok(LaunchConfig { entry, grid: [count(n_kv), count(n_blocks), 1], threads: count(32 * n_warps), shared_bytes })
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
        match gpu::prefill_split(capability, n_multiprocessors) {
            PrefillSplit::Fill { .. } => Self::Wgmma { n_multiprocessors },
            PrefillSplit::Never => Self::Mma,
        }
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
pub fn paged_prefill(
    n_tiles: usize,
    spec: AttentionSpec,
    kernel: PrefillKernel,
    cache: KvFormat,
) -> Result<LaunchConfig, KernelError> {
    const OP: &str = "paged_prefill";
    spec.check(OP)?;
    tiles(OP, n_tiles)?;
    let (heads, tile) = (spec.heads, spec.tile());
    let bytes = |n_rows: usize| count(n_rows * tile.dim() * 2);
    match kernel {
        PrefillKernel::Mma => {
            // Beyond a width of 128 two blocks share a tile's rows, and KV comes in tiles of 32 tokens, not 64.
            let n_parts = if tile.dim() > 128 { 2 } else { 1 };
            Ok(LaunchConfig {
                entry: match (tile, cache) {
                    (Tile::Plain64, KvFormat::Bf16) => Entry::PagedPrefillD64,
                    (Tile::Plain128, KvFormat::Bf16) => Entry::PagedPrefillD128,
                    (Tile::Any64, KvFormat::Bf16) => Entry::PagedPrefillAny64,
                    (Tile::Any128, KvFormat::Bf16) => Entry::PagedPrefillAny128,
                    (Tile::Any256, KvFormat::Bf16) => Entry::PagedPrefillAny256,
                    (Tile::Plain64, KvFormat::E4m3) => Entry::PagedPrefillE4m3D64,
                    (Tile::Plain128, KvFormat::E4m3) => Entry::PagedPrefillE4m3D128,
                    (Tile::Any64, KvFormat::E4m3) => Entry::PagedPrefillE4m3Any64,
                    (Tile::Any128, KvFormat::E4m3) => Entry::PagedPrefillE4m3Any128,
                    (Tile::Any256, KvFormat::E4m3) => Entry::PagedPrefillE4m3Any256,
                },
                grid: [count(heads.n_kv), count(n_tiles), count(n_parts)],
                threads: 128,
                // The queries, and two stages of K and of V.
                shared_bytes: bytes((PREFILL_TILE_ROWS + 2 * 2 * 64) / n_parts),
            })
        }
        // Two warpgroups consume, one produces.
        PrefillKernel::Wgmma { n_multiprocessors } => Ok(LaunchConfig {
            entry: match (tile, cache) {
                (Tile::Plain64, KvFormat::Bf16) => Entry::PagedPrefillSm90D64,
                (Tile::Plain128, KvFormat::Bf16) => Entry::PagedPrefillSm90D128,
                (Tile::Any64, KvFormat::Bf16) => Entry::PagedPrefillSm90Any64,
                (Tile::Any128, KvFormat::Bf16) => Entry::PagedPrefillSm90Any128,
                (Tile::Any256, KvFormat::Bf16) => Entry::PagedPrefillSm90Any256,
                (Tile::Plain64, KvFormat::E4m3) => Entry::PagedPrefillSm90E4m3D64,
                (Tile::Plain128, KvFormat::E4m3) => Entry::PagedPrefillSm90E4m3D128,
                (Tile::Any64, KvFormat::E4m3) => Entry::PagedPrefillSm90E4m3Any64,
                (Tile::Any128, KvFormat::E4m3) => Entry::PagedPrefillSm90E4m3Any128,
                (Tile::Any256, KvFormat::E4m3) => Entry::PagedPrefillSm90E4m3Any256,
            },
            grid: [count(n_tiles * heads.n_kv).min(n_multiprocessors), 1, 1],
            threads: 384,
            // Two stages of a tile's queries, of K and of V; one of queries and shorter tiles of KV beyond a width of 128. Swizzled
            // tiles begin at multiples of 1024, wherever the dynamic shared memory begins.
            shared_bytes: bytes(match tile.dim() {
                ..=128 => 2 * (PREFILL_TILE_ROWS + 2 * 128),
                _ => PREFILL_TILE_ROWS + 2 * 2 * 64,
            }) + 1024,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Properties =
        Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };
    const WGMMA: PrefillKernel = PrefillKernel::Wgmma { n_multiprocessors: 132 };
    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };
    const BALANCED: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };

    fn plain(heads: Heads) -> AttentionSpec {
        AttentionSpec::plain(heads, 1.0)
    }

    #[test]
    fn only_hopper_prefills_with_warpgroup_products() {
        let kernels = [(8, 0), (8, 9), (9, 0), (10, 0)];
        let kernels = kernels.map(|capability| PrefillKernel::for_device(Properties { capability, ..H200 }));
        assert_eq!(kernels, [PrefillKernel::Mma, PrefillKernel::Mma, WGMMA, PrefillKernel::Mma]);
    }

    #[test]
    fn prefill_on_hopper_takes_one_block_a_multiprocessor_and_no_more_than_there_is_work() {
        let blocks = |n_tiles| paged_prefill(n_tiles, plain(LLAMA_8B), WGMMA, KvFormat::Bf16).unwrap().grid;
        assert_eq!([1, 16, 17, 500].map(blocks), [[8, 1, 1], [128, 1, 1], [132, 1, 1], [132, 1, 1]]);
    }

    #[test]
    fn fixed_pieces_are_taken_in_turn_by_as_many_blocks_as_run_at_once() {
        let blocks = |n_items, heads| {
            paged_decode(n_items, plain(heads), SplitPolicy::fixed(8192, 264), KvFormat::Bf16).unwrap().grid[1]
        };
        assert_eq!((blocks(8192, LLAMA_8B), blocks(3, LLAMA_8B)), (33, 3));
        assert_eq!(blocks(8192, Heads { n_kv: 4, ..LLAMA_8B }), 65);
    }

    #[test]
    fn attention_asks_for_the_shared_memory_its_tiles_need() {
        let decode =
            |dim| paged_decode(3, plain(Heads { dim, ..LLAMA_8B }), BALANCED, KvFormat::Bf16).unwrap().shared_bytes;
        assert_eq!([48, 64, 96, 128, 256].map(decode), [48, 48, 96, 96, 96].map(|kib| kib * 1024));
        let of_codes = paged_decode(3, plain(LLAMA_8B), BALANCED, KvFormat::E4m3).unwrap();
        assert_eq!((of_codes.entry, of_codes.shared_bytes), (Entry::PagedDecodeE4m3D128, 64 * 1024));
        let prefill = |dim, kernel| paged_prefill(3, plain(Heads { dim, ..LLAMA_8B }), kernel, KvFormat::E4m3).unwrap();
        assert_eq!(prefill(128, PrefillKernel::Mma).shared_bytes, 96 * 1024);
        assert_eq!([128, 256].map(|dim| prefill(dim, WGMMA).shared_bytes), [193 * 1024; 2]);
        let wide = prefill(256, PrefillKernel::Mma);
        assert_eq!((wide.shared_bytes, wide.grid), (96 * 1024, [8, 3, 2]));
    }

    #[test]
    fn heads_of_64_and_128_without_extras_have_kernels_of_their_own() {
        let entry = |spec| paged_decode(3, spec, BALANCED, KvFormat::Bf16).unwrap().entry;
        assert_eq!(entry(plain(LLAMA_8B)), Entry::PagedDecodeD128);
        assert_eq!(entry(plain(Heads { dim: 112, ..LLAMA_8B })), Entry::PagedDecodeAny128);
        assert_eq!(entry(AttentionSpec { window: Some(9), ..plain(LLAMA_8B) }), Entry::PagedDecodeAny128);
        assert_eq!(
            entry(AttentionSpec { softcap: Some(50.0), ..plain(Heads { dim: 64, ..LLAMA_8B }) }),
            Entry::PagedDecodeAny64
        );
    }
}
