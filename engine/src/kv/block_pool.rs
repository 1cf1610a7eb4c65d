//! The pool of KV blocks: hands out free ones, counts references, remembers what unreferenced ones hold.
//!
//! ```text
//!          take                     release, without a name
//! free ───────────► referenced ───────────────────────────► free
//!                     ▲    │ release, with a name
//!               share │    ▼
//!                     cached ── take, when nothing is free: the least recently released is evicted
//! ```
//! It never looks inside a block and never decides who should give one up; that is the scheduler's.

use std::collections::HashMap;

use super::{
    BlockHash,
    lru::Lru,
    marks::{Marks, PrefixChange},
};

/// Index of a KV block.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockId(pub u32);

/// What one block holds, to be copied into another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockCopy {
    /// Which holds it.
    pub from: BlockId,
    /// Which nobody but its one holder reads.
    pub to: BlockId,
}

/// Reference-counted blocks `0..n_total`.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockPool {
    refs: Vec<u32>,
    /// Last freed is first taken: memory that was touched before is used again before fresh memory is.
    free: Vec<BlockId>,
    /// Per block: the name of what it holds.
    names: Vec<Option<BlockHash>>,
    /// The block of each name.
    named: HashMap<BlockHash, BlockId>,
    /// Named blocks without a holder.
    cached: Lru,
    n_evicted: u64,
    /// What others call beginnings that end in named blocks.
    marks: Marks,
}

impl BlockPool {
    /// A pool of `n_total` free blocks.
    pub fn new(n_total: usize) -> Self {
        Self {
            refs: vec![0; n_total],
            free: (0..n_total as u32).rev().map(BlockId).collect(),
            names: vec![None; n_total],
            named: HashMap::new(),
            cached: Lru::new(n_total),
            n_evicted: 0,
            marks: Marks::default(),
        }
    }

    /// Blocks in all.
    pub fn n_total(&self) -> usize {
        self.refs.len()
    }

    /// Blocks that hold nothing.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks without a holder that may be found again.
    pub fn n_cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks that can be taken.
    pub fn n_available(&self) -> usize {
        self.n_free() + self.n_cached()
    }

    /// Blocks held by at least one sequence.
    pub fn n_referenced(&self) -> usize {
        self.n_total() - self.n_available()
    }

    /// Cached blocks that were given to something else, since the beginning.
    pub fn n_evicted(&self) -> u64 {
        self.n_evicted
    }

    /// Holders of one block.
    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.0 as usize]
    }

    /// Takes a block with one reference, a free one before the least recently released cached one.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop().or_else(|| self.evict())?;
        let refs = &mut self.refs[block.0 as usize];
        assert_eq!(*refs, 0, "an available block has no holder");
        *refs = 1;
        Some(block)
    }

    /// The block of that name, held or cached.
    pub fn find(&self, name: BlockHash) -> Option<BlockId> {
        self.named.get(&name).copied()
    }

    /// Names what a held block holds, for others to find. Of two blocks with the same content the first keeps the name.
    pub fn name(&mut self, block: BlockId, name: BlockHash) {
        assert!(self.refs(block) > 0, "only a holder knows what a block holds");
        if self.named.contains_key(&name) {
            return;
        }
        assert_eq!(self.names[block.0 as usize], None, "what a named block holds does not change");
        self.names[block.0 as usize] = Some(name);
        self.named.insert(name, block);
    }

    /// Takes a name away from the block that has it, if one has: nobody finds it any more.
    pub fn forget(&mut self, name: BlockHash) {
        let Some(block) = self.named.remove(&name) else { return };
        self.names[block.0 as usize] = None;
        self.marks.lost(block);
        if self.refs(block) == 0 {
            self.cached.remove(block);
            self.free.push(block);
        }
    }

    /// Whoever tells beginnings of prompts apart by names of their own calls the one so that ends with this block. Nothing happens
    /// if no block has the name.
    pub fn mark(&mut self, name: BlockHash, mark: u64) {
        if let Some(block) = self.find(name) {
            self.marks.tie(mark, block);
        }
    }

    /// Which marked beginnings can be found from now on and which not any more, since the last call.
    pub fn take_changes(&mut self) -> Vec<PrefixChange> {
        self.marks.take_changes()
    }

    /// All marked beginnings that can be found.
    pub fn marks(&self) -> Vec<u64> {
        self.marks.names().collect()
    }

    /// Adds a holder to a held or cached block: two sequences with the same prefix read the same block.
    pub fn share(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        if *refs == 0 {
            assert!(self.names[block.0 as usize].is_some(), "a free block holds nothing to share");
            self.cached.remove(block);
        }
        *refs += 1;
    }

    /// Gives one reference back. When the last one goes, a named block is cached and any other free.
    pub fn release(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs > 0, "a block is released once by each holder");
        *refs -= 1;
        match (*refs, self.names[block.0 as usize]) {
            (0, Some(_)) => self.cached.push(block),
            (0, None) => self.free.push(block),
            _ => {}
        }
    }

    fn evict(&mut self) -> Option<BlockId> {
        let block = self.cached.oldest()?;
        self.cached.remove(block);
        let name = self.names[block.0 as usize].take().expect("a cached block has a name");
        self.named.remove(&name);
        self.marks.lost(block);
        self.n_evicted += 1;
        Some(block)
    }

    /// Panics if a marked block has no name.
    pub(crate) fn check_marks(&self) {
        assert!(self.marks.blocks().all(|block| self.names[block.0 as usize].is_some()), "a marked block can be found");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u32) -> BlockHash {
        BlockHash::ROOT.then(&[n; 16])
    }

    #[test]
    fn a_freed_block_is_taken_again_before_a_fresh_one() {
        let mut pool = BlockPool::new(4);
        let first = pool.take().unwrap();
        pool.take().unwrap();
        pool.release(first);
        assert_eq!(pool.take(), Some(first));
    }

    #[test]
    fn a_shared_block_is_free_only_after_its_last_holder() {
        let mut pool = BlockPool::new(1);
        let block = pool.take().unwrap();
        pool.share(block);
        pool.release(block);
        assert_eq!((pool.n_free(), pool.refs(block)), (0, 1));
        pool.release(block);
        assert_eq!(pool.n_free(), 1);
    }

    #[test]
    fn an_empty_pool_gives_nothing() {
        let mut pool = BlockPool::new(1);
        assert!(pool.take().is_some());
        assert_eq!(pool.take(), None);
    }

    #[test]
    fn a_named_block_is_found_after_its_release_until_it_is_the_oldest_and_needed() {
        let mut pool = BlockPool::new(2);
        let blocks = [1, 2].map(|n| {
            let block = pool.take().unwrap();
            pool.name(block, name(n));
            block
        });
        blocks.into_iter().for_each(|block| pool.release(block));
        assert_eq!((pool.n_free(), pool.n_cached(), pool.n_available(), pool.n_referenced()), (0, 2, 2, 0));
        pool.share(blocks[0]);
        pool.release(blocks[0]);
        assert_eq!(pool.take(), Some(blocks[1]), "block 1 was used more recently");
        assert_eq!((pool.find(name(1)), pool.find(name(2)), pool.n_evicted()), (Some(blocks[0]), None, 1));
    }

    #[test]
    fn of_two_blocks_with_the_same_content_the_first_is_found() {
        let mut pool = BlockPool::new(2);
        let [first, second] = [pool.take().unwrap(), pool.take().unwrap()];
        pool.name(first, name(1));
        pool.name(second, name(1));
        pool.release(second);
        assert_eq!((pool.find(name(1)), pool.n_free()), (Some(first), 1));
    }

    #[test]
    fn a_mark_is_told_until_its_block_is_evicted_or_forgotten() {
        use PrefixChange::{Removed, Stored};
        let mut pool = BlockPool::new(2);
        for n in [1, 2] {
            let block = pool.take().unwrap();
            pool.name(block, name(n));
            pool.mark(name(n), n.into());
            pool.release(block);
        }
        pool.mark(name(3), 3);
        assert_eq!(pool.take_changes(), [Stored(1), Stored(2)]);
        pool.take();
        pool.forget(name(2));
        assert_eq!((pool.take_changes(), pool.marks()), (vec![Removed(1), Removed(2)], vec![]));
    }

    #[test]
    fn a_forgotten_block_is_free_at_once_or_when_it_is_released() {
        let mut pool = BlockPool::new(2);
        let [held, cached] = [1, 2].map(|n| {
            let block = pool.take().unwrap();
            pool.name(block, name(n));
            block
        });
        pool.release(cached);
        [1, 2, 3].into_iter().for_each(|n| pool.forget(name(n)));
        assert_eq!((pool.n_free(), pool.n_cached(), pool.n_evicted()), (1, 0, 0));
        pool.release(held);
        assert_eq!((pool.find(name(1)), pool.find(name(2)), pool.n_free()), (None, None, 2));
    }
}
