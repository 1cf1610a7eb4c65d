//! The KV cache in memory: one allocation a layer for keys and one for values, in f32 or bf16. Says where nothing is;
//! [`KvLayout`] does.

use half::bf16;

use crate::kv::{KvDtype, KvLayout};

/// Keys and values of all layers, as [`KvLayout`] draws them.
#[derive(Debug)]
pub struct CpuCache {
    layout: KvLayout,
    layers: Layers,
}

#[derive(Debug)]
enum Layers {
    F32(Vec<KvPair<Vec<f32>>>),
    /// As bits, because the system's zeroed memory is asked for only for plain integers and floats.
    Bf16(Vec<KvPair<Vec<u16>>>),
}

/// Keys and values of one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct KvPair<T> {
    pub(super) keys: T,
    pub(super) values: T,
}

/// One layer's numbers in their format.
#[derive(Clone, Copy, Debug)]
pub(super) enum CachedLayer<'a> {
    F32(KvPair<&'a [f32]>),
    Bf16(KvPair<&'a [bf16]>),
}

/// A number of the cache.
pub(super) trait KvNumber: Copy + Send + Sync {
    fn rounded(exact: f32) -> Self;
    fn widened(self) -> f32;
}

impl CpuCache {
    /// An empty cache. Zeroed memory from the system is not resident before it is written, so blocks cost memory when
    /// they are first used.
    pub(super) fn new(layout: KvLayout) -> Self {
        let n = layout.layer_values();
        let layers = match layout.dtype {
            KvDtype::F32 => Layers::F32((0..layout.n_layers).map(|_| KvPair::new(|| vec![0.0; n])).collect()),
            KvDtype::Bf16 => Layers::Bf16((0..layout.n_layers).map(|_| KvPair::new(|| vec![0; n])).collect()),
        };
        Self { layout, layers }
    }

    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(super) fn layer(&self, layer: usize) -> CachedLayer<'_> {
        match &self.layers {
            Layers::F32(layers) => CachedLayer::F32(layers[layer].map(Vec::as_slice)),
            Layers::Bf16(layers) => CachedLayer::Bf16(layers[layer].map(|bits| bytemuck::cast_slice(bits))),
        }
    }

    /// Writes one token's keys and values of all heads into its slot.
    pub(super) fn store(&mut self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        let Self { layout, layers } = self;
        match layers {
            Layers::F32(layers) => {
                let KvPair { keys: all_keys, values: all_values } = &mut layers[layer];
                scatter(all_keys, keys, slot, layout);
                scatter(all_values, values, slot, layout);
            }
            Layers::Bf16(layers) => {
                let KvPair { keys: all_keys, values: all_values } = &mut layers[layer];
                scatter::<bf16>(bytemuck::cast_slice_mut(all_keys), keys, slot, layout);
                scatter::<bf16>(bytemuck::cast_slice_mut(all_values), values, slot, layout);
            }
        }
    }
}

impl<T> KvPair<T> {
    fn new(make: impl Fn() -> T) -> Self {
        Self { keys: make(), values: make() }
    }

    fn map<'a, U>(&'a self, view: impl Fn(&'a T) -> U) -> KvPair<U> {
        KvPair { keys: view(&self.keys), values: view(&self.values) }
    }
}

impl KvNumber for f32 {
    fn rounded(exact: f32) -> Self {
        exact
    }

    fn widened(self) -> f32 {
        self
    }
}

impl KvNumber for bf16 {
    fn rounded(exact: f32) -> Self {
        Self::from_f32(exact)
    }

    /// Exact: bf16 is the upper half of an f32.
    fn widened(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

fn scatter<T: KvNumber>(cache: &mut [T], row: &[f32], slot: usize, layout: &KvLayout) {
    for (kv_head, values) in row.chunks_exact(layout.head_dim).enumerate() {
        let cached = &mut cache[layout.offset(slot, kv_head)..][..layout.head_dim];
        for (cached, value) in cached.iter_mut().zip(values) {
            *cached = T::rounded(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(dtype: KvDtype, exact: f32) -> (f32, f32) {
        let layout = KvLayout { n_layers: 2, n_kv_heads: 2, head_dim: 2, n_blocks: 3, dtype };
        let mut cache = CpuCache::new(layout);
        cache.store(1, 33, &[0.0, 0.0, exact, 0.0], &[0.0, 0.0, 0.0, -exact]);
        let at = layout.offset(33, 1);
        match cache.layer(1) {
            CachedLayer::F32(KvPair { keys, values }) => (keys[at], values[at + 1]),
            CachedLayer::Bf16(KvPair { keys, values }) => (keys[at].widened(), values[at + 1].widened()),
        }
    }

    #[test]
    fn a_bf16_cache_rounds_to_the_nearest_and_an_f32_cache_does_not_round() {
        let exact = 1.0 + 3.0 / 512.0;
        assert_eq!(stored(KvDtype::F32, exact), (exact, -exact));
        let nearest = 1.0 + 1.0 / 128.0;
        assert_eq!(stored(KvDtype::Bf16, exact), (nearest, -nearest));
    }
}
