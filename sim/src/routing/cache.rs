//! KV blocks that a replica keeps of prompts that were there. Knows no sizes of blocks.

use crate::cache::PrefixCache;

/// Blocks by their hash, of which the ones not used for longest go first.
#[derive(Debug)]
pub struct Cache {
    blocks: PrefixCache,
    n_max: usize,
}

impl Cache {
    /// An empty one, with room for so many.
    pub fn of(n_max: usize) -> Self {
        Self { blocks: PrefixCache::default(), n_max }
    }

    /// How many of the first blocks are there.
    pub fn held(&self, blocks: &[u64]) -> usize {
        self.blocks.held(blocks)
    }

    /// All of them are used; those that had to go.
    pub fn touch(&mut self, blocks: &[u64]) -> Vec<u64> {
        self.blocks.hold(blocks);
        self.blocks.release(blocks);
        self.blocks.shrink(self.n_max)
    }
}
