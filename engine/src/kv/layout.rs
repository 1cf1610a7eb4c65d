//! How the KV cache lies in memory. Pure arithmetic; the buffer itself belongs to the back end.
//!
//! ```text
//! one layer's keys (values alike):   block 0            block 1
//!                                  [ head 0 | head 1 ] [ head 0 | head 1 ] ...
//! inside one head:                 16 tokens x head_dim, token-major
//! ```
//! A head's 16 tokens are contiguous, so attention reads one block of one head as a single run.

use super::BLOCK_TOKENS;

/// Shape of the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvLayout {
    /// Decoder layers.
    pub n_layers: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Numbers in one head of one token.
    pub head_dim: usize,
    /// Blocks in all.
    pub n_blocks: usize,
    /// Number format of keys and values.
    pub dtype: KvDtype,
}

/// Number format of keys and values. Sums over them are in f32 either way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KvDtype {
    /// For weights that are more exact than bf16.
    F32,
    /// Half the memory; keys and values are rounded once, when they are stored.
    Bf16,
}

impl KvDtype {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl KvLayout {
    /// Numbers of one block in one layer, keys or values.
    pub fn block_values(&self) -> usize {
        self.n_kv_heads * BLOCK_TOKENS * self.head_dim
    }

    /// Numbers of one layer, keys or values.
    pub fn layer_values(&self) -> usize {
        self.n_blocks * self.block_values()
    }

    /// Bytes one token takes: keys and values of all layers. Saturates, so that absurd sizes are refused as too large.
    pub fn bytes_per_token(&self) -> u64 {
        let sizes = [self.n_layers, self.n_kv_heads, self.head_dim, self.dtype.bytes()];
        sizes.iter().fold(2, |bytes: u64, size| bytes.saturating_mul(*size as u64))
    }

    /// Bytes of the whole cache.
    pub fn bytes(&self) -> u64 {
        self.bytes_per_token() * (self.n_blocks * BLOCK_TOKENS) as u64
    }

    /// Where one head of one slot begins within a layer; a slot is `block x 16 + offset`.
    pub fn offset(&self, slot: usize, kv_head: usize) -> usize {
        let (block, token) = (slot / BLOCK_TOKENS, slot % BLOCK_TOKENS);
        block * self.block_values() + (kv_head * BLOCK_TOKENS + token) * self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: KvLayout = KvLayout { n_layers: 3, n_kv_heads: 2, head_dim: 8, n_blocks: 5, dtype: KvDtype::F32 };

    #[test]
    fn every_slot_and_head_has_its_own_place() {
        let mut starts: Vec<usize> =
            (0..5 * BLOCK_TOKENS).flat_map(|slot| (0..2).map(move |head| LAYOUT.offset(slot, head))).collect();
        starts.sort_unstable();
        let expected: Vec<usize> = (0..LAYOUT.layer_values()).step_by(8).collect();
        assert_eq!(starts, expected);
    }

    #[test]
    fn the_cache_is_tokens_times_bytes_per_token() {
        assert_eq!(LAYOUT.bytes_per_token(), 2 * 3 * 2 * 8 * 4);
        assert_eq!(LAYOUT.bytes(), (3 * 2 * LAYOUT.layer_values() * 4) as u64);
    }
}
