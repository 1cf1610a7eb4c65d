//! One sequence's list of KV blocks, in token order. It never frees by itself: blocks go back through the pool.

use super::{BLOCK_TOKENS, BlockId, BlockPool, blocks_for};

/// The blocks of one sequence: token `t` lies in block `t / 16` at offset `t % 16`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
}

/// The pool has too few available blocks; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoFreeBlock;

impl BlockTable {
    /// The blocks in token order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Tokens that fit the blocks held.
    pub fn capacity_tokens(&self) -> usize {
        self.blocks.len() * BLOCK_TOKENS
    }

    /// Takes blocks until `tokens` fit: all that are missing, or none.
    pub fn grow_to(&mut self, tokens: usize, pool: &mut BlockPool) -> Result<(), NoFreeBlock> {
        let missing = blocks_for(tokens).saturating_sub(self.blocks.len());
        if missing > pool.n_available() {
            return Err(NoFreeBlock);
        }
        self.blocks.extend((0..missing).map(|_| pool.take().expect("available blocks were counted above")));
        Ok(())
    }

    /// Takes blocks that already hold the beginning of the sequence; the table is empty.
    pub fn share(&mut self, blocks: &[BlockId], pool: &mut BlockPool) {
        assert!(self.blocks.is_empty(), "a prefix comes first");
        blocks.iter().for_each(|block| pool.share(*block));
        self.blocks.extend(blocks);
    }

    /// Takes a block that holds what one of its own would come to hold, and gives that one back.
    pub fn exchange(&mut self, idx: usize, block: BlockId, pool: &mut BlockPool) {
        pool.share(block);
        pool.release(std::mem::replace(&mut self.blocks[idx], block));
    }

    /// Takes a fresh block in the place of one that others hold, too, and gives that one back.
    pub fn renew(&mut self, idx: usize, pool: &mut BlockPool) -> Result<(), NoFreeBlock> {
        let fresh = pool.take().ok_or(NoFreeBlock)?;
        pool.release(std::mem::replace(&mut self.blocks[idx], fresh));
        Ok(())
    }

    /// Gives every block back.
    pub fn release(&mut self, pool: &mut BlockPool) {
        // From the end: the last-in-first-out pool hands the earliest block out first again, and of a cached prefix the
        // end, which fewer sequences share, is evicted first.
        while let Some(block) = self.blocks.pop() {
            pool.release(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growing_takes_all_missing_blocks_or_none() {
        let mut pool = BlockPool::new(2);
        let mut table = BlockTable::default();
        assert_eq!(table.grow_to(33, &mut pool), Err(NoFreeBlock));
        assert_eq!((table.blocks().len(), pool.n_free()), (0, 2));
        assert_eq!(table.grow_to(32, &mut pool), Ok(()));
        assert_eq!((table.capacity_tokens(), pool.n_free()), (32, 0));
        table.release(&mut pool);
        assert_eq!(pool.n_free(), 2);
    }

    #[test]
    fn who_exchanges_a_block_holds_the_other_one_instead() {
        let mut pool = BlockPool::new(3);
        let [mut one, mut other] = [(); 2].map(|()| BlockTable::default());
        one.grow_to(16, &mut pool).unwrap();
        other.grow_to(32, &mut pool).unwrap();
        let [given, kept] = [other.blocks()[0], other.blocks()[1]];
        other.exchange(0, one.blocks()[0], &mut pool);
        assert_eq!(other.blocks(), [one.blocks()[0], kept]);
        assert_eq!((pool.refs(one.blocks()[0]), pool.refs(given), pool.n_free()), (2, 0, 1));
        assert_eq!(other.renew(0, &mut pool), Ok(()));
        assert_eq!((other.blocks(), pool.refs(one.blocks()[0])), (&[given, kept][..], 1));
        assert_eq!(other.renew(0, &mut pool), Err(NoFreeBlock));
        assert_eq!(other.blocks(), [given, kept], "nothing was taken");
    }
}
