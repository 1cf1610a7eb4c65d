//! What a model on the GPU needs besides its weights: taken at its start, beside their way there.

use stoker_fit::gpu::Capacity;
use stoker_kernels::{CudaSlice, Device, KernelError, cache::LayerCache, pointwise::Rotary, ranks::Exchange};

use super::{buffers::Buffers, shape::ModelShape};
use crate::model::RopeTable;

/// What a model on the GPU needs besides its weights.
#[derive(Debug)]
pub(super) struct Memory {
    /// Of each set that layers turn by.
    pub(super) angles: Vec<Angles>,
    /// Per layer.
    pub(super) cache: Vec<LayerCache>,
    pub(super) buffers: Buffers,
    /// With the other ranks, if there are some.
    pub(super) exchange: Option<Exchange>,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemorySize<'a> {
    pub(super) capacity: &'a Capacity,
    /// Of the cache.
    pub(super) n_blocks: usize,
    pub(super) others: Others,
}

/// Whether the other ranks of a model are there.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Others {
    There,
    /// The rank computes its share alone: for measuring. What it adds up has one term.
    Away,
}

impl Memory {
    /// Allocates all of it, and brings angles over.
    pub(super) fn new(
        device: &Device,
        shape: &ModelShape,
        rope_sets: &[RopeTable],
        size: MemorySize<'_>,
    ) -> Result<Self, KernelError> {
        let MemorySize { capacity, n_blocks, others } = size;
        let layer_values = n_blocks * shape.heads.block_values();
        let (rank, n_ranks) = if others == Others::There { (shape.rank.idx, shape.rank.of) } else { (0, 1) };
        let exchange = capacity.exchange(&shape.sizes(), n_ranks).map(|size| Exchange::new(device, size, rank));
        let layer_cache = |_| LayerCache::zeros(device, shape.kv_format, layer_values, shape.heads);
        Ok(Self {
            angles: rope_sets.iter().map(|rope| Angles::new(device, rope)).collect::<Result<_, _>>()?,
            cache: (0..shape.n_layers()).map(layer_cache).collect::<Result<_, KernelError>>()?,
            buffers: Buffers::new(device, shape, capacity)?,
            exchange: exchange.transpose()?,
        })
    }
}

/// What heads turn by.
#[derive(Debug)]
pub(super) struct Angles {
    /// Positions x 2 pairs: cosines, then sines.
    table: CudaSlice<f32>,
    n_pairs: usize,
}

impl Angles {
    fn new(device: &Device, rope: &RopeTable) -> Result<Self, KernelError> {
        let rows = rope.cos.chunks_exact(rope.n_pairs).zip(rope.sin.chunks_exact(rope.n_pairs));
        let table: Vec<f32> = rows.flat_map(|(cos, sin)| cos.iter().chain(sin)).copied().collect();
        Ok(Self { table: device.holding(&table)?, n_pairs: rope.n_pairs })
    }

    pub(super) fn rotary(&self) -> Rotary<'_> {
        Rotary { angles: self.table.as_view(), n_pairs: self.n_pairs }
    }
}
