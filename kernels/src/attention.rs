//! Attention over the paged KV cache: planned decode pieces and prefill tiles (`plan`) on the device, and the scratch that
//! split decoding needs. Checks buffers, launches; the cache belongs to the caller.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr};
use half::bf16;
pub use stoker_fit::gpu::ScratchSize;

use crate::{
    KernelError, Kernels,
    cache::LayerCache,
    check_len, check_room,
    launch::{self, AttentionSpec, BLOCK_SIZE, Heads, LaunchConfig, PREFILL_TILE_ROWS, PrefillKernel},
    plan::{DecodeItem, DecodeReader, PrefillTile, SplitPolicy},
    sys::Launch,
    tensor_map::{BoxedTensor, Fetches, TensorMap},
};

const PREFILL: &str = "paged_prefill";

/// One layer's KV cache and who owns which block.
#[derive(Debug)]
pub struct PagedKv<'a> {
    /// Keys and values.
    pub cache: &'a LayerCache,
    /// Block ids: sequences x `blocks_per_row`. Ids must lie inside the cache; the block pool sees to that.
    pub block_table: CudaView<'a, i32>,
    /// Blocks of a row of the table: the longest context.
    pub blocks_per_row: usize,
}

/// Attention of one query token a sequence.
#[derive(Debug)]
pub struct PagedDecode<'a> {
    /// Batch rows of query heads x dim.
    pub out: CudaViewMut<'a, bf16>,
    /// Batch rows of `q_stride`, the query heads first: the fused QKV rows as [`Kernels::rope_kv`] leaves them for the cache's format.
    pub q: CudaView<'a, bf16>,
    /// Values from one row of `q` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The step's plan, padded to the capacity of the graph.
    pub items: CudaView<'a, DecodeItem>,
    /// Who reads the pieces: one a sequence.
    pub readers: CudaView<'a, DecodeReader>,
    /// How the pieces were cut.
    pub policy: SplitPolicy,
    /// Shared by all layers.
    pub scratch: &'a mut DecodeScratch,
    /// How the layer attends.
    pub spec: AttentionSpec,
}

/// Causal attention of prefill chunks whose K and V are in the cache.
#[derive(Debug)]
pub struct PagedPrefill<'a> {
    /// Rows of query heads x dim.
    pub out: CudaViewMut<'a, bf16>,
    /// Rows of `q_stride`, the query heads first: the fused QKV rows as [`Kernels::rope_kv`] leaves them for the cache's format.
    pub q: CudaView<'a, bf16>,
    /// Values from one row of `q` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The step's plan, cut as [`PrefillKernel::split`] says.
    pub tiles: CudaView<'a, PrefillTile>,
    /// Shared by all layers; made for at least as many pieces as the plan has.
    pub scratch: &'a mut PrefillScratch,
    /// How the layer attends.
    pub spec: AttentionSpec,
}

/// Where pieces of split sequences wait for their merge.
#[derive(Debug)]
pub struct DecodeScratch {
    partial_out: CudaSlice<f32>,
    partial_sum: CudaSlice<f32>,
    // Zero before and after every launch: the block that merges puts its ticket counter back.
    tickets: CudaSlice<u32>,
}

/// Where pieces of cut prefill tiles wait for their merge.
#[derive(Debug)]
pub struct PrefillScratch {
    partial_out: CudaSlice<f32>,
    partial_sum: CudaSlice<f32>,
    // Zero before and after every launch.
    tickets: CudaSlice<u32>,
}

impl PrefillScratch {
    /// Allocates for `n_pieces` ([`crate::plan::prefill_pieces_max`]); for none, next to nothing.
    pub fn new(stream: &Arc<CudaStream>, n_pieces: usize, heads: Heads) -> Result<Self, KernelError> {
        let n_rows = n_pieces.max(1) * heads.n_kv * PREFILL_TILE_ROWS;
        let failed = KernelError::driver("allocate prefill scratch");
        Ok(Self {
            partial_out: stream.alloc_zeros(n_rows * heads.dim).map_err(&failed)?,
            partial_sum: stream.alloc_zeros(n_rows * 2).map_err(&failed)?,
            tickets: stream.alloc_zeros(n_pieces.max(1) * heads.n_kv).map_err(&failed)?,
        })
    }
}

impl DecodeScratch {
    /// Allocates.
    pub fn new(stream: &Arc<CudaStream>, size: ScratchSize) -> Result<Self, KernelError> {
        let failed = KernelError::driver("allocate decode scratch");
        Ok(Self {
            partial_out: stream.alloc_zeros(size.rows() * size.heads.dim).map_err(&failed)?,
            partial_sum: stream.alloc_zeros(size.rows() * 2).map_err(&failed)?,
            tickets: stream.alloc_zeros(size.n_sequences * size.heads.n_kv).map_err(&failed)?,
        })
    }
}

impl Kernels {
    /// Attends one token a sequence. Rows without a piece keep what `out` held.
    pub fn paged_decode(&self, mut op: PagedDecode<'_>) -> Result<(), KernelError> {
        const OP: &str = "paged_decode";
        let heads = op.spec.heads;
        let config = launch::paged_decode(op.items.len(), op.spec, op.policy, op.kv.cache.format())?;
        let n_rows = check_rows(OP, (op.out.len(), op.q.len(), op.q_stride), heads)?;
        check_kv(OP, &op.kv, heads)?;
        check_room(OP, "the block table", op.kv.block_table.len(), n_rows * op.kv.blocks_per_row)?;
        check_room(OP, "the scratch's tickets", op.scratch.tickets.len(), n_rows * heads.n_kv)?;
        check_len(OP, "the readers", op.readers.len(), n_rows)?;
        let slot_rows = op.policy.slot_rows(heads);
        check_room(OP, "the scratch", op.scratch.partial_sum.len(), op.items.len() * heads.n_kv * slot_rows * 2)?;
        let launch = self.functions.launch(OP, config).write(&mut op.out).read(&op.q);
        let launch = op.kv.cache.read_by(launch).read(&op.kv.block_table).read(&op.items);
        let launch = launch.read(&op.readers).write(&mut op.scratch.partial_out.as_view_mut());
        let launch = launch.write(&mut op.scratch.partial_sum.as_view_mut());
        let launch = launch.write(&mut op.scratch.tickets.as_view_mut()).int(op.items.len()).int(slot_rows);
        let launch = launch.int(op.q_stride).int(op.kv.blocks_per_row).int(heads.n_kv).int(heads.group());
        with_spec(launch, op.spec).start()
    }

    /// Attends the rows of prefill chunks, by the faster kernel of the chip. Rows without a tile keep what `out` held.
    pub fn paged_prefill(&self, op: PagedPrefill<'_>) -> Result<(), KernelError> {
        self.paged_prefill_by(op, PrefillKernel::for_device(self.properties()))
    }

    /// The same by a given kernel, which the chip must have.
    pub fn paged_prefill_by(&self, op: PagedPrefill<'_>, kernel: PrefillKernel) -> Result<(), KernelError> {
        let heads = op.spec.heads;
        if matches!(kernel, PrefillKernel::Wgmma { .. }) && self.properties().capability != (9, 0) {
            return Err(launch::refused(PREFILL, "wgmma needs compute capability 9.0".to_owned()));
        }
        let config = launch::paged_prefill(op.tiles.len(), op.spec, kernel, op.kv.cache.format())?;
        let n_rows = check_rows(PREFILL, (op.out.len(), op.q.len(), op.q_stride), heads)?;
        check_kv(PREFILL, &op.kv, heads)?;
        match kernel {
            PrefillKernel::Mma => self.start_prefill_mma(op, config),
            PrefillKernel::Wgmma { .. } => self.start_prefill_wgmma(op, config, n_rows),
        }
    }

    fn start_prefill_mma(&self, mut op: PagedPrefill<'_>, config: LaunchConfig) -> Result<(), KernelError> {
        let heads = op.spec.heads;
        let launch = self.functions.launch(PREFILL, config).write(&mut op.out).read(&op.q);
        let launch = op.kv.cache.read_by(launch).read(&op.kv.block_table).read(&op.tiles);
        let launch = launch.int(op.q_stride).int(op.kv.blocks_per_row).int(heads.n_q).int(heads.n_kv);
        with_spec(launch, op.spec).start()
    }

    fn start_prefill_wgmma(
        &self,
        mut op: PagedPrefill<'_>,
        config: LaunchConfig,
        n_rows: usize,
    ) -> Result<(), KernelError> {
        let heads = op.spec.heads;
        let address = |view: &CudaView<'_, bf16>| view.device_ptr(self.device().stream()).0;
        // A tile's queries: of its tokens the heads that share a KV head.
        let q = BoxedTensor {
            address: address(&op.q),
            sizes: [heads.dim, heads.n_q, n_rows],
            strides: [1, heads.dim, op.q_stride],
            box_sizes: [64, heads.group(), PREFILL_TILE_ROWS / heads.group()],
            fetches: Fetches::Pair,
        };
        // One KV block of one head.
        let blocks = |cache: &CudaSlice<bf16>| BoxedTensor {
            address: address(&cache.as_view()),
            sizes: [heads.dim, cache.len() / heads.dim],
            strides: [1, heads.dim],
            box_sizes: [64, BLOCK_SIZE],
            fetches: Fetches::Pair,
        };
        let q = TensorMap::new(PREFILL, &q)?;
        let launch = self.functions.launch(PREFILL, config).map(&q);
        let maps;
        let launch = match op.kv.cache {
            // Boxes of the copy engine are as wide as products want them: of bf16.
            LayerCache::Bf16 { k, v } => {
                maps = (TensorMap::new(PREFILL, &blocks(k))?, TensorMap::new(PREFILL, &blocks(v))?);
                launch.map(&maps.0).map(&maps.1).read_optional::<f32>(None)
            }
            cache @ LayerCache::E4m3 { .. } => cache.read_by(launch),
        };
        let launch = launch.write(&mut op.out).read(&op.kv.block_table).read(&op.tiles);
        let launch = launch.write(&mut op.scratch.partial_out.as_view_mut());
        let launch = launch.write(&mut op.scratch.partial_sum.as_view_mut());
        let launch = launch.write(&mut op.scratch.tickets.as_view_mut());
        let launch = launch.int(op.kv.blocks_per_row).int(op.tiles.len()).int(heads.n_q).int(heads.n_kv);
        with_spec(launch, op.spec).start()
    }
}

/// The last arguments of all attention kernels.
fn with_spec(launch: Launch<'_>, spec: AttentionSpec) -> Launch<'_> {
    let launch = launch.float(spec.scale).int(spec.heads.dim).int(spec.window_tokens());
    launch.float(spec.softcap.unwrap_or(0.0))
}

/// Rows of `out`, which `q` must have too.
fn check_rows(op: &'static str, (out, q, q_stride): (usize, usize, usize), heads: Heads) -> Result<usize, KernelError> {
    let width = heads.n_q * heads.dim;
    let n_rows = out / width;
    check_len(op, "out", out, n_rows * width)?;
    check_room(op, "a row of q", q_stride, width)?;
    if !q_stride.is_multiple_of(8) {
        return Err(launch::refused(op, format!("q_stride {q_stride} is not a multiple of 8")));
    }
    check_len(op, "q", q, n_rows * q_stride)?;
    Ok(n_rows)
}

fn check_kv(op: &'static str, kv: &PagedKv<'_>, heads: Heads) -> Result<(), KernelError> {
    kv.cache.check(op, heads)?;
    check_room(op, "the block table", kv.block_table.len(), kv.blocks_per_row.max(1))
}
