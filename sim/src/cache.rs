//! A prefix cache: which blocks of prompts are there, by name. Blocks that a sequence holds stay; of the others the ones not used for
//! longest go first. Knows no sizes: whoever owns it says how many there is room for.

use std::collections::{BTreeMap, HashMap};

/// See the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixCache {
    blocks: HashMap<u64, Block>,
    /// Blocks that nobody holds, by when they were used last.
    idle: BTreeMap<u64, u64>,
    clock: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    holders: u32,
    used: u64,
}

impl PrefixCache {
    /// How many of the first blocks are there.
    pub(crate) fn held(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.blocks.contains_key(block)).count()
    }

    /// A sequence has all of them.
    pub(crate) fn hold(&mut self, blocks: &[u64]) {
        for name in blocks {
            let block = self.blocks.entry(*name).or_default();
            if block.holders == 0 {
                self.idle.remove(&block.used);
            }
            block.holders += 1;
        }
    }

    /// A sequence that held all of them is gone.
    pub(crate) fn release(&mut self, blocks: &[u64]) {
        // The end first: of a chain the end must not outlive its beginning.
        for name in blocks.iter().rev() {
            let block = self.blocks.get_mut(name).expect("a block that is held is there");
            block.holders -= 1;
            if block.holders == 0 {
                self.clock += 1;
                block.used = self.clock;
                self.idle.insert(self.clock, *name);
            }
        }
    }

    /// Blocks that nobody holds.
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// There is room for so many blocks that nobody holds; those that are gone.
    pub(crate) fn shrink(&mut self, n_idle_max: usize) -> Vec<u64> {
        let mut gone = Vec::new();
        while self.idle.len() > n_idle_max {
            let Some((_, oldest)) = self.idle.pop_first() else { break };
            self.blocks.remove(&oldest);
            gone.push(oldest);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(cache: &mut PrefixCache, blocks: &[u64], n_max: usize) {
        cache.hold(blocks);
        cache.release(blocks);
        cache.shrink(n_max);
    }

    #[test]
    fn it_forgets_what_was_not_used_for_longest_and_ends_before_beginnings() {
        let mut cache = PrefixCache::default();
        touch(&mut cache, &[1, 2, 3], 4);
        touch(&mut cache, &[1, 4], 4);
        assert_eq!((cache.held(&[1, 2, 3]), cache.held(&[1, 4])), (3, 2));
        touch(&mut cache, &[5], 4);
        assert_eq!((cache.held(&[1, 2, 3]), cache.held(&[1, 4])), (2, 2));
    }

    #[test]
    fn what_a_sequence_holds_stays_until_the_last_holder_is_gone() {
        let mut cache = PrefixCache::default();
        cache.hold(&[1, 2]);
        cache.hold(&[1, 3]);
        cache.release(&[1, 2]);
        cache.shrink(0);
        assert_eq!((cache.held(&[1, 2]), cache.held(&[1, 3])), (1, 2));
        cache.release(&[1, 3]);
        cache.shrink(1);
        assert_eq!((cache.held(&[1]), cache.held(&[1, 3])), (1, 1));
        cache.shrink(0);
        assert!(cache.blocks.is_empty() && cache.idle.is_empty());
    }
}
