//! The KV cache in memory: one allocation a layer for keys and one for values, in f32 or bf16. Says where nothing is;
//! [`KvLayout`] does.

use super::kernel::{CachedBytes, rounded};
use crate::kv::{BlockCopy, KvDtype, KvLayout};

/// Bytes of a cache line, at which a layer begins: then no register of a head lies in two.
const LINE: usize = 64;

/// Keys and values of all layers, as [`KvLayout`] draws them.
#[derive(Debug)]
pub struct CpuCache {
    layout: KvLayout,
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    keys: Lines,
    values: Lines,
}

/// Bytes from a line's beginning on.
#[derive(Debug)]
struct Lines {
    bytes: Vec<u8>,
    start: usize,
}

impl CpuCache {
    /// An empty cache. Zeroed memory from the system is not resident before it is written, so blocks cost memory when
    /// they are first used.
    pub fn new(layout: KvLayout) -> Self {
        let n_bytes = layout.layer_values() * layout.dtype.bytes();
        let layer = |_| Layer { keys: Lines::zeroed(n_bytes), values: Lines::zeroed(n_bytes) };
        Self { layout, layers: (0..layout.n_layers).map(layer).collect() }
    }

    pub(super) fn layer(&self, layer: usize) -> CachedBytes<'_> {
        let Layer { keys, values } = &self.layers[layer];
        CachedBytes { keys: keys.get(), values: values.get(), layout: self.layout }
    }

    /// Writes one token's keys and values of all heads into its slot.
    pub(super) fn store(&mut self, layer: usize, slot: usize, keys: &[f32], values: &[f32]) {
        let Layer { keys: cached_keys, values: cached_values } = &mut self.layers[layer];
        scatter(cached_keys.get_mut(), keys, slot, &self.layout);
        scatter(cached_values.get_mut(), values, slot, &self.layout);
    }
}

impl CpuCache {
    /// Copies blocks in every layer, one after the other.
    pub(crate) fn copy(&mut self, copies: &[BlockCopy]) {
        let n_bytes = self.layout.block_values() * self.layout.dtype.bytes();
        for Layer { keys, values } in &mut self.layers {
            for BlockCopy { from, to } in copies {
                let [from, to] = [from, to].map(|block| block.0 as usize * n_bytes);
                for lines in [&mut *keys, &mut *values] {
                    lines.get_mut().copy_within(from..from + n_bytes, to);
                }
            }
        }
    }
}

impl Lines {
    /// Asks for plain zeroed bytes: those come fresh from the system, while aligned ones would be written once.
    fn zeroed(n_bytes: usize) -> Self {
        let bytes = vec![0; n_bytes + LINE];
        let start = bytes.as_ptr().addr().next_multiple_of(LINE) - bytes.as_ptr().addr();
        Self { bytes, start }
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn get_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

fn scatter(cached: &mut [u8], row: &[f32], slot: usize, layout: &KvLayout) {
    for (kv_head, values) in row.chunks_exact(layout.head_dim).enumerate() {
        let cached = &mut cached[layout.offset(slot, kv_head) * layout.dtype.bytes()..];
        match layout.dtype {
            KvDtype::F32 => write(cached, values, f32::to_le_bytes),
            KvDtype::Bf16 => write(cached, values, |value| rounded(value).to_le_bytes()),
        }
    }
}

fn write<const N: usize>(cached: &mut [u8], values: &[f32], stored: impl Fn(f32) -> [u8; N]) {
    for (cached, value) in cached.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *cached = stored(*value);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::kv::BlockId;

    fn stored(dtype: KvDtype, exact: f32) -> (f32, f32) {
        let layout = KvLayout { n_layers: 2, n_kv_heads: 2, head_dim: 2, n_blocks: 3, dtype };
        let mut cache = CpuCache::new(layout);
        cache.store(1, 33, &[0.0, 0.0, exact, 0.0], &[0.0, 0.0, 0.0, -exact]);
        let CachedBytes { keys, values, .. } = cache.layer(1);
        let at = layout.offset(33, 1) * dtype.bytes();
        let number = |bytes: &[u8]| match dtype {
            KvDtype::F32 => f32::from_le_bytes(bytes[..4].try_into().unwrap()),
            KvDtype::Bf16 => bf16::from_le_bytes(bytes[..2].try_into().unwrap()).to_f32(),
        };
        (number(&keys[at..]), number(&values[at + dtype.bytes()..]))
    }

    #[test]
    fn a_bf16_cache_rounds_to_the_nearest_and_an_f32_cache_does_not_round() {
        let exact = 1.0 + 3.0 / 512.0;
        assert_eq!(stored(KvDtype::F32, exact), (exact, -exact));
        let nearest = 1.0 + 1.0 / 128.0;
        assert_eq!(stored(KvDtype::Bf16, exact), (nearest, -nearest));
    }

    #[test]
    fn a_copied_block_holds_the_same_in_every_layer_and_leaves_its_neighbours() {
        let layout = KvLayout { n_layers: 2, n_kv_heads: 2, head_dim: 2, n_blocks: 3, dtype: KvDtype::Bf16 };
        let mut cache = CpuCache::new(layout);
        for (layer, slot) in (0..2).flat_map(|layer| (0..48).map(move |slot| (layer, slot))) {
            let number = (100 * layer + slot) as f32;
            cache.store(layer, slot, &[number; 4], &[-number; 4]);
        }
        let blocks = |cache: &CpuCache, layer| {
            let CachedBytes { keys, values, .. } = cache.layer(layer);
            let n_bytes = layout.block_values() * 2;
            let block = |idx: usize| [keys, values].map(|bytes| bytes[idx * n_bytes..][..n_bytes].to_vec());
            [0, 1, 2].map(block)
        };
        let before = [0, 1].map(|layer| blocks(&cache, layer));
        cache.copy(&[BlockCopy { from: BlockId(0), to: BlockId(2) }]);
        let after = [0, 1].map(|layer| blocks(&cache, layer));
        assert_eq!(after, before.clone().map(|[first, second, _]| [first.clone(), second, first]));
        assert_ne!(after, before);
    }

    #[test]
    fn a_layer_begins_at_a_cache_line() {
        let layout = KvLayout { n_layers: 3, n_kv_heads: 1, head_dim: 3, n_blocks: 1, dtype: KvDtype::Bf16 };
        let cache = CpuCache::new(layout);
        assert!((0..3).all(|layer| cache.layer(layer).keys.as_ptr().addr().is_multiple_of(LINE)));
    }
}
