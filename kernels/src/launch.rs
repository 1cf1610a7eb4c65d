//! Launch shapes: from the description of an operation to entry point, grid, block and shared memory. Pure; nothing here
//! touches the device. A shape that the kernels do not cover is refused here, with what they do cover.

pub use crate::entry::Entry;
use crate::{
    device::Properties,
    entry::SKINNY_RING_BYTES,
    error::KernelError,
    plan::{PrefillSplit, SplitPolicy},
};

/// Tokens of one KV block; the same constant as in `csrc/common.cuh`.
pub const BLOCK_SIZE: usize = 16;
/// Most rows of x that the small-batch matrix product takes.
pub const SKINNY_ROWS_MAX: usize = 16;
/// Most query heads a KV head may serve: the rows of a tensor-core tile.
pub const GROUP_MAX: usize = 16;
/// Rows of a prefill tile: tokens times query heads of one KV head.
pub const PREFILL_TILE_ROWS: usize = 128;
/// Pieces of one row of logits at most.
pub const SAMPLE_PIECES_MAX: usize = 32;

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

/// How the small-batch product reads the weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum SkinnyKernel {
    /// Straight into registers: every chip.
    Registers,
    /// By the bulk copy engine through a ring in shared memory, one block a multiprocessor: Hopper and later.
    Ring {
        /// Multiprocessors of the chip.
        n_multiprocessors: u32,
    },
}

impl SkinnyKernel {
    /// The faster one that the chip has.
    pub fn for_device(properties: Properties) -> Self {
        let Properties { capability, n_multiprocessors, .. } = properties;
        if capability >= (9, 0) { Self::Ring { n_multiprocessors } } else { Self::Registers }
    }
}

/// What multiplies a shape.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum LinearKernel {
    /// Ours, for few rows.
    Skinny(SkinnyKernel),
    /// cuBLASLt.
    Blas,
}

impl LinearKernel {
    /// The fastest one on an H200 (run k2 in docs/benchmarks/NOTES.md): the ring where weights are small and start-up counts
    /// (4096 x 6144: 14.3 µs, registers 16.1, cuBLASLt 16.6), registers for one row of x, cuBLASLt from two rows up, since
    /// ours read x once a tile (4096 x 28672 for 8 rows: 62.9 against 55.2).
    pub fn for_shape(shape: GemmShape, properties: Properties) -> Self {
        const SMALL_BYTES: usize = 64 << 20;
        let is_small = 2 * shape.n * shape.k <= SMALL_BYTES;
        let best = SkinnyKernel::for_device(properties);
        match (shape.m, best) {
            _ if !shape.k.is_multiple_of(8) => Self::Blas,
            (1, SkinnyKernel::Ring { .. }) if !is_small => Self::Skinny(SkinnyKernel::Registers),
            (1, best) => Self::Skinny(best),
            (2..=8, SkinnyKernel::Ring { .. }) if is_small => Self::Skinny(best),
            _ => Self::Blas,
        }
    }
}

/// Matrix product of up to [`SKINNY_ROWS_MAX`] rows.
pub fn skinny_gemm(shape: GemmShape, output: OutputType, kernel: SkinnyKernel) -> Result<LaunchConfig, KernelError> {
    const OP: &str = "skinny_gemm";
    not_empty(OP, shape.m.min(shape.n).min(shape.k))?;
    if shape.m > SKINNY_ROWS_MAX {
        return Err(refused(OP, format!("{} rows are more than {SKINNY_ROWS_MAX}", shape.m)));
    }
    if !shape.k.is_multiple_of(8) {
        return Err(refused(OP, format!("depth {} is not a multiple of 8", shape.k)));
    }
    let [registers, ring] = match (shape.m, output) {
        (0..=8, OutputType::Bf16) => [Entry::SkinnyM8Bf16, Entry::SkinnySm90M8Bf16],
        (0..=8, OutputType::F32) => [Entry::SkinnyM8F32, Entry::SkinnySm90M8F32],
        (_, OutputType::Bf16) => [Entry::SkinnyM16Bf16, Entry::SkinnySm90M16Bf16],
        (_, OutputType::F32) => [Entry::SkinnyM16F32, Entry::SkinnySm90M16F32],
    };
    let n_tiles = count(shape.n.div_ceil(16));
    Ok(match kernel {
        SkinnyKernel::Registers => config(registers, [n_tiles, 1, 1], 256),
        // 8 consumer warps and a producer.
        SkinnyKernel::Ring { n_multiprocessors } => LaunchConfig {
            entry: ring,
            grid: [n_tiles.min(n_multiprocessors), 1, 1],
            threads: 288,
            shared_bytes: SKINNY_RING_BYTES,
        },
    })
}

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

/// Edits of single logits, one a thread.
pub fn edit_logits(n_edits: usize) -> Result<LaunchConfig, KernelError> {
    not_empty("edit_logits", n_edits)?;
    Ok(config(Entry::EditLogits, [count(n_edits.div_ceil(128)), 1, 1], 128))
}

/// Floors of filtered rows of logits: a cluster of 8 blocks a row where the chip has clusters and the row fits their
/// registers, else one block a row.
pub fn sampling_floor(rows: Rows, capability: (i32, i32)) -> Result<LaunchConfig, KernelError> {
    const CLUSTER: usize = 8;
    not_empty("sampling_floor", rows.width)?;
    tiles("sampling_floor", rows.n_rows)?;
    let has_clusters = capability >= (9, 0);
    let (entry, n_blocks) = match rows.width.div_ceil(CLUSTER * 1024) {
        0..=16 if has_clusters => (Entry::SamplingFloorSm90E16, CLUSTER),
        17..=32 if has_clusters => (Entry::SamplingFloorSm90E32, CLUSTER),
        _ => (Entry::SamplingFloor, 1),
    };
    Ok(config(entry, [count(rows.n_rows * n_blocks), 1, 1], 1024))
}

/// The draw over rows of logits: pieces of 4096 logits, but no more than two rounds of blocks for the chip.
pub fn sample(rows: Rows) -> Result<LaunchConfig, KernelError> {
    not_empty("sample", rows.width)?;
    tiles("sample", rows.n_rows)?;
    let n_pieces = rows.width.div_ceil(4096).min(512 / rows.n_rows.min(512)).clamp(1, SAMPLE_PIECES_MAX);
    Ok(config(Entry::Sample, [count(n_pieces), count(rows.n_rows), 1], 512))
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

    const H200: Properties =
        Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };
    const WGMMA: PrefillKernel = PrefillKernel::Wgmma { n_multiprocessors: 132 };
    const LLAMA_8B: Heads = Heads { n_q: 32, n_kv: 8, dim: 128 };

    const BALANCED: SplitPolicy = SplitPolicy::Balanced { n_slots: 264 };

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

    #[test]
    fn a_skinny_product_takes_sixteen_weight_rows_a_block() {
        let config =
            skinny_gemm(GemmShape { m: 9, n: 4097, k: 4096 }, OutputType::F32, SkinnyKernel::Registers).unwrap();
        assert_eq!((config.entry, config.grid), (Entry::SkinnyM16F32, [257, 1, 1]));
        let config = skinny_gemm(GemmShape { m: 8, n: 16, k: 8 }, OutputType::Bf16, SkinnyKernel::Registers).unwrap();
        assert_eq!((config.entry, config.grid), (Entry::SkinnyM8Bf16, [1, 1, 1]));
    }

    #[test]
    fn a_ring_takes_one_block_a_multiprocessor_and_no_more_than_there_are_tiles() {
        let ring = SkinnyKernel::Ring { n_multiprocessors: 132 };
        let blocks = |n| skinny_gemm(GemmShape { m: 1, n, k: 4096 }, OutputType::Bf16, ring).unwrap().grid[0];
        assert_eq!([16, 17, 4096, 128_256].map(blocks), [1, 2, 132, 132]);
    }

    #[test]
    fn every_entry_may_have_the_shared_memory_it_is_launched_with() {
        let heads = [64, 128].map(|dim| Heads { dim, ..LLAMA_8B });
        let ring = SkinnyKernel::Ring { n_multiprocessors: 1 };
        let mut configs = vec![skinny_gemm(GemmShape { m: 1, n: 16, k: 8 }, OutputType::F32, ring).unwrap()];
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
                skinny_gemm(GemmShape { m: 17, n: 1, k: 8 }, OutputType::Bf16, SkinnyKernel::Registers),
                "skinny_gemm: 17 rows are more than 16",
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

    #[test]
    fn products_go_where_they_were_measured_to_be_fastest() {
        let ring = LinearKernel::Skinny(SkinnyKernel::Ring { n_multiprocessors: 132 });
        let registers = LinearKernel::Skinny(SkinnyKernel::Registers);
        let chosen = |m, n| LinearKernel::for_shape(GemmShape { m, n, k: 4096 }, H200);
        assert_eq!([chosen(1, 6144), chosen(1, 28672)], [ring, registers]);
        assert_eq!([chosen(8, 6144), chosen(8, 28672)], [ring, LinearKernel::Blas]);
        assert_eq!([chosen(9, 6144), chosen(256, 6144)], [LinearKernel::Blas; 2]);
    }

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
    fn a_row_of_logits_takes_a_cluster_where_it_fits_one() {
        let entry = |width, capability| sampling_floor(rows(2, width), capability).unwrap();
        assert_eq!(entry(128_256, (9, 0)).entry, Entry::SamplingFloorSm90E16);
        assert_eq!(entry(128_256, (9, 0)).grid, [16, 1, 1]);
        assert_eq!(entry(151_936, (10, 0)).entry, Entry::SamplingFloorSm90E32);
        assert_eq!(entry(300_000, (9, 0)).entry, Entry::SamplingFloor);
        assert_eq!(entry(128_256, (8, 9)).grid, [2, 1, 1]);
    }

    #[test]
    fn fixed_pieces_are_taken_in_turn_by_as_many_blocks_as_run_at_once() {
        let blocks = |n_items, heads| paged_decode(n_items, heads, SplitPolicy::fixed(8192, 264)).unwrap().grid[1];
        assert_eq!((blocks(8192, LLAMA_8B), blocks(3, LLAMA_8B)), (33, 3));
        assert_eq!(blocks(8192, Heads { n_kv: 4, ..LLAMA_8B }), 65);
    }

    #[test]
    fn few_rows_of_logits_are_cut_finer_than_many() {
        let pieces = |n_rows| sample(rows(n_rows, 128_256)).unwrap().grid[0];
        assert_eq!([1, 16, 64, 256, 4096].map(pieces), [32, 32, 8, 2, 1]);
        assert_eq!(sample(rows(1, 100)).unwrap().grid, [1, 1, 1]);
    }

    #[test]
    fn attention_asks_for_the_shared_memory_its_tiles_need() {
        assert_eq!(paged_decode(3, LLAMA_8B, BALANCED).unwrap().shared_bytes, 96 * 1024);
        assert_eq!(paged_prefill(3, LLAMA_8B, PrefillKernel::Mma).unwrap().shared_bytes, 96 * 1024);
        assert_eq!(paged_prefill(3, LLAMA_8B, WGMMA).unwrap().shared_bytes, 193 * 1024);
        assert_eq!(paged_decode(3, Heads { dim: 64, ..LLAMA_8B }, BALANCED).unwrap().shared_bytes, 48 * 1024);
    }
}
