//! Attention over the paged KV cache: planned decode pieces and prefill tiles (`plan`) on the device, and the scratch that
//! split decoding needs. Checks buffers, launches; the cache belongs to the caller.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use half::bf16;

use crate::{
    KernelError, Kernels, check_len, check_room,
    launch::{self, Heads, PrefillKernel},
    plan::{DecodeItem, PrefillTile},
};

/// One layer's KV cache and who owns which block.
#[derive(Debug)]
pub struct PagedKv<'a> {
    /// Keys: blocks x KV heads x 16 x dim.
    pub k_cache: CudaView<'a, bf16>,
    /// Values, the same shape.
    pub v_cache: CudaView<'a, bf16>,
    /// Block ids: sequences x `blocks_per_row`. Ids must lie inside the caches; the block pool sees to that.
    pub block_table: CudaView<'a, i32>,
    /// Blocks of a row of the table: the longest context.
    pub blocks_per_row: usize,
}

/// Attention of one query token a sequence.
#[derive(Debug)]
pub struct PagedDecode<'a> {
    /// Batch rows of query heads x dim.
    pub out: CudaViewMut<'a, bf16>,
    /// Batch rows of `q_stride`, the query heads first: the fused QKV rows.
    pub q: CudaView<'a, bf16>,
    /// Values from one row of `q` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The step's plan, padded to the capacity of the graph.
    pub items: CudaView<'a, DecodeItem>,
    /// Shared by all layers.
    pub scratch: &'a mut DecodeScratch,
    /// The rank's heads.
    pub heads: Heads,
    /// Usually 1 / sqrt(dim).
    pub scale: f32,
}

/// Causal attention of prefill chunks whose K and V are in the cache.
#[derive(Debug)]
pub struct PagedPrefill<'a> {
    /// Rows of query heads x dim.
    pub out: CudaViewMut<'a, bf16>,
    /// Rows of `q_stride`, the query heads first: the fused QKV rows.
    pub q: CudaView<'a, bf16>,
    /// Values from one row of `q` to the next.
    pub q_stride: usize,
    /// The layer's cache.
    pub kv: PagedKv<'a>,
    /// The step's plan.
    pub tiles: CudaView<'a, PrefillTile>,
    /// The rank's heads.
    pub heads: Heads,
    /// Usually 1 / sqrt(dim).
    pub scale: f32,
}

/// Where pieces of split sequences wait for their merge.
#[derive(Debug)]
pub struct DecodeScratch {
    partial_out: CudaSlice<f32>,
    partial_sum: CudaSlice<f32>,
    // Zero before and after every launch: the block that merges puts its ticket counter back.
    tickets: CudaSlice<u32>,
}

/// What a scratch is made for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ScratchSize {
    /// Sequences of the largest batch.
    pub n_sequences: usize,
    /// Pieces of the largest plan (`plan::decode_items_max`).
    pub n_items: usize,
    /// The rank's heads.
    pub heads: Heads,
}

impl ScratchSize {
    /// Bytes on the device, for the memory plan.
    pub fn bytes(self) -> usize {
        let Self { n_sequences, n_items, heads } = self;
        4 * (n_items * heads.n_q * (heads.dim + 2) + n_sequences * heads.n_kv)
    }
}

impl DecodeScratch {
    /// Allocates.
    pub fn new(stream: &Arc<CudaStream>, size: ScratchSize) -> Result<Self, KernelError> {
        let ScratchSize { n_sequences, n_items, heads } = size;
        let failed = KernelError::driver("allocate decode scratch");
        Ok(Self {
            partial_out: stream.alloc_zeros(n_items * heads.n_q * heads.dim).map_err(&failed)?,
            partial_sum: stream.alloc_zeros(n_items * heads.n_q * 2).map_err(&failed)?,
            tickets: stream.alloc_zeros(n_sequences * heads.n_kv).map_err(&failed)?,
        })
    }
}

impl Kernels {
    /// Attends one token a sequence. Rows without a piece keep what `out` held.
    pub fn paged_decode(&self, mut op: PagedDecode<'_>) -> Result<(), KernelError> {
        const OP: &str = "paged_decode";
        let heads = op.heads;
        let config = launch::paged_decode(op.items.len(), heads)?;
        let n_rows = check_rows(OP, (op.out.len(), op.q.len(), op.q_stride), heads)?;
        check_kv(OP, &op.kv, heads)?;
        check_room(OP, "the block table", op.kv.block_table.len(), n_rows * op.kv.blocks_per_row)?;
        check_room(OP, "the scratch's tickets", op.scratch.tickets.len(), n_rows * heads.n_kv)?;
        check_room(OP, "the scratch", op.scratch.partial_sum.len(), op.items.len() * heads.n_q * 2)?;
        let launch = self.functions.launch(OP, config).write(&mut op.out).read(&op.q);
        let launch = launch.read(&op.kv.k_cache).read(&op.kv.v_cache).read(&op.kv.block_table).read(&op.items);
        let launch = launch.write(&mut op.scratch.partial_out.as_view_mut());
        let launch = launch.write(&mut op.scratch.partial_sum.as_view_mut());
        let launch = launch.write(&mut op.scratch.tickets.as_view_mut());
        let launch = launch.int(op.q_stride).int(op.kv.blocks_per_row).int(heads.n_q).int(heads.n_kv);
        launch.float(op.scale).start()
    }

    /// Attends the rows of prefill chunks, by the faster kernel of the chip. Rows without a tile keep what `out` held.
    pub fn paged_prefill(&self, op: PagedPrefill<'_>) -> Result<(), KernelError> {
        self.paged_prefill_by(op, PrefillKernel::for_capability(self.properties().capability))
    }

    /// The same by a given kernel, which the chip must have.
    pub fn paged_prefill_by(&self, mut op: PagedPrefill<'_>, kernel: PrefillKernel) -> Result<(), KernelError> {
        const OP: &str = "paged_prefill";
        let heads = op.heads;
        if kernel == PrefillKernel::Wgmma && self.properties().capability != (9, 0) {
            return Err(launch::refused(OP, "wgmma needs compute capability 9.0".to_owned()));
        }
        let config = launch::paged_prefill(op.tiles.len(), heads, kernel)?;
        check_rows(OP, (op.out.len(), op.q.len(), op.q_stride), heads)?;
        check_kv(OP, &op.kv, heads)?;
        let launch = self.functions.launch(OP, config).write(&mut op.out).read(&op.q);
        let launch = launch.read(&op.kv.k_cache).read(&op.kv.v_cache).read(&op.kv.block_table).read(&op.tiles);
        let launch = launch.int(op.q_stride).int(op.kv.blocks_per_row).int(heads.n_q).int(heads.n_kv);
        launch.float(op.scale).start()
    }
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
    check_room(op, "k_cache", kv.k_cache.len(), heads.block_values())?;
    check_len(op, "v_cache", kv.v_cache.len(), kv.k_cache.len())?;
    check_room(op, "the block table", kv.block_table.len(), kv.blocks_per_row.max(1))
}
