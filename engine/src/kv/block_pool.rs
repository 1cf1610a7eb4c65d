//! The pool of KV blocks: hands out free ones, counts references, takes back what nobody holds.
//!
//! It never looks inside a block and never decides who should give one up; that is the scheduler's.

/// Index of a KV block.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct BlockId(pub u32);

/// Reference-counted blocks `0..n_total`.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockPool {
    refs: Vec<u32>,
    /// Last freed is first taken: memory that was touched before is used again before fresh memory is.
    free: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `n_total` free blocks.
    pub fn new(n_total: usize) -> Self {
        let free = (0..n_total as u32).rev().map(BlockId).collect();
        Self { refs: vec![0; n_total], free }
    }

    /// Blocks in all.
    pub fn n_total(&self) -> usize {
        self.refs.len()
    }

    /// Blocks nobody holds.
    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks held by at least one sequence.
    pub fn n_referenced(&self) -> usize {
        self.n_total() - self.n_free()
    }

    /// Holders of one block.
    pub fn refs(&self, block: BlockId) -> u32 {
        self.refs[block.0 as usize]
    }

    /// Takes a free block with one reference.
    pub fn take(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        let refs = &mut self.refs[block.0 as usize];
        assert_eq!(*refs, 0, "a free block has no holder");
        *refs = 1;
        Some(block)
    }

    /// Adds a holder to a block that is already held: two sequences with the same prefix read the same block.
    pub fn share(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs > 0, "only a held block can be shared");
        *refs += 1;
    }

    /// Gives one reference back; the block is free when the last one goes.
    pub fn release(&mut self, block: BlockId) {
        let refs = &mut self.refs[block.0 as usize];
        assert!(*refs > 0, "a block is released once by each holder");
        *refs -= 1;
        if *refs == 0 {
            self.free.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
