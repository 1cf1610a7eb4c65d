//! Blocks in the order in which they were put in; any of them can be taken out at once. A list through an array, so
//! that giving back thousands of blocks in one step allocates nothing.

use super::BlockId;

/// Not a block: the end of the list.
const END: u32 = u32::MAX;

/// The list.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Lru {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Link {
    older: u32,
    newer: u32,
}

impl Lru {
    /// An empty list of blocks `0..n_total`.
    pub(super) fn new(n_total: usize) -> Self {
        Self { links: vec![Link { older: END, newer: END }; n_total], oldest: END, newest: END, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<BlockId> {
        (self.oldest != END).then_some(BlockId(self.oldest))
    }

    /// Puts a block in that is not there.
    pub(super) fn push(&mut self, block: BlockId) {
        self.links[block.0 as usize] = Link { older: self.newest, newer: END };
        match self.newest {
            END => self.oldest = block.0,
            newest => self.links[newest as usize].newer = block.0,
        }
        self.newest = block.0;
        self.len += 1;
    }

    /// Takes a block out that is there.
    pub(super) fn remove(&mut self, block: BlockId) {
        let Link { older, newer } = self.links[block.0 as usize];
        match older {
            END => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            END => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.links[block.0 as usize] = Link { older: END, newer: END };
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(lru: &Lru) -> Vec<u32> {
        let mut rest = lru.clone();
        std::iter::from_fn(|| {
            let block = rest.oldest()?;
            rest.remove(block);
            Some(block.0)
        })
        .collect()
    }

    #[test]
    fn blocks_leave_oldest_first_and_from_anywhere() {
        let mut lru = Lru::new(5);
        [3, 0, 4, 1].into_iter().for_each(|block| lru.push(BlockId(block)));
        assert_eq!((order(&lru), lru.len()), (vec![3, 0, 4, 1], 4));
        lru.remove(BlockId(4));
        assert_eq!(order(&lru), [3, 0, 1]);
        lru.remove(BlockId(3));
        lru.remove(BlockId(1));
        lru.push(BlockId(3));
        assert_eq!(order(&lru), [0, 3]);
        [0, 3].into_iter().for_each(|block| lru.remove(BlockId(block)));
        assert_eq!((lru.oldest(), lru.len()), (None, 0));
    }
}
